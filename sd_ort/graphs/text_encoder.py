"""Changes of a CLIP text encoder's graph, as exported or fused: fewer layers, and more words.

The graph comes out as bytes without weights, which stay in the file beside the original (see `runtime.session`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from fusion_passes import value_queries as c
from fusion_passes.graph_edits import new_initializer
from sd_ort.core.errors import InputError
from sd_ort.graphs.load import load, over_data

NORMS = ("LayerNormalization", "SkipLayerNormalization")
SUM = 3  # output of SkipLayerNormalization: what it normalizes


def changed(path: Path, layers: int, skip: int = 0, words: tuple[int, np.ndarray] | None = None) -> bytes:
    """The text encoder at `path`, of `layers` layers, without its last `skip` ones; token ids from `words[0]` on look
    their embeddings up in `words[1]` (n, C), float32.

    Raises InputError for a graph of another form.
    """
    model = load(path)
    if skip:
        skip_layers(model, layers, skip)
    if words is not None:
        add_words(model, *words)
    return over_data(model, path.parent)


def skip_layers(model: ir.Model, layers: int, skip: int) -> None:
    """Let the embeddings come from `skip` layers earlier, as diffusers' clip_skip.

    A layer has two norms, and one follows the last: norm 2 (layers - skip) reads what that many layers gave. For
    `last_hidden_state` it takes the weights of the last norm, and its result; `hidden_states`, SDXL's, are the
    penultimate layer's before any norm, so that they come from what the norm of one layer earlier reads. Where every
    layer is an output (Optimum's SDXL), the penultimate one gets the name of an earlier one, and that one its name.
    """
    if f"hidden_states.{layers}" in {value.name for value in model.graph.outputs}:
        _skip_outputs(model.graph, layers, skip)
        return
    norms = [node for node in model.graph if node.op_type in NORMS]
    outputs = {str(value.name): value for value in model.graph.outputs}
    normed = "last_hidden_state" in outputs
    whole, cut = 2 * layers + 1, 2 * (layers - 1)  # SDXL's first encoder ends before its last layer
    place = 2 * (layers - skip - (not normed))
    if len(norms) not in ((whole,) if normed else (whole, cut)) or not (
        {"last_hidden_state", "hidden_states"} & outputs.keys()
    ):
        raise InputError("clip_skip finds no layers in this text encoder: export the pipeline with sd-ort.")
    if place < 0:
        raise _too_many(layers, skip)
    norm, last = norms[place], norms[-1]
    if not normed:
        _give_out(model, outputs["hidden_states"], _read(norm))  # the pooled text goes on through all layers
    else:
        weights = 2 if norm.op_type == NORMS[1] else 1
        theirs = 2 if last.op_type == NORMS[1] else 1
        for index in range(2):
            norm.replace_input_with(weights + index, last.inputs[theirs + index])
        _take_place(model, last.outputs[0], norm.outputs[0])
    common.RemoveUnusedNodesPass()(model)


def _skip_outputs(graph: ir.Graph, layers: int, skip: int) -> None:
    outputs = {str(value.name): value for value in graph.outputs}
    if skip >= layers:
        raise _too_many(layers, skip)
    read, earlier = outputs[f"hidden_states.{layers - 1}"], outputs[f"hidden_states.{layers - 1 - skip}"]
    read.name, earlier.name = earlier.name, read.name


def _too_many(layers: int, skip: int) -> InputError:
    return InputError(f"clip_skip {skip} is more than this text encoder's {layers} layers can leave out.")


def add_words(model: ir.Model, first: int, rows: np.ndarray) -> None:
    """Token ids from `first` on read `rows` (n, C) instead of the embedding table."""
    graph = model.graph
    lookup = next((n for n in graph if n.op_type == "Gather" and _reads_ids(n.inputs[1]) and _table(n.inputs[0])), None)
    stored = None if lookup is None else _table(lookup.inputs[0])
    if lookup is None or stored is None or stored.const_value is None:
        raise InputError("this text encoder's table of words is not found: export the pipeline with sd-ort.")
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
    kept = new_initializer(graph, "words.rows", rows.astype(dtype.numpy()))
    nodes: list[ir.Node] = []

    def node(op: str, *inputs: ir.Value | None) -> ir.Value:
        made = ir.node(op, list(inputs))
        made.outputs[0].name = f"words.{op.lower()}.{len(nodes)}"
        nodes.append(made)
        return made.outputs[0]

    known = node("Less", ids, bound)
    old = node("Gather", table, node("Where", known, ids, zero))
    new = node("Gather", kept, node("Where", known, zero, node("Sub", ids, bound)))
    looked_up = node("Where", node("Unsqueeze", known, axis), old, new)
    graph.insert_before(lookup, nodes)
    _take_place(model, lookup.outputs[0], looked_up)
    graph.remove(lookup, safe=True)


def _read(norm: ir.Node) -> ir.Value:
    """What a norm normalizes."""
    value = norm.inputs[0] if norm.op_type == NORMS[0] else norm.outputs[SUM]
    assert value is not None
    return value


def _take_place(model: ir.Model, old: ir.Value, new: ir.Value) -> None:
    """Let `new` stand where `old` stands, with its name where that is an output of the graph."""
    new.type, new.shape = old.type, old.shape
    if old.is_graph_output():
        _give_out(model, old, new)
    ir.convenience.replace_all_uses_with(old, new)


def _give_out(model: ir.Model, old: ir.Value, new: ir.Value) -> None:
    """Let `new` be the output of the graph that `old` is, of the same name."""
    place = next(index for index, value in enumerate(model.graph.outputs) if value is old)
    new.type, new.shape = old.type, old.shape
    name, old.name = old.name, f"{old.name}.old"
    new.name = name
    model.graph.outputs[place] = new


def _reads_ids(value: ir.Value | None) -> bool:
    """Whether a value is the graph's input_ids, cast or reshaped."""
    while (
        value is not None and (node := value.producer()) is not None and node.op_type in ("Cast", "Reshape", "Flatten")
    ):
        value = node.inputs[0]
    return value is not None and value.producer() is None and value.name == "input_ids"


def _table(value: ir.Value | None) -> ir.Value | None:
    """The table (words, C) that a value is, or is in float32 where target cpu stores weights in half the space."""
    if value is not None and (cast := value.producer()) is not None and cast.op_type == "Cast":
        value = cast.inputs[0] if cast.attributes["to"].as_int() == ir.DataType.FLOAT else None
    return value if value is not None and c.is_constant(value) and len(value.shape or ()) == 2 else None
