"""Two devices for one pipeline: here two groups of the CPU's threads, and, for the order on GPUs, pretended streams."""

from __future__ import annotations

import ctypes
import itertools
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from cli_type import Cli
from PIL import Image

from sd_ort import StableDiffusionPipeline
from sd_ort.cli import model_options
from sd_ort.core.errors import InputError, ProviderError
from sd_ort.core.pipeline_folder import MODEL
from sd_ort.graphs.partition import MAX_IMBALANCE, partition_graph
from sd_ort.pipelines import noise, text_to_image
from sd_ort.pipelines.device.guidance_split import Events, GuidanceHalf, SplitGuidanceStep
from sd_ort.pipelines.images import pil_images
from sd_ort.pipelines.merged import MergedPipeline
from sd_ort.runtime.partitioned import BoundPartitions, PeerCopy
from sd_ort.runtime.providers import warnings_logged
from sd_ort.runtime.stream import Stream

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS: dict[str, Any] = {
    "prompt": "a red circle", "height": 64, "width": 64, "num_inference_steps": 2, "guidance_scale": 4.0,
    "output_type": "np", "generator": 7, "progress": False,
}  # fmt: skip


def draw(pipeline: Any, **arguments: Any) -> np.ndarray:
    return np.asarray(pipeline(**{**SETTINGS, **arguments}).images)


def test_same_bytes_on_two_devices(small_hoisted: Path) -> None:
    """In float32: no kernel of the CPU adds up a row's products in another order when there are other rows. With the
    folder's weights, and with changed ones."""
    one = StableDiffusionPipeline.from_pretrained(small_hoisted, device_loop=True)
    two = StableDiffusionPipeline.from_pretrained(small_hoisted, split_guidance=(0, 1))
    several = {"num_images_per_prompt": 2, "guidance_rescale": 0.5, "output_type": "latent"}
    np.testing.assert_array_equal(draw(two, **several), draw(one, **several))
    first = draw(one)
    np.testing.assert_array_equal(draw(two), first)
    assert two.loop.other.buffer_cache.keys() != two.loop.buffer_cache.keys(), "each side has its half"
    assert len(two.loop.other.buffer_cache) == 2

    name, value = next(
        (name, value.const_value)
        for name, value in ir.load(small_hoisted / "unet" / MODEL).graph.initializers.items()
        if len(value.shape or ()) == 4
    )
    assert value is not None
    for pipeline in (one, two):
        pipeline.models.replace_weights({"unet": {name: value.numpy() * np.float32(1.5)}})
        pipeline.on_weights_updated(closed=True)
    changed = draw(two)
    np.testing.assert_array_equal(changed, draw(one))
    assert np.abs(changed - first).max() > 1e-3


def test_unet_spread_over_devices(small_hoisted: Path) -> None:
    """Each of three devices has its range of the layers, changed weights too; in the loop on the devices, and on the
    host."""
    graph = ir.load(small_hoisted / "unet" / MODEL).graph
    cut = partition_graph(small_hoisted / "unet" / MODEL, 3)
    sizes = [part.bytes for part in cut]
    total = sum(value.const_value.nbytes for value in graph.initializers.values() if value.const_value is not None)
    for number, before in enumerate(itertools.accumulate(sizes[:-1]), 1):
        assert abs(before - total * number / 3) <= MAX_IMBALANCE * total
    assert total <= sum(sizes) < 1.01 * total
    parts = [onnx.load_from_string(part.graph).graph for part in cut]
    omitted = sum(not value.name for node in graph for value in node.outputs)
    assert sum(not name for part in parts for node in part.node for name in node.output) == omitted > 0
    name = max(cut[-1].weights - cut[0].weights)
    value = graph.initializers[name].const_value
    assert value is not None
    images = []
    for devices in (None, (0, 1, 2)):
        pipeline = StableDiffusionPipeline.from_pretrained(small_hoisted, unet_on=devices, device_loop=True)
        pipeline.models.replace_weights({"unet": {name: value.numpy() * np.float32(1.5)}})
        pipeline.on_weights_updated(closed=True)
        images.append(draw(pipeline))
    pipeline.device_loop = False
    images.append(draw(pipeline))
    assert len(pipeline.models["unet"].partitions) == 3
    for image in images[1:]:
        np.testing.assert_allclose(image, images[0], atol=1e-5)


def test_what_is_not_split_is_said(small_export: Path, caplog: pytest.LogCaptureFixture) -> None:
    warnings_logged.clear()
    two = StableDiffusionPipeline.from_pretrained(small_export, split_guidance=(0, 1))
    draw(two, guidance_scale=1.0, num_inference_steps=1)
    assert "nothing to split" in caplog.text
    assert not two.loop.other.buffer_cache
    draw(two, num_inference_steps=1, callback_on_step_end=lambda *_: {})
    assert "guidance is not split" in caplog.text
    with pytest.raises(InputError, match="unet is open on two devices"):
        two.unet = two.unet


def test_decoding_while_the_next_batch_is_generated(small_export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same bytes; decoded in another thread, by a session of its own; finished images are returned before a failure."""
    calls = [{**SETTINGS, "num_inference_steps": 1, "generator": seed} for seed in (1, 2)]
    one = StableDiffusionPipeline.from_pretrained(small_export)
    expected = [output.images for output in one.draw_each(calls)]
    two = StableDiffusionPipeline.from_pretrained(small_export, decode_on=1)
    finish, threads = two._finish, set()
    monkeypatch.setattr(
        two, "_finish", lambda *arguments: threads.add(threading.current_thread().name) or finish(*arguments)
    )
    outputs = two.draw_each([*calls, {"prompt": "a", "height": 1, "width": 1}])
    for images in expected:
        np.testing.assert_array_equal(next(outputs).images, images)
    with pytest.raises(InputError, match="height"):
        next(outputs)
    assert any(name.startswith("host") for name in threads)
    assert "vae_decoder" not in two.models.opened


def test_host_works_while_the_next_batch_is_generated(small_export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bytes with noise and conversion in another thread; finished images are returned before a failure."""
    pipeline = StableDiffusionPipeline.from_pretrained(small_export, device_loop=True)
    shared = {**SETTINGS, "num_inference_steps": 1, "output_type": "pil"}
    calls = [{**shared, "generator": [seed]} for seed in (1, 2, 2)] + [{**shared, "generator": 3, "output_type": "np"}]
    threads: dict[str, set[str]] = {"noise": set(), "images": set()}

    def recording(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            threads[name].add(threading.current_thread().name)
            return function(*arguments)

        return call

    monkeypatch.setattr(noise, "_is_x86", lambda: True)
    monkeypatch.delitem(sys.modules, "torch")  # whose generators draw, if it is imported
    expected = [pipeline(**call).images for call in calls]
    monkeypatch.setattr(noise, "to_normal", recording("noise", noise.to_normal))
    monkeypatch.setattr(text_to_image, "pil_images", recording("images", pil_images))
    outputs = pipeline.draw_each([*calls, {"prompt": "a", "height": 1, "width": 1}])
    for reference in expected:
        images = next(outputs).images
        assert isinstance(images, type(reference))
        np.testing.assert_array_equal(images, reference)
    with pytest.raises(InputError, match="height"):
        next(outputs)
    assert threads["images"] == {"host_0"}
    assert threads["noise"] == {"MainThread", "host_0"}  # of the first call, and of the seeds of later ones
    assert pipeline._started_noise == []


def test_generate_on_two_devices(
    sd_ort: Cli, small_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU is refused, and stands for both."""
    shared = ("generate", "a", "--model", small_export, "--steps", 1, "--seed", 3, "--height", 64, "--width", 64)
    for option in ("--split-guidance", "--split-image", "--unet-devices"):
        code, _, error = sd_ort(*shared, option, "0,1", "--provider", "cpu", "--out", tmp_path)
        line = f"sd-ort: {option} is for several GPUs, not for provider cpu: leave it out.\n"
        assert (code, error) == (2, line)
    monkeypatch.setattr(model_options, "ONE_DEVICE", ())
    for name, options in {"one": (), "two": ("--split-guidance", "0,1", "--decode-on", 1)}.items():
        code, out, error = sd_ort(*shared, "--num-images", 3, "--batch", 2, "--out", tmp_path / name, *options)
        assert (code, len(out.splitlines())) == (0, 3), error
    for path in (tmp_path / "one").iterdir():
        np.testing.assert_allclose(
            np.asarray(Image.open(tmp_path / "two" / path.name), float), np.asarray(Image.open(path)), atol=1
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_guidance": (0,)}, "two different devices, such as 0 and 1, not 0"),
        ({"split_guidance": (1, 1)}, "two different devices"),
        ({"split_guidance": (0, 1), "low_memory": True}, "leave low_memory off"),
        ({"split_guidance": (0, 1), "device_loop": False}, "leave device_loop on"),
        ({"split_guidance": (0, 1), "unet_on": (0, 1)}, "choose split_guidance or unet_on"),
        ({"split_guidance": (0, 1, 2)}, "between two devices, not 3"),
        ({"unet_on": (0,)}, "two or more different devices, such as 0 and 1, not 0"),
        ({"unet_on": range(400)}, "no 400 parts of about the same size"),
    ],
)
def test_refused(small_export: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        StableDiffusionPipeline.from_pretrained(small_export, **options)


def test_merged_is_refused(small_export: Path) -> None:
    with pytest.raises(InputError, match="a merged model is one session"):
        MergedPipeline.from_pretrained(small_export, split_guidance=(0, 1))


def test_the_option_is_numbers(sd_ort: Cli, small_export: Path) -> None:
    code, _, error = sd_ort("generate", "a", "--model", small_export, "--split-guidance", "0;1")
    assert code == 2
    assert "no numbers of devices" in error
    listed = small_export.parent / "prompts.txt"
    listed.write_text("a\nb\n")
    code, _, error = sd_ort("generate", "--prompts", listed, "--model", small_export, "--split-guidance", "0,1")
    assert code == 2
    assert "--split-guidance is for one prompt" in error


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(pointer: Any) -> int:
        pointer._obj.value = 1
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(cudaGetDeviceCount=count))
    with pytest.raises(ProviderError, match="GPU 1 is not there: this machine shows 1 GPU, counted from 0"):
        Stream("libcudart.so", "cuda", 1)


class Queue:
    """A stream of a GPU: what is queued on it runs later, in its order."""

    def __init__(self) -> None:
        self.queued: list[tuple[str, Any]] = []
        self.marked: dict[int, int] = {}  # event -> how often it was recorded, on the host
        self.past: dict[int, int] = {}  # and on the device

    def set_device(self) -> None:
        pass

    def event(self) -> tuple[Queue, int]:
        self.marked[number := len(self.marked)] = self.past[len(self.past)] = 0
        return self, number

    def record_event(self, event: tuple[Queue, int]) -> None:
        self.marked[event[1]] += 1
        self.queued.append(("mark", event[1]))

    def wait_event(self, event: tuple[Queue, int]) -> None:
        other, number = event
        self.queued.append(("wait", (other, number, other.marked[number])))

    def copy_to_peer(self, source: list[int], other: Queue, target: list[int], size: int) -> None:
        self.queued.append(("run", lambda: target.__setitem__(0, source[0])))

    def advance(self) -> bool:
        """Do the next thing that is queued, if it need not wait."""
        if not self.queued:
            return False
        kind, what = self.queued[0]
        if kind == "wait" and what[0].past[what[1]] < what[2]:
            return False
        self.queued.pop(0)
        if kind == "mark":
            self.past[what] += 1
        elif kind == "run":
            what()
        return True


class Value(list[int]):
    """A buffer of one number."""

    def shape(self) -> list[int]:
        return [1]

    def data_type(self) -> str:
        return "tensor(float)"

    def data_ptr(self) -> Value:
        return self


@pytest.mark.parametrize("seed", range(20))
def test_order_on_two_streams(seed: int) -> None:
    """However the two devices share their time, each step reads the predictions of that step, its own and the other's.

    The UNet predicts 10 x latents + its side, a step adds up both predictions.
    """
    streams, chance = (Queue(), Queue()), random.Random(seed)
    latents, noise, received = ([Value([1]) for _ in streams] for _ in range(3))
    sides = []
    for side, stream in enumerate(streams):

        def part(work: Callable[[int], None], side: int = side, stream: Queue = stream) -> Any:
            return SimpleNamespace(run=lambda wait: stream.queued.append(("run", lambda: work(side))))

        unet = part(lambda side: noise[side].__setitem__(0, 10 * latents[side][0] + side))
        between = part(lambda side: latents[side].__setitem__(0, noise[side][0] + received[side][0]))
        schedule = SimpleNamespace(step=between, noise=noise[side], received=received[side])
        buffers: Any = SimpleNamespace(stages=[unet, between], schedule=schedule)
        sides.append(GuidanceHalf(buffers, Events(stream)))  # type: ignore[arg-type]

    step, expected = SplitGuidanceStep(sides, None), 1
    for _ in range(6):
        step.run(wait=False)
        expected = 20 * expected + 1
    while streams[0].queued or streams[1].queued:
        done = chance.choice(streams).advance() or streams[0].advance() or streams[1].advance()
        assert done, "both devices wait for each other"
    assert latents[0][0] == latents[1][0] == expected


@pytest.mark.parametrize("seed", range(10))
def test_order_of_partitions(seed: int) -> None:
    """However three devices share their time: a range reads what those before it gave in this step, also the first's
    result in the last, and the step after the chain its result. A range adds its number to what it reads."""
    streams, chance = [Queue() for _ in range(3)], random.Random(seed)
    sample, first, second, third, result = (Value([1]) for _ in range(5))
    targets = {name: Value([0]) for name in ("first in 1", "first in 2", "second in 2")}

    def part(number: int, work: Callable[[], None]) -> Any:
        return SimpleNamespace(run=lambda wait: streams[number].queued.append(("run", work)))

    chain = BoundPartitions.__new__(BoundPartitions)
    chain.partitions = [SimpleNamespace(stream=stream) for stream in streams]  # type: ignore[misc]
    chain.runs = [
        part(0, lambda: first.__setitem__(0, sample[0] + 1)),
        part(1, lambda: second.__setitem__(0, targets["first in 1"][0] + 2)),
        part(2, lambda: third.__setitem__(0, targets["first in 2"][0] + targets["second in 2"][0] + 3)),
    ]
    chain.copies = [
        [],
        [PeerCopy(first, 0, targets["first in 1"])],
        [PeerCopy(first, 0, targets["first in 2"]), PeerCopy(second, 1, targets["second in 2"])],
        [PeerCopy(third, 2, result)],
    ]
    chain.reserve_events()
    expected = 1
    for _ in range(4):
        chain.run(wait=False)
        streams[0].queued.append(("run", lambda: sample.__setitem__(0, result[0])))  # what is between two steps
        expected = (expected + 1) + (expected + 3) + 3
    while any(stream.queued for stream in streams):
        done = chance.choice(streams).advance() or any(stream.advance() for stream in streams)
        assert done, "the devices wait for each other"
    assert sample[0] == expected
