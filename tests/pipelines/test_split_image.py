"""One image in bands of rows on several devices: here groups of the CPU's threads, and pretended streams."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from cli_type import Cli, success
from PIL import Image

from scripts.fixtures import graph_fixtures
from sd_ort import StableDiffusionPipeline
from sd_ort.cli import model_options
from sd_ort.core import metrics
from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import MODEL
from sd_ort.graphs.load import load, serialize_over_data
from sd_ort.graphs.patches import Band, compute_band, inputs_from, outputs_for, return_borders
from sd_ort.optimize.optimizer import optimize_component
from sd_ort.optimize.targets import TARGETS
from sd_ort.pipelines.device.band_unet import BandUnet
from sd_ort.pipelines.device.guidance_split import Events
from sd_ort.pipelines.device.patches import PatchDevice, SplitImageStep
from sd_ort.pipelines.partial_steps import FULL_STEPS, BandSteps
from sd_ort.runtime.session import DEFAULT_OPTIONS, ModelOverride, create_session
from sd_ort.stages import optimize
from tests.pipelines.test_two_devices import Queue, Value

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS: dict[str, Any] = {
    "prompt": "a red circle", "height": 128, "width": 64, "num_inference_steps": 10, "guidance_scale": 4.0,
    "output_type": "np", "generator": 7, "progress": False,
}  # fmt: skip


def draw(pipeline: Any, **arguments: Any) -> np.ndarray:
    return np.asarray(pipeline(**{**SETTINGS, **arguments}).images)


@pytest.fixture(scope="module")
def channels_last(small_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bands") / "gpu"
    optimize(small_export, folder, target="gpu", components=["unet"])
    return folder


def results(path: Path, edit: Callable[[Any], None] | None, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the outputs of a UNet whose graph `edit` changed, by name."""
    model = load(path)
    if edit is not None:
        edit(model)
    graph = ModelOverride(graph=serialize_over_data(model, path.parent))
    session = create_session(path, "cpu", DEFAULT_OPTIONS, graph)
    outputs = session.run(None, {value.name: arrays[value.name] for value in session.get_inputs()})
    return dict(zip((value.name for value in session.get_outputs()), outputs, strict=True))


def test_bands_with_values_of_the_same_step(channels_last: Path) -> None:
    """Bands with values of the complete graph from the same step compute the same rows and send the same values.

    Equal but for rounding: sums of other orders, and variances from mean squares, in float32.
    """
    path, count = channels_last / "unet" / MODEL, 3
    random_ = np.random.default_rng(0)
    arrays = {}
    for value in create_session(path, "cpu").get_inputs():
        sizes = [size if isinstance(size, int) else 1 if size == "batch" else 7 for size in value.shape]
        arrays[value.name] = random_.normal(size=sizes).astype(np.float32)
    sample = random_.normal(size=(1, 4, 8 * count, 16)).astype(np.float32)
    sample[:, :, :8] *= 3  # a band of another variance
    expected = results(path, None, {**arrays, "sample": sample})["out_sample"]
    bands = [Band(index, count) for index in range(count)]
    all_returned, outputs = [], []
    for band in bands:
        returned = results(path, partial(return_borders, band=band), {**arrays, "sample": sample})
        np.testing.assert_array_equal(returned.pop("out_sample"), expected)
        rows = np.split(sample, count, axis=2)[band.index]
        all_returned.append(returned)
        outputs.append(results(path, partial(compute_band, band=band), {**arrays, **returned, "sample": rows}))
    np.testing.assert_allclose(np.concatenate([each["out_sample"] for each in outputs], 2), expected, atol=2e-5)
    for reader, returned in zip(bands, all_returned, strict=True):
        read = set()
        for writer, offered in zip(bands, outputs, strict=True):
            if writer != reader:
                sources, names = outputs_for(offered, writer, reader.index), inputs_from(returned, reader, writer.index)
                read |= set(names)
                for source, name in zip(sources, names, strict=True):
                    np.testing.assert_allclose(offered[source], returned[name], atol=2e-5, err_msg=name)
        assert read == {name for name in returned if name not in ("patch.gamma", "patch.beta")}
    without = {name: np.ones_like(value) * (name == "patch.gamma") for name, value in all_returned[0].items()}
    alone = results(path, partial(compute_band, band=bands[0]), {**arrays, **without, "sample": sample[:, :, :8]})
    assert np.abs(alone["out_sample"] - expected[:, :, :8]).max() > 0.01, "what others offer matters"


def test_same_image_with_values_of_the_same_step(small_hoisted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole steps give the bytes of one device. So do, but for rounding, bands that read values of their own step:
    guidance, rows and predictions find their places."""
    one = draw(StableDiffusionPipeline.from_pretrained(small_hoisted, device_loop=True))
    several = StableDiffusionPipeline.from_pretrained(small_hoisted, split_image=range(4))
    monkeypatch.setattr(BandSteps, "is_full", lambda self, step: True)
    np.testing.assert_array_equal(draw(several), one)
    monkeypatch.setattr(BandSteps, "is_full", lambda self, step: step < 2)
    run = BandUnet.run

    def run_of_fresh_values(self: BandUnet, wait: bool = True) -> None:
        parity = self.index % 2
        self.full[parity].run(wait)
        latest, before = (self.received[at].memory for at in (parity, 1 - parity))
        before.update_inplace(latest.numpy())  # extrapolated to itself
        run(self, wait)

    monkeypatch.setattr(BandUnet, "run", run_of_fresh_values)
    np.testing.assert_allclose(draw(several), one, atol=1e-3)
    monkeypatch.setattr(BandUnet, "run", run)
    close = draw(several)
    assert 25 < metrics.psnr(255 * close, 255 * one) < 100
    for loop in several.loop.loops:
        (buffers,) = loop.buffer_cache.values()
        assert buffers.band_unet.received[0].memory.numpy().any()


def test_what_bands_send(small_hoisted: Path) -> None:
    """After a band's step each device has the others' rows, keys and values, to the byte."""
    pipeline = StableDiffusionPipeline.from_pretrained(small_hoisted, split_image=range(3))
    draw(pipeline, guidance_scale=1.0, height=192, num_inference_steps=10)
    unets = [next(iter(loop.buffer_cache.values())).band_unet for loop in pipeline.loop.loops]
    assert not unets[0].is_full
    for reader in unets:
        for writer in unets:
            if writer is not reader:
                received = reader.received[reader.parity].values
                pairs = zip(outputs_for(writer.offered.values, writer.band, reader.band.index),
                            inputs_from(received, reader.band, writer.band.index), strict=True)  # fmt: skip
                for source, name in pairs:
                    np.testing.assert_array_equal(received[name].numpy(), writer.offered.values[source].numpy())
                band = reader.bands[writer.band.index].numpy()
                np.testing.assert_array_equal(band, writer.rows.outputs["out_sample"].numpy())


@pytest.mark.parametrize(
    ("devices", "arguments", "message"),
    [
        (2, {}, "use split_guidance"),
        (3, {}, "give an even number"),
        (4, {"num_inference_steps": 4}, "4 steps differ too much"),
        (4, {"height": 64}, "height 64 has no 2 bands"),
        (4, {"num_images_per_prompt": 2}, "one large image at a time, not 2"),
        (4, {"callback_on_step_end": lambda *_: {}}, "without callbacks"),
    ],
)
def test_calls_that_are_not_split(small_hoisted: Path, devices: int, arguments: dict[str, Any], message: str) -> None:
    pipeline = StableDiffusionPipeline.from_pretrained(small_hoisted, split_image=range(devices))
    with pytest.raises(InputError, match=message):
        draw(pipeline, **arguments)


def test_step_cache_is_not_split(small_hoisted: Path) -> None:
    pipeline = StableDiffusionPipeline.from_pretrained(small_hoisted, split_image=range(4))
    pipeline.enable_cache(3)
    with pytest.raises(InputError, match="another graph of the UNet"):
        draw(pipeline)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_image": (0,)}, "two or more different devices"),
        ({"split_image": (0, 1), "split_guidance": (0, 1)}, "leave the others out"),
        ({"split_image": (0, 1), "low_memory": True}, "split_image keeps a UNet on each device"),
        ({"split_image": (0, 1), "device_loop": False}, "split_image runs in the loop"),
    ],
)
def test_options_that_do_not_go_together(small_hoisted: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        StableDiffusionPipeline.from_pretrained(small_hoisted, **options)


def test_a_graph_that_is_not_fused(small_export: Path) -> None:
    """Its normalizations are not found, so their means would be those of the band."""
    with pytest.raises(InputError, match="cannot be split into bands of rows: optimize the folder"):
        compute_band(load(small_export / "unet" / MODEL), Band(0, 2))


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        ("y = Softmax (sample)", "Softmax cannot be split"),
        ("turned = Transpose <perm = [0, 1, 3, 2]> (sample)  y = MatMul (sample, turned)", "MatMul cannot be split"),
        ('y = Resize <mode = "linear"> (sample, , scales)', "Resize cannot be split"),
        ('y = Conv <auto_pad = "SAME_UPPER"> (sample, w)', "auto_pad"),
        ("y = com.microsoft.MultiHeadAttention <num_heads = 1> (t, t, t, b)", "with a bias or a mask"),
    ],
)
def test_what_mixes_rows_otherwise(graph: str, reason: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
        unet (float[1,4,8,8] sample, float[4] scales, float[4,4,3,3] w, float[24] b) => (float[a,c,d,e] y)
        {{ s = Constant <value_ints = [1, 32, 8]> ()  t = Reshape (sample, s)  {graph} }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    with pytest.raises(InputError, match=reason):
        compute_band(model, Band(0, 2))


def test_sites_of_sdxl(tmp_path: Path) -> None:
    """A band reads two halos of each 3 x 3 convolution, the other's keys of 70 self-attentions, and one gamma and beta.

    Of the 140 attentions half are cross-attention; 1 x 1 convolutions are products, and shortcuts have no halo.
    """
    name = "sdxl-tiny-dynamo-20.unet"
    raw = graph_fixtures.make_folder(tmp_path / "raw", name)
    optimize_component(raw / "unet" / MODEL, tmp_path / MODEL, TARGETS["gpu"])
    model = load(tmp_path / MODEL)
    convolutions = sum(node.op_type == "NhwcConv" for node in model.graph)
    compute_band(model, Band(1, 3))
    names = [str(value.name) for value in model.graph.inputs]
    assert sum(name.endswith((".keys.0", ".keys.2")) for name in names) == 2 * 70
    assert sum(name.endswith((".above", ".below")) for name in names) == 2 * convolutions
    assert [name for name in names if "norm" in name or name in ("patch.gamma", "patch.beta")] == [
        "patch.gamma", "patch.beta",
    ]  # fmt: skip
    outputs = [str(value.name) for value in model.graph.outputs]
    assert len(outputs_for(outputs, Band(1, 3), 0)) == len(outputs_for(outputs, Band(1, 3), 2)) == 70 + convolutions


def test_generate(small_hoisted: Path, sd_ort: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_options, "ONE_DEVICE", ())  # the CPU stands for two
    shared = ("generate", "a", "--model", small_hoisted, "--seed", 3, "--height", 128, "--width", 64, "--steps", 10)
    out = success(sd_ort, *shared, "--split-image", "0,1", "--guidance", 1, "--out", tmp_path)
    with Image.open(out.strip()) as image:
        assert image.info["split_image"] == "0,1"
    code, _, error = sd_ort(*shared, "--split-image", "0,1", "--out", tmp_path / "other")
    assert code == 2
    assert "use split_guidance (--split-guidance)" in error


@pytest.mark.parametrize("seed", range(10))
def test_order_on_four_streams(seed: int) -> None:
    """In any order of four devices, each step reads the values that all devices computed in this step.

    A band's rows are 10 x latents + its device's number, joined by a sum over its half; a step adds up both halves.
    """
    streams, chance = [Queue() for _ in range(4)], random.Random(seed)
    latents, rows, theirs, noise, received = ([Value([1]) for _ in streams] for _ in range(5))
    devices = []
    for number, stream in enumerate(streams):

        def part(work: Callable[[int], None], number: int = number, stream: Queue = stream) -> Any:
            return SimpleNamespace(run=lambda wait: stream.queued.append(("run", lambda: work(number))))

        unet = part(lambda n: rows[n].__setitem__(0, 10 * latents[n][0] + n))
        unet.band, unet.is_full, unet.number = Band(number % 2, 2), False, number
        unet.join = part(lambda n: noise[n].__setitem__(0, rows[n][0] + theirs[n][0]))
        unet.copies_to = lambda other, n=number: [
            (SimpleNamespace(address=rows[n], size=1), SimpleNamespace(address=theirs[other.number], size=1))
        ]
        step = part(lambda n: latents[n].__setitem__(0, noise[n][0] + received[n][0]))
        schedule = SimpleNamespace(step=step, noise=noise[number], received=received[number])
        buffers: Any = SimpleNamespace(stages=[unet, step], schedule=schedule, band_unet=unet)
        job: Any = SimpleNamespace(side="negative" if number < 2 else "positive")
        devices.append(PatchDevice(buffers, job, Events(stream), Events(stream)))  # type: ignore[arg-type]

    steps, expected = SplitImageStep(devices, None), 1
    for _ in range(5):
        steps.run(wait=False)
        expected = 40 * expected + 6
    while any(stream.queued for stream in streams):
        done = chance.choice(streams).advance() or any(stream.advance() for stream in streams)
        assert done, "the devices wait for each other"
    assert [value[0] for value in latents] == 4 * [expected]


def test_steps_of_all_rows() -> None:
    steps = BandSteps(0, 2, lambda: None)  # type: ignore[arg-type,return-value]
    full_steps = [step for step in range(20) if steps.is_full(step)]
    assert full_steps == [*range(FULL_STEPS), 8, 16]
