"""Converts convolutions, normalizations and the nodes between them to NHWC.

    Conv(x NCHW) => NhwcConv(x NHWC, weight [M,kH,kW,C/g])        GroupNorm, SkipGroupNorm => channels_last=1
    Add, Mul, Sigmoid, Concat, Resize, Pad between them           => the same node on NHWC tensors
    AveragePool, MaxPool of [N,C,H,W]                             => the same in three dimensions of [N,1,H,W,C]
    Transpose(x, 0231) of a converted tensor                      => removed: [B,HW,C] is a Reshape of it

One walk over the graph creates an NHWC counterpart of every tensor that can have one. Graph outputs and operators
without an NHWC form read NCHW through a Transpose. A U-Net has two Transposes, at its input and its output. Each
connected region of converted nodes is then evaluated (`nhwc_regions`): one that costs more than it saves stays NCHW.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.cleanup import clean_up
from fusion_passes.graph_edits import new_derived_initializer, new_initializer
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, Rejection
from fusion_passes.lower.nhwc_regions import RegionBoundary, choose_regions
from fusion_passes.operators import BY_NAME
from fusion_passes.operators.definition import FusedOperator
from fusion_passes.shapes.infer import infer
from fusion_passes.shapes.rules import integer_scales
from fusion_passes.shapes.shape_info import ShapeInfo

TO_NHWC, TO_NCHW = [0, 2, 3, 1], [0, 3, 1, 2]
ELEMENTWISE = frozenset(
    "Abs Add Cast Ceil Clip Cos Div Elu Erf Exp Floor Gelu HardSigmoid HardSwish LeakyRelu Log Max Min Mish Mul Neg Pow"
    " Reciprocal Relu Round Selu Sigmoid Sign Sin Softplus Softsign Sqrt Sub Swish Tanh".split()
)
POOLS = frozenset({"AveragePool", "MaxPool"})


def nhwc_layout(model: ir.Model) -> PassOutcome:
    """Convert the 4-D part of `model` to NHWC in place; count the converted convolutions."""
    converter = _NhwcConverter(model.graph)
    for node in list(model.graph):
        converter.visit(node)
    converter.finish()
    clean_up(model)
    common.CommonSubexpressionEliminationPass()(model)
    return converter.outcome


class _NhwcConverter:
    """Creates NHWC counterparts of values in one walk, then replaces the nodes of the chosen regions.

    `nhwc` has the counterpart of each value, `replaced` the nodes that have NHWC counterparts. See RegionBoundary for
    `inserted`, `output_transposes` and `cancelled`.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.nhwc: dict[ir.Value, ir.Value] = {}
        self.replaced: list[ir.Node] = []
        self.inserted: dict[ir.Value, ir.Node] = {}
        self.output_transposes: dict[ir.Node, ir.Value] = {}
        self.cancelled: set[ir.Node] = set()
        self.outcome = PassOutcome(Counter(nhwc_layout=0))

    @cached_property
    def info(self) -> ShapeInfo:
        """Shapes of the values that exist at the first use."""
        return infer(self.graph)

    def visit(self, node: ir.Node) -> None:
        """Create NHWC counterparts of a node's outputs if it is a Conv or norm, or has an NHWC input and form."""
        reason = self._visit(node)
        if reason is not None:
            self.outcome.rejections.append(Rejection(node, reason))

    def _visit(self, node: ir.Node) -> str | None:
        if node.op_type == "Transpose":
            self._transpose(node)
            return None
        if node.op_type == "Conv":
            return self._conv(node) if values.rank(node.inputs[0]) == 4 else "it does not read [N,C,H,W]"
        fused = BY_NAME.get(node.op_type)
        if fused is not None and fused.image_inputs and values.rank(node.inputs[0]) == 4:
            self._fused(node, fused)
            return None
        if not any(v in self.nhwc for v in node.inputs if v is not None) or values.rank(node.outputs[0]) != 4:
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
        """Return the NHWC counterpart of an NCHW value; if there is none, insert a Transpose before `before`."""
        if value not in self.nhwc:
            node = self._transposed(value, TO_NHWC)
            self._set_metadata(node.outputs[0], value)
            self.graph.insert_before(before, node)
            self.nhwc[value] = node.outputs[0]
            self.inserted[value] = node
        return self.nhwc[value]

    def _transposed(self, value: ir.Value, perm: list[int]) -> ir.Node:
        """Return a Transpose of `value`, or a Reshape for one channel (both layouts have the same element order)."""
        sizes = [values.size(value, axis) for axis in perm]
        channels = sizes[3 if perm == TO_NHWC else 1]
        height, width = sizes[1:3] if perm == TO_NHWC else sizes[2:]
        if channels == 1 and height and width:
            target = [0, height, width, 1] if perm == TO_NHWC else [0, 1, height, width]
            return ir.node("Reshape", [value, new_initializer(self.graph, f"{value.name}.turned", target)])
        return ir.node("Transpose", [value], {"perm": ir.AttrInt64s("perm", perm)})

    def replace(
        self,
        node: ir.Node,
        op_type: str,
        inputs: list[ir.Value | None],
        attributes: Mapping[str, int | ir.Attr],
        domain: str = "",
    ) -> None:
        """Insert an NHWC node before `node`; its outputs become the counterparts of `node`'s outputs."""
        new = ir.node(op_type, inputs, attributes, domain=domain, num_outputs=len(node.outputs))
        new.metadata_props.update(node.metadata_props)
        for old, output in zip(node.outputs, new.outputs, strict=True):
            self._set_metadata(output, old)
            self.nhwc[old] = output
        self.graph.insert_before(node, new)
        self.replaced.append(node)

    def finish(self) -> None:
        """Remove the old nodes of the chosen regions, and transpose their outputs for the remaining consumers."""
        boundary = RegionBoundary(self.inserted, self.output_transposes, self.cancelled)
        chosen, rejected = choose_regions(self.replaced, boundary)
        for region in rejected:
            reason = f"its {region.convolutions} convolutions would add {region.added} Transposes, and stay NCHW"
            self.outcome.rejections += [Rejection(node, reason) for node in region.nodes if node.op_type == "Conv"]
        converted = {node for region in chosen for node in region.nodes}
        unconverted = set(self.replaced) - converted
        for node, x in self.output_transposes.items():
            if x.producer() not in unconverted:
                for consumer, index in list(node.outputs[0].uses()):
                    consumer.replace_input_with(index, self.nhwc[x])
        for node in self.replaced:
            if node in converted:
                self.outcome.counts["nhwc_layout"] += node.op_type == "Conv"
                for output in node.outputs:
                    self._restore_nchw(output, converted)
        for node in reversed(self.replaced):
            if node in converted:
                self.graph.remove(node, safe=True)

    def _restore_nchw(self, output: ir.Value, converted: set[ir.Node]) -> None:
        """Transpose the counterpart of `output` for its consumers that are not in `converted`."""
        if not output.is_graph_output() and all(consumer in converted for consumer, _ in output.uses()):
            return
        counterpart = self.nhwc[output]
        transpose, producer = self._transposed(counterpart, TO_NCHW), values.producer(counterpart)
        nchw = transpose.outputs[0]
        nchw.shape, nchw.type = output.shape, output.type
        self.graph.insert_after(producer, transpose)
        for consumer, index in list(output.uses()):
            if consumer not in converted:
                consumer.replace_input_with(index, nchw)
        if output.is_graph_output():
            output.name, nchw.name = f"{output.name}.nchw", output.name
            self.graph.outputs[self.graph.outputs.index(output)] = nchw

    def _set_metadata(self, output: ir.Value, like: ir.Value) -> None:
        output.name, output.type = f"{like.name}.nhwc", like.type
        if like.shape is not None:
            output.shape = ir.Shape([like.shape[axis] for axis in TO_NHWC])

    def _transpose(self, node: ir.Node) -> None:
        x, y = values.operand(node, 0), node.outputs[0]
        if values.perm(y) == TO_NHWC and x in self.nhwc and not y.is_graph_output():
            self.output_transposes[node] = x
        elif values.perm(y) == TO_NCHW:
            self.nhwc[y] = x
            self.cancelled.add(node)

    def _conv(self, node: ir.Node) -> str | None:
        x, weight = node.inputs[0], node.inputs[1]
        if x is None or weight is None or not values.is_constant(weight):
            return "its weight is not constant"
        shape = values.dims(weight)
        if values.size(x, 1) is None or shape is None:
            return "the number of channels is unknown"
        sizes = [int(shape[axis]) for axis in TO_NHWC]
        name = f"{weight.name}.{node.outputs[0].name}.nhwc"
        filters = new_derived_initializer(self.graph, name, [weight], sizes, "transpose", TO_NHWC)
        # Kernels and the function body require every attribute, defaults too.
        lists = {"dilations": [1, 1], "kernel_shape": sizes[1:3], "strides": [1, 1]}
        if "auto_pad" not in node.attributes:
            lists["pads"] = [0, 0, 0, 0]
        defaults = {name: ir.AttrInt64s(name, ints) for name, ints in lists.items()}
        attributes: dict[str, int | ir.Attr] = {"group": 1, **defaults, **node.attributes}
        inputs = [self.nhwc_of(x, node), filters, *node.inputs[2:]]
        self.replace(node, "NhwcConv", inputs, attributes, DOMAIN)
        return None

    def _fused(self, node: ir.Node, operator: FusedOperator) -> None:
        attributes: dict[str, int | ir.Attr] = {**node.attributes, "channels_last": 1}
        inputs = list(node.inputs)
        for index in operator.image_inputs:
            image = inputs[index]
            assert image is not None
            per_channel = index > 0 and values.size(image, 2) == values.size(image, 3) == 1  # a skip [N,C,1,1]
            inputs[index] = self._per_channel(image, node) if per_channel else self.nhwc_of(image, node)
        self.replace(node, node.op_type, inputs, attributes, DOMAIN)

    def _per_channel(self, value: ir.Value, before: ir.Node) -> ir.Value:
        """Return [N,C,1,1] as [N,1,1,C]. The element order is the same, so a Reshape is enough."""
        if value in self.nhwc:
            return self.nhwc[value]
        source = value.producer()
        x: ir.Value | None = value
        if source is not None and source.op_type == "Reshape":
            x = source.inputs[0] if values.dims(source.inputs[0]) == (values.dims(value) or [])[:2] else value
        channels = values.static_size(value, 1)
        shape = new_initializer(self.graph, f"{before.outputs[0].name}.{value.name}.nhwc_shape", [0, 1, 1, channels])
        node = ir.node("Reshape", [x, shape])
        self._set_metadata(node.outputs[0], value)
        node.outputs[0].name = f"{before.outputs[0].name}.{value.name}.nhwc"
        self.graph.insert_before(before, node)
        return node.outputs[0]

    def _elementwise(self, node: ir.Node) -> str | None:
        inputs: list[ir.Value | None] = []
        for value in node.inputs:
            shape = values.dims(value)
            if value is None or values.scalar(value) is not None:
                inputs.append(value)
            elif values.is_constant(value) and shape is not None and len(shape) == 3 and shape[1:] == [1, 1]:
                name = f"{node.outputs[0].name}.{value.name}.row"
                inputs.append(new_derived_initializer(self.graph, name, [value], [int(shape[0])], "reshape", [-1]))
            elif shape is not None and len(shape) == 4 and shape[2:] == [1, 1] and isinstance(shape[1], int):
                inputs.append(self._per_channel(value, node))
            elif shape is not None and len(shape) == 4:
                inputs.append(self.nhwc_of(value, node))
            else:
                return f"an operand of shape {shape} is neither an image nor one element per channel"
        self.replace(node, node.op_type, inputs, node.attributes)
        return None

    def _resize(self, node: ir.Node) -> str | None:
        x, scales = node.inputs[0], self._scales(node)
        if x is None or scales is None or scales.size != 4:
            return "its scales are unknown"
        crops = node.attributes.get_string("coordinate_transformation_mode", "") == "tf_crop_and_resize"
        if node.attributes.get_string("mode", "nearest") != "nearest" or "axes" in node.attributes or crops:
            return "it interpolates, or has the attribute axes"
        value = new_initializer(self.graph, f"{node.outputs[0].name}.nhwc_scales", scales[TO_NHWC])
        attributes = {name: a.value for name, a in node.attributes.items()}
        self.replace(node, "Resize", [self.nhwc_of(x, node), None, value], attributes)
        return None

    def _scales(self, resize: ir.Node) -> np.ndarray | None:
        """Return the scales input, or the integer scales that computed sizes are proven to equal, or None."""
        if len(resize.inputs) > 3 and resize.inputs[3] is not None:
            scales = integer_scales(resize, self.info)
            return None if scales is None else np.array(scales, np.float32)
        return values.constant(resize.inputs[2]) if len(resize.inputs) > 2 else None

    def _pad(self, node: ir.Node) -> str | None:
        x, pads = node.inputs[0], values.constant(node.inputs[1])
        if x is None or pads is None or pads.size != 8 or len(node.inputs) > 3:
            return "its pads are unknown"
        value = new_initializer(
            self.graph, f"{node.outputs[0].name}.nhwc_pads", pads[TO_NHWC + [axis + 4 for axis in TO_NHWC]]
        )
        attributes = {name: a.value for name, a in node.attributes.items()}
        self.replace(node, "Pad", [self.nhwc_of(x, node), value, *node.inputs[2:]], attributes)
        return None

    def _pool(self, node: ir.Node) -> None:
        """Convert a 2-D pool to a 3-D pool over [H,W,C] with windows of one channel."""
        x, y, name = values.operand(node, 0), node.outputs[0], node.outputs[0].name
        axis = new_initializer(self.graph, f"{name}.nhwc_axis", [1])
        volume = ir.node("Unsqueeze", [self.nhwc_of(x, node), axis])
        attributes = {key: a.value for key, a in node.attributes.items()}
        for key in ("kernel_shape", "strides", "dilations"):
            if key in attributes:
                attributes[key] = [*attributes[key], 1]
        if "pads" in attributes:
            top, left, bottom, right = attributes["pads"]
            attributes["pads"] = [top, left, 0, bottom, right, 0]
        pooled = ir.node(node.op_type, volume.outputs, attributes)
        for new, like, suffix in ((volume, x, "volume"), (pooled, y, "pooled")):
            new.metadata_props.update(node.metadata_props)
            self._set_metadata(new.outputs[0], like)
            new.outputs[0].name = f"{name}.nhwc_{suffix}"
            new.outputs[0].shape = like.shape and ir.Shape([like.shape[0], 1, *(like.shape[i] for i in (2, 3, 1))])
            self.graph.insert_before(node, new)
        self.replace(node, "Squeeze", [pooled.outputs[0], axis], {})


def _case(
    name: str, body: str, rewrites: int = 2, rejection: str | None = None, extra: str = "", **ops: int
) -> PassCase:
    graph = f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,8,H,W] x, float[N,8,H,W] y {extra}) => (float[N,P,Q,R] z)
        <float[8,8,3,3] k, float[8,8,1,1] p, float[8] b, float[8,1,1] column, float[8] g, float[8] h,
         float[8,1,5] odd, float[4] twice = {{1, 1, 2, 2}}, int64[8] frame = {{0, 0, 1, 1, 0, 0, 1, 1}}> {{
            {body}
        }}"""
    return PassCase(name, graph, rewrites, {"NhwcConv": rewrites, **ops}, rejection, {"N": 2, "H": 6, "W": 5})


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
    PassCase(
        "one convolution between Transposes that are there",
        """<ir_version: 10, opset_import: ["" : 21]> g (float[N,6,5,8] x) => (float[N,6,5,8] z) <float[8,8,1,1] k> {
            n = Transpose <perm = [0, 3, 1, 2]> (x)  a = Conv (n, k)  t = Transpose <perm = [0, 2, 3, 1]> (a)
            z = Relu (t)
        }""",
        ops={"NhwcConv": 1, "Transpose": 0},
        sizes={"N": 2},
    ),
    PassCase(
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
