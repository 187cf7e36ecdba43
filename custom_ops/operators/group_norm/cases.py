"""Params, NumPy reference, test cases and benchmark shapes of GroupNorm."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from math import prod

import numpy as np

from custom_ops.operator_spec import (
    DTYPES,
    FLOAT32,
    INT32,
    INT64,
    POINTER,
    QUANTIZED,
    Array,
    Float8Output,
    OperatorCase,
    Shape,
    float8_output,
    struct_fields,
    with_quantized,
)

NAME = "GroupNorm"
INPUTS = ("X", "gamma", "beta")
OUTPUTS = ("Y", QUANTIZED)
FLOAT32_INPUTS = ("gamma", "beta")


class Params(ctypes.Structure):
    """struct GroupNormParams of op.h."""

    _fields_ = struct_fields(
        (INT32, "dtype affine_dtype"),
        (POINTER, "x skip bias gamma beta y sum"),
        (INT64, "batch spatial channels groups"),
        (INT32, "activation channels_last skip_broadcast"),
        (FLOAT32, "epsilon"),
        (Float8Output, "quantized"),
    )


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> Params:
    """Return the Params of a case."""
    shape = case.inputs["X"]
    channels_last = int(case.attributes.get("channels_last", 1))
    channels = shape[-1] if channels_last else shape[1]
    return Params(
        dtype=DTYPES[dtype][0],
        affine_dtype=DTYPES["float32"][0],
        x=address["X"],
        skip=address.get("skip"),
        bias=address.get("bias"),
        gamma=address["gamma"],
        beta=address["beta"],
        y=address.get("Y"),
        sum=address.get("S"),
        batch=shape[0],
        spatial=prod(shape[1:]) // channels,
        channels=channels,
        groups=case.attributes["groups"],
        activation=case.attributes["activation"],
        channels_last=channels_last,
        skip_broadcast=int("skip" in case.inputs and case.inputs["skip"] != shape),
        epsilon=case.attributes.get("epsilon", 1e-5),
        quantized=float8_output(case, address),
    )


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """Both outputs have the shape of X."""
    return dict.fromkeys(case.outputs or ("Y",), case.inputs["X"])


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (N, ..., C), or (N, C, ...) with channels_last 0; gamma, beta (C) -> Y as X."""
    x, gamma, beta = (inputs[name].astype(np.float64) for name in ("X", "gamma", "beta"))
    return with_quantized({"Y": group_norm(x, gamma, beta, attributes)}, attributes)


def group_norm(x: Array, gamma: Array, beta: Array, attributes: Mapping[str, int | float]) -> Array:
    """The normalization itself, all arguments float64."""
    if attributes.get("channels_last", 1):
        x = np.moveaxis(x, -1, 1)
    groups = int(attributes["groups"])
    grouped = x.reshape(x.shape[0], groups, -1)
    mean = grouped.mean(axis=2, keepdims=True)
    variance = grouped.var(axis=2, keepdims=True)
    normalized = ((grouped - mean) / np.sqrt(variance + attributes.get("epsilon", 1e-5))).reshape(x.shape)
    per_channel = (1, -1) + (1,) * (x.ndim - 2)
    y = normalized * gamma.reshape(per_channel) + beta.reshape(per_channel)
    if attributes["activation"]:
        y = y / (1 + np.exp(-y))
    return np.moveaxis(y, 1, -1) if attributes.get("channels_last", 1) else y


def _case(
    shape: Shape, groups: int, activation: int = 1, distribution: str = "normal", nchw: bool = False,
    quantized: tuple[str, ...] = (),
) -> OperatorCase:  # fmt: skip
    """`shape` is channels last; `nchw` moves the channels. `quantized`: the outputs, one of them in float8."""
    channels = shape[-1]
    attributes: dict[str, int | float] = {"groups": groups, "activation": activation, "epsilon": 1e-5}
    if nchw:
        shape = (shape[0], channels, *shape[1:-1])
        attributes["channels_last"] = 0
    name = "x".join(map(str, shape)) + f"-g{groups}-a{activation}-{distribution}" + ("-nchw" if nchw else "")
    if quantized:
        attributes["quantized_scale"] = 0.03125
        name += "-" + "-".join(quantized)
    inputs = {"X": shape, "gamma": (channels,), "beta": (channels,)}
    return OperatorCase(name, inputs, attributes, quantized or None, distribution)


def _benchmark(n: int, h: int, c: int) -> OperatorCase:
    case = _case((n, h, h, c), 32)
    return OperatorCase(case.name, case.inputs, case.attributes, benchmark=True)


# Shapes (N, H, W, C), groups: a group of one channel, of an odd number, of a prime; channels that no vector divides.
SHAPES: tuple[tuple[Shape, int], ...] = (
    ((1, 1, 2, 9), 3),
    ((2, 8, 8, 64), 32),
    ((1, 7, 11, 96), 32),
    ((2, 5, 3, 30), 3),
    ((3, 13, 1, 7), 7),
    ((1, 9, 9, 51), 3),
    ((2, 16, 16, 320), 32),
    ((1, 8, 8, 1280), 32),
    ((16, 4, 4, 40), 4),
    ((1, 33, 31, 128), 32),
    ((1, 77, 24), 8),
)

CASES = [
    *(_case(shape, groups, activation=index % 2) for index, (shape, groups) in enumerate(SHAPES)),
    *(_case(shape, groups, activation=1 - index % 2, nchw=True) for index, (shape, groups) in enumerate(SHAPES)),
    *(
        _case(shape, groups, 1 - index % 2, quantized=("Y", QUANTIZED) if index % 2 else (QUANTIZED,))
        for index, (shape, groups) in enumerate(SHAPES[1::3])
    ),
    _case((2, 9, 8, 64), 8, nchw=True, quantized=(QUANTIZED,)),
    *(_case((2, 9, 8, 64), 8, distribution=distribution) for distribution in ("large", "tiny", "offset", "constant")),
    *(
        _case((2, 9, 8, 64), 8, distribution=distribution, nchw=True)
        for distribution in ("large", "tiny", "offset", "constant")
    ),
    *(_benchmark(n, h, c) for n in (2, 8) for h, c in ((64, 320), (32, 640), (16, 1280), (8, 1280))),
    *(_benchmark(n, h, c) for n, h, c in ((16, 64, 320), (2, 64, 960), (2, 128, 320), (2, 64, 640), (8, 128, 320))),
    *(_benchmark(n, h, c) for n, h, c in ((1, 64, 512), (1, 128, 512), (1, 256, 256), (1, 512, 128))),
]
