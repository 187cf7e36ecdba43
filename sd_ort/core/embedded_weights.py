"""Weights inside an ONNX file, read and written without a copy of the file in memory.

`skeleton` replaces large weights of the main graph by external data that lie in the file itself. `write` is its
inverse: it writes a model whose weights are given one at a time.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

MIN_BYTES = 1 << 12  # of a weight that is left in the file
GRAPH, INITIALIZER, RAW_DATA = 7, 5, 9  # fields of ModelProto, GraphProto and TensorProto
EXTERNAL_DATA, DATA_LOCATION = 13, 14  # fields of TensorProto
BYTES = 2  # wire type of messages and bytes


class _Field(NamedTuple):
    """A field of a message: its number, and where it, its value and the next field start."""

    number: int
    start: int
    value: int
    end: int


def skeleton(path: Path) -> bytes:
    """Return the ModelProto at `path` with weights of at least `MIN_BYTES` as external data in `path` itself.

    Raises ValueError for a file that is no message.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        parts = []
        for field in _fields(data, 0, len(data)):
            if field.number == GRAPH:
                graph = b"".join(
                    _tensor(data, part, path.name) if part.number == INITIALIZER else data[part.start : part.end]
                    for part in _fields(data, field.value, field.end)
                )
                parts.append(_header(GRAPH, len(graph)) + graph)
            else:
                parts.append(data[field.start : field.end])
        return b"".join(parts)


def _tensor(data: mmap.mmap, field: _Field, location: str) -> bytes:
    """Return the field of a TensorProto, with external data in `location` in place of large raw_data."""
    import onnx

    parts = list(_fields(data, field.value, field.end))
    raw = [part for part in parts if part.number == RAW_DATA]
    if len(raw) != 1 or raw[0].end - raw[0].value < MIN_BYTES:
        return data[field.start : field.end]
    if any(part.number in (EXTERNAL_DATA, DATA_LOCATION) for part in parts):
        return data[field.start : field.end]
    entries = {"location": location, "offset": raw[0].value, "length": raw[0].end - raw[0].value}
    reference = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
    for key, value in entries.items():
        reference.external_data.add(key=key, value=str(value))
    rest = b"".join(data[part.start : part.end] for part in parts if part.number != RAW_DATA)
    rest += reference.SerializeToString()
    return _header(INITIALIZER, len(rest)) + rest


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[_Field]:
    """Yield the fields of the message in data[start:end]."""
    while start < end:
        key, value = _varint(data, start)
        if key & 7 == BYTES:
            length, value = _varint(data, value)
            after = value + length
        else:
            after = _varint(data, value)[1] if key & 7 == 0 else value + {1: 8, 5: 4}.get(key & 7, end)
        if after > end:
            raise ValueError("truncated")
        yield _Field(key >> 3 if key & 7 == BYTES else -1, start, value, after)
        start = after


def _varint(data: mmap.mmap, position: int) -> tuple[int, int]:
    """Return the number at `position` and the position after it."""
    number = 0
    for index in range(10):
        if position + index >= len(data):
            break
        byte = data[position + index]
        number |= (byte & 127) << (7 * index)
        if byte < 128:
            return number, position + index + 1
    raise ValueError("truncated")


def _header(number: int, length: int) -> bytes:
    """Return the bytes in front of a message or bytes field."""
    encoded, rest = bytearray([number << 3 | BYTES]), length
    while rest > 127:
        encoded.append(rest & 127 | 128)
        rest >>= 7
    return bytes([*encoded, rest])


def write(path: Path, model: onnx.ModelProto, tensors: Mapping[str, ir.TensorProtocol]) -> None:
    """Write `model`, which is emptied, with `tensors` as further initializers of its graph, one after the other."""
    import onnx
    import onnx_ir as ir

    heads = []
    for name, tensor in tensors.items():
        head = onnx.TensorProto(dims=tensor.shape.numpy(), data_type=tensor.dtype.value, name=name)
        head_bytes = head.SerializeToString() + _header(RAW_DATA, tensor.nbytes)
        heads.append(_header(INITIALIZER, len(head_bytes) + tensor.nbytes) + head_bytes)
    graph = model.graph.SerializeToString()
    model.ClearField("graph")
    with path.open("wb") as file:
        file.write(model.SerializeToString())
        file.write(
            _header(GRAPH, len(graph) + sum(map(len, heads)) + sum(tensor.nbytes for tensor in tensors.values()))
        )
        file.write(graph)
        for head, tensor in zip(heads, tensors.values(), strict=True):
            file.write(head)
            if isinstance(tensor, ir.ExternalTensor):
                tensor.tofile(file)
            else:
                file.write(tensor.tobytes())
