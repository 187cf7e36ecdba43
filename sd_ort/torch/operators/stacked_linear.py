"""Several products of one input as one, where their weights lie side by side: `sd_ort::stacked_linear`.

torch's own product runs it: no kernel of the library.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sd_ort.torch.operators.contract import Operator, require

Tensor = torch.Tensor


def _plain(x: Tensor, first: Tensor, second: Tensor, third: Tensor | None) -> Tensor:
    return torch.cat([F.linear(x, weight) for weight in (first, second, third) if weight is not None], dim=-1)


def _launch(x: Tensor, first: Tensor, second: Tensor, third: Tensor | None) -> Tensor:
    weights = [weight for weight in (first, second, third) if weight is not None]
    offset = first.storage_offset()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        require(same and weight.is_contiguous() and weight.storage_offset() == offset, "the weights lie apart")
        offset += weight.numel()
    rows = sum(weight.shape[0] for weight in weights)
    return F.linear(x, first.as_strided((rows, first.shape[1]), (first.shape[1], 1)))


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
