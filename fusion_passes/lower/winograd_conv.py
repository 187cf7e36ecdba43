"""Lowers 3x3 convolutions to WinogradConv, which needs fewer multiplications on a CPU.

    Conv(x, weight, bias; pads 1, strides 1)  =>  WinogradConv(x, weight, bias)

Rejected: other filters, strides, pads, dilations or groups; fewer channels than the kernel multiplies at once.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.graph_pass import PassCase
from fusion_passes.rule import Rule, rule_pass

MIN_CHANNELS = 32  # input and output channels that fill the kernel's registers on any CPU


class WinogradConv(Rule):
    """Conv 3 x 3 => WinogradConv"""

    def pattern(self, op: Any, x: Any, weight: Any, bias: Any) -> Any:
        return op.Conv(x, weight, bias, _allow_other_attributes=True, _outputs=["y"])

    def reject_reason(self, x: ir.Value, weight: ir.Value, bias: ir.Value, y: ir.Value) -> str | None:
        node = values.producer(y)
        shape = values.dims(weight)
        if shape is None or shape[2:] != [3, 3]:
            return "its filters are not 3 x 3"
        if node.attributes.get_int("group", 1) != 1:
            return "it has groups"
        if any(not isinstance(size, int) or size < MIN_CHANNELS for size in shape[:2]):
            return f"it has fewer than {MIN_CHANNELS} channels"
        for name in ("strides", "dilations"):
            if any(step != 1 for step in node.attributes.get_ints(name) or ()):
                return f"its {name} are not 1"
        pads = node.attributes.get_ints("pads") or [0]
        if any(pad != 1 for pad in pads) or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
            return "its pads are not 1"
        return None

    def rewrite(self, op: Any, x: ir.Value, weight: ir.Value, bias: ir.Value, y: ir.Value) -> Any:
        return op.WinogradConv(x, weight, bias, _domain=DOMAIN)


RULES = (WinogradConv,)


def _graph(attributes: str, weight: str = "40,32,3,3", body: str = "y = Conv <{}> (x, w, b)") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,32,H,W] x) => (float[N,40,P,Q] y) <float[{weight}] w, float[40] b>
        {{ {body.format(attributes)} }}"""


_SIZES = {"N": 2, "H": 9, "W": 6}
_SAME = "pads = [1, 1, 1, 1]"


def _rejected(name: str, reason: str, attributes: str, **graph: str) -> PassCase:
    return PassCase(name, _graph(attributes, **graph), rewrites=0, rejection=reason, sizes=_SIZES)


CASES = [
    PassCase("3 x 3", _graph(f"{_SAME}, kernel_shape = [3, 3]"), ops={"WinogradConv": 1, "Conv": 0}, sizes=_SIZES),
    PassCase("all attributes", _graph(f"{_SAME}, strides = [1, 1], dilations = [1, 1], group = 1"), sizes=_SIZES),
    PassCase("no bias", _graph(_SAME, body="y = Conv <{}> (x, w)"), rewrites=0, sizes=_SIZES),
    _rejected("stride 2", "strides", f"{_SAME}, strides = [2, 2]"),
    _rejected("dilated", "dilations", "pads = [2, 2, 2, 2], dilations = [2, 2]"),
    _rejected("no pads", "pads", "kernel_shape = [3, 3]"),
    _rejected("pads on one side", "pads", "pads = [0, 0, 1, 1]"),
    _rejected("padded by name", "pads", 'auto_pad = "SAME_UPPER"'),
    _rejected("groups", "groups", f"{_SAME}, group = 2", weight="40,16,3,3"),
    _rejected("1 x 1", "3 x 3", "", weight="40,32,1,1", body="y = Conv (x, w, b)"),
    _rejected("1 x 3", "3 x 3", "pads = [0, 1, 0, 1]", weight="40,32,1,3"),
    PassCase(
        "few channels",
        f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,4,H,W] x) => (float[N,40,H,W] y) <float[40,4,3,3] w, float[40] b>
        {{ y = Conv <{_SAME}> (x, w, b) }}""",
        rewrites=0,
        rejection="channels",
        sizes=_SIZES,
    ),
]

PASS = rule_pass("winograd_conv", RULES, CASES)
