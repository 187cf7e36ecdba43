"""Modifications of a CLIP text encoder's graph, exported or fused: fewer layers, additional token embeddings.

The result is a serialized graph over the external data of the original (see `runtime.session`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from fusion_passes import value_queries
from fusion_passes.graph_edits import new_initializer
from sd_ort.core.errors import InputError
from sd_ort.graphs.load import load, serialize_over_data

NORMS = ("LayerNormalization", "SkipLayerNormalization")
SUM = 3  # index of SkipLayerNormalization's output with the sum, its normalized input


def modified_graph(path: Path, layers: int, skip: int = 0, new_tokens: tuple[int, np.ndarray] | None = None) -> bytes:
    """Return the serialized text encoder at `path` without the last `skip` of its `layers` layers.

    `new_tokens`: the first new token id, and the float32 embeddings (n, C) of the ids from there on.

    Raises:
        InputError: if the layers or the embedding table are not found in the graph.
    """
    model = load(path)
    if skip:
        skip_layers(model, layers, skip)
    if new_tokens is not None:
        add_token_embeddings(model, *new_tokens)
    return serialize_over_data(model, path.parent)


def skip_layers(model: ir.Model, layers: int, skip: int) -> None:
    """Take the embeddings from `skip` layers earlier, as diffusers' clip_skip.

    A layer has two norms, and a final norm follows the last layer, so the input of norm 2 * (layers - skip) is the
    output of layer `layers - skip`. For `last_hidden_state` that norm gets the weights of the final norm and replaces
    its output. SDXL's `hidden_states` is the output of the penultimate layer before any norm, so it becomes the input
    of the norm one layer earlier. If every layer is an output (Optimum's SDXL), the penultimate output and an earlier
    one exchange names.
    """
    if f"hidden_states.{layers}" in {value.name for value in model.graph.outputs}:
        _skip_outputs(model.graph, layers, skip)
        return
    norms = [node for node in model.graph if node.op_type in NORMS]
    outputs = {str(value.name): value for value in model.graph.outputs}
    normed = "last_hidden_state" in outputs
    complete, truncated = 2 * layers + 1, 2 * (layers - 1)  # SDXL's first encoder ends before its last layer
    index = 2 * (layers - skip - (not normed))
    if len(norms) not in ((complete,) if normed else (complete, truncated)) or not (
        {"last_hidden_state", "hidden_states"} & outputs.keys()
    ):
        raise InputError("clip_skip finds no layers in this text encoder: export the pipeline with sd-ort.")
    if index < 0:
        raise _too_many(layers, skip)
    norm, last = norms[index], norms[-1]
    if not normed:
        _replace_output(model, outputs["hidden_states"], _norm_input(norm))  # the pooled output still uses all layers
    else:
        gamma = 2 if norm.op_type == NORMS[1] else 1
        last_gamma = 2 if last.op_type == NORMS[1] else 1
        for offset in range(2):  # gamma and beta
            norm.replace_input_with(gamma + offset, last.inputs[last_gamma + offset])
        _replace_value(model, last.outputs[0], norm.outputs[0])
    common.RemoveUnusedNodesPass()(model)


def _skip_outputs(graph: ir.Graph, layers: int, skip: int) -> None:
    outputs = {str(value.name): value for value in graph.outputs}
    if skip >= layers:
        raise _too_many(layers, skip)
    penultimate, earlier = outputs[f"hidden_states.{layers - 1}"], outputs[f"hidden_states.{layers - 1 - skip}"]
    penultimate.name, earlier.name = earlier.name, penultimate.name


def _too_many(layers: int, skip: int) -> InputError:
    return InputError(f"clip_skip {skip} is more than this text encoder's {layers} layers can leave out.")


def add_token_embeddings(model: ir.Model, first: int, rows: np.ndarray) -> None:
    """Use the embeddings `rows` (n, C) for token ids from `first` on, instead of the embedding table."""
    graph = model.graph
    lookup = next((n for n in graph if n.op_type == "Gather" and _reads_ids(n.inputs[1]) and _table(n.inputs[0])), None)
    stored = None if lookup is None else _table(lookup.inputs[0])
    if lookup is None or stored is None or stored.const_value is None:
        raise InputError("this text encoder's table of token embeddings is not found: export the pipeline with sd-ort.")
    table, ids = lookup.inputs
    assert table is not None
    assert ids is not None
    dtype = stored.const_value.dtype if table is stored else ir.DataType.FLOAT
    integer = np.int32 if ids.dtype == ir.DataType.INT32 else np.int64
    bound = new_initializer(graph, "words.first", np.array(first, integer))
    zero, axis = (
        new_initializer(graph, "words.zero", np.array(0, integer)),
        new_initializer(graph, "words.axis", np.array([-1])),
    )
    new_table = new_initializer(graph, "words.rows", rows.astype(dtype.numpy()))
    nodes: list[ir.Node] = []

    def node(op: str, *inputs: ir.Value | None) -> ir.Value:
        new = ir.node(op, list(inputs))
        new.outputs[0].name = f"words.{op.lower()}.{len(nodes)}"
        nodes.append(new)
        return new.outputs[0]

    is_old = node("Less", ids, bound)
    old = node("Gather", table, node("Where", is_old, ids, zero))
    new = node("Gather", new_table, node("Where", is_old, zero, node("Sub", ids, bound)))
    embeddings = node("Where", node("Unsqueeze", is_old, axis), old, new)
    graph.insert_before(lookup, nodes)
    _replace_value(model, lookup.outputs[0], embeddings)
    graph.remove(lookup, safe=True)


def _norm_input(norm: ir.Node) -> ir.Value:
    """Return the value that a norm normalizes."""
    value = norm.inputs[0] if norm.op_type == NORMS[0] else norm.outputs[SUM]
    assert value is not None
    return value


def _replace_value(model: ir.Model, old: ir.Value, new: ir.Value) -> None:
    """Replace `old` by `new`, which takes its name if `old` is a graph output."""
    new.type, new.shape = old.type, old.shape
    if old.is_graph_output():
        _replace_output(model, old, new)
    ir.convenience.replace_all_uses_with(old, new)


def _replace_output(model: ir.Model, old: ir.Value, new: ir.Value) -> None:
    """Replace the graph output `old` by `new`, which takes its name."""
    index = next(index for index, value in enumerate(model.graph.outputs) if value is old)
    new.type, new.shape = old.type, old.shape
    name, old.name = old.name, f"{old.name}.old"
    new.name = name
    model.graph.outputs[index] = new


def _reads_ids(value: ir.Value | None) -> bool:
    """Return whether a value is the graph input input_ids, possibly cast or reshaped."""
    while (
        value is not None and (node := value.producer()) is not None and node.op_type in ("Cast", "Reshape", "Flatten")
    ):
        value = node.inputs[0]
    return value is not None and value.producer() is None and value.name == "input_ids"


def _table(value: ir.Value | None) -> ir.Value | None:
    """Return the constant embedding table (vocabulary, C) of a value, also behind the Cast to float32 of target cpu."""
    if value is not None and (cast := value.producer()) is not None and cast.op_type == "Cast":
        value = cast.inputs[0] if cast.attributes["to"].as_int() == ir.DataType.FLOAT else None
    return value if value is not None and value_queries.is_constant(value) and len(value.shape or ()) == 2 else None
