"""Softmax of float32 scores, written in the dtype of the next MatMul: `sd_ort::softmax`."""

from __future__ import annotations

import torch

from custom_ops.operators.softmax.cases import Params
from sd_ort.torch.kernels import DTYPE_CODES, kernels_for
from sd_ort.torch.operators.registration import Operator, pointer, require

Tensor = torch.Tensor


def _fallback(scores: Tensor, dtype: torch.dtype) -> Tensor:
    return scores.softmax(-1).to(dtype)


def _launch(scores: Tensor, dtype: torch.dtype) -> Tensor:
    kernels = kernels_for(scores)
    require(scores.dtype == torch.float32, "scores that are not float32")
    require(dtype in DTYPE_CODES and dtype in kernels.dtypes, "no kernel for that dtype")
    scores = scores.contiguous()
    weights = scores.new_empty(scores.shape, dtype=dtype)
    if weights.numel():
        columns = scores.shape[-1]
        rows = scores.numel() // columns
        params = Params(DTYPE_CODES[dtype], pointer(scores), pointer(weights), rows, columns)
        kernels.run("Softmax", params, scores.device)
    return weights


_OPERATOR = Operator(
    "softmax", "(Tensor scores, ScalarType dtype) -> Tensor", _fallback, _launch,
    fake=lambda scores, dtype: scores.new_empty(scores.shape, dtype=dtype), autocast="float32",
).define()  # fmt: skip


def softmax(scores: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return softmax over the last axis of scores (..., C), in `dtype` or their own. Kernels: GPUs, float32 scores."""
    return _OPERATOR(scores, dtype or scores.dtype)
