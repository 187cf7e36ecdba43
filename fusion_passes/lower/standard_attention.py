"""Lowers attention to ai.onnx Attention (opset 23), for targets on which its kernel is faster.

    MultiHeadAttention(q, k, v, -, -, mask; num_heads)  =>  Attention(q, k, v, mask; q_num_heads, kv_num_heads)
    ScaledDotProductAttention(q, k, v)                  =>  Attention(q, k, v)

Rejected: packed inputs and biases, which ai.onnx Attention does not have, and masks of ScaledDotProductAttention. The
model's opset becomes 23 if a node is replaced. On ONNX Runtime 1.31's CPU the four-axis form takes 0.93
to 1.10 of the time of MatMul, Softmax and MatMul; MultiHeadAttention between transposes takes 1.06 to 1.64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import onnx_ir as ir

from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, rewrite_nodes

OPSET = 23


def standard_attention(unsupported_reason: Callable[[ir.Node], str | None]) -> Pass:
    """Return the pass that replaces the MultiHeadAttention nodes for which `unsupported_reason` returns None."""

    def run(model: ir.Model) -> PassOutcome:
        reject_reason = partial(_reject_reason, unsupported_reason)
        outcome = rewrite_nodes(model, "standard_attention", "MultiHeadAttention", reject_reason, _rewrite)
        if outcome.counts.total():
            model.graph.opset_imports[""] = OPSET
        return outcome

    return Pass("standard_attention", run, CASES)


def _reject_reason(unsupported_reason: Callable[[ir.Node], str | None], node: ir.Node) -> str | None:
    if len(node.inputs) < 3 or None in node.inputs[:3]:
        return "packed inputs have no standard form"
    if any(value is not None for value in node.inputs[3:5]):
        return "a bias has no standard form"
    return unsupported_reason(node)


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    mask = node.inputs[5] if len(node.inputs) > 5 else None
    heads = node.attributes["num_heads"].as_int()
    scale = node.attributes["scale"].as_float()
    causal = node.attributes.get_int("unidirectional", 0)
    node.op_type, node.domain = "Attention", ""
    node.resize_inputs(3 if mask is None else 4)
    if mask is not None:
        node.replace_input_with(3, mask)
    node.attributes.clear()
    for name, number in (("q_num_heads", heads), ("kv_num_heads", heads), ("is_causal", causal)):
        node.attributes[name] = ir.AttrInt64(name, number)
    node.attributes["scale"] = ir.AttrFloat32("scale", scale)


def _run_four_axes(model: ir.Model) -> PassOutcome:
    outcome = rewrite_nodes(model, "standard_sdpa", "ScaledDotProductAttention", _mask_reason, _rewrite_four_axes)
    if outcome.counts.total():
        model.graph.opset_imports[""] = OPSET
    return outcome


def _mask_reason(node: ir.Node) -> str | None:
    has_mask = len(node.inputs) > 3 and node.inputs[3] is not None
    return "a mask has other rules for rows without keys" if has_mask else None


def _rewrite_four_axes(graph: ir.Graph, node: ir.Node) -> None:
    scale, causal = node.attributes["scale"].as_float(), node.attributes.get_int("is_causal", 0)
    node.op_type, node.domain, node.overload = "Attention", "", ""
    node.resize_inputs(3)
    node.attributes.clear()
    node.attributes["is_causal"] = ir.AttrInt64("is_causal", causal)
    node.attributes["scale"] = ir.AttrFloat32("scale", scale)


_SIZES = {"B": 2, "S": 5, "L": 3}


def _case(name: str, inputs: str, rejection: str | None = None, queries: str = "B,S,8") -> PassCase:
    graph = f"""<ir_version: 10, opset_import: ["" : 21, "sd_ort" : 1]>
        g (float[{queries}] q, float[B,L,8] k, float[B,1,S,L] m) => (float[B,S,8] y) {{
            y = sd_ort.MultiHeadAttention <num_heads = 2, scale = 0.45, unidirectional = 0> ({inputs})
        }}"""
    rewrites = int(rejection is None)
    return PassCase(
        name, graph, rewrites, {"Attention": rewrites, "MultiHeadAttention": 1 - rewrites}, rejection, _SIZES
    )


CASES = [_case("text", "q, k, k"), _case("a mask", "q, k, k, , , m"), _case("packed", "q", "packed", "B,S,2,3,4")]


def _four_axes_case(name: str, inputs: str, rejection: str | None = None, causal: int = 0) -> PassCase:
    graph = f"""<ir_version: 10, opset_import: ["" : 21, "sd_ort" : 1]>
        g (float[B,2,S,4] q, float[B,2,L,4] k, float[B,2,L,3] v, float[B,1,S,L] m) => (float[B,2,S,E] y) {{
            y = sd_ort.ScaledDotProductAttention <scale = 0.3, is_causal = {causal}> ({inputs})
        }}"""
    rewrites = int(rejection is None)
    ops = {"Attention": rewrites, "ScaledDotProductAttention": 1 - rewrites}
    return PassCase(name, graph, rewrites, ops, rejection, _SIZES)


FOUR_AXES = Pass(
    "standard_sdpa",
    _run_four_axes,
    [
        _four_axes_case("four axes", "q, k, v"),
        _four_axes_case("causal", "q, k, v", causal=1),
        _four_axes_case("a mask", "q, k, v, m", "a mask"),
    ],
)
