"""Several products of one input as one, where their weights lie side by side: `sd_ort::stacked_linear`.

torch's own product runs it: no kernel of the library.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from sd_ort.torch.kernels import Refused
from sd_ort.torch.operators.contract import Operator
from sd_ort.torch.operators.linear_add import product

Tensor = torch.Tensor


def _plain(x: Tensor, first: Tensor, second: Tensor, third: Tensor | None) -> Tensor:
    return torch.cat([F.linear(x, weight) for weight in (first, second, third) if weight is not None], dim=-1)


def side_by_side(weights: Sequence[Tensor]) -> Tensor | None:
    """Weights (N_i, ...) as one, (sum of N_i, ...), where they lie so in memory, by rows or by columns; else None."""
    first = weights[0]
    storage, offset, strides = first.untyped_storage().data_ptr(), first.storage_offset(), first.stride()
    by_columns = first.ndim == 2 and strides[0] == 1 and strides[1] >= sum(len(weight) for weight in weights)
    if not by_columns and not first.is_contiguous():
        return None
    for weight in weights:
        if weight.untyped_storage().data_ptr() != storage or weight.storage_offset() != offset:
            return None
        if weight.stride() != strides or weight.dtype != first.dtype:
            return None
        offset += len(weight) * strides[0]
    return first.as_strided((sum(len(weight) for weight in weights), *first.shape[1:]), strides)


def _launch(x: Tensor, first: Tensor, second: Tensor, third: Tensor | None) -> Tensor:
    weight = side_by_side([weight for weight in (first, second, third) if weight is not None])
    if weight is None:
        raise Refused("the weights lie apart")
    return product(x, weight)


def _fake(x: Tensor, first: Tensor, second: Tensor, third: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], sum(w.shape[0] for w in (first, second, third) if w is not None)))


_OPERATOR = Operator(
    name="stacked_linear",
    schema="(Tensor x, Tensor first, Tensor second, Tensor? third) -> Tensor",
    plain=_plain,
    launch=_launch,
    fake=_fake,
    autocast="lower",
).define()


def stacked_linear(x: Tensor, first: Tensor, second: Tensor, third: Tensor | None = None) -> Tensor:
    """x (..., K) times each weight (N_i, K) transposed, side by side: (..., sum of N_i)."""
    return _OPERATOR(x, first, second, third)
