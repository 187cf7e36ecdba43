"""SkipGroupNorm: fuses the addition of a residual or time embedding into the normalization, which also outputs the sum.

    x + skip -> s -> GroupNorm   =>  SkipGroupNorm(x, gamma, beta, skip) -> y, s       skip [N,C,H,W] or [N,C,1,1]

Rejected: a skip of another shape, a sum that is not of feature maps, a constant addend.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.graph_pass import case_makers
from fusion_passes.rule import Rule, rule_pass


class SkipGroupNorm(Rule):
    """x + skip -> GroupNorm => SkipGroupNorm"""

    def pattern(self, op: Any, x: Any, skip: Any, gamma: Any, beta: Any) -> Any:
        total = op.Add(x, skip, _outputs=["total"])
        return op.GroupNorm(total, gamma, beta, _domain=DOMAIN, _outputs=["normal"]), total

    def reject_reason(self, x: ir.Value, skip: ir.Value, total: ir.Value, **_: Any) -> str | None:
        dims = values.dims(total)
        if dims is None or len(dims) != 4:
            return "the sum is not [N,C,H,W]"
        if values.is_constant(x) or values.is_constant(skip):
            return "a bias, not a residual"
        shapes = [values.dims(x), values.dims(skip)]
        allowed = (dims, [*dims[:2], 1, 1])
        if dims not in shapes or any(s not in allowed for s in shapes):
            return "the skip is neither [N,C,H,W] nor [N,C,1,1]"
        return None

    def rewrite(
        self, op: Any, x: ir.Value, skip: ir.Value, gamma: ir.Value, beta: ir.Value, total: ir.Value, normal: ir.Value
    ) -> Any:
        node = values.producer(normal)
        if not values.same_shape(x, total):
            x, skip = skip, x
        attributes = dict(node.attributes)
        y, s = op.SkipGroupNorm(x, gamma, beta, skip, _domain=DOMAIN, _outputs=2, **attributes)
        return y, s


RULES = (SkipGroupNorm,)


def _graph(skip: str, add: str = "s = Add (x, k)", reads: str = "s") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,8,H,W] x, float[{skip}] k) => (float[N,8,H,W] y, float[N,8,H,W] z) <float[8] w, float[8] b> {{
            {add}
            y = GroupNormalization <num_groups = 2> (s, w, b)
            z = Relu ({reads})
        }}"""


_SIZES = {"N": 2, "H": 3, "W": 5}
_ONE = {"SkipGroupNorm": 1, "GroupNorm": 0, "Add": 0}
_case, _rejected = case_makers(_SIZES)
CASES = [
    _case("residual", _graph("N,8,H,W"), ops=_ONE),
    _case("time embedding", _graph("N,8,1,1"), ops=_ONE),
    _case("time embedding first", _graph("N,8,1,1", "s = Add (k, x)"), ops=_ONE),
    _case("sum not read again", _graph("N,8,H,W", reads="k"), ops=_ONE),
    _rejected(
        "skip that is a weight",
        _graph("N,8,H,W", "s = Add (x, b4)").replace("float[8] b>", "float[8] b, float[1,8,1,1] b4>"),
        rejection="a bias",
    ),
    _case(
        "sum read by two normalizations",
        _graph("N,8,H,W").replace("z = Relu (s)", "z = GroupNormalization <num_groups = 4> (s, w, b)"),
        ops={"SkipGroupNorm": 1, "GroupNorm": 1},
    ),
    _rejected("skip of one row", _graph("N,8,1,W"), rejection="neither"),
    _rejected("skip of one channel", _graph("N,1,H,W"), rejection="neither"),
    _rejected("skip a column", _graph("N,8,H,1"), rejection="neither"),
    _rejected("skip of another batch", _graph("1,8,1,1"), rejection="neither"),
]

PASS = rule_pass("skip_group_norm", RULES, CASES)
