"""Products whose result is only split into a gate and what it gates: one operator, which need not write the product.

    LinearAdd(x, w) -> BiasSplitGelu(., b)  =>  LinearSplitGelu(x, w, b)

Left alone: products that add a bias or a residual of their own, and those that something else reads too. Runs after
`linear_add`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import onnx_ir as ir

from fusion_passes import checks as c
from fusion_passes.lower import linear_add
from fusion_passes.operators.record import DOMAIN
from fusion_passes.pass_ import Case
from fusion_passes.rule import Rule, rule_pass


class LinearSplitGelu(Rule):
    """LinearAdd -> BiasSplitGelu => LinearSplitGelu"""

    def pattern(self, op: Any, x: Any, weight: Any, bias: Any) -> Any:
        product = op.LinearAdd(x, weight, _domain=DOMAIN, _allow_other_inputs=True, _outputs=["product"])
        return op.BiasSplitGelu(product, bias, _domain=DOMAIN)

    def refuse(self, weight: ir.Value, product: ir.Value, **_: Any) -> str | None:
        node = product.producer()
        assert node is not None
        if any(value is not None for value in node.inputs[2:]):
            return "the product adds a bias or a residual before"
        return None if c.is_constant(weight) else "its weight is not constant"

    def rewrite(self, op: Any, x: ir.Value, weight: ir.Value, bias: ir.Value, **_: Any) -> Any:
        return op.LinearSplitGelu(x, weight, bias, _domain=DOMAIN)


def _graph(product: str = "m = MatMul (x, w)", result: str = "y = Mul (l, gate)", more: str = "") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,S,8] x{more}) => (float[N,S,4] y)
        <float[8,8] w, float[8] b, float[8] c, int64[2] halves = {{4, 4}}> {{
            {product}
            a = Add (m, b)
            l, r = Split <axis = 2> (a, halves)
            gate = Gelu (r)
            {result}
        }}"""


_SIZES = {"N": 2, "S": 6}
CASES = [
    Case("GEGLU", _graph(), ops={"LinearSplitGelu": 1, "LinearAdd": 0, "BiasSplitGelu": 0}, sizes=_SIZES),
    Case(
        "a residual before",
        _graph("p = MatMul (x, w)  q = Add (p, c)  m = Add (q, x)"),
        fires=0,
        refused="bias or a residual",
        sizes=_SIZES,
    ),
    Case(
        "product read twice",
        _graph(result="z = Mul (l, gate)  t = ReduceMean (m)  y = Add (z, t)"),
        fires=0,
        ops={"LinearAdd": 1, "BiasSplitGelu": 1},
        sizes=_SIZES,
    ),
    Case("two tensors", _graph("m = MatMul (x, v)", more=", float[8,8] v"), fires=0, ops={"MatMul": 1}, sizes=_SIZES),
    Case("no product", _graph("m = Relu (x)"), fires=0, ops={"BiasSplitGelu": 1}, sizes=_SIZES),
]

PASS = replace(
    rule_pass("linear_split_gelu", (LinearSplitGelu,), CASES), after=(*linear_add.PASS.after, linear_add.PASS)
)
