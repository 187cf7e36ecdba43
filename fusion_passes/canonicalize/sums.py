"""Sums in front of a Split: the bias comes last, where a gated feed-forward is looked for.

    Add(Add(x, bias), y) -> Split   =>  Add(Add(x, y), bias) -> Split

A low-rank sum that nobody merged (LoRA) stands between the projection's bias and the Split. Refused: a bias that is not
one constant number per channel, a `y` that is one (then that is the last bias), sums that something else reads.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from fusion_passes import checks as c
from fusion_passes.pass_ import Case
from fusion_passes.rule import Rule, rule_pass


class BiasLast(Rule):
    """(x + bias) + y => (x + y) + bias"""

    def pattern(self, op: Any, x: Any, bias: Any, y: Any) -> Any:
        return op.Add(op.Add(x, bias, _outputs=["biased"]), y, _outputs=["out"])

    def refuse(self, x: ir.Value, bias: ir.Value, y: ir.Value, out: ir.Value, **_: Any) -> str | None:
        readers = c.users(out)
        if len(readers) != 1 or readers[0].op_type != "Split" or out.is_graph_output():
            return "no Split alone reads the sum"
        if not c.is_vector(bias, c.size(x, -1)):
            return "the bias is not a constant vector over the last axis"
        return None if c.same_shape(x, y) else "the other summand is of another shape"

    def rewrite(self, op: Any, x: ir.Value, bias: ir.Value, y: ir.Value, **_: Any) -> Any:
        return op.Add(op.Add(x, y), bias)


class BiasLastSwapped(BiasLast):
    """y + (x + bias) => (x + y) + bias"""

    def pattern(self, op: Any, x: Any, bias: Any, y: Any) -> Any:
        return op.Add(y, op.Add(x, bias, _outputs=["biased"]), _outputs=["out"])


RULES = (BiasLast, BiasLastSwapped)


def _case(name: str, body: str, fires: int = 1, refused: str | None = None, outputs: str = "") -> Case:
    graph = f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,S,8] x, float[N,S,8] y) => (float[N,S,4] l, float[N,S,4] r {outputs})
        <float[8] b, float[8] d, float[1,5,8] table, int64[2] halves = {{4, 4}}> {{
            {body}
            l, r = Split <axis = 2> (a, halves)
        }}"""
    return Case(name, graph, fires, {"Add": 2, "Split": 1}, refused, {"N": 2, "S": 5})


CASES = [
    _case("a low-rank sum", "i = Add (x, b)  a = Add (i, y)"),
    _case("operands swapped", "i = Add (b, x)  a = Add (y, i)"),
    _case("two biases", "i = Add (x, b)  a = Add (i, d)", 0, "another shape"),
    _case("positions in place of a bias", "i = Add (x, table)  a = Add (i, y)", 0, "not a constant vector"),
    _case("the sum is an output", "i = Add (x, b)  a = Add (i, y)", 0, "no Split alone", ", float[N,S,8] a"),
    _case("the biased one is an output", "i = Add (x, b)  a = Add (i, y)", 0, None, ", float[N,S,8] i"),
]
PASS = rule_pass("sums", RULES, CASES)
