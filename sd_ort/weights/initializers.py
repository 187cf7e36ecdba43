"""Initializers of an ONNX file and their consumers, read without onnx_ir, whose import takes a second."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fusion_passes import DOMAIN
from sd_ort.core import onnx_file

if TYPE_CHECKING:
    import onnx

PRODUCTS = frozenset({("", "MatMul"), (DOMAIN, "LinearAdd")})


@dataclass(frozen=True)
class Consumer:
    """A node that reads an initializer. `multiplies`: as the right side of a product with a computed value."""

    domain: str
    op_type: str
    multiplies: bool = False


@dataclass
class Initializer:
    """An initializer, whose values stay on disk until they are read."""

    tensor: onnx.TensorProto
    consumers: list[Consumer] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.dims)

    @cached_property
    def dtype(self) -> np.dtype:
        import onnx

        return onnx.helper.tensor_dtype_to_np_dtype(self.tensor.data_type)

    @property
    def values(self) -> np.ndarray:
        """A memory map of external data, or a copy of values in the graph."""
        import onnx

        if self.tensor.data_location != onnx.TensorProto.EXTERNAL:
            return onnx.numpy_helper.to_array(self.tensor)
        entries = {entry.key: entry.value for entry in self.tensor.external_data}
        return np.memmap(entries["location"], self.dtype, "r", int(entries.get("offset", 0)), self.shape)


def read_initializers(path: Path) -> dict[str, Initializer]:
    """Return the initializers of the graph at `path` by name. Raises InputError for an invalid file."""
    graph = onnx_file.read(path).graph
    initializers = {tensor.name: Initializer(tensor) for tensor in graph.initializer}
    computed: set[str] = set()
    for node in onnx_file.all_nodes(graph.node):
        for index, name in enumerate(node.input):
            if name in initializers:
                product = (node.domain, node.op_type) in PRODUCTS and index == 1
                multiplies = product and node.input[0] in computed
                initializers[name].consumers.append(Consumer(node.domain, node.op_type, multiplies))
        if node.op_type != "Constant":
            computed.update(node.output)
    return initializers
