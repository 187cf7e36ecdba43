"""What rewriting shares: new constants, their names, and weights that are computed while the model is saved.

Those come one at a time, so that no more than one is ever in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from fusion_passes.recipes import COMPUTED, OPERATIONS, cast, contiguous, note


def read(tensor: ir.TensorProtocol) -> np.ndarray:
    """The numbers of a tensor, read from its file where they lie in one.

    A copy that goes when its reader is done: a mapping would stay, and the weights of the whole model with it. Several
    threads may read the same tensor.
    """
    if not isinstance(tensor, ir.ExternalTensor) or tensor.dtype.bitwidth < 8:
        return tensor.numpy()
    dtype = np.dtype(tensor.dtype.numpy()).newbyteorder("<")
    return np.fromfile(tensor.path, dtype, tensor.size, offset=tensor.offset or 0).reshape(tensor.shape.numpy())


def constant(graph: ir.Graph, name: str, numbers: np.ndarray | Sequence[int]) -> ir.Value:
    """A new initializer `name` that holds `numbers`; integers become int64."""
    tensor = ir.Tensor(np.asarray(numbers, order="C"), name=name)  # ascontiguousarray makes a vector of a number
    value = ir.Value(
        name=name, const_value=tensor, shape=ir.Shape(tensor.numpy().shape), type=ir.TensorType(tensor.dtype)
    )
    graph.register_initializer(value)
    return value


def derived(
    graph: ir.Graph, name: str, sources: Sequence[ir.Value], shape: Sequence[int], operation: str, argument: Any = None
) -> ir.Value:
    """A new initializer `name` of `shape` and the sources' dtype, made from them on saving; its recipe is kept.

    operation, argument: one of `recipes.OPERATIONS`. What is computed of another type than float32 is rounded to it.
    """
    tensors = [ir.convenience.get_const_tensor(source) for source in sources]
    kept = [tensor for tensor in tensors if tensor is not None]
    assert len(kept) == len(tensors), "derived() needs constants"
    dtype = kept[0].dtype
    rounds = operation in COMPUTED and dtype != ir.DataType.FLOAT

    def evaluate() -> ir.Tensor:
        numbers = contiguous(OPERATIONS[operation](argument, *(read(t) for t in kept)))
        return ir.Tensor(cast(dtype.name, numbers) if rounds else numbers, dtype=dtype, name=name)

    tensor = ir.LazyTensor(evaluate, dtype=dtype, shape=ir.Shape(shape), name=name)
    value = ir.Value(name=name, const_value=tensor, shape=tensor.shape, type=ir.TensorType(dtype))
    graph.register_initializer(value)
    note(value, operation, argument, sources)
    return note(value, "cast", dtype.name, [value]) if rounds else value


def unique(value: ir.Value | None, suffix: str) -> str:
    """A name for an initializer made for the node that yields `value`.

    Registering an initializer under a name in use would drop the old one, which other nodes may read.
    """
    node = None if value is None else value.producer()
    assert value is not None
    assert node is not None
    assert isinstance(node.graph, ir.Graph)
    name, number = f"{value.name}.{suffix}", 1
    while name in node.graph.initializers:
        name, number = f"{value.name}.{suffix}.{number}", number + 1
    return name


def take_place(graph: ir.Graph, before: ir.Node, new: ir.Node, old: ir.Value) -> None:
    """Insert `new` in front of `before`; its first output is read in place of `old`, under whose name it goes."""
    made = new.outputs[0]
    made.name, made.type, made.shape = old.name, old.type, old.shape
    graph.insert_before(before, new)
    ir.convenience.replace_all_uses_with(old, made, replace_graph_outputs=True)
