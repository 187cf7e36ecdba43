"""Calls of the simulated ROCm libraries by ctypes: memory of the device, products of hipBLASLt, tensors of MIOpen.

A test process never loads the libraries: it calls `product`, `gemm` and `tensors` in another process, which `open_rocm`
prepares. As a program, `python rocm_client.py FOLDER FUNCTION`, it uses a library wrongly and must not survive.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
HIP_R_32F, HIP_R_16F, HIP_R_16BF = 0, 2, 14
OP_N, OP_T = 111, 112
MIOPEN_TYPES = {"float16": 0, "float32": 1}
DTYPES = {"float32": HIP_R_32F, "float16": HIP_R_16F, "bfloat16": HIP_R_16BF, "float8": 28, "float8_fnuz": 1000}
FLOAT8 = {"float8": ml_dtypes.float8_e4m3fn, "float8_fnuz": ml_dtypes.float8_e4m3fnuz}


def to_bits(array: Array, dtype: str) -> Array:
    """Return `array` in `dtype`, bfloat16 as its 16 bits."""
    if dtype != "bfloat16":
        return array.astype(FLOAT8.get(dtype, dtype))
    bits = array.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def to_float(bits: Array, dtype: str) -> Array:
    """Return an array of to_bits() as float32."""
    if dtype != "bfloat16":
        return bits.astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Rocm:
    """The libraries of a folder."""

    def __init__(self, folder: Path) -> None:
        self.hip = ctypes.CDLL(str(folder / "libamdhip64.so.7"))
        self.folder = folder

    def library(self, name: str) -> Any:
        return ctypes.CDLL(str(self.folder / name))

    def allocate(self, size: int) -> ctypes.c_void_p:
        address = ctypes.c_void_p()
        check(self.hip.hipMalloc(ctypes.byref(address), ctypes.c_size_t(size)))
        return address

    def upload(self, array: Array) -> ctypes.c_void_p:
        data = np.ascontiguousarray(array)
        address = self.allocate(data.nbytes)
        check(self.hip.hipMemcpy(address, ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.nbytes), 1))
        return address

    def download(self, address: ctypes.c_void_p, like: Array) -> Array:
        data = np.empty_like(like)
        check(self.hip.hipMemcpy(ctypes.c_void_p(data.ctypes.data), address, ctypes.c_size_t(data.nbytes), 2))
        return data


def check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"status {status}")


class Algorithm(ctypes.Structure):
    """hipblasLtMatmulHeuristicResult_t; begins with hipblasLtMatmulAlgo_t."""

    _fields_ = (
        ("data", ctypes.c_uint8 * 16),
        ("max_workspace_bytes", ctypes.c_size_t),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass
class Product:
    """A product of hipBLASLt: D (m, n) = op(A) (m, k) op(B) (k, n), column-major, leading dimensions `spare` larger."""

    rocm: Rocm
    m: int = 24
    n: int = 40
    k: int = 56
    dtype: str = "float16"
    out: str = "float16"
    operations: tuple[int, int] = (OP_N, OP_N)
    spare: int = 0
    batch: int = 1
    bias: bool = False
    gelu: bool = False
    scale: float = 1.0  # of A, in device memory; 1: none

    def __post_init__(self) -> None:
        self.lt = self.rocm.library("libhipblaslt.so.1")
        self.handle, self.description, preference = (ctypes.c_void_p() for _ in range(3))
        check(self.lt.hipblasLtCreate(ctypes.byref(self.handle)))
        check(self.lt.hipblasLtMatmulDescCreate(ctypes.byref(self.description), 2, HIP_R_32F))
        for attribute, operation in enumerate(self.operations):
            self.set("MatmulDesc", self.description, attribute, ctypes.c_int32(operation))
        if self.bias or self.gelu:
            self.set("MatmulDesc", self.description, 2, ctypes.c_uint32(4 * self.bias | 32 * self.gelu))
        if self.scale != 1:
            self.set("MatmulDesc", self.description, 5, self.rocm.upload(np.array([self.scale], np.float32)))
        shapes = [(self.m, self.k), (self.k, self.n), (self.m, self.n)]
        self.shapes = [
            shape[::-1] if operation == OP_T else shape
            for shape, operation in zip(shapes, (*self.operations, OP_N), strict=True)
        ]
        self.layouts = [
            self.layout(shape, dtype)
            for shape, dtype in zip(self.shapes, (self.dtype, self.dtype, self.out), strict=True)
        ]
        check(self.lt.hipblasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        self.set("MatmulPreference", preference, 1, ctypes.c_uint64(32 << 20))
        self.proposals, count = (Algorithm * 16)(), ctypes.c_int()
        a, b, d = self.layouts
        check(
            self.lt.hipblasLtMatmulAlgoGetHeuristic(
                self.handle, self.description, a, b, d, d, preference, 16, self.proposals, ctypes.byref(count)
            )
        )
        self.count = count.value

    def set(self, kind: str, to: ctypes.c_void_p, attribute: int, value: Any) -> None:
        function = getattr(self.lt, f"hipblasLt{kind}SetAttribute")
        check(function(to, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))))

    def layout(self, shape: tuple[int, int], dtype: str) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        rows, columns, leading = ctypes.c_uint64(shape[0]), ctypes.c_uint64(shape[1]), shape[0] + self.spare
        create = self.lt.hipblasLtMatrixLayoutCreate
        check(create(ctypes.byref(layout), DTYPES[dtype], rows, columns, ctypes.c_int64(leading)))
        if self.batch > 1:
            self.set("MatrixLayout", layout, 0, ctypes.c_int32(self.batch))
            self.set("MatrixLayout", layout, 1, ctypes.c_int64(leading * shape[1]))
        return layout

    def run(self, number: int, seed: int = 0, beta: float = 0.0, **changes: Any) -> float:
        """Run proposal `number`; return the largest error, of the largest number. `changes`: arguments by name."""
        random = np.random.default_rng(seed)
        # Column-major with a leading dimension: (batch, columns, rows + spare) in C's order.
        stored = [
            to_bits(random.standard_normal((self.batch, columns, rows + self.spare)).astype(np.float32), dtype)
            for (rows, columns), dtype in zip(self.shapes, (self.dtype, self.dtype, self.out), strict=True)
        ]
        bias = to_bits(random.standard_normal(self.m).astype(np.float32), self.out)
        a, b, d = (self.rocm.upload(array) for array in stored)
        if self.bias:
            self.set("MatmulDesc", self.description, 3, changes.get("bias", self.rocm.upload(bias)))
        proposal = self.proposals[number]
        size = proposal.workspace_bytes
        workspace = self.rocm.allocate(size) if size else ctypes.c_void_p()
        arguments = {"a": a, "algorithm": ctypes.byref(proposal), "workspace": workspace, "size": size, **changes}
        check(
            self.lt.hipblasLtMatmul(
                *(self.handle, self.description, ctypes.byref(ctypes.c_float(0.5)), arguments["a"], self.layouts[0]),
                *(b, self.layouts[1], ctypes.byref(ctypes.c_float(beta)), d, self.layouts[2], d, self.layouts[2]),
                *(arguments["algorithm"], arguments["workspace"], ctypes.c_size_t(arguments["size"]), None),
            )
        )
        numbers = [
            to_float(array, dtype).transpose(0, 2, 1)[:, :rows]
            for array, dtype, (rows, _) in zip(stored, (self.dtype, self.dtype, self.out), self.shapes, strict=True)
        ]
        left, right = (
            number.transpose(0, 2, 1) if operation == OP_T else number
            for number, operation in zip(numbers, self.operations, strict=False)
        )
        expected = 0.5 * self.scale * left @ right + beta * numbers[2]
        if self.bias:
            expected += to_float(bias, self.out)[:, None]
        if self.gelu:
            expected *= 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (expected + 0.044715 * expected**3)))
        result = self.rocm.download(d, stored[2])
        assert (result[:, :, self.m :] == stored[2][:, :, self.m :]).all(), "written between the columns"
        actual = to_float(result, self.out).transpose(0, 2, 1)[:, : self.m]
        return float(np.abs(actual - expected).max() / np.abs(expected).max())


class Tensors:
    """Functions of MIOpen over NumPy arrays."""

    def __init__(self, rocm: Rocm) -> None:
        self.rocm, self.miopen = rocm, rocm.library("libMIOpen.so.1")
        self.handle = ctypes.c_void_p()
        check(self.miopen.miopenCreate(ctypes.byref(self.handle)))
        self.one, self.zero = ctypes.byref(ctypes.c_float(1)), ctypes.byref(ctypes.c_float(0))

    def describe(self, array: Array, order: str = "NCHW") -> ctypes.c_void_p:
        """Return a descriptor of (N, C, H, W) `array`, which lies as `order`."""
        descriptor = ctypes.c_void_p()
        check(self.miopen.miopenCreateTensorDescriptor(ctypes.byref(descriptor)))
        n, c, h, w = array.shape
        strides = (c * h * w, h * w, w, 1) if order == "NCHW" else (c * h * w, 1, w * c, c)
        numbers = ctypes.c_int * 4
        check(
            self.miopen.miopenSetTensorDescriptor(
                descriptor, MIOPEN_TYPES[str(array.dtype)], 4, numbers(n, c, h, w), numbers(*strides)
            )
        )
        return descriptor

    def upload(self, array: Array, order: str = "NCHW") -> ctypes.c_void_p:
        return self.rocm.upload(array if order == "NCHW" else array.transpose(0, 2, 3, 1))

    def convolve(self, x: Array, filters: Array, like: Array, order: str, **options: Any) -> Array:
        """Return the convolution with a shape as `like`. `options`: pads, strides, dilations, groups."""
        convolution = ctypes.c_void_p()
        check(self.miopen.miopenCreateConvolutionDescriptor(ctypes.byref(convolution)))
        pair = ctypes.c_int * 2
        check(
            self.miopen.miopenInitConvolutionNdDescriptor(
                convolution, 2, pair(*options["pads"]), pair(*options["strides"]), pair(*options["dilations"]), 0
            )
        )
        check(self.miopen.miopenSetConvolutionGroupCount(convolution, options["groups"]))
        descriptors = [self.describe(array, order) for array in (x, filters, like)]
        size = ctypes.c_size_t()
        check(
            self.miopen.miopenConvolutionForwardGetWorkSpaceSize(
                self.handle, descriptors[1], descriptors[0], convolution, descriptors[2], ctypes.byref(size)
            )
        )
        y = self.upload(like, order)
        check(
            self.miopen.miopenConvolutionForward(
                *(self.handle, self.one, descriptors[0], self.upload(x, order), descriptors[1]),
                *(self.upload(filters, order), convolution, 0, self.zero, descriptors[2], y),
                *(self.rocm.allocate(size.value), size),
            )
        )
        stored = like if order == "NCHW" else np.ascontiguousarray(like.transpose(0, 2, 3, 1))
        result = self.rocm.download(y, stored)
        return result if order == "NCHW" else result.transpose(0, 3, 1, 2)

    def batch_norm(self, x: Array, scale: Array, bias: Array, epsilon: float) -> tuple[Array, ...]:
        """Return y, running mean, running variance, saved mean and saved inverse of a spatial training step."""
        statistics = self.describe(scale.reshape(1, -1, 1, 1))
        y = self.upload(np.zeros_like(x))
        sums = [self.rocm.upload(np.zeros_like(scale)) for _ in range(4)]
        description = self.describe(x)
        check(
            self.miopen.miopenBatchNormalizationForwardTraining(
                *(self.handle, 1, self.one, self.zero, description, self.upload(x), description, y, statistics),
                *(self.rocm.upload(scale), self.rocm.upload(bias), ctypes.c_double(1.0), sums[0], sums[1]),
                *(ctypes.c_double(epsilon), sums[2], sums[3]),
            )
        )
        return self.rocm.download(y, x), *(self.rocm.download(each, scale) for each in sums)

    def softmax(self, x: Array, algorithm: int) -> Array:
        y, description = self.upload(np.zeros_like(x)), self.describe(x)
        check(
            self.miopen.miopenSoftmaxForward_V2(
                self.handle, self.one, description, self.upload(x), self.zero, description, y, algorithm, 1
            )
        )
        return self.rocm.download(y, x)

    def reduce(self, x: Array, like: Array, operation: int) -> Array:
        reduction = ctypes.c_void_p()
        check(self.miopen.miopenCreateReduceTensorDescriptor(ctypes.byref(reduction)))
        check(self.miopen.miopenSetReduceTensorDescriptor(reduction, operation, 1, 0, 0, 0))
        y = self.upload(like)
        check(
            self.miopen.miopenReduceTensor(
                *(self.handle, reduction, None, ctypes.c_size_t(0), self.rocm.allocate(64), ctypes.c_size_t(64)),
                *(self.one, self.describe(x), self.upload(x), self.zero, self.describe(like), y),
            )
        )
        return self.rocm.download(y, like)

    def combine(self, operation: int, a: Array, b: Array) -> Array:
        c = self.upload(np.zeros_like(a))
        check(
            self.miopen.miopenOpTensor(
                *(self.handle, operation, self.one, self.describe(a), self.upload(a)),
                *(self.one, self.describe(b), self.upload(b), self.zero, self.describe(a), c),
            )
        )
        return self.rocm.download(c, a)


_opened: list[Rocm] = []


def open_rocm(folder: Path) -> None:
    """Load the libraries of a folder for the calls of this process."""
    _opened.append(Rocm(folder))


def product(beta: float = 0.0, **options: Any) -> list[float]:
    """Return the error of each proposal for a Product with these options."""
    tried = Product(_opened[0], **options)
    return [tried.run(number, number, beta) for number in range(tried.count)]


def tensors(method: str, *arguments: Any, **options: Any) -> Any:
    """Call a method of Tensors."""
    return getattr(Tensors(_opened[0]), method)(*arguments, **options)


def gemm(function: str, dtype: str, sizes: Sequence[int], transposed: tuple[bool, bool], batch: int) -> float:
    """Return the error of a batched product of hipBLAS or rocBLAS, C = 0.5 op(A) op(B) + 2 C."""
    rocm, (m, n, k) = _opened[0], sizes
    blas, handle = rocm.library("libhipblas.so.3"), ctypes.c_void_p()
    check(blas.hipblasCreate(ctypes.byref(handle)))
    check(blas.hipblasSetStream(handle, None))
    random = np.random.default_rng(1)
    shapes = [(k, m) if transposed[0] else (m, k), (n, k) if transposed[1] else (k, n), (m, n)]
    stored = [to_bits(random.standard_normal((batch, columns, rows)).astype(np.float32), dtype)
              for rows, columns in shapes]  # fmt: skip
    a, b, c = (rocm.upload(array) for array in stored)
    alpha, beta = (ctypes.byref(ctypes.c_float(number)) for number in (0.5, 2.0))
    operations = [OP_T if flag else OP_N for flag in transposed]
    strides = [ctypes.c_int64(rows * columns) for rows, columns in shapes]
    if function == "hipblasGemmStridedBatchedEx":
        kind = DTYPES[dtype]
        last: tuple[Any, ...] = (c, kind, m, strides[2], batch, 2, 160)
    else:
        kind = {"float32": 151, "float16": 150, "bfloat16": 168}[dtype]
        last = (c, kind, m, strides[2], c, kind, m, strides[2], batch, 151, 0, 0, 0)
    check(
        getattr(blas, function)(
            *(handle, *operations, m, n, k, alpha, a, kind, shapes[0][0], strides[0]),
            *(b, kind, shapes[1][0], strides[1], beta, *last),
        )
    )
    left, right, old = (to_float(array, dtype).transpose(0, 2, 1) for array in stored)
    left, right = (
        number.transpose(0, 2, 1) if flag else number for number, flag in zip((left, right), transposed, strict=True)
    )
    expected = 0.5 * left @ right + 2 * old
    actual = to_float(rocm.download(c, stored[2]), dtype).transpose(0, 2, 1)
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


# ---- Wrong uses ----


def shifted_algorithm(rocm: Rocm) -> None:
    """Read the second heuristic result at the offset that an algorithm of 32 bytes would give."""
    product = Product(rocm)
    address = ctypes.addressof(product.proposals) + 64
    product.run(0, algorithm=ctypes.c_void_p(address))


def algorithm_of_another_shape(rocm: Rocm) -> None:
    product, other = Product(rocm), Product(rocm, n=48)
    product.run(0, algorithm=ctypes.byref(other.proposals[0]))


def no_workspace(rocm: Rocm) -> None:
    Product(rocm).run(0, workspace=ctypes.c_void_p())


def small_workspace(rocm: Rocm) -> None:
    product = Product(rocm)
    product.run(0, size=product.proposals[0].workspace_bytes - 1)


def short_allocation(rocm: Rocm) -> None:
    product = Product(rocm)
    product.run(0, workspace=rocm.allocate(product.proposals[0].workspace_bytes // 2))


def misaligned_pointer(rocm: Rocm) -> None:
    product = Product(rocm)
    product.run(0, a=ctypes.c_void_p((rocm.allocate(1 << 16).value or 0) + 8))


def matrix_out_of_bounds(rocm: Rocm) -> None:
    product = Product(rocm)
    product.run(0, a=rocm.allocate(product.m * product.k * 2 - 2))


def host_pointer(rocm: Rocm) -> None:
    product, array = Product(rocm), np.zeros(1 << 16, np.uint8)
    product.run(0, a=ctypes.c_void_p(array.ctypes.data + -array.ctypes.data % 64))


def foreign_layout(rocm: Rocm) -> None:
    product = Product(rocm)
    product.layouts[1] = product.rocm.allocate(64)
    product.run(0)


def missing_function(rocm: Rocm) -> None:
    rocm.library("libMIOpen.so.1").miopenPoolingForward()


if __name__ == "__main__":
    globals()[sys.argv[2]](Rocm(Path(sys.argv[1])))
