"""Slices that cut a tensor into consecutive pieces become one Split, as the newer exporters write `chunk`.

Slice(x, 0:h, axis), Slice(x, h:2h, axis)  =>  Split(x, [h, h], axis)
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes import checks as c
from fusion_passes.pass_ import Case, Outcome, Pass, Refusal
from fusion_passes.rewriting import constant

END = 2**31 - 1  # exporters write "to the end" as any number from here on


def merge_slices(model: ir.Model) -> Outcome:
    """Replace complete sets of Slices in place; counts the Splits that were made."""
    outcome = Outcome()
    for value in [v for n in model.graph for v in n.outputs] + list(model.graph.inputs):
        pieces: dict[int, list[tuple[int, int, ir.Node]]] = {}
        for node in c.users(value):
            piece = _piece(node, value)
            if piece is not None:
                pieces.setdefault(piece[0], []).append((piece[1], piece[2], node))
        for axis, cuts in pieces.items():
            cuts.sort(key=lambda cut: cut[:2])
            edges = [0, *(end for _, end, _ in cuts)]
            whole = len(cuts) > 1 and edges[-1] == c.size(value, axis)
            if whole and [start for start, _, _ in cuts] == edges[:-1]:
                _split(model.graph, value, axis, cuts)
                outcome.counts["slices"] += 1
            else:
                outcome.refused += [Refusal(node, "no Slices take the rest of the axis") for _, _, node in cuts]
    return outcome


def _piece(node: ir.Node, value: ir.Value) -> tuple[int, int, int] | None:
    """(axis, start, end) of a Slice with step 1 over one axis of known size."""
    if node.op_type != "Slice" or node.inputs[0] is not value or len(node.inputs) < 4:
        return None
    starts, ends, axes = (c.ints(v) for v in node.inputs[1:4])
    steps = c.ints(node.inputs[4]) if len(node.inputs) > 4 else [1]
    rank = c.rank(value)
    if not (starts and ends and axes and len(axes) == 1 and steps == [1]) or rank is None:
        return None
    axis = axes[0] % rank
    size = c.size(value, axis)
    if size is None or starts[0] < 0 or ends[0] < 0:
        return None
    return axis, starts[0], size if ends[0] >= END else min(ends[0], size)


def _split(graph: ir.Graph, value: ir.Value, axis: int, cuts: list[tuple[int, int, ir.Node]]) -> None:
    sizes = [end - start for start, end, _ in cuts]
    shape = constant(graph, f"{cuts[0][2].outputs[0].name}.sizes", sizes)
    node = ir.node("Split", [value, shape], {"axis": axis}, num_outputs=len(cuts))
    node.metadata_props.update(cuts[0][2].metadata_props)
    first = next(n for n in graph if n in {cut[2] for cut in cuts})
    graph.insert_before(first, node)
    for output, (_, _, old) in zip(node.outputs, cuts, strict=True):
        output.name, output.shape, output.type = (
            f"{old.outputs[0].name}.split",
            old.outputs[0].shape,
            old.outputs[0].type,
        )
        ir.convenience.replace_all_uses_with(old.outputs[0], output, replace_graph_outputs=True)
        graph.remove(old, safe=True)


def _case(name: str, cuts: str, fires: int = 1, refused: str | None = None, step: int = 1) -> Case:
    a, b, c, d = cuts.split(", ")
    graph = f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,8] x) => (float[N,P] y, float[N,Q] z)
        <int64[1] axis = {{-1}}, int64[1] step = {{{step}}},
         int64[1] a = {{{a}}}, int64[1] b = {{{b}}}, int64[1] c = {{{c}}}, int64[1] d = {{{d}}}> {{
            l = Slice (x, a, b, axis, step)  r = Slice (x, c, d, axis, step)
            y = Relu (l)  z = Sigmoid (r)
        }}"""
    return Case(name, graph, fires, {"Split": fires, "Slice": 2 - 2 * fires}, refused, {"N": 3})


CASES = [
    _case("two halves", "0, 4, 4, 8"),
    _case("to the end", f"0, 3, 3, {END}"),
    _case("a gap", "0, 3, 4, 8", 0, "the rest of the axis"),
    _case("an overlap", "0, 5, 4, 8", 0, "the rest of the axis"),
    _case("every second", "0, 4, 4, 8", 0, step=2),
]

PASS = Pass("slices", merge_slices, CASES)
