"""Replace RMS normalization over the channels of images by RMSNormalization between Transposes.

    x [N,C,H,W] / Clip(ReduceL2(x, axis 1), min) * sqrt(C) * gamma [C,1,1]
        =>  Transpose(RMSNormalization(Transpose(x), gamma [C]))

for targets that convert images to NHWC, where the Transposes cancel. The norms of Qwen-Image's VAE are of this form.
The operator adds min^2 / C to the mean of squares, where the formula clips the norm: a difference for norms near `min`
alone. Rejected: another axis, factor or gamma, a minimum that is not constant, a norm that something else reads.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import OrValue

from fusion_passes import value_queries as values
from fusion_passes.fuse.rms_normalization import OPSET
from fusion_passes.graph_edits import new_derived_initializer, unique_name
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome
from fusion_passes.lower.nhwc_layout import TO_NCHW, TO_NHWC
from fusion_passes.rule import Rule, apply_rules


class ChannelNorm(Rule):
    """x / norm * sqrt(C) * gamma => RMSNormalization between Transposes"""

    def pattern(self, op: Any, x: Any, axes: Any, least: Any, factor: Any, gamma: Any) -> Any:
        norm = op.ReduceL2(x, axes, _outputs=["norm"])
        clipped = OrValue([op.Clip(norm, least), op.Max(norm, least)])
        return op.Mul(op.Mul(op.Div(x, clipped), factor), gamma, _outputs=["out"])

    def reject_reason(
        self, x: ir.Value, axes: ir.Value, least: ir.Value, factor: ir.Value, gamma: ir.Value, norm: ir.Value, **_: Any
    ) -> str | None:
        node, channels = values.producer(norm), values.size(x, 1)
        if values.rank(x) != 4 or channels is None:
            return "it is no image [N,C,H,W] with a known number of channels"
        if values.ints(axes) not in ([1], [-3]) or not node.attributes.get_int("keepdims", 1):
            return "the norm is not over the channels"
        if values.scalar(least) is None:
            return "the least norm is not a constant scalar"
        root = values.scalar(factor)
        if root is None or not math.isclose(root, math.sqrt(channels), rel_tol=1e-3):
            return "the factor is not the square root of the number of channels"
        if not values.is_constant(gamma) or values.dims(gamma) != [channels, 1, 1]:
            return "gamma is not one constant for each channel"
        return None if x.dtype == gamma.dtype else "the input and gamma differ in dtype"

    def rewrite(
        self, op: Any, x: ir.Value, least: ir.Value, gamma: ir.Value, norm: ir.Value, out: ir.Value, **_: Any
    ) -> Any:
        channels, minimum = values.static_size(x, 1), values.scalar(least)
        assert minimum is not None
        graph = out.graph
        assert graph is not None
        row = new_derived_initializer(graph, unique_name(out, "gamma"), [gamma], [channels], "reshape", [-1])
        normal = op.RMSNormalization(
            op.Transpose(x, perm=TO_NHWC), row, axis=-1, epsilon=minimum**2 / channels, stash_type=1
        )
        return op.Transpose(normal, perm=TO_NCHW)


def _run(model: ir.Model) -> PassOutcome:
    outcome = apply_rules(model, (ChannelNorm,), "channel_norm")
    if outcome.counts.total():
        model.graph.opset_imports[""] = max(OPSET, model.graph.opset_imports[""])
    return outcome


def _graph(
    body: str = "n = Clip (l, least)  d = Div (x, n)  f = Mul (d, root)  y = Mul (f, w)", axis: int = 1,
    root: float = 2.0, gamma: str = "4,1,1", outputs: str = "",
) -> str:  # fmt: skip
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,4,H,W] x, float low) => (float[N,4,H,W] y {outputs})
        <float least = {{1e-6}}, float root = {{{root}}}, float[{gamma}] w, int64[1] axis = {{{axis}}}> {{
            l = ReduceL2 (x, axis)
            {body}
        }}"""


_case = partial(PassCase, sizes={"N": 2, "H": 3, "W": 5}, ops={"RMSNormalization": 1, "ReduceL2": 0, "Transpose": 2})
_rejected = partial(PassCase, sizes={"N": 2, "H": 3, "W": 5}, rewrites=0, ops={"RMSNormalization": 0})
_BODY = "{}  d = Div (x, n)  f = Mul (d, root)  y = Mul (f, w)"
CASES = [
    _case("clipped", _graph()),
    _case("the largest of norm and minimum", _graph(_BODY.format("n = Max (l, least)"), axis=-3)),
    _rejected("over rows", _graph(axis=2), rejection="not over the channels"),
    _rejected("another factor", _graph(root=1.5), rejection="not the square root"),
    _rejected("one gamma for all", _graph(gamma="1"), rejection="gamma"),
    _rejected("the minimum is an input", _graph(_BODY.format("n = Clip (l, low)")), rejection="least norm"),
    _rejected("a largest norm", _graph(_BODY.format("n = Clip (l, , root)"))),
    _rejected("the norm is an output", _graph(outputs=", float[N,1,H,W] l")),
    _rejected("another tensor is divided", _graph("n = Clip (l, least)  e = Relu (x)  d = Div (e, n)"
                                                  "  f = Mul (d, root)  y = Mul (f, w)")),
]  # fmt: skip

PASS = Pass("channel_norm", _run, CASES)
