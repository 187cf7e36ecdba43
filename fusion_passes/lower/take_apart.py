"""Fused operators that a target never runs are taken apart again, into the standard operators of their bodies.

ScaledDotProductAttention(q, k, v)  =>  MatMul, Softmax, MatMul      where no heads are split and merged
"""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir
import onnx_ir.passes.common as common

from fusion_passes.canonicalize.facts import fold
from fusion_passes.operators import bodies
from fusion_passes.operators.record import DOMAIN
from fusion_passes.pass_ import Case, Outcome, Pass


def take_apart(*op_types: str) -> Pass:
    """The pass that takes apart the fused operators `op_types`."""

    def run(model: ir.Model) -> Outcome:
        nodes = [node for node in model.graph if node.domain == DOMAIN and node.op_type in op_types]
        if nodes:
            bodies.attach(model, nodes)
            common.InlinePass()(model)
            fold(model)  # bodies bring shape arithmetic of their own
        return Outcome(Counter({"take_apart": len(nodes)}))

    return Pass("take_apart", run, CASES)


def _graph(line: str) -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21, "sd_ort" : 1]>
        g (float[B,2,S,4] q, float[B,2,L,4] k) => (float[B,2,S,4] y) {{ {line} }}"""


_SIZES = {"B": 2, "S": 5, "L": 3}
CASES = [
    Case(
        "attention",
        _graph("y = sd_ort.ScaledDotProductAttention <scale = 0.3, is_causal = 0> (q, k, k)"),
        ops={"ScaledDotProductAttention": 0, "MatMul": 2, "Softmax": 1},
        sizes=_SIZES,
    ),
    Case("nothing fused", _graph("y = Relu (q)"), fires=0, ops={"Relu": 1}, sizes=_SIZES),
]
