"""The two graphs of a UNet with patch parallelism: one band of image rows per device.

As DistriFusion (Li et al., 2024): the first steps compute the whole image on each device, later ones a band. What a
band needs of the others comes from earlier steps, since neighboring steps differ little:

    convolutions         the rows next to the band (halo)
    self-attention       keys and values of the other bands
    group normalization  nothing: its gamma and beta are corrected from the band's mean and variance to the image's, by
                         those of the last whole step

A whole step returns all this for one band. A band's step reads it as inputs, and returns its own rows, keys and values
for the others. Both graphs are edits of the optimized one, over the same initializers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from fusion_passes import DOMAIN, value_queries
from fusion_passes.graph_edits import new_initializer
from fusion_passes.shapes.infer import annotate
from sd_ort.core.errors import InputError
from sd_ort.graphs.hoist import all_inputs

CONVOLUTIONS = {"Conv": 2, "WinogradConv": 2, "NhwcConv": 1}  # and the axis of the height
NORMS = ("GroupNorm", "SkipGroupNorm")
CORRECTIONS = ("patch.gamma", "patch.beta")  # of all norms, one behind the other
ATTENTIONS = ("MultiHeadAttention", "Attention")
# Operators that compute rows, pixels or tokens each by itself; others, such as an attention that is not fused, would be
# wrong in a band.
ROW_WISE = frozenset({
    "Add", "Sub", "Mul", "Div", "Sigmoid", "Gelu", "Cast", "Identity", "Concat", "Split", "Reshape", "Transpose",
    "MatMul", "Gemm", "Resize", "UpsampleNearest", "SubpixelShuffle", "LayerNormalization", "SkipLayerNormalization",
    "BiasAdd", "BiasSplitGelu", "LinearAdd", "LinearSplitGelu", "QuickGelu",
})  # fmt: skip


@dataclass(frozen=True)
class Band:
    """One of `count` bands of rows."""

    index: int
    count: int

    @property
    def others(self) -> list[int]:
        """Return the other bands' indices."""
        return [index for index in range(self.count) if index != self.index]


def offered(names: Iterable[str]) -> list[str]:
    """Return the outputs of a band that other bands read, ordered so that each other band reads consecutive ones.

    These are the last rows, for the band below; keys and values, for all; the first rows, for the band above.
    """
    names = list(names)
    return [name for kind in ((".last",), (".keys", ".values"), (".first",)) for name in names if name.endswith(kind)]


def outputs_for(names: Iterable[str], band: Band, reader: int) -> list[str]:
    """Return the outputs of a band that another band reads, in the order of `offered`."""
    halos = {band.index + 1: (".last",), band.index - 1: (".first",)}.get(reader, ())
    return [name for name in offered(names) if name.endswith((".keys", ".values", *halos))]


def inputs_from(names: Iterable[str], band: Band, writer: int) -> list[str]:
    """Return the inputs of a band that another band writes, in the order of its `outputs_for`."""
    halo = {band.index - 1: ".above", band.index + 1: ".below"}.get(writer)
    names = list(names)
    halos = [name for name in names if halo is not None and name.endswith(halo)]
    shared = [name for name in names if name.endswith(f".{writer}")]
    return [*halos, *shared] if writer < band.index else [*shared, *halos]


def return_borders(model: ir.Model, band: Band) -> None:
    """Add the values that a band's graph reads to the outputs of the complete graph. Errors: see `compute_band`."""
    _Editor(model, band).return_borders()


def compute_band(model: ir.Model, band: Band) -> None:
    """Reduce a UNet to a band of its image; its further outputs are for other bands: see `outputs_for`.

    Raises InputError if the graph has operators that mix rows in another way than those of Stable Diffusion's UNets.
    """
    _Editor(model, band).compute_band()


class _Editor:
    """Edits of one graph for one band."""

    def __init__(self, model: ir.Model, band: Band) -> None:
        self.graph, self.band = model.graph, band
        if any(node.op_type in CONVOLUTIONS and node.outputs[0].shape is None for node in self.graph):
            annotate(self.graph)
        self.image = _image_values(self.graph)
        self.nodes = list(self.graph)
        self.anchor: ir.Node | None = None  # before which nodes are inserted; None for the end
        self.inserted: set[ir.Node | None] = set()
        self.names = 0
        supported = ROW_WISE | {*CONVOLUTIONS, *NORMS, *ATTENTIONS}
        for node in self.nodes:
            if node.outputs[0] not in self.image or node.op_type in ("Shape", "Size"):
                continue
            smooth = node.op_type == "Resize" and node.attributes.get_string("mode", "nearest") != "nearest"
            images = sum(value in self.image for value in node.inputs)
            if node.op_type not in supported or smooth or (node.op_type == "MatMul" and images > 1):
                raise InputError(f"this UNet's {node.op_type} cannot be split into bands of rows: optimize the folder.")

    # --- Sites ------------------------------------------------------------------------------------------------------

    def convolutions(self) -> Iterator[tuple[str, ir.Node, int, int, int]]:
        """Yield name, node, axis of the height, and rows that are read above and below."""
        convolutions = (node for node in self.nodes if node.op_type in CONVOLUTIONS and node.inputs[0] in self.image)
        for number, node in enumerate(convolutions):
            above, below = (1, 1) if node.op_type == "WinogradConv" else self._pads(node)
            if above or below:
                yield f"patch.{number}", node, CONVOLUTIONS[node.op_type], above, below

    @staticmethod
    def _pads(node: ir.Node) -> tuple[int, int]:
        pads = node.attributes.get_ints("pads") or [0, 0, 0, 0]
        if node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
            raise InputError("a convolution with auto_pad cannot be split into bands of rows: optimize the folder.")
        return pads[0], pads[2]

    def norms(self) -> Iterator[tuple[str, ir.Node, ir.Value]]:
        """Yield name, node and the normalized image."""
        norms = (node for node in self.nodes if node.op_type in NORMS)
        for number, node in enumerate(norms):
            image = node.outputs[1] if node.op_type == "SkipGroupNorm" else node.inputs[0]
            assert image is not None
            yield f"patch.norm_{number}", node, image

    def attentions(self) -> Iterator[tuple[str, ir.Node]]:
        """Yield name and node of each self-attention."""
        attentions = (node for node in self.nodes if node.op_type in ATTENTIONS)
        for number, node in enumerate(attentions):
            key = node.inputs[1] if len(node.inputs) > 1 else None
            if key is None or key in self.image:
                if any(value is not None for value in node.inputs[3:]):
                    raise InputError("self-attention with a bias or a mask cannot be split into bands of rows.")
                yield f"patch.attention_{number}", node

    # --- The whole image --------------------------------------------------------------------------------------------

    def return_borders(self) -> None:
        band = self.band
        self.return_corrections()
        for name, node, axis, above, below in self.convolutions():
            value = value_queries.operand(node, 0)
            self.anchor = node
            parts = self.split(value, axis, f"{name}.rows")
            if band.index > 0 and above:
                self.output(self.rows(parts[band.index - 1], axis, -above, name), f"{name}.above")
            if band.index + 1 < band.count and below:
                self.output(self.rows(parts[band.index + 1], axis, below, name), f"{name}.below")
        for name, node in self.attentions():
            self.anchor = node
            for key, value in self.shared_keys(name, node):
                parts = self.split(value, 1, f"{name}.{key}")
                for other in band.others:
                    self.output(parts[other], f"{name}.{key}.{other}")

    def return_corrections(self) -> None:
        """Return gamma and beta of all norms with which a band's own mean and variance normalize as the image's."""
        means, squares = [], []
        epsilons: list[float] = []
        groups_of: list[int] = []  # by channel
        norms = list(self.norms())
        for name, node, image in norms:
            self.anchor = self._after(node)
            channels, groups = self.channels(node), node.attributes["groups"].as_int()
            value = self.add("Cast", [image], name, to=ir.DataType.FLOAT)
            if not node.attributes.get_int("channels_last", 0):
                value = self.add("Transpose", [value], name, perm=[0, 2, 3, 1])
            shape = self.ints(name, [self.band.count, -1, groups, channels // groups])
            value = self.add("Reshape", [value, shape], name)
            means.append(self.mean(value, name))
            squares.append(self.mean(self.add("Mul", [value, value], name), name))
            groups_of += [len(epsilons) + channel // (channels // groups) for channel in range(channels)]
            epsilons += [node.attributes["epsilon"].as_float()] * groups
        self.anchor, name = None, "patch.norms"
        epsilon = new_initializer(self.graph, self.unused(name), np.array([epsilons], np.float32))
        (mean, deviation), (image_mean, image_deviation) = self.moments(
            self.add("Concat", means, name, axis=1), self.add("Concat", squares, name, axis=1), epsilon
        )
        ratio = self.add("Div", [deviation, image_deviation], name)
        shift = self.add("Div", [self.add("Sub", [mean, image_mean], name), image_deviation], name)
        flat, index = self.ints(name, [-1]), self.ints(name, groups_of)
        ratio, shift = (
            self.add("Gather", [self.add("Reshape", [value, flat], name), index], name, axis=0)
            for value in (ratio, shift)
        )
        weights = [[part for _, node, _ in norms if (part := node.inputs[index]) is not None] for index in (1, 2)]
        gamma, beta = (
            self.add("Cast", [self.add("Concat", values, name, axis=0)], name, to=ir.DataType.FLOAT)
            for values in weights
        )
        scaled = self.add("Mul", [gamma, ratio], name)
        moved = self.add("Add", [beta, self.add("Mul", [gamma, shift], name)], name)
        for values, result, output in zip(weights, (scaled, moved), CORRECTIONS, strict=True):
            assert values[0].dtype is not None
            self.output(self.add("Cast", [result], name, to=values[0].dtype), output)

    @staticmethod
    def channels(node: ir.Node) -> int:
        channels = value_queries.static_size(node.inputs[1], 0)
        return channels

    def mean(self, value: ir.Value, name: str) -> ir.Value:
        """Return the mean by band and group (P, G) of (P, pixels, G, channels)."""
        for axis in (3, 1):
            value = self.add("ReduceMean", [value, self.ints(name, [axis])], name, keepdims=0)
        return value

    def moments(self, means: ir.Value, squares: ir.Value, epsilon: ir.Value) -> list[tuple[ir.Value, ir.Value]]:
        """Return mean and deviation by group (1, G), of the band and of the image."""
        name, results = "patch.norms", []
        for operator, argument in (("Gather", self.band.index), ("ReduceMean", 0)):
            at = self.ints(name, [argument])
            attributes: dict[str, Any] = {"axis": 0} if operator == "Gather" else {"keepdims": 1}
            mean, square = (self.add(operator, [value, at], name, **attributes) for value in (means, squares))
            variance = self.add("Sub", [square, self.add("Mul", [mean, mean], name)], name)
            results.append((mean, self.add("Sqrt", [self.add("Add", [variance, epsilon], name)], name)))
        return results

    # --- A band -----------------------------------------------------------------------------------------------------

    def compute_band(self) -> None:
        band = self.band
        for name, node, axis, above, below in list(self.convolutions()):
            value = value_queries.operand(node, 0)
            self.anchor = node
            parts = [value]
            if band.index > 0 and above:
                parts.insert(0, self.input(f"{name}.above", value, axis, above))
                if below:
                    self.output(self.rows(value, axis, below, name), f"{name}.first")
            if band.index + 1 < band.count:
                if below:
                    parts.append(self.input(f"{name}.below", value, axis, below))
                if above:
                    self.output(self.rows(value, axis, -above, name), f"{name}.last")
            self.replace_convolution(node, self.add("Concat", parts, name, value, axis=axis), above, below)
        for name, node in list(self.attentions()):
            self.anchor = node
            query, operands = self.query(name, node), []
            for key, value in self.shared_keys(name, node):
                self.output(value, f"{name}.{key}")
                others = [self.input(f"{name}.{key}.{other}", value) for other in band.others]
                operands.append(self.add("Concat", [value, *others], name, value, axis=1))
            new = ir.node(node.op_type, [query, *operands], domain=node.domain, overload=self.overload(node))
            for attribute in node.attributes.values():
                new.attributes[attribute.name] = attribute
            self.replace(node, new)
        self.read_corrections()
        self.graph.sort()

    def read_corrections(self) -> None:
        """Let all norms read parts of two inputs as gamma and beta."""
        nodes = [node for _, node, _ in self.norms()]
        self.anchor = self.graph[0]
        channels = [self.channels(node) for node in nodes]
        sizes = self.ints("patch.norms", channels)
        for index, name in enumerate(CORRECTIONS, 1):
            like = nodes[0].inputs[index]
            assert like is not None
            source = self.input(name, like)
            source.shape = ir.Shape([sum(channels)])
            split = ir.node("Split", [source, sizes], {"axis": 0}, num_outputs=len(nodes))
            self._insert(split)
            for node, part in zip(nodes, split.outputs, strict=True):
                part.name, part.type = self.unused("patch.norms"), like.type
                node.replace_input_with(index, part)

    def replace_convolution(self, node: ir.Node, rows: ir.Value, above: int, below: int) -> None:
        """Let a convolution read `rows`, padded only at the image's own borders."""
        pads = [1, 1, 1, 1] if node.op_type == "WinogradConv" else list(node.attributes.get_ints("pads") or [])
        pads[0] = above if self.band.index == 0 else 0
        pads[2] = below if self.band.index + 1 == self.band.count else 0
        if node.op_type == "WinogradConv":
            node = self.replace(node, ir.node("Conv", list(node.inputs)))
        node.replace_input_with(0, rows)
        node.attributes["pads"] = ir.AttrInt64s("pads", pads)

    def replace(self, node: ir.Node, new: ir.Node) -> ir.Node:
        """Replace a node by another one with the same outputs."""
        old, output = node.outputs[0], new.outputs[0]
        output.name, output.type, output.shape = old.name, old.type, old.shape
        self.graph.insert_before(node, new)
        ir.convenience.replace_all_uses_with(old, output, replace_graph_outputs=True)
        self.graph.remove(node, safe=True)
        return new

    def query(self, name: str, node: ir.Node) -> ir.Value:
        """Return the query (B, S, N * D) of a self-attention."""
        query = value_queries.operand(node, 0)
        if value_queries.rank(query) != 5:
            return query
        part = self.slice(query, 3, 0, 1, name)
        return self.add("Reshape", [part, self.ints(name, [0, 0, -1])], name)

    def shared_keys(self, name: str, node: ir.Node) -> list[tuple[str, ir.Value]]:
        """Return the keys and values that other bands attend to: packed (B, S, N, 2, D), or apart."""
        query = value_queries.operand(node, 0)
        if value_queries.rank(query) == 5:
            packed = self.slice(query, 3, 1, 3, name)
            dims = query.shape
            assert dims is not None
            packed.shape = ir.Shape([*list(dims)[:3], 2, dims[4]])
            return [("keys", packed)]
        key, value = value_queries.operand(node, 1), value_queries.operand(node, 2)
        return [("keys", key), ("values", value)]

    def overload(self, node: ir.Node) -> str:
        """Return the overload of an attention over separate keys, which cross-attention has."""
        if node.domain != DOMAIN or len(node.inputs) > 1:
            return node.overload
        for other in self.nodes:
            if other.op_type == node.op_type and len(other.inputs) == 2 and other.inputs[1] not in self.image:
                return other.overload
        raise InputError("this UNet has no cross-attention: its image cannot be split into bands.")

    # --- Nodes ------------------------------------------------------------------------------------------------------

    def _after(self, node: ir.Node) -> ir.Node | None:
        """Return the node behind `node`, None at the end."""
        following = self.nodes.index(node) + 1
        return self.nodes[following] if following < len(self.nodes) else None

    def unused(self, name: str) -> str:
        self.names += 1
        return f"{name}.{self.names}"

    def ints(self, name: str, values: Sequence[int]) -> ir.Value:
        return new_initializer(self.graph, self.unused(name), values)

    def add(
        self, op_type: str, inputs: Sequence[ir.Value], name: str, like: ir.Value | None = None, **attributes: Any
    ) -> ir.Value:
        """Insert a standard operator before the anchor and return its output, of the type of `like` (inputs[0])."""
        node = ir.node(op_type, inputs, attributes)
        self._insert(node)
        output = node.outputs[0]
        output.name = self.unused(name)
        output.type = ir.TensorType(ir.DataType(attributes["to"])) if "to" in attributes else (like or inputs[0]).type
        return output

    def _insert(self, node: ir.Node) -> None:
        self.inserted.add(node)
        if self.anchor is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self.anchor, node)

    def slice(self, value: ir.Value, axis: int, start: int, end: int, name: str) -> ir.Value:
        bounds = [self.ints(name, [number]) for number in (start, end, axis)]
        return self.add("Slice", [value, *bounds], name)

    def rows(self, value: ir.Value, axis: int, count: int, name: str) -> ir.Value:
        """Return the first rows of an image or, for a negative `count`, the last."""
        start, end = (0, count) if count > 0 else (count, np.iinfo(np.int64).max)
        return self.slice(value, axis, start, int(end), name)

    def split(self, value: ir.Value, axis: int, name: str) -> list[ir.Value]:
        """Return each band's slice of a value."""
        node = ir.node("Split", [value], {"axis": axis, "num_outputs": self.band.count}, num_outputs=self.band.count)
        self._insert(node)
        for output in node.outputs:
            output.name, output.type = self.unused(name), value.type
        return list(node.outputs)

    def input(self, name: str, like: ir.Value, axis: int = 0, rows: int = 0) -> ir.Value:
        """Add a graph input as `like`, with `rows` along `axis`."""
        value = ir.Value(name=name, type=like.type)
        dims = list(like.shape) if like.shape is not None else []
        if rows:
            dims[axis] = rows
        value.shape = ir.Shape(dims)
        self.graph.inputs.append(value)
        return value

    def output(self, value: ir.Value, name: str) -> None:
        """Return a value from the graph under `name`; values of the original graph keep theirs, and are copied."""
        result = value if value.producer() in self.inserted else self.add("Identity", [value], name)
        result.name, result.shape = name, value.shape
        self.graph.outputs.append(result)


def _image_values(graph: ir.Graph) -> set[ir.Value]:
    """Return the values that depend on the sample, other than by its shape."""
    image_values = {value for value in graph.inputs if value.name == "sample"}
    for node in graph:
        if node.op_type != "Shape" and any(value in image_values for value in all_inputs(node)):
            image_values.update(node.outputs)
    return image_values
