"""Symbolic shape inference with data propagation: rules for what proofs need, ONNX's own inference for the rest.

`infer(graph)` gives every value a shape in `Dim`s and follows small integer tensors (shape arithmetic) element by
element. ONNX's own inference gives two unrelated unknowns to sizes that are equal, so it cannot prove that a Reshape
restores an earlier shape; here equal sizes are equal expressions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import onnx_ir as ir

from fusion_passes.operators import OPERATORS
from fusion_passes.shapes.contents import ELEMENTS
from fusion_passes.shapes.dims import Dim, constant, symbol
from fusion_passes.shapes.facts import INT64_LIMIT, LIST_LIMIT, Facts, Shape, broadcast, product
from fusion_passes.shapes.indexing import INDEXING
from fusion_passes.shapes.rules import BROADCAST, RULES, SAME_AS_FIRST_INPUT, reshape
from fusion_passes.shapes.standard import STANDARD, infer_node
from fusion_passes.shapes.types import annotate_types, is_known, opset
from fusion_passes.shapes.windows import WINDOWS

TABLE = {**RULES, **INDEXING, **WINDOWS, **{operator.name: operator.shape for operator in OPERATORS}}
# Keys of graph.meta: what the graph, as it was first seen, forces sizes to be; what is known of its values.
MULTIPLES, KNOWN = "sd_ort.multiples", "sd_ort.known"


def infer(graph: ir.Graph) -> Facts:
    """Shapes and integer contents of the values of `graph`; values of unknown rank are left out.

    Concat fails at run time unless all its other axes agree. A U-Net that joins `2*ceil(h/8)` with `ceil(h/4)` thus
    runs only where h is a multiple of 8: sizes that the graph's own Concats force to be multiples are taken as such.
    """
    if MULTIPLES not in graph.meta:
        graph.meta[MULTIPLES] = _forced_multiples(_infer(graph, Facts(optimistic=True)))
    return _infer(graph, Facts(multiples=graph.meta[MULTIPLES]))


def annotate(graph: ir.Graph) -> Facts:
    """Infer, and write shapes and element types into the values: equal sizes carry equal names for later rules."""
    annotate_types(graph)
    facts = graph.meta[KNOWN] = infer(graph)
    for value, shape in facts.shapes.items():
        _write(value, shape)
    return facts


def annotate_new(graph: ir.Graph) -> Facts:
    """The same for values that are new since `annotate`, and for those behind them whose sizes are known by now.

    Whoever changes a node in place so that the shape of its result is another calls `annotate`.
    """
    facts: Facts | None = graph.meta.get(KNOWN)
    if facts is None:
        return annotate(graph)
    annotate_types(graph)
    version = opset(graph)
    for value in graph.initializers.values():
        if value not in facts.shapes:
            _declare(value, facts)
    changed: set[ir.Value | None] = set()
    for node in graph:
        before = [facts.shapes.get(output) for output in node.outputs]
        if None in before or not changed.isdisjoint(node.inputs):
            _infer_node(node, facts, version)
            for output, shape in zip(node.outputs, before, strict=True):
                if output in facts.shapes and facts.shapes[output] != shape:
                    _write(output, facts.shapes[output])
                    changed.add(output)
    return facts


def _write(value: ir.Value, shape: Shape) -> None:
    if value.const_value is None and not value.is_graph_input():
        sizes = [(d.value, str(d)) for d in shape]
        value.shape = ir.Shape([name if n is None or n >= INT64_LIMIT else n for n, name in sizes])


def _infer(graph: ir.Graph, facts: Facts, version: int | None = None) -> Facts:
    version = version or opset(graph)
    for value in [*graph.inputs, *graph.initializers.values()]:
        _declare(value, facts)
    for node in graph:
        for operand in node.inputs:
            if operand is not None and operand not in facts.shapes and operand.const_value is not None:
                _declare(operand, facts)
        _infer_node(node, facts, version)
    return facts


def _forced_multiples(facts: Facts) -> dict[str, int]:
    """For each unknown size the largest power of two that divides it in every run that the graph survives."""
    pairs = [(a, b, False) for a, b in facts.joined] + [(a, b, True) for a, b in facts.broadcast]
    multiples = {}
    for name in sorted(set().union(*(a.symbols() | b.symbols() for a, b, _ in pairs), set())):
        mine = [pair for pair in pairs if pair[0].symbols() | pair[1].symbols() == {name}]
        allowed = [n for n in range(1, 257) if all(_agree(*pair, {name: n}) for pair in mine)]
        dividing = [m for m in (64, 32, 16, 8, 4, 2) if allowed and all(n % m == 0 for n in allowed)]
        if dividing:
            multiples[name] = dividing[0]
    return multiples


def _agree(a: Dim, b: Dim, may_broadcast: bool, sizes: dict[str, int]) -> bool:
    x, y = a.evaluate(sizes), b.evaluate(sizes)
    return x == y or (may_broadcast and 1 in (x, y))


def _declare(value: ir.Value, facts: Facts) -> None:
    tensor = value.const_value
    if tensor is not None:
        facts.shapes[value] = tuple(constant(int(d)) for d in tensor.shape.numpy())
        if (
            tensor.dtype in (ir.DataType.INT64, ir.DataType.INT32)
            and tensor.size <= LIST_LIMIT
            and tensor.shape.rank() < 2
        ):
            facts.elements[value] = [constant(int(n)) for n in tensor.numpy().ravel()]
    elif value.shape is not None:
        names = [d if isinstance(d, int) else d.value for d in value.shape]
        facts.shapes[value] = tuple(
            constant(d) if isinstance(d, int) else _size(d or f"{value.name}_{i}", facts) for i, d in enumerate(names)
        )


def _size(name: str, facts: Facts) -> Dim:
    """The size an axis name stands for: exporters tie axes by writing `height/2`, `height*8` or `8*height`."""
    tied = re.fullmatch(r"(?:(?P<times>\d+)\*)?(?P<symbol>[A-Za-z_]\w*)(?:(?P<by>[*/])(?P<number>\d+))?", name)
    if tied is not None and tied["symbol"] != name:
        whole = _size(tied["symbol"], facts) * constant(int(tied["times"] or 1))
        number = int(tied["number"] or 1)
        return whole // number if tied["by"] == "/" else whole * constant(number)
    multiple = facts.multiples.get(name, 1)
    return symbol(name) if multiple == 1 else symbol(f"({name}/{multiple})") * constant(multiple)


def _infer_node(node: ir.Node, facts: Facts, version: int) -> None:
    if node.op_type == "Constant":
        value = node.outputs[0]
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is not None:
            value.const_value = tensor
            _declare(value, facts)
        return
    for output, shape in zip(node.outputs, _shapes(node, facts, version) or (), strict=False):
        if shape is not None:
            facts.shapes[output] = shape
    elements = ELEMENTS.get(node.op_type)
    known = elements(node, facts) if elements is not None else None
    shape = facts.shapes.get(node.outputs[0])
    # Only scalars and vectors: the elements of a matrix have no one order that Concat and broadcasting would keep.
    if known is None or shape is None or len(shape) > 1 or product(shape).value != len(known):
        return
    if len(known) <= LIST_LIMIT:
        facts.elements[node.outputs[0]] = known


def _shapes(node: ir.Node, facts: Facts, version: int) -> Sequence[Shape | None] | None:
    if not is_known(node):
        return None
    if node.op_type == "If" and node.domain in STANDARD:
        return _branches(node, facts, version)
    inputs = [facts.shapes.get(v) if v is not None else None for v in node.inputs]
    known = _by_rule(node, inputs, facts)
    if known is None or all(shape is None for shape in known):
        known = [shape for shape, _ in infer_node(node, facts, version)]
    return known


def _by_rule(node: ir.Node, inputs: list[Shape | None], facts: Facts) -> Sequence[Shape | None] | None:
    if node.op_type in BROADCAST:
        return None if any(s is None for s in inputs) else [broadcast([s for s in inputs if s is not None], facts)]
    if node.op_type == "Reshape":
        return reshape(node, facts)
    if not inputs or inputs[0] is None:
        return None
    if node.op_type in SAME_AS_FIRST_INPUT:
        return [inputs[0]]
    rule = TABLE.get(node.op_type)
    return None if rule is None else rule(node, facts)


def _branches(node: ir.Node, facts: Facts, version: int) -> list[Shape | None] | None:
    """Both branches of an If: where they agree on a size it is that, else one of its own."""
    sides = []
    for name in ("then_branch", "else_branch"):
        body = node.attributes[name].as_graph()
        _infer(body, facts, version)
        sides.append([facts.shapes.get(value) for value in body.outputs])
    merged: list[Shape | None] = []
    for output, a, b in zip(node.outputs, *sides, strict=True):
        if a is None or b is None or len(a) != len(b):
            merged.append(None)
        else:
            sizes = enumerate(zip(a, b, strict=True))
            merged.append(tuple(x if x == y else symbol(f"{output.name}_{i}") for i, (x, y) in sizes))
    return merged
