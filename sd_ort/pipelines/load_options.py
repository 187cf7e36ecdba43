"""Options with which a pipeline is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    def dtype(self) -> Any:
        """The dtype in which a checkpoint is optimized; None for the default."""
        return self.session.get("torch_dtype", self.session.get("dtype"))

    @property
    def controlnets(self) -> dict[str, Path]:
        """The folders of `controlnet` by component: controlnet, controlnet_2, ..."""
        nets = [self.controlnet] if isinstance(self.controlnet, (str, Path)) else self.controlnet
        return {f"controlnet_{i + 1}" if i else "controlnet": Path(net) for i, net in enumerate(nets)}


DEFAULT_OPTIONS = LoadOptions()
