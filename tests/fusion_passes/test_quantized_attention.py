"""Self-attention in float8: which attention is taken, and the graph beside the one with QDQ."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from test_eight_bits import OPSETS, model_of, run_with_bodies

from fusion_passes import weight_recipes
from fusion_passes.eight_bits.layers import find_layers
from fusion_passes.eight_bits.qdq import insert_attention_qdq, insert_qdq
from fusion_passes.lower import float8_output, quantized_attention, quantized_linear
from fusion_passes.quantized_weights import FORMATS
from sd_ort.core.metrics import relative_l2_error

WEIGHTS = (
    "float[64,192] w, float[64,64] k, float[192] b, int64[5] packed = {0, 0, 4, 3, 16}, int64[3] flat = {0, 0, -1}"
)
INPUTS = "float[N,S,64] x, float[N,1,S,S] mask"
QKV = "p = MatMul (x, w)  h = Reshape (p, packed)"
ATTENTION = "a = sd_ort.MultiHeadAttention <num_heads = 4, scale = 0.4> (h)"
END = "y = MatMul (a, k)"


def quantize(body: str, weights: str = WEIGHTS) -> tuple[ir.Model, list[ir.Node]]:
    """Return a graph whose linears and attentions are quantized, with the attentions still in float32, and these."""
    model = model_of(body, weights, INPUTS, OPSETS)
    weight_recipes.init_recipes(model)
    layers = find_layers(model.graph, quantized_linear.LINEARS, text_layers=True).accepted
    attentions = quantized_attention.attentions(model.graph, {layer.node for layer in layers})
    largest = dict.fromkeys((str(layer.x.name) for layer in layers), 4.0) | {"h": 3.0}
    insert_qdq(model.graph, layers, FORMATS["float8"], largest, per_channel=False)
    insert_attention_qdq(model.graph, attentions, FORMATS["float8"], largest)
    quantized_linear.quantized_linear(model)
    float8_output.float8_outputs(model)
    return model, attentions


@pytest.mark.parametrize(
    "body",
    [
        f"{QKV}  {ATTENTION}  {END}",
        f"p = sd_ort.LinearAdd (x, w, b)  h = Reshape (p, packed)  {ATTENTION}  r = Reshape (a, flat)  "
        "y = MatMul (r, k)",
        f"{QKV}  {ATTENTION}  u = MatMul (a, k)  v = MatMul (a, k)  y = Sub (u, v)",
    ],
)
def test_attention_between_quantized_layers(body: str) -> None:
    """The scale of the packed tensor goes into the scales of the attention; nothing is quantized by a node of its own
    but the input."""
    model, attentions = quantize(body)
    assert len(attentions) == 1
    x = np.random.default_rng(1).standard_normal((2, 5, 64)).astype(np.float32)
    feed = {"x": x, "mask": np.zeros((2, 1, 5, 5), np.float32)}
    expected = run_with_bodies(model, feed)
    assert quantized_attention.quantized_attention(model).counts == {"quantized_attention": 1}
    operators = [node.op_type for node in model.graph]
    assert operators.count("QuantizeLinear") == 1
    assert not {"DequantizeLinear", "MultiHeadAttention"} & set(operators)
    (node,) = (node for node in model.graph if node.op_type == "QuantizedAttention")
    assert {node.inputs[0].dtype, node.outputs[0].dtype} == {ir.DataType.FLOAT8E4M3FN}  # type: ignore[union-attr]
    input_scale = float(FORMATS["float8"].scale(3.0, round_up=True))
    assert node.attributes["scale"].as_float() == pytest.approx(0.4 * input_scale**2)
    # A product is rounded once more or less by float32: an element of float8 may be the next one.
    assert np.abs(expected).max() > 0 or "Sub" in body
    if "Sub" not in body:
        assert relative_l2_error(run_with_bodies(model, feed), expected) < 2e-3


@pytest.mark.parametrize(
    ("body", "weights"),
    [
        (f"{QKV}  a = sd_ort.MultiHeadAttention <num_heads = 4, scale = 0.4> (h, , , , , mask)  {END}", WEIGHTS),
        (f"{QKV}  a = sd_ort.MultiHeadAttention <num_heads = 4, unidirectional = 1> (h)  {END}", WEIGHTS),
        (f"q = MatMul (x, k)  a = sd_ort.MultiHeadAttention <num_heads = 4> (q, q, q)  {END}", WEIGHTS),
        (f"{QKV}  {ATTENTION}  u = MatMul (a, k)  y = Add (u, a)", WEIGHTS),
        (f"{QKV}  {ATTENTION}  y = Identity (a)", WEIGHTS),
        (f"{QKV}  {ATTENTION}  e = ReduceSum (p)  u = MatMul (a, k)  y = Add (u, e)", WEIGHTS),
        (f"{QKV}  {ATTENTION}  e = ReduceSum (h)  u = MatMul (a, k)  y = Add (u, e)", WEIGHTS),
        (f"p = Concat <axis = 2> (x, x, x)  h = Reshape (p, packed)  {ATTENTION}  {END}", WEIGHTS),
        (f"{QKV}  a = sd_ort.MultiHeadAttention <num_heads = 8> (h)  {END}", WEIGHTS.replace("4, 3, 16", "8, 3, 8")),
        (
            f"{QKV}  a = sd_ort.MultiHeadAttention <num_heads = 1> (h)  {END}",
            WEIGHTS.replace("4, 3, 16", "1, 3, 144").replace("64,192", "64,432").replace("[64,64] k", "[144,64] k"),
        ),
    ],
    ids="mask causal separate added output projected packed concatenated head8 head144".split(),
)
def test_other_attention_stays(body: str, weights: str) -> None:
    model, attentions = quantize(body, weights)
    assert not attentions
    before = [node.op_type for node in model.graph]
    assert not quantized_attention.quantized_attention(model).counts
    assert [node.op_type for node in model.graph] == before


@pytest.mark.parametrize(
    ("query", "attributes", "reason"),
    [
        ("DequantizeLinear (q, s)", "num_heads = 4", "not in float8 alone"),
        ("DequantizeLinear (q, s, z)", "num_heads = 4, quantized_scale = 0.5", "zero point"),
        ("DequantizeLinear (q, v)", "num_heads = 4, quantized_scale = 0.5", "not a constant number"),
        ("DequantizeLinear (i, s)", "num_heads = 4, quantized_scale = 0.5", "not in float8"),
        ("DequantizeLinear (q, s)", "num_heads = 4, quantized_scale = 0.5", "not packed"),
    ],
)
def test_dequantized_attention_of_another_form_stays(query: str, attributes: str, reason: str) -> None:
    operands = "(h, , , , , mask)" if reason == "not packed" else "(h)"
    body = f"h = {query}  a, o = sd_ort.MultiHeadAttention <{attributes}> {operands}  y = "
    body += "Identity (a)" if "alone" in reason else "DequantizeLinear (o, s)"
    inputs = "float8e4m3fn[N,S,4,3,16] q, int8[N,S,4,3,16] i, float[N,1,S,S] mask, float v"
    model = model_of(body, "float s = {0.5}, float8e4m3fn z = {0}", inputs, OPSETS)
    outcome = quantized_attention.quantized_attention(model)
    assert [reason in rejection.reason for rejection in outcome.rejections] == [True]
    assert not outcome.counts
