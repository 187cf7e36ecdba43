"""Lowering a graph's opset for a provider whose kernels end at an older one."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from fusion_passes.canonicalize.opset import lower_opset


def model_of(body: str, opset: int) -> ir.Model:
    text = (
        f'<ir_version: 10, opset_import: ["" : {opset}]> g (float[N,8,4] x, bool yes) => (float[N,8,4] y) {{ {body} }}'
    )
    return ir.from_proto(onnx.parser.parse_model(text))


SAME = [
    "s = Shape (x)  t = Transpose <perm = [0, 1, 2]> (x)  y = Reshape (t, s)",
    "y = If (yes) <then_branch = a () => (b) { b = Identity (x) }, else_branch = c () => (d) { d = Neg (x) }>",
    "h = Cast <to = 10> (x)  f = Cast <to = 1> (h)  y = Gelu (f)",
]


@pytest.mark.parametrize("opset", [21, 23])
@pytest.mark.parametrize("body", SAME)
def test_operators_with_more_types_move(body: str, opset: int) -> None:
    model = model_of(body, opset)
    assert lower_opset(model, 20) is None
    assert model.graph.opset_imports[""] == 20
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_older_opsets_stay() -> None:
    model = model_of(SAME[0], 18)
    assert lower_opset(model, 20) is None
    assert model.graph.opset_imports[""] == 18


@pytest.mark.parametrize(
    ("body", "opset", "named"),
    [
        ("y = Attention <q_num_heads = 2, kv_num_heads = 2> (x, x, x)", 23, "Attention"),
        ("g = Constant <value = float[8] {1,1,1,1,1,1,1,1}> ()  y = GroupNormalization <num_groups = 2> (x, g, g)", 21,
         "GroupNormalization"),
        ("y = If (yes) <then_branch = a () => (b) { b = Identity (x) }, else_branch = c () => (d) "
         "{ d = RMSNormalization (x, x) }>", 23, "RMSNormalization"),
    ],
)  # fmt: skip
def test_others_are_named_and_nothing_changes(body: str, opset: int, named: str) -> None:
    model = model_of(body, opset)
    assert lower_opset(model, 20) == f"its {named} of opset {opset} cannot be written in opset 20"
    assert model.graph.opset_imports[""] == opset
