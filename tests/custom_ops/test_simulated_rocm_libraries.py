"""The simulated hipBLASLt, hipBLAS and MIOpen (scripts/amd/simulated_rocm/libraries) against NumPy.

They are built from the real headers, and every wrong use of them that sd-ort was once guilty of ends the process.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rocm_client
import torch

from scripts.amd.rocm_headers import rocm_headers
from scripts.amd.simulated_rocm.build import build
from sd_ort.core.cache import cache_folder

ROOT = Path(__file__).resolve().parents[2]

Array = np.ndarray[Any, Any]
# Largest error, of the largest number: rounding of the result.
TOLERANCE = {"float32": 2e-6, "float16": 6e-4, "bfloat16": 5e-3}


@pytest.fixture(scope="module")
def libraries() -> Path:
    newest = rocm_headers()[-1]
    return build(cache_folder() / "simulated_rocm", newest)


@pytest.fixture(scope="module")
def simulation(libraries: Path) -> Iterator[ProcessPoolExecutor]:
    """A process that has the libraries loaded."""
    with simulated(libraries, "gfx1100") as pool:
        yield pool


@contextmanager
def simulated(libraries: Path, target: str) -> Iterator[ProcessPoolExecutor]:
    """A process that has the libraries loaded, on a GPU."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SIMULATED_HIP_TARGET", target)
        environment.delenv("SIMULATED_HIP_KERNELS", raising=False)
        spawn = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(1, spawn, rocm_client.open_rocm, (libraries,))
        pool.submit(int).result()  # starts it in this environment
    with pool:
        yield pool


@pytest.mark.parametrize(("dtype", "out"), [
    ("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("float16", "float32"),
])  # fmt: skip
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_products_of_hipblaslt(
    simulation: ProcessPoolExecutor, dtype: str, out: str, transposed: tuple[bool, bool]
) -> None:
    """Every proposal gives the product, whatever its workspace holds."""
    operations = tuple(rocm_client.OP_T if flag else rocm_client.OP_N for flag in transposed)
    errors = simulation.submit(rocm_client.product, dtype=dtype, out=out, operations=operations).result()
    assert len(errors) == 5
    assert np.max(errors) < TOLERANCE[out]


@pytest.mark.parametrize("options", [
    {"spare": 8}, {"bias": True}, {"beta": 1.0}, {"batch": 3}, {"m": 1, "n": 1, "k": 1}, {"bias": True, "gelu": True},
    {"m": 333, "n": 77, "k": 1100}, {"spare": 24, "bias": True, "beta": 1.0, "out": "float32"},
])  # fmt: skip
def test_forms_of_products(simulation: ProcessPoolExecutor, options: dict[str, Any]) -> None:
    errors = simulation.submit(rocm_client.product, **options).result()
    assert len(errors) == 5
    assert np.max(errors) < TOLERANCE["float16"]


@pytest.mark.parametrize(("target", "dtype", "other"), [
    ("gfx1201", "float8", "float8_fnuz"), ("gfx942", "float8_fnuz", "float8"),
])  # fmt: skip
def test_products_of_float8(libraries: Path, target: str, dtype: str, other: str) -> None:
    """Float8 products: scale, bias and GELU, as in QuantizedLinear; each GPU supports only its own float8 format."""
    options = {"out": "bfloat16", "operations": (rocm_client.OP_T, rocm_client.OP_N), "scale": 0.37, "bias": True}
    with simulated(libraries, target) as pool:
        errors = pool.submit(rocm_client.product, 1.0, dtype=dtype, gelu=True, **options).result()
        assert len(errors) == 5
        assert np.max(errors) < TOLERANCE["bfloat16"]
        with pytest.raises(RuntimeError, match="status 7"):  # HIPBLAS_STATUS_NOT_SUPPORTED
            pool.submit(rocm_client.product, dtype=other, **options).result()


@pytest.mark.parametrize("function", ["hipblasGemmStridedBatchedEx", "rocblas_gemm_strided_batched_ex"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("transposed", [(False, False), (True, True)])
def test_products_of_hipblas(
    simulation: ProcessPoolExecutor, function: str, dtype: str, transposed: tuple[bool, bool]
) -> None:
    error = simulation.submit(rocm_client.gemm, function, dtype, (19, 33, 47), transposed, 2).result()
    assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("name", [
    "shifted_algorithm", "algorithm_of_another_shape", "no_workspace", "small_workspace", "short_allocation",
    "misaligned_pointer", "matrix_out_of_bounds", "host_pointer", "foreign_layout", "missing_function",
])  # fmt: skip
def test_wrong_use_ends_the_process(libraries: Path, name: str) -> None:
    expected = {
        "shifted_algorithm": "not one that was proposed",
        "algorithm_of_another_shape": "not one that was proposed",
        "no_workspace": "needs a workspace of 2097152 bytes, got 2097152 at (nil)",
        "small_workspace": "needs a workspace of 2097152 bytes, got 2097151",
        "short_allocation": "the workspace has 2097152 bytes",
        "misaligned_pointer": "A at 0x",
        "matrix_out_of_bounds": "A has 2688 bytes",
        "host_pointer": "not in one allocation of the device",
        "foreign_layout": "is no object of hipBLASLt",
        "missing_function": "miopenPoolingForward is not simulated",
    }
    command = [sys.executable, rocm_client.__file__, str(libraries), name]
    done = subprocess.run(command, env={"SIMULATED_HIP_TARGET": "gfx1100"}, capture_output=True, text=True, check=False)
    assert done.returncode == -6, done.stderr
    assert expected[name] in done.stderr


def test_invalid_leading_dimension(simulation: ProcessPoolExecutor) -> None:
    """A leading dimension below the rows is refused, as by the real library."""
    with pytest.raises(RuntimeError, match="status 3"):  # HIPBLAS_STATUS_INVALID_VALUE
        simulation.submit(rocm_client.product, spare=-1).result()


CONVOLUTIONS: list[dict[str, Any]] = [
    {"x": (2, 8, 9, 7), "filters": (6, 8, 3, 3), "pads": (1, 1)},
    {"x": (1, 4, 12, 12), "filters": (8, 4, 3, 3), "pads": (0, 1), "strides": (2, 2)},
    {"x": (1, 8, 6, 6), "filters": (8, 2, 1, 1), "groups": 4},
    {"x": (1, 3, 11, 11), "filters": (5, 3, 3, 2), "dilations": (2, 3)},
]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_of_miopen(simulation: ProcessPoolExecutor, case: dict[str, Any], order: str, dtype: str) -> None:
    random = np.random.default_rng(0)
    x, filters = (random.standard_normal(case[name]).astype(dtype) for name in ("x", "filters"))
    options = {
        "pads": case.get("pads", (0, 0)),
        "strides": case.get("strides", (1, 1)),
        "dilations": case.get("dilations", (1, 1)),
        "groups": case.get("groups", 1),
    }
    expected = torch.nn.functional.conv2d(
        torch.from_numpy(x.astype(np.float32)), torch.from_numpy(filters.astype(np.float32)), None,
        options["strides"], options["pads"], options["dilations"], options["groups"],
    ).numpy()  # fmt: skip
    like = np.zeros(expected.shape, dtype)
    result = simulation.submit(rocm_client.tensors, "convolve", x, filters, like, order, **options).result()
    assert_close(result, expected, TOLERANCE[dtype])


def assert_close(result: Array, expected: Array, tolerance: float) -> None:
    assert result.shape == expected.shape
    assert np.abs(result.astype(np.float32) - expected).max() < tolerance * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("of_statistics", ["float32", "float16"])
def test_batch_norm_of_miopen(simulation: ProcessPoolExecutor, dtype: str, of_statistics: str) -> None:
    """With all that ONNX Runtime's InstanceNormalization takes of it: the running statistics, in float32, too."""
    random = np.random.default_rng(0)
    x = (3 + 2 * random.standard_normal((2, 5, 6, 7))).astype(dtype)
    scale, bias = (random.standard_normal(5).astype(of_statistics) for _ in range(2))
    y, mean, variance, saved, inverse = simulation.submit(
        rocm_client.tensors, "batch_norm", x, scale, bias, 1e-3
    ).result()
    numbers = x.astype(np.float64)
    expected_mean, expected_variance = numbers.mean((0, 2, 3)), numbers.var((0, 2, 3))
    count = x.size / 5
    tolerance = max(TOLERANCE[dtype], TOLERANCE[of_statistics])
    normalized = (numbers - expected_mean[:, None, None]) / np.sqrt(expected_variance[:, None, None] + 1e-3)
    assert_close(y, normalized * scale[:, None, None] + bias[:, None, None], tolerance)
    assert_close(mean, expected_mean, tolerance)
    assert_close(saved, expected_mean, tolerance)
    assert_close(variance, expected_variance * count / (count - 1), tolerance)
    assert_close(inverse, 1 / np.sqrt(expected_variance + 1e-3), tolerance)


def test_other_functions_of_miopen(simulation: ProcessPoolExecutor) -> None:
    random = np.random.default_rng(0)
    x, row = (random.standard_normal(shape).astype(np.float32) for shape in ((2, 5, 3, 4), (1, 5, 1, 1)))

    def call(method: str, *arguments: Any) -> Array:
        result: Array = simulation.submit(rocm_client.tensors, method, *arguments).result()
        return result

    powers = np.exp(x - x.max(1, keepdims=True))
    softmax = powers / powers.sum(1, keepdims=True)
    assert_close(call("softmax", x, 1), softmax, 1e-6)
    assert_close(call("softmax", x, 2), np.log(softmax), 1e-6)
    for operation, expected in enumerate((x + row, x * row, np.minimum(x, row), np.maximum(x, row))):
        assert_close(call("combine", operation, x, row), expected, 1e-6)
    reductions = (
        x.sum((2, 3)), x.prod((2, 3)), x.min((2, 3)), x.max((2, 3)), np.abs(x).max((2, 3)), x.mean((2, 3)),
        np.abs(x).sum((2, 3)), np.sqrt((x * x).sum((2, 3))),
    )  # fmt: skip
    like = np.zeros((2, 5, 1, 1), np.float32)
    for operation, expected in enumerate(reductions):
        assert_close(call("reduce", x, like, operation), expected[:, :, None, None], 2e-6)


def test_skipped_kernels_do_not_compute(libraries: Path, tmp_path: Path) -> None:
    """With SIMULATED_HIP_KERNELS=skip, a product is accepted and counted, and its result stays unwritten."""
    report = tmp_path / "report.json"
    code = f"import rocm_client, sys; from pathlib import Path; rocm_client.open_rocm(Path({str(libraries)!r}))\n"
    code += "print(max(rocm_client.product()))"
    environment = {
        "SIMULATED_HIP_TARGET": "gfx1100",
        "SIMULATED_HIP_KERNELS": "skip",
        "SIMULATED_HIP_REPORT": str(report),
        "PYTHONPATH": str(Path(rocm_client.__file__).parent),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout) > 0.1
    assert '"hipblasLtMatmul": 5' in report.read_text()
