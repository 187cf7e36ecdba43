"""Weights stored in 4 or 8 bits and dequantized by the graph (`optimize --weights`).

Each weight of a MatMul, Gemm or Conv becomes elements and scales in front of DequantizeLinear: the rows of a product in
blocks, a convolution by output channels. Activations stay as they are. onnxruntime 1.31 fuses DequantizeLinear and
MatMul of integers to MatMulNBits, whose kernels on the CPU and on CUDA read the stored elements. It folds no other
DequantizeLinear of a constant when a session is opened: the weight is dequantized at every run, one layer at a time
(tests/optimize/test_weight_storage.py measures both). So it is in our own provider, in front of LinearAdd,
LinearSplitGelu and NhwcConv, in 16 bits and in memory that the next layer takes again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import onnx_ir as ir

from fusion_passes import DOMAIN, quantized_weights
from fusion_passes.graph_edits import tensor_values
from fusion_passes.graph_pass import Pass
from fusion_passes.lower import linear_add, winograd_conv
from fusion_passes.weight_recipes import contiguous, record_recipe
from sd_ort.core.errors import InputError

DTYPES = ("int8", "int4", "float8")
GROUPS = (32, 64, 128)
# Dtypes of activations by target. The providers of other targets lack kernels for some of the element types.
TARGETS: Mapping[str, tuple[str, ...]] = {
    "cpu": ("float32",),
    "portable": ("float32", "float16"),
    "gpu": ("float32", "float16", "bfloat16"),
    "hip": ("float32", "float16", "bfloat16"),
}
STORED_COMPONENTS = frozenset({"unet", "transformer", "controlnet", "text_encoder", "text_encoder_2", "text_encoder_3"})
VAES = frozenset({"vae_encoder", "vae_decoder"})  # on request: they take twice the time (results/vae_storage.md)
MIN_ELEMENTS = 4096  # smaller weights stay as they are
BLOCK_OPSET = 21  # of DequantizeLinear with block_size and 4 bits
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True)
class WeightStorage:
    """Storage format of weights.

    dtype: in DTYPES. group: elements of a product's row that share a scale, in GROUPS; float8 has a scale a channel.
    symmetric: whether integers have no zero point. vae: whether the VAE's weights are stored too, in 8 bits.
    Convolutions have a scale an output channel, and 8 bits with int4.
    """

    dtype: str
    group: int = 64
    symmetric: bool = True
    vae: bool = False

    def of_component(self, name: str) -> WeightStorage | None:
        """Return the storage format for the weights of a component; None if they stay unchanged."""
        if name in VAES and self.vae:
            return replace(self, dtype="int8") if self.dtype == "int4" else self
        return self if name in STORED_COMPONENTS else None

    def check(self, target: str, dtype: str) -> None:
        """Raise InputError for settings that do not go together."""
        if self.dtype not in DTYPES or self.group not in GROUPS:
            raise InputError(f"--weights takes {', '.join(DTYPES)}, and --weight-group {', '.join(map(str, GROUPS))}.")
        if self.dtype == "float8" and not self.symmetric:
            raise InputError("--weights float8 has no zero points: leave --asymmetric out.")
        if target not in TARGETS:
            raise InputError(
                f"target {target} reads no stored weights: use one of {', '.join(TARGETS)} with --weights."
            )
        if dtype not in TARGETS[target]:
            raise InputError(f"--weights stores the weights itself: leave out --{dtype} for target {target}.")

    def passes(self, passes: tuple[Pass, ...]) -> tuple[Pass, ...]:
        """Return the lowering passes without those whose kernels keep weights in another form."""
        return tuple(each for each in passes if each not in (winograd_conv.PASS, linear_add.CPU))

    def entry(self) -> dict[str, Any]:
        """Return the settings for manifest and graph."""
        return asdict(self)


def store_weights(model: ir.Model, storage: WeightStorage) -> int:
    """Store the weights of a graph in place; return how many.

    Raises InputError, before anything is changed, for a product whose rows the group does not divide.
    """
    graph = model.graph
    arguments = {value: argument for value in graph.initializers.values() if (argument := _argument(value, storage))}
    for value, (_, axis, block, _) in arguments.items():
        assert value.const_value is not None
        length = int(value.const_value.shape.numpy()[axis])
        if block and length % block:
            fitting = [str(group) for group in GROUPS if length % group == 0]
            advice = f"give --weight-group {' or '.join(fitting)}" if fitting else "use --weights float8"
            raise InputError(
                f"{value.name} has {length} elements a row, which groups of {block} do not divide: {advice}."
            )
    if arguments:
        graph.opset_imports[""] = max(graph.opset_imports.get("", 0), BLOCK_OPSET)
    first = next(iter(graph), None)
    for value, argument in arguments.items():
        uses = list(value.uses())
        inputs = [_derived(graph, value, argument, operation) for operation in _operations(argument)]
        attributes = {"axis": argument[1]} | ({"block_size": argument[2]} if argument[2] else {})
        node = ir.node("DequantizeLinear", inputs, attributes)
        output = node.outputs[0]
        output.name, output.type, output.shape = f"{value.name}.dequantized", value.type, value.shape
        assert first is not None
        graph.insert_before(first, node)
        for consumer, index in uses:
            consumer.replace_input_with(index, output)
        del graph.initializers[str(value.name)]
    return len(arguments)


def _operations(argument: quantized_weights.StoredArgument) -> tuple[str, ...]:
    """Return the recipe operations of the inputs of DequantizeLinear."""
    names = ("stored_elements", "stored_scales", "stored_zero_points")
    return names[:2] if argument[3] else names


def _argument(value: ir.Value, storage: WeightStorage) -> quantized_weights.StoredArgument | None:
    """Return the storage of a weight, the same for all its consumers; None to leave the weight unchanged."""
    if value.const_value is None or value.dtype not in FLOATS or value.const_value.size < MIN_ELEMENTS:
        return None
    if value.is_graph_output() or not value.uses():
        return None
    axes = {_axis(node, index) for node, index in value.uses()}
    axis = next(iter(axes))
    if len(axes) != 1 or axis is None:
        return None
    kind, number = axis
    if storage.dtype == "float8" or kind == "channels":
        dtype = "float8" if storage.dtype == "float8" else "int8"
        channels = 1 - number if kind == "rows" else number
        return dtype, channels, 0, storage.symmetric
    return storage.dtype, number, storage.group, storage.symmetric


def _axis(node: ir.Node, index: int) -> tuple[str, int] | None:
    """Return ("rows", the axis that is multiplied) of a product's weight, ("channels", output channels) of a filter."""
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    if index != 1 or node.domain not in ("", DOMAIN) or weight is None or weight.shape is None:
        return None
    if node.op_type in ("Conv", "NhwcConv"):
        return "channels", 0
    if node.op_type in ("MatMul", "Gemm", "LinearAdd", "LinearSplitGelu") and len(weight.shape) == 2:
        return "rows", node.attributes.get_int("transB", 0) or 0 if node.op_type == "Gemm" else 0
    return None


def _derived(graph: ir.Graph, source: ir.Value, argument: quantized_weights.StoredArgument, operation: str) -> ir.Value:
    """Add an input of DequantizeLinear that is computed from a weight when the model is saved."""
    tensor = source.const_value
    assert tensor is not None
    name, shape = f"{source.name}.{operation.removeprefix('stored_')}", tuple(int(n) for n in tensor.shape.numpy())
    if operation != "stored_elements":
        shape = quantized_weights.stored(argument).scale_shape(shape)
    is_scale = operation == "stored_scales"
    dtype = tensor.dtype if is_scale else ir.DataType.from_numpy(quantized_weights.stored(argument).format.dtype)

    def evaluate() -> ir.Tensor:
        values = contiguous(quantized_weights.OPERATIONS[operation](argument, tensor_values(tensor)))
        return ir.Tensor(values.astype(dtype.numpy()), dtype=dtype, name=name)

    lazy = ir.LazyTensor(evaluate, dtype=dtype, shape=ir.Shape(shape), name=name)
    value = ir.Value(name=name, const_value=lazy, shape=lazy.shape, type=ir.TensorType(dtype))
    graph.register_initializer(value)
    return record_recipe(value, operation, list(argument), [source])
