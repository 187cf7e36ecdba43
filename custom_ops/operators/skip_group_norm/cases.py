"""SkipGroupNorm: GroupNorm's kernels with a skip, so only the calls differ."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import QUANTIZED, Array, OperatorCase, Shape, with_quantized
from custom_ops.operators.group_norm.cases import SHAPES, group_norm, params

__all__ = ["CASES", "FLOAT32_INPUTS", "INPUTS", "NAME", "OUTPUTS", "output_shapes", "params"]

NAME = "SkipGroupNorm"
INPUTS = ("X", "gamma", "beta", "skip", "bias")
OUTPUTS = ("Y", "S", QUANTIZED)
FLOAT32_INPUTS = ("gamma", "beta")


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """All outputs have the shape of X."""
    return dict.fromkeys(case.outputs or ("Y", "S"), case.inputs["X"])


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X, skip (N, ..., C) or skip (N, C), (N, 1, 1, C); gamma, beta, bias (C) -> Y and S as X."""
    x, gamma, beta, skip = (inputs[name].astype(np.float64) for name in ("X", "gamma", "beta", "skip"))
    channels = 1 if attributes.get("channels_last", 1) == 0 else x.ndim - 1
    if skip.shape != x.shape:
        skip = skip.reshape([n if axis in (0, channels) else 1 for axis, n in enumerate(x.shape)])
    total = x + skip
    if "bias" in inputs:
        shape = [n if axis == channels else 1 for axis, n in enumerate(x.shape)]
        total = total + inputs["bias"].astype(np.float64).reshape(shape)
    return with_quantized({"Y": group_norm(total, gamma, beta, attributes), "S": total}, attributes)


def _case(
    shape: Shape,
    groups: int,
    activation: int = 1,
    skip: str = "full",
    bias: bool = True,
    total: bool = True,
    nchw: bool = False,
    distribution: str = "normal",
    benchmark: bool = False,
    quantized: bool = False,
) -> OperatorCase:
    """`shape` is channels last. `skip` is "full", "flat" (N, C) or "pixel" (N, 1, ..., C); `total` asks for S."""
    n, c = shape[0], shape[-1]
    pixel = (n, *(1 for _ in shape[1:-1]), c)
    attributes: dict[str, int | float] = {"groups": groups, "activation": activation, "epsilon": 1e-5}
    if nchw:
        shape, pixel = (n, c, *shape[1:-1]), (n, c, *pixel[1:-1])
        attributes["channels_last"] = 0
    inputs = {"X": shape, "gamma": (c,), "beta": (c,), "skip": {"full": shape, "flat": (n, c), "pixel": pixel}[skip]}
    if bias:
        inputs["bias"] = (c,)
    name = "x".join(map(str, shape)) + f"-g{groups}-a{activation}-{skip}-b{bias:d}-s{total:d}-{distribution}"
    name += "-nchw" if nchw else ""
    outputs = (QUANTIZED if quantized else "Y", *(("S",) if total else ()))
    if quantized:
        attributes["quantized_scale"] = 0.03125
        name += "-quantized"
    # V is rounded to the type before it is normalized: 2000 in half precision has no digits left for a deviation of 1
    dtypes = ("float32",) if distribution == "offset" else ("float32", "float16", "bfloat16")
    return OperatorCase(name, inputs, attributes, outputs, distribution, benchmark, dtypes)


_VARIANTS = (("full", True, True), ("full", False, True), ("flat", True, True), ("pixel", False, False))

CASES = [
    *(
        _case(shape, groups, index % 2, *_VARIANTS[(index + turn) % 4], nchw=nchw)
        for index, (shape, groups) in enumerate(SHAPES)
        for turn in (0, 1)
        for nchw in (False, True)
    ),
    *(_case((2, 9, 8, 64), 8, skip=skip, bias=bias, total=total) for skip, bias, total in _VARIANTS),
    *(_case((2, 9, 8, 64), 8, total=False, distribution=distribution) for distribution in ("large", "tiny", "offset")),
    *(_case((2, 9, 8, 64), 8, skip=skip, bias=bias, total=total, quantized=True) for skip, bias, total in _VARIANTS),
    # a skip that both reads take, by 1, 2 and 4 elements
    *(_case((2, 11, channels), 3, bias=False, total=False) for channels in (9, 30, 12)),
    *(_case((n, 64, 64, 320), 32, benchmark=True) for n in (2, 8, 16)),
    *(_case((n, 32, 32, 640), 32, skip="flat", benchmark=True) for n in (2, 8)),
    *(_case((n, 16, 16, 1280), 32, benchmark=True) for n in (2, 8)),
    _case((2, 128, 128, 320), 32, benchmark=True),
]
