"""SwiGLU after its MatMuls: `sd_ort::swiglu`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from custom_ops.operators.swiglu.cases import Params
from sd_ort.torch.kernels import DTYPE_CODES, kernels_for
from sd_ort.torch.operators.registration import Operator, pointer, require, same_dtype

Tensor = torch.Tensor


def _fallback(gate: Tensor, up: Tensor | None) -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return F.silu(gate) * up


def _shape(gate: Tensor, up: Tensor | None) -> tuple[int, ...]:
    return tuple(gate.shape) if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2)


def _launch(gate: Tensor, up: Tensor | None) -> Tensor:
    kernels = kernels_for(gate, up)
    require(same_dtype(gate, up), "arguments of different dtypes")
    require(up is None or up.shape == gate.shape, "up of another shape")
    require(up is not None or gate.shape[-1] % 2 == 0, "an odd number of columns")
    gate = gate.contiguous()
    y = gate.new_empty(_shape(gate, up))
    if y.numel():
        columns = y.shape[-1]
        up = gate[..., columns:] if up is None else up.contiguous()
        rows, stride = y.numel() // columns, gate.shape[-1]
        params = Params(DTYPE_CODES[y.dtype], pointer(gate), pointer(up), pointer(y), rows, columns, stride)
        kernels.run("SwiGlu", params, y.device)
    return y


_OPERATOR = Operator(
    "swiglu", "(Tensor gate, Tensor? up) -> Tensor", _fallback, _launch,
    fake=lambda gate, up: gate.new_empty(_shape(gate, up)), autocast="widest",
).define()  # fmt: skip


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up, both (..., C); without up the halves of gate (..., 2 C) along the last axis."""
    return _OPERATOR(gate, up)
