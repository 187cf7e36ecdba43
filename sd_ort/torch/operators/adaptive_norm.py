"""LayerNorm or RMS norm with a computed scale and shift, also of a gated sum: `adaptive_norm`, `skip_adaptive_norm`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from custom_ops.operators.adaptive_norm.cases import Params
from sd_ort.torch.kernels import DTYPE_CODES, kernels_for
from sd_ort.torch.operators.registration import Operator, pointer, require, same_dtype

Tensor = torch.Tensor


def _fallback(x: Tensor, scale: Tensor, shift: Tensor | None, epsilon: float, rms: bool) -> Tensor:
    normalize = F.rms_norm if rms else F.layer_norm
    y = normalize(x, x.shape[-1:], eps=epsilon) * scale
    return y if shift is None else y + shift


def _skip_fallback(
    x: Tensor, gate: Tensor | None, skip: Tensor, scale: Tensor, shift: Tensor | None, epsilon: float, rms: bool
) -> tuple[Tensor, Tensor]:
    total = skip + (x if gate is None else gate * x)
    return _fallback(total, scale, shift, epsilon, rms), total


def _rows_per_vector(x: Tensor, vector: Tensor) -> int:
    """Return the rows of x (B, ..., C) that a row of a vector (C) or (B, 1, ..., C) serves. Raises UnsupportedCall."""
    rows = x.numel() // x.shape[-1]
    if vector.numel() == vector.shape[-1] == x.shape[-1]:
        return max(rows, 1)
    image = (x.shape[0], *[1] * (x.ndim - 2), x.shape[-1])
    require(x.ndim > 1 and vector.shape == image, "a scale, shift or gate of another shape")
    return max(rows // max(x.shape[0], 1), 1)


def _run(
    x: Tensor, scale: Tensor, shift: Tensor | None, epsilon: float, rms: bool,
    gate: Tensor | None = None, skip: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    kernels = kernels_for(x, scale, shift, gate, skip)
    require(same_dtype(x, scale, shift, gate, skip), "arguments of different dtypes")
    require(x.ndim > 0 and x.shape[-1] > 0, "no channels")
    require(skip is None or skip.shape == x.shape, "skip of another shape")
    require(shift is None or shift.shape == scale.shape, "a scale, shift or gate of another shape")
    x, scale = x.contiguous(), scale.contiguous()
    shift, gate, skip = (None if tensor is None else tensor.contiguous() for tensor in (shift, gate, skip))
    y = torch.empty_like(x)
    total = None if skip is None else torch.empty_like(x)
    params = Params(
        dtype=DTYPE_CODES[x.dtype],
        x=pointer(x),
        scale=pointer(scale),
        shift=pointer(shift),
        gate=pointer(gate),
        skip=pointer(skip),
        y=pointer(y),
        sum=pointer(total),
        rows=x.numel() // x.shape[-1],
        channels=x.shape[-1],
        scale_rows=_rows_per_vector(x, scale),
        gate_rows=1 if gate is None else _rows_per_vector(x, gate),
        epsilon=epsilon,
        rms=int(rms),
    )
    if x.numel():
        kernels.run("AdaptiveNorm", params, x.device)
    return y, total


def _launch(x: Tensor, scale: Tensor, shift: Tensor | None, epsilon: float, rms: bool) -> Tensor:
    return _run(x, scale, shift, epsilon, rms)[0]


def _skip_launch(
    x: Tensor, gate: Tensor | None, skip: Tensor, scale: Tensor, shift: Tensor | None, epsilon: float, rms: bool
) -> tuple[Tensor, Tensor | None]:
    return _run(x, scale, shift, epsilon, rms, gate, skip)


_OPERATOR = Operator(
    "adaptive_norm", "(Tensor x, Tensor scale, Tensor? shift, float epsilon, bool rms) -> Tensor",
    _fallback, _launch, fake=lambda x, *_: x.new_empty(x.shape), autocast="float32",
).define()  # fmt: skip
_SKIP_OPERATOR = Operator(
    "skip_adaptive_norm",
    "(Tensor x, Tensor? gate, Tensor skip, Tensor scale, Tensor? shift, float epsilon, bool rms) -> (Tensor, Tensor)",
    _skip_fallback, _skip_launch, fake=lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)), autocast="float32",
).define()  # fmt: skip


def adaptive_norm(x: Tensor, scale: Tensor, shift: Tensor | None, epsilon: float, rms: bool = False) -> Tensor:
    """Return the norm of x (B, ..., C) over the last axis * scale + shift; these are (C) or (B, 1, ..., C)."""
    return _OPERATOR(x, scale, shift, epsilon, rms)


def skip_adaptive_norm(
    x: Tensor, gate: Tensor | None, skip: Tensor, scale: Tensor, shift: Tensor | None, epsilon: float, rms: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `adaptive_norm` of gate * x + skip, and that sum; skip as x, gate as scale or None for 1."""
    return _SKIP_OPERATOR(x, gate, skip, scale, shift, epsilon, rms)
