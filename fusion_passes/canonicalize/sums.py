"""Moves the bias to the last Add before a Split, where the fusion of gated feed-forward layers expects it.

    Add(Add(x, bias), y) -> Split   =>  Add(Add(x, y), bias) -> Split

An unmerged LoRA adds its low-rank term between the projection's bias and the Split. Rejected: a bias without one
constant element per channel, a `y` that is a bias itself, sums with other consumers.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from fusion_passes import value_queries as values
from fusion_passes.graph_pass import PassCase
from fusion_passes.rule import Rule, rule_pass


class BiasLast(Rule):
    """(x + bias) + y => (x + y) + bias"""

    def pattern(self, op: Any, x: Any, bias: Any, y: Any) -> Any:
        return op.Add(op.Add(x, bias, _outputs=["biased"]), y, _outputs=["out"])

    def reject_reason(self, x: ir.Value, bias: ir.Value, y: ir.Value, out: ir.Value, **_: Any) -> str | None:
        consumers = values.consumers(out)
        if len(consumers) != 1 or consumers[0].op_type != "Split" or out.is_graph_output():
            return "the sum has a consumer other than one Split"
        if not values.is_vector(bias, values.size(x, -1)):
            return "the bias is not a constant vector over the last axis"
        return None if values.same_shape(x, y) else "the addends differ in shape"

    def rewrite(self, op: Any, x: ir.Value, bias: ir.Value, y: ir.Value, **_: Any) -> Any:
        return op.Add(op.Add(x, y), bias)


class BiasLastSwapped(BiasLast):
    """y + (x + bias) => (x + y) + bias"""

    def pattern(self, op: Any, x: Any, bias: Any, y: Any) -> Any:
        return op.Add(y, op.Add(x, bias, _outputs=["biased"]), _outputs=["out"])


RULES = (BiasLast, BiasLastSwapped)


def _case(name: str, body: str, rewrites: int = 1, rejection: str | None = None, outputs: str = "") -> PassCase:
    graph = f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,S,8] x, float[N,S,8] y) => (float[N,S,4] l, float[N,S,4] r {outputs})
        <float[8] b, float[8] d, float[1,5,8] table, int64[2] halves = {{4, 4}}> {{
            {body}
            l, r = Split <axis = 2> (a, halves)
        }}"""
    return PassCase(name, graph, rewrites, {"Add": 2, "Split": 1}, rejection, {"N": 2, "S": 5})


CASES = [
    _case("a low-rank sum", "i = Add (x, b)  a = Add (i, y)"),
    _case("operands swapped", "i = Add (b, x)  a = Add (y, i)"),
    _case("two biases", "i = Add (x, b)  a = Add (i, d)", 0, "differ in shape"),
    _case("positions in place of a bias", "i = Add (x, table)  a = Add (i, y)", 0, "not a constant vector"),
    _case("the sum is an output", "i = Add (x, b)  a = Add (i, y)", 0, "other than one Split", ", float[N,S,8] a"),
    _case("the biased one is an output", "i = Add (x, b)  a = Add (i, y)", 0, None, ", float[N,S,8] i"),
]
PASS = rule_pass("sums", RULES, CASES)
