"""Data classes of serving: one image to generate, the settings that a batch shares, and a replica's model."""

from __future__ import annotations

from dataclasses import dataclass

from sd_ort.core.errors import SdOrtError


@dataclass(frozen=True)
class BatchSettings:
    """Settings that all images of a batch share.

    width, height: in pixels; None for the model's default. steps: denoising steps. guidance: guidance scale. loras:
    name and scale of each LoRA of the server; () for their default scales. variant: which of the server's pipelines;
    "" for the one that it serves.
    """

    width: int | None
    height: int | None
    steps: int
    guidance: float
    loras: tuple[tuple[str, float], ...] = ()
    variant: str = ""


@dataclass(frozen=True)
class ImageJob:
    """One image to generate. Its own seed makes it independent of the other images of its batch."""

    prompt: str
    negative: str
    seed: int
    settings: BatchSettings

    def png_text(self) -> dict[str, str]:
        """Return the prompts and settings that the PNG file stores as text."""
        settings = self.settings
        sizes = {"width": settings.width, "height": settings.height}
        return {
            "prompt": self.prompt,
            "negative_prompt": self.negative,
            "steps": str(settings.steps),
            "guidance": str(settings.guidance),
            "seed": str(self.seed),
            **({"loras": ", ".join(f"{name}:{scale:g}" for name, scale in settings.loras)} if settings.loras else {}),
            **({"variant": settings.variant} if settings.variant else {}),
            **{name: str(pixels) for name, pixels in sizes.items() if pixels},
        }


@dataclass(frozen=True)
class ModelInfo:
    """Report of a replica about its model.

    default_size: width and height of an image in pixels. size_multiple: width and height must be multiples of it.
    steps, guidance: default denoising steps and guidance scale.
    train_timesteps: the maximum number of steps. pid: the replica's process.
    loras: name and default scale of each LoRA. variants: names of pipelines to compare with.
    """

    default_size: int
    size_multiple: int
    steps: int
    guidance: float
    train_timesteps: int
    pid: int = 0
    loras: tuple[tuple[str, float], ...] = ()
    variants: tuple[str, ...] = ()


class ReplicaDied(Exception):
    """The process of a replica ended or does not answer. Another replica can generate its images."""


class GenerationFailed(SdOrtError):
    """An image that no replica could generate; the message says why."""
