"""AdaLN: a normalization without parameters, modulated by a scale and a shift of each image, as one node.

    LayerNormalization(x [B,S,C], ones) * scale [B,1,C] + shift [B,1,C]  =>  LayerNormalization(x, scale, shift)

B of scale and shift may be 1: the modulation of all images, which FLUX.2 computes from the timestep alone. The
operator's scale and bias may broadcast to x. Diffusion transformers compute `scale` as 1 + the output of a linear
layer of the timestep and the pooled prompt. A normalization with several modulations, as in SD 3.5's dual attention,
becomes one node for each. Rejected: a gamma other than ones, a beta other than zeros, another axis, scales of tokens.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import Var

from fusion_passes import value_queries as values
from fusion_passes.graph_pass import case_makers
from fusion_passes.rule import Rule, rule_pass


class AdaptiveLayerNorm(Rule):
    """LayerNormalization(x, ones) * scale + shift => LayerNormalization(x, scale, shift)"""

    scale_first = shift_first = False  # order of the operands of Mul and Add; rules match one order
    remove_nodes = False  # the normalization may have other modulations

    def pattern(self, op: Any, x: Any, gamma: Any, scale: Any, shift: Any) -> Any:
        beta = Var("beta", can_match_none=True)
        normal = op.LayerNormalization(x, gamma, beta, _outputs=["normal"])
        factors = (scale, normal) if self.scale_first else (normal, scale)
        scaled = op.Mul(*factors, _outputs=["scaled"])
        return op.Add(shift, scaled) if self.shift_first else op.Add(scaled, shift)

    def reject_reason(
        self, x: ir.Value, gamma: ir.Value, scale: ir.Value, shift: ir.Value, normal: ir.Value, beta: ir.Value | None,
        scaled: ir.Value, **_: Any,
    ) -> str | None:  # fmt: skip
        node, shape = values.producer(normal), values.dims(x)
        width = values.size(x, -1)
        if shape is None or len(shape) != 3 or width is None:
            return "the normalized values are not [B,S,C] with a known C"
        if not values.last_axis(node.attributes.get_int("axis", -1), x):
            return "the normalization is not over the last axis"
        if any(values.dims(value) not in ([shape[0], 1, width], [1, 1, width]) for value in (scale, shift)):
            return "scale and shift are neither [B,1,C] nor [1,1,C]"
        if not _is_filled(gamma, 1, width):
            return "the normalization has a scale of its own"
        if beta is not None and not _is_filled(beta, 0, width):
            return "the normalization has a shift of its own"
        if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
            return "its mean or deviation has consumers"
        if scaled.is_graph_output() or len(values.consumers(scaled)) > 1:
            return "the scaled values have other consumers"
        return None if x.dtype == scale.dtype == shift.dtype else "the values and their modulation differ in dtype"

    def rewrite(self, op: Any, x: ir.Value, scale: ir.Value, shift: ir.Value, normal: ir.Value, **_: Any) -> Any:
        epsilon = values.producer(normal).attributes.get_float("epsilon", 1e-5)
        return op.LayerNormalization(x, scale, shift, axis=-1, epsilon=epsilon)


def _is_filled(value: ir.Value, number: float, width: int) -> bool:
    """Return whether a value is a constant vector of `width` equal elements."""
    array = values.constant(value) if values.is_vector(value, width) else None
    return array is not None and bool((array == number).all())


class ScaleFirst(AdaptiveLayerNorm):
    """scale * LayerNormalization(x, ones) + shift"""

    scale_first = True


class ShiftFirst(AdaptiveLayerNorm):
    """shift + LayerNormalization(x, ones) * scale"""

    shift_first = True


class ScaleAndShiftFirst(AdaptiveLayerNorm):
    """shift + scale * LayerNormalization(x, ones)"""

    scale_first = shift_first = True


RULES = (AdaptiveLayerNorm, ScaleFirst, ShiftFirst, ScaleAndShiftFirst)


def _graph(
    body: str = "m = Mul (n, scale)  y = Add (m, shift)", gamma: str = "1, 1, 1, 1", beta: str = "",
    scale: str = "B,1,4", outputs: str = "",
) -> str:  # fmt: skip
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[B,S,4] x, float[{scale}] scale, float[B,1,4] shift) => (float[B,S,4] y {outputs})
        <float[4] w = {{{gamma}}}, float[4] zeros = {{0, 0, 0, 0}}, float[4] b> {{
            n = LayerNormalization <epsilon = 0.01> (x, w {beta})
            {body}
        }}"""


_ONE = {"LayerNormalization": 1, "Mul": 0, "Add": 0}
_case, _rejected = case_makers({"B": 2, "S": 5})
CASES = [
    _case("no affine", _graph(), ops=_ONE),
    _case("scale first", _graph("m = Mul (scale, n)  y = Add (m, shift)"), ops=_ONE),
    _case("shift first", _graph("m = Mul (n, scale)  y = Add (shift, m)"), ops=_ONE),
    _case(
        "a beta of zeros, operands swapped", _graph("m = Mul (scale, n)  y = Add (shift, m)", beta=", zeros"), ops=_ONE
    ),
    _case(
        "two modulations of one normalization",
        _graph("m = Mul (n, scale)  a = Add (m, shift)  k = Mul (n, shift)  c = Add (k, scale)  y = Sub (a, c)"),
        2,
        ops={"LayerNormalization": 2, "Mul": 0, "Add": 0},
    ),
    _rejected("gamma of its own", _graph(gamma="1, 2, 1, 1"), rejection="a scale of its own"),
    _rejected("beta of its own", _graph(beta=", b"), rejection="a shift of its own"),
    _case("one scale for all images", _graph(scale="1,1,4"), ops=_ONE),
    _rejected("a scale for each token", _graph(scale="B,S,4"), rejection="neither [B,1,C]"),
    _rejected("one scale for each row of tokens", _graph(scale="1,S,4"), rejection="neither [B,1,C]"),
    _rejected("scaled values are an output", _graph(outputs=", float[B,S,4] m"), rejection="other consumers"),
    _rejected("shifted, then scaled", _graph("m = Add (n, shift)  y = Mul (m, scale)")),
]

PASS = rule_pass("adaptive_layer_norm", RULES, CASES)
