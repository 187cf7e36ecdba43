"""Rotary position embedding of neighboring pairs: `sd_ort::rotary_embedding`."""

from __future__ import annotations

from functools import cache

import torch

from custom_ops.operators.rotary_embedding.cases import Params
from sd_ort.torch.kernels import DTYPE_CODES, kernels_for
from sd_ort.torch.operators.registration import Operator, pointer, require, same_dtype

Tensor = torch.Tensor


def _fallback(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, None], sin[:, None]
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)


@cache
def _first_position(device: torch.device) -> Tensor:
    """Return the position of the first token, which the kernel reads on the device."""
    return torch.zeros(1, dtype=torch.int64, device=device)


def _launch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    kernels = kernels_for(x, cos, sin)
    require(same_dtype(x, cos, sin), "arguments of different dtypes")
    require(x.ndim == 4, "x of other axes")
    batch, length, heads, size = x.shape
    require(size % 2 == 0 and cos.shape == sin.shape == (length, size // 2), "cos and sin of another shape")
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    y = torch.empty_like(x)
    params = Params(
        dtype=DTYPE_CODES[x.dtype],
        x=pointer(x),
        positions=pointer(_first_position(x.device)),
        cos=pointer(cos),
        sin=pointer(sin),
        y=pointer(y),
        batch=batch,
        length=length,
        heads=heads,
        pairs=size // 2,
        table_rows=length,
        interleaved=1,
    )
    if y.numel():
        kernels.run("RotaryEmbedding", params, x.device)
    return y


_OPERATOR = Operator(
    "rotary_embedding", "(Tensor x, Tensor cos, Tensor sin) -> Tensor", _fallback, _launch,
    fake=lambda x, *_: x.new_empty(x.shape), autocast="widest",
).define()  # fmt: skip


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (B, S, N, D) with the pairs (2i, 2i + 1) of each head turned by the angles of cos and sin (S, D / 2)."""
    return _OPERATOR(x, cos, sin)
