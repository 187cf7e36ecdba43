"""Base of the `diffusion_model`s of UNets and diffusion transformers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from sd_ort.checkpoints.transformer_layouts import RowSlice
from sd_ort.integrations.denoiser import DenoiserRunner
from sd_ort.integrations.models import TorchComponentSessions


class PromptsOnSamplerDevice:
    """Mixin that moves the prompt's conditioning to the sampler's device once per image.

    ComfyUI leaves it on the CPU, where every step concatenates it for the batch, with all threads of torch, and copies
    it: 13 ms a step on the host of an H200 whose 32 cores were shared.
    """

    def extra_conds(self, **conditioning: Any) -> dict[str, Any]:
        """Return the conditioning inputs of one prompt on `device`, the sampler's."""
        conds: dict[str, Any] = super().extra_conds(**conditioning)  # type: ignore[misc]
        for each in conds.values():
            if isinstance(each.cond, torch.Tensor):
                each.cond = each.cond.to(conditioning["device"])
        return conds


def prompt_key(options: Mapping[str, Any], *more: Hashable) -> Hashable:
    """Return a cache key of the prompts of a batch, with `more` that inputs of the prompt graph depend on.

    None if ComfyUI's transformer_options do not tell which prompts these are.
    """
    uuids = options.get("uuids")
    return (tuple(uuids), tuple(options.get("cond_or_uncond", ())), *more) if uuids else None


class MetaWeights:
    """Mixin for modules with weights in a graph: ComfyUI reads names and shapes from `meta_weights`."""

    meta_weights: Mapping[str, torch.Tensor]

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return names and shapes (on torch's meta device) of the original model's weights."""
        destination = {} if destination is None else destination
        for name, tensor in self.meta_weights.items():
            destination[prefix + name] = tensor
        return destination


class GraphNet(MetaWeights, torch.nn.Module):
    """A `diffusion_model` that runs the graph of a folder's denoiser."""

    def __init__(
        self,
        models: TorchComponentSessions,
        runner: DenoiserRunner,
        parts: Mapping[str, Sequence[RowSlice]],
        weights: Mapping[str, torch.Tensor],
    ) -> None:
        """Take the runner's graph.

        Args:
            parts: ComfyUI's name of a weight -> its rows by their names in the weight recipes.
            weights: those of ComfyUI's own net, of which shapes are read. Names that are not in both are left out.
        """
        torch.nn.Module.__init__(self)  # without the layers of a net of ComfyUI's that a class is derived from too
        self.models, self.runner, self.component = models, runner, runner.component
        self.dtype = models.dtype(self.component)
        self.names = {f"diffusion_model.{name}": rows for name, rows in parts.items() if name in weights}
        self.meta_weights = {name: weights[name] for name in parts if name in weights}
