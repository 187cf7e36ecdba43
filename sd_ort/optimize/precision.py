"""Conversion of a graph to float16 or bfloat16, except for nodes that must stay in float32.

Angles of rotary embeddings in float64 become float32. The other nodes are detected from the graph and from values, not
from a list of names:
    sinusoids        inputs of Sin and Cos: 1000 timesteps (or 1024 pixels) do not fit a mantissa of 11 bits
    spectra          inputs of Log that no activation computes: their smallest sums are lost
    variances        a mean of squares less a squared mean: the difference cancels, and the sums overflow
    integer sums     results of MatMulInteger and ConvInteger with their scales: sums exceed the largest float16
    large weights    BatchNormalization with a variance above the largest float16, which would be clamped
    measured sites   nodes whose outputs came near the dtype's largest number on calibration inputs (`float32_nodes`)
    no such kernel   operators that the standard does not define for the dtype, such as Range
    kernel inputs    (operator, input) pairs of the target's kernels, such as GroupNorm's gamma and beta
Casts are inserted between float32 and half precision. Weights are converted one at a time while the model is saved.

`store_weights` is for targets that compute in float32: it only halves the weights on disk.
"""

from __future__ import annotations

from collections.abc import Collection

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common

from fusion_passes import CONTRIB, value_queries
from fusion_passes import weight_recipes as recipes
from fusion_passes.canonicalize.opset import OPSET
from fusion_passes.cleanup import subgraphs
from fusion_passes.graph_edits import tensor_values
from fusion_passes.operators import BY_NAME
from fusion_passes.shapes.types import is_float32_output
from sd_ort.core.errors import InputError
from sd_ort.runtime.contrib_types import declare_float32_outputs, operator_takes

FLOAT, DOUBLE = ir.DataType.FLOAT, ir.DataType.DOUBLE
HALF = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
BFLOAT16_OPSET = 22
MIN_STORED_ELEMENTS = 1024
ACTIVATIONS = frozenset(
    "Elu Erf GRU Gelu HardSigmoid HardSwish LSTM LeakyRelu PRelu RNN Relu Sigmoid Softmax Softplus Tanh".split()
)
# Operators on float64 values that compute angles of rotary embeddings and their cosines.
ANGLE_OPS = frozenset("Add Cast Concat Cos Div Expand Gather Mul Neg Reciprocal Reshape Sin Slice Transpose".split())
# Operators that compute an integer bias, or the scale of an integer product.
SCALE_OPS = frozenset("Cast Clip Div Floor Mul Reshape Round Unsqueeze".split())
# Inputs that are float32 in the standard, or no data of the model, whatever the dtype of the first input.
FIXED_INPUTS = frozenset({("Resize", 1), ("Resize", 2)})
# Scales of layers in 8 bits (operator, input), which stay in float32.
SCALES = frozenset({("QuantizedConv", 2), ("QuantizedLinear", 2), ("QuantizedNhwcConv", 2)})
# Weights (operator, input) whose kernels read bfloat16, and round float32.
READS_BFLOAT16 = frozenset({("Bfloat16Conv", 1), ("Bfloat16MatMul", 1)})


def convert(
    model: ir.Model,
    dtype: str,
    *,
    float32_nodes: Collection[ir.Node] = (),
    float32_inputs: Collection[tuple[str, int]] = (),
    float32_graph_inputs: Collection[str] = ("timestep",),
    float32_io: bool = False,
) -> int:
    """Convert the float32 part of `model` to `dtype` ("float16" or "bfloat16") in place.

    Returns the number of nodes that stay in float32. With float16, graph inputs and outputs are converted too, except
    `float32_graph_inputs`, unless `float32_io` is set. With bfloat16 they stay in float32: NumPy and ONNX Runtime's
    Python API have no bfloat16. If, Loop and Scan stay in float32 with their subgraphs.
    """
    half, graph = HALF[dtype], model.graph
    _angles_in_float32(graph)
    if half == ir.DataType.BFLOAT16:
        _declare_bfloat16_opset(graph)
    for node in graph:
        if node.domain == CONTRIB and node.op_type not in BY_NAME:
            declare_float32_outputs(node)
    float32 = (
        _with_ancestors(graph, "Sin", "Cos")  # small tensors of one angle for each timestep
        | _before_logarithms(graph)
        | {node for sub in graph for node in _variance_of_squares(sub)}
        | {node for product in graph for node in _scaled_integers(product)}
        | {node for node in graph if not _is_defined(node, half, graph)}
        | {node for node in graph if node.op_type == "BatchNormalization" and _exceeds(node, half)}
        | set(float32_nodes)
        | {node for outer in graph if (nodes := inner_nodes(outer)) for node in (outer, *nodes)}
    )
    _convert_initializers(graph, half, float32, frozenset(float32_inputs) | FIXED_INPUTS)
    keeps_boundary = float32_io or half == ir.DataType.BFLOAT16
    for value in graph.inputs:
        if value.dtype == FLOAT and value.name not in float32_graph_inputs and not keeps_boundary:
            value.type = ir.TensorType(half)
    for node in graph:
        if node in float32:
            continue
        _convert_attributes(node, half)
        for index, output in enumerate(node.outputs):
            if output.dtype == FLOAT and not is_float32_output(node, index):
                output.type = ir.TensorType(half)  # values may share their type object
    _insert_casts(graph, half, float32)
    _cast_outputs(graph, *((half, FLOAT) if keeps_boundary else (FLOAT, half)), float32)
    common.TopologicalSortPass()(model)
    return len(float32)


def store_weights(model: ir.Model, dtype: str) -> None:
    """Store the float32 weights of `model` in `dtype`, each followed by a Cast to float32, in place.

    A session folds these casts while it is opened, so it computes in float32. Tensors with fewer elements than
    `MIN_STORED_ELEMENTS` stay as they are, and kernels that read bfloat16 (`READS_BFLOAT16`) need no cast.
    """
    half, graph = HALF[dtype], model.graph
    first = next(iter(graph))
    for name, value in list(graph.initializers.items()):
        if value.dtype != FLOAT or value.is_graph_output() or value.const_value is None:
            continue
        if value.const_value.size < MIN_STORED_ELEMENTS:
            continue
        if any((node.op_type, index) in SCALES for node, index in value.uses()):
            continue
        stored = _half_tensor(f"{name}.{half.name.lower()}", value, half)
        graph.register_initializer(stored)
        uses = list(value.uses())
        direct = [use for use in uses if dtype == "bfloat16" and (use[0].op_type, use[1]) in READS_BFLOAT16]
        for node, index in direct:
            node.replace_input_with(index, stored)
        if len(direct) < len(uses):
            cast = ir.node("Cast", [stored], {"to": int(FLOAT)})
            cast.outputs[0].name = f"{name}.float32"
            cast.outputs[0].shape, cast.outputs[0].dtype = value.shape, FLOAT
            graph.insert_before(first, cast)
            for node, index in value.uses():
                node.replace_input_with(index, cast.outputs[0])
        del graph.initializers[name]


def _declare_bfloat16_opset(graph: ir.Graph) -> None:
    """Raise the opset to the first one with bfloat16 in Conv and other operators, which changed nothing else.

    Raises InputError for a graph of an older opset than canonical graphs have.
    """
    version = graph.opset_imports.get("", 0)
    if version < OPSET:
        raise InputError(f"the graph is of opset {version}, which has no bfloat16: use --float16 or export it again.")
    graph.opset_imports[""] = max(version, BFLOAT16_OPSET)


def _is_defined(node: ir.Node, half: ir.DataType, graph: ir.Graph) -> bool:
    """Return whether the standard defines an operator for `half` inputs in place of float32."""
    if node.domain == CONTRIB:
        return operator_takes(node, half) if node.op_type not in BY_NAME else True
    try:
        schema = onnx.defs.get_schema(node.op_type, graph.opset_imports.get(node.domain, 1), node.domain)
    except onnx.defs.SchemaError:
        return True
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    half_type = f"tensor({half.name.lower()})"
    for index, value in enumerate(node.inputs):
        if value is None or value.dtype != FLOAT or (node.op_type, index) in FIXED_INPUTS:
            continue
        declared = schema.inputs[min(index, len(schema.inputs) - 1)].type_str
        if half_type not in allowed.get(declared, [declared]):
            return False
    return True


def _angles_in_float32(graph: ir.Graph) -> None:
    """Compute the angles of rotary embeddings in float32 in place of float64, for which GPU providers lack kernels.

    The error of an angle is 2^-24 of it, far below the precision of half. Other uses of float64 stay.
    """
    doubles = [node for node in graph if DOUBLE in {v.dtype for v in (*node.inputs, *node.outputs) if v is not None}]
    boundary = any(value.dtype == DOUBLE for value in (*graph.inputs, *graph.outputs))
    if boundary or any(node.op_type not in ANGLE_OPS for node in doubles) or any(map(inner_nodes, graph)):
        return
    for name, value in list(graph.initializers.items()):
        if value.dtype == DOUBLE:
            new = _half_tensor(f"{name}.float32", value, FLOAT)
            graph.register_initializer(new)
            ir.convenience.replace_all_uses_with(value, new)
            del graph.initializers[name]
    for node in doubles:
        if node.op_type == "Cast" and node.attributes["to"].as_int() == DOUBLE:
            node.attributes["to"] = ir.AttrInt64("to", int(FLOAT))
        for output in node.outputs:
            if output.dtype == DOUBLE:
                output.type = ir.TensorType(FLOAT)


def inner_nodes(node: ir.Node) -> list[ir.Node]:
    return [each for graph in subgraphs(node) for inner in graph for each in (inner, *inner_nodes(inner))]


def _exceeds(node: ir.Node, half: ir.DataType) -> bool:
    """Return whether a constant of a node overflows in `half`, such as the variance 1e8 in Paddle's text detector."""
    constants = [values for v in node.inputs if (values := value_queries.constant(v)) is not None]
    return any(np.abs(values).max(initial=0) > float(ml_dtypes.finfo(half.numpy()).max) for values in constants)


def _before_logarithms(graph: ir.Graph) -> set[ir.Node]:
    """Return Log and the nodes that compute its input, if these are a spectrum: sums and products without activation.

    The logarithm of a small sum amplifies its relative error: basic-pitch's float16 error falls from 1.3e-2 to 2.3e-3.
    """
    nodes = _with_ancestors(graph, "Log")
    return set() if any(node.op_type in ACTIVATIONS for node in nodes) else nodes


def _variance_of_squares(node: ir.Node) -> set[ir.Node]:
    """Return the nodes of a variance of the form mean(x^2) - mean(x)^2 around its Sub `node`; empty for others.

    Flax writes normalizations so. In float16 the difference of two rounded numbers is no variance: magika's error falls
    from 1.1 to 2e-3. The chain to the reciprocal root stays in float32 too, since variances are small, and the Sub of x
    and its mean, which cancels as well.
    """
    if node.op_type != "Sub":
        return set()
    squares, mean_squared = (value.producer() if value is not None else None for value in node.inputs)
    mean = _squared(mean_squared) if mean_squared is not None else None
    if mean_squared is None or mean is None:
        return set()
    of_squares, of_mean = _chain_to_reduction(squares), _chain_to_reduction(mean.producer())
    if not of_squares or not of_mean:
        return set()
    data = of_squares[-1].inputs[0]
    square = data.producer() if data is not None else None
    if square is None or _squared(square) is not of_mean[-1].inputs[0]:
        return set()
    nodes = {node, mean_squared, square, *of_squares, *of_mean}
    means = [mean]
    while means:
        for user in means.pop().consumers():
            if user.op_type in ("Reshape", "Unsqueeze"):
                nodes.add(user)
                means.append(user.outputs[0])
            elif user.op_type == "Sub" and user.inputs[0] is of_mean[-1].inputs[0]:
                nodes.add(user)
    value = node.outputs[0]
    while len(value.uses()) == 1:
        (user,) = value.consumers()
        if user.op_type not in ("Add", "Clip", "Max", "Reciprocal", "Relu", "Reshape", "Sqrt", "Unsqueeze"):
            break
        nodes.add(user)
        value = user.outputs[0]
    return nodes


def _squared(node: ir.Node) -> ir.Value | None:
    """Return x of a node x * x, x^2; None for others."""
    first, second = (*node.inputs, None)[:2]
    if node.op_type == "Mul" and first is second:
        return first
    return first if node.op_type == "Pow" and value_queries.scalar(second) == 2 else None


def _chain_to_reduction(node: ir.Node | None) -> list[ir.Node]:
    """Return the nodes from `node` to the mean or sum that it scales or reshapes, that one last; empty without one."""
    nodes: list[ir.Node] = []
    while node is not None:
        nodes.append(node)
        if node.op_type in ("ReduceSum", "ReduceMean", "GlobalAveragePool"):
            return nodes
        if node.op_type not in ("Div", "Mul", "Reshape", "Squeeze", "Unsqueeze"):
            break
        if node.op_type in ("Div", "Mul") and value_queries.constant(node.inputs[1]) is None:
            break
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return []


def _scaled_integers(node: ir.Node) -> set[ir.Node]:
    """Return the nodes around an integer MatMul or Conv that dequantize its result or quantize its bias.

    The product goes through Add and Reshape to a Cast and a Mul by a product of scales. Quantizers before 2020 round
    a bias divided by the scales to int32 in the graph.
    """
    if node.op_type not in ("MatMulInteger", "ConvInteger"):
        return set()
    nodes: set[ir.Node] = set()
    sums = [node.outputs[0]]
    biases: list[ir.Value | None] = []
    while sums:
        value = sums.pop()
        for user in value.consumers():
            if user.op_type in ("Add", "Reshape"):
                sums.append(user.outputs[0])
                biases += [other for other in user.inputs if other is not value]
            elif user.op_type == "Cast" and user.outputs[0].dtype == FLOAT:
                scaled = [each for each in user.outputs[0].consumers() if each.op_type == "Mul"]
                nodes |= {user, *scaled}
                biases += [other for each in scaled for other in each.inputs if other is not user.outputs[0]]
    while biases:  # operators on scales and constants
        bias = biases.pop()
        producer = bias.producer() if bias is not None else None
        if producer is not None and producer not in nodes and producer.op_type in SCALE_OPS:
            nodes.add(producer)
            biases += producer.inputs
    return nodes


def _with_ancestors(graph: ir.Graph, *op_types: str) -> set[ir.Node]:
    """Return the nodes of these operators and all float32 nodes that they depend on."""
    nodes: set[ir.Node] = set()
    stack = [n for n in graph if n.op_type in op_types]
    while stack:
        node = stack.pop()
        if node in nodes:
            continue
        nodes.add(node)
        producers = [v.producer() for v in node.inputs if v is not None and v.dtype == FLOAT]
        stack += [p for p in producers if p is not None]
    return nodes


def _convert_initializers(
    graph: ir.Graph, half: ir.DataType, float32: set[ir.Node], fixed: frozenset[tuple[str, int]]
) -> None:
    for name, value in list(graph.initializers.items()):
        if value.dtype != FLOAT:
            continue
        stay = [(n, i) for n, i in value.uses() if n in float32 or (n.op_type, i) in fixed]
        move = [(n, i) for n, i in value.uses() if (n, i) not in stay]
        if not move and not value.is_graph_output():
            continue
        new = _half_tensor(f"{name}.{half.name.lower()}", value, half)
        graph.register_initializer(new)
        for node, index in move:
            node.replace_input_with(index, new)
        if not stay and not value.is_graph_output():
            del graph.initializers[name]
    used = {v for outer in graph for n in (outer, *inner_nodes(outer)) for v in n.inputs if v is not None}
    for name, value in list(graph.initializers.items()):
        if value not in used and not value.is_graph_output():
            del graph.initializers[name]


def _half_tensor(name: str, value: ir.Value, half: ir.DataType) -> ir.Value:
    source = value.const_value
    assert source is not None

    def evaluate() -> ir.Tensor:
        return ir.Tensor(to_half(tensor_values(source), half), dtype=half, name=name)

    tensor = ir.LazyTensor(evaluate, dtype=half, shape=ir.Shape(source.shape.numpy()), name=name)
    new = ir.Value(name=name, const_value=tensor, shape=tensor.shape, type=ir.TensorType(half))
    return recipes.record_recipe(new, "cast", half.name, [value])


def to_half(values: np.ndarray, half: ir.DataType) -> np.ndarray:
    """Return values in `half`; finite values are clamped to its finite range."""
    return np.asarray(recipes.cast(half.name, values), order="C")


def _convert_attributes(node: ir.Node, half: ir.DataType) -> None:
    if node.op_type == "Cast" and node.attributes["to"].as_int() == FLOAT:
        node.attributes["to"] = ir.AttrInt64("to", int(half))
    dtype = node.attributes.get("dtype")  # of random numbers
    if dtype is not None and dtype.type == ir.AttributeType.INT and dtype.as_int() == FLOAT:
        node.attributes["dtype"] = ir.AttrInt64("dtype", int(half))
    if node.op_type == "ConstantOfShape":
        tensor = node.attributes.get_tensor("value")
        if tensor is None or tensor.dtype == FLOAT:
            values = np.zeros(1, np.float32) if tensor is None else tensor.numpy()
            node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(to_half(values, half), dtype=half))


def _insert_casts(graph: ir.Graph, half: ir.DataType, float32: set[ir.Node]) -> None:
    """Insert a Cast between float32 nodes (or graph inputs) and half nodes, one for each value and direction."""
    casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
    for outer, node in [(top, node) for top in graph for node in (top, *inner_nodes(top))]:
        dtype = FLOAT if node in float32 else half
        other = half if node in float32 else FLOAT
        for index, value in enumerate(node.inputs):
            if value is None or value.dtype != other or value.name in graph.initializers or node.op_type == "Cast":
                continue
            if node is not outer and value.graph is not graph:
                continue  # a value of the subgraph itself
            key = (value, dtype)
            if key not in casts:
                cast = ir.node("Cast", [value], {"to": int(dtype)})
                cast.outputs[0].name = f"{value.name}.{dtype.name.lower()}"
                cast.outputs[0].shape, cast.outputs[0].dtype = value.shape, dtype
                graph.insert_before(outer, cast)
                casts[key] = cast.outputs[0]
            node.replace_input_with(index, casts[key])


def _cast_outputs(graph: ir.Graph, source: ir.DataType, target: ir.DataType, float32: set[ir.Node]) -> None:
    """Cast the graph outputs that nodes compute in `source` to `target`.

    Nodes outside of `float32` compute in half precision; their few float32 outputs are statistics.
    """
    for index, output in enumerate(graph.outputs):
        producer = output.producer()
        if output.dtype != source or producer is None or (source == FLOAT and producer not in float32):
            continue
        name = output.name
        cast = ir.node("Cast", [output], {"to": int(target)})
        cast.outputs[0].shape, cast.outputs[0].dtype = output.shape, target
        graph.append(cast)
        output.name, cast.outputs[0].name = f"{name}.{source.name.lower()}", name
        graph.outputs[index] = cast.outputs[0]
