"""Fewer layers of a CLIP text encoder: diffusers' clip_skip, as a modification of its graph, exported or fused."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from sd_ort.core.errors import InputError

NORMS = ("LayerNormalization", "SkipLayerNormalization")
SUM = 3  # index of SkipLayerNormalization's output with the sum, its normalized input


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
