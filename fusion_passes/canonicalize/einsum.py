"""Einsum: rewrites the contraction of two operands over one axis as a MatMul between Transposes, and a permutation.

    Einsum(a, b; "bthd,bshd->bhts")  =>  MatMul(Transpose(a, 0213), Transpose(b, 0231))
    Einsum(a, b; "bts,bcs->bct")     =>  Transpose(MatMul(a, Transpose(b, 021)), 021)
    Einsum(a; "nhwpqc->nchpwq")      =>  Transpose(a, 051324)

Rejected: a label that is summed but occurs in one operand only, several contracted or free axes, an ellipsis, a
diagonal, and batch axes whose sizes may differ: Einsum broadcasts a 1 on any axis, MatMul on batch axes only.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes import value_queries as values
from fusion_passes.graph_pass import Pass, PassOutcome, case_makers, rewrite_nodes
from fusion_passes.shapes.indexing_rules import einsum_labels


def einsum(model: ir.Model) -> PassOutcome:
    """Replace Einsums that are matrix multiplications by MatMul, and permutations by Transpose, in place."""
    return rewrite_nodes(model, "einsum", "Einsum", _reject_reason, _rewrite)


def _permutation(node: ir.Node) -> list[int] | None:
    """Return the axes of the operand in output order if an Einsum only permutes them, else None."""
    parsed = einsum_labels(node)
    if parsed is None or len(parsed[0]) != 1:
        return None
    (a,), out = parsed
    return [a.index(label) for label in out] if len(set(a)) == len(a) and sorted(a) == sorted(out) else None


def _matmul_labels(node: ir.Node) -> tuple[list[str], str, str, str] | None:
    """Return the labels of the batch axes in output order, the left rows, the contracted axis, the right columns."""
    parsed = einsum_labels(node)
    if parsed is None or len(parsed[0]) != 2:
        return None
    (a, b), out = parsed
    batch = [label for label in out if label in a and label in b]
    contracted = [label for label in a if label in b and label not in out]
    rows, columns = ([x for x in side if x in out and x not in batch] for side in (a, b))
    if len(rows) != 1 or len(columns) != 1 or len(contracted) != 1:
        return None
    if len(a) != len(batch) + 2 or len(b) != len(batch) + 2:
        return None
    return batch, rows[0], contracted[0], columns[0]


def _reject_reason(node: ir.Node) -> str | None:
    labels, parsed = _matmul_labels(node), einsum_labels(node)
    if _permutation(node) is not None:
        return None
    if labels is None or parsed is None:
        return "the Einsum is not a matrix multiplication of two operands"
    batch, _, contracted, _ = labels
    a, b = (
        dict(zip(names, values.dims(x) or (), strict=False)) for names, x in zip(parsed[0], node.inputs, strict=True)
    )
    for label in [*batch, contracted]:
        if a.get(label) is None or a.get(label) != b.get(label):
            return f"the sizes of axis {label} may differ: {a.get(label)} and {b.get(label)}"
    return None


def _rewrite(graph: ir.Graph, node: ir.Node) -> None:
    if (perm := _permutation(node)) is not None:
        node.op_type = "Transpose"
        node.attributes.clear()
        node.attributes["perm"] = ir.AttrInt64s("perm", perm)
        return
    labels, parsed = _matmul_labels(node), einsum_labels(node)
    assert labels is not None
    assert parsed is not None
    batch, row, contracted, column = labels
    (a, b), out = parsed
    a_rows = _transposed(graph, node, 0, [a.index(label) for label in [*batch, row, contracted]])
    right = _transposed(graph, node, 1, [b.index(label) for label in [*batch, contracted, column]])
    matmul = ir.node("MatMul", [a_rows, right])
    order = [[*batch, row, column].index(label) for label in out]
    result, y = matmul.outputs[0], node.outputs[0]
    result.name, result.type = f"{y.name}.product", y.type
    if y.shape is not None:
        result.shape = ir.Shape([y.shape[order.index(axis)] for axis in range(len(order))])
    replacement = [matmul]
    if order != sorted(order):
        replacement.append(ir.node("Transpose", [result], {"perm": order}))
    last, name = replacement[-1].outputs[0], y.name
    last.shape, last.type = y.shape, y.type
    for new in replacement:
        new.metadata_props.update(node.metadata_props)
        graph.insert_before(node, new)
    ir.convenience.replace_all_uses_with(y, last, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    last.name = name


def _transposed(graph: ir.Graph, node: ir.Node, index: int, perm: list[int]) -> ir.Value:
    x = node.inputs[index]
    assert x is not None
    if perm == sorted(perm):
        return x
    transpose = ir.node("Transpose", [x], {"perm": perm})
    value = transpose.outputs[0]
    value.name, value.type = f"{node.outputs[0].name}.{'ab'[index]}", x.type
    if x.shape is not None:
        value.shape = ir.Shape([x.shape[axis] for axis in perm])
    graph.insert_before(node, transpose)
    return value


def _graph(equation: str, a: str = "B,S,2,4", b: str = "B,L,2,4", y: str = "B,2,S,L") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[{a}] a, float[{b}] b) => (float[{y}] y) {{ y = Einsum <equation = "{equation}"> (a, b) }}"""


_SIZES = {"B": 2, "S": 5, "L": 3, "D": 4}
_ONE = {"MatMul": 1, "Einsum": 0}
_case, _rejected = case_makers(_SIZES)
CASES = [
    _case("heads last", _graph("bthd,bshd->bhts"), ops=_ONE),
    _case("with spaces", _graph("b t h d, b s h d -> b h t s"), ops=_ONE),
    _case("channels first", _graph("bct,bcs->bts", "B,4,S", "B,4,L", "B,S,L"), ops=_ONE | {"Transpose": 1}),
    _case("weights and channels first", _graph("bts,bcs->bct", "B,S,L", "B,4,L", "B,4,S"), ops=_ONE),
    _case("rows times columns", _graph("bij,bjk->bik", "B,S,4", "B,4,L", "B,S,L"), ops=_ONE | {"Transpose": 0}),
    _case("no batch", _graph("ij,kj->ik", "S,4", "L,4", "S,L"), ops=_ONE),
    _case(
        "a permutation",
        _graph("nhwc->nchw").replace("(a, b)", "(a)").replace("B,2,S,L", "B,4,S,2"),
        ops={"Transpose": 1, "Einsum": 0},
    ),
    _case("implicit result", _graph("ij,jk", "S,4", "4,L", "S,L"), ops=_ONE),
    _rejected("two contracted axes", _graph("bthd,bshd->bts", y="B,S,L"), rejection="not a matrix multiplication"),
    _rejected(
        "a sum over one operand alone",
        _graph("bct,bcs->bs", "B,4,S", "B,4,L", "B,L"),
        rejection="not a matrix multiplication",
    ),
    _rejected(
        "a sum over one axis",
        _graph("bsnd->bnd").replace("(a, b)", "(a)").replace("B,2,S,L", "B,2,4"),
        rejection="not a matrix multiplication",
    ),
    _rejected("a diagonal", _graph("btt,bts->bs", "B,S,S", "B,S,L", "B,L"), rejection="not a matrix multiplication"),
    _rejected("an outer product", _graph("bi,bj->bij", "B,S", "B,L", "B,S,L"), rejection="not a matrix multiplication"),
    _rejected(
        "a contracted axis that may be broadcast", _graph("ij,kj->ik", "S,D", "L,1", "S,L"), rejection="may differ"
    ),
    _rejected(
        "an ellipsis", _graph("...ij,...jk->...ik", "B,S,4", "B,4,L", "B,S,L"), rejection="not a matrix multiplication"
    ),
]
PASS = Pass("einsum", einsum, CASES)
