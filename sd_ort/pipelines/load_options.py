"""What `from_pretrained` shares among pipelines: its options, and opening the model that it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sd_ort.core.progress import announce, print_line
from sd_ort.model_cache import open_model
from sd_ort.pipelines.arguments import check_load_options
from sd_ort.pipelines.device_placement import DevicePlacement


@dataclass(frozen=True)
class LoadOptions:
    """The arguments of these names of `StableDiffusionPipeline.from_pretrained`, and `devices` of one image.

    `session`: its other keyword arguments, of the sessions and of diffusers.
    """

    low_memory: bool = False
    vae_tiling: bool = False
    vae_slicing: bool = False
    safety_checker: bool | None = True
    device_loop: bool | None = None
    graph: bool | None = None
    controlnet: Path | str | Sequence[Path | str] = ()
    devices: DevicePlacement = field(default_factory=DevicePlacement)
    session: Mapping[str, Any] = field(default_factory=dict)

    def check(self, provider: Any) -> None:
        """Raise InputError for an option of another type, or more threads than a machine has."""
        flags = ("low_memory", "vae_tiling", "vae_slicing", "safety_checker", "device_loop", "graph")
        check_load_options(provider, self.session.get("threads"), **{name: getattr(self, name) for name in flags})

    @property
    def controlnets(self) -> dict[str, Path]:
        """The folders of `controlnet` by component: controlnet, controlnet_2, ..."""
        nets = [self.controlnet] if isinstance(self.controlnet, (str, Path)) else self.controlnet
        return {f"controlnet_{i + 1}" if i else "controlnet": Path(net) for i, net in enumerate(nets)}


DEFAULT_OPTIONS = LoadOptions()


def open_announced(
    model: Path | str, provider: str, config: str | None, options: Mapping[str, Any]
) -> tuple[Path, str]:
    """Return `open_model`'s folder and the name of its provider; progress and an automatic choice go to stderr.

    options: other arguments of `from_pretrained`, among them diffusers' `torch_dtype` or `dtype`.
    """
    dtype = options.get("torch_dtype") or options.get("dtype")
    folder, choice = open_model(model, provider, dtype=dtype, config=config, on_progress=print_line)
    if choice.reason:
        announce(choice.line)
    return folder, choice.provider
