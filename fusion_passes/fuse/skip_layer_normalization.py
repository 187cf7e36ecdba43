"""SkipLayerNormalization: fuses bias, residual and normalization to one node that also outputs the sum.

    x (+ bias) + skip -> s -> LayerNormalization(gamma, beta)
        =>  SkipLayerNormalization(x, skip, gamma, beta, bias?) -> y, s

Rejected: a skip of another shape, an axis other than the last, constants that are not vectors over it.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.graph_pass import case_makers
from fusion_passes.rule import Rule, rule_pass


class SkipLayerNorm(Rule):
    """x + skip -> LayerNormalization => SkipLayerNormalization"""

    def total(self, op: Any, x: Any, skip: Any, bias: Any) -> Any:
        return op.Add(x, skip, _outputs=["total"])

    def pattern(self, op: Any, x: Any, skip: Any, bias: Any, gamma: Any, beta: Any) -> Any:
        total = self.total(op, x, skip, bias)
        return op.LayerNormalization(total, gamma, beta, _outputs=["normal"]), total

    def reject_reason(
        self, x: ir.Value, skip: ir.Value, bias: ir.Value | None, gamma: ir.Value, beta: ir.Value, normal: ir.Value,
        total: ir.Value,
    ) -> str | None:  # fmt: skip
        node, width = values.producer(normal), values.size(total, -1)
        if values.rank(total) != 3 or not values.last_axis(node.attributes.get_int("axis", -1), total):
            return "not over the last axis of [B,S,C]"
        if not (values.same_shape(x, total) and values.same_shape(skip, total)):
            return "input and skip differ in shape"
        if not (values.is_vector(gamma, width) and values.is_vector(beta, width)):
            return "gamma and beta are not constant vectors over the last axis"
        if bias is not None and not values.is_vector(bias, width):
            return "the bias is not a constant vector over the last axis"
        return None

    def rewrite(
        self, op: Any, x: ir.Value, skip: ir.Value, bias: ir.Value | None, gamma: ir.Value, beta: ir.Value,
        normal: ir.Value, **_: Any,
    ) -> Any:  # fmt: skip
        node = values.producer(normal)
        inputs = [x, skip, gamma, beta] + ([] if bias is None else [bias])
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        y, _, _, total = op.SkipLayerNormalization(*inputs, epsilon=epsilon, _domain=DOMAIN, _outputs=4)
        return y, total


class BiasSkipLayerNorm(SkipLayerNorm):
    """(x + bias) + skip -> LayerNormalization => SkipLayerNormalization"""

    def total(self, op: Any, x: Any, skip: Any, bias: Any) -> Any:
        return op.Add(op.Add(x, bias), skip, _outputs=["total"])


class SkipBiasLayerNorm(SkipLayerNorm):
    """skip + (x + bias) -> LayerNormalization => SkipLayerNormalization"""

    def total(self, op: Any, x: Any, skip: Any, bias: Any) -> Any:
        return op.Add(skip, op.Add(x, bias), _outputs=["total"])


RULES = (BiasSkipLayerNorm, SkipBiasLayerNorm, SkipLayerNorm)


def _graph(total: str, bias: str = "8", skip: str = "B,S,8", axis: int = -1, reads: str = "s") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[B,S,8] x, float[{skip}] k) => (float[B,S,8] y, float[B,S,8] z)
        <float[{bias}] b, float[8] gamma, float[8] beta> {{
            {total}
            y = LayerNormalization <axis = {axis}, epsilon = 0.001> (s, gamma, beta)
            z = Relu ({reads})
        }}"""


_SIZES = {"B": 2, "S": 6}
_ONE = {"SkipLayerNormalization": 1, "LayerNormalization": 0, "Add": 0}
_case, _rejected = case_makers(_SIZES)
CASES = [
    _case("bias and skip", _graph("a = Add (x, b)  s = Add (a, k)"), ops=_ONE),
    _case("skip first, bias first", _graph("a = Add (b, x)  s = Add (k, a)", axis=2), ops=_ONE),
    _case("no bias", _graph("s = Add (x, k)"), ops=_ONE),
    _case("sum not read again", _graph("a = Add (x, b)  s = Add (a, k)", reads="k"), ops=_ONE),
    _rejected("skip of another shape", _graph("s = Add (x, k)", skip="1,1,8"), rejection="shape"),
    _rejected(
        "over two axes",
        _graph("s = Add (x, k)", axis=1)
        .replace("float[8] gamma, float[8] beta", "float[6,8] gamma, float[6,8] beta")
        .replace("B,S,8", "B,6,8"),
        rejection="last axis",
        sizes={"B": 2},
    ),
    _rejected(
        "one gamma for all",
        _graph("s = Add (x, k)").replace("float[8] gamma", "float[1] gamma"),
        rejection="gamma and beta",
    ),
    _rejected(
        "gamma that is an input",
        _graph("s = Add (x, k)").replace("] k)", "] k, float[8] v)").replace("(s, gamma,", "(s, v,"),
        rejection="gamma and beta",
    ),
    _rejected("no beta", _graph("s = Add (x, k)").replace("(s, gamma, beta)", "(s, gamma)")),
    _rejected("skip of another batch", _graph("s = Add (x, k)", skip="1,S,8"), rejection="shape"),
    _rejected(
        "mean is read",
        _graph("s = Add (x, k)").replace("y = Layer", "y, mean = Layer").replace("Relu (s)", "Add (s, mean)"),
    ),
    _case("biased value read twice", _graph("a = Add (x, b)  s = Add (a, k)", reads="a"), ops={"Add": 1}),
]

PASS = rule_pass("skip_layer_normalization", RULES, CASES)
