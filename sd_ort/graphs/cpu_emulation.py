"""CPU-equivalent models: copies of optimized models that ONNX Runtime's CPU provider runs with the same results.

The CPU provider differs from a GPU in two ways. It has no kernels for some contrib operators; they become function
bodies. It computes half precision in float32 without rounding between operators, which hides rounding errors and
overflows; the copy is in float32 and rounds the output of every operator to the half dtype by arithmetic. Models of
target cpu need no copy: their inputs and outputs are float32, and their graphs contain the rounding.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from fusion_passes import CONTRIB, DOMAIN, value_queries
from fusion_passes.operators import BY_NAME, OPERATORS, function_bodies
from fusion_passes.shapes.infer import annotate
from sd_ort.core.pipeline_folder import DATA, MODEL
from sd_ort.graphs.load import load

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
# Operators whose output elements are copies of input elements, so nothing is rounded.
COPYING_OPS = frozenset(
    "Concat Expand Gather Identity Pad Relu Reshape Resize Slice Split Squeeze Transpose Unsqueeze Where".split()
) | {operator.name for operator in OPERATORS if operator.copies_elements}
ROUNDING = "sd_ort.rounding"
# Veltkamp's splitting (Dekker 1971): (2^s + 1)x - ((2^s + 1)x - x) has the top 24 - s bits of a float32. Values below
# the smallest normal float16 round to multiples of 2^-24: adding 0.75 = 1.5 * 2^-1 removes finer bits.
BODIES = {
    ir.DataType.FLOAT16: """{
        factor = Constant <value_float = 8193.0> ()
        scaled = Mul (x, factor)    rest = Sub (scaled, x)     rounded = Sub (scaled, rest)
        magic = Constant <value_float = 0.75> ()
        shifted = Add (x, magic)    subnormal = Sub (shifted, magic)
        smallest = Constant <value_float = 0.00006103515625> ()
        size = Abs (x)              is_small = Less (size, smallest)
        finite = Where (is_small, subnormal, rounded)
        limit = Constant <value_float = 65520.0> ()
        is_large = GreaterOrEqual (size, limit)
        huge = Constant <value_float = 3.0e38> ()
        infinite = Mul (x, huge)
        y = Where (is_large, infinite, finite)
    }""",
    ir.DataType.BFLOAT16: """{
        factor = Constant <value_float = 65537.0> ()
        scaled = Mul (x, factor)    rest = Sub (scaled, x)     rounded = Sub (scaled, rest)
        limit = Constant <value_float = 1.0e33> ()
        size = Abs (x)              is_large = GreaterOrEqual (size, limit)
        y = Where (is_large, x, rounded)
    }""",
}

GEMM_OPS = frozenset({"MatMul", "Gemm", "Conv"})  # input 1 is the weight


@contextmanager
def cpu_equivalent(path: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield (model path, notes on the modifications) of a model that the CPU provider can run, for the model at `path`.

    Without modifications this is `path` itself. Otherwise it is a temporary copy next to the component's folder or the
    file. Its inputs are float32 where those of the original have a half dtype.
    """
    model = load(path)
    notes = []
    unsupported = sorted({node.op_type for node in model.graph if _lacks_cpu_kernel(node)})
    if unsupported:
        notes.append(f"{', '.join(unsupported)} have no CPU kernels; their function bodies ran instead")
        _to_function_bodies(model)
    half = half_type(model)
    if half is not None and _computes_in(model, half):
        notes.append(f"float32 arithmetic with every operator's result rounded to {half.name.lower()}")
        round_to_half(model, half)
    if not notes:
        yield path, notes
        return
    original = path.absolute().parent if path.name == MODEL else path
    with tempfile.TemporaryDirectory(prefix=f".{original.name}.emulated-", dir=original.parent) as scratch:
        copy = Path(scratch) / original.stem / MODEL
        copy.parent.mkdir()
        ir.save(model, copy, external_data=DATA)
        yield copy, notes


def half_type(model: ir.Model) -> ir.DataType | None:
    """Return the half dtype of the inputs, outputs, initializers or casts of `model`, or None."""
    values = [*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()]
    dtypes = {v.dtype for v in values}
    dtypes |= {ir.DataType(node.attributes["to"].as_int()) for node in model.graph if node.op_type == "Cast"}
    return next((half for half in HALVES if half in dtypes), None)


def loads_on_cpu(model: ir.Model) -> bool:
    """Return whether the CPU provider has a kernel or function body for every operator of `model` in its dtype.

    The provider supports bfloat16 only for weights that are cast directly.
    """
    bfloat16 = _computes_in(model, ir.DataType.BFLOAT16)
    return not bfloat16 and not any(_lacks_cpu_kernel(node) for node in model.graph)


def _computes_in(model: ir.Model, dtype: ir.DataType) -> bool:
    """Return whether inputs, outputs, casts, or weights that MatMul, Gemm or Conv of ai.onnx read, have `dtype`."""

    def node_has(node: ir.Node) -> bool:
        if node.domain == "" and node.op_type in GEMM_OPS:
            return node.inputs[1] is not None and node.inputs[1].dtype == dtype
        return node.op_type == "Cast" and node.attributes["to"].as_int() == int(dtype)

    io = any(value.dtype == dtype for value in (*model.graph.inputs, *model.graph.outputs))
    return io or any(node_has(node) for node in model.graph)


def round_to_half(model: ir.Model, half: ir.DataType) -> None:
    """Convert a model in `half` to float32 in place; it rounds the output of every operator to `half`."""
    graph = model.graph
    annotate(graph)
    body = f'<domain: "{ROUNDING}", opset_import: ["" : 18]>\nround_to_{half.name.lower()} (x) => (y) {BODIES[half]}'
    function = ir.from_proto(onnx.parser.parse_function(body))
    assert isinstance(function, ir.Function)
    model.functions[function.identifier()] = function
    graph.opset_imports[ROUNDING] = 1
    for value in graph.initializers.values():
        if value.dtype == half:
            value.const_value = _as_float32(value)
            value.dtype = ir.DataType.FLOAT
    for value in graph.inputs:
        if value.dtype == half:
            value.dtype = ir.DataType.FLOAT
    for node in list(graph):
        _retype_attributes(node, half)
        for output in node.outputs:
            if output.dtype == half:
                output.type = ir.TensorType(ir.DataType.FLOAT)  # values may share their type object
                if node.op_type not in COPYING_OPS:
                    _round(graph, output, function.name)
    _reattach_functions(model)


def _lacks_cpu_kernel(node: ir.Node) -> bool:
    operator = BY_NAME.get(node.op_type) if node.domain == CONTRIB else None
    return operator is not None and not operator.has_cpu_kernel(node)


def _to_function_bodies(model: ir.Model) -> None:
    for node in model.graph:
        if _lacks_cpu_kernel(node):
            node.domain = DOMAIN
    annotate(model.graph)
    _reattach_functions(model)


def _reattach_functions(model: ir.Model) -> None:
    """Replace the functions of all fused nodes, and add the outputs that a function call must have."""
    for key in [key for key in model.functions if key[0] == DOMAIN]:
        del model.functions[key]
    nodes = [node for node in model.graph if node.domain == DOMAIN]
    function_bodies.attach(model, nodes)
    for node in nodes:
        outputs = len(model.functions[node.op_identifier()].outputs)
        if len(node.outputs) < outputs:
            node.resize_outputs(outputs)
            node.outputs[-1].name = f"{node.outputs[0].name}.unread"


def _round(graph: ir.Graph, value: ir.Value, function: str) -> None:
    node = ir.node(function, [value], domain=ROUNDING)
    rounded = node.outputs[0]
    rounded.name, rounded.type, rounded.shape = f"{value.name}.rounded", value.type, value.shape
    graph.insert_after(value_queries.producer(value), node)
    for consumer, index in list(value.uses()):
        if consumer is not node:
            consumer.replace_input_with(index, rounded)
    if value.is_graph_output():
        name = value.name
        graph.outputs[list(graph.outputs).index(value)] = rounded
        value.name, rounded.name = f"{name}.exact", name


def _as_float32(value: ir.Value) -> ir.LazyTensor:
    tensor = value.const_value
    assert tensor is not None

    def evaluate() -> ir.Tensor:
        return ir.Tensor(tensor.numpy().astype(np.float32), name=value.name)

    return ir.LazyTensor(evaluate, dtype=ir.DataType.FLOAT, shape=ir.Shape(tensor.shape.numpy()), name=value.name)


def _retype_attributes(node: ir.Node, half: ir.DataType) -> None:
    if node.op_type == "Cast" and node.attributes["to"].as_int() == half:
        node.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.FLOAT))
    tensor = node.attributes.get_tensor("value") if node.op_type in ("ConstantOfShape", "Constant") else None
    if tensor is not None and tensor.dtype == half:
        node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(tensor.numpy().astype(np.float32)))
