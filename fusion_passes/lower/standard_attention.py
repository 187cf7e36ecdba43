"""Lowers attention to ai.onnx Attention (opset 23), for targets on which its kernel is faster.

    MultiHeadAttention(q, k, v, -, -, mask?; num_heads)  =>  Attention(q, k, v, mask?; q_num_heads, kv_num_heads)
    MultiHeadAttention(q, repeated(k), repeated(v), ..)  =>  Attention(q, k, v, mask?), with fewer heads of keys
    ScaledDotProductAttention(q, k, v, mask?)            =>  Attention(q, k, v, mask?), on [B,N,S,D]

ONNX Runtime's Attention returns 0 for a row whose scores are all -infinity or the lowest finite value, where a Softmax
has the mean of v. So a mask is an input of Attention, a constant without such rows, or a Where of two float32 scalars;
the lowest value in it is halved, after which the sum with any score is the same number, too. Rejected: other masks,
packed inputs, biases.

The model's opset becomes 23 if a node is replaced. Times of ONNX Runtime 1.31's CPU, of MatMul, Softmax and MatMul: on
four axes 0.93 to 1.10, with a mask 0.91 to 0.98; with repeated keys 0.59 to 0.97, and MultiHeadAttention 0.90 to 1.09.
MultiHeadAttention between transposes takes 1.06 to 1.64, Attention with capped scores 1.6.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx_ir as ir

from fusion_passes import value_queries as values
from fusion_passes.canonicalize.attention.masks import ZERO_ROWS
from fusion_passes.cleanup import remove_unused
from fusion_passes.graph_edits import new_initializer, unique_name
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, rewrite_nodes
from fusion_passes.repeated_heads import kv_before_repetition, kv_head_count

OPSET = 23
VIEWS = ("Expand", "Reshape", "Unsqueeze", "Squeeze", "Slice")  # operators whose elements are those of the first input
KernelConstraint = Callable[[ir.Node], str | None]
Masks = dict[ir.Value, ir.Value]


def standard_attention(unsupported_reason: KernelConstraint) -> Pass:
    """Return the pass that replaces the MultiHeadAttention nodes for which `unsupported_reason` returns None."""
    return _pass("standard_attention", "MultiHeadAttention", unsupported_reason, _packed_reason, _rewrite, CASES)


def grouped_attention(unsupported_reason: KernelConstraint = lambda node: None) -> Pass:
    """Return the pass that replaces MultiHeadAttention of repeated keys if `unsupported_reason` returns None."""

    def reason(node: ir.Node) -> str | None:
        return _ungrouped(node) or unsupported_reason(node)

    return _pass("grouped_attention", "MultiHeadAttention", reason, _packed_reason, _rewrite, GROUPED_CASES)


def grouped_sdpa() -> Pass:
    """Return the pass that replaces ScaledDotProductAttention of repeated keys."""
    op_type = "ScaledDotProductAttention"
    return _pass("grouped_sdpa", op_type, _ungrouped, lambda node: None, _rewrite_four_axes, GROUPED_SDPA_CASES)


def _ungrouped(node: ir.Node) -> str | None:
    axis = 1 if node.op_type == "ScaledDotProductAttention" else 2
    return None if kv_head_count(node, axis) else "each query has keys of its own"


def standard_sdpa(unsupported_reason: KernelConstraint) -> Pass:
    """Return the pass for the ScaledDotProductAttention nodes for which `unsupported_reason` returns None."""
    return _pass(
        "standard_sdpa",
        "ScaledDotProductAttention",
        unsupported_reason,
        lambda node: None,
        _rewrite_four_axes,
        SDPA_CASES,
    )


def _pass(
    name: str,
    op_type: str,
    unsupported_reason: KernelConstraint,
    packed_reason: KernelConstraint,
    rewrite: Callable[[Masks, ir.Graph, ir.Node], None],
    cases: list[PassCase],
) -> Pass:
    def reject_reason(node: ir.Node) -> str | None:
        return packed_reason(node) or unsupported_reason(node) or _mask_reason(node, _mask(node))

    def run(model: ir.Model) -> PassOutcome:
        outcome = rewrite_nodes(model, name, op_type, reject_reason, partial(rewrite, {}))
        if outcome.counts.total():
            model.graph.opset_imports[""] = max(OPSET, model.graph.opset_imports[""])
            remove_unused(model.graph)
        return outcome

    return Pass(name, run, cases)


def _packed_reason(node: ir.Node) -> str | None:
    if len(node.inputs) < 3 or None in node.inputs[:3]:
        return "packed inputs have no standard form"
    return "a bias has no standard form" if any(value is not None for value in node.inputs[3:5]) else None


def _mask(node: ir.Node) -> ir.Value | None:
    index = 5 if node.op_type == "MultiHeadAttention" else 3
    return node.inputs[index] if len(node.inputs) > index else None


def _mask_reason(node: ir.Node, mask: ir.Value | None) -> str | None:
    """Return why a mask may hide a row that Attention has to answer with the mean of v, or None."""
    if mask is None or ZERO_ROWS in node.metadata_props:
        return None
    if mask.dtype == ir.DataType.FLOAT:
        if values.is_constant(mask):
            array = values.constant(mask)
            if array is not None and (array > np.finfo(np.float32).min).any(-1).all():
                return None
        elif _choices(mask) is not None:
            return None
    return "the mask may hide all keys of a row, which Attention answers with zeros"


def _choices(mask: ir.Value) -> ir.Node | None:
    """Return the Where of two scalars whose elements a mask has, or None."""
    node = mask.producer()
    while node is not None and node.op_type in VIEWS and not node.domain and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    is_choice = node is not None and node.op_type == "Where" and not node.domain
    return node if node is not None and is_choice and None not in map(values.scalar, node.inputs[1:]) else None


def _halved(masks: Masks, value: ir.Value) -> ir.Value:
    """Return a mask of `_choices` with half the lowest float32 in place of it; `masks` has those of earlier calls."""
    if value in masks:
        return masks[value]
    node = values.producer(value)
    assert isinstance(node.graph, ir.Graph)
    inputs = list(node.inputs)
    if node.op_type == "Where":
        lowest = float(np.finfo(np.float32).min)
        for index, choice in enumerate(node.inputs[1:], 1):
            if values.scalar(choice) == lowest:
                array = np.full((choice.shape or ir.Shape(())).numpy(), lowest / 2, np.float32)  # type: ignore[union-attr]
                inputs[index] = new_initializer(node.graph, unique_name(value, "half"), array)
    else:
        assert inputs[0] is not None
        inputs[0] = _halved(masks, inputs[0])
    masks[value] = value
    if any(new is not old for new, old in zip(inputs, node.inputs, strict=True)):
        copy = ir.node(node.op_type, inputs, {name: node.attributes[name].value for name in node.attributes})
        output = copy.outputs[0]
        output.name, output.type, output.shape = f"{value.name}.finite", value.type, value.shape
        node.graph.insert_after(node, copy)
        masks[value] = output
    return masks[value]


def _mask_input(masks: Masks, graph: ir.Graph, node: ir.Node, mask: ir.Value, axis: int) -> ir.Value:
    """Return a mask whose last axes are S and L, as ONNX Runtime's Attention needs it; q and k have these at `axis`."""
    if ZERO_ROWS not in node.metadata_props and not values.is_constant(mask):
        mask = _halved(masks, mask)
    query, key = node.inputs[:2]
    shapes = [values.dims(x) for x in (query, key)]
    sequences = [None if shape is None else shape[axis] for shape in shapes]
    shape = values.dims(mask) or []
    if shape[-2:] == sequences:
        return mask
    sizes = [ir.node("Shape", [x], {"start": axis, "end": axis + 1}) for x in (query, key)]
    ones = (
        [new_initializer(graph, unique_name(node.outputs[0], "ones"), [1] * (len(shape) - 2))] if len(shape) > 2 else []
    )
    target = ir.node("Concat", [*ones, *(size.outputs[0] for size in sizes)], {"axis": 0})
    expanded = ir.node("Expand", [mask, target.outputs[0]])
    for index, new in enumerate((*sizes, target, expanded)):
        new.outputs[0].name = f"{unique_name(node.outputs[0], 'mask')}{index}"
    expanded.outputs[0].type = mask.type
    expanded.outputs[0].shape = ir.Shape([*shape[:-2], *sequences])
    graph.insert_before(node, [*sizes, target, expanded])
    return expanded.outputs[0]


def _replace(node: ir.Node, inputs: list[ir.Value | None], attributes: dict[str, int | float]) -> None:
    node.op_type, node.domain, node.overload = "Attention", "", ""
    node.metadata_props.pop(ZERO_ROWS, None)
    node.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        node.replace_input_with(index, value)
    node.attributes.clear()
    for name, number in attributes.items():
        node.attributes[name] = ir.AttrInt64(name, number) if isinstance(number, int) else ir.AttrFloat32(name, number)


def _rewrite(masks: Masks, graph: ir.Graph, node: ir.Node) -> None:
    mask, heads = _mask(node), node.attributes["num_heads"].as_int()
    masked = [] if mask is None else [_mask_input(masks, graph, node, mask, 1)]
    kv_heads = kv_head_count(node, 2) or heads
    keys = kv_before_repetition(graph, node, 2)
    attributes = {
        "q_num_heads": heads,
        "kv_num_heads": kv_heads,
        "is_causal": node.attributes.get_int("unidirectional", 0),
        "scale": node.attributes["scale"].as_float(),
    }
    _replace(node, [node.inputs[0], *keys, *masked], attributes)


def _rewrite_four_axes(masks: Masks, graph: ir.Graph, node: ir.Node) -> None:
    mask = _mask(node)
    attributes = {"is_causal": node.attributes.get_int("is_causal", 0), "scale": node.attributes["scale"].as_float()}
    if softcap := node.attributes.get_float("softcap", 0.0):
        attributes["softcap"] = softcap
    if mask is not None and ZERO_ROWS in node.metadata_props and (rows := _row_factor(node, mask)):
        factor, keep = rows  # Attention multiplies by it, too
        ir.convenience.replace_all_uses_with(factor.outputs[0], node.outputs[0], replace_graph_outputs=True)
        mask = keep
    masked = [] if mask is None else [_mask_input(masks, graph, node, mask, 2)]
    _replace(node, [node.inputs[0], *kv_before_repetition(graph, node, 1), *masked], attributes)


def _row_factor(node: ir.Node, mask: ir.Value) -> tuple[ir.Node, ir.Value] | None:
    """Return the Mul of an attention by 0 for the rows that a boolean mask hides, and that mask, or None."""
    choice, heads = mask.producer(), node.outputs[0]
    consumers = values.consumers(heads)
    if choice is None or choice.op_type != "Where" or heads.is_graph_output() or len(consumers) != 1:
        return None
    keep, factor = choice.inputs[0], consumers[0]
    if factor.op_type != "Mul" or keep is None or factor.inputs[0] is not heads or factor.inputs[1] is None:
        return None
    largest = factor.inputs[1].producer()
    cast = (
        None
        if largest is None or largest.op_type != "ReduceMax" or largest.inputs[0] is None
        else largest.inputs[0].producer()
    )
    return (factor, keep) if cast is not None and cast.op_type == "Cast" and cast.inputs[0] is keep else None


_SIZES = {"B": 2, "S": 5, "L": 3}
_CHOICE = "half = Mul (keep_float, one)  on = Cast <to = 9> (half)  m = Where (on, zero, {low})"


def _case(
    name: str, inputs: str, rejection: str | None = None, queries: str = "B,S,8", body: str = "", mask: str = "B,1,S,L",
    keys: str = "8", heads: int = 2, ops: dict[str, int] | None = None, weights: str = "",
) -> PassCase:  # fmt: skip
    graph = f"""<ir_version: 10, opset_import: ["" : 21, "sd_ort" : 1]>
        g (float[{queries}] q, float[B,L,{keys}] k, float[B,L,{keys}] v, float[{mask}] keep_float)
          => (float[B,S,8] y)
        <float one = {{1.0}}, float zero = {{0.0}}, float low = {{-3.4028234663852886e38}}, float far = {{-1e4}}
         {weights}> {{
            {body}
            y = sd_ort.MultiHeadAttention <num_heads = {heads}, scale = 0.45, unidirectional = 0> ({inputs})
        }}"""
    rewrites = int(rejection is None)
    expected = {"Attention": rewrites, "MultiHeadAttention": 1 - rewrites} | (ops or {})
    return PassCase(name, graph, rewrites, expected, rejection, _SIZES)


_REPEATED = """
    k4 = Reshape (k, split)  k5 = Reshape (k4, five)  ke = Expand (k5, groups)  kr = Reshape (ke, flat)
    v4 = Reshape (v, split)  v5 = Reshape (v4, five)  ve = Expand (v5, groups)  vr = Reshape (ve, flat)"""
_grouped = partial(
    _case, keys="4", heads=4, ops={"Expand": 0, "Reshape": 0},
    weights=", int64[4] split = {0, 0, 2, 2}, int64[5] five = {0, 0, 2, 1, 2}, int64[5] groups = {1, 1, 1, 2, 1},"
    " int64[3] flat = {0, 0, 8}",
)  # fmt: skip
_HIDDEN = "the mask may hide all keys"
CASES = [
    _case("text", "q, k, k"),
    _case("a mask that is an input", "q, k, k, , , keep_float", _HIDDEN),
    _case("a mask of zero and the lowest number", "q, k, k, , , m", body=_CHOICE.format(low="low")),
    _case("a mask of zero and -10000", "q, k, k, , , m", body=_CHOICE.format(low="far")),
    _case("a mask a key", "q, k, k, , , m", body=_CHOICE.format(low="low"), mask="B,1,1,L", ops={"Expand": 1}),
    _case("packed", "q", "packed", "B,S,2,3,4"),
]
GROUPED_CASES = [
    _grouped("two queries for each key", "q, kr, vr", body=_REPEATED),
    _grouped("two queries for each key, and a mask", "q, kr, vr, , , m", body=_REPEATED + _CHOICE.format(low="low")),
    _grouped(
        "heads of 2 repeated, heads of 1 split",
        "q, kr, vr",
        body=_REPEATED,
        heads=8,
        rejection="keys of its own",
        ops={"Expand": 2},
    ),
    _grouped(
        "keys repeated, values of other heads",
        "q, kr, vo",
        body=_REPEATED + "  vo = Concat <axis = 2> (v, v)",
        rejection="keys of its own",
        ops={"Expand": 1, "Concat": 1},
    ),
]


def _sdpa_case(
    name: str, inputs: str, rejection: str | None = None, causal: int = 0, body: str = "", mask: str = "B,1,S,L",
    heads: int = 2,
) -> PassCase:  # fmt: skip
    graph = f"""<ir_version: 10, opset_import: ["" : 21, "sd_ort" : 1]>
        g (float[B,{heads},S,4] q, float[B,2,L,4] k, float[B,2,L,3] v, float[{mask}] keep_float)
          => (float[B,{heads},S,E] y)
        <int64[5] many = {{1, 1, 2, 1, 1}}, int64[1] two = {{2}}, int64[4] keys = {{0, 4, -1, 4}},
         int64[4] values = {{0, 4, -1, 3}}, float one = {{1.0}}, float zero = {{0.0}},
         float low = {{-3.4028234663852886e38}}> {{
            {body}
            y = sd_ort.ScaledDotProductAttention <scale = 0.3, is_causal = {causal}> ({inputs})
        }}"""
    rewrites = int(rejection is None)
    ops = {"Attention": rewrites, "ScaledDotProductAttention": 1 - rewrites}
    return PassCase(name, graph, rewrites, ops, rejection, _SIZES)


SDPA_CASES = [
    _sdpa_case("four axes", "q, k, v"),
    _sdpa_case("causal", "q, k, v", causal=1),
    _sdpa_case("a mask that is an input", "q, k, v, keep_float", _HIDDEN),
    _sdpa_case("a mask of zero and the lowest number", "q, k, v, m", body=_CHOICE.format(low="low")),
    _sdpa_case("a mask a query", "q, k, v, m", body=_CHOICE.format(low="low"), mask="S,1"),
]
_REPEATED_HEADS = """
    k5 = Unsqueeze (k, two)  ke = Expand (k5, many)  kr = Reshape (ke, keys)
    v5 = Unsqueeze (v, two)  ve = Expand (v5, many)  vr = Reshape (ve, values)"""
GROUPED_SDPA_CASES = [
    _sdpa_case("two queries for each key", "q, kr, vr", body=_REPEATED_HEADS, heads=4),
    _sdpa_case("a query for each key", "q, k, v", "keys of its own"),
]
