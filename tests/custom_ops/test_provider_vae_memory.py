"""A VAE on a device whose memory is short: what is estimated, and calls in slices and tiles instead of a failure."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sd_ort import StableDiffusionPipeline
from sd_ort.pipelines.vae import Vae
from sd_ort.pipelines.vae_memory import MEGABYTE, Layout, VaeMemory
from sd_ort.runtime.session_device import SessionDevice
from sd_ort.stages import optimize

SD = (128, 256, 512, 512)
WHOLE = Layout()


@pytest.mark.parametrize(
    ("side", "measured"), [(256, 177 - 102), (512, 370 - 102), (768, 690 - 102), (1024, 1139 - 102)]
)
def test_the_estimate_is_what_was_measured(side: int, measured: int) -> None:
    """results/provider_memory.md: the least for a decode of SD 1.5 in float16, less the weights, in MiB."""
    estimate = VaeMemory(SD, itemsize=2).bytes((1, side, side), WHOLE) / MEGABYTE
    assert measured < estimate < measured + 8


def test_an_encoder_takes_half_of_a_decoder() -> None:
    decoder, encoder = (VaeMemory(SD, 2, decodes).bytes((1, 512, 512), WHOLE) for decodes in (True, False))
    assert encoder - 16 * MEGABYTE == (decoder - 16 * MEGABYTE) / 2


@pytest.mark.parametrize(
    ("images", "options", "megabytes", "expected"),
    [
        (4, WHOLE, 4 * 256 + 16, WHOLE),
        (4, WHOLE, 4 * 256 + 15, Layout(slices=True)),
        (4, WHOLE, 256 + 15, Layout(slices=True, tile=256)),
        (1, WHOLE, 256 + 15, Layout(tile=256)),
        (1, WHOLE, 16, Layout(tile=128)),  # no layout fits: the smallest
        (1, Layout(tile=512), 256 + 16, Layout(tile=512)),
        (1, Layout(tile=512), 64 + 16, Layout(tile=256)),
        (2, Layout(slices=True), 256 + 16, Layout(slices=True)),
    ],
)
def test_the_layout_with_the_fewest_parts_that_fits(
    images: int, options: Layout, megabytes: int, expected: Layout
) -> None:
    layout = VaeMemory(SD, 2).layout((images, 512, 512), options, megabytes * MEGABYTE, tile=512, least=128)
    assert layout == expected


@pytest.fixture(scope="module")
def folder(small_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vae") / "ours"
    optimize(small_export, path, target="gpu")
    return path


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_decode_that_does_not_fit_runs_in_tiles(
    by_name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same limit fails a decode at once. The image is that of `vae_tiling`, and one line says so."""
    size = {"height": 384, "width": 256, "num_inference_steps": 1, "generator": 0, "progress": False}
    limited = {"provider_options": {"memory_limit": str(36 * MEGABYTE)}}

    def pipeline(**options: object) -> StableDiffusionPipeline:
        return StableDiffusionPipeline.from_pretrained(folder, by_name, **options)

    in_tiles = np.asarray(pipeline(vae_tiling=True)("a cat", **size).images[0])
    at_once = np.asarray(pipeline()("a cat", **size).images[0])
    assert warnings(caplog) == []
    drawing = pipeline(**limited)
    for _ in range(2):
        np.testing.assert_array_equal(np.asarray(drawing("a cat", **size).images[0]), in_tiles)
    (line,) = warnings(caplog)
    assert line.startswith("vae_decoder: 1 x 256x384 pixels at once take about ")
    assert line.endswith(" MB are free: it runs in tiles of 128 pixels.")
    assert (at_once != in_tiles).any()

    monkeypatch.setattr(Vae, "_layout", lambda self, *_: WHOLE)
    with pytest.raises(Exception, match=r"not enough GPU memory: .*--vae-tiling"):
        pipeline(**limited)("a cat", **size)


def test_a_batch_that_does_not_fit_runs_in_slices(by_name: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every image of it is that of the whole batch, bit for bit."""
    latents = np.random.default_rng(0).standard_normal((4, 4, 16, 16), np.float32)
    free, limited = (
        StableDiffusionPipeline.from_pretrained(folder, by_name, provider_options=options).vae
        for options in ({}, {"memory_limit": str(24 * MEGABYTE)})
    )
    np.testing.assert_array_equal(limited.to_pixels(latents), free.to_pixels(latents))
    (line,) = warnings(caplog)
    assert line.endswith(": it runs one image at a time.")


def test_memory_of_an_earlier_call_is_taken_again(by_name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session keeps it, so that less is free; a call of the same size fits all the same, and a larger one not."""
    vae = StableDiffusionPipeline.from_pretrained(folder, by_name).vae
    assert vae.fits((1, 4, 64, 64))
    monkeypatch.setattr(SessionDevice, "free_bytes", lambda self: 0)
    assert vae.fits((1, 4, 64, 64))
    assert vae.fits((1, 4, 32, 32))
    assert not vae.fits((1, 4, 96, 96))


def test_a_cpu_is_not_asked(folder: Path, small_export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VaeMemory, "bytes", _never)
    vae = StableDiffusionPipeline.from_pretrained(small_export).vae
    assert vae.fits((1, 4, 1024, 1024))


_never: Callable[..., int] = pytest.fail
