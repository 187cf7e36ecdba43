"""Our execution provider on the host vendor, as the package uses it: tuning files, weights in place, a pipeline."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
import torch
from cli_type import Cli, success

from scripts.fixtures.parity_models import preset
from sd_ort import StableDiffusionPipeline
from sd_ort.checkpoints.presets import PRESETS, open_preset
from sd_ort.core.errors import ProviderError
from sd_ort.core.metrics import relative_l2_error
from sd_ort.core.pipeline_folder import MODEL, read_manifest
from sd_ort.export.exporter import export
from sd_ort.graphs.load import load
from sd_ort.inspect.node_assignment import assign_nodes
from sd_ort.optimize.optimizer import optimize_component
from sd_ort.optimize.targets import TARGETS
from sd_ort.pipelines.transformer_steps import TransformerSteps
from sd_ort.runtime import bound_run, providers, tuning, warm_up, weight_prefetch
from sd_ort.runtime.bound_run import NO_GRAPH_ID, GpuGraphModel
from sd_ort.runtime.components import Components
from sd_ort.runtime.library import PROVIDER_LIBRARIES
from sd_ort.runtime.providers import provider_named
from sd_ort.runtime.session import ModelOverride, SessionOptions, create_session
from sd_ort.runtime.updatable_weights import UpdatableWeights, supports_in_place_update, update_callback
from sd_ort.stages import optimize
from sd_ort.weights import update_graph


def test_its_tuning_file_is_its_own(provider: str, tmp_path: Path) -> None:
    """The op library's GPU half is of the same build, and has other candidates: results of one mean nothing to it."""
    own = Path(provider.removeprefix("plugin:"))
    other = shutil.copy(own, tmp_path / "libsd_ort_cuda.so")
    files = [tuning.path_for(tuning.validators_of(tuning.GpuOps(path), "1.31")) for path in (own, Path(other))]
    assert files[0] != files[1]


def test_shared_initializers_are_used_in_place(provider: str) -> None:
    """A session refuses a weight that owns its memory on a device, and takes its view, which sees what is written."""
    ones = np.ones((8, 8), np.float32)
    updatable = UpdatableWeights({"weight": ones}, provider_named(provider).device)
    settings = ort.SessionOptions()
    with pytest.raises(RuntimeError, match="owned by the user"):
        settings.add_initializer("weight", updatable.values["weight"])
    settings.add_initializer("weight", updatable.shared["weight"])
    updatable.update("weight", 3 * ones)
    assert updatable.shared["weight"].data_ptr() == updatable.values["weight"].data_ptr()
    np.testing.assert_array_equal(updatable.values["weight"].numpy(), 3 * ones)


def convolution(path: Path, filters: np.ndarray) -> Path:
    """NhwcConv of x (2, 16, 16, C) by `filters` (C, 3, 3, C) of float16, as a file."""
    channels = len(filters)
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 20, "sd_ort": 1]>
        g (float16[2, 16, 16, {channels}] x) => (float16[2, 16, 16, {channels}] y) {{
            y = sd_ort.NhwcConv <pads = [1, 1, 1, 1]> (x, filters)
        }}
        <opset_import: ["": 20], domain: "sd_ort"> NhwcConv <pads> (x, filters) => (y) {{ y = Identity (x) }}""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(filters, "filters"))
    onnx.save(model, path)
    return path


def convolved(x: np.ndarray, filters: np.ndarray) -> np.ndarray:
    x = np.pad(x.astype(np.float32), ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.stack([x[:, i : i + 16, j : j + 16] for i in range(3) for j in range(3)], 3)
    output: np.ndarray = np.tensordot(
        windows, filters.astype(np.float32).reshape(len(filters), 9, -1), ((3, 4), (1, 2))
    )
    return output


@pytest.fixture(scope="module")
def wide() -> tuple[np.ndarray, np.ndarray]:
    """x and filters of a convolution that Winograd pays for (custom_ops/operators/nhwc_conv/op.h)."""
    random = np.random.default_rng(5)
    x, filters = random.normal(size=(2, 16, 16, 424)), random.normal(size=(424, 3, 3, 424)) / 60
    return x.astype(np.float16), filters.astype(np.float16)


@pytest.fixture
def untuned(provider: str) -> str:
    """The provider where a session before left its tuner on, which would choose by time."""
    tuning.GpuOps(Path(provider.removeprefix("plugin:"))).enable(False)
    return provider


def test_filters_are_transformed_where_that_pays(
    untuned: str, tmp_path: Path, wide: tuple[np.ndarray, np.ndarray]
) -> None:
    """At the first call, captured later or not, with rounded filters; where memory is limited as they are."""
    x, filters = wide
    path, expected = convolution(tmp_path / "wide.onnx", filters), convolved(x, filters)
    plain = create_session(path, untuned, SessionOptions(provider_options={"memory_limit": str(1 << 30)})).run(
        None, {"x": x}
    )[0]
    winograd = create_session(path, untuned).run(None, {"x": x})[0]
    assert np.abs(plain - expected).max() < 2e-3
    assert np.abs(winograd - expected).max() < 4e-3
    assert (winograd != plain).mean() > 0.1
    captured = GpuGraphModel(
        create_session(path, untuned, SessionOptions(capture=True)), provider_named(untuned).device
    )
    for _ in range(2):
        np.testing.assert_array_equal(captured(x=x)["y"], winograd)


def test_filters_that_are_written_are_transformed_again(
    untuned: str, tmp_path: Path, wide: tuple[np.ndarray, np.ndarray]
) -> None:
    """Under an open session, in its captured graph, and in another that reads the same memory; one is gone by then."""
    x, filters = wide
    path, device = convolution(tmp_path / "wide.onnx", filters), provider_named(untuned).device
    updatable = UpdatableWeights({"filters": filters}, device, update_callback(untuned))
    captured = GpuGraphModel(
        create_session(path, untuned, SessionOptions(capture=True), override=ModelOverride(updatable=updatable.shared)),
        device,
    )
    second, third = (
        create_session(path, untuned, override=ModelOverride(updatable=updatable.shared)) for _ in range(2)
    )
    for session in (second, third):
        session.run(None, {"x": x})
    captured(x=x)
    del third, session
    for number in (1, 2):
        changed = np.roll(filters, number, axis=(0, 1))
        updatable.update("filters", changed)
        output = captured(x=x)["y"]
        assert np.abs(output - convolved(x, changed)).max() < 4e-3
        np.testing.assert_array_equal(second.run(None, {"x": x})[0], output)


def test_memory_outlives_the_values_that_a_session_was_given(
    provider: str, tmp_path: Path, wide: tuple[np.ndarray, np.ndarray]
) -> None:
    """A binding alone keeps the session, and so the weights that it reads."""
    x, filters = wide
    path, device = convolution(tmp_path / "wide.onnx", filters), provider_named(provider).device
    updatable = UpdatableWeights({"filters": 2 * filters}, device)
    owner = weakref.ref(updatable.values["filters"])
    session = create_session(path, provider, override=ModelOverride(updatable=updatable.shared))
    expected = session.run(None, {"x": x})[0]
    binding = session.io_binding()
    del updatable, session
    gc.collect()
    assert owner() is not None
    binding.bind_cpu_input("x", x)
    binding.bind_output("y")
    options = ort.RunOptions()
    binding._session.run_with_iobinding(binding._iobinding, options)
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], expected)
    del binding
    gc.collect()
    assert owner() is None


def test_shared_initializers_are_read_in_place(provider: str) -> None:
    assert supports_in_place_update(provider, provider_named(provider).device, {})


def test_it_computes_lora_deltas_itself(provider: str, tmp_path: Path) -> None:
    """Nodes on the CPU would copy every factor and every delta over the bus at each change of a scale."""
    filters = ["cast", "FLOAT16", ["subpixel_phases", None, ["transpose", [0, 2, 3, 1], "w"]]]
    for recipe, shape in (
        (filters, (5, 4, 3, 3)),
        (["matrix", 5, ["transpose", [0, 2, 3, 1], "w"]], (5, 4, 1, 1)),
        (["interleave", 2, *(["transpose", [1, 0], each] for each in "qkv")], (8, 4)),
    ):
        spec = update_graph.weight_update_spec(recipe, shape, np.dtype(np.float16))
        assert spec is not None
        (tmp_path / "model.onnx").write_bytes(update_graph.build_weight_update(spec))
        assert assign_nodes([tmp_path / "model.onnx"], provider)["unassigned_nodes"] == []


@pytest.mark.parametrize("component", ["vae_decoder", "vae_encoder"])
def test_it_runs_every_node_of_qwen_images_vae(provider: str, tmp_path: Path, component: str) -> None:
    """Its norms over channels are AdaptiveNorm, its convolutions channels-last; outputs are those on the CPU."""
    source, options = tmp_path / "exported", {"random_weights": True, "exporter": "torchscript"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "qwen-vae", preset("qwen_image"))
        export(None, source, preset="qwen-vae", components=[component], **options)
    optimize(source, tmp_path / "out", target="gpu", dtype="float16")
    path = tmp_path / "out" / component / MODEL
    assert assign_nodes([path], provider)["unassigned_nodes"] == []
    operators = Counter(node.op_type for node in load(path).graph)
    norms = {"vae_decoder": 14, "vae_encoder": 10}[component]
    assert (operators["AdaptiveNorm"], operators["Conv"], operators["ReduceL2"]) == (norms, 0, 0)
    sizes = {"vae_decoder": (2, 16, 6, 10), "vae_encoder": (2, 3, 12, 20)}[component]
    x = np.random.default_rng(0).normal(size=sizes).astype(np.float16)
    sessions = create_session(path, provider), create_session(source / component / MODEL, "cpu")
    actual, expected = (
        session.run(None, {session.get_inputs()[0].name: x.astype(dtype)})[0].astype(np.float32)
        for session, dtype in zip(sessions, (np.float16, np.float32), strict=True)
    )
    assert relative_l2_error(actual, expected) < 4e-3  # measured 1.3e-3; float16 rounds to 5e-4


def a_lora(*modules: str) -> dict[str, torch.Tensor]:
    """Of rank 2, for U-Nets of `sd15-small`, in Kohya's names."""
    weights = open_preset("sd15-small", 0).load("unet").state_dict()
    generator = torch.Generator().manual_seed(0)
    lora = {}
    for module in modules:
        count, *rest = weights[f"{module}.weight"].shape
        name = f"lora_unet_{module.replace('.', '_')}"
        lora[f"{name}.lora_down.weight"] = torch.randn(2, *rest, generator=generator)
        lora[f"{name}.lora_up.weight"] = torch.randn(count, 2, *[1] * (len(rest) - 1), generator=generator)
    return lora


def test_pipeline_by_the_default_call(
    by_name: str,
    small_export: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    sd_ort: Cli,
) -> None:
    """Captured and queued, nothing warned of, the CPU's image; LoRAs change the prefetched weights under the open
    session; what was tuned is kept and found again."""
    monkeypatch.setattr(weight_prefetch, "MIN_FILE", 0)
    monkeypatch.setattr(weight_prefetch, "MIN_TENSOR", 0)
    monkeypatch.setenv("SD_ORT_TUNING", str(tmp_path / "tuning"))
    monkeypatch.setattr(tuning, "Finalize", lambda *_, **__: None)  # at the process's end the variable is gone
    assert sd_ort("optimize", small_export, tmp_path / "ours", "--target", "gpu", "--hoist")[0] == 0
    assert read_manifest(tmp_path / "ours")["components"]["unet"]["op_counts"]["LinearSplitGelu"] == 4
    size = {"height": 64, "width": 64}
    arguments = {**size, "num_inference_steps": 3, "generator": 0, "progress": False}
    expected = StableDiffusionPipeline.from_pretrained(small_export)("a cat", **arguments).images[0]
    pipeline = StableDiffusionPipeline.from_pretrained(tmp_path / "ours", by_name)
    for _ in range(2):
        image = pipeline("a cat", **arguments).images[0]
        assert np.abs(np.asarray(image).astype(int) - np.asarray(expected)).max() <= 1
    assert isinstance(pipeline.unet, GpuGraphModel)
    (buffers,) = pipeline.loop.buffer_cache.values()
    assert pipeline.models.stream is not None
    assert buffers.schedule.step.graph_id != NO_GRAPH_ID
    assert [record for record in caplog.records if record.levelname == "WARNING" and record.name == "sd_ort"] == []

    again = StableDiffusionPipeline.from_pretrained(tmp_path / "ours", by_name)
    again.models.in_place = False
    assert pipeline.models.in_place
    lora = a_lora(
        "down_blocks.0.resnets.0.conv1",
        "down_blocks.0.resnets.0.time_emb_proj",  # read once a schedule
        "mid_block.attentions.0.transformer_blocks.0.attn1.to_q",
    )
    images, session = [], pipeline.unet.session
    for strength in (1.0, -2.0):
        for each in (pipeline, again):
            each.unload_lora_weights()
            each.load_lora_weights(lora, "a")
            each.set_adapters("a", strength)
            images.append(np.asarray(each("a cat", **arguments).images[0]).astype(int))
        assert np.abs(images[-1] - images[-2]).max() <= 1
    assert np.abs(images[-1] - images[0]).max() > 10
    assert pipeline.models.overrides.updatable["unet"].changed
    assert pipeline.models["unet"].session is session

    out = success(
        sd_ort, "tune", tmp_path / "ours", "--provider", by_name, "--component", "vae_decoder", "--height", 64
    )
    operators = tuning.read(Path(out.splitlines()[-1]))["operators"]
    assert {"NhwcConv", "SkipGroupNorm"} <= operators.keys()  # every norm of it adds a bias first
    caplog.set_level("INFO", "sd_ort")
    create_session(tmp_path / "ours" / "vae_decoder" / MODEL, by_name)
    assert "tuning results of" in caplog.text


TRANSFORMER = """<ir_version: 10, opset_import: ["" : 20]>
    g (float[batch,image,16] hidden_states, float[batch,text,16] encoder_hidden_states, float[1] timestep)
        => (float[batch,image,16] out_hidden_states)
    <float[1,8] frequencies, float[8,32] wt, float[16,16] we, int64[2] row = {1, 1}, int64[3] view = {0, 1, 16},
     int64[1] one = {1}, int64[1] last = {9223372036854775807}> {
        column = Reshape (timestep, row)  angles = Mul (column, frequencies)  time = MatMul (angles, wt)
        scale, shift = Split <axis = 1, num_outputs = 2> (time)
        scales = Reshape (scale, view)  shifts = Reshape (shift, view)
        text = MatMul (encoder_hidden_states, we)  joint = Concat <axis = 1> (text, hidden_states)
        scaled = Mul (joint, scales)  shifted = Add (scaled, shifts)
        length = Shape <start = 1, end = 2> (encoder_hidden_states)
        image_part = Slice (shifted, length, last, one)  out_hidden_states = Tanh (image_part)
    }"""


@pytest.fixture
def transformer_folder(tmp_path: Path) -> Path:
    """A pipeline folder with a hoisted transformer of one modulated layer, target gpu."""
    model, random = onnx.parser.parse_model(TRANSFORMER), np.random.default_rng(0)
    for value in list(model.graph.value_info):
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        weight = onnx.numpy_helper.from_array(random.normal(0, 1, shape).astype(np.float32), value.name)
        model.graph.initializer.append(weight)
    (tmp_path / "raw").mkdir()
    onnx.save(onnx.shape_inference.infer_shapes(model), tmp_path / "raw" / "whole.onnx")
    out = tmp_path / "folder"
    optimize_component(tmp_path / "raw" / "whole.onnx", out / "transformer" / MODEL, TARGETS["gpu"], hoisted=True)
    (out / "model_index.json").write_text("{}")
    return out


def test_transformer_steps_are_captured(by_name: str, transformer_folder: Path) -> None:
    """Calls of other sizes and batches, in turn too, compute what the whole graph does; what steps share is copied at
    the first one."""
    reference = ort.InferenceSession(str(transformer_folder.parent / "raw" / "whole.onnx"))
    models, random = Components(transformer_folder, by_name), np.random.default_rng(1)
    timesteps = np.array([0.9, 0.5, 0.2], np.float32)
    texts = [random.normal(0, 1, shape).astype(np.float32) for shape in ((2, 3, 16), (2, 3, 16), (1, 5, 16))]
    jobs = [TransformerSteps(models, [{"encoder_hidden_states": text}], timesteps) for text in (*texts, texts[0])]
    sizes = [4, 4, 7, 6]
    for i in range(len(timesteps)):
        for job, text, size in zip(jobs, (*texts, texts[0]), sizes, strict=True):
            latents = random.normal(0, 1, (len(text), size, 16)).astype(np.float32)
            inputs = {"hidden_states": latents, "encoder_hidden_states": text, "timestep": timesteps[i : i + 1]}
            (prediction,) = job(i, latents)
            np.testing.assert_allclose(prediction, reference.run(None, inputs)[0], rtol=1e-5, atol=1e-6)
    model = models["transformer"]
    assert isinstance(model, GpuGraphModel)
    assert len(model.runs) == 3
    assert all(run.graph_id != NO_GRAPH_ID for run in model.runs.values())
    written = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound_run, "write_value", lambda value, array: written.append(array.shape))
        jobs[3](2, latents)
    assert written == [(2, 6, 16), (2, 32)]  # latents and modulation


def test_a_provider_that_is_not_built(monkeypatch: pytest.MonkeyPatch, sd_ort: Cli) -> None:
    monkeypatch.setitem(PROVIDER_LIBRARIES, "hip", "no_such.so")
    with pytest.raises(ProviderError, match=r"the hip provider is not built .* sd-ort build-ops --hip gfx1100"):
        providers.check_provider("hip")
    assert json.loads(sd_ort("doctor", "--json")[1])["providers"]["hip"]["ok"] is False


def test_inputs_that_the_host_reads_are_read_at_each_step(
    by_name: str, small_export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A raw export: the provider has no kernel of Conv, so nodes on the CPU read the latents of every step."""
    pipeline = StableDiffusionPipeline.from_pretrained(small_export, by_name)
    arguments = {"height": 64, "width": 64, "num_inference_steps": 3, "progress": False}
    on_cpu = StableDiffusionPipeline.from_pretrained(small_export)
    for seed in (0, 1):
        image, expected = (
            np.asarray(each("a cat", generator=seed, **arguments).images[0]) for each in (pipeline, on_cpu)
        )
        assert np.abs(image.astype(int) - expected).max() <= 1
    (buffers,) = pipeline.loop.buffer_cache.values()
    assert buffers.unet.host_inputs == ["sample"]


def test_warm_up(by_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Once per process, beside a session that registers the provider; every node of its graph runs there."""
    runs = []
    monkeypatch.setattr(ort.InferenceSession, "run", lambda *arguments: runs.append(arguments))
    warm_up.warm_up.cache_clear()
    thread = warm_up.warm_up(by_name)
    providers.check_provider(by_name)
    assert thread is not None
    assert thread is warm_up.warm_up(by_name)
    thread.join()
    assert len(runs) == 1
    assert [warm_up.warm_up(name) for name in ("cpu", "auto")] == [None, None]
    onnx.save(onnx.parser.parse_model(warm_up.MODEL), tmp_path / "model.onnx")
    assert assign_nodes([tmp_path / "model.onnx"], by_name)["unassigned_nodes"] == []


TWO_DEVICES = """
import sys
import numpy as np
from sd_ort import StableDiffusionPipeline
from sd_ort.core.errors import ProviderError
folder, provider = sys.argv[1:]
arguments = dict(height=64, width=64, num_inference_steps=2, generator=3, progress=False)
images = []
for options in ({}, {"split_guidance": (0, 1)}, {"decode_on": 1}, {"unet_on": (0, 1)}):
    pipeline = StableDiffusionPipeline.from_pretrained(folder, provider, **options)
    images += [np.asarray(pipeline("a cat", **arguments).images[0]).astype(int) for _ in range(2)]
print(max(int(np.abs(image - images[0]).max()) for image in images), images[0].std() > 5)
try:
    StableDiffusionPipeline.from_pretrained(folder, provider, split_guidance=(0, 2))("a cat", **arguments)
except ProviderError as error:
    print(error)
"""


BANDS = """
import sys
import numpy as np
from sd_ort import StableDiffusionPipeline
from sd_ort.core import metrics
folder, provider = sys.argv[1:]
arguments = dict(height=128, width=64, num_inference_steps=10, guidance_scale=1, generator=3, progress=False)
images = []
for options in ({}, {"split_image": (0, 1)}):
    pipeline = StableDiffusionPipeline.from_pretrained(folder, provider, **options)
    images.append(np.asarray(pipeline("a cat", **arguments).images[0]))
unet = next(iter(pipeline.loop.buffer_cache.values())).band_unet
print(metrics.psnr(*images), unet.rows.host_inputs, unet.rows.graph_id >= 0)
"""


def test_bands_on_two_devices(provider: str, small_export: Path, tmp_path: Path) -> None:
    """Rows of an image on a second device: the simulated ones capture runs, and have memory of a vendor."""
    optimize(small_export, tmp_path / "gpu", target="gpu", components=["text_encoder", "unet", "vae_decoder"])
    command = [sys.executable, "-c", BANDS, str(tmp_path / "gpu"), provider]
    environment = os.environ | {"SD_ORT_SIMULATED_DEVICES": "2"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    decibel, host_inputs, is_captured = result.stdout.split()
    assert float(decibel) > 25
    assert (host_inputs, is_captured) == ("[]", "True")


def test_two_devices(provider: str, small_export: Path) -> None:
    """Guidance, decoding and layers of the U-Net on a second device; the simulated ones share the host's memory."""
    command = [sys.executable, "-c", TWO_DEVICES, str(small_export), provider]
    environment = os.environ | {"SD_ORT_SIMULATED_DEVICES": "2"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    summary, error = result.stdout.splitlines()
    difference, is_image = summary.split()
    assert int(difference) <= 1
    assert is_image == "True"
    assert error == "GPU 2 is not there: this machine shows 2 GPUs, counted from 0."
