"""Params, NumPy reference, test cases and benchmark shapes of RotaryQkv."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import DTYPES, FLOAT32, INT32, INT64, POINTER, Array, OperatorCase, Shape, struct_fields

NAME = "RotaryQkv"
INPUTS = ("qkv", "other", "q_scale", "k_scale", "other_q_scale", "other_k_scale", "cos", "sin")
OUTPUTS = ("Y",)


class Stream(ctypes.Structure):
    """struct RotaryQkvStream of op.h."""

    _fields_ = struct_fields((POINTER, "qkv q_scale k_scale"), (INT64, "length"))


class Params(ctypes.Structure):
    """struct RotaryQkvParams of op.h."""

    _fields_ = struct_fields(
        (INT32, "dtype"),
        (Stream, "first second"),
        (POINTER, "cos sin y"),
        (INT64, "batch heads pairs"),
        (FLOAT32, "epsilon"),
        (INT32, "interleaved"),
    )


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> Params:
    """Return the Params of a case."""
    batch, length, heads, _, size = case.inputs["qkv"]
    names = (("qkv", "q_scale", "k_scale"), ("other", "other_q_scale", "other_k_scale"))
    lengths = (length, case.inputs["other"][1] if "other" in case.inputs else 0)
    first, second = (
        Stream(*(address.get(name) for name in stream), length) for stream, length in zip(names, lengths, strict=True)
    )
    return Params(
        dtype=DTYPES[dtype][0],
        first=first,
        second=second,
        cos=address.get("cos"),
        sin=address.get("sin"),
        y=address["Y"],
        batch=batch,
        heads=heads,
        pairs=size // 2,
        epsilon=case.attributes["epsilon"],
        interleaved=case.attributes["interleaved"],
    )


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """Y has the tokens of both inputs."""
    batch, length, *rest = case.inputs["qkv"]
    return {"Y": (batch, length + case.inputs.get("other", (0, 0))[1], *rest)}


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """qkv (B, S, N, 3, H), other? (B, T, N, 3, H), scales? (H), cos?, sin? (S + T, H / 2) -> Y (B, S + T, N, 3, H)."""
    arrays = {name: array.astype(np.float64) for name, array in inputs.items()}
    streams = []
    for name, prefix in (("qkv", ""), ("other", "other_")):
        if name not in arrays:
            continue
        stream = arrays[name].copy()
        for part, scale in enumerate(("q_scale", "k_scale")):
            if prefix + scale in arrays:
                heads = stream[..., part, :]
                root = np.sqrt(np.square(heads).mean(-1, keepdims=True) + attributes["epsilon"])
                stream[..., part, :] = heads / root * arrays[prefix + scale]
        streams.append(stream)
    y = np.concatenate(streams, 1)
    if "cos" in arrays:
        cos, sin = (arrays[name][:, None, None] for name in ("cos", "sin"))
        half = y.shape[-1] // 2
        first, second = (
            (slice(0, None, 2), slice(1, None, 2)) if attributes["interleaved"] else (slice(half), slice(half, None))
        )
        a, b = y[..., :2, first].copy(), y[..., :2, second].copy()
        y[..., :2, first], y[..., :2, second] = a * cos - b * sin, a * sin + b * cos
    return {"Y": y}


def generate_special_input(case: OperatorCase, name: str, rng: np.random.Generator) -> Array | None:
    """Return cosines and sines."""
    return rng.uniform(-1, 1, case.inputs[name]) if name in ("cos", "sin") else None


def _case(
    batch: int, length: int, heads: int, size: int, other: int = 0, parts: str = "norm rotary",
    interleaved: bool = True, distribution: str = "normal", benchmark: bool = False,
) -> OperatorCase:  # fmt: skip
    """parts: of "norm" and "rotary"; "other_norm" normalizes the other stream alone."""
    inputs: dict[str, Shape] = {"qkv": (batch, length, heads, 3, size)}
    if other:
        inputs["other"] = (batch, other, heads, 3, size)
    words = parts.split()
    if "norm" in words:
        inputs |= {"q_scale": (size,), "k_scale": (size,)}
    if other and {"norm", "other_norm"} & set(words):
        inputs |= {"other_q_scale": (size,), "other_k_scale": (size,)}
    if "rotary" in words:
        inputs |= dict.fromkeys(("cos", "sin"), (length + other, size // 2))
    name = "-".join(
        (f"{batch}x{length}+{other}x{heads}x{size}", *words, *("halves",) * (not interleaved), distribution)
    )
    return OperatorCase(name, inputs, {"epsilon": 1e-6, "interleaved": int(interleaved)}, None, distribution, benchmark)


CASES = [
    _case(1, 1, 1, 2),
    *(_case(2, 5, 3, 32, 4, interleaved=interleaved) for interleaved in (True, False)),
    *(_case(1, 9, 2, 128, 3, interleaved=interleaved) for interleaved in (True, False)),
    *(_case(2, 7, 3, 14, 2, interleaved=interleaved) for interleaved in (True, False)),
    _case(2, 6, 2, 64, 5, "norm"),
    _case(2, 6, 2, 64, 5, "rotary"),
    _case(2, 6, 2, 64, 5, "other_norm rotary"),
    _case(2, 6, 2, 40, 5, ""),
    _case(3, 7, 5, 96),
    _case(2, 7, 5, 64, parts="norm"),
    *(_case(2, 5, 2, 64, 3, "norm", distribution=each) for each in ("large", "tiny")),
    *(_case(2, 5, 2, 64, 3, distribution=each) for each in ("offset", "constant")),
    _case(1, 512, 24, 128, 4096, benchmark=True),
    _case(1, 4608, 24, 128, benchmark=True),
    _case(2, 4096, 24, 64, 333, "norm", benchmark=True),
    _case(2, 4096, 24, 64, parts="norm", benchmark=True),
]
