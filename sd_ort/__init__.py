"""Stable Diffusion through ONNX Runtime: export, fuse, run and measure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sd_ort.pipeline import StableDiffusionPipeline

__all__ = ["StableDiffusionPipeline"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in __all__:
        from sd_ort import pipeline

        return getattr(pipeline, name)
    raise AttributeError(f"module 'sd_ort' has no attribute {name!r}")
