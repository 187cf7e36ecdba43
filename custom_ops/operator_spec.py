"""Python description of a custom operator: test cases, the ctypes structure of its Params, and a NumPy reference.

The module `cases` of an operator defines NAME, INPUTS, OUTPUTS, params(), output_shapes(), reference() and CASES, and
optionally FLOAT32_INPUTS, INTEGERS and generate_special_input().
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray
Shape = tuple[int, ...]

# custom_ops/common/op.h: enum DType
DTYPES: dict[str, tuple[int, np.dtype]] = {
    "float32": (0, np.dtype(np.float32)),
    "float16": (1, np.dtype(np.float16)),
    "bfloat16": (2, np.dtype(ml_dtypes.bfloat16)),
}


# Field types of Params.
INT32, INT64, FLOAT32, POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


def struct_fields(*groups: tuple[type, str]) -> list[tuple[str, type]]:
    """Return `_fields_` of a ctypes structure from groups of a type and space-separated names."""
    return [(name, type_) for type_, names in groups for name in names.split()]


FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
QUANTIZED = "quantized"  # the output that has another one in float8, divided by the attribute `quantized_scale`


class Float8Output(ctypes.Structure):
    """struct Float8Output of common/op.h."""

    _fields_ = struct_fields((POINTER, "data"), (FLOAT32, "scale"))


def float8_output(case: OperatorCase, address: Mapping[str, int]) -> Float8Output:
    """Return the Float8Output of a case; its data is null if the case does not request it."""
    return Float8Output(address.get(QUANTIZED), case.attributes.get("quantized_scale", 0.0))


def with_quantized(outputs: dict[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """Return `outputs`, and the first one in float8 if the node has a scale for it."""
    if "quantized_scale" not in attributes:
        return outputs
    scaled = next(iter(outputs.values())) / attributes["quantized_scale"]
    return outputs | {QUANTIZED: scaled.clip(-448, 448).astype(FLOAT8)}


def output_dtype(name: str, dtype: str) -> np.dtype:
    """Return the NumPy dtype of an output of a call in `dtype`."""
    return FLOAT8 if name == QUANTIZED else DTYPES[dtype][1]


@dataclass(frozen=True)
class OperatorCase:
    """One call of an operator.

    `inputs` has the shape of each present input; `outputs` names the requested outputs (default: all). `distribution`
    selects the values of the inputs (see `generate_inputs`). `benchmark` cases are shapes of Stable Diffusion that run
    on GPUs only. `float32_roundoffs` is the error limit in float32, for sums that accumulate in the output's dtype.
    `sum_nmse` is the NMSE of sums in the matrix units of 8 bits, which compute the outputs in 16 bits.
    """

    name: str
    inputs: dict[str, Shape]
    attributes: dict[str, int | float] = field(default_factory=dict)
    outputs: tuple[str, ...] | None = None
    distribution: str = "normal"
    benchmark: bool = False
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    float32_roundoffs: float = 4.0
    sum_nmse: float = 0.0


@dataclass(frozen=True)
class CustomOperator:
    """An operator for tests and benchmarks.

    `params(case, dtype, address)` fills the ctypes structure from a case and the addresses of inputs and outputs (0 if
    absent). `reference(inputs, attributes)` computes all outputs in float64. `float32_inputs` stay float32 if the data
    is float16 or bfloat16, as in ONNX Runtime's GPU kernels.
    """

    folder: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    float32_inputs: frozenset[str]
    cases: tuple[OperatorCase, ...]
    params: Callable[[OperatorCase, str, Mapping[str, int]], ctypes.Structure]
    output_shapes: Callable[[OperatorCase], dict[str, Shape]]
    reference: Callable[[Mapping[str, Array], Mapping[str, int | float]], dict[str, Array]]
    integers: Mapping[str, str] = field(default_factory=dict)
    generate_special_input: Callable[[OperatorCase, str, np.random.Generator], Array | None] | None = None


def load(folder: str) -> CustomOperator:
    """Return the operator of `custom_ops/operators/<folder>`."""
    cases = importlib.import_module(f"custom_ops.operators.{folder}.cases")
    return CustomOperator(
        folder=folder,
        name=cases.NAME,
        inputs=cases.INPUTS,
        outputs=cases.OUTPUTS,
        float32_inputs=frozenset(getattr(cases, "FLOAT32_INPUTS", ())),
        cases=tuple(cases.CASES),
        params=cases.params,
        output_shapes=cases.output_shapes,
        reference=cases.reference,
        integers=getattr(cases, "INTEGERS", {}),
        generate_special_input=getattr(cases, "generate_special_input", None),
    )


def generate_inputs(operator: CustomOperator, case: OperatorCase, dtype: str) -> dict[str, Array]:
    """Generate the inputs of a case, rounded to their dtypes.

    Distributions: "normal" N(0, 1); "large" magnitudes near the largest with finite outputs; "tiny" near the smallest
    normal numbers; "offset" N(1000, 1), where a naive variance cancels; "constant" all equal. An operator generates
    masks and integers in `generate_special_input(case, name, rng)`, which returns None for other inputs.
    """
    rng = np.random.default_rng(0)
    return {name: _generate_input(operator, case, name, shape, dtype, rng) for name, shape in case.inputs.items()}


def _generate_input(
    operator: CustomOperator, case: OperatorCase, name: str, shape: Shape, dtype: str, rng: np.random.Generator
) -> Array:
    target = DTYPES["float32" if name in operator.float32_inputs else dtype][1]
    if operator.generate_special_input is not None:
        special = operator.generate_special_input(case, name, rng)
        if special is not None:
            return special if name in operator.integers else special.astype(target)
    normal = rng.standard_normal(shape)
    if name in operator.float32_inputs:
        return normal.astype(target)
    largest = 1e4 if dtype == "float16" else 1e8
    smallest = 1e-4 if dtype == "float16" else 1e-8
    array = {
        "normal": normal,
        "large": normal.clip(-3, 3) * largest / 3,
        "tiny": normal * smallest,
        "offset": normal + 1000,
        "constant": np.full(shape, 3.0),
    }[case.distribution]
    return array.astype(target)


def nmse(actual: Array, expected: Array) -> float:
    """Return sum((actual - expected)^2) / sum(expected^2); infinite if `actual` has a NaN or Inf."""
    actual64, expected64 = actual.astype(np.float64), expected.astype(np.float64)
    if not np.isfinite(actual64).all():
        return float("inf")
    error = float(np.square(actual64 - expected64).sum())
    scale = float(np.square(expected64).sum())
    return error / scale if scale > 0 else error


# Unit roundoff of each dtype.
_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def nmse_limit(case: OperatorCase, dtype: str, output: str = "") -> float:
    """Return the NMSE limit: errors of 4 roundoffs of the dtype, in float32 of `float32_roundoffs`.

    Elements of float8 are at least a sixteenth apart, so a relative error e changes the share 16 e of them, each by an
    eighth at most: an NMSE of e / 4. Truncation in place of rounding would give 3e-3.

    For "offset" inputs, 1000 deviations from zero, a float32 mean has 1000 times the relative error.
    """
    roundoff = _ROUNDOFF[dtype]
    if case.distribution == "offset":
        roundoff = max(roundoff, 1000 * _ROUNDOFF["float32"])
    error = (case.float32_roundoffs if dtype == "float32" else 4) * roundoff
    if output == QUANTIZED:
        return max(error / 4, 2e-4)
    return error**2 if dtype == "float32" else max(error**2, case.sum_nmse)
