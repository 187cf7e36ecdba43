"""What the built libsd_ort_hip.so launches for each call: its own host code asked, with no GPU.

launch_recorder.cc stands in for the HIP runtime, and every candidate of every operator runs every case that it takes,
on addresses that only say which tensor they belong to. So kernels.json tells more than how a kernel may be launched: it
has, for each case, the launches that the library makes, number by number. The vendor's BLAS library would launch on a
real device, at these addresses: none is found meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from custom_ops import GPU_OPERATORS
from custom_ops.libraries import GpuLibrary
from custom_ops.op import Case, Operator, load

RECORDER = Path(__file__).resolve().parent / "launch_recorder.cc"

# Tensor n lies at n << 40: the name and the offset can be read off an address, and every address is aligned.
_SHIFT = 40

_C_TYPES: dict[str, type[ctypes._SimpleCData]] = {
    "int32": ctypes.c_int32,
    "uint32": ctypes.c_uint32,
    "int64": ctypes.c_int64,
    "float": ctypes.c_float,
}

# launch_recorder.cc: Report
_Report = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint32), ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)
)


def case_entries() -> dict[str, dict[str, dict]]:
    """The cases by operator and name: shapes, attributes, types, and how their inputs are drawn."""
    return {
        operator.name: {case.name: _case_entry(operator, case) for case in operator.cases}
        for operator in map(load, GPU_OPERATORS)
    }


def _case_entry(operator: Operator, case: Case) -> dict:
    return {
        "inputs": case.inputs,
        "attributes": case.attributes,
        "outputs": operator.output_shapes(case),
        "dtypes": case.dtypes,
        "float32_tensors": sorted(operator.parameters),
        "values": case.values,
        "benchmark": case.benchmark,
    }


def record(library: Path, arguments_of: Mapping[str, list[dict]]) -> list[dict]:
    """The entries `calls` of kernels.json. `arguments_of` gives each symbol's entries `arguments` there.

    Loads the recorder for good: launches of this process go nowhere afterwards. Raises FileNotFoundError without a C++
    compiler, RuntimeError when the library refuses a call that it says it supports.
    """
    os.environ["SD_ORT_WITHOUT_BLAS"] = "1"  # common/blas_lt.h
    launches: list[dict] = []
    names: list[str] = []

    def report(symbol: bytes, sizes: Sequence[int], lds_bytes: int, arguments: Sequence[int]) -> None:
        launch = {"symbol": symbol.decode(), "grid": sizes[:3], "block": sizes[3:6], "dynamic_lds_bytes": lds_bytes}
        launches.append(launch | {"arguments": _arguments(arguments_of[symbol.decode()], names, arguments)})

    callback = _Report(report)
    _load_recorder().report_launches_to(callback)
    gpu = GpuLibrary(library)
    calls = []
    for operator in map(load, GPU_OPERATORS):
        for case in operator.cases:
            for dtype in case.dtypes:
                names[:] = [*case.inputs, *operator.output_shapes(case), "workspace"]
                address = {name: (place + 1) << _SHIFT for place, name in enumerate(names)}
                params = operator.params(case, dtype, address)
                call = {"operator": operator.name, "case": case.name, "dtype": dtype}
                calls += [call | made for made in _candidates(gpu, operator, params, address["workspace"], launches)]
    return calls


def _candidates(
    gpu: GpuLibrary, operator: Operator, params: ctypes.Structure, workspace: int, launches: list[dict]
) -> Iterator[dict]:
    """One entry for all candidates that launch the same; none for a call of no elements, which launches nothing."""
    number = gpu.operator(operator.name, params)
    made: list[dict] = []
    for index, candidate in enumerate(gpu.candidates(number)):
        if not gpu.is_supported(number, index, params):
            continue
        launches.clear()
        gpu.run(number, index, params, workspace)
        entry = {"workspace_bytes": gpu.workspace_bytes(number, index, params), "launches": [*launches]}
        same = next((one for one in made if {key: one[key] for key in entry} == entry), None)
        if same is not None:
            same["candidates"].append(candidate)
        elif launches:
            made.append({"candidates": [candidate], **entry})
    yield from made


def _arguments(entries: list[dict], names: list[str], addresses: Sequence[int]) -> dict[str, object]:
    """The values of a launch's arguments, each kernel parameter at its address; a pointer as [tensor, offset] or None.

    A struct's fields lie behind its first one, as far as their offsets say.
    """
    values: dict[str, object] = {}
    begins: dict[int, int] = {}
    for entry in entries:
        begin = begins.setdefault(entry["parameter"], entry["offset"])
        address = addresses[entry["parameter"]] + entry["offset"] - begin
        value = _C_TYPES.get(entry["type"], ctypes.c_uint64).from_address(address).value
        if entry["type"].endswith("*"):
            tensor, offset = value >> _SHIFT, value & ((1 << _SHIFT) - 1)
            value = [names[tensor - 1], offset] if tensor else None
        values[entry["name"]] = value
    return values


def _load_recorder() -> ctypes.CDLL:
    """Compiled now; its functions come before those of the HIP runtime that a library loaded later names."""
    compiler = next(
        filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++", "clang++-19"))), None
    )
    if compiler is None:
        raise FileNotFoundError("no C++ compiler (c++, g++ or clang++) on PATH: install g++, or set CXX")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "launch_recorder.so"
        command = [compiler, "-std=c++17", "-O1", "-fPIC", "-shared", str(RECORDER), "-o", str(library)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
