"""Multiplies a convolution's weights by a constant factor of its result.

    Mul(Conv(x, w, b?), c)    =>  Conv(x, c w, c b?)

ONNX Runtime does this when it opens a graph. Rejected: convolutions with other consumers, and of other dtypes than
float32; factors that are not constant scalars; weights that are not constant.
"""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from fusion_passes import value_queries as values
from fusion_passes.cleanup import remove_unused
from fusion_passes.graph_edits import new_derived_initializer, unique_name
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, Rejection


def conv_factor(model: ir.Model) -> PassOutcome:
    """Fuse the constant factors of `model` into their convolutions, in place; count them."""
    outcome = PassOutcome(Counter(conv_factor=0))
    for conv in list(model.graph):
        if conv.op_type != "Conv" or conv.domain != "" or (mul := only_consumer(conv, "Mul")) is None:
            continue
        factor = mul.inputs[1] if mul.inputs[0] is conv.outputs[0] else mul.inputs[0]
        if (reason := _reject_reason(model.graph, conv, factor)) is not None:
            outcome.rejections.append(Rejection(mul, reason))
            continue
        assert factor is not None
        _multiply_weights(model.graph, conv, factor)
        replace_by_conv(mul, conv)
        outcome.counts["conv_factor"] += 1
    if outcome.counts["conv_factor"]:
        remove_unused(model.graph)
    return outcome


def only_consumer(conv: ir.Node, op_type: str) -> ir.Node | None:
    """Return the node of ai.onnx `op_type` that reads a float32 convolution, if nothing else does."""
    output = conv.outputs[0]
    if not values.has_one_use(output) or output.dtype != ir.DataType.FLOAT:
        return None
    (user,) = output.consumers()
    return user if user.op_type == op_type and user.domain == "" and user.graph is conv.graph else None


def replace_by_conv(node: ir.Node, conv: ir.Node) -> None:
    """Remove `node`; the convolution takes its output's name, since that may be an output of the graph."""
    old, new = node.outputs[0], conv.outputs[0]
    assert node.graph is not None
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    node.graph.remove(node, safe=True)
    new.name = old.name


def _reject_reason(graph: ir.Graph, conv: ir.Node, factor: ir.Value | None) -> str | None:
    if factor is None or values.scalar(factor) is None or factor.name not in graph.initializers:
        return "its factor is not a constant scalar"
    if (values.rank(factor) or 0) > (values.rank(conv.outputs[0]) or 0):
        return "its factor adds axes"
    constant = all(value is None or value.name in graph.initializers for value in conv.inputs[1:])
    return None if constant else "the convolution's weights are not constant"


def _multiply_weights(graph: ir.Graph, conv: ir.Node, factor: ir.Value) -> None:
    for index, value in enumerate(conv.inputs):
        if index == 0 or value is None:
            continue
        shape = values.dims(value)
        assert shape is not None
        name = unique_name(conv.outputs[0], "weight.scaled" if index == 1 else "bias.scaled")
        sizes = [size for size in shape if isinstance(size, int)]
        conv.replace_input_with(index, new_derived_initializer(graph, name, [value, factor], sizes, "scale"))


def case_graph(body: str, declared: str = "", outputs: str = "") -> str:
    """Return the text of a model with x, and with weights w and b of a convolution of 3 to 4 channels."""
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,3,H,W] x) => (float[N,4,H,W] y{outputs})
        <float[4,3,3,3] w, float[4] b{declared}> {{ {body} }}"""


SIZES = {"N": 2, "H": 5, "W": 6}
_CONV = "Conv <pads = [1, 1, 1, 1]> (x, w, b)"
_WIDE = "Conv <pads = [2, 2, 2, 2], dilations = [2, 2]> (x, w, b)"
_FACTOR, _Z = ", float c = {0.25}", ", float[N,4,H,W] z"
CASES = [
    PassCase("a factor", case_graph(f"h = {_CONV}  y = Mul (h, c)", _FACTOR), 1, {"Conv": 1, "Mul": 0}, sizes=SIZES),
    PassCase(
        "first, without a bias",
        case_graph("h = Conv <pads = [1, 1, 1, 1]> (x, w)  s = Mul (c, h)  y = Relu (s)", _FACTOR),
        1,
        {"Conv": 1, "Mul": 0},
        sizes=SIZES,
    ),
    PassCase(
        "weights that two convolutions read",
        case_graph(f"h = {_CONV}  s = Mul (h, c)  k = {_WIDE}  y = Add (s, k)", _FACTOR),
        1,
        {"Conv": 2, "Mul": 0},
        sizes=SIZES,
    ),
    PassCase(
        "read twice", case_graph(f"h = {_CONV}  y = Mul (h, c)  z = Neg (h)", _FACTOR, _Z), 0, {"Mul": 1}, sizes=SIZES
    ),
    PassCase("an output", case_graph(f"z = {_CONV}  y = Mul (z, c)", _FACTOR, _Z), 0, {"Mul": 1}, sizes=SIZES),
    PassCase(
        "a factor of channels",
        case_graph(f"h = {_CONV}  y = Mul (h, c)", ", float[4,1,1] c"),
        0,
        {"Mul": 1},
        "not a constant scalar",
        SIZES,
    ),
    PassCase(
        "a factor with another axis",
        case_graph(f"h = {_CONV}  y = Mul (h, c)", ", float[1,1,1,1,1] c").replace("[N,4,H,W] y", "[1,N,4,H,W] y"),
        0,
        {"Mul": 1},
        "adds axes",
        SIZES,
    ),
    PassCase(
        "computed weights",
        case_graph("h = Conv (x, v)  y = Mul (h, c)", _FACTOR).replace("W] x)", "W] x, float[4,3,1,1] v)"),
        0,
        {"Mul": 1},
        "are not constant",
        SIZES,
    ),
]

PASS = Pass("conv_factor", conv_factor, CASES)
