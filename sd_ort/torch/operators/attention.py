"""Multi-head attention on strided tensors without a copy: `sd_ort::attention`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from custom_ops.operators.multi_head_attention.cases import HeadsView, Params
from sd_ort.torch.kernels import DTYPE_CODES, GpuKernels, Kernels, is_hopper_or_newer, kernels_for
from sd_ort.torch.operators.registration import Operator, pointer, require, same_dtype

Tensor = torch.Tensor

MAX_SHORT_KEYS = 80  # of a prompt: what one of the kernels processes at once


def _fallback(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if k.shape[1] != q.shape[1]:  # not by enable_gqa, which most of torch's kernels reject with a mask
        k, v = (heads.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for heads in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, scale=scale)
    return y.transpose(1, 2).contiguous()


def _view(x: Tensor) -> HeadsView:
    return HeadsView(x.data_ptr(), x.stride(0), x.stride(1), x.stride(2))


def _launch(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool) -> Tensor:
    kernels = kernels_for(q, k, v, bias)
    require(same_dtype(q, k, v, bias), "arguments of different dtypes")
    require(q.ndim == k.ndim == v.ndim == 4 and k.shape == v.shape, "query, key or value of another shape")
    batch, sequence, heads, size = q.shape
    length, kv_heads = k.shape[1:3]
    require(k.shape == (batch, length, kv_heads, size), "query, key or value of another shape")
    require(heads == kv_heads or (kv_heads > 0 and heads % kv_heads == 0), "query, key or value of another shape")
    require(all(x.stride(-1) == 1 or x.numel() == 0 for x in (q, k, v)), "heads that are strided along the last axis")
    require(bias is None or not causal, "both a bias and causal")
    if not (length <= MAX_SHORT_KEYS and _is_tuned(kernels)):
        require(not _torch_is_faster(q, length, bias is not None or causal), "torch's attention is faster on this GPU")
    y = q.new_empty(q.shape)
    if y.numel() and length:
        bias_strides = (0, 0)
        if bias is not None:
            sizes = ({1, batch}, {1, heads}, {sequence}, {length})
            fits = bias.ndim == 4 and all(n in allowed for n, allowed in zip(bias.shape, sizes, strict=True))
            require(fits, "a bias of another shape")
            bias = bias.contiguous()
            bias_strides = (bias.stride(0) * (bias.shape[0] > 1), bias.stride(1) * (bias.shape[1] > 1))
        params = Params(
            DTYPE_CODES[q.dtype], _view(q), _view(k), _view(v), pointer(bias), pointer(y),
            batch, heads, kv_heads, sequence, length, size, *bias_strides, scale, int(causal),
        )  # fmt: skip
        kernels.run("MultiHeadAttention", params, q.device)
    return y if length else y.zero_()


def _is_tuned(kernels: Kernels) -> bool:
    """Return whether the tuner measures the sd_ort kernels and cuDNN's, so that no rule must choose."""
    return isinstance(kernels, GpuKernels) and kernels.is_tuning


def _torch_is_faster(q: Tensor, length: int, masked: bool) -> bool:
    """Return whether torch's attention (cuDNN) is faster, as measured on an H200 (results/ops_sm_90.md).

    It is not for small calls, and cuDNN does not support all head sizes and masks.
    """
    if q.device.type != "cuda" or q.dtype == torch.float32 or masked or q.shape[-1] > 256 or q.shape[-1] % 8:
        return False
    if not (is_hopper_or_newer(q.device) and torch.backends.cuda.cudnn_sdp_enabled()):
        return False
    return length >= 256 or q.shape[0] * q.shape[1] * q.shape[2] >= 40_000


_OPERATOR = Operator(
    "attention", "(Tensor q, Tensor k, Tensor v, Tensor? bias, float scale, bool causal) -> Tensor", _fallback, _launch,
    fake=lambda q, *_: q.new_empty(q.shape), autocast="lower",
).define()  # fmt: skip


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, scale: float | None = None, causal: bool = False
) -> Tensor:
    """Return softmax(scale q kT + bias) v for each head, (B, S, H, D) and contiguous.

    Shapes: q (B, S, H, D), k and v (B, L, H, D) or with a divisor of H heads (grouped queries), bias (B|1, H|1, S, L).
    The default scale is D^-1/2. If an argument
    requires gradients, torch's own attention runs, whose backward does not recompute the sums of the scores.
    """
    requires_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if requires_grad:
        return _fallback(q, k, v, bias, scale, causal)
    return _OPERATOR(q, k, v, bias, scale, causal)
