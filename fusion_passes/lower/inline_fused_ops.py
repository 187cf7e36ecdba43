"""Inlines the function bodies of fused operators for which a target has no kernel.

ScaledDotProductAttention(q, k, v)  =>  MatMul, Softmax, MatMul      if there is no head split and merge to fuse
"""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir
import onnx_ir.passes.common as common

from fusion_passes import DOMAIN
from fusion_passes.canonicalize.shape_folding import fold_shapes
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome
from fusion_passes.operators import function_bodies


def inline_fused_ops(*op_types: str) -> Pass:
    """Return the pass that inlines the fused operators `op_types`."""

    def run(model: ir.Model) -> PassOutcome:
        nodes = [node for node in model.graph if node.domain == DOMAIN and node.op_type in op_types]
        if nodes:
            function_bodies.attach(model, nodes)
            common.InlinePass()(model)
            fold_shapes(model)  # function bodies contain shape arithmetic
        return PassOutcome(Counter({"inline_fused_ops": len(nodes)}))

    return Pass("inline_fused_ops", run, CASES)


def _graph(line: str) -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21, "sd_ort" : 1]>
        g (float[B,2,S,4] q, float[B,2,L,4] k) => (float[B,2,S,4] y) {{ {line} }}"""


_SIZES = {"B": 2, "S": 5, "L": 3}
CASES = [
    PassCase(
        "attention",
        _graph("y = sd_ort.ScaledDotProductAttention <scale = 0.3, is_causal = 0> (q, k, k)"),
        ops={"ScaledDotProductAttention": 0, "MatMul": 2, "Softmax": 1},
        sizes=_SIZES,
    ),
    PassCase("nothing fused", _graph("y = Relu (q)"), rewrites=0, ops={"Relu": 1}, sizes=_SIZES),
]
