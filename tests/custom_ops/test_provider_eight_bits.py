"""QuantizeLinear and QuantizedLinear on our provider, whose simulated device runs their kernels for CPUs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import diffusers
import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import NodeProto, TensorProto, helper
from provider_sessions import assigned_operators, session_of
from safetensors.numpy import load_file, save_file

from fusion_passes import weight_recipes
from fusion_passes.operators import function_bodies
from fusion_passes.quantized_weights import FORMATS
from sd_ort import demo
from sd_ort.core.metrics import relative_l2_error
from sd_ort.demo.styles import lora_path
from sd_ort.runtime.components import Components
from sd_ort.runtime.ort_values import read_value
from sd_ort.runtime.session_device import SessionDevice
from sd_ort.stages import optimize
from sd_ort.weights import update_graph
from sd_ort.weights.lora import LoraManager
from sd_ort.weights.lora_files import read_adapter
from sd_ort.weights.updates import Deltas

ELEMENTS = {"float8": TensorProto.FLOAT8E4M3FN, "int8": TensorProto.INT8}
FLOATS = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


def run_nodes(
    nodes: list[NodeProto], constants: list[TensorProto], inputs: dict[str, np.ndarray], dtype: str, provider: str
) -> np.ndarray:
    """Return y of a graph of `inputs` [n, s, ..., columns], all of whose nodes the provider must take."""
    shapes = {name: [*"nsw"[: x.ndim - 1], x.shape[-1]] for name, x in inputs.items()}
    values = [helper.make_tensor_value_info(name, FLOATS[dtype], shape) for name, shape in shapes.items()]
    y = helper.make_tensor_value_info("y", FLOATS[dtype], None)
    graph = helper.make_graph(nodes, "layer", values, [y], constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("sd_ort", 1)]
    model = ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))
    function_bodies.attach(model, [node for node in model.graph if node.domain == "sd_ort"])
    session = session_of(ir.to_proto(model).SerializeToString(), provider)
    assert sum(assigned_operators(session)["SdOrtSimulated"].values()) == len(nodes)
    result: np.ndarray = session.run(None, inputs)[0]
    return result


@pytest.mark.parametrize("columns", [8, 3])  # whole vectors, and single elements
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_gated_layer(name: str, dtype: str, columns: int, provider: str) -> None:
    """x is quantized by one scale; NaN and what exceeds the format are as ONNX defines them for float8."""
    format_, random = FORMATS[name], np.random.default_rng(0)
    x = (random.standard_normal((2, 5, columns)) * 3).astype(dtype)
    x[0, 0, 0] = 100  # saturates
    weight = format_.quantize(random.standard_normal((12, columns)).astype(np.float32) * 20, np.float32(1))
    bias = random.standard_normal(12).astype(dtype)
    constants = [
        helper.make_tensor("s", FLOATS[dtype], [], np.array([0.0625], dtype).tobytes(), raw=True),
        helper.make_tensor("w", ELEMENTS[name], weight.shape, weight.tobytes(), raw=True),
        helper.make_tensor("scale", TensorProto.FLOAT, [], np.array([0.0625 / 16], np.float32).tobytes(), raw=True),
        helper.make_tensor("bias", FLOATS[dtype], bias.shape, bias.tobytes(), raw=True),
    ]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s"], ["q"], output_dtype=ELEMENTS[name]),
        helper.make_node("QuantizedLinear", ["q", "w", "scale", "bias"], ["y"], domain="sd_ort", gelu=0, gated=1),
    ]
    y = run_nodes(nodes, constants, {"x": x}, dtype, provider)
    limit = 448.0 if name == "float8" else 127.0
    scaled = (x.astype(np.float32) / 0.0625).clip(-limit, limit)
    q = np.rint(scaled) if name == "int8" else scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    v = q @ weight.astype(np.float32).T * np.float32(0.0625 / 16) + bias.astype(np.float32)
    left, right = np.split(v.astype(np.float64), 2, axis=-1)
    erf = np.vectorize(math.erf)
    expected = left * 0.5 * right * (1 + erf(right / np.sqrt(2)))
    tolerance = 1e-5 if dtype == "float32" else 2e-3
    np.testing.assert_allclose(y, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_norm_writes_float8(dtype: str, provider: str) -> None:
    """Only the output in float8 is read: the kernel is not asked for the other one. A Reshape of float8 is a view."""
    random = np.random.default_rng(0)
    x, skip, gamma, beta = (random.standard_normal(shape).astype(dtype) for shape in ((2, 5, 16), (2, 5, 16), 16, 16))
    constants = [
        helper.make_tensor(name, FLOATS[dtype], array.shape, array.tobytes(), raw=True)
        for name, array in (("g", gamma), ("b", beta))
    ]
    constants.append(helper.make_tensor("row", TensorProto.INT64, [2], [-1, 16]))
    weight = FORMATS["float8"].quantize(random.standard_normal((8, 16)).astype(np.float32) * 20, np.float32(1))
    constants += [
        helper.make_tensor("w", ELEMENTS["float8"], weight.shape, weight.tobytes(), raw=True),
        helper.make_tensor("scale", TensorProto.FLOAT, [], [0.0625 / 16]),
        helper.make_tensor("bias", FLOATS[dtype], [8], np.zeros(8, dtype).tobytes(), raw=True),
    ]
    nodes = [
        helper.make_node(
            "SkipLayerNormalization",
            ["x", "skip", "g", "b"],
            ["n", "m", "i", "sum", "q"],
            domain="sd_ort",
            epsilon=1e-5,
            quantized_scale=0.0625,
        ),
        helper.make_node("Reshape", ["q", "row"], ["r"]),
        helper.make_node("QuantizedLinear", ["r", "w", "scale", "bias"], ["y"], domain="sd_ort", gelu=0, gated=0),
    ]
    y = run_nodes(nodes, constants, {"x": x, "skip": skip}, dtype, provider)
    v = x.astype(np.float64) + skip
    normalized = (v - v.mean(-1, keepdims=True)) / np.sqrt(v.var(-1, keepdims=True) + 1e-5) * gamma + beta
    q = (normalized / 0.0625).astype(ml_dtypes.float8_e4m3fn).astype(np.float64).reshape(-1, 16)
    expected = q @ weight.astype(np.float64).T * (0.0625 / 16)
    tolerance = 1e-5 if dtype == "float32" else 2e-3
    np.testing.assert_allclose(y, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("scales", [1, 6])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_convolution(dtype: str, skip: bool, scales: int, provider: str) -> None:
    """Of images (2, 5, 1, 16) and (2, 5, 3, 16), whose edges are padded; with a scale for all filters or one each."""
    random = np.random.default_rng(0)
    weight = FORMATS["float8"].quantize(random.standard_normal((6, 3, 3, 16)).astype(np.float32) * 20, np.float32(1))
    factors = random.uniform(0.001, 0.002, scales).astype(np.float32)
    bias = random.standard_normal(6).astype(dtype)
    constants = [
        helper.make_tensor("s", FLOATS[dtype], [], np.array([0.0625], dtype).tobytes(), raw=True),
        helper.make_tensor("w", ELEMENTS["float8"], weight.shape, weight.tobytes(), raw=True),
        helper.make_tensor("scale", TensorProto.FLOAT, [scales], factors.tobytes(), raw=True),
        helper.make_tensor("bias", FLOATS[dtype], bias.shape, bias.tobytes(), raw=True),
    ]
    for width in (1, 3):
        x, image = (random.standard_normal((2, 5, width, channels)).astype(dtype) for channels in (16, 6))
        nodes = [
            helper.make_node("QuantizeLinear", ["x", "s"], ["q"], output_dtype=ELEMENTS["float8"]),
            helper.make_node(
                "QuantizedNhwcConv", ["q", "w", "scale", "bias", *(["image"] if skip else [])], ["y"], domain="sd_ort"
            ),
        ]
        y = run_nodes(nodes, constants, {"x": x} | ({"image": image} if skip else {}), dtype, provider)
        q = (x.astype(np.float32) / 0.0625).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        padded = np.pad(q, ((0, 0), (1, 1), (1, 1), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))
        expected = np.einsum("nhwcij,oijc->nhwo", windows, weight.astype(np.float64)) * factors + bias
        expected = expected + image if skip else expected
        tolerance = 1e-5 if dtype == "float32" else 2e-3
        np.testing.assert_allclose(y, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("magnitude", [0.0, 1e-7, 3e-5, 0.02, 1.0, 2e4])
@pytest.mark.parametrize(
    "recipe", [["transpose", [1, 0], "q"], ["interleave", 2, *(["transpose", [1, 0], each] for each in "qkv")]]
)
def test_weights_with_deltas_are_quantized_on_the_device(provider: str, recipe: Any, magnitude: float) -> None:
    """Elements and scales of float8 weights equal NumPy's bit for bit, for exact sums.

    Scales are of any binade, including those that are subnormal in float16.
    """
    random, dtype = np.random.default_rng(0), np.float32
    expression, table = ["quantize", ["float8", None], recipe], {"q": 0, "k": 1, "v": 2}
    names = [name for name in table if name in weight_recipes.sources(expression)]
    spec = update_graph.weight_update_spec(expression, (8, 6), np.dtype(dtype))
    assert spec is not None
    session = session_of(update_graph.build_weight_update(spec), provider)
    assert set(assigned_operators(session)) == {"SdOrtSimulated"}
    for _ in range(40 if magnitude else 1):
        feed: dict[str, np.ndarray] = {"factor": np.array(random.uniform(0.01, 3), np.float32)}
        tensors = {}
        for index, name in enumerate(names):
            source = (random.standard_normal((8, 6)) * magnitude).astype(dtype)
            up = random.integers(-2, 3, (8, 1)).astype(np.float32)
            down = np.exp2(random.integers(-3, 1, (1, 6))).astype(np.float32) * np.float32(magnitude)
            feed |= {f"source_{index}": source, f"up_{index}": up, f"down_{index}": down}
            feed[f"scale_{index}"] = np.array([0.5], np.float32)
            tensors[name] = source + (up * 0.5) @ down
        elements, scale = session.run(["elements", "scale"], feed)
        expected = weight_recipes.evaluate(expression, tensors.__getitem__)
        scale_recipe = ["channel_scale", ["float8", None, float(feed["factor"])], recipe]
        assert elements.view(np.uint8).tobytes() == expected.tobytes()
        assert scale == weight_recipes.evaluate(scale_recipe, tensors.__getitem__)


def test_a_lora_is_quantized_again(provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float8 weights of a UNet with a LoRA beside diffusers' in float32; without it the outputs are the first ones. The
    LoRA is the demo's and that of a convolution."""
    random = np.random.default_rng(0)
    feed = {
        "sample": random.standard_normal((1, 4, 8, 8)).astype(np.float32),
        "timestep": np.array([500.0], np.float32),
    }
    unet = diffusers.UNet2DConditionModel.from_pretrained(demo.MODEL_DIR / "unet", dtype=torch.float32)
    feed["encoder_hidden_states"] = random.standard_normal((1, 24, unet.config.cross_attention_dim)).astype(np.float32)
    runs: dict[str, Any] = {f"unet/{name}/0": array for name, array in feed.items()}
    np.savez(tmp_path / "runs.npz", **runs)
    options: dict[str, Any] = {
        "components": ["unet"],
        "calibrate": False,
        "hoist": False,
        "dtype": "float16",
        "eight_bits": "float8",
        "convolutions": True,
    }
    optimize("demo", tmp_path / "out", target="gpu", inputs=tmp_path / "runs.npz", **options)

    def expected() -> np.ndarray:
        with torch.no_grad():
            result: np.ndarray = unet(**{name: torch.from_numpy(array) for name, array in feed.items()}).sample.numpy()
        return result

    models, manager = Components(tmp_path / "out", provider), LoraManager(tmp_path / "out")
    inputs = {name: array.astype(models["unet"].dtype(name)) for name, array in feed.items()}
    plain = models["unet"](**inputs)["out_sample"].copy()
    rounding = relative_l2_error(plain, expected())
    assert 1e-4 < rounding < 0.1
    lora, conv = tmp_path / "lora.safetensors", "down_blocks.1.resnets.0.conv1"
    out_channels, channels, *kernel = unet.get_submodule(conv).weight.shape
    factors = {"A": (2, channels, *kernel), "B": (out_channels, 2, 1, 1)}
    of_conv = {
        f"unet.{conv}.lora_{name}.weight": random.standard_normal(shape).astype(np.float32) * 0.05
        for name, shape in factors.items()
    }
    save_file(load_file(lora_path("night")) | of_conv, lora)
    unet.load_lora_adapter(lora, prefix="unet")
    manager.add("night", read_adapter(lora, {}), "night")
    manager.apply(models, manager.deltas({"night": 1.0}))
    with_lora, reference = models["unet"](**inputs)["out_sample"].copy(), expected()
    assert models.in_place
    assert not models.overrides.weights.get("unet")
    updatable, table, session = models.overrides.updatable["unet"], manager.recipes["unet"], models["unet"]

    def share_of_differences(deltas: Deltas) -> float:
        """Return the share of elements of float8 weights that the device and the host quantize differently."""
        host = manager.updated_weights("unet", "unet", deltas)
        names = [name for name, array in host.items() if array.dtype == ml_dtypes.float8_e4m3fn]
        assert len(names) == len([name for name in host if update_graph.float8_scale(table[name])]) > 0
        assert f"{conv}.weight" not in deltas or any(host[name].ndim == 4 for name in names)
        differences = [read_value(updatable.values[name]) != host[name].view(np.uint8) for name in names]
        return float(np.mean(np.concatenate([each.ravel() for each in differences])))

    # Products of factors are summed in another order: a few sums are on the other side of a rounding.
    full, half = manager.deltas({"night": 1.0}), manager.deltas({"night": 0.5})
    assert share_of_differences(full["unet"]) < 1e-4
    with monkeypatch.context() as patch:
        patch.setattr(manager, "_quantized", None)  # the host quantizes nothing: the weights were checked before
        patch.setattr(manager, "_read_source", None)  # the checkpoint's tensors are on the device
        updates = dict(manager._device_updates)
        assert any(update_graph.float8_elements(table[name]) for _, name in updates)
        manager.apply(models, half)
    assert all(manager._device_updates[key] is update for key, update in updates.items())
    reused = {name: read_value(value).tobytes() for name, value in updatable.values.items()}
    assert share_of_differences(half["unet"]) < 1e-4 < share_of_differences(full["unet"])
    name = next(name for name in half["unet"] if name.endswith("attn1.to_q.weight"))
    manager.apply(models, {"unet": (dense := {name: half["unet"][name].dense()})})  # no factors: the host computes it
    assert share_of_differences(dense) == 0
    assert relative_l2_error(with_lora, reference) < 1.5 * rounding
    assert relative_l2_error(plain, reference) > 2 * rounding
    manager.apply(models, {})
    assert share_of_differences({name: np.zeros_like(dense[name])}) == 0
    np.testing.assert_array_equal(models["unet"](**inputs)["out_sample"], plain)
    assert models["unet"] is session
    assert not updatable.sources
    monkeypatch.setattr(SessionDevice, "free_bytes", lambda _: 0)  # sources are uploaded for one weight at a time
    manager.apply(models, half)
    assert not updatable.sources
    assert {name: read_value(value).tobytes() for name, value in updatable.values.items()} == reused
