"""Lowers Conv and MatMul with constant weights to Bfloat16Conv and Bfloat16MatMul, for the CPU's matrix units.

    Conv(x, weight, bias?; 3 x 3 with pads 1, or 1 x 1 without)  =>  Bfloat16Conv(x, weight, bias?; stride 1 or 2)
    MatMul(x, weight) -> Add(., bias)                            =>  Bfloat16MatMul(x, weight, bias)
    BiasSplitGelu(MatMul(x, weight), bias)                       =>  Bfloat16MatMul(x, weight, bias; gated)
    MatMul(x, weight)                                            =>  Bfloat16MatMul(x, weight)

Both round their float32 inputs to bfloat16. Rejected: weights that are not constant; other filters, strides, pads,
dilations or groups; fewer than 32 input or output channels. The first and last layers of a UNet or VAE therefore stay
in float32. So does the time embedding, which uses Gemm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome
from fusion_passes.rule import Rule, rule_pass

MIN_CHANNELS = 32
FLOAT = int(ir.DataType.FLOAT)


def _channels_reject_reason(sizes: Any) -> str | None:
    few = any(not isinstance(size, int) or size < MIN_CHANNELS for size in sizes)
    return f"it has fewer than {MIN_CHANNELS} input or output channels" if few else None


def tiles_reject_reason(node: ir.Node, shape: Sequence[int | str]) -> str | None:
    """Return why the CPU's kernel for matrix units does not compute a Conv with filters of `shape`, or None."""
    if list(shape[2:]) not in ([1, 1], [3, 3]):
        return "its filters are neither 1 x 1 nor 3 x 3"
    if node.attributes.get_int("group", 1) != 1:
        return "it has groups"
    if any(step != 1 for step in node.attributes.get_ints("dilations") or ()):
        return "its dilations are not 1"
    if list(node.attributes.get_ints("strides") or (1, 1)) not in ([1, 1], [2, 2]):
        return "its strides are neither 1 nor 2"
    pads = node.attributes.get_ints("pads") or [0]
    if any(pad != (shape[2] == 3) for pad in pads) or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return "its pads do not preserve the size"
    return None


class Convolution(Rule):
    """Conv => Bfloat16Conv"""

    def pattern(self, op: Any, x: Any, weight: Any) -> Any:
        return op.Conv(x, weight, _allow_other_attributes=True, _allow_other_inputs=True, _outputs=["y"])

    def reject_reason(self, weight: ir.Value, y: ir.Value, **_: Any) -> str | None:
        node = values.producer(y)
        shape = values.dims(weight)
        if shape is None or not values.is_constant(weight):
            return "its filters are not constant"
        return tiles_reject_reason(node, shape) or _channels_reject_reason(shape[:2])

    def rewrite(self, op: Any, weight: ir.Value, y: ir.Value, **_: Any) -> Any:
        node = values.producer(y)
        stride = (node.attributes.get_ints("strides") or (1,))[0]
        return op.Bfloat16Conv(*node.inputs, stride=stride, x_last=0, y_last=0, _domain=DOMAIN)


class BiasedMatMul(Rule):
    """MatMul -> Add => Bfloat16MatMul"""

    def pattern(self, op: Any, x: Any, weight: Any, bias: Any) -> Any:
        return op.Add(op.MatMul(x, weight, _outputs=["product"]), bias)

    def reject_reason(self, weight: ir.Value, bias: ir.Value, **_: Any) -> str | None:
        if reason := _weight_reject_reason(weight):
            return reason
        return None if values.is_vector(bias, values.size(weight, 1)) else "the bias is not a vector over the last axis"

    def rewrite(self, op: Any, x: ir.Value, weight: ir.Value, bias: ir.Value, **_: Any) -> Any:
        return op.Bfloat16MatMul(x, weight, bias, gated=0, to=FLOAT, _domain=DOMAIN)


class GatedMatMul(BiasedMatMul):
    """BiasSplitGelu of MatMul => Bfloat16MatMul"""

    def pattern(self, op: Any, x: Any, weight: Any, bias: Any) -> Any:
        return op.BiasSplitGelu(op.MatMul(x, weight, _outputs=["product"]), bias, _domain=DOMAIN)

    def rewrite(self, op: Any, x: ir.Value, weight: ir.Value, bias: ir.Value, **_: Any) -> Any:
        return op.Bfloat16MatMul(x, weight, bias, gated=1, to=FLOAT, _domain=DOMAIN)


class MatMul(Rule):
    """MatMul => Bfloat16MatMul"""

    def pattern(self, op: Any, x: Any, weight: Any) -> Any:
        return op.MatMul(x, weight)

    def reject_reason(self, weight: ir.Value, **_: Any) -> str | None:
        return _weight_reject_reason(weight)

    def rewrite(self, op: Any, x: ir.Value, weight: ir.Value) -> Any:
        return op.Bfloat16MatMul(x, weight, gated=0, to=FLOAT, _domain=DOMAIN)


def _weight_reject_reason(weight: ir.Value) -> str | None:
    if not values.is_constant(weight) or values.rank(weight) != 2:
        return "its weight is not a constant matrix"
    return _channels_reject_reason(values.dims(weight) or ())


# The rewriter visits a MatMul before the Add after it, so rules with a bias run first.
STAGES = tuple(
    rule_pass("bfloat16_matmul_conv", rules, ()) for rules in ((Convolution, BiasedMatMul, GatedMatMul), (MatMul,))
)


def bfloat16_matmul_conv(model: ir.Model) -> PassOutcome:
    """Rewrite the Conv and MatMul nodes of `model` in place."""
    outcome = PassOutcome()
    for stage in STAGES:
        outcome += stage.run(model)
    return outcome


def _conv(attributes: str, weight: str = "40,32,3,3", body: str = "y = Conv <{}> (x, w, b)") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,32,H,W] x) => (float[N,40,P,Q] y) <float[{weight}] w, float[40] b>
        {{ {body.format(attributes)} }}"""


def _matmul(body: str, inner: int = 32, outer: int = 40) -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,S,{inner}] x, float[N,{inner},{outer}] other) => (float[N,S,{outer}] y)
        <float[{inner},{outer}] w, float[{outer}] b, float[1] n> {{ {body} }}"""


_IMAGE, _ROWS = {"N": 2, "H": 9, "W": 6}, {"N": 2, "S": 5}
_SAME = "pads = [1, 1, 1, 1]"


def _rejected(name: str, reason: str, graph: str) -> PassCase:
    return PassCase(name, graph, rewrites=0, rejection=reason, sizes={**_IMAGE, **_ROWS})


CASES = [
    PassCase("3 x 3", _conv(f"{_SAME}, kernel_shape = [3, 3]"), ops={"Bfloat16Conv": 1, "Conv": 0}, sizes=_IMAGE),
    PassCase("no bias", _conv(_SAME, body="y = Conv <{}> (x, w)"), ops={"Bfloat16Conv": 1}, sizes=_IMAGE),
    PassCase("1 x 1", _conv("", "40,32,1,1", "y = Conv (x, w, b)"), ops={"Bfloat16Conv": 1}, sizes=_IMAGE),
    PassCase("product", _matmul("y = MatMul (x, w)"), ops={"Bfloat16MatMul": 1, "MatMul": 0}, sizes=_ROWS),
    PassCase("bias", _matmul("p = MatMul (x, w)  y = Add (p, b)"), ops={"Bfloat16MatMul": 1, "Add": 0}, sizes=_ROWS),
    PassCase(
        "gated",
        _matmul(
            "p = MatMul (x, w)  q = Add (p, b)  "
            "l, r = Split <axis = 2, num_outputs = 2> (q)  g = Gelu (r)  y = Mul (l, g)"
        ),
        ops={"Bfloat16MatMul": 1, "BiasSplitGelu": 0},
        sizes=_ROWS,
    ),
    PassCase(
        "a number", _matmul("p = MatMul (x, w)  y = Add (p, n)"), ops={"Bfloat16MatMul": 1, "Add": 1}, sizes=_ROWS
    ),
    PassCase("stride 2", _conv(f"{_SAME}, strides = [2, 2]"), ops={"Bfloat16Conv": 1}, sizes=_IMAGE),
    _rejected("stride 3", "strides", _conv(f"{_SAME}, strides = [3, 3]")),
    _rejected("two strides", "strides", _conv(f"{_SAME}, strides = [1, 2]")),
    _rejected("dilated", "dilations", _conv("pads = [2, 2, 2, 2], dilations = [2, 2]")),
    _rejected("no pads", "pads", _conv("kernel_shape = [3, 3]")),
    _rejected("framed pixels", "pads", _conv(_SAME, "40,32,1,1")),
    _rejected("padded by name", "pads", _conv('auto_pad = "SAME_UPPER"')),
    _rejected("groups", "groups", _conv(f"{_SAME}, group = 2", "40,16,3,3")),
    _rejected("1 x 3", "3 x 3", _conv("pads = [0, 1, 0, 1]", "40,32,1,3")),
    _rejected("two tensors", "constant", _matmul("y = MatMul (x, other)")),
    _rejected("few depths", "fewer", _matmul("y = MatMul (x, w)", inner=8)),
    _rejected("few columns", "fewer", _matmul("y = MatMul (x, w)", outer=8)),
]

PASS = Pass("bfloat16_matmul_conv", bfloat16_matmul_conv, CASES, rounds_to_bfloat16=True)
