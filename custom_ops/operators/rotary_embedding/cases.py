"""Params, NumPy reference, test cases and benchmark shapes of RotaryEmbedding."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import DTYPES, INT32, INT64, POINTER, Array, OperatorCase, Shape, struct_fields

NAME = "RotaryEmbedding"
INPUTS = ("X", "position_ids", "cos", "sin")
OUTPUTS = ("Y",)
INTEGERS = {"position_ids": "int64"}


class Params(ctypes.Structure):
    """struct RotaryEmbeddingParams of op.h."""

    _fields_ = struct_fields(
        (INT32, "dtype"),
        (POINTER, "x positions cos sin y"),
        (INT64, "batch length heads pairs table_rows"),
        (INT32, "interleaved"),
    )


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> Params:
    """Return the Params of a case."""
    batch, length, _ = case.inputs["X"]
    rows, pairs = case.inputs["cos"]
    return Params(
        dtype=DTYPES[dtype][0],
        x=address["X"],
        positions=address["position_ids"],
        cos=address["cos"],
        sin=address["sin"],
        y=address["Y"],
        batch=batch,
        length=length,
        heads=case.attributes["num_heads"],
        pairs=pairs,
        table_rows=rows,
        interleaved=case.attributes["interleaved"],
    )


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """Y has the shape of X."""
    return {"Y": case.inputs["X"]}


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (B, S, N * D), position_ids (1), cos and sin (L, D / 2) -> Y, as X."""
    x, first = inputs["X"].astype(np.float64), int(inputs["position_ids"][0])
    batch, length, width = x.shape
    cos, sin = (inputs[name][first : first + length, None].astype(np.float64) for name in ("cos", "sin"))
    heads = (batch, length, int(attributes["num_heads"]))
    order = (-1, 2) if attributes["interleaved"] else (2, -1)
    pairs = x.reshape(*heads, *order) if width else x.reshape(*heads, 0, 2)
    a, b = np.moveaxis(pairs, -1 if attributes["interleaved"] else -2, 0)
    turned = np.stack([a * cos - b * sin, a * sin + b * cos], -1 if attributes["interleaved"] else -2)
    return {"Y": turned.reshape(x.shape)}


def generate_special_input(case: OperatorCase, name: str, rng: np.random.Generator) -> Array | None:
    """Return the position of the first token, the last one for which the tables have all rows, or a table."""
    if name == "position_ids":
        return np.array([case.inputs["cos"][0] - case.inputs["X"][1]], np.int64)
    return None if name == "X" else rng.uniform(-1, 1, case.inputs[name])


def _case(
    batch: int, length: int, heads: int, size: int, interleaved: bool = True, rows: int = 0,
    distribution: str = "normal", benchmark: bool = False,
) -> OperatorCase:  # fmt: skip
    table = (rows or length, size // 2)
    inputs = {"X": (batch, length, heads * size), "position_ids": (1,), "cos": table, "sin": table}
    form = "neighbors" if interleaved else "halves"
    name = f"{batch}x{length}x{heads}x{size}-{form}-rows{table[0]}-{distribution}"
    attributes: dict[str, int | float] = {"num_heads": heads, "interleaved": int(interleaved)}
    return OperatorCase(name, inputs, attributes, distribution=distribution, benchmark=benchmark)


CASES = [
    *(_case(1, 1, 1, 2, interleaved) for interleaved in (True, False)),
    *(_case(2, 7, 3, 32, interleaved) for interleaved in (True, False)),
    *(_case(2, 5, 3, 14, interleaved, rows=9) for interleaved in (True, False)),
    *(_case(1, 33, 2, 128, interleaved, rows=40) for interleaved in (True, False)),
    *(_case(3, 4, 2, 40, interleaved) for interleaved in (True, False)),
    *(_case(2, 6, 3, 64, distribution=each) for each in ("large", "tiny")),
    _case(1, 4608, 24, 128, benchmark=True),
    _case(2, 4608, 24, 128, benchmark=True),
    _case(1, 512, 32, 128, interleaved=False, benchmark=True),
]
