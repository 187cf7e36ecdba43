"""Quantization to 8 bits: scales and elements, which layers are taken, and the graph with QDQ against float32."""

from __future__ import annotations

import hashlib

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator

from fusion_passes import DOMAIN, weight_recipes
from fusion_passes.eight_bits.layers import CONVOLUTIONS, LINEARS, Layer, find_layers
from fusion_passes.eight_bits.qdq import insert_qdq
from fusion_passes.lower import bfloat16_layout, float8_output, quantized_conv, quantized_linear, quantized_nhwc_conv
from fusion_passes.operators import function_bodies
from fusion_passes.quantized_weights import FORMATS, OPERATIONS
from fusion_passes.shapes.infer import annotate
from sd_ort.core.metrics import relative_l2_error

ALL = CONVOLUTIONS | LINEARS


@pytest.mark.parametrize("name", FORMATS)
def test_scales_are_float16_numbers_that_reach_the_largest_magnitude(name: str) -> None:
    format_ = FORMATS[name]
    largest = np.concatenate([np.geomspace(1e-6, 1e4, 999), [0.0]]).astype(np.float32)
    scales = format_.scale(largest, round_up=True)
    assert (scales.astype(np.float16).astype(np.float32) == scales).all()
    assert (scales * format_.limit >= largest * (1 - 1e-6)).all()
    assert scales[-1] == 1
    with pytest.raises(ValueError, match="too large for"):
        format_.scale(1e8)
    with pytest.raises(ValueError, match="too large for"):
        format_.scale(np.inf)


def test_elements_are_rounded_saturated_and_without_negative_zero() -> None:
    values = np.array([0.5, 1.5, 2.5, -1e-9, -0.4, 300, -300], np.float32)
    assert FORMATS["int8"].quantize(values, np.float32(1)).tolist() == [0, 2, 2, 0, 0, 127, -127]
    float8 = FORMATS["float8"].quantize(np.array([17, 19, -1e-9, 1e6, -1e6], np.float32), np.float32(1))
    assert float8.astype(np.float32).tolist() == [16, 20, 0, 448, -448]
    assert not np.signbit(float8.astype(np.float32)[2])


@pytest.mark.parametrize(("name", "limit"), [("float8", 0.04), ("int8", 0.01)])
@pytest.mark.parametrize("axis", [0, 1])
def test_each_channel_of_a_weight_has_its_scale(name: str, limit: float, axis: int) -> None:
    weight = np.random.default_rng(0).standard_normal((48, 64)).astype(np.float32)
    weight *= np.geomspace(1e-3, 10, weight.shape[axis], dtype=np.float32).reshape((-1, 1) if axis == 0 else (1, -1))
    scale = OPERATIONS["channel_scale"]([name, axis, 1.0], weight)
    elements = OPERATIONS["quantize"]([name, axis], weight)
    assert elements.dtype == FORMATS[name].dtype
    restored = elements.astype(np.float32) * (scale[:, None] if axis == 0 else scale)
    errors = np.linalg.norm(restored - weight, axis=1 - axis) / np.linalg.norm(weight, axis=1 - axis)
    assert errors.max() < limit
    assert (OPERATIONS["channel_scale"]([name, axis, 2.0], weight) == 2 * scale).all()


RECORDED = [
    (["channel_scale", ["int8", 0, 1.0], "w"], (48,), "float32", "963a43c9"),
    (["channel_scale", ["float8", 1, 0.5], "w"], (64,), "float32", "b3e0b926"),
    (["channel_scale", ["float8", None, 1.0], "w"], (), "float32", "6df17245"),
    (["quantize", ["int8", 1], "w"], (48, 64), "int8", "af3c9479"),
    (["quantize", ["float8", None], "w"], (48, 64), "float8_e4m3fn", "a6956740"),
    (["stored_scales", ["int8", 0, 0, True], "w"], (48,), "float32", "8fc9c71b"),
    (["stored_scales", ["int4", 1, 32, True], "w"], (48, 2), "float32", "a83f6f70"),
    (["stored_scales", ["int4", 0, 16, False], "w"], (3, 64), "float32", "997eb2d8"),
    (["stored_elements", ["float8", 1, 0, True], "w"], (48, 64), "float8_e4m3fn", "87d90b7e"),
    (["stored_elements", ["int4", 1, 32, True], "w"], (48, 64), "int4", "db05915c"),
    (["stored_elements", ["int8", 0, 16, False], "w"], (48, 64), "uint8", "5296696b"),
    (["stored_zero_points", ["int4", 0, 16, False], "w"], (3, 64), "uint4", "4dc07c0d"),
]


@pytest.mark.parametrize(("recipe", "shape", "dtype", "digest"), RECORDED, ids=str)
def test_recipes_of_earlier_folders_give_the_same_bytes(
    recipe: list[object], shape: tuple[int, ...], dtype: str, digest: str
) -> None:
    """Digests of 76776069, where layers and stored weights had functions of their own."""
    weight = (np.arange(-1536, 1536, dtype=np.float32) ** 3 / 2**30).reshape(48, 64)
    weight[3] = 0
    values = weight_recipes.evaluate(recipe, {"w": weight}.__getitem__)
    assert (values.shape, values.dtype.name) == (shape, dtype)
    assert hashlib.sha256(values.tobytes()).hexdigest()[:8] == digest


def model_of(
    body: str, weights: str, inputs: str = "float[N,64,H,W] sample, float[N,S,64] text", opsets: str = '["" : 21]'
) -> ir.Model:
    """A graph with random weights for the declared values."""
    proto = onnx.parser.parse_model(
        f"<ir_version: 10, opset_import: {opsets}> g ({inputs}) => (float[] y) <{weights}> {{ {body} }}"
    )
    random = np.random.default_rng(0)
    for info in list(proto.graph.value_info):
        shape = [d.dim_value for d in info.type.tensor_type.shape.dim]
        values = (random.standard_normal(shape) / 10).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, info.name))
    del proto.graph.value_info[:]
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    model = ir.from_proto(proto)
    annotate(model.graph)
    return model


FILTERS = "float[64,64,3,3] k, float[64,64,3,3] k2, float[32,64,1,1] p, float[4,64,3,3] out"
SAME = "<pads = [1, 1, 1, 1]>"
CONV_OUT = f"y = Conv {SAME} (b, out)"
REJECTED = [
    ("last", f"a = Conv {SAME} (sample, k)  b = Conv {SAME} (a, k2)  {CONV_OUT}", FILTERS, 1, "last convolution"),
    ("narrow", f"a = Conv {SAME} (sample, k)  b = Conv {SAME} (a, k2)  {CONV_OUT}", FILTERS, 1, "fewer than 32"),
    ("shortcut", f"a = Conv (sample, p)  b = Conv {SAME} (sample, k)  y = Concat <axis = 1> (a, b)", FILTERS, 0,
     "shortcut"),
    ("grouped", "y = Conv <group = 2> (sample, q)", "float[64,32,1,1] q", 0, "groups"),
    ("text", "a = MatMul (text, w)  b = ReduceMean (a)  y = Mul (sample, b)", "float[64,64] w", 0, "latents"),
    ("odd", "t = Transpose <perm = [0, 2, 3, 1]> (sample)  y = MatMul (t, w)", "float[64,72] w", 0, "multiples of 16"),
    ("two tensors", "y = MatMul (text, sample)", "float[1] w", 0, "not constant"),
    ("transposed", "f = Flatten (sample)  y = Gemm <transA = 1> (f, w)", "float[64,64] w", 0, "transposed"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "body", "weights", "accepted", "reason"), REJECTED, ids=[each[0] for each in REJECTED]
)
def test_what_stays_in_its_precision(name: str, body: str, weights: str, accepted: int, reason: str) -> None:
    layers = find_layers(model_of(body, weights).graph, ALL)
    assert len(layers.accepted) == accepted
    assert reason in "; ".join(rejection.reason for rejection in layers.rejections)


def test_what_the_target_or_half_precision_excludes() -> None:
    model = model_of(f"a = Conv {SAME} (sample, k)  b = Conv {SAME} (a, k2)  {CONV_OUT}", FILTERS)
    first = next(iter(model.graph))
    assert "no kernel" in find_layers(model.graph, LINEARS).rejections[0].reason
    assert "largest float16" in find_layers(model.graph, ALL, {first}).rejections[0].reason


@pytest.mark.parametrize(("name", "limit"), [("float8", 0.06), ("int8", 0.02)])
def test_a_graph_with_qdq_is_near_its_source(name: str, limit: float) -> None:
    """Two layers share their input, quantized once. Recipes compute what the file has."""
    model = model_of(
        f"a = Conv {SAME} (sample, k)  t = Transpose <perm = [0, 2, 3, 1]> (a)  f = Flatten <axis = 3> (t)  "
        f"c = MatMul (f, w)  d = Gemm <transB = 1> (f, v, z)  y = Add (c, d)",
        "float[64,64,3,3] k, float[64,64] w, float[64,64] v, float[64] z",
    )
    weight_recipes.init_recipes(model)
    before = ir.to_proto(model).SerializeToString()
    layers = find_layers(model.graph, ALL)
    assert [layer.node.op_type for layer in layers.accepted] == ["MatMul", "Gemm"]  # the convolution is the last one
    originals = {
        name: value.const_value.numpy() for name, value in model.graph.initializers.items() if value.const_value
    }
    feed = {
        "sample": np.random.default_rng(1).standard_normal((2, 64, 6, 5)).astype(np.float32),
        "text": np.zeros((2, 3, 64), np.float32),
    }
    (expected,) = ort.InferenceSession(before, providers=["CPUExecutionProvider"]).run(None, feed)
    insert_qdq(model.graph, layers.accepted, FORMATS[name], {"f": 12.0})
    counts = [node.op_type for node in model.graph]
    assert counts.count("QuantizeLinear") == 1
    assert counts.count("DequantizeLinear") == 3
    assert "w" not in model.graph.initializers
    for each, value in model.graph.initializers.items():
        if (recipe := weight_recipes.recipe_of(value)) is not None:
            assert value.const_value is not None
            computed = weight_recipes.evaluate(recipe, originals.__getitem__)
            assert computed.tobytes() == value.const_value.numpy().tobytes(), each
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    (actual,) = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feed)
    error = relative_l2_error(actual, expected)
    assert 1e-4 < error < limit


def qdq_beside_numpy(format_: str, sample: np.ndarray, largest: float | None) -> tuple[ir.Model, np.ndarray]:
    """Return a graph of a convolution and a linear layer with QDQ, and its result as NumPy computes it.

    largest: of the magnitudes of the activations of both; None gives each its own, by a dynamic scale.
    """
    model = model_of(
        f"a = Conv {SAME} (sample, k, b)  t = Transpose <perm = [0, 2, 3, 1]> (a)  m = MatMul (t, w)  y = Add (m, c)",
        "float[48,64,3,3] k, float[48] b, float[48,32] w, float[32] c",
    )
    weight_recipes.init_recipes(model)
    k, b, w, c = (model.graph.initializers[name].const_value.numpy() for name in "kbwc")  # type: ignore[union-attr]
    assert len({*b.tolist(), *c.tolist(), 0.0}) == 48 + 32 + 1
    format8 = FORMATS[format_]

    def rounded(x: np.ndarray) -> np.ndarray:
        if largest is None:
            scale = np.maximum(np.abs(x).max() / np.float32(format8.limit), np.float32(2**-24))
        else:
            scale = format8.scale(largest, round_up=True)
        if format_ == "int8":  # QuantizeLinear saturates at -128, weights at -127
            return np.rint(x / scale).clip(-128, 127).astype(np.float32) * scale
        return format8.quantize(x, scale).astype(np.float32) * scale

    def rounded_weight(weight: np.ndarray, axis: int) -> np.ndarray:
        scale = OPERATIONS["channel_scale"]([format_, axis, 1.0], weight)
        scale = scale.reshape([-1 if i == axis else 1 for i in range(weight.ndim)])
        return OPERATIONS["quantize"]([format_, axis], weight).astype(np.float32) * scale

    padded = np.pad(rounded(sample), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    a = np.einsum("nchwij,ocij->nhwo", windows, rounded_weight(k, 0)) + b
    expected = rounded(a) @ rounded_weight(w, 1) + c
    layers = [
        Layer(node, axis) for node in model.graph for op, axis in (("Conv", 0), ("MatMul", 1)) if node.op_type == op
    ]
    insert_qdq(model.graph, layers, format8, None if largest is None else {"sample": largest, "t": largest})
    return model, expected


@pytest.mark.parametrize("magnitude", [1.0, 300.0, 0.0])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", FORMATS)
def test_qdq_in_two_evaluators_beside_numpy(name: str, dynamic: bool, magnitude: float) -> None:
    """ONNX's reference evaluator and ONNX Runtime compute what NumPy does.

    Constant scales saturate what is larger than the range; dynamic ones follow the activations, and zeros stay zeros.
    """
    sample = magnitude * np.random.default_rng(1).standard_normal((2, 64, 6, 5)).astype(np.float32)
    model, expected = qdq_beside_numpy(name, sample, None if dynamic else 3.0)
    assert model.graph.opset_imports[""] >= 19
    counts = [node.op_type for node in model.graph]
    assert (counts.count("QuantizeLinear"), counts.count("ReduceMax")) == (2, 2 * dynamic)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    feed = {"sample": sample, "text": np.zeros((2, 3, 64), np.float32)}
    options = ort.SessionOptions()
    if name == "float8":
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (runtime,) = session.run(None, feed)
    (reference,) = ReferenceEvaluator(proto).run(None, feed)
    # an activation beside a boundary of two elements may fall on the other side
    limit = 2e-3 if magnitude else 1e-6
    assert relative_l2_error(reference, expected) < limit
    assert relative_l2_error(runtime, expected) < limit
    assert relative_l2_error(runtime, reference) < limit


def test_dynamic_scales_are_no_constants_of_operators() -> None:
    """The layers that are not taken get no scale, and lowerings, whose scales are constants, leave the graph alone."""
    model = model_of(
        "c = MatMul (text, w)  d = MatMul (c, v)  y = MatMul (d, w)",
        "float[64,64] w, float[64,64] v",
        "float[N,S,64] text",
    )
    weight_recipes.init_recipes(model)
    nodes = list(model.graph)
    insert_qdq(model.graph, [Layer(nodes[1], 1)], FORMATS["float8"], None)
    before = [node.op_type for node in model.graph]
    assert [before.count(op) for op in ("MatMul", "ReduceMax", "QuantizeLinear", "DequantizeLinear")] == [3, 1, 1, 2]
    outcomes = quantized_linear.quantized_linear(model), float8_output.float8_outputs(model)
    assert "a scale is not constant" in {rejection.reason for rejection in outcomes[0].rejections}
    assert not any(outcome.counts for outcome in outcomes)
    assert [node.op_type for node in model.graph] == before


def test_recipes_of_8_bits_have_no_delta() -> None:
    with pytest.raises(ValueError, match="not linear"):
        weight_recipes.weight_delta(["quantize", ["int8", 0], "w"], {"w": np.zeros((4, 4), np.float32)})
    assert weight_recipes.source_shape(["transpose", [1, 0], ["quantize", ["int8", 0], "w"]], (3, 4)) == (4, 3)
    stored = weight_recipes.dump({"x": ["channel_scale", ["float8", 1, 0.5], "w"]})
    assert weight_recipes.load(stored) == {"x": ["channel_scale", ["float8", 1, 0.5], "w"]}
    assert FORMATS["float8"].dtype == ml_dtypes.float8_e4m3fn


LINEAR_GRAPHS = {
    "MatMul": ("y = MatMul (x, w)", "float[64,32] w", {"gelu": 0, "gated": 0}),
    "LinearAdd": ("y = sd_ort.LinearAdd (x, w, b, skip)", "float[64,32] w, float[32] b", {"gelu": 0, "gated": 0}),
    "gelu": ("y = sd_ort.LinearAdd <gelu = 1> (x, w, b)", "float[64,32] w, float[32] b", {"gelu": 1, "gated": 0}),
    "LinearSplitGelu": (
        "y = sd_ort.LinearSplitGelu (x, w, b)", "float[64,64] w, float[64] b", {"gelu": 0, "gated": 1}
    ),
    "BiasSplitGelu": (
        "p = MatMul (x, w)  y = sd_ort.BiasSplitGelu (p, b)", "float[64,64] w, float[64] b", {"gelu": 0, "gated": 1}
    ),
}  # fmt: skip
LINEAR_INPUTS = "float[N,S,64] x, float[N,S,32] skip"
OPSETS = '["" : 21, "sd_ort" : 1]'


def linear_model(name: str) -> ir.Model:
    body, weights, _ = LINEAR_GRAPHS[name]
    model = model_of(body, weights, LINEAR_INPUTS, OPSETS)
    weight_recipes.init_recipes(model)
    return model


def run_with_bodies(model: ir.Model, feed: dict[str, np.ndarray]) -> np.ndarray:
    copy = model.clone()
    function_bodies.attach(copy, [node for node in copy.graph if node.domain == DOMAIN])
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    proto = ir.to_proto(copy)
    onnx.checker.check_model(proto)
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, feed)[
        0
    ]


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("name", LINEAR_GRAPHS)
def test_linears_between_qdq_are_lowered(name: str, format_: str, per_channel: bool) -> None:
    """The lowered operator computes what the graph with QDQ does, and its weights follow from the checkpoint's."""
    model = linear_model(name)
    originals = {n: v.const_value.numpy() for n, v in model.graph.initializers.items() if v.const_value is not None}
    random = np.random.default_rng(3)
    feed = {"x": random.standard_normal((2, 5, 64)), "skip": random.standard_normal((2, 5, 32))}
    feed = {key: value.astype(np.float32) for key, value in feed.items()}
    layers = find_layers(model.graph, quantized_linear.LINEARS)
    assert len(layers.accepted) == 1
    insert_qdq(model.graph, layers.accepted, FORMATS[format_], {"x": 3.0}, per_channel)
    expected = run_with_bodies(model, feed)
    outcome = quantized_linear.quantized_linear(model)
    assert outcome.counts == {"quantized_linear": 1}
    assert [node.op_type for node in model.graph] == ["QuantizeLinear", "QuantizedLinear"]
    node = next(node for node in model.graph if node.op_type == "QuantizedLinear")
    assert {key: value.as_int() for key, value in node.attributes.items()} == LINEAR_GRAPHS[name][2]
    assert node.inputs[2] is not None
    assert node.inputs[2].shape == ((node.inputs[1].shape[0],) if per_channel else ())  # type: ignore[union-attr,index]
    assert (node.outputs[0].name, node.outputs[0].dtype) == ("y", ir.DataType.FLOAT)
    for each, value in model.graph.initializers.items():
        if (recipe := weight_recipes.recipe_of(value)) is not None:
            assert value.const_value is not None
            computed = weight_recipes.evaluate(recipe, originals.__getitem__)
            assert computed.tobytes() == value.const_value.numpy().tobytes(), each
    np.testing.assert_allclose(run_with_bodies(model, feed), expected, rtol=1e-4, atol=1e-4)


UNLOWERED = [
    ("not dequantized", "w = DequantizeLinear (e, t)  y = MatMul (x, w)"),
    ("not dequantized", "d = DequantizeLinear (q, s)  y = MatMul (d, other)"),
    ("zero point", "d = DequantizeLinear (q, s, z)  w = DequantizeLinear (e, t)  y = MatMul (d, w)"),
    ("not a constant of 2 axes", "d = DequantizeLinear (q, s)  p = DequantizeLinear (f, s)  y = MatMul (d, p)"),
    ("more than one scale", "d = DequantizeLinear <axis = 2> (q, r)  w = DequantizeLinear (e, t)  y = MatMul (d, w)"),
    ("those of the output", "d = DequantizeLinear (q, s)  w = DequantizeLinear <axis = 0> (e, r)  y = MatMul (d, w)"),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "body"), UNLOWERED)
def test_other_linears_are_not_lowered(reason: str, body: str) -> None:
    model = ir.from_proto(
        onnx.parser.parse_model(
            f"""<ir_version: 10, opset_import: ["" : 21]>
            g (int8[N,S,4] q, float[N,S,4] x, int8[4,2] f, float[4,2] other) => (float[N,S,2] y)
            <int8[4,2] e = {{1, 2, 3, 4, 5, 6, 7, 8}}, float s = {{0.5}}, float t = {{0.25}}, int8 z = {{1}},
             float[4] r = {{1, 2, 3, 4}}> {{ {body} }}"""
        )
    )
    annotate(model.graph)
    before = [node.op_type for node in model.graph]
    outcome = quantized_linear.quantized_linear(model)
    assert reason in "; ".join(rejection.reason for rejection in outcome.rejections)
    assert [node.op_type for node in model.graph] == before


SQUARE, PIXEL = "float[48,64,3,3] k", "float[48,64,1,1] k"
CONVOLUTIONS_BETWEEN_QDQ = [
    (f"y = Conv {SAME} (sample, k, b)", f"{SQUARE}, float[48] b", {"stride": 1, "x_last": 0, "y_last": 0}),
    ("y = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (sample, k)", SQUARE, {"stride": 2, "x_last": 0, "y_last": 0}),
    ("z = Conv (sample, k, b)  l = Transpose <perm = [0, 2, 3, 1]> (z)  y = Relu (l)", f"{PIXEL}, float[48] b",
     {"stride": 1, "x_last": 0, "y_last": 1}),
    ("t = Transpose <perm = [0, 2, 3, 1]> (sample)  r = Relu (t)  x = Transpose <perm = [0, 3, 1, 2]> (r)  "
     "y = Conv (x, k)", PIXEL, {"stride": 1, "x_last": 1, "y_last": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("body", "weights", "attributes"), CONVOLUTIONS_BETWEEN_QDQ)
def test_convolutions_between_qdq_are_lowered(body: str, weights: str, attributes: dict[str, int]) -> None:
    """To the CPU's operator, which computes what the graph with QDQ does; Transposes around 1 x 1 filters go, that in
    front of QuantizeLinear too."""
    model = model_of(body, weights, "float[N,64,H,W] sample")
    (conv,) = (node for node in model.graph if node.op_type == "Conv")
    feed = {"sample": np.random.default_rng(3).standard_normal((2, 64, 6, 5)).astype(np.float32)}
    x = conv.inputs[0]
    assert x is not None
    x.name = "x"
    if x.is_graph_input():
        feed = {"x": feed["sample"]}
    insert_qdq(model.graph, [Layer(conv, 0)], FORMATS["int8"], {"x": 3.0})
    expected = run_with_bodies(model, feed)
    assert quantized_conv.quantized_conv(model).counts == {"quantized_conv": 1}
    bfloat16_layout.bfloat16_layout(model)
    assert [node.op_type for node in model.graph if node.op_type != "Relu"] == [
        *(["Transpose"] if attributes["x_last"] else []), "QuantizeLinear", "QuantizedConv"
    ]  # fmt: skip
    node = next(node for node in model.graph if node.op_type == "QuantizedConv")
    assert {key: value.as_int() for key, value in node.attributes.items()} == attributes
    np.testing.assert_allclose(run_with_bodies(model, feed), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("reason", "attributes", "weight"),
    [
        ("strides", "<pads = [1, 1, 1, 1], strides = [3, 3]>", "3,3"),
        ("pads", "", "3,3"),
        ("pads", "<pads = [1, 1, 1, 1]>", "1,1"),
        ("dilations", "<pads = [2, 2, 2, 2], dilations = [2, 2]>", "3,3"),
        ("3 x 3", "<pads = [2, 2, 2, 2]>", "5,5"),
        ("one of its operands", "<pads = [1, 1, 1, 1]>", "3,3"),
    ],
)
def test_other_convolutions_are_not_lowered(reason: str, attributes: str, weight: str) -> None:
    """They are rejected for the CPU too, so that the graph has no QDQ around a float32 layer."""
    model = model_of(f"y = Conv {attributes} (sample, k)", f"float[48,64,{weight}] k", "float[N,64,H,W] sample")
    (conv,) = model.graph
    sample = conv.inputs[0]
    if reason != "one of its operands":
        assert reason in (quantized_conv.kernel_reject_reason(conv) or "")
    insert_qdq(model.graph, [Layer(conv, 0)], FORMATS["int8"], {"sample": 3.0})
    if reason == "one of its operands":
        conv.replace_input_with(0, sample)
    outcome = quantized_conv.quantized_conv(model)
    assert not outcome.counts
    assert reason in outcome.rejections[0].reason
    assert model.graph[-1] is conv


NHWC = "sd_ort.NhwcConv <pads = [1, 1, 1, 1]>"
NHWC_SQUARE = "float[48,3,3,64] k, float[48] b"
NHWC_IMAGES = "float[N,H,W,64] sample, float[N,H,W,48] image"


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        (f"y = {NHWC} (sample, k)", 4),
        (f"y = {NHWC} (sample, k, b)", 4),
        (f"y = {NHWC} (sample, k, b, image)", 5),
        (f"c = {NHWC} (sample, k)  y = sd_ort.BiasAdd (c, b, image)", 5),
        (f"c = {NHWC} (sample, k)  d = sd_ort.BiasAdd (c, b, image)  y = Add (c, d)", 4),  # read elsewhere
        (f"c = {NHWC} (sample, k)  y = sd_ort.BiasAdd (c, b, c)", 4),  # adds itself
        (f"c = {NHWC} (sample, k)  y = sd_ort.BiasAdd (image, b, c)", 4),  # the convolution is the image
        (f"c = {NHWC} (sample, k, b)  y = sd_ort.BiasAdd (c, b, image)", 4),  # two biases
    ],
)
@pytest.mark.parametrize("per_channel", [False, True])
def test_channels_last_convolutions_between_qdq_are_lowered(body: str, inputs: int, per_channel: bool) -> None:
    """To the GPU's operator, which computes what the graph with QDQ does, and adds what alone follows."""
    model = model_of(body, NHWC_SQUARE, NHWC_IMAGES)
    (conv,) = (node for node in model.graph if node.op_type == "NhwcConv")
    random = np.random.default_rng(3)
    feed = {"sample": random.standard_normal((2, 6, 5, 64)), "image": random.standard_normal((2, 6, 5, 48))}
    feed = {name: array.astype(np.float32) for name, array in feed.items()}
    assert quantized_nhwc_conv.kernel_reject_reason(conv) is None
    insert_qdq(model.graph, [Layer(conv, 0)], FORMATS["float8"], {"sample": 3.0}, per_channel)
    expected = run_with_bodies(model, feed)
    assert quantized_nhwc_conv.quantized_nhwc_conv(model).counts == {"quantized_nhwc_conv": 1}
    (node,) = (node for node in model.graph if node.op_type == "QuantizedNhwcConv")
    assert len(node.inputs) == inputs
    assert ("BiasAdd" in {node.op_type for node in model.graph}) == ("BiasAdd" in body and inputs == 4)
    np.testing.assert_allclose(run_with_bodies(model, feed), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("reason", "attributes", "weight"),
    [
        ("strides", "<pads = [1, 1, 1, 1], strides = [2, 2]>", "3,3"),
        ("pads", "", "3,3"),
        ("pads", "<pads = [0, 0, 2, 2]>", "3,3"),
        ("dilations", "<pads = [1, 1, 1, 1], dilations = [2, 2]>", "3,3"),
        ("filters are not 3 x 3", "<pads = [0, 0, 0, 0]>", "1,1"),
        ("no Relu", "<pads = [1, 1, 1, 1], relu = 1>", "3,3"),
    ],
)
def test_other_channels_last_convolutions_are_not_lowered(reason: str, attributes: str, weight: str) -> None:
    model = model_of(
        f"y = sd_ort.NhwcConv {attributes} (sample, k)", f"float[48,{weight},64] k", "float[N,H,W,64] sample"
    )
    (conv,) = model.graph
    assert reason in (quantized_nhwc_conv.kernel_reject_reason(conv) or "")
    insert_qdq(model.graph, [Layer(conv, 0)], FORMATS["float8"], {"sample": 3.0})
    outcome = quantized_nhwc_conv.quantized_nhwc_conv(model)
    assert not outcome.counts
    assert reason in outcome.rejections[0].reason
    assert model.graph[-1] is conv


# Producers of a float32 value `a` from x and `other` (N, S, 64), with an output in float8.
PRODUCERS = {
    "SkipLayerNormalization": "a, m, i, sum = sd_ort.SkipLayerNormalization <epsilon = 1.0e-5> (x, other, g, b)",
    "GroupNorm": "image = Reshape (x, four)  a = sd_ort.GroupNorm <groups = 4, epsilon = 1.0e-5, activation = 0, "
    "channels_last = 1> (image, c, d)",
    "SkipGroupNorm": "image = Reshape (x, four)  a, sum = sd_ort.SkipGroupNorm <groups = 4, epsilon = 1.0e-5, "
    "activation = 1, channels_last = 1> (image, c, d, image)",
    "MultiHeadAttention": "a = sd_ort.MultiHeadAttention <num_heads = 2, scale = 0.2> (x, other, x)",
    "BiasSplitGelu": "a = sd_ort.BiasSplitGelu (x, b)",
    "AdaptiveNorm": "a, sum = sd_ort.AdaptiveNorm <epsilon = 1.0e-5, rms = 0> (x, g, b)",
}
FLOAT8 = "QuantizeLinear <output_dtype = 17>"
SCALES = (
    "float s = {0.0625}, float t = {0.125}, float[2] two = {0.1, 0.2}, float8e4m3fn z = {0}, int64[3] row = {0, -1, 4}"
)
SCALES += ", int64[4] four = {0, -1, 4, 16}"


def float8_model(body: str, end: str) -> ir.Model:
    """A graph of `body` and `end`, which computes y; constants are around 1, distinct."""
    proto = onnx.parser.parse_model(
        f"<ir_version: 10, opset_import: {OPSETS}> "
        f"g (float[N,S,64] x, float[N,S,64] other, float v) => (float[] y) <{SCALES}> {{ {body}  {end} }}"
    )
    random = np.random.default_rng(0)
    for name, count in (("g", 64), ("b", 64), ("c", 16), ("d", 16)):
        numbers = random.normal(1, 0.3, count).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(numbers, name))
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    model = ir.from_proto(proto)
    annotate(model.graph)
    return model


def float8_feed() -> dict[str, np.ndarray]:
    random = np.random.default_rng(5)
    feed = {name: random.standard_normal((2, 8, 64)).astype(np.float32) for name in ("x", "other")}
    return feed | {"v": np.array(0.0625, np.float32)}


@pytest.mark.parametrize("reshape", ["", "r = Reshape (a, row)  "])
@pytest.mark.parametrize("name", PRODUCERS)
def test_producers_write_float8(name: str, reshape: str) -> None:
    """Equal outputs with one node less; a Reshape before the quantization moves behind it."""
    end = f"{reshape}q = {FLOAT8} ({'r' if reshape else 'a'}, s)  y = DequantizeLinear (q, s)"
    model = float8_model(PRODUCERS[name], end)
    expected = run_with_bodies(model, float8_feed())
    assert float8_output.float8_outputs(model).counts == {"float8_output": 1}
    nodes = [node for node in model.graph if node.op_type != "Reshape"]
    assert [node.op_type for node in nodes] == [name, "DequantizeLinear"]
    assert nodes[0].attributes["quantized_scale"].as_float() == 0.0625
    assert nodes[0].outputs[-1].dtype == ir.DataType.FLOAT8E4M3FN
    assert not nodes[0].outputs[0].uses()
    np.testing.assert_array_equal(run_with_bodies(model, float8_feed()), expected)


def test_a_producer_whose_output_is_read_elsewhere_writes_both() -> None:
    """Two quantizations by one scale become one output."""
    end = f"q = {FLOAT8} (a, s)  p = {FLOAT8} (a, s)  u = DequantizeLinear (q, s)  w = DequantizeLinear (p, s)"
    model = float8_model(PRODUCERS["SkipLayerNormalization"], f"{end}  e = Add (u, w)  y = Sub (a, e)")
    expected = run_with_bodies(model, float8_feed())
    assert float8_output.float8_outputs(model).counts == {"float8_output": 2}
    (norm,) = (node for node in model.graph if node.op_type == "SkipLayerNormalization")
    assert [len(list(output.uses())) for output in norm.outputs] == [1, 0, 0, 0, 2]
    np.testing.assert_array_equal(run_with_bodies(model, float8_feed()), expected)


NORM = "SkipLayerNormalization <epsilon = 1.0e-5> (x, other, g, b)"
NOT_FUSED = [
    ("not computed by an operator", "a = Add (x, other)", f"q = {FLOAT8} (a, s)"),
    ("not computed by an operator", "a = sd_ort.BiasAdd (x, b, other)", f"q = {FLOAT8} (a, s)"),
    ("not computed by an operator", "", f"q = {FLOAT8} (x, s)"),
    ("another output", f"n, m, i, a = sd_ort.{NORM}", f"q = {FLOAT8} (a, s)"),
    ("not a constant number", PRODUCERS["BiasSplitGelu"], f"q = {FLOAT8} (a, v)"),
    ("not a constant number", "a = sd_ort.BiasSplitGelu (x, b)  h = Reshape (a, two_columns)",
     "q = QuantizeLinear <output_dtype = 17, axis = 0> (h, two)"),
    ("zero point", PRODUCERS["MultiHeadAttention"], "q = QuantizeLinear (a, s, z)"),
    ("not float8e4m3fn", PRODUCERS["GroupNorm"], "q = QuantizeLinear <output_dtype = 3> (a, s)"),
    ("not float8e4m3fn", PRODUCERS["GroupNorm"], "q = QuantizeLinear <output_dtype = 19> (a, s)"),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "body", "end"), NOT_FUSED)
def test_other_quantizations_stay(reason: str, body: str, end: str) -> None:
    model = float8_model(body.replace("two_columns", "row"), f"{end}  y = DequantizeLinear (q, s)")
    before = [(node.op_type, len(node.outputs)) for node in model.graph]
    outcome = float8_output.float8_outputs(model)
    assert [reason in rejection.reason for rejection in outcome.rejections] == [True]
    assert not outcome.counts
    assert [(node.op_type, len(node.outputs)) for node in model.graph] == before


def test_a_second_scale_stays_a_quantization() -> None:
    end = f"q = {FLOAT8} (a, s)  p = {FLOAT8} (a, t)  u = DequantizeLinear (q, s)  w = DequantizeLinear (p, t)"
    model = float8_model(PRODUCERS["BiasSplitGelu"], f"{end}  y = Sub (u, w)")
    expected = run_with_bodies(model, float8_feed())
    outcome = float8_output.float8_outputs(model)
    assert outcome.counts == {"float8_output": 1}
    assert "another scale" in outcome.rejections[0].reason
    np.testing.assert_array_equal(run_with_bodies(model, float8_feed()), expected)


PRODUCTS = {
    "gated": ("a = sd_ort.LinearSplitGelu (x, w, b)  y = MatMul (a, k)", 1, ""),
    "read elsewhere": (
        "a = sd_ort.LinearSplitGelu (x, w, b)  e = MatMul (a, k)  y = Add (a, e)", 0, "other consumers"
    ),
    "without a gate": ("a = sd_ort.LinearAdd (x, k2, c, skip)  y = MatMul (a, k)", 1, ""),
    "with GELU": ("a = sd_ort.LinearAdd <gelu = 1> (x, k2, c)  y = MatMul (a, k)", 1, ""),
    "reshaped": ("a = sd_ort.LinearAdd (x, k2, c, skip)  r = Reshape (a, same)  y = MatMul (r, k)", 1, ""),
    "reshaped and read elsewhere": (
        "a = sd_ort.LinearAdd (x, k2, c, skip)  r = Reshape (a, same)  e = MatMul (r, k)  y = Add (r, e)",
        0, "other consumers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_write_float8(name: str) -> None:
    body, fused, reason = PRODUCTS[name]
    weights = "float[64,64] w, float[64] b, float[32,32] k, float[64,32] k2, float[32] c, int64[3] same = {0, 0, -1}"
    model = model_of(body, weights, LINEAR_INPUTS, OPSETS)
    weight_recipes.init_recipes(model)
    layers = find_layers(model.graph, quantized_linear.LINEARS).accepted
    insert_qdq(model.graph, layers, FORMATS["float8"], {"x": 3.0, "a": 4.0, "r": 4.0}, per_channel=False)
    quantized_linear.quantized_linear(model)
    random = np.random.default_rng(3)
    feed = {"x": random.standard_normal((2, 5, 64)), "skip": random.standard_normal((2, 5, 32))}
    feed = {key: value.astype(np.float32) for key, value in feed.items()}
    expected = run_with_bodies(model, feed)
    outcome = float8_output.float8_outputs(model)
    assert outcome.counts["float8_output"] == fused
    assert sum(node.op_type == "QuantizeLinear" for node in model.graph) == 2 - fused
    assert (reason in "; ".join(rejection.reason for rejection in outcome.rejections)) is True
    np.testing.assert_array_equal(run_with_bodies(model, feed), expected)
