"""Traces diffusers' single-file conversion once, and replays it for each tensor that is read.

diffusers converts meta tensors that record its operations: renaming, slicing a packed matrix, transposing. A tensor is
read by applying the same operations to the data of the stored tensors that it comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

from sd_ort.checkpoints.tensor_readers import Read


class TracedTensor(torch.Tensor):
    """A meta tensor that records the operation that produced it.

    origin: its name in the file; or function, arguments, keyword arguments and, of several results, its index.
    """

    origin: str | tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], int | None]

    @staticmethod
    def stored(name: str, tensor: torch.Tensor) -> TracedTensor:
        """Return the stored tensor `name`, with the shape of `tensor`."""
        traced = tensor.to("meta").as_subclass(TracedTensor)
        traced.origin = name
        return traced

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, TracedTensor):
            result.origin = (func, args, kwargs or {}, None)
        elif isinstance(result, tuple | list):
            for index, item in enumerate(result):
                if isinstance(item, TracedTensor):
                    item.origin = (func, args, kwargs or {}, index)
        return result


@dataclass(frozen=True)
class TracedTensorReader:
    """Reader of a model in a single file. `tensors`: diffusers name -> traced tensor."""

    paths: tuple[Path, ...]
    tensors: Mapping[str, TracedTensor]

    def has(self, name: str, stored: Container[str]) -> bool:
        return name in self.tensors

    def stored_names(self, name: str) -> list[str]:
        return list(_stored_names(self.tensors[name]))

    def load(self, name: str, read: Read) -> np.ndarray:
        traced = self.tensors[name]
        return read(traced.origin) if isinstance(traced.origin, str) else _to_numpy(_replay(traced, read))


def _stored_names(value: Any) -> Iterator[str]:
    """Yield the names of the stored tensors that an argument was computed from."""
    if isinstance(value, TracedTensor):
        if isinstance(value.origin, str):
            yield value.origin
        else:
            yield from _stored_names(value.origin[1])
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _stored_names(item)


def _replay(value: Any, read: Read) -> Any:
    """Return an argument with data in place of traced tensors."""
    if isinstance(value, TracedTensor):
        if isinstance(value.origin, str):
            return _to_torch(read(value.origin))
        func, args, kwargs, index = value.origin
        result = func(*_replay(args, read), **kwargs)
        return result if index is None else result[index]
    return type(value)(_replay(item, read) for item in value) if type(value) in (tuple, list) else value


def _to_torch(values: np.ndarray) -> torch.Tensor:
    """Convert through bytes: NumPy knows torch's narrow dtypes only as types of `ml_dtypes`."""
    data = torch.from_numpy(values.reshape(-1).view(np.uint8))
    dtype: torch.dtype = getattr(torch, values.dtype.name)
    return data.view(dtype).reshape(values.shape)


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    name = str(tensor.dtype).removeprefix("torch.")
    dtype = np.dtype(getattr(np, name, None) or getattr(ml_dtypes, name))
    return tensor.reshape(-1).view(torch.uint8).numpy().view(dtype).reshape(tuple(tensor.shape))
