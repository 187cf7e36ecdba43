"""Params, NumPy reference, test cases and the benchmark shape (a VAE's attention) of Softmax."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import DTYPES, INT32, INT64, POINTER, Array, OperatorCase, Shape, struct_fields

NAME = "Softmax"
INPUTS = ("scores",)
OUTPUTS = ("weights",)
FLOAT32_INPUTS = ("scores",)  # float32 whatever the weights are


class Params(ctypes.Structure):
    """struct SoftmaxParams of op.h."""

    _fields_ = struct_fields((INT32, "dtype"), (POINTER, "scores weights"), (INT64, "rows columns"))


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> Params:
    """Return the Params of a case."""
    rows, columns = case.inputs["scores"]
    return Params(DTYPES[dtype][0], address["scores"], address["weights"], rows, columns)


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """weights has the shape of scores."""
    return {"weights": case.inputs["scores"]}


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """scores (rows, columns) -> weights (rows, columns) in float64, each row of sum 1."""
    scores = inputs["scores"].astype(np.float64)
    powers = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
    return {"weights": powers / powers.sum(-1, keepdims=True)}


def _case(rows: int, columns: int, distribution: str = "normal", benchmark: bool = False) -> OperatorCase:
    # A weight's relative error is the exponent's absolute one, and a sum's grows with its terms.
    return OperatorCase(
        f"{rows}x{columns}-{distribution}",
        {"scores": (rows, columns)},
        distribution=distribution,
        benchmark=benchmark,
        float32_roundoffs=16 + columns**0.5,
    )


CASES = [
    _case(1, 1),
    _case(3, 4),
    _case(2, 77),
    _case(5, 1023),
    _case(4, 1024),
    _case(3, 1028),
    _case(7, 4000),
    _case(2, 4104),
    _case(2, 4999),
    _case(1, 16385),
    _case(2, 16400),
    _case(0, 8),
    _case(4, 300, distribution="tiny"),
    _case(4096, 4096, benchmark=True),
]
