"""What the Python side of an operator looks like: its cases, and its Params as the C code lays them out.

An operator's `cases` module defines NAME, INPUTS, OUTPUTS, PARAMETERS, params(), output_shapes() and CASES, its
`reference` module reference(); `load` gives both as one `Operator`. Imports only NumPy.
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


@dataclass(frozen=True)
class Case:
    """One call of an operator.

    `inputs` gives the shape of each input that is present; `outputs` names the outputs asked for (all by default).
    `values` says how the data inputs are drawn (see `draw`). `benchmark` cases are the shapes of Stable Diffusion
    whose speed is reported; too large for the CPU tests, they run on a GPU only. `float32_roundoffs` is the error
    allowed in float32, where sums of many products are kept in the output's own type.
    """

    name: str
    inputs: dict[str, Shape]
    attributes: dict[str, int | float] = field(default_factory=dict)
    outputs: tuple[str, ...] | None = None
    values: str = "normal"
    benchmark: bool = False
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    float32_roundoffs: float = 4.0


@dataclass(frozen=True)
class Operator:
    """An operator as tests and benchmarks see it.

    `params(case, dtype, address)` fills the operator's ctypes structure from a case and the address of each input and
    output (0 when absent). `reference(inputs, attributes)` computes all outputs in float64.
    `parameters` are the inputs that stay float32 when the data is float16 or bfloat16, as ORT's GPU kernels want them.
    """

    folder: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: frozenset[str]
    cases: tuple[Case, ...]
    params: Callable[[Case, str, Mapping[str, int]], ctypes.Structure]
    output_shapes: Callable[[Case], dict[str, Shape]]
    reference: Callable[[Mapping[str, Array], Mapping[str, int | float]], dict[str, Array]]
    integers: Mapping[str, str] = field(default_factory=dict)
    draw_special: Callable[[Case, str, np.random.Generator], Array | None] | None = None


def load(folder: str) -> Operator:
    """The operator of `custom_ops/operators/<folder>`."""
    cases = importlib.import_module(f"custom_ops.operators.{folder}.cases")
    reference = importlib.import_module(f"custom_ops.operators.{folder}.reference")
    return Operator(
        folder=folder,
        name=cases.NAME,
        inputs=cases.INPUTS,
        outputs=cases.OUTPUTS,
        parameters=frozenset(cases.PARAMETERS),
        cases=tuple(cases.CASES),
        params=cases.params,
        output_shapes=cases.output_shapes,
        reference=reference.reference,
        integers=getattr(cases, "INTEGERS", {}),
        draw_special=getattr(cases, "draw", None),
    )


def draw(operator: Operator, case: Case, dtype: str, seed: int = 0) -> dict[str, Array]:
    """Inputs of a case, in its dtypes; rounded to them before the reference sees them.

    values: "normal" N(0, 1); "large" magnitudes near the largest that keep every output finite; "tiny" near the
    smallest normal numbers; "offset" N(1000, 1), where a naive variance cancels; "constant" all equal. An operator
    draws inputs of its own kind (masks, integers) in its `draw(case, name, rng)`, which returns None for the others.
    """
    rng = np.random.default_rng(seed)
    return {name: _draw_one(operator, case, name, shape, dtype, rng) for name, shape in case.inputs.items()}


def _draw_one(operator: Operator, case: Case, name: str, shape: Shape, dtype: str, rng: np.random.Generator) -> Array:
    target = DTYPES["float32" if name in operator.parameters else dtype][1]
    if operator.draw_special is not None:
        special = operator.draw_special(case, name, rng)
        if special is not None:
            return special if name in operator.integers else special.astype(target)
    normal = rng.standard_normal(shape)
    if name in operator.parameters:
        return normal.astype(target)
    largest = 1e4 if dtype == "float16" else 1e8
    smallest = 1e-4 if dtype == "float16" else 1e-8
    values = {
        "normal": normal,
        "large": normal.clip(-3, 3) * largest / 3,
        "tiny": normal * smallest,
        "offset": normal + 1000,
        "constant": np.full(shape, 3.0),
    }[case.values]
    return values.astype(target)


def nmse(got: Array, wanted: Array) -> float:
    """Normalized mean square error, sum((got - wanted)^2) / sum(wanted^2); infinite when `got` has a NaN or Inf."""
    got64, wanted64 = got.astype(np.float64), wanted.astype(np.float64)
    if not np.isfinite(got64).all():
        return float("inf")
    error = float(np.square(got64 - wanted64).sum())
    scale = float(np.square(wanted64).sum())
    return error / scale if scale > 0 else error


# Unit roundoff of each type.
_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def nmse_limit(case: Case, dtype: str) -> float:
    """Largest NMSE allowed: errors of 4 roundoffs of the type, or as many as the case says.

    "offset" inputs lie 1000 deviations from zero, so a mean kept in float32 costs a normalized output 1000 times more.
    """
    roundoff = _ROUNDOFF[dtype]
    if case.values == "offset":
        roundoff = max(roundoff, 1000 * _ROUNDOFF["float32"])
    return ((case.float32_roundoffs if dtype == "float32" else 4) * roundoff) ** 2
