"""GroupNorm: the calls that test it and the shapes that time it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from math import prod

from custom_ops.operator_spec import DTYPES, Case, Shape

NAME = "GroupNorm"
INPUTS = ("X", "gamma", "beta")
OUTPUTS = ("Y",)
PARAMETERS = ("gamma", "beta")


class Params(ctypes.Structure):
    """struct GroupNormParams of op.h."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("affine_dtype", ctypes.c_int32),
        ("x", ctypes.c_void_p),
        ("skip", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("gamma", ctypes.c_void_p),
        ("beta", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("sum", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("spatial", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("activation", ctypes.c_int32),
        ("channels_last", ctypes.c_int32),
        ("skip_broadcast", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
    )


def params(case: Case, dtype: str, address: Mapping[str, int]) -> Params:
    """The call's Params; `address` maps input and output names to device addresses, without the absent ones."""
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
        y=address["Y"],
        sum=address.get("S"),
        batch=shape[0],
        spatial=prod(shape[1:]) // channels,
        channels=channels,
        groups=case.attributes["groups"],
        activation=case.attributes["activation"],
        channels_last=channels_last,
        skip_broadcast=int("skip" in case.inputs and case.inputs["skip"] != shape),
        epsilon=case.attributes.get("epsilon", 1e-5),
    )


def output_shapes(case: Case) -> dict[str, Shape]:
    """Y has the shape of X."""
    return {"Y": case.inputs["X"]}


def _case(shape: Shape, groups: int, activation: int = 1, values: str = "normal", nchw: bool = False) -> Case:
    """`shape` is channels last; `nchw` moves the channels."""
    channels = shape[-1]
    attributes: dict[str, int | float] = {"groups": groups, "activation": activation, "epsilon": 1e-5}
    if nchw:
        shape = (shape[0], channels, *shape[1:-1])
        attributes["channels_last"] = 0
    name = "x".join(map(str, shape)) + f"-g{groups}-a{activation}-{values}" + ("-nchw" if nchw else "")
    return Case(name, {"X": shape, "gamma": (channels,), "beta": (channels,)}, attributes, values=values)


def _benchmark(n: int, h: int, c: int) -> Case:
    case = _case((n, h, h, c), 32)
    return Case(case.name, case.inputs, case.attributes, benchmark=True)


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
    *(_case((2, 9, 8, 64), 8, values=values) for values in ("large", "tiny", "offset", "constant")),
    *(_case((2, 9, 8, 64), 8, values=values, nchw=True) for values in ("large", "tiny", "offset", "constant")),
    *(_benchmark(n, h, c) for n in (2, 8) for h, c in ((64, 320), (32, 640), (16, 1280), (8, 1280))),
    *(_benchmark(n, h, c) for n, h, c in ((16, 64, 320), (2, 64, 960), (2, 128, 320), (2, 64, 640), (8, 128, 320))),
    *(_benchmark(n, h, c) for n, h, c in ((1, 64, 512), (1, 128, 512), (1, 256, 256), (1, 512, 128))),
]
