"""Symbolic shape inference with data propagation; operators without a rule use ONNX's inference.

`infer(graph)` computes the shape of every value in `Dim`s, and the elements of small integer tensors. ONNX's inference
uses different symbols for equal sizes, so it cannot prove that a Reshape restores an earlier shape. Here equal sizes
are equal expressions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import onnx_ir as ir

from fusion_passes.operators import OPERATORS
from fusion_passes.shapes.data_propagation import ELEMENTS
from fusion_passes.shapes.dims import Dim, constant, symbol
from fusion_passes.shapes.indexing_rules import INDEXING
from fusion_passes.shapes.onnx_inference import STANDARD_DOMAINS, infer_node
from fusion_passes.shapes.pooling_rules import POOLING
from fusion_passes.shapes.rules import BROADCAST, RULES, SAME_AS_FIRST_INPUT, reshape
from fusion_passes.shapes.shape_info import INT64_LIMIT, LIST_LIMIT, Shape, ShapeInfo, broadcast, product
from fusion_passes.shapes.types import annotate_types, is_known, opset

SHAPE_RULES = {**RULES, **INDEXING, **POOLING, **{operator.name: operator.shape for operator in OPERATORS}}
# Keys of graph.meta: the multiples that the original graph requires of named sizes; the graph, and the ShapeInfo of its
# values. A clone copies the latter, which has no shape of its values.
MULTIPLES, SHAPE_INFO = "sd_ort.multiples", "sd_ort.shape_info"


def infer(graph: ir.Graph) -> ShapeInfo:
    """Return the shapes and integer elements of the values of `graph`, without values of unknown rank.

    Concat fails at run time unless all its other axes agree. A U-Net that concatenates `2*ceil(h/8)` and `ceil(h/4)`
    runs only if h is a multiple of 8. Named sizes are therefore assumed to be the multiples that Concats require.
    """
    if MULTIPLES not in graph.meta:
        graph.meta[MULTIPLES] = _forced_multiples(_infer(graph, ShapeInfo(assume_equal_broadcast=True)))
    return _infer(graph, ShapeInfo(multiples=graph.meta[MULTIPLES]))


def annotate(graph: ir.Graph) -> ShapeInfo:
    """Infer shapes and dtypes and set them on the values of `graph`. Equal symbolic sizes get equal names."""
    annotate_types(graph)
    info = infer(graph)
    graph.meta[SHAPE_INFO] = graph, info
    for value, shape in info.shapes.items():
        _write(value, shape)
    return info


def annotate_new(graph: ir.Graph) -> ShapeInfo:
    """Infer only values that are new since `annotate`, and values after them whose sizes become known.

    After changing a node in place so that its output shape changes, call `annotate` instead.
    """
    owner, info = graph.meta.get(SHAPE_INFO, (None, None))
    if owner is not graph:
        return annotate(graph)
    annotate_types(graph)
    version = opset(graph)
    for value in graph.initializers.values():
        if value not in info.shapes:
            _declare(value, info)
    changed: set[ir.Value | None] = set()
    for node in graph:
        before = [info.shapes.get(output) for output in node.outputs]
        if None in before or not changed.isdisjoint(node.inputs):
            _infer_node(node, info, version)
            for output, shape in zip(node.outputs, before, strict=True):
                if output in info.shapes and info.shapes[output] != shape:
                    _write(output, info.shapes[output])
                    changed.add(output)
    return info


def _write(value: ir.Value, shape: Shape) -> None:
    if value.const_value is None and not value.is_graph_input():
        sizes = [(d.value, str(d)) for d in shape]
        value.shape = ir.Shape([name if n is None or n >= INT64_LIMIT else n for n, name in sizes])


def _infer(graph: ir.Graph, info: ShapeInfo, version: int | None = None) -> ShapeInfo:
    version = version or opset(graph)
    for value in [*graph.inputs, *graph.initializers.values()]:
        _declare(value, info)
    for node in graph:
        for operand in node.inputs:
            if operand is not None and operand not in info.shapes and operand.const_value is not None:
                _declare(operand, info)
        _infer_node(node, info, version)
    return info


def _forced_multiples(info: ShapeInfo) -> dict[str, int]:
    """Return for each named size the largest power of two that divides it whenever the graph runs without an error.

    Sizes up to 256 are tried.
    """
    pairs = [(a, b, False) for a, b in info.concat_equalities] + [(a, b, True) for a, b in info.broadcast_equalities]
    multiples = {}
    for name in sorted(set().union(*(a.symbols() | b.symbols() for a, b, _ in pairs), set())):
        own = [pair for pair in pairs if pair[0].symbols() | pair[1].symbols() == {name}]
        allowed = [n for n in range(1, 257) if all(_agree(*pair, {name: n}) for pair in own)]
        divisors = [m for m in (64, 32, 16, 8, 4, 2) if allowed and all(n % m == 0 for n in allowed)]
        if divisors:
            multiples[name] = divisors[0]
    return multiples


def _agree(a: Dim, b: Dim, may_broadcast: bool, sizes: dict[str, int]) -> bool:
    x, y = a.evaluate(sizes), b.evaluate(sizes)
    return x == y or (may_broadcast and 1 in (x, y))


def _declare(value: ir.Value, info: ShapeInfo) -> None:
    tensor = value.const_value
    if tensor is not None:
        info.shapes[value] = tuple(constant(int(d)) for d in tensor.shape.numpy())
        if (
            tensor.dtype in (ir.DataType.INT64, ir.DataType.INT32)
            and tensor.size <= LIST_LIMIT
            and tensor.shape.rank() < 2
        ):
            info.elements[value] = [constant(int(n)) for n in tensor.numpy().ravel()]
    elif value.shape is not None:
        names = [d if isinstance(d, int) else d.value for d in value.shape]
        info.shapes[value] = tuple(
            constant(d) if isinstance(d, int) else _size(d or f"{value.name}_{i}", info) for i, d in enumerate(names)
        )


def _size(name: str, info: ShapeInfo) -> Dim:
    """Return the size of a named axis. Exporters write related axes as `height/2`, `height*8` or `8*height`."""
    match = re.fullmatch(r"(?:(?P<times>\d+)\*)?(?P<symbol>[A-Za-z_]\w*)(?:(?P<by>[*/])(?P<number>\d+))?", name)
    if match is not None and match["symbol"] != name:
        size = _size(match["symbol"], info) * constant(int(match["times"] or 1))
        number = int(match["number"] or 1)
        return size // number if match["by"] == "/" else size * constant(number)
    multiple = info.multiples.get(name, 1)
    return symbol(name) if multiple == 1 else symbol(f"({name}/{multiple})") * constant(multiple)


def _infer_node(node: ir.Node, info: ShapeInfo, version: int) -> None:
    if node.op_type == "Constant":
        value = node.outputs[0]
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is not None:
            value.const_value = tensor
            _declare(value, info)
        return
    for output, shape in zip(node.outputs, _shapes(node, info, version) or (), strict=False):
        if shape is not None:
            info.shapes[output] = shape
    rule = ELEMENTS.get(node.op_type)
    elements = rule(node, info) if rule is not None else None
    shape = info.shapes.get(node.outputs[0])
    # Only scalars and vectors: a flat list of a matrix's elements would not survive Concat and broadcasting.
    if elements is None or shape is None or len(shape) > 1 or product(shape).value != len(elements):
        return
    if len(elements) <= LIST_LIMIT:
        info.elements[node.outputs[0]] = elements


def _shapes(node: ir.Node, info: ShapeInfo, version: int) -> Sequence[Shape | None] | None:
    if not is_known(node):
        return None
    if node.op_type == "If" and node.domain in STANDARD_DOMAINS:
        return _branches(node, info, version)
    inputs = [info.shapes.get(v) if v is not None else None for v in node.inputs]
    shapes = _apply_rule(node, inputs, info)
    if shapes is None or all(shape is None for shape in shapes):
        shapes = [shape for shape, _ in infer_node(node, info, version)]
    return shapes


def _apply_rule(node: ir.Node, inputs: list[Shape | None], info: ShapeInfo) -> Sequence[Shape | None] | None:
    if node.op_type in BROADCAST:
        return None if any(s is None for s in inputs) else [broadcast([s for s in inputs if s is not None], info)]
    if node.op_type == "Reshape":
        return reshape(node, info)
    if not inputs or inputs[0] is None:
        return None
    if node.op_type in SAME_AS_FIRST_INPUT:
        return [inputs[0]]
    rule = SHAPE_RULES.get(node.op_type)
    try:
        return None if rule is None else rule(node, info)
    except (IndexError, ValueError):  # attributes that do not fit the ranks; ONNX Runtime will report them
        return None


def _branches(node: ir.Node, info: ShapeInfo, version: int) -> list[Shape | None] | None:
    """Return the output shapes of an If. A size that differs between the branches becomes a new symbol."""
    branches = []
    for name in ("then_branch", "else_branch"):
        body = node.attributes[name].as_graph()
        _infer(body, info, version)
        branches.append([info.shapes.get(value) for value in body.outputs])
    merged: list[Shape | None] = []
    for output, a, b in zip(node.outputs, *branches, strict=True):
        if a is None or b is None or len(a) != len(b):
            merged.append(None)
        else:
            sizes = enumerate(zip(a, b, strict=True))
            merged.append(tuple(x if x == y else symbol(f"{output.name}_{i}") for i, (x, y) in sizes))
    return merged
