"""A demo in 8 bits: calibrated on recorded runs, verified bit for bit, near float32; bad inputs in one line."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import onnx_ir as ir
import pytest
import torch
from cli_type import Cli, success
from click.testing import CliRunner
from image_metrics import psnr
from safetensors.torch import load_file, save_file

from scripts.bench import eight_bits as eight_bits_bench
from scripts.fixtures import graph_fixtures
from sd_ort import StableDiffusionPipeline, demo
from sd_ort.checkpoints.recorded_inputs import load_recorded_inputs
from sd_ort.cli.optimize import command
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import InputError
from sd_ort.core.metrics import relative_l2_error
from sd_ort.demo.scenes import is_unseen, parse, training_prompts
from sd_ort.demo.styles import lora_path
from sd_ort.graphs.load import load
from sd_ort.inspect.weight_verification import check_weights, verify_weights
from sd_ort.optimize.activation_ranges import measure_ranges
from sd_ort.optimize.calibration import Calibration, measure
from sd_ort.optimize.eight_bits import VAE_DECODER, EightBits, quantize
from sd_ort.optimize.optimizer import rewrite
from sd_ort.optimize.targets import TARGETS
from sd_ort.optimize.unoptimized import UnoptimizedComponent
from sd_ort.pipelines import calibration_runs
from sd_ort.pipelines.calibration_runs import STEPS_PER_PROMPT, RecordingModel, record_runs
from sd_ort.runtime.components import Components
from sd_ort.runtime.session import load as open_component
from sd_ort.stages import optimize
from sd_ort.weights.deltas import LowRankDelta
from sd_ort.weights.lora import LoraManager
from sd_ort.weights.lora_files import read_adapter

SDXL = "sdxl-tiny-dynamo-20.unet"  # the blocks of SDXL with few channels
CALL: dict[str, Any] = {
    "prompt": "a red circle on a blue background",
    "num_inference_steps": 4,
    "guidance_scale": demo.GUIDANCE,
    "output_type": "np",
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "float32"
    optimize("demo", out, target="portable")
    return out


@pytest.fixture(scope="module")
def recorded(reference: Path) -> Path:
    path = reference.with_name("runs.npz")
    runs = record_runs(reference, training_prompts(2), path, vae_decoder=True, show_progress=False)
    assert runs == 2 * STEPS_PER_PROMPT + 1  # and one image decoded
    return path


@pytest.fixture(scope="module")
def float8(recorded: Path) -> Path:
    out = recorded.with_name("float8")
    optimize("demo", out, target="portable", eight_bits="float8", inputs=recorded)
    return out


def test_prompts_of_the_demo() -> None:
    prompts = training_prompts(8)
    assert len(set(prompts)) == 8
    assert not any(is_unseen(parse(prompt)) for prompt in prompts)


def test_runs_are_of_different_steps(recorded: Path, reference: Path) -> None:
    inputs = list(load(reference / "unet" / pipeline_folder.MODEL).graph.inputs)
    runs = load_recorded_inputs(recorded, "unet", inputs, required=True)
    assert len({float(run["timestep"][0]) for run in runs}) == 2 * STEPS_PER_PROMPT


def test_the_demo_in_float8(float8: Path, reference: Path) -> None:
    """The manifest says what is in 8 bits; the file has these elements; images are near those of float32."""
    entry = pipeline_folder.read_manifest(float8)["components"]["unet"]["eight_bits"]
    assert entry["format"] == "float8"
    assert entry["layers"] == {"Conv": 81, "MatMul": 128}
    assert sum(entry["not_quantized"].values()) == 73
    model = load(float8 / "unet" / pipeline_folder.MODEL)
    elements = [v for v in model.graph.initializers.values() if v.dtype == ir.DataType.FLOAT8E4M3FN]
    assert len(elements) == 81 + 128
    sizes = [(folder / "unet" / pipeline_folder.DATA).stat().st_size for folder in (float8, reference)]
    assert sizes[0] < 0.4 * sizes[1]
    images = [
        np.asarray(
            StableDiffusionPipeline.from_pretrained(folder, "cpu")(
                "a red circle on a blue background", num_inference_steps=4, guidance_scale=demo.GUIDANCE, generator=1,
                output_type="np", progress=False,
            ).images
        )
        for folder in (float8, reference)
    ]  # fmt: skip
    error = float(np.sqrt(np.square(images[0] - images[1]).mean()))
    assert 1e-5 < error < 0.05


def test_the_decoder_in_8_bits(recorded: Path, reference: Path, tmp_path: Path) -> None:
    """Its 3x3 convolutions and its attention's linears have QDQ; the rest is listed; weights are the checkpoint's; the
    image is near that of float32."""
    out = tmp_path / "out"
    options: dict[str, Any] = {"target": "portable", "eight_bits": "int8", "vae_decoder": True, "inputs": recorded}
    optimize("demo", out, components=[VAE_DECODER], **options)
    entry = pipeline_folder.read_manifest(out)["components"][VAE_DECODER]["eight_bits"]
    assert entry["layers"] == {"Conv": 30, "MatMul": 4}
    assert sum(entry["not_quantized"].values()) == 4
    graph = load(out / VAE_DECODER / pipeline_folder.MODEL).graph
    weights = [v for v in graph.initializers.values() if v.dtype == ir.DataType.INT8]
    assert sorted(len(v.shape or ()) for v in weights) == [2] * 4 + [4] * 30
    assert all(node.op_type != "QuantizeLinear" or node.inputs[1].const_value.size == 1 for node in graph)  # type: ignore[union-attr]
    assert verify_weights("demo", out, components=[VAE_DECODER])["passed"]
    inputs = list(load(reference / VAE_DECODER / pipeline_folder.MODEL).graph.inputs)
    (feed,) = load_recorded_inputs(recorded, VAE_DECODER, inputs, required=True)
    images = [open_component(folder, VAE_DECODER)(**feed)["sample"] / 2 + 0.5 for folder in (out, reference)]
    assert 30 < psnr(*images) < 60


def test_the_decoder_on_the_cpu(recorded: Path, reference: Path, tmp_path: Path) -> None:
    """The int8 kernels compute the same as QDQ at the same layers."""
    options: dict[str, Any] = {"eight_bits": "int8", "vae_decoder": True, "inputs": recorded}
    for target in ("cpu", "portable"):
        optimize("demo", tmp_path / target, target=target, components=[VAE_DECODER], **options)
    counts = pipeline_folder.read_manifest(tmp_path / "cpu")["components"][VAE_DECODER]["op_counts"]
    assert (counts["QuantizedConv"], counts["QuantizedLinear"]) == (30, 1)  # Attention has three
    inputs = list(load(reference / VAE_DECODER / pipeline_folder.MODEL).graph.inputs)
    (feed,) = load_recorded_inputs(recorded, VAE_DECODER, inputs, required=True)
    folders = (tmp_path / "cpu", tmp_path / "portable", reference)
    images = [open_component(folder, VAE_DECODER)(**feed)["sample"] / 2 + 0.5 for folder in folders]
    assert psnr(images[0], images[1]) > 45
    assert 30 < psnr(images[0], images[2]) < 60


def test_verify_quantizes_again(float8: Path) -> None:
    result = verify_weights("demo", float8)
    check_weights(result, "demo", float8)
    assert result["passed"]


@pytest.mark.parametrize(
    ("target", "format_", "options"),
    [("portable", "float8", ()), ("migraphx", "int8", ("--float16", "--no-calibrate"))],
)
def test_dynamic_scales(
    sd_ort: Cli, recorded: Path, reference: Path, tmp_path: Path, target: str, format_: str, options: tuple[str, ...]
) -> None:
    """Nothing is calibrated; each quantization has a scale that the graph computes; weights are the checkpoint's; the
    noise prediction is near that of float32."""
    out = tmp_path / "out"
    options = ("--target", target, f"--{format_}", "--dynamic-scales", "--component", "unet", *options)
    output = success(sd_ort, "optimize", "demo", out, *options)
    assert "calibration: " not in output
    assert f"unet: {format_}, dynamic scales: " in output
    manifest = pipeline_folder.read_manifest(out)
    entry = manifest["components"]["unet"]["eight_bits"]
    assert (manifest["options"]["dynamic_scales"], entry["dynamic_scales"], entry["ranges"]) == (True, True, {})
    assert sum(entry["layers"].values()) == 81 + 128
    graph = load(out / "unet" / pipeline_folder.MODEL).graph
    quantizations = [node for node in graph if node.op_type == "QuantizeLinear"]
    counts = Counter(node.op_type for node in graph)
    assert {node.inputs[1].producer().op_type for node in quantizations} == {"Max"}  # type: ignore[union-attr]
    assert len(quantizations) == counts["ReduceMax"] > 100
    assert verify_weights("demo", out, components=["unet"])["passed"]
    if target == "portable":
        inputs = list(load(reference / "unet" / pipeline_folder.MODEL).graph.inputs)
        feed = load_recorded_inputs(recorded, "unet", inputs, required=True)[0]
        result, expected = (open_component(folder, "unet")(**feed)["out_sample"] for folder in (out, reference))
        assert 1e-4 < relative_l2_error(result, expected) < 0.1


def test_int8_beside_float16(recorded: Path, tmp_path: Path) -> None:
    """Scales are float16 numbers, so the float16 graph has those of float32."""
    optimize(
        "demo", tmp_path / "out", target="portable", components=["unet"], dtype="float16", calibrate=False,
        eight_bits="int8", inputs=recorded,
    )  # fmt: skip
    graph = load(tmp_path / "out" / "unet" / pipeline_folder.MODEL).graph
    quantized = [node for node in graph if node.op_type == "QuantizeLinear"]
    assert quantized
    assert all(node.inputs[1].dtype == ir.DataType.FLOAT16 for node in quantized if node.inputs[1])
    ranges = pipeline_folder.read_manifest(tmp_path / "out")["components"]["unet"]["eight_bits"]["ranges"]
    assert len(ranges) == len(quantized)
    result = verify_weights("demo", tmp_path / "out", components=["unet"])
    assert result["passed"], result


@pytest.mark.parametrize("convolutions", [False, True])
def test_operators_of_gpus(convolutions: bool, recorded: Path, tmp_path: Path) -> None:
    """Linears become QuantizedLinear, gated ones with their gate; convolutions stay in float16 without their option.
    Each activation is written in float8 by the operator before."""
    optimize(
        "demo", tmp_path / "out", target="gpu", components=["unet"], dtype="float16", calibrate=False,
        eight_bits="float8", inputs=recorded, convolutions=convolutions,
    )  # fmt: skip
    entry = pipeline_folder.read_manifest(tmp_path / "out")["components"]["unet"]
    layers = {"LinearAdd": 112, "LinearSplitGelu": 16} | ({"NhwcConv": 43} if convolutions else {})
    assert entry["eight_bits"]["layers"] == layers
    graph = load(tmp_path / "out" / "unet" / pipeline_folder.MODEL).graph
    nodes = [node for node in graph if node.op_type in ("QuantizedLinear", "QuantizedNhwcConv")]
    assert len(nodes) == sum(layers.values())
    assert sum(node.attributes.get_int("gated", 0) for node in nodes) == 16
    assert {node.inputs[2].dtype for node in nodes if node.inputs[2]} == {ir.DataType.FLOAT}
    assert {node.inputs[3].dtype for node in nodes if node.inputs[3]} == {ir.DataType.FLOAT16}
    assert not any(node.op_type == "DequantizeLinear" for node in graph)
    assert (len(entry["eight_bits"]["ranges"]), entry["eight_bits"]["written_by_producers"]) == (len(nodes),) * 2
    assert not any(node.op_type == "QuantizeLinear" for node in graph)
    written = Counter(node.op_type for node in graph if "quantized_scale" in node.attributes)
    assert {name: count for name, count in written.items() if "GroupNorm" not in name} == {
        "SkipLayerNormalization": 48, "MultiHeadAttention": 32, "QuantizedLinear": 32
    }  # fmt: skip
    assert written["GroupNorm"] + written["SkipGroupNorm"] == 16 + layers.get("NhwcConv", 0)
    result = verify_weights("demo", tmp_path / "out", components=["unet"])
    assert result["passed"], result


@pytest.mark.parametrize("convolutions", [False, True])
def test_quantizations_of_sdxl(convolutions: bool) -> None:
    """Norms, attentions, gates and products write float8: no node of its own quantizes anything."""
    source = UnoptimizedComponent("unet", lambda: ir.from_proto(graph_fixtures.load(SDXL)), dict, 0)
    ranges = EightBits("float8", lambda _, names: dict.fromkeys(names, 3.0), convolutions)
    parts, entry = rewrite(source, "unet", TARGETS["gpu"], "float16", lambda _: Calibration(""), quantization=ranges)
    counts = Counter(node.op_type for node in parts["unet"].graph)
    assert counts["QuantizedLinear"] == 442
    assert (counts["QuantizedNhwcConv"], counts["QuantizeLinear"]) == ((33, 0) if convolutions else (0, 0))
    assert entry["eight_bits"]["written_by_producers"] == 442 + counts["QuantizedNhwcConv"]
    assert counts["SkipLayerNormalization"] == 210  # as in float16, as all others


@pytest.mark.parametrize(
    ("format_", "dtype", "layers"),
    [("float8", "float32", 128), ("int8", "float32", 81 + 128 + 32), ("int8", "bfloat16", 81 + 128 + 32)],
)
def test_operators_of_the_cpu(
    recorded: Path, reference: Path, tmp_path: Path, format_: str, dtype: str, layers: int
) -> None:
    """The noise prediction is near that of float32, with a LoRA near diffusers' with that LoRA. In int8 the CPU has
    kernels for convolutions, and takes the text's keys and values too."""
    out = tmp_path / "out"
    optimize("demo", out, target="cpu", components=["unet"], eight_bits=format_, inputs=recorded, dtype=dtype)
    operators = Counter(node.op_type for node in load(out / "unet" / pipeline_folder.MODEL).graph)
    assert operators["QuantizedLinear"] + operators["QuantizedConv"] == layers
    assert operators["Bfloat16Attention"] == (32 if dtype == "bfloat16" else 0)
    inputs = list(load(reference / "unet" / pipeline_folder.MODEL).graph.inputs)
    feed = load_recorded_inputs(recorded, "unet", inputs, required=True)[0]

    models = Components(out, "cpu")
    plain, expected = (model(**feed)["out_sample"] for model in (models["unet"], open_component(reference, "unet")))
    rounding = relative_l2_error(plain, expected)
    assert 1e-4 < rounding < 0.1
    unet = diffusers_pipeline("night").unet
    tensors = {name: torch.from_numpy(np.asarray(feed[name], np.float32)) for name in feed}
    with torch.no_grad():
        expected = unet(**tensors).sample.numpy()
    manager = LoraManager(out)
    manager.add("night", read_adapter(lora_path("night"), {}), "night")
    manager.apply(models, manager.deltas({"night": 1.0}))
    with_lora = relative_l2_error(models["unet"](**feed)["out_sample"], expected)
    assert with_lora < 1.5 * rounding  # the same formats; the ranges of activations are those without the LoRA
    assert relative_l2_error(plain, expected) > 10 * rounding
    manager.apply(models, {})
    np.testing.assert_array_equal(models["unet"](**feed)["out_sample"], plain)


def diffusers_pipeline(lora: str) -> diffusers.StableDiffusionPipeline:
    """Return diffusers' pipeline of the demo in float32 with a LoRA."""
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(
        demo.MODEL_DIR, safety_checker=None, dtype=torch.float32
    )
    pipeline.set_progress_bar_config(disable=True)
    pipeline.load_lora_weights(lora_path(lora))
    return pipeline


def test_a_lora_beside_diffusers(float8: Path) -> None:
    """The image is near diffusers' in float32 with this LoRA; without the LoRA it is the first one, bit for bit."""
    pipeline = StableDiffusionPipeline.from_pretrained(float8, "cpu")

    def draw() -> np.ndarray:
        return np.asarray(pipeline(**CALL, generator=1, progress=False).images[0], np.float32)

    before = draw()
    pipeline.load_lora_weights(lora_path("night"), "night")
    image = draw()
    generator = torch.Generator().manual_seed(1)
    expected = np.asarray(diffusers_pipeline("night")(**CALL, generator=generator).images[0], np.float32)
    assert psnr(image, expected) > 30  # measured 33.0; the goal of 8 bits is 30
    assert psnr(before, expected) < 12  # measured 6.2: the LoRA changes the image
    pipeline.set_adapters("night", 0.5)
    half = draw()
    assert psnr(half, image) < 40
    pipeline.unload_lora_weights()
    assert not pipeline.models.overrides.weights
    np.testing.assert_array_equal(draw(), before)


def test_a_lora_is_what_optimizing_the_fused_checkpoint_gives(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elements and scales are bit for bit those of a checkpoint in which torch added the LoRA; a delta is computed once
    for both."""
    fused = tmp_path / "fused"
    shutil.copytree(demo.MODEL_DIR, fused)
    file = fused / "unet" / "diffusion_pytorch_model.safetensors"
    state = {name: tensor.float() for name, tensor in load_file(file).items()}
    modules = read_adapter(lora_path("night"), {}).modules["unet"]
    for name in [name for name in state if name.removesuffix(".weight").replace(".", "_") in modules]:
        delta = modules[name.removesuffix(".weight").replace(".", "_")].delta()
        assert delta is not None
        state[name] = state[name] + torch.from_numpy(delta.dense()).reshape(state[name].shape)
    save_file(state, file)
    options: dict[str, Any] = {"target": "portable", "components": ["unet"], "eight_bits": "int8", "inputs": recorded}
    for source, out in (("demo", tmp_path / "plain"), (str(fused), tmp_path / "expected")):
        optimize(source, out, **options)
    manager = LoraManager(tmp_path / "plain")
    manager.add("night", read_adapter(lora_path("night"), {}), "night")
    deltas = manager.deltas({"night": 1.0})["unet"]
    dense, computed = LowRankDelta.dense, list[LowRankDelta]()
    monkeypatch.setattr(LowRankDelta, "dense", lambda delta: computed.append(delta) or dense(delta))
    updated = manager.updated_weights("unet", "unet", deltas)
    assert len(computed) == len({id(delta) for delta in computed}) > 20
    assert len(computed) == sum(array.dtype == np.int8 for array in updated.values())
    expected = LoraManager(tmp_path / "expected")._initializers("unet")
    eight_bits = [name for name in updated if updated[name].dtype == np.int8]
    assert len(eight_bits) > 20
    for name, value in updated.items():
        np.testing.assert_array_equal(value, expected[name].values)


def test_a_lora_needs_the_checkpoint(float8: Path, tmp_path: Path) -> None:
    """A LoRA is refused in one line if the folder's checkpoint is missing or another one, and nothing changes."""
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(float8, out)
    manifest = json.loads((out / pipeline_folder.MANIFEST).read_text())
    manifest["source"]["model"] = str(model)
    (out / pipeline_folder.MANIFEST).write_text(json.dumps(manifest))
    adapter = read_adapter(lora_path("night"), {})
    manager = LoraManager(out)
    with pytest.raises(InputError, match=r"computed again from .*, which cannot be read .* Put it there"):
        manager.add("night", adapter, "night")
    shutil.copytree(demo.MODEL_DIR, model)
    file = model / "unet" / "diffusion_pytorch_model.safetensors"
    save_file({name: -tensor for name, tensor in load_file(file).items()}, file)
    with pytest.raises(InputError, match=r"in fewer bits, and .* is another checkpoint by now: optimize it again"):
        manager.add("night", adapter, "night")
    assert manager.adapters == {}


def test_ranges_are_percentiles(tmp_path: Path) -> None:
    """Products of two values, as a gate's, keep the largest magnitude; a product with a constant does not."""
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["": 21]> g (float[n] x) => (float[n] y) <float one = {1.0}>
        { y = Identity (x) gated = Mul (x, y) scaled = Mul (x, one) }"""
    )
    values = np.linspace(-1, 1, 200_000, dtype=np.float32)
    values[7] = 50.0
    feeds, names = [{"x": values}, {"x": -values}], ["y", "gated", "scaled"]
    assert measure_ranges(model, names, feeds, tmp_path, 100.0) == {"y": 50.0, "gated": 2500.0, "scaled": 50.0}
    clipped = measure_ranges(model, names, feeds, tmp_path, 99.0)
    assert clipped == {"y": pytest.approx(0.99, abs=0.01), "gated": 2500.0, "scaled": clipped["y"]}
    values[9] = np.inf
    with pytest.raises(InputError, match="computes inf in y: leave its prompt out"):
        measure_ranges(model, ["y"], feeds, tmp_path, 100.0)
    values[9], values[-1] = 0, np.nan  # ONNX Runtime's ReduceMax alone sees no NaN but the first element's
    with pytest.raises(InputError, match="computes nan in y: leave its prompt out"):
        measure_ranges(model, ["y"], feeds, tmp_path, 100.0)
    assert measure(model, feeds, tmp_path)["y"] == np.inf


def test_calibration_prompts_that_overflow(
    sd_ort: Cli, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is named in one line, and nothing is written."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\na blue circle\n")
    run = RecordingModel.__call__

    def overflow(self: RecordingModel, **arrays: Any) -> dict[str, np.ndarray]:
        outputs = run(self, **arrays)
        if len(self.runs) > calibration_runs.MAX_STEPS:  # of the second prompt
            outputs["out_sample"][..., -1, -1] = np.inf
        return outputs

    monkeypatch.setattr("sd_ort.stages.optimize", lambda _, folder, **__: shutil.copytree(reference, folder))
    monkeypatch.setattr(RecordingModel, "__call__", overflow)
    monkeypatch.setattr(calibration_runs, "MAX_STEPS", 2)
    options = ("--target", "portable", "--float8", "--prompts", prompts)
    code, _, err = sd_ort("optimize", "demo", tmp_path / "out", *options)
    lines = [line for line in err.splitlines() if line.startswith("sd-ort: ")]
    assert (code, len(lines)) == (2, 1), err
    assert "prompt 'a blue circle' gives latents that are not finite: leave it out" in lines[0]
    assert list(tmp_path.iterdir()) == [prompts]


def test_a_range_that_has_no_scale() -> None:
    """The scale of an activation exceeds float16: the error names the activation and a remedy."""
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["": 21]> g (float[1,4,64] sample, float[64,64] w) => (float[1,4,64] y)
        { z = MatMul (sample, w) y = Relu (z) }"""
    )
    weight = model.graph.inputs.pop()
    weight.const_value = ir.tensor(np.ones((64, 64), np.float32), name="w")
    model.graph.register_initializer(weight)
    ranges = EightBits("float8", lambda _, names: dict.fromkeys(names, 1e8))
    with pytest.raises(InputError, match=r"too large for .*: leave out the calibration prompt that gives it, or --fl"):
        quantize(model, "portable", ranges)


def test_a_full_disk_in_the_calibration(
    sd_ort: Cli, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line with the output's name, and nothing is left."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sd_ort.stages.optimize", lambda _, folder, **__: shutil.copytree(reference, folder))
    monkeypatch.setattr(calibration_runs, "record_runs", fail)
    code, _, err = sd_ort("optimize", "demo", tmp_path / "out", "--target", "portable", "--float8")
    assert code == 5
    assert err == f"sd-ort: no space left for {tmp_path / 'out'}: free some disk space and run it again.\n"
    assert not list(tmp_path.iterdir())


def test_refused_before_the_calibration(
    sd_ort: Cli, float8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options that exclude each other, components without layers in 8 bits, and outputs that cannot be replaced."""
    monkeypatch.setattr(calibration_runs, "record_runs", None)
    out, foreign = tmp_path / "out", tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "file").touch()
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\n")
    model = tmp_path / "model.onnx"
    shutil.copy(float8 / "text_encoder" / "model.onnx", model)
    cases: list[tuple[int, tuple[object, ...], str]] = [
        (2, ("demo", out, "--float8", "--int8"), "--float8 and --int8 exclude each other: leave one out."),
        (2, ("demo", out, "--int8", "--float16", "--bfloat16"), "--float16 and --bfloat16 exclude each other"),
        (2, ("demo", out, "--int8", "--weights", "int4"), "--weights and --int8 exclude each other: leave one out."),
        (2, ("demo", out, "--float8", "--weight-group", "32"), "--weight-group goes with --weights"),
        (2, ("demo", out, "--float8", "--asymmetric"), "--asymmetric goes with --weights"),
        (2, ("demo", out, "--int8", "--component", "text_encoder"), "--int8 is for the UNet or transformer"),
        (2, ("demo", out, "--int8", "--component", "unets"), "demo has no component 'unets'"),
        (5, ("demo", foreign, "--int8"), f"{foreign} exists and was not written by sd-ort"),
        (5, ("demo", prompts, "--int8"), f"{prompts} exists and was not written by sd-ort"),
        (2, (float8, out, "--int8", "--prompts", prompts), f"{float8} is optimized already: optimize what it was "),
        (2, (float8, out), f"{float8} is optimized already: optimize what it was made from, demo."),
        (2, (model, tmp_path / "o.onnx", "--int8", "--prompts", prompts), "--int8 goes with a pipeline folder or a ch"),
        (2, ("demo", out, "--int8", "--inputs", tmp_path / "no.npz"), "no.npz cannot be read: No such file or direc"),
        (2, ("demo", out, "--int8", "--inputs", prompts), "prompts.txt is no .npz archive: save arrays with numpy."),
        (2, ("demo", out, "--int8", "--prompts", tmp_path / "no.txt"), "no.txt cannot be read: No such file or direc"),
    ]
    for expected, arguments, message in cases:
        code, _, err = sd_ort("optimize", *arguments, "--target", "portable")
        assert (code, err.count("\n")) == (expected, 1), err
        assert message in err
    assert sorted(tmp_path.iterdir()) == [foreign, model, prompts]


def test_bad_inputs(recorded: Path, tmp_path: Path) -> None:
    out, runs = tmp_path / "out", {"inputs": recorded}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"target": "rocm", "eight_bits": "float8", **runs}, "target rocm has no kernels for --float8"),
        *(
            ({"target": target, "eight_bits": "float8", "vae_decoder": True, **runs}, f"target {target} has no convolu")
            for target in ("cpu", "cuda")
        ),
        *(
            (
                {"target": target, "eight_bits": "float8", "vae_decoder": True, **runs},
                "give --convolutions, or leave out",
            )
            for target in ("hip", "gpu")
        ),
        ({"target": "cuda", "eight_bits": "float8", "convolutions": True, **runs}, "targets gpu, hip alone: leave it"),
        ({"target": "portable", "vae_decoder": True}, "--vae-decoder goes with --float8 or --int8"),
        ({"target": "gpu", "convolutions": True}, "--convolutions goes with --float8 or --int8"),
        (
            {"target": "portable", "eight_bits": "int8", "vae_decoder": True, "components": ["unet"], **runs},
            "--vae-decoder is for vae_decoder: take it into --component",
        ),
        *(
            (
                {"target": target, "eight_bits": "int8", **runs},
                rf"target {target} has no kernels .*--weights int8 saves",
            )
            for target in ("hip", "gpu")
        ),
        ({"target": "portable", "eight_bits": "int8"}, "give --prompts, or --inputs"),
        ({"target": "portable", "eight_bits": "int8", "dtype": "bfloat16", **runs}, "not portable"),
        *(
            ({"target": target, "eight_bits": "float8", "dynamic_scales": True}, f"target {target} has only constant")
            for target in ("cpu", "cuda", "hip", "gpu")
        ),
        ({"target": "portable", "dynamic_scales": True}, "--dynamic-scales goes with --float8 or --int8"),
        (
            {"target": "portable", "eight_bits": "int8", "dynamic_scales": True, **runs},
            "needs no recorded runs in float32: leave out --inputs",
        ),
        (
            {"target": "portable", "eight_bits": "int8", "dynamic_scales": True, "components": ["text_encoder"]},
            "--int8 is for the UNet or transformer",
        ),
        (
            {"target": "portable", "eight_bits": "int8", "components": ["text_encoder"], **runs},
            "has no runs of text_enc",
        ),
    ]
    for options, message in cases:
        with pytest.raises(InputError, match=message):
            optimize("demo", out, **options)
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    base = ["demo", str(out), "--target", "portable"]
    for arguments, message in (
        (["--prompts", str(empty)], "--prompts goes with --float8 or --int8"),
        (["--float8", "--prompts", str(empty)], "has no prompts"),
        (["--vae-decoder"], "--vae-decoder goes with --float8 or --int8"),
        (["--float8", "--vae-decoder", "--target", "gpu"], "give --convolutions, or leave out --vae-decoder"),
        (["--float8", "--convolutions"], "--convolutions is an option of targets gpu, hip alone"),
        (["--float8", "--prompts", str(empty), "--inputs", str(recorded)], "without --inputs"),
        (["--float8", "--prompts", str(empty), "--dynamic-scales"], "without --inputs or --dynamic-scales"),
        (["--float8", "--dynamic-scales", "--target", "gpu"], "target gpu has only constant scales"),
    ):
        result = CliRunner().invoke(command, [*base, *arguments])
        assert isinstance(result.exception, InputError)
        assert message in str(result.exception)
    assert not out.exists()


def test_the_benchmark_of_recipes(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`eight_bits.py --recipes` with one layer, one recorded run and images of one step."""
    shutil.copytree(recorded.with_name("float32"), tmp_path / "float32")
    with np.load(recorded) as runs:
        np.savez(tmp_path / "runs.npz", **{name: runs[name] for name in runs if name.endswith("/0")})
    every, kind = eight_bits_bench.all_unet_layers(tmp_path), "time_emb_proj"
    assert all(every.kinds.values())  # each pattern is that of modules of the demo
    name = every.kinds[kind][0]
    one = replace(every, layers={name: every.layers[name]}, kinds={kind: [name]})
    monkeypatch.setattr(eight_bits_bench, "all_unet_layers", lambda _: one)
    monkeypatch.setattr(eight_bits_bench, "LAYER_STEPS", 1)
    monkeypatch.setattr(demo, "STEPS", 1)
    arguments = ["--recipes", "--prompts", "1", "--formats", "float8", "--work", tmp_path, "--out", tmp_path / "out.md"]
    monkeypatch.setattr(sys, "argv", ["eight_bits.py", *map(str, arguments)])
    eight_bits_bench.main()
    lines = [line.strip("| ").split(" | ") for line in (tmp_path / "out.md").read_text().splitlines()]
    rows = {cells[0].strip("*"): cells[1:] for cells in lines}
    layers = {label: rows[label][0] for label in ("ours", "MLPerf's", "TheStage's", "all layers", f"ours and {kind}")}
    assert [*layers.values()] == ["0 of 1", "0 of 1", "1 of 1", "1 of 1", "1 of 1"]
    assert rows["ours"][1] == "0.00e+00"
    assert rows[kind][1:4] == ["16", "16", "8"]
    error, unet_error = map(float, rows[name][2:4])
    assert 1e-5 < unet_error < error < 0.1


def test_mlperf(sd_ort: Cli, float8: Path, tmp_path: Path) -> None:
    """LoadGen runs on a folder in 8 bits, whose label says so."""
    size = ("--height", 64, "--width", 64, "--threads", 1, "--steps", 1, "--batch", 1)
    load_options = ("--mlperf", "--queries", 2, "--torch", "none", "--provider", "cpu")
    assert sd_ort("benchmark", float8, *load_options, *size, "--out", tmp_path)[0] == 0
    (row,) = json.loads((tmp_path / "mlperf.json").read_text())["engines"]
    assert (row["label"], row["status"]) == ("fused fp32 float8", "ok")
    assert row["Offline"]["images_per_s"] > 0
