"""Conversion of a graph's opset: old forms of operators raised, new graphs lowered for an older provider."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from fusion_passes.canonicalize import canonicalize
from fusion_passes.canonicalize.opset import OPSET, declare_opset, lower_opset


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


def test_functions_move_with_the_graph() -> None:
    """Or keep it where it is, if their operators are newer."""
    for body, reason in (
        ("y = Sigmoid (x)", None),
        ("y = Gelu (x)", "its Gelu of opset 21 cannot be written in opset 18"),
    ):
        model = model_of("y = my.F (x)", 21)
        function = f'<domain: "my", opset_import: ["" : 21]> F (x) => (y) {{ {body} }}'
        model.functions["my", "F", ""] = ir.from_proto(onnx.parser.parse_function(function))
        assert lower_opset(model, 18) == reason
        versions = {graph.opset_imports[""] for graph in (model.graph, *model.functions.values())}
        assert versions == {21 if reason else 18}


@pytest.mark.parametrize("attributes", ["dilations = [2]", "ceil_mode = 1, count_include_pad = 1"])
def test_average_pools_of_opset_19_stay(attributes: str) -> None:
    model = model_of(f"y = AveragePool <kernel_shape = [2], {attributes}> (x)", 21)
    assert lower_opset(model, 18) == "its AveragePool of opset 21 cannot be written in opset 18"


OLD_FORMS = [
    (11, "float[2,1,3,1] x", "y = Squeeze <axes = [1, -1]> (x)"),
    (11, "float[2,1,3,1] x", "y = Squeeze (x)"),
    (7, "float[2,3] x", "y = Unsqueeze <axes = [0, 3]> (x)"),
    (11, "float[2,3,4] x", "y = ReduceSum <axes = [1], keepdims = 0> (x)"),
    (12, "float[2,3] x", "y = ReduceSum (x)"),
    (11, "float[2,5] x", "y, z = Split <axis = 1, split = [2, 3]> (x)"),
    (11, "float[2,4] x", "y, z = Split <axis = 1> (x)"),
    (9, "float[4,5] x", "y = Slice <starts = [1], ends = [-1], axes = [1]> (x)"),
    (9, "float[4,5] x", "y = Slice <starts = [1, 0], ends = [3, 2]> (x)"),
    (9, "float[4,5] x", "y, z = TopK <axis = 1, k = 2> (x)"),
    (10, "float[4,5] x", "y = Clip <min = -0.25, max = 0.5> (x)"),
    (8, "float[4,5] x", "y = Clip <max = 0.5> (x)"),
    (10, "float[1,2,3,4] x", 'y = Pad <pads = [0, 0, 1, 0, 0, 0, 0, 2], value = 1.5> (x)'),
    (10, "float[1,2,3,4] x", 'y = Pad <mode = "reflect", pads = [0, 0, 1, 1, 0, 0, 1, 1]> (x)'),
    (11, "float[2,3,4] x", "y = Softmax (x)"),
    (11, "float[2,3,4] x", "y = LogSoftmax <axis = 2> (x)"),
    (11, "float[2,3,4] x", "t = Softmax <axis = 0> (x)  y = Neg (t)"),
    (8, "float[2,3,4] x", "y = Hardmax <axis = 1> (x)"),
    (10, "float[2,3] x", "t = Dropout <ratio = 0.3> (x)  y = Neg (t)"),
    (7, "float[1,2,3,4] x", 'y = Upsample <mode = "nearest", scales = [1.0, 1.0, 2.0, 3.0]> (x)'),
    (9, "float[1,2,3,4] x", 's = Constant <value = float[4] {1.0, 1.0, 2.0, 2.0}> ()  '
        'y = Upsample <mode = "linear"> (x, s)'),
    (10, "float[1,2,5,4] x", 's = Constant <value = float[4] {1.0, 1.0, 0.5, 0.5}> ()  '
        'y = Resize <mode = "nearest"> (x, s)'),
    (10, "float[1,2,5,4] x", 's = Constant <value = float[4] {1.0, 1.0, 1.5, 2.5}> ()  '
        'y = Resize <mode = "nearest"> (x, s)'),
    (9, "float[3,3] x", "i = Constant <value = int64[1,2] {2, 0}> ()  "
        "u = Constant <value = float[1,2] {9, 8}> ()  "
        "y = Scatter <axis = 1> (x, i, u)"),
    (8, "float[1,2,3] x", "s = Constant <value = float[2] {1.5, -2.5}> ()  "
        "v = Constant <value = float[2] {0.5, 2.0}> ()  "
        "y = BatchNormalization (x, s, s, v, v)"),
    (7, "float[2,3] x", "w = Constant <value = float[3,2] {1, 2, 3, 4, 5, 6}> ()  "
        "b = Constant <value = float[2] {7, -8}> ()  "
        "y = Gemm (x, w, b)"),
    (8, "float[1,2,5,5] x", "y = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x)"),
    (8, "float[1,4,2,2] x", "y = DepthToSpace <blocksize = 2> (x)"),
]  # fmt: skip


def run(model: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})


def old_model(version: int, declaration: str, body: str) -> onnx.ModelProto:
    outputs = "float[] y, float[] z" if " z " in body.split("=")[0] + " " and "TopK" not in body else "float[] y"
    text = f'<ir_version: 4, opset_import: ["" : {version}]> g ({declaration}) => ({outputs}) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    return model


@pytest.mark.parametrize(("version", "declaration", "body"), OLD_FORMS)
def test_old_forms_are_raised(version: int, declaration: str, body: str) -> None:
    """Values before and after are equal, and the graph is valid at the new opset, its shapes folded."""
    source = old_model(version, declaration, body)
    sizes = [int(size) for size in declaration[declaration.index("[") + 1 : declaration.index("]")].split(",")]
    x = np.random.default_rng(0).standard_normal(sizes).astype(np.float32)
    expected = run(source, x)
    for convert in (declare_opset, canonicalize):
        model = ir.from_proto(source)
        convert(model)
        assert model.graph.opset_imports[""] == OPSET
        result = run(ir.to_proto(model), x)
        assert len(result) == len(expected)
        for actual, array in zip(result, expected, strict=True):
            np.testing.assert_allclose(actual, array, rtol=1e-6, atol=1e-7)


UNCHANGED_FORMS = [
    (6, "float[2,3] x", "y = Neg (x)"),
    (8, "float[1,2,3] x", "s = Constant <value = float[2] {1, 2}> ()  "
        "y = BatchNormalization <spatial = 0> (x, s, s, s, s)"),
    (10, "float[1,2,5,4] x", 's = Constant <value = float[4] {1.0, 1.0, 0.5, 2.0}> ()  y = Resize (x, s)'),
    (8, "float[1,3,2] x", 's = Constant <value = float[1,2] {0, 0}> ()  '
        'e, y = Scan <num_scan_inputs = 1, body = b (float[2] p, float[2] q) => (float[2] u, float[2] v) '
        '{ u = Add (p, q)  v = Identity (u) }> ("", s, x)'),
]  # fmt: skip


@pytest.mark.parametrize(("version", "declaration", "body"), UNCHANGED_FORMS)
def test_unknown_old_forms_stay(version: int, declaration: str, body: str) -> None:
    model = ir.from_proto(old_model(version, declaration, body))

    def nodes() -> list[tuple[str, list[str | None], list[str]]]:
        return [(n.op_type, [v and v.name for v in n.inputs], sorted(n.attributes)) for n in model.graph]

    before = nodes()
    assert canonicalize(model) == {}
    assert model.graph.opset_imports[""] == version
    assert nodes() == before
