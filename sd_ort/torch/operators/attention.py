"""Attention of all heads, strided tensors read in place: `sd_ort::attention`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from custom_ops.multi_head_attention.cases import HeadsView, Params
from sd_ort.torch import kernels
from sd_ort.torch.operators.contract import Operator, one_dtype, pointer, require

Tensor = torch.Tensor

SHORT_KEYS = 80  # a prompt's: what one of our kernels holds at once


def _plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, scale=scale)
    return y.transpose(1, 2).contiguous()


def _view(x: Tensor) -> HeadsView:
    return HeadsView(x.data_ptr(), x.stride(0), x.stride(1), x.stride(2))


def _launch(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool) -> Tensor:
    found = kernels.of(q, k, v, bias)
    require(one_dtype(q, k, v, bias), "arguments of different types")
    require(q.ndim == k.ndim == v.ndim == 4 and k.shape == v.shape, "query, key or value of another shape")
    batch, sequence, heads, size = q.shape
    length = k.shape[1]
    require(k.shape == (batch, length, heads, size), "query, key or value of another shape")
    require(all(each.stride(-1) == 1 or each.numel() == 0 for each in (q, k, v)), "heads whose numbers lie apart")
    require(bias is None or not causal, "a mask and causal")
    if not (length <= SHORT_KEYS and _measures(found)):
        require(not _torch_is_faster(q, length, bias is not None or causal), "its attention is faster on this GPU")
    y = q.new_empty(q.shape)
    if y.numel() and length:
        bias_strides = (0, 0)
        if bias is not None:
            wanted = ({1, batch}, {1, heads}, {sequence}, {length})
            require(bias.ndim == 4 and all(n in w for n, w in zip(bias.shape, wanted, strict=True)), "another mask")
            bias = bias.contiguous()
            bias_strides = (bias.stride(0) * (bias.shape[0] > 1), bias.stride(1) * (bias.shape[1] > 1))
        params = Params(
            kernels.NUMBERS[q.dtype], _view(q), _view(k), _view(v), pointer(bias), pointer(y),
            batch, heads, sequence, length, size, *bias_strides, scale, int(causal),
        )  # fmt: skip
        found.run("MultiHeadAttention", params, q.device)
    return y if length else y.zero_()


def _measures(found: kernels.Kernels) -> bool:
    """Whether the tuner chooses among our kernels and cuDNN's, so that nothing need be known before."""
    return isinstance(found, kernels.GpuKernels) and found.tunes


def _torch_is_faster(q: Tensor, length: int, masked: bool) -> bool:
    """As measured on an H200 (results/ops_sm_90.md): cuDNN's, but for few numbers or heads it does not take."""
    if q.device.type != "cuda" or q.dtype == torch.float32 or masked or q.shape[-1] > 256 or q.shape[-1] % 8:
        return False
    if not (kernels.is_hopper_or_newer(q.device) and torch.backends.cuda.cudnn_sdp_enabled()):
        return False
    return length >= 256 or q.shape[0] * q.shape[1] * q.shape[2] >= 40_000


_OPERATOR = Operator(
    name="attention",
    schema="(Tensor q, Tensor k, Tensor v, Tensor? bias, float scale, bool causal) -> Tensor",
    plain=_plain,
    launch=_launch,
    fake=lambda q, *_: q.new_empty(q.shape),
    autocast="lower",
).define()


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, scale: float | None = None, causal: bool = False
) -> Tensor:
    """softmax(scale q kT + bias) v for each head: q (B, S, H, D), k and v (B, L, H, D), bias (B|1, H|1, S, L).

    The scale is D^-1/2 unless given. The result is (B, S, H, D), contiguous. Where gradients are wanted, torch's own
    attention runs, whose backward does not compute the scores' sums again.
    """
    wants_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if wants_gradient:
        return _plain(q, k, v, bias, scale, causal)
    return _OPERATOR(q, k, v, bias, scale, causal)
