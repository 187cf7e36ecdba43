"""The CPU's int8 kernels on each path, bit for bit NumPy's integers: AMX in software, AVX-512, AVX2, and without both.

tests/custom_ops/test_custom_ops_cpu.py runs the path of this processor.
"""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import custom_ops
from custom_ops.operator_spec import Array, OperatorCase, load

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq"]
PATHS = {
    "amx": [*AVX512, "-DWITH_AMX", "-DSD_ORT_ISA=avx512"],
    "avx512": [*AVX512, "-DSD_ORT_ISA=avx512"],
    "avx2": [*AVX2, "-DSD_ORT_ISA=avx2"],
    "baseline": [],
}
NEEDS = {"amx": "avx512bw", "avx512": "avx512bw", "avx2": "avx2"}


def has_flag(path: str) -> bool:
    return path not in NEEDS or NEEDS[path] in Path("/proc/cpuinfo").read_text().split()


@pytest.mark.parametrize(
    ("folder", "source", "path"),
    [
        ("quantized_linear", "quantized_linear", "amx"),
        ("quantized_linear", "quantized_linear", "avx512"),
        ("quantized_linear", "quantized_linear", "avx2"),
        ("quantized_conv", "bfloat16_conv", "amx"),
        ("quantized_conv", "bfloat16_conv", "avx512"),
        ("quantized_conv", "bfloat16_conv", "baseline"),
    ],
)
def test_int8_is_exact_on_each_path(folder: str, source: str, path: str, tmp_path: Path) -> None:
    """Sums with scale 1 and zero point 0 equal NumPy's integers: float32 is exact below 2^24."""
    if not has_flag(path):
        pytest.skip(f"this processor has no {NEEDS[path]}")
    library = tmp_path / "paths.so"
    cpp = Path(__file__).with_name("tile_paths.cc")
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-psabi", "-fvisibility=hidden", *PATHS[path],
         f"-I{Path(custom_ops.__file__).parent}", f'-DSOURCE="operators/{source}/cpu.cc"', f"-DKERNEL={source}",
         str(cpp), "-o", str(library)],
        check=True,
    )  # fmt: skip
    compiled = ctypes.CDLL(str(library))
    compiled.has_amx.restype = ctypes.c_bool
    assert compiled.has_amx() == (path == "amx")
    operator = load(folder)
    cases = [
        case for case in operator.cases
        if case.distribution in ("int8", "normal") and not case.benchmark and "float8" not in case.name
        and not {"gelu", "gated"} & {name for name, value in case.attributes.items() if value}
        and "quantized" not in (case.outputs or ()) and min(map(np.prod, case.inputs.values())) > 0
    ]  # fmt: skip
    if folder == "quantized_linear":  # more sizes that no block divides: 64 bytes a row are read in place
        cases += [_linear(70, 128, 45), _linear(33, 200, 32), _linear(8, 64, 96)]
    assert len(cases) > 3
    for case in cases:
        inputs = integers(case)
        shape = operator.output_shapes(case)["Y"]
        expected = operator.reference(inputs, case.attributes)["Y"]
        assert np.abs(expected).max() < 2**24
        actual = np.full(shape, np.nan, np.float32)
        arrays = {**inputs, "Y": actual}
        call = operator.params(case, "float32", {name: array.ctypes.data for name, array in arrays.items()})
        weight = inputs["W"]
        columns, depth, *edges = weight.shape
        compiled.run(
            ctypes.byref(call), ctypes.c_void_p(weight.ctypes.data), ctypes.c_int64(depth),
            ctypes.c_int64(int(np.prod(edges))), ctypes.c_int64(columns), False,
        )  # fmt: skip
        np.testing.assert_array_equal(actual, expected, err_msg=case.name)


def _linear(rows: int, inner: int, columns: int) -> OperatorCase:
    (case, *_) = (case for case in load("quantized_linear").cases if case.distribution == "int8")
    shapes = {"X": (rows, inner), "W": (columns, inner), "scale": (columns,), "bias": (columns,)}
    return replace(case, name=f"{rows}x{inner}-n{columns}", inputs=shapes)


def integers(case: OperatorCase) -> dict[str, Array]:
    """X and W of the whole range, the lowest too, scale 1, and integers for the rest."""
    rng = np.random.default_rng(0)
    values = {name: rng.integers(-128, 128, shape) for name, shape in case.inputs.items()}
    values["X"].flat[:64] = values["W"].flat[:64] = -128
    values["scale"][:] = 1
    return {name: array.astype(np.int8 if name in "XW" else np.float32) for name, array in values.items()}
