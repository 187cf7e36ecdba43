"""Convolutions of 3 x 3 filters that a CPU computes with fewer multiplications.

    Conv(x, weight, bias; pads 1, strides 1)  =>  WinogradConv(x, weight, bias)

Refused: other filters, strides, pads, dilations or groups; fewer channels than the kernel multiplies at once.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from fusion_passes import checks as c
from fusion_passes.operators.record import DOMAIN
from fusion_passes.pass_ import Case
from fusion_passes.rule import Rule, rule_pass

# Channels on both sides that fill the kernel's registers on any processor.
LEAST_CHANNELS = 32


class WinogradConv(Rule):
    """Conv 3 x 3 => WinogradConv"""

    def pattern(self, op: Any, x: Any, weight: Any, bias: Any) -> Any:
        return op.Conv(x, weight, bias, _allow_other_attributes=True, _outputs=["y"])

    def refuse(self, x: ir.Value, weight: ir.Value, bias: ir.Value, y: ir.Value) -> str | None:
        node = y.producer()
        assert node is not None
        shape = c.dims(weight)
        if shape is None or shape[2:] != [3, 3]:
            return "its filters are not 3 x 3"
        if node.attributes.get_int("group", 1) != 1:
            return "it has groups"
        if any(not isinstance(size, int) or size < LEAST_CHANNELS for size in shape[:2]):
            return f"it has fewer than {LEAST_CHANNELS} channels"
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


def _refused(name: str, reason: str, attributes: str, **given: str) -> Case:
    return Case(name, _graph(attributes, **given), fires=0, refused=reason, sizes=_SIZES)


CASES = [
    Case("3 x 3", _graph(f"{_SAME}, kernel_shape = [3, 3]"), ops={"WinogradConv": 1, "Conv": 0}, sizes=_SIZES),
    Case("all attributes", _graph(f"{_SAME}, strides = [1, 1], dilations = [1, 1], group = 1"), sizes=_SIZES),
    Case("no bias", _graph(_SAME, body="y = Conv <{}> (x, w)"), fires=0, sizes=_SIZES),
    _refused("stride 2", "strides", f"{_SAME}, strides = [2, 2]"),
    _refused("dilated", "dilations", "pads = [2, 2, 2, 2], dilations = [2, 2]"),
    _refused("no pads", "pads", "kernel_shape = [3, 3]"),
    _refused("pads on one side", "pads", "pads = [0, 0, 1, 1]"),
    _refused("padded by name", "pads", 'auto_pad = "SAME_UPPER"'),
    _refused("groups", "groups", f"{_SAME}, group = 2", weight="40,16,3,3"),
    _refused("1 x 1", "3 x 3", "", weight="40,32,1,1", body="y = Conv (x, w, b)"),
    _refused("1 x 3", "3 x 3", "pads = [0, 1, 0, 1]", weight="40,32,1,3"),
    Case(
        "few channels",
        f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,4,H,W] x) => (float[N,40,H,W] y) <float[40,4,3,3] w, float[40] b>
        {{ y = Conv <{_SAME}> (x, w, b) }}""",
        fires=0,
        refused="channels",
        sizes=_SIZES,
    ),
]

PASS = rule_pass("winograd_conv", RULES, CASES)
