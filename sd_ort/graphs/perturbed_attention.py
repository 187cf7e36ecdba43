"""Perturbed self-attention: rows of the batch for which chosen layers return their values unattended (PAG).

Ahn et al., 2024, arXiv 2403.17377. Layers are found by the weights of their projections, so that exported and fused
graphs are modified alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from fusion_passes import value_queries, weight_recipes
from fusion_passes.graph_edits import new_initializer
from fusion_passes.weight_recipes import WeightRecipe
from sd_ort.core.errors import InputError
from sd_ort.graphs.layers import initializers_by_source, only_consumer

# Graph input (B,), int64: the index of each row's result among B attended rows and, behind these, B rows of values.
ROWS = "attention_rows"
SELF_ATTENTION = re.compile(r"(.+\.attn1)\.to_v\.weight$")
FORWARDING_OPS = ("Cast", "Identity", "Reshape", "Transpose")


def self_attention_layers(recipes: Mapping[str, WeightRecipe], patterns: Sequence[str]) -> list[str]:
    """Return the self-attention layers whose names match one of `patterns`, as diffusers' `pag_applied_layers`.

    Raises:
        InputError: if a pattern matches none, or is no regular expression.
    """
    sources = {source for recipe in recipes.values() for source in weight_recipes.sources(recipe)}
    names = sorted(match[1] for source in sources if (match := SELF_ATTENTION.match(source)))
    layers: dict[str, None] = {}
    for pattern in patterns:
        last = pattern.split(".")[-1]
        try:
            matching = [
                name
                for name in names
                if re.search(pattern, name) and not (last.isnumeric() and name.endswith(f".{last}"))
            ]
        except re.error as error:
            raise InputError(f"pag_applied_layers: {pattern!r} is no regular expression: {error}.") from error
        if not matching:
            raise InputError(f"pag_applied_layers: no self-attention layer matches {pattern!r}, of {', '.join(names)}.")
        layers |= dict.fromkeys(matching)
    return list(layers)


def perturb_attention(model: ir.Model, recipes: Mapping[str, WeightRecipe], layers: Sequence[str]) -> None:
    """Add the input `ROWS` to a UNet, exported or fused; in the rows that it chooses `layers` return their values.

    recipes: weight recipes of the initializers, which tell the layer of each.

    Raises:
        InputError: if a layer is not found in the graph.
    """
    graph = model.graph
    by_source = initializers_by_source(graph, recipes)
    batch = graph.inputs[0].shape
    rows = ir.Value(name=ROWS, type=ir.TensorType(ir.DataType.INT64))
    rows.shape = ir.Shape([None if batch is None else batch[0]])
    graph.inputs.append(rows)
    for layer in layers:
        value_node, out_node = (
            only_consumer(by_source.get(f"{layer}.{name}.weight", ()), FORWARDING_OPS, input_index=1)
            for name in ("to_v", "to_out.0")
        )
        attended = None if out_node is None else out_node.inputs[0]
        if value_node is None or out_node is None or attended is None:
            raise InputError(f"pag_applied_layers: {layer} is not found in the UNet's graph: export it with sd-ort.")
        packed = bool({*by_source[f"{layer}.to_v.weight"]} & {*by_source.get(f"{layer}.to_q.weight", ())})
        value = _packed_values(graph, value_node.outputs[0], layer) if packed else value_node.outputs[0]
        same, is_flat = attended, value_queries.rank(attended) != 3
        if is_flat:
            same = _add(graph, "Reshape", [attended, _shape_of(graph, value)], f"{layer}.attended", value)
        both = _add(graph, "Concat", [same, value], f"{layer}.both", attended, axis=0)
        chosen = _add(graph, "Gather", [both, rows], f"{layer}.perturbed", attended, axis=0)
        if is_flat:
            chosen = _add(graph, "Reshape", [chosen, _shape_of(graph, attended)], f"{layer}.flat", attended)
        out_node.replace_input_with(0, chosen)
    graph.sort()


def _packed_values(graph: ir.Graph, product: ir.Value, layer: str) -> ir.Value:
    """Return the values (B, S, C) in the packed projections `product` of a layer (`lower.pack_qkv`)."""
    packed = next((n.outputs[0] for n in value_queries.data_consumers(product) if n.op_type == "Reshape"), None)
    if value_queries.rank(packed) != 5:
        raise InputError(f"pag_applied_layers: {layer} is packed in an unknown layout: optimize the folder again.")
    assert packed is not None
    index = new_initializer(graph, f"{layer}.value_index", [2])
    target = new_initializer(graph, f"{layer}.value_target", [0, 0, -1])
    value = _add(graph, "Gather", [packed, index], f"{layer}.values", product, axis=3)
    return _add(graph, "Reshape", [value, target], f"{layer}.flat_values", product)


def _add(
    graph: ir.Graph, op_type: str, inputs: Sequence[ir.Value], name: str, like: ir.Value, **attributes: int
) -> ir.Value:
    """Append a node and return its output `name`, of the dtype of `like`."""
    node = ir.node(op_type, inputs, attributes)
    node.outputs[0].name, node.outputs[0].type = name, like.type
    graph.append(node)
    return node.outputs[0]


def _shape_of(graph: ir.Graph, value: ir.Value) -> ir.Value:
    node = ir.node("Shape", [value])
    node.outputs[0].name = f"{value.name}.shape_{len(graph)}"
    graph.append(node)
    return node.outputs[0]
