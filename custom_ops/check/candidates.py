"""Comparison of GPU candidates with NumPy: every candidate on every case, with buffers between guard bytes.

The library is libsd_ort_cuda.so, libsd_ort_hip.so or, in tests, an emulation on the CPU. Needs no ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from custom_ops.check.memory import Guarded, Memory
from custom_ops.libraries import GpuLibrary
from custom_ops.operator_spec import (
    DTYPES,
    Array,
    CustomOperator,
    OperatorCase,
    generate_inputs,
    nmse,
    nmse_limit,
    output_dtype,
)


@dataclass(frozen=True)
class CandidateResult:
    """Result of one candidate on one case: `error` is the largest NMSE, `failure` is empty if it passed."""

    operator: str
    case: str
    dtype: str
    candidate: str
    error: float
    limit: float
    failure: str


def check_case(
    library: GpuLibrary,
    memory: Memory,
    operator: CustomOperator,
    case: OperatorCase,
    dtype: str,
    shift: int = 0,
    *,
    skip_vendor_libraries: bool = False,
    alias_output: bool = False,
) -> Iterator[CandidateResult]:
    """Run every candidate that supports the call on new outputs.

    `shift` moves all buffers by this many elements off their alignment. `skip_vendor_libraries` skips candidates that
    run no kernel of sd-ort. `alias_output` places output 0 in the memory of input 0.
    """
    arrays = generate_inputs(operator, case, dtype)
    expected = operator.reference(arrays, case.attributes)
    shift_bytes = shift * DTYPES[dtype][1].itemsize
    inputs = {
        name: Guarded(memory, array, shift * array.dtype.itemsize if shift else 0) for name, array in arrays.items()
    }
    shapes = operator.output_shapes(case)
    op_index: int | None = None
    index = 0
    while op_index is None or index < library.c.sd_ort_candidate_count(op_index):
        outputs = {
            name: Guarded(memory, np.full(shape, np.nan, output_dtype(name, dtype)), shift_bytes)
            for name, shape in shapes.items()
        }
        if alias_output:
            outputs[operator.outputs[0]] = Guarded(memory, arrays[operator.inputs[0]], shift_bytes)
        address = {name: guarded.address for name, guarded in (inputs | outputs).items()}
        if alias_output:
            address[operator.inputs[0]] = address[operator.outputs[0]]
        params = operator.params(case, dtype, address)
        op_index = library.operator(operator.name, params) if op_index is None else op_index
        skipped = skip_vendor_libraries and is_vendor_library(library.candidates(op_index)[index])
        if not skipped and library.is_supported(op_index, index, params):
            size = library.workspace_bytes(op_index, index, params)
            workspace = Guarded(memory, np.full(size, 0xFF, np.uint8))
            name = library.candidates(op_index)[index]
            failure, error, limits = "", 0.0, {output: nmse_limit(case, dtype, output) for output in outputs}
            try:
                library.run(op_index, index, params, workspace.address)
                memory.synchronize()
                error, failure = _compare(inputs, arrays, outputs, expected, workspace, limits)
            except RuntimeError as raised:
                failure = str(raised)
            yield CandidateResult(operator.name, case.name, dtype, name, error, max(limits.values()), failure)
        index += 1


def is_vendor_library(candidate: str) -> bool:
    """Return whether the candidate runs no kernel of sd-ort."""
    return candidate.startswith(("cudnn_", "blas_lt_"))


def _compare(
    inputs: dict[str, Guarded],
    arrays: dict[str, Array],
    outputs: dict[str, Guarded],
    expected: dict[str, Array],
    workspace: Guarded,
    limits: dict[str, float],
) -> tuple[float, str]:
    """Return the largest NMSE and the failure, "" if there is none."""
    largest, failure = 0.0, ""
    for name, guarded in outputs.items():
        actual, intact = guarded.read()
        error = nmse(actual, expected[name])
        largest = max(largest, error)
        if not intact:
            failure = f"{name}: wrote out of bounds"
        elif not error < limits[name]:
            failure = f"{name}: NMSE {error:.2e}, allowed {limits[name]:.2e}"
    for name, guarded in inputs.items():
        actual, intact = guarded.read()
        if not intact or actual.tobytes() != arrays[name].tobytes():
            failure = f"{name}: an input was overwritten"
    if not workspace.read()[1]:
        failure = "workspace: wrote out of bounds"
    return largest, failure
