"""A normalization whose output is multiplied by a scale or a gate of each image, as one node.

    RMSNormalization(x [B,S,C], gamma) * scale [B,1,C]      =>  RMSNormalization(x, scale * gamma)
    LayerNormalization(x [B,S,C], ones) * scale [B,1,C]     =>  LayerNormalization(x, scale)

The operators' scale may broadcast to x; scale * gamma is one row for each image. Z-Image multiplies by 1 + a projection
of the timestep before attention and MLP, and by a Tanh after them. The last norm of its kind, without a shift, is the
second form; one with a shift is that of `adaptive_layer_norm`, which runs before. Rejected: another gamma or axis,
scales of tokens, one scale for all images, and a normalized value that something else reads.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import Var

from fusion_passes import value_queries as values
from fusion_passes.graph_pass import case_makers
from fusion_passes.rule import Rule, rule_pass


def _reject_reason(x: ir.Value, scale: ir.Value, normal: ir.Value) -> str | None:
    """Return why a norm must not take the scale that its output is multiplied by, or None."""
    node, shape, width = values.producer(normal), values.dims(x), values.size(x, -1)
    if shape is None or len(shape) != 3 or width is None:
        return "the normalized values are not [B,S,C] with a known C"
    if not values.last_axis(node.attributes.get_int("axis", -1), x):
        return "the normalization is not over the last axis"
    if values.dims(scale) != [shape[0], 1, width]:
        return "the scale is not [B,1,C]"
    if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        return "its mean or deviation has consumers"
    if normal.is_graph_output() or len(values.consumers(normal)) > 1:
        return "the normalized values have other consumers"
    return None if x.dtype == scale.dtype else "the values and their scale differ in dtype"


class ModulatedRMSNorm(Rule):
    """RMSNormalization(x, gamma) * scale => RMSNormalization(x, scale * gamma)"""

    remove_nodes = False  # so that other consumers are a reason to reject

    def pattern(self, op: Any, x: Any, gamma: Any, scale: Any) -> Any:
        return op.Mul(op.RMSNormalization(x, gamma, _outputs=["normal"]), scale)

    def reject_reason(self, x: ir.Value, gamma: ir.Value, scale: ir.Value, normal: ir.Value, **_: Any) -> str | None:
        if not values.is_vector(gamma, values.size(x, -1)):
            return "gamma is not a constant vector over the last axis"
        return _reject_reason(x, scale, normal)

    def rewrite(self, op: Any, x: ir.Value, gamma: ir.Value, scale: ir.Value, normal: ir.Value, **_: Any) -> Any:
        epsilon = values.producer(normal).attributes.get_float("epsilon", 1e-5)
        return op.RMSNormalization(x, op.Mul(scale, gamma), axis=-1, epsilon=epsilon, stash_type=1)


class SwappedModulatedRMSNorm(ModulatedRMSNorm):
    """scale * RMSNormalization(x, gamma) => RMSNormalization(x, scale * gamma)"""

    def pattern(self, op: Any, x: Any, gamma: Any, scale: Any) -> Any:
        return op.Mul(scale, op.RMSNormalization(x, gamma, _outputs=["normal"]))


class ScaledLayerNorm(Rule):
    """LayerNormalization(x, ones) * scale => LayerNormalization(x, scale)"""

    remove_nodes = False  # so that other consumers are a reason to reject

    def pattern(self, op: Any, x: Any, gamma: Any, scale: Any) -> Any:
        beta = Var("beta", can_match_none=True)
        return op.Mul(op.LayerNormalization(x, gamma, beta, _outputs=["normal"]), scale)

    def reject_reason(
        self, x: ir.Value, gamma: ir.Value, scale: ir.Value, normal: ir.Value, beta: ir.Value | None, **_: Any
    ) -> str | None:
        array = values.constant(gamma) if values.is_vector(gamma, values.size(x, -1)) else None
        if array is None or not (array == 1).all():
            return "the normalization has a scale of its own"
        shift = None if beta is None else values.constant(beta)
        if beta is not None and (shift is None or shift.any()):
            return "the normalization has a shift of its own"
        return _reject_reason(x, scale, normal)

    def rewrite(self, op: Any, x: ir.Value, scale: ir.Value, normal: ir.Value, **_: Any) -> Any:
        node = values.producer(normal)
        return op.LayerNormalization(x, scale, axis=-1, epsilon=node.attributes.get_float("epsilon", 1e-5))


class SwappedScaledLayerNorm(ScaledLayerNorm):
    """scale * LayerNormalization(x, ones) => LayerNormalization(x, scale)"""

    def pattern(self, op: Any, x: Any, gamma: Any, scale: Any) -> Any:
        beta = Var("beta", can_match_none=True)
        return op.Mul(scale, op.LayerNormalization(x, gamma, beta, _outputs=["normal"]))


RULES = (ModulatedRMSNorm, SwappedModulatedRMSNorm, ScaledLayerNorm, SwappedScaledLayerNorm)


def _graph(
    norm: str = "RMSNormalization <epsilon = 0.01> (x, w)", scale: str = "B,1,4", outputs: str = "",
    body: str = "y = Mul (n, scale)", gamma: str = "4",
) -> str:  # fmt: skip
    return f"""<ir_version: 10, opset_import: ["" : 23]>
        g (float[B,S,4] x, float[{scale}] scale, float[4] v) => (float[B,S,4] y {outputs})
        <float[{gamma}] w, float[5,4] rows, float[4] ones = {{1, 1, 1, 1}}, float[4] zeros = {{0, 0, 0, 0}}> {{
            n = {norm}
            {body}
        }}"""


_LAYER = "LayerNormalization <epsilon = 0.01> (x, ones)"
_case, _rejected = case_makers({"B": 2, "S": 5})
_RMS_OPS, _LAYER_OPS = {"RMSNormalization": 1, "Mul": 1}, {"LayerNormalization": 1, "Mul": 0}
_GATED = "t = Tanh (scale)  m = Mul (t, n)  y = Add (x, m)"
CASES = [
    _case("RMS, scaled", _graph(), ops=_RMS_OPS),
    _case("RMS, a gate of Tanh, gate first", _graph(body=_GATED), ops={**_RMS_OPS, "Tanh": 1, "Add": 1}),
    _case("mean and deviation without affine", _graph(_LAYER), ops=_LAYER_OPS),
    _case(
        "a beta of zeros, scale first",
        _graph(_LAYER.replace("ones", "ones, zeros"), body="y = Mul (scale, n)"),
        ops=_LAYER_OPS,
    ),
    _rejected("a scale for each token", _graph(scale="B,S,4"), rejection="not [B,1,C]"),
    _rejected("one scale for all images", _graph(scale="1,1,4"), rejection="not [B,1,C]"),
    _rejected("one number for each image", _graph(scale="B,1,1"), rejection="not [B,1,C]"),
    _rejected("RMS of two axes", _graph("RMSNormalization <axis = 1> (x, rows)"), rejection="gamma"),
    _rejected("gamma is an input", _graph("RMSNormalization (x, v)"), rejection="gamma"),
    _rejected("normalized values are an output", _graph(outputs=", float[B,S,4] n"), rejection="other consumers"),
    _rejected("normalized values are read twice", _graph(body="m = Mul (n, scale)  y = Add (m, n)"),
              rejection="other consumers"),
    _rejected("gamma of its own", _graph(_LAYER.replace("ones", "w")), rejection="a scale of its own"),
    _rejected("beta of its own", _graph(_LAYER.replace("ones", "ones, v")), rejection="a shift of its own"),
    _rejected("added, not multiplied", _graph(body="y = Add (n, scale)")),
]  # fmt: skip

PASS = rule_pass("modulated_norm", RULES, CASES)
