"""Writer of external data: tensors in graph order, hashed while writing; a thread computes the next tensors."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx_ir as ir

ALIGNMENT = 1 << 16  # bytes; all versions of ONNX Runtime can map such offsets, on Windows too
MIN_ALIGNED = 1 << 20  # offsets of tensors with more bytes are aligned
MAX_PENDING = 32 << 20  # bytes of tensors that are computed ahead of writing
BLOCK = 1 << 20  # bytes that are hashed while they are still in the CPU cache from writing


def write(
    path: Path, tensors: Sequence[ir.TensorProtocol], on_tensor: Callable[[], None] = lambda: None
) -> tuple[list[ir.ExternalTensor], str]:
    """Write tensors to the new file `path`; return them as external tensors, and the file's SHA-256 in hex.

    `on_tensor` is called before each tensor is written; its exceptions end the writing.
    """
    stored = []
    with path.open("wb") as file:
        sink = _Sink(file)
        for tensor, data in _compute_ahead(tensors):
            on_tensor()
            if tensor.nbytes > MIN_ALIGNED:
                sink.write(bytes(-sink.bytes % ALIGNMENT))
            offset = sink.bytes
            if isinstance(tensor, ir.ExternalTensor):
                tensor.tofile(sink)
            else:
                sink.write(data)
            stored.append(
                ir.ExternalTensor(
                    path.name, offset, sink.bytes - offset, tensor.dtype,
                    shape=ir.Shape(tensor.shape.numpy()), name=str(tensor.name), base_dir=str(path.parent),
                )
            )  # fmt: skip
    return stored, sink.digest.hexdigest()


class _Sink:
    """Counts and hashes the bytes that are written to a file."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        for start in range(0, len(view), BLOCK):
            block = view[start : start + BLOCK]
            self.file.write(block)
            self.digest.update(block)
        self.bytes += len(view)
        return len(view)


def _compute_ahead(tensors: Sequence[ir.TensorProtocol]) -> Iterator[tuple[ir.TensorProtocol, memoryview]]:
    """Yield each tensor with its bytes, computed in another thread."""
    pending: deque[tuple[ir.TensorProtocol, Future[memoryview]]] = deque()
    pending_bytes = 0
    with ThreadPoolExecutor(1) as pool:
        try:
            for tensor in tensors:
                pending.append((tensor, pool.submit(_tensor_bytes, tensor)))
                pending_bytes += tensor.nbytes
                while pending_bytes > MAX_PENDING:
                    pending_bytes -= pending[0][0].nbytes
                    yield _next_result(pending)
            while pending:
                yield _next_result(pending)
        finally:
            pool.shutdown(cancel_futures=True)


def _next_result(pending: deque[tuple[ir.TensorProtocol, Future[memoryview]]]) -> tuple[ir.TensorProtocol, memoryview]:
    tensor, future = pending.popleft()
    return tensor, future.result()


def _tensor_bytes(tensor: ir.TensorProtocol) -> memoryview:
    """Return the bytes of a tensor; none for an external tensor, which is copied from its file in blocks."""
    if isinstance(tensor, ir.ExternalTensor):
        return memoryview(b"")
    if tensor.dtype.bitwidth < 8:
        return memoryview(tensor.tobytes())
    return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data
