"""What the GPU targets do to convolutions and matrix products, its numbers by the operators' function bodies."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import graph_fixtures
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import fusion_passes
from fusion_passes import DOMAIN
from fusion_passes.operators import bodies
from sd_ort.optimize.optimizer import lower_layout, lower_operators, optimize_component
from sd_ort.optimize.targets import TARGETS, Target

# Every pass, and every fused operator by its body: what a CPU can run.
BODIES = replace(TARGETS["cuda"], contrib={}, linear_add=True, layer_norm=True, upsample=True)
SIZES = {"N": 2, "H": 6, "W": 4}


def graph(*lines: str) -> str:
    """x, y [N,8,H,W] -> z, of some of the weights below."""
    weights = "float[8,8,3,3] k, float[8,8,1,1] p, float[8] b, float[8] c, float[8] g, float[8] h"
    return f"""<ir_version: 10, opset_import: ["" : 21]>
        f (float[N,8,H,W] x, float[N,8,H,W] y) => (float[N,8,H,W] z) <{weights}> {{ {" ".join(lines)} }}"""


CONV = "a = Conv <pads = [1, 1, 1, 1]> (x, k, b)"
NORM = "z = GroupNormalization <num_groups = 2> (s, g, h)"
NORM_OF_A = ("n = GroupNormalization <num_groups = 2> (a, g, h)",)


def run(model: onnx.ModelProto) -> np.ndarray:
    random = np.random.default_rng(0)
    shape = (SIZES["N"], 8, SIZES["H"], SIZES["W"])
    feed = {info.name: random.normal(0, 1, shape).astype(np.float32) for info in model.graph.input}
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, feed)[0]
    return result


def lower(text: str, target: Target = BODIES) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """The graph with random weights, before and after."""
    source = onnx.parser.parse_model(text)
    random = np.random.default_rng(1)
    for info in list(source.graph.value_info):
        shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        tensor = onnx.numpy_helper.from_array(random.normal(0.5, 1, shape).astype(np.float32), info.name)
        source.graph.initializer.append(tensor)
    del source.graph.value_info[:]
    model = ir.from_proto(source)
    fusion_passes.canonicalize(model)
    fusion_passes.fuse(model)
    lower_layout(model, target)
    bodies.attach(model, [node for node in model.graph if node.domain == DOMAIN])
    return source, ir.to_proto(model)


def biased(model: onnx.ModelProto) -> int:
    return sum(node.op_type == "NhwcConv" and len(node.input) > 2 for node in model.graph.node)


@pytest.mark.parametrize(
    ("lines", "left", "counts"),
    [
        ((CONV, "s = Add (a, y)", NORM), 0, {"SkipGroupNorm": 1}),
        ((CONV, "s = Add (y, a)", NORM), 0, {"SkipGroupNorm": 1}),
        ((CONV, "d = Conv <pads = [1, 1, 1, 1]> (y, k, c)", "s = Add (a, d)", NORM), 0, {"SkipGroupNorm": 1}),
        ((CONV, "z = Add (a, y)"), 0, {"BiasAdd": 1, "Add": 0}),
        ((CONV, "s = Relu (a)", "t = Sigmoid (a)", "z = Add (s, t)"), 1, {"BiasAdd": 0}),
        ((CONV, "z = Add (a, a)"), 1, {"BiasAdd": 0}),
        ((CONV, "s = Identity (a)", NORM), 0, {"GroupNorm": 0, "SkipGroupNorm": 1}),
        ((CONV, "s = Relu (a)", NORM), 1, {"GroupNorm": 1, "SkipGroupNorm": 0}),
        ((CONV, "t = Relu (a)", *NORM_OF_A, "z = Add (n, t)"), 0, {"GroupNorm": 0, "SkipGroupNorm": 1}),
        ((CONV, *NORM_OF_A, "t = Add (n, y)", "z = Add (t, a)"), 0, {"GroupNorm": 0, "SkipGroupNorm": 1}),
    ],
    ids=[
        "skip",
        "skip first",
        "two biases",
        "add",
        "read twice",
        "doubled",
        "norm",
        "nothing to fold into",
        "read before the norm too",
        "read behind the norm too",
    ],
)
def test_convolution_biases(lines: tuple[str, ...], left: int, counts: dict[str, int]) -> None:
    before, after = lower(graph(*lines))
    assert biased(after) == left
    nodes = Counter(node.op_type for node in after.graph.node)
    assert {op: nodes[op] for op in counts} == counts
    np.testing.assert_allclose(run(after), run(before), rtol=1e-4, atol=1e-4)


# The end of a transformer with linear projections, on the image as rows of channels.
ROWS = (
    "i = Transpose <perm = [0, 2, 3, 1]> (x)", "r = Reshape (i, rows)", "m = MatMul (r, q)", "a = Add (b, m)",
)  # fmt: skip
IMAGE = ("o = Shape (i)", "u = Reshape (a, o)", "v = Transpose <perm = [0, 3, 1, 2]> (u)")


@pytest.mark.parametrize(
    ("lines", "left", "counts"),
    [
        ((*ROWS, *IMAGE, "z = Add (v, y)"), 0, {"BiasAdd": 1}),
        ((*ROWS, *IMAGE, "s = Add (y, v)", NORM), 0, {"SkipGroupNorm": 1}),
        ((*ROWS, *IMAGE, "s = Identity (v)", NORM), 0, {"SkipGroupNorm": 1, "GroupNorm": 0}),
        ((*ROWS, "d = Relu (a)", *[line.replace("(a, o)", "(d, o)") for line in IMAGE], "z = Add (v, y)"), 1, {}),
        ((*ROWS, *IMAGE, "t = ReduceSum <keepdims = 0> (a)", "w = Add (v, t)", "z = Add (w, y)"), 1, {}),
    ],
    ids=["add", "skip", "norm", "something between", "read twice"],
)
def test_biases_of_linear_layers(lines: tuple[str, ...], left: int, counts: dict[str, int]) -> None:
    text = graph(*lines).replace("<float[8,8,3,3]", "<int64[3] rows = {0, -1, 8}, float[8,8] q, float[8,8,3,3]")
    before, after = lower(text, replace(BODIES, linear_add=False))
    nodes = Counter(node.op_type for node in after.graph.node)
    products = {node.output[0] for node in after.graph.node if node.op_type == "MatMul"}
    assert len(products) == 1
    assert sum(node.op_type == "Add" and bool(products & set(node.input)) for node in after.graph.node) == left
    assert {op: nodes[op] for op in counts} == counts
    np.testing.assert_allclose(run(after), run(before), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("lines", "counts"),
    [
        (("z = Conv (x, p, b)",), {"LinearAdd": 1, "NhwcConv": 0}),
        (("a = Conv (x, p, b)", "z = Add (a, y)"), {"LinearAdd": 1, "BiasAdd": 0, "Add": 0}),
        ((CONV, "d = Conv (y, p, c)", "z = Add (a, d)"), {"LinearAdd": 1, "NhwcConv": 1, "BiasAdd": 0}),
        (("a = Conv (x, p, b)", "s = Add (a, y)", NORM), {"LinearAdd": 1, "GroupNorm": 1, "SkipGroupNorm": 0}),
        (("a = Conv (x, p, b)", "s = Add (a, y)", NORM.replace("z =", "t ="), "z = Add (s, t)"),
         {"LinearAdd": 1, "GroupNorm": 1}),
    ],
    ids=["1x1", "residual", "shortcut", "norm", "sum read too"],
)  # fmt: skip
def test_products(lines: tuple[str, ...], counts: dict[str, int]) -> None:
    before, after = lower(graph(*lines))
    nodes = Counter(node.op_type for node in after.graph.node)
    assert {op: nodes[op] for op in counts} == counts
    np.testing.assert_allclose(run(after), run(before), rtol=1e-4, atol=1e-4)


def test_strided_convolution_of_one_pixel_stays() -> None:
    source = graph("a = Conv <strides = [2, 2]> (x, p, b)", "z = Add (x, y)", "w = Relu (a)")
    _, after = lower(source.replace("=> (float[N,8,H,W] z)", "=> (float[N,8,H,W] z, float[N,8,I,J] w)"))
    nodes = Counter(node.op_type for node in after.graph.node)
    assert (nodes["NhwcConv"], nodes["LinearAdd"]) == (1, 0)


SOURCE = "s = Conv (x, p, b)"  # in NHWC, and so is what reads it
SIZES_OF = ("o = Shape <start = 0, end = 2> (s)", "i = Shape <start = 2> (s)")
SIZED = "w = Concat <axis = 0> (o, l)"


def mode(coordinates: str, rounding: str) -> str:
    return f'mode = "nearest", coordinate_transformation_mode = "{coordinates}", nearest_mode = "{rounding}"'


FLOOR = mode("asymmetric", "floor")
POLICY = ', keep_aspect_ratio_policy = "not_larger"'


def resize(attributes: str = FLOOR, operands: str = "s, , times") -> str:
    return f"z = Resize <{attributes}> ({operands})"


@pytest.mark.parametrize(
    ("lines", "scales", "made"),
    [
        ((SOURCE, resize()), "1, 1, 2, 2", [(2, 2)]),
        ((SOURCE, resize()), "1, 1, 3, 1", [(3, 1)]),
        ((SOURCE, "a" + resize()[1:], "z = Relu (a)"), "1, 1, 1, 4", [(1, 4)]),
        ((SOURCE, resize('mode = "nearest"')), "1, 1, 2, 3", [(2, 3)]),
        ((SOURCE, resize(mode("half_pixel", "round_prefer_ceil"))), "1, 1, 3, 2", [(3, 2)]),
        ((SOURCE, resize(mode("pytorch_half_pixel", "round_prefer_floor"))), "1, 1, 2, 5", [(2, 5)]),
        ((SOURCE, resize(mode("half_pixel_symmetric", "round_prefer_floor"))), "1, 1, 2, 3", [(2, 3)]),
        ((SOURCE, resize(mode("asymmetric", "round_prefer_floor"))), "1, 1, 2, 2", [(2, 2)]),
        ((SOURCE, *SIZES_OF, "l = Mul (i, twice)", SIZED, resize(FLOOR, "s, , , w")), "1, 1, 1, 1", [(2, 3)]),
        ((resize(FLOOR, "x, , times"),), "1, 2, 2, 1", [(2, 2)]),
        ((SOURCE, resize(mode("asymmetric", "round_prefer_floor"))), "1, 1, 3, 3", []),
        ((SOURCE, resize(mode("asymmetric", "round_prefer_ceil"))), "1, 1, 2, 2", []),
        ((SOURCE, resize(mode("asymmetric", "ceil"))), "1, 1, 2, 2", []),
        ((SOURCE, resize(mode("half_pixel", "floor"))), "1, 1, 2, 2", []),
        ((SOURCE, resize(mode("align_corners", "floor"))), "1, 1, 2, 2", []),
        ((resize('mode = "linear"', "x, , times"),), "1, 2, 2, 1", []),
        ((SOURCE, resize('mode = "cubic"')), "1, 1, 2, 2", []),
        ((SOURCE, resize()), "1, 1, 1.5, 2", []),
        ((SOURCE, resize()), "1, 1, 0.5, 0.5", []),
        ((SOURCE, resize()), "1, 2, 2, 2", []),
        ((SOURCE, resize()), "2, 1, 2, 2", []),
        ((SOURCE, resize()), "1, 1, 1, 1", []),
        ((resize(FLOOR, "x, , times"),), "1, 1, 2, 2", []),
        ((SOURCE, resize(FLOOR + ", axes = [2, 3]", "s, , halves")), "1, 1, 1, 1", []),
        ((SOURCE, resize(mode("tf_crop_and_resize", "floor"), "s, region, times")), "1, 1, 2, 2", []),
        ((SOURCE, *SIZES_OF, "l = Add (i, more)", SIZED, resize(FLOOR, "s, , , w")), "1, 1, 1, 1", []),
        ((SOURCE, *SIZES_OF, "l = Add (i, i)", SIZED, resize(FLOOR + POLICY, "s, , , w")), "1, 1, 1, 1", []),
        (("s = Cast <to = 6> (x)", "a" + resize()[1:], "z = Cast <to = 1> (a)"), "1, 2, 2, 1", []),
    ],
    ids=["decoder", "down", "across", "defaults", "half pixel", "torch's half pixel", "symmetric", "asymmetric rounded",
         "sizes", "channels last", "asymmetric rounded, 3", "other rounding", "ceil", "half pixel, floor",
         "align corners", "linear", "cubic", "fractional", "smaller", "channels", "batch", "nothing", "NCHW", "axes",
         "crop", "sizes not proven", "sizes with a policy", "integers"],
)  # fmt: skip
def test_upsampling(lines: tuple[str, ...], scales: str, made: list[tuple[int, int]]) -> None:
    """What repeats pixels becomes UpsampleNearest, and nothing else; the numbers stay."""
    values = f"float[4] times = {{{scales}}}, float[2] halves = {{2, 2}}, int64[2] twice = {{2, 3}}"
    values += ", int64[2] more = {6, 4}, float[8] region = {0, 0, 0.2, 0.2, 1, 1, 1.5, 0.8}"
    text = graph(*lines).replace("<float[8,8,3,3]", f"<{values}, float[8,8,3,3]")
    before, after = lower(text.replace("(float[N,8,H,W] z)", "(float[O,P,Q,R] z)"))
    nodes = [node for node in after.graph.node if node.op_type == "UpsampleNearest"]
    found = [{a.name: a.i for a in node.attribute} for node in nodes]
    assert [(each["scale_height"], each["scale_width"]) for each in found] == made
    assert sum(node.op_type == "Resize" for node in after.graph.node) == 1 - len(made)
    np.testing.assert_allclose(run(after), run(before), rtol=1e-5, atol=1e-5)


def test_unet(tmp_path: Path) -> None:
    """All of a U-Net's products, its numbers unchanged."""
    folder = graph_fixtures.make_folder(tmp_path / "raw", "sd15-tiny-dynamo-20.unet")
    raw, made = folder / "unet/model.onnx", tmp_path / "made/unet/model.onnx"
    entry = optimize_component(raw, made, BODIES)
    assert entry["rules"]["fold_bias"] == 78
    assert entry["rules"]["linear_add"] == 158
    assert entry["rules"]["layer_norm"] == 16
    assert entry["rules"]["upsample_nearest"] == 3
    nodes = Counter(node.op_type for node in onnx.load(made, load_external_data=False).graph.node)
    assert {op: nodes[op] for op in ("NhwcConv", "LinearAdd", "BiasAdd", "MatMul", "LayerNormalization", "Resize")} == {
        "NhwcConv": 52, "LinearAdd": 158, "BiasAdd": 1, "MatMul": 0, "LayerNormalization": 0, "Resize": 0,
    }  # fmt: skip
    random = np.random.default_rng(0)
    shapes = {info.name: info.type.tensor_type.shape.dim for info in onnx.load(raw).graph.input}
    sizes = {"batch": 1, "height": 16, "width": 8, "sequence": 5}
    feed = {
        name: random.normal(0, 1, [sizes.get(d.dim_param, d.dim_value) for d in dims]).astype(np.float32)
        for name, dims in shapes.items()
    }
    feed["timestep"] = np.full(feed["timestep"].shape, 500, np.float32)
    before, after = (
        ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feed)[0] for path in (raw, made)
    )
    assert np.linalg.norm(after - before) < 1e-5 * np.linalg.norm(before)


@pytest.mark.parametrize(("query", "heads", "domain"), [
    ("N,S,320", 8, "com.microsoft"), ("N,S,512", 1, DOMAIN), ("N,S,2,3,512", 2, DOMAIN), ("N,S,K", 1, "com.microsoft"),
])  # fmt: skip
def test_wide_heads_are_ours_on_cuda(query: str, heads: int, domain: str) -> None:
    """The provider's kernel takes them, slowly; of a head of unknown size nothing is known against it."""
    attributes = f"num_heads = {heads}, scale = 0.1"
    text = f"""<ir_version: 10, opset_import: ["" : 21, "{DOMAIN}" : 1]>
        f (float[{query}] q, float[{query}] k) => (float[N,S,L] z) {{
        z = {DOMAIN}.MultiHeadAttention <{attributes}> (q, k, k) }}"""
    model = ir.from_onnx_text(text)
    lower_operators(model, TARGETS["cuda"])
    assert [node.domain for node in model.graph] == [domain]
