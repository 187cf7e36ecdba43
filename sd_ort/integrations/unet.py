"""Runner of a folder's UNet for applications, with ControlNet residuals."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from sd_ort.checkpoints.signatures import latent_multiple, residual_axes, size
from sd_ort.checkpoints.synthetic_inputs import pixels_per_latent
from sd_ort.core.errors import InputError
from sd_ort.integrations.denoiser import DenoiserRunner
from sd_ort.integrations.models import TorchComponentSessions
from sd_ort.integrations.tensors import Tensors

MIDDLE = "mid_block_additional_residual"


class UNetRunner(DenoiserRunner):
    """Computes the UNet's prediction in each step, with ControlNet residuals."""

    def __init__(self, models: TorchComponentSessions) -> None:
        super().__init__(models, "unet")
        self.last_graph = self.component
        self.residual_names = [n for n in models.inputs("unet") if n.startswith("down_block_res_sample_")]

    def __call__(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor | float,
        conditioning: Mapping[str, torch.Tensor],
        residuals: Sequence[torch.Tensor] = (),
        middle: torch.Tensor | None = None,
        key: Hashable = None,
    ) -> torch.Tensor:
        """Return the prediction (B, C, h, w) in the dtype and on the device of `sample`.

        Args:
            sample: scaled latents (B, C, h, w).
            timestep, conditioning, key: as in `predict`.
            residuals, middle: residuals of a ControlNet, outermost first, and of the middle block.

        Raises:
            InputError: if the graph takes no ControlNet, or an input of the graph is missing.
        """
        feed = {"sample": sample, **self._residual_inputs(sample, residuals, middle)}
        return self.predict(feed, timestep, conditioning, key)

    def _step_graph(self, latents: torch.Tensor) -> str:
        """Return the key of the UNet, or of its edited graph for latents that do not halve evenly at every level."""
        is_odd = any(side % latent_multiple(self.models.unet_config) for side in latents.shape[2:])
        graph = self._odd_sizes_graph if is_odd else self.component
        if graph != self.last_graph:
            self.models.torch_models.pop(self.last_graph, None)  # its session is closed to open the other
            self.last_graph = graph
        return graph

    @cached_property
    def _odd_sizes_graph(self) -> str:
        from sd_ort.pipelines.sampling import ODD_SIZES
        from sd_ort.pipelines.step_cache import apply_edits

        multiple = pixels_per_latent(self.models.folder) * latent_multiple(self.models.unet_config)
        return self.models.models.edit(self.component, ODD_SIZES[0], partial(apply_edits, [ODD_SIZES], multiple))

    def _residual_inputs(
        self, sample: torch.Tensor, residuals: Sequence[torch.Tensor], middle: torch.Tensor | None
    ) -> Tensors:
        if not self.residual_names:
            if residuals or middle is not None:
                raise InputError(
                    f"the UNet of {self.models.folder} takes no ControlNet: export it again with --controlnet."
                )
            return {}
        if not residuals:
            return self._zero_residuals(sample)
        if len(residuals) != len(self.residual_names):
            raise InputError(
                f"{len(residuals)} residuals of a ControlNet for {len(self.residual_names)} skip connections: "
                "it is for another model."
            )
        named = dict(zip(self.residual_names, residuals, strict=True))
        return {**named, MIDDLE: torch.zeros_like(residuals[-1]) if middle is None else middle}

    def _zero_residuals(self, sample: torch.Tensor) -> Tensors:
        """Return zeros for all residuals, as from a ControlNet with conditioning scale 0."""
        sizes = {"batch": len(sample), "height": sample.shape[2], "width": sample.shape[3]}
        axes = residual_axes(self.models.unet_config)
        dtype = self.models.dtype("unet")
        shapes = [[size(axis, sizes, round_up=True) for axis in each] for each in axes]
        zeros = [torch.zeros(shape, dtype=dtype, device=sample.device) for shape in shapes]
        return {**dict(zip(self.residual_names, zeros, strict=True)), MIDDLE: torch.zeros_like(zeros[-1])}


def reject_patches(options: Mapping[str, Any]) -> None:
    """Raise InputError for ComfyUI's or Forge's patches of layers (FreeU, IP-Adapter, ...), which are fused."""
    if patched := [name for key in ("patches", "patches_replace") for name in options.get(key, {})]:
        raise InputError(
            f"something changes the model's layers ({', '.join(patched)}), which are fused in sd-ort's graph: "
            "leave FreeU, IP-Adapter and the like out, or use the application's own model."
        )


def parse_residuals(
    x: torch.Tensor, control: Mapping[str, Sequence[Any]] | None
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Return ControlNet residuals from ComfyUI's and Forge's `control`: outermost first, and the middle one.

    Each is repeated to the batch size of x (B, C, h, w). Raises InputError for those of a T2I-Adapter.
    """
    if not control:
        return [], None
    if any(value is not None for value in control.get("input", ())):
        raise InputError("T2I-Adapters change the UNet's encoder, which is fused in sd-ort's graph: use a ControlNet.")

    def repeated(value: torch.Tensor) -> torch.Tensor:
        value = value.to(x.device)
        return value if len(value) == len(x) else value.repeat(-(-len(x) // len(value)), 1, 1, 1)[: len(x)]

    residuals = [None if value is None else repeated(value) for value in control.get("output", ())]
    if any(value is None for value in residuals):
        raise InputError("this ControlNet omits some of its residuals: sd-ort's graph needs all or none.")
    middle = next((repeated(value) for value in control.get("middle", ()) if value is not None), None)
    return [value for value in residuals if value is not None], middle
