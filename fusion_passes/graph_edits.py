"""Graph edits that rewrites share: new initializers, weights computed when the model is saved, replaced values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from fusion_passes.weight_recipes import FLOAT32_OPERATIONS, OPERATIONS, cast, contiguous, record_recipe


def tensor_values(tensor: ir.TensorProtocol) -> np.ndarray:
    """Return the values of a tensor; external data is read into a new array.

    A memory map would stay open and keep the weights of the whole model in memory. Several threads may read the same
    tensor.
    """
    if not isinstance(tensor, ir.ExternalTensor) or tensor.dtype.bitwidth < 8:
        return tensor.numpy()
    dtype = np.dtype(tensor.dtype.numpy()).newbyteorder("<")
    return np.fromfile(tensor.path, dtype, tensor.size, offset=tensor.offset or 0).reshape(tensor.shape.numpy())


def new_initializer(graph: ir.Graph, name: str, values: np.ndarray | Sequence[int]) -> ir.Value:
    """Add an initializer `name` with `values` to `graph` and return it; Python integers become int64."""
    tensor = ir.Tensor(np.asarray(values, order="C"), name=name)  # ascontiguousarray would make a scalar 1-D
    value = ir.Value(
        name=name, const_value=tensor, shape=ir.Shape(tensor.numpy().shape), type=ir.TensorType(tensor.dtype)
    )
    graph.register_initializer(value)
    return value


def new_derived_initializer(
    graph: ir.Graph,
    name: str,
    sources: Sequence[ir.Value],
    shape: Sequence[int],
    operation: str,
    argument: Any = None,
    dtype: ir.DataType | None = None,
) -> ir.Value:
    """Add an initializer computed from `sources` to `graph`, record its weight recipe, and return it.

    The tensor is lazy: its values are computed when the model is saved, so only one such weight is in memory at a
    time. It has the dtype of `sources`; results of float32 operations are rounded to it.

    Args:
        operation, argument: an entry of `weight_recipes.OPERATIONS` and its first argument.
        shape: the shape of the result.
        dtype: the dtype of the result, if the operation returns another one than that of `sources`.
    """
    constants = [ir.convenience.get_const_tensor(source) for source in sources]
    tensors = [tensor for tensor in constants if tensor is not None]
    assert len(tensors) == len(constants), "new_derived_initializer() needs constants"
    dtype = tensors[0].dtype if dtype is None else dtype
    rounds = operation in FLOAT32_OPERATIONS and dtype != ir.DataType.FLOAT

    def evaluate() -> ir.Tensor:
        values = contiguous(OPERATIONS[operation](argument, *(tensor_values(t) for t in tensors)))
        return ir.Tensor(cast(dtype.name, values) if rounds else values, dtype=dtype, name=name)

    lazy = ir.LazyTensor(evaluate, dtype=dtype, shape=ir.Shape(shape), name=name)
    value = ir.Value(name=name, const_value=lazy, shape=lazy.shape, type=ir.TensorType(dtype))
    graph.register_initializer(value)
    record_recipe(value, operation, argument, sources)
    return record_recipe(value, "cast", dtype.name, [value]) if rounds else value


def unique_name(value: ir.Value | None, suffix: str) -> str:
    """Return an unused initializer name: the name of `value`, which a node computes, and `suffix`.

    Registering an initializer under a used name would drop the old one, which other nodes may consume.
    """
    node = None if value is None else value.producer()
    assert value is not None
    assert node is not None
    assert isinstance(node.graph, ir.Graph)
    name, number = f"{value.name}.{suffix}", 1
    while name in node.graph.initializers:
        name, number = f"{value.name}.{suffix}.{number}", number + 1
    return name


def replace_value(graph: ir.Graph, before: ir.Node, new: ir.Node, old: ir.Value) -> None:
    """Insert `new` before the node `before` and replace `old` by its first output, which takes the name of `old`."""
    output = new.outputs[0]
    output.name, output.type, output.shape = old.name, old.type, old.shape
    graph.insert_before(before, new)
    ir.convenience.replace_all_uses_with(old, output, replace_graph_outputs=True)


def replace_nodes(graph: ir.Graph, new: ir.Node, like: ir.Node, *old: ir.Node) -> None:
    """Replace the nodes `old` by `new`, at the place of the first, whose first output it takes over.

    `new` gets the metadata of `like`. Nothing else may read the outputs of `old`, which may name a node twice.
    """
    new.metadata_props.update(like.metadata_props)
    replace_value(graph, old[0], new, old[0].outputs[0])
    graph.remove(dict.fromkeys(old), safe=True)
