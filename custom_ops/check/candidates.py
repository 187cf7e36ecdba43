"""Checks the GPU library's candidates against NumPy: every one on every case, between guard bytes.

The library is libsd_ort_cuda.so or libsd_ort_hip.so, or in tests an emulation of it on the host. No ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from custom_ops.check.memory import Guarded, Memory
from custom_ops.libraries import GpuLibrary
from custom_ops.operator_spec import DTYPES, Array, Case, Operator, draw, nmse, nmse_limit


@dataclass(frozen=True)
class Outcome:
    """One candidate on one case. `fault` is empty when it passed; `error` is its largest NMSE over the outputs."""

    operator: str
    case: str
    dtype: str
    candidate: str
    error: float
    limit: float
    fault: str


def check_case(
    library: GpuLibrary,
    memory: Memory,
    operator: Operator,
    case: Case,
    dtype: str,
    shift: int = 0,
    *,
    ours_only: bool = False,
    overwrites: bool = False,
) -> Iterator[Outcome]:
    """Runs every candidate that supports the call, on fresh outputs; `shift` elements off alignment.

    `ours_only` leaves out those that are a vendor's library alone. `overwrites`: the first output is given the first
    input's place.
    """
    arrays = draw(operator, case, dtype)
    wanted = operator.reference(arrays, case.attributes)
    shift_bytes = shift * DTYPES[dtype][1].itemsize
    inputs = {
        name: Guarded(memory, array, shift * array.dtype.itemsize if shift else 0) for name, array in arrays.items()
    }
    shapes = operator.output_shapes(case)
    number: int | None = None
    index = 0
    while number is None or index < library.c.sd_ort_candidate_count(number):
        outputs = {
            name: Guarded(memory, np.full(shape, np.nan, DTYPES[dtype][1]), shift_bytes)
            for name, shape in shapes.items()
        }
        if overwrites:
            outputs[operator.outputs[0]] = Guarded(memory, arrays[operator.inputs[0]], shift_bytes)
        address = {name: guarded.address for name, guarded in (inputs | outputs).items()}
        if overwrites:
            address[operator.inputs[0]] = address[operator.outputs[0]]
        params = operator.params(case, dtype, address)
        number = library.operator(operator.name, params) if number is None else number
        left_out = ours_only and is_vendors(library.candidates(number)[index])
        if not left_out and library.is_supported(number, index, params):
            size = library.workspace_bytes(number, index, params)
            workspace = Guarded(memory, np.full(size, 0xFF, np.uint8))
            name = library.candidates(number)[index]
            fault, error, limit = "", 0.0, nmse_limit(case, dtype)
            try:
                library.run(number, index, params, workspace.address)
                memory.synchronize()
                error, fault = _judge(inputs, arrays, outputs, wanted, workspace, limit)
            except RuntimeError as failure:
                fault = str(failure)
            yield Outcome(operator.name, case.name, dtype, name, error, limit, fault)
        index += 1


def is_vendors(candidate: str) -> bool:
    """Whether the candidate of this name runs no kernel of ours."""
    return candidate.startswith(("cudnn_", "blas_lt_"))


def _judge(
    inputs: dict[str, Guarded],
    arrays: dict[str, Array],
    outputs: dict[str, Guarded],
    wanted: dict[str, Array],
    workspace: Guarded,
    limit: float,
) -> tuple[float, str]:
    """The largest error, and what is wrong."""
    worst, fault = 0.0, ""
    for name, guarded in outputs.items():
        got, whole = guarded.read()
        error = nmse(got, wanted[name])
        worst = max(worst, error)
        if not whole:
            fault = f"{name}: wrote out of bounds"
        elif not error < limit:
            fault = f"{name}: NMSE {error:.2e}, allowed {limit:.2e}"
    for name, guarded in inputs.items():
        got, whole = guarded.read()
        if not whole or got.tobytes() != arrays[name].tobytes():
            fault = f"{name}: an input was overwritten"
    if not workspace.read()[1]:
        fault = "workspace: wrote out of bounds"
    return worst, fault
