"""Whole models whose calls are captured in CUDA graphs (graphs.py): a U-Net, a ControlNet."""

from __future__ import annotations

import copyreg
from functools import wraps
from typing import Any

import torch
from diffusers.models.controlnets.controlnet import ControlNetModel
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import nn

from sd_ort.torch import graphs

GRAPHS = "_sd_ort_graphs"  # a model's attribute


def _captured(original: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the same name: a configuration or a pipeline's index that is saved names diffusers' class."""

    @wraps(original.forward)
    def forward(self: nn.Module, sample: torch.Tensor, timestep: Any, *arguments: Any, **keywords: Any) -> Any:
        if torch.compiler.is_compiling() or not graphs.can_be_captured(sample.device):
            return original.forward(self, sample, timestep, *arguments, **keywords)
        timestep = _on_device(timestep, sample.device)
        held: graphs.Graphs = self.__dict__[GRAPHS]
        return held.call(original.forward, self, sample, timestep, *arguments, **keywords)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        made: Any = object.__reduce_ex__(self, protocol)
        return _new, (original,), *made[2:]

    names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(original.__name__, (original,), {**names, "forward": forward, "__reduce_ex__": reduce})


def _on_device(timestep: Any, device: torch.device) -> torch.Tensor:
    """A time step, which changes from call to call, as a tensor that a graph can read; types as diffusers has them."""
    if isinstance(timestep, torch.Tensor):
        return timestep.to(device)
    return torch.full((), timestep, dtype=torch.float64 if isinstance(timestep, float) else torch.int64, device=device)


def _new(original: type[nn.Module]) -> Any:
    return copyreg.__newobj__(CAPTURED[original])  # type: ignore[attr-defined]


# diffusers' class -> the one in its place
CAPTURED = {original: _captured(original) for original in (UNet2DConditionModel, ControlNetModel)}

MODELS = frozenset({*CAPTURED, *CAPTURED.values()})


def capture(model: nn.Module) -> None:
    """Puts the subclass in the place of a model's class, if it is one of these."""
    if type(model) in CAPTURED:
        model.__class__ = CAPTURED[type(model)]
        model.__dict__[GRAPHS] = graphs.Graphs()


def release(model: nn.Module) -> None:
    """The reverse; its graphs' memory is free."""
    if model.__dict__.pop(GRAPHS, None) is not None:
        model.__class__ = type(model).__mro__[1]
