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


def _graph(line: str, weights: str) -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,8,H,W] x) => (float[N,8,H,W] y) <{weights}> {{ {line} }}"""


_SIZES = {"N": 2, "H": 3, "W": 5}
CASES = [
    Case(
        "normalization",
        _graph("y = GroupNormalization <num_groups = 2> (x, w, b)", "float[8] w, float[8] b"),
        ops={"GroupNorm": 0, "InstanceNormalization": 1},
        sizes=_SIZES,
    ),
    Case("nothing fused", _graph("y = Relu (x)", "float[8] w"), fires=0, ops={"Relu": 1}, sizes=_SIZES),
]
