"""RMSNormalization: replaces the formula that exporters write below opset 23 by the operator of opset 23.

    x * 1 / sqrt(mean(x^2) + epsilon) * gamma   =>  RMSNormalization(x, gamma)

over the last axis. The reciprocal is Reciprocal(Sqrt(..)) or Pow(.., -0.5); x / sqrt(..) matches as well. The model's
opset becomes 23 if a formula is replaced. Rejected: another axis, power or dtype; an epsilon or gamma that is not
constant or of another size.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import OrValue

from fusion_passes import value_queries as values
from fusion_passes.canonicalize.layer_normalization import formula_reject_reason
from fusion_passes.graph_pass import Pass, PassOutcome, case_makers
from fusion_passes.rule import Rule, apply_rules

OPSET = 23


class FromFormula(Rule):
    """x * Reciprocal(Sqrt(mean(x^2) + epsilon)) * gamma => RMSNormalization"""

    def pattern(self, op: Any, x: Any, axes: Any, two: Any, epsilon: Any, gamma: Any) -> Any:
        mean = op.ReduceMean(op.Pow(x, two), axes, _outputs=["mean"])
        root = op.Sqrt(op.Add(mean, epsilon))
        normal = OrValue([op.Mul(x, op.Reciprocal(root)), op.Div(x, root)])
        return op.Mul(normal, gamma)

    def reject_reason(
        self, x: ir.Value, axes: ir.Value, two: ir.Value, epsilon: ir.Value, gamma: ir.Value, mean: ir.Value, **_: Any
    ) -> str | None:
        if reason := formula_reject_reason(x, [(mean, axes)], two, epsilon):
            return reason
        if not values.is_vector(gamma, values.size(x, -1)):
            return "gamma is not a constant vector over the last axis"
        return None if x.dtype == gamma.dtype else "the input and gamma differ in dtype"

    def rewrite(self, op: Any, x: ir.Value, gamma: ir.Value, epsilon: ir.Value, **_: Any) -> Any:
        return op.RMSNormalization(x, gamma, axis=-1, epsilon=values.scalar(epsilon), stash_type=1)


def _run(model: ir.Model) -> PassOutcome:
    outcome = apply_rules(model, (FromFormula,), "rms_normalization")
    if outcome.counts.total():
        model.graph.opset_imports[""] = max(OPSET, model.graph.opset_imports[""])
    return outcome


def _graph(body: str = "", power: float = 2.0, axis: int = -1, outputs: str = "", gamma: str = "8") -> str:
    body = body or "s = Sqrt (e)  r = Reciprocal (s)  n = Mul (x, r)  y = Mul (n, w)"
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[B,S,8] x) => (float[B,S,8] y {outputs})
        <float two = {{{power}}}, float eps = {{0.01}}, float[{gamma}] w, int64[1] axis = {{{axis}}}> {{
            p = Pow (x, two)
            v = ReduceMean (p, axis)
            e = Add (v, eps)
            {body}
        }}"""


_ONE = {"RMSNormalization": 1, "ReduceMean": 0}
_case, _rejected = case_makers({"B": 2, "S": 8})
CASES = [
    _case("torch.rms_norm below opset 23", _graph(), ops=_ONE),
    _case("T5, gamma first", _graph("s = Sqrt (e)  n = Div (x, s)  y = Mul (w, n)", axis=2), ops=_ONE),
    _rejected("cubed", _graph(power=4.0), rejection="not squared"),
    _rejected("another axis", _graph(axis=1), rejection="last axis"),
    _rejected("one gamma for all", _graph(gamma="1"), rejection="gamma"),
    _rejected("mean is an output", _graph(outputs=", float[B,S,1] v")),
    _rejected("another tensor is scaled", _graph("s = Sqrt (e)  n = Div (p, s)  y = Mul (n, w)")),
]

PASS = Pass("rms_normalization", _run, CASES)
