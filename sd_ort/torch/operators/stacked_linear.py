"""Linear layers of one input as one MatMul, if their weights are packed: `sd_ort::stacked_linear`.

torch's MatMul or `linear_add` runs it: the library has no kernel of this name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from sd_ort.torch.kernels import UnsupportedCall
from sd_ort.torch.operators.linear_add import linear
from sd_ort.torch.operators.registration import Operator

Tensor = torch.Tensor


def _fallback(x: Tensor, first: Tensor, second: Tensor, third: Tensor | None) -> Tensor:
    return torch.cat([F.linear(x, weight) for weight in (first, second, third) if weight is not None], dim=-1)


def packed_weight(weights: Sequence[Tensor]) -> Tensor | None:
    """Return packed weights (N_i, ...), row- or column-major, as one view (sum of N_i, ...); else None."""
    first = weights[0]
    storage, offset, strides = first.untyped_storage().data_ptr(), first.storage_offset(), first.stride()
    column_major = first.ndim == 2 and strides[0] == 1 and strides[1] >= sum(len(weight) for weight in weights)
    if not column_major and not first.is_contiguous():
        return None
    for weight in weights:
        if weight.untyped_storage().data_ptr() != storage or weight.storage_offset() != offset:
            return None
        if weight.stride() != strides or weight.dtype != first.dtype:
            return None
        offset += len(weight) * strides[0]
    return first.as_strided((sum(len(weight) for weight in weights), *first.shape[1:]), strides)


def _launch(x: Tensor, first: Tensor, second: Tensor, third: Tensor | None) -> Tensor:
    weight = packed_weight([weight for weight in (first, second, third) if weight is not None])
    if weight is None:
        raise UnsupportedCall("the weights are not packed")
    return linear(x, weight)


def _fake(x: Tensor, first: Tensor, second: Tensor, third: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], sum(w.shape[0] for w in (first, second, third) if w is not None)))


_OPERATOR = Operator(
    "stacked_linear", "(Tensor x, Tensor first, Tensor second, Tensor? third) -> Tensor", _fallback, _launch,
    fake=_fake, autocast="lower",
).define()  # fmt: skip


def stacked_linear(x: Tensor, first: Tensor, second: Tensor, third: Tensor | None = None) -> Tensor:
    """Return x (..., K) times each transposed weight (N_i, K), concatenated: (..., sum of N_i)."""
    return _OPERATOR(x, first, second, third)
