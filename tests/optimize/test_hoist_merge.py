"""Hoisted UNets, merged pipelines and the device sampling loop generate the images of the default pipeline."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import tiny_pipeline
import torch
from image_metrics import psnr

from sd_ort import StableDiffusionPipeline
from sd_ort.checkpoints.schedulers import make_scheduler
from sd_ort.checkpoints.synthetic_inputs import SIZES
from sd_ort.core.errors import InputError, SdOrtError
from sd_ort.core.pipeline_folder import MANIFEST, MODEL, read_manifest
from sd_ort.graphs import hoist
from sd_ort.graphs.inline import inline
from sd_ort.inspect.explain import explain
from sd_ort.inspect.verify import verify
from sd_ort.optimize.merge import merge
from sd_ort.pipelines.merged import MergedPipeline
from sd_ort.runtime.bound_run import BoundRun
from sd_ort.runtime.providers import warnings_logged
from sd_ort.runtime.session import OrtModel
from sd_ort.stages import optimize

PARTS = ["text_encoder", "unet", "vae_decoder"]
SETTINGS: dict[str, Any] = {
    "prompt": "a red circle",
    "height": 64,
    "width": 64,
    "num_inference_steps": 3,
    "guidance_scale": 4.0,
    "output_type": "np",
    "generator": 7,
}


def draw(pipeline: Any, **arguments: Any) -> np.ndarray:
    return np.asarray(pipeline(**{**SETTINGS, **arguments}).images)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hoist")


@pytest.fixture(scope="module")
def half(small_export: Path, work: Path) -> Path:
    optimize(
        small_export, work / "half", target="portable", components=PARTS, dtype="float16", hoist=True, calibrate=False
    )
    return work / "half"


@pytest.fixture(scope="module")
def pipe(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return a function that makes a pipeline over a folder's sessions, which are opened once for each loop."""

    @cache
    def opened(folder: str, looped: bool) -> Any:
        return StableDiffusionPipeline.from_pretrained(request.getfixturevalue(folder), device_loop=looped)

    def make(folder: str, looped: bool = False, **options: Any) -> Any:
        return StableDiffusionPipeline.from_pipe(opened(folder, looped), **options)

    return make


@pytest.fixture(scope="module")
def expected(pipe: Callable[..., Any]) -> np.ndarray:
    return draw(pipe("small_fused"))


# --- Hoisting -------------------------------------------------------------------------------------------------------


def test_hoisted_pipeline_generates_the_same_image(pipe: Callable[..., Any], expected: np.ndarray) -> None:
    assert psnr(draw(pipe("small_hoisted")), expected) > 100  # measured: infinite


def test_graphs_of_a_hoisted_unet(small_fused: Path, small_hoisted: Path) -> None:
    parts = {name: ir.load(small_hoisted / component / MODEL).graph for name, component in hoist.PARTS.items()}
    # 4 cross-attentions with K and V each; the step graph has no product over the text.
    assert sum(node.op_type in ("MatMul", "LinearAdd") for node in parts["prompt"]) == 8
    assert [v.name for v in parts["prompt"].inputs] == ["encoder_hidden_states"]
    assert [v.name for v in parts["time"].inputs] == ["timestep"]
    assert [v.name for v in parts["time"].outputs] == ["time_embedding"]
    assert {v.name for v in parts["step"].inputs}.isdisjoint({"timestep", "encoder_hidden_states"})
    assert not any(node.op_type in ("Sin", "Cos", "Gemm") for node in parts["step"])
    count = sum(1 for _ in ir.load(small_fused / "unet" / MODEL).graph)
    assert sum(len(graph) for graph in parts.values()) - count in range(-2, 4)  # nothing twice but Concat and Split
    assert read_manifest(small_hoisted)["components"]["unet"]["hoisted"].keys() == set(hoist.PARTS.values())


def test_joined_graph_equals_the_unet(small_fused: Path, small_hoisted: Path, tmp_path: Path) -> None:
    ir.save(hoist.join(small_hoisted), tmp_path / "joined.onnx", external_data="joined.data")
    sessions = [onnxruntime.InferenceSession(path) for path in (small_fused / "unet" / MODEL, tmp_path / "joined.onnx")]
    random = np.random.default_rng(0)
    feed = {
        "sample": random.standard_normal((2, 4, 16, 8)).astype(np.float32),
        "timestep": np.array([501], np.float32),
        "encoder_hidden_states": random.standard_normal((2, 9, 64)).astype(np.float32),
    }
    one, other = (session.run(["out_sample"], feed)[0] for session in sessions)
    np.testing.assert_array_equal(one, other)


def test_packed_and_half(small_export: Path, tmp_path: Path) -> None:
    optimize(small_export, tmp_path / "cuda", components=["unet"], target="cuda", dtype="float16", hoist=True)
    parts = {name: ir.load(tmp_path / "cuda" / component / MODEL).graph for name, component in hoist.PARTS.items()}
    packed = [v for v in parts["prompt"].outputs if v.shape is not None and len(v.shape) == 5]
    assert len(packed) == 4
    assert {v.dtype for v in packed} == {ir.DataType.FLOAT16}
    assert parts["time"].inputs[0].dtype == ir.DataType.FLOAT
    attentions = [node for node in parts["step"] if node.op_type == "MultiHeadAttention"]
    assert sum(len(node.inputs) == 2 and node.inputs[1].is_graph_input() for node in attentions) == 4


def test_hoisting_of_unsupported_models_is_an_error(small_hoisted: Path, small_export: Path, tmp_path: Path) -> None:
    foreign = Path(shutil.copytree(small_hoisted, tmp_path / "foreign"))
    (foreign / MANIFEST).unlink()
    for source, message in ((small_hoisted, f"optimized already.* made from, {small_export}"), (foreign, "hoisted al")):
        with pytest.raises(InputError, match=message):
            optimize(source, tmp_path / "again")
    shutil.rmtree(foreign)
    with pytest.raises(InputError, match="take it into --component"):
        optimize(small_export, tmp_path / "out", components=["vae_decoder"], hoist=True)
    with pytest.raises(InputError, match="neither a UNet nor a transformer"):
        hoist.split(ir.load(small_export / "vae_decoder" / MODEL))
    assert list(tmp_path.iterdir()) == []


# --- One model ------------------------------------------------------------------------------------------------------


def test_merged_pipeline_generates_the_same_image(
    small_fused: Path, pipe: Callable[..., Any], expected: np.ndarray, tmp_path: Path
) -> None:
    manifest = merge(small_fused, tmp_path / "merged", steps=3)
    assert manifest["components"]["pipeline"]["merged"] == PARTS
    merged = MergedPipeline.from_pretrained(tmp_path / "merged")
    assert psnr(draw(merged), expected) > 80
    # Step counts, schedulers, negative prompts and batch sizes are inputs of one model.
    other = {"num_inference_steps": 5, "negative_prompt": "blurry", "num_images_per_prompt": 2}
    separate = pipe("small_fused", scheduler="euler")
    merged.scheduler = make_scheduler(small_fused, "euler")
    assert psnr(draw(merged, **other), draw(separate, **other)) > 80
    with pytest.raises(InputError, match="takes no LoRAs: load them with the folder it was made from"):
        merged.load_lora_weights({})
    merged.vae.enable_tiling()
    merged.enable_vae_slicing()
    with pytest.raises(InputError, match="takes no vae_tiling, vae_slicing: use the folder"):
        draw(merged)


def test_merged_needs_only_ids_and_noise(small_fused: Path, tmp_path: Path) -> None:
    merge(small_fused, tmp_path / "merged", steps=2, guidance=3.0)
    session = onnxruntime.InferenceSession(tmp_path / "merged" / "pipeline" / MODEL)
    ids = np.ones((1, 77), np.int64)
    feed = {"input_ids": ids, "negative_ids": ids * 2, "latents": np.ones((1, 4, 8, 8), np.float32)}
    (image,) = session.run(None, feed)
    assert image.shape == (1, 3, 64, 64)
    assert 0 <= image.min() < image.max() <= 1
    assert {i.name for i in session.get_overridable_initializers()} >= {"timesteps", "weights", "guidance_scale"}


def test_merged_hoisted_half(half: Path, pipe: Callable[..., Any], tmp_path: Path) -> None:
    expected = draw(pipe("half"))
    merge(half, tmp_path / "merged")
    assert psnr(draw(MergedPipeline.from_pretrained(tmp_path / "merged")), expected) > 50


def test_merging_of_unsupported_folders_is_an_error(small_fused: Path, tmp_path: Path, sd_ort: Any) -> None:
    with pytest.raises(InputError, match="draws random numbers"):
        merge(small_fused, tmp_path / "out", scheduler="euler_ancestral")
    assert list(tmp_path.iterdir()) == []
    code, out, error = sd_ort("merge", small_fused, tmp_path / "merged", "--steps", 2)
    assert (code, "as one model" in out) == (0, True), error
    code, _, error = sd_ort("merge", tmp_path / "merged", tmp_path / "again")
    assert (code, "is a merged pipeline" in error) == (2, True)
    image = tmp_path / "a.png"
    size = ("--height", 64, "--width", 64, "--steps", 2)
    assert sd_ort("generate", "x", "--model", tmp_path / "merged", *size, "--out", image)[0] == 0
    assert image.is_file()


def test_opset_of_a_merged_model() -> None:
    """Target cpu raises some components to opset 23 for Attention; from 21 on the higher opset is used for both."""

    def model(opset: int, domain: int = 1) -> ir.Model:
        imports = f'["" : {opset}, "sd_ort" : {domain}]'
        return ir.from_onnx_text(
            f"<ir_version: 10, opset_import: {imports}> f (float[N] x) => (float[N] y) {{ y = Relu (x) }}"
        )

    for first, second in ((21, 23), (23, 21)):
        merged = model(first)
        outputs = inline(merged, model(second), {"x": merged.graph.outputs[0]}, "b/")
        merged.graph.outputs[:] = [outputs["y"]]
        assert [node.op_type for node in merged.graph] == ["Relu", "Relu"]
        assert merged.graph.opset_imports[""] == 23
    for first, second, domain in ((20, 21, 1), (21, 21, 2)):
        merged = model(first)
        with pytest.raises(InputError, match="optimize the whole folder again"):
            inline(merged, model(second, domain), {"x": merged.graph.outputs[0]}, "b/")


# --- Optimum's timestep -----------------------------------------------------------------------------------------------


def _optimum(folder: Path) -> Path:
    """A tiny pipeline whose UNet has a timestep of shape [] like Optimum's: Unsqueeze, Cast, Expand to the batch."""
    tiny_pipeline.write(folder)
    text = f"""<ir_version: 8, opset_import: ["" : 18]> unet (float[batch,4,height,width] sample, int64 timestep,
        float[batch,sequence,{tiny_pipeline.WIDTH}] encoder_hidden_states) => (float[batch,4,height,width] out_sample)
        <int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[2] axes = {{1, 2}}, int64[1] last = {{3}},
         int64[4] column = {{-1, 1, 1, 1}}, float small = {{0.001}}> {{
            told = ReduceMean <keepdims = 1> (encoder_hidden_states, axes)  wide = Unsqueeze (told, last)
            row = Unsqueeze (timestep, zero)  number = Cast <to = 1> (row)
            shape = Shape (sample)  batch = Slice (shape, zero, one)  rows = Expand (number, batch)
            scaled = Mul (rows, small)  angle = Sin (scaled)  shift = Reshape (angle, column)
            a = Add (sample, wide)  out_sample = Add (a, shift)
        }}"""
    tiny_pipeline.save(onnx.parser.parse_model(text), folder / "unet")
    return folder


def test_timestep_without_an_axis(work: Path) -> None:
    """Exported, optimized, hoisted and merged, in the host loop and the device loop: equal images."""
    source = _optimum(work / "optimum")
    expected = draw(StableDiffusionPipeline.from_pretrained(source))
    for name, options in {"fused": {}, "split": {"hoisted": True}, "half": {"dtype": "float16"}}.items():
        optimize(source, work / f"optimum-{name}", target="portable" if name != "half" else "cuda", **options)
        assert verify(source, work / f"optimum-{name}")["passed"]
    assert read_manifest(work / "optimum-half")["options"]["hoist"]
    for folder in (source, work / "optimum-fused", work / "optimum-split"):
        for device_loop in (False, True):
            pipeline = StableDiffusionPipeline.from_pretrained(folder, device_loop=device_loop)
            assert psnr(draw(pipeline), expected) > 80
            assert bool(pipeline.loop.buffer_cache) == device_loop
    merge(work / "optimum-fused", work / "optimum-merged")
    assert psnr(draw(MergedPipeline.from_pretrained(work / "optimum-merged")), expected) > 80


@pytest.mark.parametrize("source", ["encoder_hidden_states", "seen"])
def test_the_batch_size_of_a_shape_that_others_read_too(source: str) -> None:
    """The time graph does not take the batch size from the prompt, whose rows are repeated for all steps."""
    text = f"""<ir_version: 8, opset_import: ["" : 18]> unet (float[batch,4] sample, float[1] timestep,
        float[batch,words,4] encoder_hidden_states) => (float[batch,4] out_sample)
        <int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] far = {{9}}, float[batch,words,4] seen> {{
            seen = Relu (encoder_hidden_states)
            shape = Shape ({source})  batch = Slice (shape, zero, one)  rest = Slice (shape, one, far)
            both = Concat <axis = 0> (batch, rest)  reshaped = Reshape (seen, both)
            mean = ReduceMean <keepdims = 0> (reshaped, one)  rows = Expand (timestep, batch)
            angle = Sin (rows)  shift = Unsqueeze (angle, one)
            a = Add (sample, mean)  out_sample = Add (a, shift)
        }}"""
    parts = hoist.split(ir.serde.from_onnx_text(text))
    assert [value.name for value in parts["time"].graph.inputs] == ["timestep"]
    assert [value.name for value in parts["prompt"].graph.inputs] == ["encoder_hidden_states"]
    assert {value.name for value in parts["step"].graph.inputs} >= {"sample", "mean"}


# --- The loop on the device -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["small_fused", "small_hoisted", "half"])
@pytest.mark.parametrize(
    "arguments", [{}, {"guidance_scale": 1.0, "num_images_per_prompt": 2}], ids=["guided", "batch"]
)
def test_device_loop(pipe: Callable[..., Any], kind: str, arguments: dict[str, Any]) -> None:
    """On the CPU the device is the host: this tests the graphs and the buffers, not their memory."""
    separate, looped = pipe(kind), pipe(kind, looped=True)
    expected, fewer = draw(separate, **arguments), draw(separate, **arguments, num_inference_steps=2)
    for _ in range(2):  # buffers and sessions are used again
        assert psnr(draw(looped, **arguments), expected) > (60 if kind == "half" else 80)
    assert psnr(draw(looped, **arguments, num_inference_steps=2), fewer) > (60 if kind == "half" else 80)


def test_device_loop_logs_unsupported_calls(
    small_fused: Path, pipe: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    warnings_logged.clear()
    clipping = make_scheduler(small_fused, "ddim")
    clipping = type(clipping).from_config({**clipping.config, "clip_sample": True})
    looped, separate = (pipe("small_fused", looped, scheduler=clipping) for looped in (True, False))
    assert psnr(draw(looped), draw(separate)) > 100
    assert "go through the host at every step: DDIMScheduler draws random numbers or clips" in caplog.text


# Schedulers that draw, and DDIM's eta; LCM's steps are those that it was distilled for.
DRAWING = {
    "euler_ancestral": {},
    "lcm": {"original_inference_steps": 50, "timestep_scaling": 10.0},
    "dpmsolver": {"algorithm_type": "sde-dpmsolver++"},
    "ddim": {},
    "ddpm": {},
}


@pytest.mark.parametrize("name", DRAWING)
@pytest.mark.parametrize("seeds", [3, [3, 4]], ids=["one", "each"])
def test_device_loop_samples_noise_in_the_same_order(
    small_fused: Path, pipe: Callable[..., Any], name: str, seeds: Any
) -> None:
    """With one generator for all images or one per image the scheduler's noise is that of the host loop."""
    scheduler = make_scheduler(small_fused, name)
    config = {key: value for key, value in scheduler.config.items() if not key.startswith("_")}
    scheduler = type(scheduler).from_config({**config, **DRAWING[name]})
    images = {"num_images_per_prompt": len(seeds)} if isinstance(seeds, list) else {}
    outputs = []
    for looped in (False, True):
        generator = [torch.Generator().manual_seed(seed) for seed in seeds] if images else seeds
        arguments = {"generator": generator, "eta": 0.7 if name == "ddim" else 0.0, "num_inference_steps": 4}
        pipeline = pipe("small_fused", looped, scheduler=scheduler)
        outputs.append(draw(pipeline, **images, **arguments))
        assert not looped or pipeline.loop.buffer_cache, "the loop ran on the host"
    assert psnr(*outputs) > 80


def test_queued_equals_waited(pipe: Callable[..., Any]) -> None:
    """Byte for byte; on a GPU scripts/bench/default_pipeline.py checks the same."""
    for folder in ("half", "small_hoisted"):
        looped = pipe(folder, looped=True)
        queued = draw(looped)
        looped.loop.wait = True
        np.testing.assert_array_equal(draw(looped), queued)


def test_no_copies_through_the_host(pipe: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """From tokens to uint8: no component is called with NumPy arrays, and only the last run is synchronous."""
    looped = pipe("small_hoisted", looped=True)
    expected = draw(looped, output_type="pil", num_inference_steps=2)
    waits: list[bool] = []
    run = BoundRun.run
    monkeypatch.setattr(BoundRun, "run", lambda bound, wait=True: waits.append(wait) or run(bound, wait))
    monkeypatch.setattr(OrtModel, "__call__", None)
    np.testing.assert_array_equal(draw(looped, output_type="pil", num_inference_steps=2), expected)
    assert waits.count(True) == 1
    assert waits[-1]
    (buffers,) = looped.loop.buffer_cache.values()
    buffers.stages.pop()  # the scheduler's step after a U-Net call
    with pytest.raises(SdOrtError, match=r"took 0 steps of \d: its kernels did nothing.*device_loop=False"):
        draw(looped, output_type="pil", num_inference_steps=2)


def test_buffers_are_bounded(pipe: Callable[..., Any]) -> None:
    """The buffers of the least recently used job shape are released."""
    looped = pipe("small_fused", looped=True)
    looped.loop.MAX_CACHED = 1
    sizes = []
    for images in (1, 2, 1):
        draw(looped, num_inference_steps=1, num_images_per_prompt=images)
        sizes.append(looped.loop.buffer_bytes)
    assert 0 < sizes[0] == sizes[2] < sizes[1]


def test_threads_share_one_pipeline(pipe: Callable[..., Any]) -> None:
    """Eight threads, three schedulers and several step counts: each image is the one generated alone."""
    names = ("ddim", "pndm", "euler")
    pipelines = {name: pipe("small_fused", scheduler=name) for name in names}
    jobs = [(name, 2 + number % 3, number) for number, name in enumerate([*pipelines] * 4)]

    def one(job: tuple[str, int, int]) -> np.ndarray:
        name, steps, seed = job
        return draw(pipelines[name], num_inference_steps=steps, generator=seed)

    alone = [one(job) for job in jobs]
    with ThreadPoolExecutor(8) as pool:
        images = list(pool.map(one, jobs))
    for image, expected in zip(images, alone, strict=True):
        np.testing.assert_array_equal(image, expected)


# --- Other commands on a hoisted folder -----------------------------------------------------------------------------


def test_verify_and_explain(small_export: Path, small_hoisted: Path, small_fused: Path, sd_ort: Any) -> None:
    result = verify(small_export, small_hoisted, components=["unet"], sizes=SIZES[:1])
    assert result["passed"]
    assert [row["component"] for row in result["rows"]] == ["unet"]
    assert "were joined to the one graph" in result["notes"][0]
    entries = explain(small_hoisted)["components"]
    assert list(entries) == PARTS
    assert entries["unet"]["fused"] == explain(small_fused)["components"]["unet"]["fused"]
    assert not [path for path in small_hoisted.iterdir() if path.name.startswith(".")]
