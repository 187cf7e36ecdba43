"""The layers of a graph that can be quantized to 8 bits, and why the others are not.

Rejected by structure, as the published recipes for SDXL do by name (MLPerf 5.1, TheStage):
    first and last convolution    fewer than 32 input or output channels
    time embeddings, text keys    their input does not depend on the latents, so they run once a step or prompt
    shortcuts                     1x1 convolutions with another number of output than of input channels
    up_blocks.2.resnets.2.conv2   the last convolution that reads an image of the latents' size, before the last of all

The same rules hold for a VAE decoder. In int8 its three convolutions of few channels and the last wide one cost 2 dB of
44, and hardly any time; beside them one layer of the demo stands out alone, but leaving it in 16 bits as well gains
nothing (results/vae_eight_bits.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import onnx_ir as ir

from fusion_passes import DOMAIN
from fusion_passes import value_queries as values
from fusion_passes.graph_pass import Rejection

LATENTS = frozenset({"sample", "hidden_states"})  # graph inputs of a UNet, of a transformer
MIN_CHANNELS = 32
CHANNEL_MULTIPLE = 16  # matrix units read 16 bytes of a row at once
CONVOLUTIONS = frozenset({"Conv", "NhwcConv"})
LINEARS = frozenset({"MatMul", "Gemm", "LinearAdd", "LinearSplitGelu"})


@dataclass(frozen=True)
class Layer:
    """A node whose inputs 0 (x) and 1 (weight) can be quantized. axis: that of the output channels in the weight."""

    node: ir.Node
    axis: int

    @property
    def x(self) -> ir.Value:
        """The activations."""
        return values.operand(self.node, 0)

    @property
    def weight(self) -> ir.Value:
        """The weight, an initializer."""
        return values.operand(self.node, 1)


@dataclass
class Layers:
    """The layers to quantize in the order of the graph, and the rejected linears and convolutions."""

    accepted: list[Layer] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)


def find_layers(
    graph: ir.Graph,
    operators: Collection[str],
    float32_nodes: Collection[ir.Node] = (),
    conv_reject_reason: Callable[[ir.Node], str | None] | None = None,
    text_layers: bool = False,
) -> Layers:
    """Return the layers of `graph` that can be quantized.

    Args:
        operators: Those that the target runs in 8 bits, of `CONVOLUTIONS` and `LINEARS`.
        float32_nodes: Nodes that overflow in half precision.
        conv_reject_reason: Returns why the target's kernel does not compute a convolution, or None.
        text_layers: Take layers of sequences that do not depend on the latents too: keys and values of the text.
    """
    layers = Layers()
    dependent = _dependent_on_latents(graph)
    last = _last_wide_convolution(graph)
    for node in graph:
        if node.op_type not in CONVOLUTIONS | LINEARS or node.domain not in ("", DOMAIN):
            continue
        reason = _reject_reason(node, operators, dependent, text_layers)
        if reason is None and node in float32_nodes:
            reason = "it is computed in float32, since its values come near the largest float16"
        if reason is None and conv_reject_reason is not None and node.op_type in CONVOLUTIONS:
            reason = conv_reject_reason(node)
        if reason is None and node is last:
            reason = "it is the last convolution before the output's"
        if reason is None:
            layers.accepted.append(Layer(node, channel_axis(node)))
        else:
            layers.rejections.append(Rejection(node, reason))
    return layers


def _reject_reason(
    node: ir.Node, operators: Collection[str], dependent: Collection[ir.Value], text_layers: bool
) -> str | None:
    x, weight = node.inputs[:2]
    if x is None or weight is None or not weight.is_initializer() or weight.is_graph_input():
        return "its weight is not constant"
    if weight.dtype != ir.DataType.FLOAT or x.dtype != ir.DataType.FLOAT:
        return "its weight is not in float32"
    shape = values.dims(weight)
    is_convolution = node.op_type in CONVOLUTIONS
    if shape is None or len(shape) != (4 if is_convolution else 2):
        return "its weight is neither a matrix nor a filter of images"
    if x not in dependent and not (text_layers and values.rank(x) == 3):
        return "its input does not depend on the latents: it does not run in every step"
    outputs, inputs = _channels(node, shape)
    if min(outputs, inputs) < MIN_CHANNELS:
        return f"it has fewer than {MIN_CHANNELS} input or output channels"
    if outputs % CHANNEL_MULTIPLE or inputs % CHANNEL_MULTIPLE:
        return f"its channels are no multiples of {CHANNEL_MULTIPLE}"
    if is_convolution and node.attributes.get_int("group", 1) != 1:
        return "it has groups"
    if outputs != inputs and values.rank(x) == 4 and (not is_convolution or _edges(node, shape) == [1, 1]):
        return "it is a shortcut: a 1x1 convolution that changes the number of channels"
    if node.op_type == "Gemm" and not _is_linear(node):
        return "it is a Gemm with factors or a transposed input"
    if node.op_type not in operators:
        return "the target has no kernel in 8 bits for it"
    return None


def _is_linear(node: ir.Node) -> bool:
    attributes = node.attributes
    factors = (attributes.get_float("alpha", 1.0), attributes.get_float("beta", 1.0))
    return factors == (1.0, 1.0) and attributes.get_int("transA", 0) == 0


def channel_axis(node: ir.Node) -> int:
    """Return the axis of the output channels in the weight of a linear layer or convolution."""
    if node.op_type in CONVOLUTIONS:
        return 0
    return 0 if node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 1 else 1


def _channels(node: ir.Node, shape: list[int | str]) -> tuple[int, int]:
    """Return the output and input channels of a weight (a constant, so its sizes are integers)."""
    if node.op_type in CONVOLUTIONS:
        outputs, inputs = shape[0], shape[3] if node.op_type == "NhwcConv" else shape[1]
    else:
        outputs, inputs = shape[channel_axis(node)], shape[1 - channel_axis(node)]
    return int(outputs), int(inputs)


def _edges(node: ir.Node, shape: list[int | str]) -> list[int | str]:
    return shape[1:3] if node.op_type == "NhwcConv" else shape[2:4]


def _dependent_on_latents(graph: ir.Graph) -> set[ir.Value]:
    """Return the values whose elements depend on the latents; without such an input, all computed values."""
    latents = {value for value in graph.inputs if value.name in LATENTS} or set(graph.inputs)
    dependent = set(latents)
    for node in graph:  # in topological order
        if node.op_type != "Shape" and not dependent.isdisjoint(node.inputs):
            dependent.update(node.outputs)
    return dependent


def _last_wide_convolution(graph: ir.Graph) -> ir.Node | None:
    """Return the last convolution larger than 1x1 with enough channels, whose result only the output's layers read."""
    last = None
    for node in graph:
        if node.op_type not in CONVOLUTIONS or not values.is_constant(node.inputs[1]):
            continue
        shape = values.dims(node.inputs[1])
        if shape is None or len(shape) != 4 or _edges(node, shape) == [1, 1]:
            continue
        if min(_channels(node, shape)) >= MIN_CHANNELS:
            last = node
    return last
