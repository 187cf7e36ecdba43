"""Tensors of a checkpoint in one file under diffusers' names, each read when it is asked for.

diffusers' own mapping runs once, on tensors without numbers that remember what it does to them: renames, slices of a
packed matrix, transposes. A tensor is then read by doing the same to the numbers of those it was made of.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sd_ort.checkpoints.tensor_readers import Read


class Recorded(torch.Tensor):
    """A tensor on the meta device that knows how it was made: its name in the file, or a function and its arguments
    (and which of several results it is)."""

    made: str | tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], int | None]

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> Recorded:
        """The tensor `name` of a file, whose shape is that of `tensor`."""
        recorded = tensor.to("meta").as_subclass(Recorded)
        recorded.made = name
        return recorded

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Recorded):
            result.made = (func, args, kwargs or {}, None)
        elif isinstance(result, tuple | list):
            for place, each in enumerate(result):
                if isinstance(each, Recorded):
                    each.made = (func, args, kwargs or {}, place)
        return result


@dataclass(frozen=True)
class MappedFile:
    """A model in the file `path`: its tensors as they were recorded, by diffusers' names."""

    path: Path
    tensors: Mapping[str, Recorded]

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.path,)

    def has(self, name: str, stored: Container[str]) -> bool:
        return name in self.tensors

    def sources(self, name: str) -> list[str]:
        found: list[str] = []

        def visit(part: Any) -> None:
            if isinstance(part, Recorded):
                if isinstance(part.made, str):
                    found.append(part.made)
                else:
                    visit(part.made[1])
            elif isinstance(part, tuple | list):
                for each in part:
                    visit(each)

        visit(self.tensors[name])
        return found

    def make(self, name: str, read: Read) -> np.ndarray:
        recorded = self.tensors[name]
        if isinstance(recorded.made, str):
            return read(recorded.made)
        return _numbers(_again(recorded, read))


def _again(part: Any, read: Read) -> Any:
    """What was recorded, done to numbers."""
    if isinstance(part, Recorded):
        if isinstance(part.made, str):
            return _tensor(read(part.made))
        func, args, kwargs, place = part.made
        result = func(*_again(args, read), **kwargs)
        return result if place is None else result[place]
    return type(part)(_again(each, read) for each in part) if type(part) in (tuple, list) else part


def _tensor(numbers: np.ndarray) -> torch.Tensor:
    """Through bytes, since NumPy knows torch's narrow types only by the names of `ml_dtypes`."""
    flat = torch.from_numpy(numbers.reshape(-1).view(np.uint8))
    dtype: torch.dtype = getattr(torch, numbers.dtype.name)
    return flat.view(dtype).reshape(numbers.shape)


def _numbers(tensor: torch.Tensor) -> np.ndarray:
    import ml_dtypes

    name = str(tensor.dtype).removeprefix("torch.")
    dtype = np.dtype(getattr(np, name, None) or getattr(ml_dtypes, name))
    return tensor.reshape(-1).view(torch.uint8).numpy().view(dtype).reshape(tuple(tensor.shape))
