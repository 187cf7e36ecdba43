"""Softmax of float32 scores, written in the type that a product reads: `sd_ort::softmax`."""

from __future__ import annotations

import torch

from custom_ops.softmax.cases import Params
from sd_ort.torch import kernels
from sd_ort.torch.operators.contract import Operator, pointer, require

Tensor = torch.Tensor


def _plain(scores: Tensor, dtype: torch.dtype) -> Tensor:
    return scores.softmax(-1).to(dtype)


def _launch(scores: Tensor, dtype: torch.dtype) -> Tensor:
    found = kernels.of(scores)
    require(scores.dtype == torch.float32, "scores that are not float32")
    require(dtype in kernels.NUMBERS and dtype in found.dtypes, "no kernel for that type")
    scores = scores.contiguous()
    weights = scores.new_empty(scores.shape, dtype=dtype)
    if weights.numel():
        columns = scores.shape[-1]
        rows = scores.numel() // columns
        params = Params(kernels.NUMBERS[dtype], pointer(scores), pointer(weights), rows, columns)
        found.run("Softmax", params, scores.device)
    return weights


_OPERATOR = Operator(
    name="softmax",
    schema="(Tensor scores, ScalarType dtype) -> Tensor",
    plain=_plain,
    launch=_launch,
    fake=lambda scores, dtype: scores.new_empty(scores.shape, dtype=dtype),
    autocast="float32",
).define()


def softmax(scores: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax over the last axis of scores (..., C), in `dtype` or their own. Kernels: GPUs, float32 scores."""
    return _OPERATOR(scores, dtype or scores.dtype)
