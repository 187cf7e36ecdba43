"""The file of a model's weights: written in the graph's order, hashed on the way, the next weights made meanwhile."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx_ir as ir

ALIGNMENT = 1 << 16  # what old and new ONNX Runtimes can map, on Windows too
ALIGNED_FROM = 1 << 20  # bytes above which a tensor's offset is aligned
AHEAD = 32 << 20  # bytes of tensors that are made before they can be written
PIECE = 1 << 20  # bytes that are hashed while the processor's cache still has them from writing


def write(
    path: Path, tensors: Sequence[ir.TensorProtocol], before_each: Callable[[], None] = lambda: None
) -> tuple[list[ir.ExternalTensor], str]:
    """Write tensors into the new file `path`; returns them as they lie there, and the file's SHA-256, in hex.

    `before_each` is called before a tensor is written; what it raises ends the writing.
    """
    stored = []
    with path.open("wb") as file:
        sink = _Sink(file)
        for tensor, numbers in _ahead(tensors):
            before_each()
            if tensor.nbytes > ALIGNED_FROM:
                sink.write(bytes(-sink.bytes % ALIGNMENT))
            begin = sink.bytes
            if isinstance(tensor, ir.ExternalTensor):
                tensor.tofile(sink)
            else:
                sink.write(numbers)
            stored.append(
                ir.ExternalTensor(
                    path.name, begin, sink.bytes - begin, tensor.dtype,
                    shape=ir.Shape(tensor.shape.numpy()), name=str(tensor.name), base_dir=str(path.parent),
                )
            )  # fmt: skip
    return stored, sink.digest.hexdigest()


class _Sink:
    """A file that knows the hash of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> int:
        whole = memoryview(data)
        for start in range(0, len(whole), PIECE):
            piece = whole[start : start + PIECE]
            self.file.write(piece)
            self.digest.update(piece)
        self.bytes += len(whole)
        return len(whole)


def _ahead(tensors: Sequence[ir.TensorProtocol]) -> Iterator[tuple[ir.TensorProtocol, memoryview]]:
    """Each tensor with its bytes, which another thread made."""
    waiting: deque[tuple[ir.TensorProtocol, Future[memoryview]]] = deque()
    made = 0
    with ThreadPoolExecutor(1) as pool:
        try:
            for tensor in tensors:
                waiting.append((tensor, pool.submit(_bytes, tensor)))
                made += tensor.nbytes
                while made > AHEAD:
                    made -= waiting[0][0].nbytes
                    yield _result(waiting)
            while waiting:
                yield _result(waiting)
        finally:
            pool.shutdown(cancel_futures=True)


def _result(waiting: deque[tuple[ir.TensorProtocol, Future[memoryview]]]) -> tuple[ir.TensorProtocol, memoryview]:
    tensor, made = waiting.popleft()
    return tensor, made.result()


def _bytes(tensor: ir.TensorProtocol) -> memoryview:
    """None of a tensor that lies in a file, which is copied from there piece by piece."""
    if isinstance(tensor, ir.ExternalTensor):
        return memoryview(b"")
    if tensor.dtype.bitwidth < 8:
        return memoryview(tensor.tobytes())
    return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data
