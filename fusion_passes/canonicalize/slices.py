"""Slices of consecutive parts: replaces them by one Split, which newer exporters write for `chunk`.

Slice(x, 0:h, axis), Slice(x, h:2h, axis)  =>  Split(x, [h, h], axis)
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes import value_queries as values
from fusion_passes.graph_edits import new_initializer
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, Rejection

END = 2**31 - 1  # exporters write any integer from this one on for "to the end"


def merge_slices(model: ir.Model) -> PassOutcome:
    """Replace complete sets of Slices in place; count the new Splits."""
    outcome = PassOutcome()
    for value in [v for n in model.graph for v in n.outputs] + list(model.graph.inputs):
        by_axis: dict[int, list[tuple[int, int, ir.Node]]] = {}
        for node in values.consumers(value):
            interval = sliced_interval(node, value)
            if interval is not None:
                by_axis.setdefault(interval[0], []).append((interval[1], interval[2], node))
        for axis, cuts in by_axis.items():
            cuts.sort(key=lambda cut: cut[:2])
            edges = [0, *(end for _, end, _ in cuts)]
            complete = len(cuts) > 1 and edges[-1] == values.size(value, axis)
            if complete and [start for start, _, _ in cuts] == edges[:-1]:
                _split(model.graph, value, axis, cuts)
                outcome.counts["slices"] += 1
            else:
                outcome.rejections += [Rejection(node, "no Slices read the rest of the axis") for _, _, node in cuts]
    return outcome


def sliced_interval(node: ir.Node, value: ir.Value) -> tuple[int, int, int] | None:
    """Return (axis, start, end) of a Slice with step 1 over one axis of known size, else None."""
    if node.op_type != "Slice" or node.inputs[0] is not value or len(node.inputs) < 4:
        return None
    starts, ends, axes = (values.ints(v) for v in node.inputs[1:4])
    steps = values.ints(node.inputs[4]) if len(node.inputs) > 4 else [1]
    rank = values.rank(value)
    if not (starts and ends and axes and len(axes) == 1 and steps == [1]) or rank is None:
        return None
    axis = axes[0] % rank
    size = values.size(value, axis)
    if size is None:
        return None
    start, end = (max(edge + size, 0) if edge < 0 else edge for edge in (starts[0], ends[0]))
    return axis, start, size if end >= END else min(end, size)


def _split(graph: ir.Graph, value: ir.Value, axis: int, cuts: list[tuple[int, int, ir.Node]]) -> None:
    sizes = [end - start for start, end, _ in cuts]
    shape = new_initializer(graph, f"{cuts[0][2].outputs[0].name}.sizes", sizes)
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


def _case(name: str, cuts: str, rewrites: int = 1, rejection: str | None = None, step: int = 1) -> PassCase:
    a, b, c, d = cuts.split(", ")
    graph = f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,8] x) => (float[N,P] y, float[N,Q] z)
        <int64[1] axis = {{-1}}, int64[1] step = {{{step}}},
         int64[1] a = {{{a}}}, int64[1] b = {{{b}}}, int64[1] c = {{{c}}}, int64[1] d = {{{d}}}> {{
            l = Slice (x, a, b, axis, step)  r = Slice (x, c, d, axis, step)
            y = Relu (l)  z = Sigmoid (r)
        }}"""
    return PassCase(name, graph, rewrites, {"Split": rewrites, "Slice": 2 - 2 * rewrites}, rejection, {"N": 3})


CASES = [
    _case("two halves", "0, 4, 4, 8"),
    _case("to the end", f"0, 3, 3, {END}"),
    _case("counted from the end", f"0, -3, -3, {END}"),
    _case("an overlap counted from the end", "0, -3, -4, 8", 0, "the rest of the axis"),
    _case("a gap", "0, 3, 4, 8", 0, "the rest of the axis"),
    _case("an overlap", "0, 5, 4, 8", 0, "the rest of the axis"),
    _case("every second", "0, 4, 4, 8", 0, step=2),
]

PASS = Pass("slices", merge_slices, CASES)
