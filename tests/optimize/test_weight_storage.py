"""Weights in 4 and 8 bits: values, what ONNX Runtime makes of them, memory, and what is refused or left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from cli_type import Cli, success
from onnx import TensorProto, helper, numpy_helper
from stored_values import dequantize, stored_parts

from fusion_passes import weight_recipes
from fusion_passes.quantized_weights import stored
from sd_ort import StableDiffusionPipeline
from sd_ort.core.errors import InputError
from sd_ort.core.metrics import psnr, relative_l2_error
from sd_ort.core.pipeline_folder import read_manifest
from sd_ort.demo.styles import lora_path
from sd_ort.optimize.optimizer import optimize_component
from sd_ort.optimize.targets import TARGETS
from sd_ort.optimize.weight_storage import WeightStorage, store_weights
from sd_ort.runtime.session import SessionOptions
from sd_ort.runtime.session import load as open_component
from sd_ort.stages import optimize
from sd_ort.weights.lora import LoraManager
from sd_ort.weights.lora_files import read_adapter

SETTINGS = [WeightStorage("int8", 32), WeightStorage("int8", 64, False), WeightStorage("int4", 32),
            WeightStorage("int4", 128, False), WeightStorage("float8")]  # fmt: skip
RANDOM = np.random.default_rng(0)


def model(rows: int = 128, float16: bool = False) -> onnx.ModelProto:
    """x -> Conv -> MatMul -> Gemm with both layouts of its weight."""
    dtype = np.float16 if float16 else np.float32
    weights = {"filters": RANDOM.normal(size=(16, 64, 3, 3)), "a": RANDOM.normal(size=(rows, 256)) + 0.5,
               "b": RANDOM.normal(size=(128, 256)), "c": RANDOM.normal(size=(128, 64)), "small": RANDOM.normal(size=64),
               "target": np.array([-1, rows])}  # fmt: skip
    tensors = [
        numpy_helper.from_array(array if name == "target" else (0.1 * array).astype(dtype), name)
        for name, array in weights.items()
    ]
    nodes = [
        helper.make_node("Conv", ["x", "filters"], ["image"], pads=[1, 1, 1, 1]),
        helper.make_node("Reshape", ["image", "target"], ["matrix"]),
        helper.make_node("MatMul", ["matrix", "a"], ["ya"]),
        helper.make_node("Gemm", ["ya", "b"], ["yb"], transB=1),
        helper.make_node("Gemm", ["yb", "c"], ["yc"]),
        helper.make_node("Add", ["yc", "small"], ["y"]),
    ]
    kind = TensorProto.FLOAT16 if float16 else TensorProto.FLOAT
    ends = [
        helper.make_tensor_value_info(name, kind, shape) for name, shape in (("x", [1, 64, 8, 8]), ("y", [None, 64]))
    ]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def stored_graph(proto: onnx.ModelProto, storage: WeightStorage) -> ir.Model:
    graph = ir.from_proto(proto)
    weight_recipes.init_recipes(graph)
    assert store_weights(graph, storage) == 4
    return graph


def run(proto: onnx.ModelProto, x: np.ndarray, optimized: Path | None = None) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if optimized is None:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    else:
        options.optimized_model_filepath = str(optimized)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, {"x": x})[0]
    return result


@pytest.mark.parametrize("storage", SETTINGS, ids=lambda s: f"{s.dtype}-{s.group}-{s.symmetric}")
@pytest.mark.parametrize("float16", [False, True])
def test_graphs_compute_with_the_stored_weights(tmp_path: Path, storage: WeightStorage, float16: bool) -> None:
    """Equal to a graph with the dequantized values; and what ONNX Runtime makes of it keeps the stored elements."""
    proto = model(float16=float16)
    x = RANDOM.normal(size=(1, 64, 8, 8)).astype(np.float16 if float16 else np.float32)
    graph = stored_graph(proto, storage)
    layers = "int8" if storage.dtype == "int4" else storage.dtype
    groups = 0 if storage.dtype == "float8" else storage.group
    axes = {"filters": (layers, 0, 0), "a": (storage.dtype, 0 if groups else 1, groups),
            "b": (storage.dtype, 1 if groups else 0, groups),
            "c": (storage.dtype, 0 if groups else 1, groups)}  # fmt: skip
    expected = onnx.ModelProto.FromString(proto.SerializeToString())
    for tensor in expected.graph.initializer:
        if tensor.name in axes:
            argument = (*axes[tensor.name], storage.symmetric)
            values = dequantize(argument, stored_parts(argument, numpy_helper.to_array(tensor)))
            dtype = np.float16 if float16 else np.float32
            tensor.CopyFrom(numpy_helper.from_array(values.astype(dtype), tensor.name))
    exact = run(expected, x).astype(np.float32)
    serialized = ir.to_proto(graph)
    scale = np.abs(exact).max()
    assert np.abs(run(serialized, x).astype(np.float32) - exact).max() < (5e-3 if float16 else 2e-6) * scale
    opened = tmp_path / "opened.onnx"
    assert np.abs(run(serialized, x, opened).astype(np.float32) - exact).max() < 0.03 * scale  # int8 activations
    stored = onnx.load(opened)
    kinds = [node.op_type for node in stored.graph.node]
    assert kinds.count("MatMulNBits") >= (0 if storage.dtype == "float8" else 1)
    large = [t.data_type for t in stored.graph.initializer if np.prod(t.dims) >= 4096]
    assert len(large) == 4
    assert not {TensorProto.FLOAT, TensorProto.FLOAT16} & set(large)  # nothing was folded


@pytest.mark.parametrize("storage", SETTINGS, ids=lambda s: f"{s.dtype}-{s.group}-{s.symmetric}")
def test_values_are_close(storage: WeightStorage) -> None:
    """At most half a step of the elements from the weight, or an eighth of the value in float8."""
    weight = RANDOM.normal(size=(256, 64)).astype(np.float32) * np.linspace(0.01, 3, 64, dtype=np.float32)
    weight[:, 5] = 0
    argument = (storage.dtype, *((1, 0) if storage.dtype == "float8" else (0, storage.group)), storage.symmetric)
    result = dequantize(argument, stored_parts(argument, weight))
    scales = stored(argument).scales(weight)
    steps = scales.reshape(1, -1) if scales.ndim == 1 else np.repeat(scales, storage.group, 0)
    limit = (
        np.maximum(np.abs(weight) / 16, steps) if storage.dtype == "float8" else 0.51 * steps + 1e-3 * np.abs(weight)
    )
    if storage.dtype == "int4" and not storage.symmetric:
        limit = limit + 0.5 * steps  # of the rounded zero point
    assert (np.abs(result - weight) <= limit).all()
    assert (result[:, 5] == 0).all()


MEMORY = """
import sys, psutil, numpy, onnx, onnxruntime
small = onnxruntime.InferenceSession(sys.argv[2])
del small
options = onnxruntime.SessionOptions(); options.log_severity_level = 3
before = psutil.Process().memory_info().rss
session = onnxruntime.InferenceSession(sys.argv[1], options)
session.run(None, {"x": numpy.ones((4, 4096), numpy.float32)})
print(psutil.Process().memory_info().rss - before)
"""


def test_memory_of_a_session(tmp_path: Path) -> None:
    """A session over int4 has less than a third of the memory of one over float32."""
    used = {}
    for name, storage, size in (("small", None, 64), ("float32", None, 4096), ("int4", WeightStorage("int4"), 4096)):
        weights = [numpy_helper.from_array(RANDOM.random((4096, size), np.float32), f"w{i}") for i in range(2)]
        nodes = [helper.make_node("MatMul", ["x", f"w{i}"], [f"y{i}"]) for i in range(2)]
        ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None, 4096]) for n in ("x", "y0", "y1")]
        for end in ends[1:]:
            end.type.tensor_type.shape.dim[1].dim_value = size
        graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
        model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
        if storage is not None:
            store_weights(model, storage)
        path = tmp_path / name / "m.onnx"
        path.parent.mkdir()
        ir.save(model, path, external_data="m.data")
        if name != "small":
            command = [sys.executable, "-c", MEMORY, str(path), str(tmp_path / "small" / "m.onnx")]
            used[name] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert used["float32"] > 2 * 4 * 4096 * 4096
    assert used["int4"] < used["float32"] / 3


def test_what_is_left(tmp_path: Path) -> None:
    """Weights that something else reads, on the left of a product, of three axes, or small; constants of shapes."""
    names = {"shared": (128, 64), "left": (64, 128), "three": (2, 128, 64), "tiny": (32, 64)}
    tensors = [numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in names.items()]
    nodes = [
        helper.make_node("MatMul", ["x", "shared"], ["a"]), helper.make_node("Relu", ["shared"], ["b"]),
        helper.make_node("MatMul", ["left", "y"], ["c"]), helper.make_node("MatMul", ["z", "three"], ["d"]),
        helper.make_node("MatMul", ["t", "tiny"], ["e"]),
    ]  # fmt: skip
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "xyzt"]
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "abcde"]
    proto = helper.make_model(helper.make_graph(nodes, "g", inputs, outputs, tensors),
                              opset_imports=[helper.make_opsetid("", 20)])  # fmt: skip
    graph = ir.from_proto(proto)
    assert store_weights(graph, WeightStorage("int4")) == 0
    assert graph.opset_imports[""] == 20


def test_what_is_refused(sd_ort: Cli, tmp_path: Path) -> None:
    graph = ir.from_proto(model(rows=96))
    with pytest.raises(InputError, match=r"a has 96 elements a row, .* 64 do not divide: give --weight-group 32"):
        store_weights(graph, WeightStorage("int8", 64))
    assert "DequantizeLinear" not in [node.op_type for node in graph.graph]
    onnx.save(model(), tmp_path / "m.onnx")
    for options, message in (
        (("--target", "cuda", "--weights", "int8"), "use one of cpu, portable, gpu, hip with --weights"),
        (("--target", "cpu", "--float16", "--weights", "int8"), "leave out --float16"),
        (("--target", "cpu", "--weights", "float8", "--asymmetric"), "no zero points"),
        (("--target", "cpu", "--asymmetric"), "goes with --weights"),
        (("--target", "cpu", "--vae-weights"), "--vae-weights goes with --weights"),
        (("--target", "cpu", "--weights", "float8", "--weight-group", "32"), "--weight-group goes with"),
        (("--target", "cpu", "--weights", "int4", "--weight-group", "128"), "128 do not divide: give --weight-group"),
    ):  # fmt: skip
        code, _, err = sd_ort("optimize", "demo", tmp_path / "out", *options)
        assert (code, err.count("sd-ort: ")) == (2, 1), err
        assert message in err
    code, _, err = sd_ort("optimize", tmp_path / "m.onnx", tmp_path / "o.onnx", "--target", "cpu", "--weights", "int8")
    assert code == 2
    assert "one ONNX file" in err
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_which_components_are_stored() -> None:
    storage = WeightStorage("int4", vae=True)
    assert storage.of_component("unet") is storage
    assert storage.of_component("vae_decoder") == WeightStorage("int8", vae=True)
    assert WeightStorage("int4").of_component("vae_decoder") is None
    assert storage.of_component("safety_checker") is None


def test_the_demo(sd_ort: Cli, demo_folder: Path, tmp_path: Path) -> None:
    """Optimized, verified against the checkpoint, generated with; a LoRA is stored in fewer bits as well."""
    out = tmp_path / "stored"
    options = ("--target", "cpu", "--weights", "int8", "--weight-group", "32", "--vae-weights")
    success(sd_ort, "optimize", "demo", out, *options)
    code, _, err = sd_ort("optimize", out, tmp_path / "again", "--target", "cpu")
    assert (code, err) == (2, f"sd-ort: {out} is optimized already: optimize what it was made from, demo.\n")
    assert read_manifest(out)["options"]["weights"] == {"dtype": "int8", "group": 32, "symmetric": True, "vae": True}
    assert sd_ort("verify", "demo", out)[0] == 0
    for name in ("unet", "vae_decoder"):
        sizes = [(folder / name / "model.onnx.data").stat().st_size for folder in (demo_folder, out)]
        assert sizes[1] < 0.33 * sizes[0]
    latents = {"latent_sample": RANDOM.normal(size=(1, 4, 16, 16))}
    plain_vae, vae = (
        open_component(folder, "vae_decoder", options=SessionOptions(threads=1)) for folder in (demo_folder, out)
    )
    (expected,), (decoded,) = plain_vae(**latents).values(), vae(**latents).values()
    assert 1e-5 < relative_l2_error(decoded, expected) < 0.02
    call: dict[str, Any] = {"prompt": "a red circle", "generator": 3, "progress": False, "num_inference_steps": 8}
    pipeline = StableDiffusionPipeline.from_pretrained(out, "cpu", threads=1)
    image = np.asarray(pipeline(**call).images[0])
    plain = StableDiffusionPipeline.from_pretrained(demo_folder, "cpu", threads=1)
    assert 25 < psnr(image, np.asarray(plain(**call).images[0])) < 90
    for each in (pipeline, plain):
        each.load_lora_weights(lora_path("gold"), "gold")
    with_lora = np.asarray(pipeline(**call).images[0])
    assert psnr(with_lora, image) < 25
    assert 25 < psnr(with_lora, np.asarray(plain(**call).images[0])) < 90
    pipeline.unload_lora_weights()
    np.testing.assert_array_equal(np.asarray(pipeline(**call).images[0]), image)
    optimize("demo", tmp_path / "int4", target="cpu", components=["unet"], weights=WeightStorage("int4"))
    with pytest.raises(InputError, match="in 4 bits, to which no LoRA can be added: use --weights int8 or float8"):
        LoraManager(tmp_path / "int4").add("gold", read_adapter(lora_path("gold"), {}), "gold")


def test_float16_of_a_portable_folder(tmp_path: Path) -> None:
    onnx.save(model(), tmp_path / "m.onnx")
    entry = optimize_component(tmp_path / "m.onnx", tmp_path / "o" / "model.onnx", TARGETS["portable"], "float16",
                               calibrate=False, weights=WeightStorage("int4"))  # fmt: skip
    optimized = ir.load(tmp_path / "o" / "model.onnx")
    kinds = {str(v.name): v.dtype for v in optimized.graph.initializers.values()}
    assert {dtype.name for dtype in kinds.values()} >= {"INT4", "INT8", "FLOAT16"}
    assert "stored_elements" in "".join(entry["weight_recipes"].values())
