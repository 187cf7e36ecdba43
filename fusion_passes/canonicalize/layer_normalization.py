"""Layer normalization: replaces the formula that exporters write below opset 17 by one node.

    d = x - mean(x);  d / sqrt(mean(d^2) + epsilon) * gamma + beta   =>  LayerNormalization(x, gamma, beta)

over the last axis. Half precision graphs compute the middle part between Casts to a wider dtype, as the operator does
internally. Rejected: another axis or power; an epsilon, gamma or beta that is not constant or of another size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx_ir as ir

from fusion_passes import value_queries as values
from fusion_passes.graph_pass import case_makers
from fusion_passes.rule import Rule, rule_pass


def formula_reject_reason(
    x: ir.Value, means: Iterable[tuple[ir.Value, ir.Value]], power: ir.Value, epsilon: ir.Value
) -> str | None:
    """Return why a formula is no normalization over the last axis of x; None if it is one.

    `means`: the outputs of the ReduceMean nodes, and the axes of each.
    """
    for mean, axes in means:
        node, numbers = values.producer(mean), values.ints(axes)
        if numbers is None or len(numbers) != 1 or not values.last_axis(numbers[0], x):
            return "the mean is not over the last axis"
        if not node.attributes.get_int("keepdims", 1):
            return "the mean drops its axis"
    if values.scalar(power) != 2.0:
        return "the values are not squared"
    return "epsilon is not a constant scalar" if values.scalar(epsilon) is None else None


class FromFormula(Rule):
    """x - mean -> square -> mean -> + epsilon -> sqrt -> division -> affine => LayerNormalization"""

    def pattern(
        self, op: Any, x: Any, axes: Any, square_axes: Any, two: Any, epsilon: Any, gamma: Any, beta: Any
    ) -> Any:
        distance = self.widen(op, op.Sub(x, op.ReduceMean(x, axes, _outputs=["mean"])))
        variance = op.ReduceMean(op.Pow(distance, two), square_axes, _outputs=["variance"])
        normal = self.narrow(op, op.Div(distance, op.Sqrt(op.Add(variance, epsilon))))
        return op.Add(op.Mul(normal, gamma), beta, _outputs=["out"])

    def widen(self, op: Any, value: Any) -> Any:
        return value

    def narrow(self, op: Any, value: Any) -> Any:
        return value

    def reject_reason(
        self, x: ir.Value, axes: ir.Value, square_axes: ir.Value, two: ir.Value, epsilon: ir.Value, gamma: ir.Value,
        beta: ir.Value, mean: ir.Value, variance: ir.Value, out: ir.Value, **_: Any,
    ) -> str | None:  # fmt: skip
        if reason := formula_reject_reason(x, ((mean, axes), (variance, square_axes)), two, epsilon):
            return reason
        if not (values.is_vector(gamma, values.size(x, -1)) and values.is_vector(beta, values.size(x, -1))):
            return "gamma and beta are not constant vectors over the last axis"
        return None if x.dtype == out.dtype == gamma.dtype else "the input, gamma and the output differ in dtype"

    def rewrite(self, op: Any, x: ir.Value, gamma: ir.Value, beta: ir.Value, epsilon: ir.Value, **_: Any) -> Any:
        return op.LayerNormalization(x, gamma, beta, axis=-1, epsilon=values.scalar(epsilon))


class FromWideFormula(FromFormula):
    """FromFormula between Casts from half precision to a wider dtype and back."""

    def widen(self, op: Any, value: Any) -> Any:
        return op.Cast(value, _outputs=["wide"])

    def narrow(self, op: Any, value: Any) -> Any:
        return op.Cast(value)

    def reject_reason(self, **bindings: Any) -> str | None:
        if bindings["wide"].dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
            return "the Casts do not widen half precision"
        return super().reject_reason(**bindings)


RULES = (FromFormula, FromWideFormula)


def _graph(
    body: str = "", power: float = 2.0, axis: int = -1, outputs: str = "", gamma: str = "8", opset: int = 14
) -> str:
    body = body or "p = Pow (d, two)  v = ReduceMean <axes = [-1]> (p)  e = Add (v, eps)  s = Sqrt (e)  n = Div (d, s)"
    return f"""<ir_version: 8, opset_import: ["" : {opset}]>
        g (float[B,S,8] x) => (float[B,S,8] y {outputs})
        <float two = {{{power}}}, float eps = {{0.001}}, float[{gamma}] w, float[8] b> {{
            m = ReduceMean <axes = [{axis}]> (x)
            d = Sub (x, m)
            {body}
            a = Mul (n, w)
            y = Add (b, a)
        }}"""


_SIZES = {"B": 2, "S": 8}
_ONE = {"LayerNormalization": 1, "ReduceMean": 0}
_case, _rejected = case_makers(_SIZES)
CASES = [
    _case("opset 14", _graph(), ops=_ONE),
    _case("opset 17", _graph(axis=2, opset=17), ops=_ONE),
    _rejected("cubed", _graph(power=4.0), rejection="not squared"),
    _rejected("another axis", _graph(axis=1), rejection="last axis"),
    _rejected("one gamma for all", _graph(gamma="1"), rejection="gamma and beta"),
    _rejected("distance is an output", _graph(outputs=", float[B,S,8] d")),
    _rejected(
        "root mean square of something else",
        _graph("p = Pow (x, two)  v = ReduceMean <axes = [-1]> (p)  e = Add (v, eps)  s = Sqrt (e)  n = Div (d, s)"),
    ),
]

PASS = rule_pass("layer_normalization", RULES, CASES)
