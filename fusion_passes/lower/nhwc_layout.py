"""Layout: convolutions and normalizations run channels-last, and what lies between them follows.

    Conv(x NCHW) => NhwcConv(x NHWC, weight [M,kH,kW,C/g])        GroupNorm, SkipGroupNorm => channels_last=1
    Add, Mul, Sigmoid, Concat, Resize, Pad between them           => the same node on NHWC tensors
    AveragePool, MaxPool of [N,C,H,W]                             => the same in three dimensions of [N,1,H,W,C]
    Transpose(x, 0231) of a tensor that is NHWC by now            => nothing: [B,HW,C] is a Reshape of it

One walk through the graph gives every tensor that can have one an NHWC counterpart. What still needs NCHW (graph
outputs, operators without an NHWC form) reads it through a Transpose; a U-Net keeps two, at its entry and its exit.
Each connected region of what was moved is then weighed (`layout_regions`): one that costs more than it gains stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from fusion_passes import checks as c
from fusion_passes.lower.layout_regions import Borders, choose
from fusion_passes.operators import BY_NAME
from fusion_passes.operators.record import DOMAIN, Operator
from fusion_passes.pass_ import Case, Outcome, Pass, Refusal
from fusion_passes.rewriting import constant, derived
from fusion_passes.shapes.facts import Facts
from fusion_passes.shapes.infer import infer
from fusion_passes.shapes.rules import repeats
from fusion_passes.tidy import tidy

TO_NHWC, TO_NCHW = [0, 2, 3, 1], [0, 3, 1, 2]
ELEMENTWISE = frozenset(
    "Abs Add Cast Ceil Clip Cos Div Elu Erf Exp Floor Gelu HardSigmoid HardSwish LeakyRelu Log Max Min Mish Mul Neg Pow"
    " Reciprocal Relu Round Selu Sigmoid Sign Sin Softplus Softsign Sqrt Sub Swish Tanh".split()
)
POOLS = frozenset({"AveragePool", "MaxPool"})


def nhwc_layout(model: ir.Model) -> Outcome:
    """Move the 4-D part of `model` to NHWC in place; counts the convolutions moved."""
    walk = _Walk(model.graph)
    for node in list(model.graph):
        walk.visit(node)
    walk.finish()
    tidy(model)
    common.CommonSubexpressionEliminationPass()(model)
    return walk.outcome


class _Walk:
    """The NHWC counterparts made so far, and the nodes they replace."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.nhwc: dict[ir.Value, ir.Value] = {}
        self.replaced: list[ir.Node] = []
        self.entering: dict[ir.Value, ir.Node] = {}
        self.leaving: dict[ir.Node, ir.Value] = {}
        self.undone: set[ir.Node] = set()
        self.outcome = Outcome(Counter(nhwc_layout=0))

    @cached_property
    def facts(self) -> Facts:
        """Sizes, of the values that were there when they were first asked for."""
        return infer(self.graph)

    def visit(self, node: ir.Node) -> None:
        """Make the NHWC counterparts of a node's outputs, where it has a form for them and something to gain."""
        reason = self._visit(node)
        if reason is not None:
            self.outcome.refused.append(Refusal(node, reason))

    def _visit(self, node: ir.Node) -> str | None:
        if node.op_type == "Transpose":
            self._transpose(node)
            return None
        if node.op_type == "Conv":
            return self._conv(node) if c.rank(node.inputs[0]) == 4 else "it does not read [N,C,H,W]"
        fused = BY_NAME.get(node.op_type)
        if fused is not None and fused.images and c.rank(node.inputs[0]) == 4:
            self._fused(node, fused)
            return None
        if not any(v in self.nhwc for v in node.inputs if v is not None) or c.rank(node.outputs[0]) != 4:
            return None
        if node.op_type in ELEMENTWISE:
            return self._elementwise(node)
        if node.op_type == "Concat" and node.attributes["axis"].as_int() in (1, -3):
            self.replace(node, "Concat", [self.nhwc_of(v, node) for v in node.inputs if v is not None], {"axis": 3})
            return None
        if node.op_type == "Resize":
            return self._resize(node)
        if node.op_type == "Pad":
            return self._pad(node)
        if node.op_type in POOLS and len(node.outputs) == 1:
            self._pool(node)
            return None
        return f"{node.op_type} has no channels-last form here"

    def nhwc_of(self, value: ir.Value, before: ir.Node) -> ir.Value:
        """The NHWC form of an NCHW value, through a Transpose where there is none yet."""
        if value not in self.nhwc:
            node = self._turned(value, TO_NHWC)
            self._describe(node.outputs[0], value)
            self.graph.insert_before(before, node)
            self.nhwc[value] = node.outputs[0]
            self.entering[value] = node
        return self.nhwc[value]

    def _turned(self, value: ir.Value, perm: list[int]) -> ir.Node:
        """A Transpose, or a Reshape of an image of one channel, whose numbers lie in the same order in both layouts."""
        sizes = [c.size(value, axis) for axis in perm]
        channels = sizes[3 if perm == TO_NHWC else 1]
        height, width = sizes[1:3] if perm == TO_NHWC else sizes[2:]
        if channels == 1 and height and width:
            target = [0, height, width, 1] if perm == TO_NHWC else [0, 1, height, width]
            return ir.node("Reshape", [value, constant(self.graph, f"{value.name}.turned", target)])
        return ir.node("Transpose", [value], {"perm": ir.AttrInt64s("perm", perm)})

    def replace(
        self,
        node: ir.Node,
        op_type: str,
        inputs: list[ir.Value | None],
        attributes: Mapping[str, int | ir.Attr],
        domain: str = "",
    ) -> None:
        """Put an NHWC node beside `node`; its outputs are the counterparts of the old ones."""
        new = ir.node(op_type, inputs, attributes, domain=domain, num_outputs=len(node.outputs))
        new.metadata_props.update(node.metadata_props)
        for old, output in zip(node.outputs, new.outputs, strict=True):
            self._describe(output, old)
            self.nhwc[old] = output
        self.graph.insert_before(node, new)
        self.replaced.append(node)

    def finish(self) -> None:
        """Remove the nodes of the regions worth it; what still reads their outputs gets those turned back."""
        taken, left = choose(self.replaced, Borders(self.entering, self.leaving, self.undone))
        for region in left:
            reason = f"its {region.convolutions} convolutions would add {region.added} Transposes, and stay NCHW"
            self.outcome.refused += [Refusal(node, reason) for node in region.nodes if node.op_type == "Conv"]
        gone = {node for region in taken for node in region.nodes}
        stays = set(self.replaced) - gone
        for node, x in self.leaving.items():
            if x.producer() not in stays:
                for user, index in list(node.outputs[0].uses()):
                    user.replace_input_with(index, self.nhwc[x])
        for node in self.replaced:
            if node in gone:
                self.outcome.counts["nhwc_layout"] += node.op_type == "Conv"
                for output in node.outputs:
                    self._hand_back(output, gone)
        for node in reversed(self.replaced):
            if node in gone:
                self.graph.remove(node, safe=True)

    def _hand_back(self, output: ir.Value, gone: set[ir.Node]) -> None:
        """Let what still reads an output of a node that goes read its counterpart through a Transpose."""
        if not output.is_graph_output() and all(user in gone for user, _ in output.uses()):
            return
        counterpart = self.nhwc[output]
        back, maker = self._turned(counterpart, TO_NCHW), counterpart.producer()
        assert maker is not None
        back.outputs[0].shape, back.outputs[0].type = output.shape, output.type
        self.graph.insert_after(maker, back)
        for user, index in list(output.uses()):
            if user not in gone:
                user.replace_input_with(index, back.outputs[0])
        if output.is_graph_output():
            output.name, back.outputs[0].name = f"{output.name}.nchw", output.name
            self.graph.outputs[self.graph.outputs.index(output)] = back.outputs[0]

    def _describe(self, output: ir.Value, like: ir.Value) -> None:
        output.name, output.type = f"{like.name}.nhwc", like.type
        if like.shape is not None:
            output.shape = ir.Shape([like.shape[axis] for axis in TO_NHWC])

    def _transpose(self, node: ir.Node) -> None:
        x, y = node.inputs[0], node.outputs[0]
        assert x is not None
        if c.perm(y) == TO_NHWC and x in self.nhwc and not y.is_graph_output():
            self.leaving[node] = x
        elif c.perm(y) == TO_NCHW:
            self.nhwc[y] = x
            self.undone.add(node)

    def _conv(self, node: ir.Node) -> str | None:
        x, weight = node.inputs[0], node.inputs[1]
        if x is None or weight is None or not c.is_constant(weight):
            return "its weight is not constant"
        if c.size(x, 1) is None:
            return "the number of channels is unknown"
        shape = c.dims(weight)
        assert shape is not None
        sizes = [int(shape[axis]) for axis in TO_NHWC]
        moved = derived(self.graph, f"{weight.name}.{node.outputs[0].name}.nhwc", [weight], sizes, "transpose", TO_NHWC)
        # Kernels and the function body want every attribute, whether it is the default or not.
        lists = {"dilations": [1, 1], "kernel_shape": sizes[1:3], "strides": [1, 1]}
        if "auto_pad" not in node.attributes:
            lists["pads"] = [0, 0, 0, 0]
        defaults = {name: ir.AttrInt64s(name, numbers) for name, numbers in lists.items()}
        attributes = {"group": 1, **defaults, **node.attributes}
        inputs = [self.nhwc_of(x, node), moved, *node.inputs[2:]]
        self.replace(node, "NhwcConv", inputs, attributes, DOMAIN)
        return None

    def _fused(self, node: ir.Node, operator: Operator) -> None:
        attributes = {**node.attributes, "channels_last": 1}
        inputs = list(node.inputs)
        for index in operator.images:
            image = inputs[index]
            assert image is not None
            is_column = index > 0 and c.size(image, 2) == c.size(image, 3) == 1  # a skip of one number per channel
            inputs[index] = self._column(image, node) if is_column else self.nhwc_of(image, node)
        self.replace(node, node.op_type, inputs, attributes, DOMAIN)

    def _column(self, value: ir.Value, before: ir.Node) -> ir.Value:
        """[N,C,1,1] as [N,1,1,C]: the same numbers in the same order, so a Reshape."""
        if value in self.nhwc:
            return self.nhwc[value]
        source = value.producer()
        x: ir.Value | None = value
        if source is not None and source.op_type == "Reshape":
            x = source.inputs[0] if c.dims(source.inputs[0]) == (c.dims(value) or [])[:2] else value
        channels = c.size(value, 1)
        assert channels is not None
        shape = constant(self.graph, f"{before.outputs[0].name}.{value.name}.nhwc_shape", [0, 1, 1, channels])
        node = ir.node("Reshape", [x, shape])
        self._describe(node.outputs[0], value)
        node.outputs[0].name = f"{before.outputs[0].name}.{value.name}.nhwc"
        self.graph.insert_before(before, node)
        return node.outputs[0]

    def _elementwise(self, node: ir.Node) -> str | None:
        inputs: list[ir.Value | None] = []
        for value in node.inputs:
            shape = c.dims(value)
            if value is None or c.scalar(value) is not None:
                inputs.append(value)
            elif c.is_constant(value) and shape is not None and len(shape) == 3 and shape[1:] == [1, 1]:
                name = f"{node.outputs[0].name}.{value.name}.row"
                inputs.append(derived(self.graph, name, [value], [int(shape[0])], "reshape", [-1]))
            elif shape is not None and len(shape) == 4 and shape[2:] == [1, 1] and isinstance(shape[1], int):
                inputs.append(self._column(value, node))
            elif shape is not None and len(shape) == 4:
                inputs.append(self.nhwc_of(value, node))
            else:
                return f"an operand of {shape} is neither an image nor one number per channel"
        self.replace(node, node.op_type, inputs, node.attributes)
        return None

    def _resize(self, node: ir.Node) -> str | None:
        x, scales = node.inputs[0], self._scales(node)
        if x is None or scales is None or scales.size != 4:
            return "its scales are not known numbers"
        crops = node.attributes.get_string("coordinate_transformation_mode", "") == "tf_crop_and_resize"
        if node.attributes.get_string("mode", "nearest") != "nearest" or "axes" in node.attributes or crops:
            return "it interpolates, or has axes of its own"
        value = constant(self.graph, f"{node.outputs[0].name}.nhwc_scales", scales[TO_NHWC])
        attributes = {name: a.value for name, a in node.attributes.items()}
        self.replace(node, "Resize", [self.nhwc_of(x, node), None, value], attributes)
        return None

    def _scales(self, resize: ir.Node) -> np.ndarray | None:
        """Those given, or those that computed sizes are proven to come to."""
        if len(resize.inputs) > 3 and resize.inputs[3] is not None:
            times = repeats(resize, self.facts)
            return None if times is None else np.array(times, np.float32)
        return c.constant(resize.inputs[2]) if len(resize.inputs) > 2 else None

    def _pad(self, node: ir.Node) -> str | None:
        x, pads = node.inputs[0], c.constant(node.inputs[1])
        if x is None or pads is None or pads.size != 8 or len(node.inputs) > 3:
            return "its pads are not known for all axes"
        value = constant(
            self.graph, f"{node.outputs[0].name}.nhwc_pads", pads[TO_NHWC + [axis + 4 for axis in TO_NHWC]]
        )
        attributes = {name: a.value for name, a in node.attributes.items()}
        self.replace(node, "Pad", [self.nhwc_of(x, node), value, *node.inputs[2:]], attributes)
        return None

    def _pool(self, node: ir.Node) -> None:
        """A pool over positions is one over [H,W,C] with windows of one channel."""
        x, y, name = node.inputs[0], node.outputs[0], node.outputs[0].name
        assert x is not None
        axis = constant(self.graph, f"{name}.nhwc_axis", [1])
        volume = ir.node("Unsqueeze", [self.nhwc_of(x, node), axis])
        attributes = {key: a.value for key, a in node.attributes.items()}
        for key in ("kernel_shape", "strides", "dilations"):
            if key in attributes:
                attributes[key] = [*attributes[key], 1]
        if "pads" in attributes:
            top, left, bottom, right = attributes["pads"]
            attributes["pads"] = [top, left, 0, bottom, right, 0]
        pooled = ir.node(node.op_type, volume.outputs, attributes)
        for made, like, suffix in ((volume, x, "volume"), (pooled, y, "pooled")):
            made.metadata_props.update(node.metadata_props)
            self._describe(made.outputs[0], like)
            made.outputs[0].name = f"{name}.nhwc_{suffix}"
            made.outputs[0].shape = like.shape and ir.Shape([like.shape[0], 1, *(like.shape[i] for i in (2, 3, 1))])
            self.graph.insert_before(node, made)
        self.replace(node, "Squeeze", [pooled.outputs[0], axis], {})


def _case(name: str, body: str, fires: int = 2, refused: str | None = None, extra: str = "", **ops: int) -> Case:
    graph = f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,8,H,W] x, float[N,8,H,W] y {extra}) => (float[N,P,Q,R] z)
        <float[8,8,3,3] k, float[8,8,1,1] p, float[8] b, float[8,1,1] column, float[8] g, float[8] h,
         float[8,1,5] odd, float[4] twice = {{1, 1, 2, 2}}, int64[8] frame = {{0, 0, 1, 1, 0, 0, 1, 1}}> {{
            {body}
        }}"""
    return Case(name, graph, fires, {"NhwcConv": fires, **ops}, refused, {"N": 2, "H": 6, "W": 5})


_CONV = "e = Conv <pads = [1, 1, 1, 1]> (x, k, b)  a = Conv <pads = [1, 1, 1, 1]> (e, k, b)"
_FLOOR = 'coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"'
CASES = [
    _case("two convolutions", f"{_CONV}  z = Relu (a)", Transpose=2),
    _case("normalization", f"{_CONV}  z = GroupNormalization <num_groups = 2> (a, g, h)", GroupNorm=1, Transpose=2),
    _case("one number per channel", f"{_CONV}  z = Mul (a, column)", Transpose=2),
    _case("beside the channels", f"{_CONV}  z = Concat <axis = 1> (a, x)", Concat=1, Transpose=2),
    _case("upsampling", f"{_CONV}  z = Resize <{_FLOOR}> (a, , twice)", Resize=1, Transpose=2),
    _case("a frame", f"{_CONV}  z = Pad (a, frame)", Pad=1, Transpose=2),
    _case(
        "average pool",
        f"{_CONV}  z = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (a)",
        AveragePool=1,
        Transpose=2,
    ),
    _case(
        "padded pool", f"{_CONV}  z = MaxPool <kernel_shape = [3, 3], pads = [1, 0, 1, 2]> (a)", MaxPool=1, Transpose=2
    ),
    Case(
        "one convolution between Transposes that are there",
        """<ir_version: 10, opset_import: ["" : 21]> g (float[N,6,5,8] x) => (float[N,6,5,8] z) <float[8,8,1,1] k> {
            n = Transpose <perm = [0, 3, 1, 2]> (x)  a = Conv (n, k)  t = Transpose <perm = [0, 2, 3, 1]> (a)
            z = Relu (t)
        }""",
        ops={"NhwcConv": 1, "Transpose": 0},
        sizes={"N": 2},
    ),
    Case(
        "one channel enters and leaves without a Transpose",
        """<ir_version: 10, opset_import: ["" : 21]> g (float[N,1,6,5] x) => (float[N,1,6,5] z) <float[1,1,1,1] k> {
            z = Conv (x, k)
        }""",
        ops={"NhwcConv": 1, "Transpose": 0, "Reshape": 2},
        sizes={"N": 2},
    ),
    _case("one convolution", "a = Conv (x, p)  z = Relu (a)", 0, "stay NCHW", Conv=1, Transpose=0),
    _case(
        "an island behind a region that took the Transposes that may be added",
        f"{_CONV}  s = Softmax <axis = 3> (a)  f = Conv (s, p)  d = Conv (f, p)  t = Softmax <axis = 3> (d)"
        "  i = Conv (t, p)  z = Conv (i, p)",
        2,
        "2 convolutions would add 2 Transposes",
        Conv=4,
        Transpose=2,
    ),
    _case("weight that is an input", "z = Conv (x, w)", 0, "not constant", ", float[8,8,3,3] w", Conv=1, Transpose=0),
    _case("softmax over rows", f"{_CONV}  z = Softmax <axis = 3> (a)", 2, "Softmax has no", Transpose=2),
    _case("one number a column", f"{_CONV}  z = Mul (a, odd)", 2, "neither an image", Transpose=2),
    _case("linear upsampling", f'{_CONV}  z = Resize <mode = "linear"> (a, , twice)', 2, "interpolates", Transpose=2),
    _case("no convolution", "z = Relu (x)", 0, Transpose=0),
]

PASS = Pass("nhwc_layout", nhwc_layout, CASES)
