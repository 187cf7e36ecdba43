"""torch expressions that compute the same as the custom operators, to measure against."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from custom_ops.operator_spec import OperatorCase

ATTENTION = "multi_head_attention"
Tensors = dict[str, torch.Tensor]


# ---- torch


def group_norm(t: Tensors, case: OperatorCase) -> torch.Tensor:
    x = t["X"].permute(0, 3, 1, 2)  # channels last, in which torch runs a UNet fastest
    y = F.silu(F.group_norm(x, int(case.attributes["groups"]), t["gamma"], t["beta"], 1e-5))
    return y.permute(0, 2, 3, 1)


def skip_group_norm(t: Tensors, case: OperatorCase) -> tuple[torch.Tensor, torch.Tensor]:
    skip = t["skip"] if t["skip"].ndim == 4 else t["skip"][:, None, None, :]
    total = t["X"] + skip
    if "bias" in t:
        total = total + t["bias"]
    return group_norm({**t, "X": total}, case), total


def bias_split_gelu(t: Tensors, case: OperatorCase) -> torch.Tensor:
    left, right = (t["X"] + t["bias"]).chunk(2, -1)
    return left * F.gelu(right)


def bias_add(t: Tensors, case: OperatorCase) -> torch.Tensor:
    return t["X"] + t["bias"] + t["skip"]


def skip_layer_norm(t: Tensors, case: OperatorCase) -> tuple[torch.Tensor, torch.Tensor]:
    total = t["input"] + t["skip"] + t["bias"]
    return F.layer_norm(total, total.shape[-1:], t["gamma"], t["beta"], 1e-5), total


def upsample_nearest(t: Tensors, case: OperatorCase) -> torch.Tensor:
    scales = (float(case.attributes["scale_height"]), float(case.attributes["scale_width"]))
    return F.interpolate(t["X"].permute(0, 3, 1, 2), scale_factor=scales, mode="nearest").permute(0, 2, 3, 1)


def subpixel_shuffle(t: Tensors, case: OperatorCase) -> torch.Tensor:
    batch, height, width, channels = case.inputs["X"]
    phases = t["X"].unflatten(3, (2, 2, channels // 4))
    y = phases.new_empty(batch, height - 1, 2, width - 1, 2, channels // 4)
    for p, q in ((0, 0), (0, 1), (1, 0), (1, 1)):
        y[:, :, p, :, q] = phases[:, p : p + height - 1, q : q + width - 1, p, q]
    return y.flatten(3, 4).flatten(1, 2) + t["bias"]


def attention(t: Tensors, case: OperatorCase) -> torch.Tensor:
    heads = int(case.attributes["num_heads"])
    query, keys = t["query"], t.get("key")
    if query.ndim == 5:
        qkv = query.unbind(3)
    elif keys is not None and keys.ndim == 5:
        qkv = (query.unflatten(2, (heads, -1)), *keys.unbind(3))
    else:
        qkv = tuple(t[name].unflatten(2, (heads, -1)) for name in ("query", "key", "value"))
    q, k, v = (x.transpose(1, 2) for x in qkv)
    causal = bool(case.attributes.get("unidirectional", 0))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


def product(t: Tensors, case: OperatorCase) -> torch.Tensor:
    if t["W"].ndim == 4:
        x, filters = t["X"].permute(0, 3, 1, 2), t["W"].permute(0, 3, 1, 2)
        return F.conv2d(x, filters, t["B"], padding=1).permute(0, 2, 3, 1) + t.get("skip", 0)
    return F.linear(t["X"], t["W"], t["bias"]) + t.get("skip", 0)


TORCH: dict[str, Callable[[Tensors, OperatorCase], object]] = {
    "group_norm": group_norm,
    "skip_group_norm": skip_group_norm,
    "bias_split_gelu": bias_split_gelu,
    "bias_add": bias_add,
    "skip_layer_norm": skip_layer_norm,
    "upsample_nearest": upsample_nearest,
    "subpixel_shuffle": subpixel_shuffle,
    "quantized_nhwc_conv": product,
    "quantized_linear": product,
    ATTENTION: attention,
}
