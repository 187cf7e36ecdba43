"""Lowers a convolution and its activation to FusedConv of ONNX Runtime's CPU provider.

    Relu(Conv(x, w, b?))      =>  FusedConv(x, w, b?; Relu)

ONNX Runtime does this when it opens a graph. Rejected: convolutions with other consumers, and of other dtypes than
float32. Runs after `winograd_conv` and `conv_factor`.
"""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from fusion_passes import CONTRIB
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome
from fusion_passes.lower import conv_factor


def fused_conv(model: ir.Model) -> PassOutcome:
    """Fuse the Relus of `model` into their convolutions, in place; count them."""
    outcome = PassOutcome(Counter(fused_conv=0))
    for conv in list(model.graph):
        if conv.op_type != "Conv" or conv.domain != "" or (relu := conv_factor.only_consumer(conv, "Relu")) is None:
            continue
        conv.op_type, conv.domain = "FusedConv", CONTRIB
        conv.attributes["activation"] = ir.AttrString("activation", "Relu")
        model.graph.opset_imports.setdefault(CONTRIB, 1)
        conv_factor.replace_by_conv(relu, conv)
        outcome.counts["fused_conv"] += 1
    return outcome


_graph, _SIZES = conv_factor.case_graph, conv_factor.SIZES
_CONV = "Conv <pads = [1, 1, 1, 1]> (x, w, b)"
_FACTOR, _Z = ", float c = {0.25}", ", float[N,4,H,W] z"
CASES = [
    PassCase("Relu", _graph(f"h = {_CONV}  y = Relu (h)"), 1, {"FusedConv": 1, "Conv": 0, "Relu": 0}, sizes=_SIZES),
    PassCase(
        "no bias, strides and groups",
        _graph("h = Conv <pads = [1, 1, 1, 1], dilations = [1, 1], group = 1> (x, w)  y = Relu (h)"),
        1,
        {"FusedConv": 1},
        sizes=_SIZES,
    ),
    PassCase(
        "a factor before Relu",
        _graph(f"h = {_CONV}  s = Mul (c, h)  y = Relu (s)", _FACTOR),
        1,
        {"FusedConv": 1, "Mul": 0, "Relu": 0},
        sizes=_SIZES,
    ),
    PassCase("read twice", _graph(f"h = {_CONV}  y = Relu (h)  z = Neg (h)", outputs=_Z), 0, {"Relu": 1}, sizes=_SIZES),
    PassCase("an output", _graph(f"z = {_CONV}  y = Relu (z)", outputs=_Z), 0, {"Relu": 1}, sizes=_SIZES),
    PassCase("Sigmoid", _graph(f"h = {_CONV}  y = Sigmoid (h)"), 0, {"Sigmoid": 1}, sizes=_SIZES),
]

PASS = Pass("fused_conv", fused_conv, CASES, runs_after=(conv_factor.PASS,))
