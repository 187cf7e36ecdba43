"""Modifications of a CLIP text encoder's graph, exported or fused: fewer layers, additional token embeddings.

The result is a serialized graph over the external data of the original (see `runtime.session`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sd_ort.core import onnx_file
from sd_ort.core.errors import InputError

if TYPE_CHECKING:
    import onnx

FLOAT, INT32 = 1, 6  # onnx.TensorProto.DataType


def modified_graph(path: Path, layers: int, skip: int = 0, new_tokens: tuple[int, np.ndarray] | None = None) -> bytes:
    """Return the serialized text encoder at `path` without the last `skip` of its `layers` layers.

    `new_tokens`: the first new token id, and the float32 embeddings (n, C) of the ids from there on. Only `skip` needs
    onnx_ir, whose import takes a second.

    Raises:
        InputError: if the layers or the embedding table are not found in the graph.
    """
    import onnx

    if skip:
        from sd_ort.graphs.clip_skip import skip_layers
        from sd_ort.graphs.load import load, serialize_over_data

        model = load(path)
        skip_layers(model, layers, skip)
        proto = onnx.ModelProto.FromString(serialize_over_data(model, path.parent))
    else:
        proto = onnx_file.read(path)
        for tensor in proto.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = Path(entry.value).name
    if new_tokens is not None:
        add_token_embeddings(proto.graph, *new_tokens)
    return proto.SerializeToString()


def add_token_embeddings(graph: onnx.GraphProto, first: int, rows: np.ndarray) -> None:
    """Use the embeddings `rows` (n, C) for token ids from `first` on, instead of the embedding table."""
    from onnx import helper, numpy_helper

    producers = {output: node for node in graph.node for output in node.output}
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    lookup, table = next(
        (
            (node, table)
            for node in graph.node
            if node.op_type == "Gather" and _reads_ids(node.input[1], producers)
            if (table := _table(node.input[0], producers, tensors)) is not None
        ),
        (None, None),
    )
    if lookup is None or table is None:
        raise InputError("this text encoder's table of token embeddings is not found: export the pipeline with sd-ort.")
    embeddings, ids = lookup.input
    # Behind a Cast of the table, which is to float32, the rows are float32 too.
    dtype = helper.tensor_dtype_to_np_dtype(table.data_type) if table.name == embeddings else np.dtype(np.float32)
    integer = _dtype_of_ids(ids, producers, graph)
    constants = {"first": np.array(first, integer), "zero": np.array(0, integer), "axis": np.array([-1])}
    constants["rows"] = rows.astype(dtype)
    graph.initializer.extend(numpy_helper.from_array(value, f"words.{name}") for name, value in constants.items())
    nodes: list[onnx.NodeProto] = []

    def node(op: str, *inputs: str) -> str:
        nodes.append(helper.make_node(op, inputs, [f"words.{op.lower()}.{len(nodes)}"]))
        return str(nodes[-1].output[0])

    is_old = node("Less", ids, "words.first")
    old = node("Gather", embeddings, node("Where", is_old, ids, "words.zero"))
    new = node("Gather", "words.rows", node("Where", is_old, "words.zero", node("Sub", ids, "words.first")))
    nodes.append(helper.make_node("Where", [node("Unsqueeze", is_old, "words.axis"), old, new], [lookup.output[0]]))
    index = list(graph.node).index(lookup)
    every = [*graph.node[:index], *nodes, *graph.node[index + 1 :]]
    del graph.node[:]
    graph.node.extend(every)


def _reads_ids(name: str, producers: Mapping[str, onnx.NodeProto]) -> bool:
    """Return whether a value is the graph input input_ids, possibly cast or reshaped."""
    while (node := producers.get(name)) is not None and node.op_type in ("Cast", "Reshape", "Flatten"):
        name = node.input[0]
    return name == "input_ids"


def _dtype_of_ids(name: str, producers: Mapping[str, onnx.NodeProto], graph: onnx.GraphProto) -> type[np.integer]:
    """Return the dtype of a value that `_reads_ids`: that of the last Cast, else of the graph input."""
    while (node := producers.get(name)) is not None and node.op_type != "Cast":
        name = node.input[0]
    if node is not None:
        dtype = next(attribute.i for attribute in node.attribute if attribute.name == "to")
    else:
        dtype = next(value.type.tensor_type.elem_type for value in graph.input if value.name == name)
    return np.int32 if dtype == INT32 else np.int64


def _table(
    name: str, producers: Mapping[str, onnx.NodeProto], tensors: Mapping[str, onnx.TensorProto]
) -> onnx.TensorProto | None:
    """Return the constant embedding table (vocabulary, C) of a value, also behind the Cast to float32 of target cpu."""
    cast = producers.get(name)
    if cast is not None and cast.op_type == "Cast" and any(a.name == "to" and a.i == FLOAT for a in cast.attribute):
        name = cast.input[0]
    table = tensors.get(name)
    return table if table is not None and len(table.dims) == 2 else None
