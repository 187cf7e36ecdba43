"""Graphs as any tool may write them: canonicalization keeps their outputs, and its own work stays small."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from fusion_passes.canonicalize import canonicalize
from fusion_passes.canonicalize.shape_folding import FOLD_LIMIT
from sd_ort.optimize.optimizer import optimize_component
from sd_ort.optimize.targets import TARGETS

HEADER = '<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>'
FEEDS = {
    "x": np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32),
    "yes": np.array(True),
    "no": np.array(False),
}


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})


def assert_canonical_is_equal(text: str) -> ir.Model:
    source = onnx.parser.parse_model(text)
    model = ir.from_proto(source)
    canonicalize(model)
    for actual, expected in zip(run(ir.to_proto(model), FEEDS), run(source, FEEDS), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    return model


# Identities whose input belongs to another graph, or is an output itself.
IDENTITIES = [
    """g (float[2,3] x, bool yes) => (float[2,3] y, float[2,3] z) {
        z = Neg (x)
        y = If (yes) <then_branch = a () => (float[2,3] t) { t = Identity (z) },
                      else_branch = b () => (float[2,3] e) { e = Identity (x) }> }""",
    """g (float[2,3] x, bool yes, bool no) => (float[2,3] y) {
        h = Neg (x)
        y = If (yes) <then_branch = a () => (float[2,3] t) {
                          t = If (no) <then_branch = c () => (float[2,3] t2) { t2 = Identity (h) },
                                       else_branch = d () => (float[2,3] e2) { e2 = Identity (h) }> },
                      else_branch = b () => (float[2,3] e) { i = Identity (h)  e = Identity (i) }> }""",
    "g (float[2,3] x) => (float[2,3] y, float[2,3] z) { h = Neg (x)  y = Identity (h)  z = Identity (h) }",
    "g (float[2,3] x) => (float[2,3] y, float[2,3] z) { y = Neg (x)  z = Identity (y) }",
    "g (float[2,3] x) => (float[2,3] y) { y = Identity (x) }",
    "g (float[2,3] x) => (float[2,3] y) <float[2,3] w = {1, 2, 3, 4, 5, 6}> { t = Add (x, w)  y = Identity (t) }",
]


@pytest.mark.parametrize("body", IDENTITIES)
def test_identities(body: str) -> None:
    assert_canonical_is_equal(HEADER + body)


def test_contrib_operators_are_not_replaced_by_functions_of_their_name() -> None:
    """ONNX Runtime runs its kernel of com.microsoft::QuickGelu, x * sigmoid(1.702 x), whatever a function says."""
    text = f"""{HEADER} g (float[2,3] x) => (float[2,3] y) {{ y = com.microsoft.QuickGelu (x) }}
        <domain: "com.microsoft", opset_import: ["" : 23]> QuickGelu (a) => (b) {{ b = Neg (a) }}"""
    assert_canonical_is_equal(text)


SIZES = [
    "l = Constant <value_int = 500000000> ()  r = Range (zero, l, one)",
    "l = Constant <value_ints = [20000, 20000]> ()  r = ConstantOfShape <value = int64[1] {3}> (l)",
    "l = Constant <value_ints = [500000000]> ()  r = Expand (one, l)",
    "l = Constant <value_ints = [30000, 30000]> ()  s = Constant <value_ints = [1, 1]> ()  u = Reshape (one, s)  "
    "r = Tile (u, l)",
    "v = ConstantOfShape <value = int64[1] {1}> (k)  a = Unsqueeze (v, zeros)  b = Unsqueeze (v, ones)  r = Add (a, b)",
]


@pytest.mark.parametrize("body", SIZES)
def test_large_tensors_are_not_folded(body: str) -> None:
    """The graph describes gigabytes in a few bytes. CPU time is compared, which a busy machine does not change."""
    text = f"""{HEADER} g (int64 i) => (int64 y)
        <int64 zero = {{0}}, int64 one = {{1}}, int64[1] zeros = {{0}}, int64[1] ones = {{1}}, int64[1] k = {{8000}}>
        {{ {body}  y = Gather (r, i) }}"""
    proto = onnx.parser.parse_model(text)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    model = ir.from_proto(proto)
    start = time.process_time()
    canonicalize(model)
    assert time.process_time() - start < 5
    sizes = [value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None]
    assert max(sizes, default=0) <= FOLD_LIMIT
    assert any(node.op_type == "Gather" for node in model.graph)


def test_unused_functions_cost_nothing() -> None:
    functions = "".join(
        f'<domain: "d{i}", opset_import: ["" : 23]> F (a) => (b) {{ b = Neg (a) }}' for i in range(2000)
    )
    imports = ", ".join(f'"d{i}" : 1' for i in range(2000))
    text = f'<ir_version: 10, opset_import: ["" : 23, {imports}]> g (float[2,3] x) => (float[2,3] y) {{ y = Abs (x) }}'
    model = ir.from_proto(onnx.parser.parse_model(text + functions))
    canonicalize(model)
    assert not model.functions
    assert [node.op_type for node in model.graph] == ["Abs"]


@pytest.mark.parametrize("target", ["portable", "cpu", "hip"])
@pytest.mark.parametrize("form", ["four axes", "three axes", "fewer keys", "boolean mask", "causal", "capped"])
def test_attention_of_opset_23_is_one_attention(tmp_path: Path, target: str, form: str) -> None:
    """Its scores are in no tensor of the graph, unless the target's kernel would be slower (capped scores)."""
    keys = 1 if form == "fewer keys" else 2
    shapes = [f"B,{heads},{size},8" for heads, size in ((2, "S"), (keys, "L"), (keys, "L"))]
    attributes = {"causal": "<is_causal = 1>", "capped": "<softcap = 3.0>"}.get(form, "")
    if form == "three axes":
        shapes, attributes = [f"B,{size},16" for size in "SLL"], "<q_num_heads = 2, kv_num_heads = 2>"
    mask = ", bool[S,L] mask" if form == "boolean mask" else ""
    text = f"""{HEADER} g (float[{shapes[0]}] q, float[{shapes[1]}] k, float[{shapes[2]}] v {mask})
        => (float[{shapes[0]}] y) {{ y = Attention {attributes} (q, k, v{", mask" if mask else ""}) }}"""
    random, sizes = np.random.default_rng(0), {"B": 2, "S": 5, "L": 7}
    feeds = {
        name: random.standard_normal([sizes.get(axis) or int(axis) for axis in shape.split(",")]).astype(np.float32)
        for name, shape in zip("qkv", shapes, strict=True)
    }
    if mask:
        feeds["mask"] = random.random((5, 7)) < 0.6
        feeds["mask"][2] = False
    source, out = tmp_path / "source.onnx", tmp_path / "out.onnx"
    onnx.save(onnx.parser.parse_model(text), source)
    optimize_component(source, out, TARGETS[target])
    ops = Counter(node.op_type for node in onnx.load(out).graph.node)
    one = ops["Attention"] + ops["MultiHeadAttention"] + ops["ScaledDotProductAttention"]
    assert (one, ops["Softmax"]) == ((0, 1) if form == "capped" and target != "portable" else (1, 0)), ops
    if target == "cpu" and form != "capped":
        assert ops.total() == 1, ops
    np.testing.assert_allclose(run(onnx.load(out), feeds)[0], run(onnx.load(source), feeds)[0], rtol=1e-4, atol=1e-5)


def test_causal_attention_of_other_lengths_is_not_of_com_microsoft(tmp_path: Path) -> None:
    """Its MultiHeadAttention aligns the causal mask with the last key, ai.onnx Attention with the first."""
    text = f"""{HEADER} g (float[B,S,16] q, float[B,L,16] k, float[B,L,16] v) => (float[B,S,16] y) {{
        y = Attention <q_num_heads = 2, kv_num_heads = 2, is_causal = 1> (q, k, v) }}"""
    random, sizes = np.random.default_rng(0), {"q": 5, "k": 7, "v": 7}
    feeds = {name: random.standard_normal((2, size, 16)).astype(np.float32) for name, size in sizes.items()}
    source, out = tmp_path / "source.onnx", tmp_path / "out.onnx"
    onnx.save(onnx.parser.parse_model(text), source)
    optimize_component(source, out, TARGETS["cuda"])
    attentions = [node.domain for node in onnx.load(out).graph.node if node.op_type == "MultiHeadAttention"]
    assert attentions == ["sd_ort"]
    np.testing.assert_allclose(run(onnx.load(out), feeds)[0], run(onnx.load(source), feeds)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("merged", [False, True])
def test_fully_masked_rows_are_zero(tmp_path: Path, merged: bool) -> None:
    """ONNX Runtime's Attention returns 0 for a row whose boolean mask has no True."""
    tail = "t = Transpose <perm = [0, 2, 1, 3]> (o)  s = Constant <value_ints = [0, 0, 8]> ()  y = Reshape (t, s)"
    shape = "B,S,8" if merged else "B,2,S,4"
    text = f"""{HEADER} g (float[B,2,S,4] q, float[B,2,L,4] k, float[B,2,L,4] v, bool[B,1,S,L] keep)
        => (float[{shape}] y) {{ o = Attention (q, k, v, keep)  {tail if merged else "y = Identity (o)"} }}"""
    random = np.random.default_rng(0)
    feeds = {name: random.standard_normal((2, 2, 5, 4)).astype(np.float32) for name in "qkv"}
    feeds["keep"] = random.random((2, 1, 5, 5)) < 0.6
    feeds["keep"][:, :, 2] = False
    source, out = tmp_path / "source.onnx", tmp_path / "out.onnx"
    onnx.save(onnx.parser.parse_model(text), source)
    optimize_component(source, out, TARGETS["portable"])
    expected = run(onnx.load(source), feeds)[0]
    assert not (expected[:, 2] if merged else expected[:, :, 2]).any()
    fused = onnx.load(out)
    np.testing.assert_allclose(run(fused, feeds)[0], expected, rtol=1e-5, atol=1e-6)
    assert "ScaledDotProductAttention" in {node.op_type for node in fused.graph.node}
