"""UNets and ControlNets whose calls are captured in CUDA graphs (cuda_graphs.py)."""

from __future__ import annotations

import copyreg
from functools import wraps
from typing import Any

import torch
from diffusers.models.controlnets.controlnet import ControlNetModel
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import nn

from sd_ort.torch import cuda_graphs

GRAPHS = "_sd_ort_graphs"  # attribute of a model: its CudaGraphCache


def _capturing_subclass(original: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass whose calls are captured.

    It has the name of `original`, which configs and model_index.json files that are saved then contain.
    """

    @wraps(original.forward)
    def forward(self: nn.Module, sample: torch.Tensor, timestep: Any, *arguments: Any, **keywords: Any) -> Any:
        if torch.compiler.is_compiling() or not cuda_graphs.can_capture(sample.device):
            return original.forward(self, sample, timestep, *arguments, **keywords)
        timestep = _timestep_tensor(timestep, sample.device)
        graphs: cuda_graphs.CudaGraphCache = self.__dict__[GRAPHS]
        return graphs.call(original.forward, self, sample, timestep, *arguments, **keywords)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = object.__reduce_ex__(self, protocol)
        return _new_instance, (original,), *reduced[2:]

    names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(original.__name__, (original,), {**names, "forward": forward, "__reduce_ex__": reduce})


def _timestep_tensor(timestep: Any, device: torch.device) -> torch.Tensor:
    """Return the timestep, which changes between calls, as a tensor that a graph can read, of diffusers' dtypes."""
    if isinstance(timestep, torch.Tensor):
        return timestep.to(device)
    return torch.full((), timestep, dtype=torch.float64 if isinstance(timestep, float) else torch.int64, device=device)


def _new_instance(original: type[nn.Module]) -> Any:
    return copyreg.__newobj__(CAPTURING[original])  # type: ignore[attr-defined]


# diffusers' class -> the subclass that replaces it
CAPTURING = {original: _capturing_subclass(original) for original in (UNet2DConditionModel, ControlNetModel)}

MODELS = frozenset({*CAPTURING, *CAPTURING.values()})


def enable_capture(model: nn.Module) -> None:
    """Replace the class of a model by its capturing subclass, if it has one."""
    if type(model) in CAPTURING:
        model.__class__ = CAPTURING[type(model)]
        model.__dict__[GRAPHS] = cuda_graphs.CudaGraphCache()


def disable_capture(model: nn.Module) -> None:
    """Undo `enable_capture` and free the graphs."""
    if model.__dict__.pop(GRAPHS, None) is not None:
        model.__class__ = type(model).__mro__[1]
