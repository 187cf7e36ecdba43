"""Lowers a convolution and its activation to FusedConv of ONNX Runtime's CPU provider.

    Mul(Conv(x, w, b?), c)    =>  Conv(x, c w, c b?)
    Relu(Conv(x, w, b?))      =>  FusedConv(x, w, b?; Relu)

ONNX Runtime does both when it opens a graph. Rejected: convolutions with other consumers, and of other dtypes than
float32; factors that are not constant scalars. Runs after `winograd_conv`.
"""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from fusion_passes import CONTRIB
from fusion_passes import value_queries as values
from fusion_passes.cleanup import remove_unused
from fusion_passes.graph_edits import new_derived_initializer, unique_name
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, Rejection


def fused_conv(model: ir.Model) -> PassOutcome:
    """Fuse the constant factors and Relus of `model` into their convolutions, in place; count both."""
    outcome = PassOutcome(Counter(fused_conv=0))
    for conv in list(model.graph):
        if conv.op_type != "Conv" or conv.domain != "":
            continue
        for fuse in (_fuse_factor, _fuse_relu):
            user = _only_consumer(conv)
            reason = fuse(model, conv, user) if user is not None else None
            if reason is not None and user is not None:
                outcome.rejections.append(Rejection(user, reason))
            elif user is not None and user.graph is None:
                outcome.counts["fused_conv"] += 1
    if outcome.counts["fused_conv"]:
        remove_unused(model.graph)
    return outcome


def _only_consumer(conv: ir.Node) -> ir.Node | None:
    """Return the Mul or Relu that reads a float32 convolution, if nothing else does."""
    output = conv.outputs[0]
    if len(output.uses()) != 1 or output.is_graph_output() or output.dtype != ir.DataType.FLOAT:
        return None
    (user,) = output.consumers()
    return user if user.op_type in ("Mul", "Relu") and user.domain == "" and user.graph is conv.graph else None


def _fuse_factor(model: ir.Model, conv: ir.Node, mul: ir.Node) -> str | None:
    """Multiply the weights by a constant factor; return the reason why the Mul must stay, if it must."""
    if mul.op_type != "Mul":
        return None
    graph, factor = model.graph, mul.inputs[1] if mul.inputs[0] is conv.outputs[0] else mul.inputs[0]
    if factor is None or values.scalar(factor) is None or factor.name not in graph.initializers:
        return "its factor is not a constant scalar"
    if (values.rank(factor) or 0) > 4:
        return "its factor adds axes"
    weights = [(index, value) for index, value in enumerate(conv.inputs) if index > 0 and value is not None]
    if any(value.name not in graph.initializers for _, value in weights):
        return "the convolution's weights are not constant"
    for index, value in weights:
        shape = values.dims(value)
        assert shape is not None
        name = unique_name(conv.outputs[0], "weight.scaled" if index == 1 else "bias.scaled")
        sizes = [size for size in shape if isinstance(size, int)]
        conv.replace_input_with(index, new_derived_initializer(graph, name, [value, factor], sizes, "scale"))
    _replace(mul, conv)
    return None


def _fuse_relu(model: ir.Model, conv: ir.Node, relu: ir.Node) -> str | None:
    """Make a FusedConv of a convolution and its Relu."""
    if relu.op_type != "Relu":
        return None
    conv.op_type, conv.domain = "FusedConv", CONTRIB
    conv.attributes["activation"] = ir.AttrString("activation", "Relu")
    model.graph.opset_imports.setdefault(CONTRIB, 1)
    _replace(relu, conv)
    return None


def _replace(node: ir.Node, conv: ir.Node) -> None:
    """Remove `node`; the convolution takes its output's name, since that may be an output of the graph."""
    old, new = node.outputs[0], conv.outputs[0]
    assert node.graph is not None
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    node.graph.remove(node, safe=True)
    new.name = old.name


def _graph(body: str, declared: str = "", outputs: str = "") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,3,H,W] x) => (float[N,4,H,W] y{outputs})
        <float[4,3,3,3] w, float[4] b{declared}> {{ {body} }}"""


_SIZES = {"N": 2, "H": 5, "W": 6}
_CONV = "Conv <pads = [1, 1, 1, 1]> (x, w, b)"
_WIDE = "Conv <pads = [2, 2, 2, 2], dilations = [2, 2]> (x, w, b)"
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
    PassCase("a factor", _graph(f"h = {_CONV}  y = Mul (h, c)", _FACTOR), 1, {"Conv": 1, "Mul": 0}, sizes=_SIZES),
    PassCase(
        "a factor before Relu",
        _graph(f"h = {_CONV}  s = Mul (c, h)  y = Relu (s)", _FACTOR),
        2,
        {"FusedConv": 1, "Mul": 0, "Relu": 0},
        sizes=_SIZES,
    ),
    PassCase(
        "weights that two convolutions read",
        _graph(
            f"h = {_CONV}  s = Mul (h, c)  k = {_WIDE}  y = Add (s, k)",
            _FACTOR,
        ),
        1,
        {"Conv": 2, "Mul": 0},
        sizes=_SIZES,
    ),
    PassCase("read twice", _graph(f"h = {_CONV}  y = Relu (h)  z = Neg (h)", outputs=_Z), 0, {"Relu": 1}, sizes=_SIZES),
    PassCase("an output", _graph(f"z = {_CONV}  y = Relu (z)", outputs=_Z), 0, {"Relu": 1}, sizes=_SIZES),
    PassCase("Sigmoid", _graph(f"h = {_CONV}  y = Sigmoid (h)"), 0, {"Sigmoid": 1}, sizes=_SIZES),
    PassCase(
        "a factor of channels",
        _graph(f"h = {_CONV}  y = Mul (h, c)", ", float[4,1,1] c"),
        0,
        {"Mul": 1},
        "not a constant scalar",
        _SIZES,
    ),
    PassCase(
        "a factor with another axis",
        _graph(f"h = {_CONV}  y = Mul (h, c)", ", float[1,1,1,1,1] c").replace("[N,4,H,W] y", "[1,N,4,H,W] y"),
        0,
        {"Mul": 1},
        "adds axes",
        _SIZES,
    ),
    PassCase(
        "computed weights",
        _graph("h = Conv (x, v)  y = Mul (h, c)", _FACTOR).replace("W] x)", "W] x, float[4,3,1,1] v)"),
        0,
        {"Mul": 1},
        "are not constant",
        _SIZES,
    ),
]

PASS = Pass("fused_conv", fused_conv, CASES)
