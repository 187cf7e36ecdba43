"""Shapes and opsets of operators outside Stable Diffusion: one without a rule loses one shape, not the graph."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from fusion_passes.canonicalize import canonicalize, opset, unsupported_reason
from fusion_passes.shapes.infer import annotate, annotate_new

HEADER = '<ir_version: 8, opset_import: ["" : {version}{more}]>\n'


def shape(body: str, version: int = 17, more: str = "", inputs: str = "float[B,8,H,W] x") -> str:
    """Return the inferred shape of `y` as text."""
    text = HEADER.format(version=version, more=more) + f"g ({inputs}) => (float y) {{ {body} }}"
    model = ir.from_proto(onnx.parser.parse_model(text))
    info = annotate(model.graph)
    dims = info.shapes.get(next(v for node in model.graph for v in node.outputs if v.name == "y"))
    return "unknown" if dims is None else ", ".join(map(str, dims))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (x)", "B, 8, floor((H)/2), floor((W)/2)"),
        ("y = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x)", "B, 8, H, W"),
        ("y = GlobalAveragePool (x)", "B, 8, 1, 1"),
        ("r = Constant <value_ints = [1, 2, 1, 1]> ()  y = Tile (x, r)", "B, 16, H, W"),
        ("s = Shape (x)  y = Tile (x, s)", "B*B, 64, H*H, W*W"),
        ('y = Einsum <equation = "bchw->bhwc"> (x)', "B, H, W, 8"),
        ('y = Einsum <equation = "bchw,bdhw->bcd"> (x, x)', "B, 8, 8"),
        ("i = Constant <value_ints = [0, 0]> ()  y = GatherND (x, i)", "H, W"),
        ("y = Trilu (x)", "B, 8, H, W"),
        # a Slice from 0 to the size of its axis, as transformers slices masks to the key length; and to another size
        ("z = Constant <value_ints = [0]> () a = Constant <value_ints = [2]> () "
         "h = Shape <start = 2, end = 3> (x) y = Slice (x, z, h, a)", "B, 8, H, W"),
        ("z = Constant <value_ints = [0]> () a = Constant <value_ints = [3]> () "
         "h = Shape <start = 2, end = 3> (x) y = Slice (x, z, h, a)", "B, 8, H, y_3"),
        # from a start that is a size: the text tokens of a joint attention; the other axes are kept
        ("e = Constant <value_ints = [9223372036854775807]> () a = Constant <value_ints = [2]> () "
         "h = Shape <start = 2, end = 3> (x) y = Slice (x, h, e, a)", "B, 8, 0, W"),
        ("e = Constant <value_ints = [9223372036854775807]> () a = Constant <value_ints = [2]> () "
         "c = Concat <axis = 2> (x, x) h = Shape <start = 2, end = 3> (x) y = Slice (c, h, e, a)", "B, 8, H, W"),
        ("a = Constant <value_ints = [2]> () b = Shape <start = 0, end = 1> (x) h = Shape <start = 2, end = 3> (x) "
         "y = Slice (x, b, h, a)", "B, 8, y_2, W"),
        ("a = Constant <value_int = 1> ()  y = CumSum (x, a)", "B, 8, H, W"),
        ("k = Constant <value_ints = [3]> ()  y, i = TopK <axis = 1> (x, k)", "B, 3, H, W"),
        ("y = DepthToSpace <blocksize = 2> (x)", "B, 2, 2*H, 2*W"),
        ("y = ReduceL2 <axes = [1]> (x)", "B, 1, H, W"),
        ("y = Flatten (x)", "B, 8*H*W"),
        ("p = GlobalAveragePool (x)  y = Squeeze (p)", "unknown"),  # B may be 1
        ("a = Constant <value_ints = [2, 3]> ()  p = GlobalAveragePool (x)  y = Squeeze (p, a)", "B, 8"),
        # attributes that do not fit the rank, which ONNX Runtime may not know
        ("y = Transpose <perm = [0, 2, 3, 4, 1]> (x)", "unknown"),
        ("f = Flatten (x)  y = Concat <axis = 1> (x, f)", "unknown"),
        # no shape rule: ONNX's inference
        ("y = LpNormalization (x)", "B, 8, H, W"),
        ("l = Constant <value_int = 9> ()  y = HannWindow (l)", "9"),
        # a new symbol for an unknown size; values after it still have a shape
        ("r = Constant <value_ints = [-1, 4]> ()  z = other.Op (x)  y = Reshape (z, r)", "y_0, 4"),
        ("z = other.Conv (x)  y = Relu (z)", "unknown"),
    ],
)  # fmt: skip
def test_shape_of_an_operator(body: str, expected: str) -> None:
    assert shape(body, more=', "other" : 1') == expected


def test_shapes_of_a_clone_are_inferred_again() -> None:
    """`ir.Model.clone` copies the shapes that a pass before it inferred, which are by the original's values."""
    text = HEADER.format(version=20, more="") + "g (float[B,8,4] x) => (float y) { z = Relu (x)  y = Flatten (z) }"
    model = ir.from_proto(onnx.parser.parse_model(text))
    annotate(model.graph)
    copy = model.clone().graph
    assert annotate_new(copy).shapes.keys() == {*copy.inputs, *(output for node in copy for output in node.outputs)}


def test_branches_of_an_if_keep_their_common_sizes() -> None:
    body = """c = Constant <value = bool {1}> ()
        y = If (c) <then_branch = a () => (float t) { t = Relu (x) }, else_branch = b () => (float e) {
            two = Constant <value_ints = [1, 1, 2, 1]> ()  e = Tile (x, two) }>"""
    assert shape(body) == "B, 8, y_2, W"


def changed_operators() -> Iterator[tuple[str, int]]:
    """Yield every standard operator and opset with another definition than at `OPSET`."""
    for name in sorted({s.name for s in onnx.defs.get_all_schemas() if s.domain == ""}):
        for version in range(opset.OLDEST, opset.NEWEST + 1):
            old, new = opset.schema(name, version), opset.schema(name, opset.OPSET)
            if old is not None and new is not None and old.since_version != new.since_version:
                yield name, version


def test_every_standard_operator_whose_definition_changed_is_known() -> None:
    handled = opset.WIDENED | opset.REPLACED | {"AveragePool", "BatchNormalization"}
    unknown = {
        (name, version)
        for name, version in changed_operators()
        if version < opset.OPSET and not any(version < since for since, _ in opset.CHANGED.get(name, ()))
    }
    assert {(name, version) for name, version in unknown if name not in handled} == set()


CONVERTED_NODES = {
    "GridSample": (16, 'y = GridSample <mode = "bilinear"> (x, grid)'),
    "ReduceMin": (17, "y = ReduceMin <axes = [2, 3]> (x)"),
    "ReduceProd of all": (17, "y = ReduceProd <keepdims = 0> (x)"),
    "DFT": (17, "y = DFT <axis = 2> (x)"),
    "AveragePool": (18, "y = AveragePool <kernel_shape = [2, 2], strides = [2, 2], ceil_mode = 1> (x)"),
    "an operator in a branch": (17, """c = Constant <value = bool {1}> ()
        y = If (c) <then_branch = a () => (float t) { t = ReduceMax <axes = [1]> (x) },
                    else_branch = b () => (float e) { e = Relu (x) }>"""),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERTED_NODES)
def test_a_node_converted_to_another_opset_has_equal_outputs(name: str) -> None:
    version, body = CONVERTED_NODES[name]
    text = (
        HEADER.format(version=version, more="")
        + f"""g (float[2,3,5,2] x, float[2,4,4,2] grid) => (float y) {{ {body} }}"""
    )
    source = onnx.parser.parse_model(text)
    source.graph.output[0].type.tensor_type.ClearField("shape")
    model = ir.from_proto(source)
    canonicalize(model)
    assert model.graph.opset_imports[""] == opset.OPSET
    feeds = {
        "x": np.random.default_rng(0).normal(size=(2, 3, 5, 2)),
        "grid": np.random.default_rng(1).uniform(-1, 1, (2, 4, 4, 2)),
    }
    feeds = {key: array.astype(np.float32) for key, array in feeds.items()}
    expected, actual = (
        ort.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)[0]
        for m in (source, ir.to_proto(model))
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_operators_that_cannot_be_converted_are_named() -> None:
    body = "y = AveragePool <kernel_shape = [2, 2], ceil_mode = 1, count_include_pad = 1, pads = [1, 1, 0, 0]> (x)"
    text = HEADER.format(version=17, more="") + f"g (float[B,8,H,W] x) => (float y) {{ {body} }}"
    model = ir.from_proto(onnx.parser.parse_model(text))
    canonicalize(model)
    assert "its AveragePool may mean something else" in (unsupported_reason(model) or "")
