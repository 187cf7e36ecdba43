"""The pipeline draws what diffusers draws from the same seed; `generate` writes whole files or none."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import tqdm
from cli_type import Cli
from image_metrics import psnr
from PIL import Image

from sd_ort import StableDiffusionPipeline, cli
from sd_ort.benchmark.engines.pytorch import first_latents
from sd_ort.checkpoints.schedulers import make_scheduler, scheduler_class
from sd_ort.core import files, metrics, progress
from sd_ort.core.errors import InputError, OutputError
from sd_ort.core.pipeline_folder import DATA, MODEL
from sd_ort.runtime.provider_table import PROVIDERS

PROMPTS = ["a red circle on a blue background", "two green squares"]
SIZE = {"height": 64, "width": 64}
SETTINGS: dict[str, Any] = {"num_inference_steps": 4, "guidance_scale": 4.0, **SIZE}
# Stated for the fp32 graph in uint8 pixels; measured on this pipeline: above 100 dB.
MIN_PSNR = 60.0


def seeds(*values: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(value) for value in values]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def pipeline(small_export: Path) -> StableDiffusionPipeline:
    return StableDiffusionPipeline.from_pretrained(small_export)


@pytest.fixture(scope="module")
def fused(small_fused: Path) -> StableDiffusionPipeline:
    return StableDiffusionPipeline.from_pretrained(small_fused)


def draw(pipeline: Any, **arguments: Any) -> np.ndarray:
    """Pictures (B, H, W, 3) in 0..1 of either pipeline."""
    return np.asarray(pipeline(**{"prompt": PROMPTS[0], **SETTINGS, "output_type": "np", **arguments}).images)


# --- The same image as diffusers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"guidance_scale": 1.0},
        {"height": 128, "width": 64},
        {"prompt": PROMPTS, "negative_prompt": ["blurry", ""]},
        {"prompt": PROMPTS, "num_images_per_prompt": 2},
        {"eta": 0.7},
    ],
    ids=["default", "no guidance", "size", "negative", "batch", "eta"],
)
def test_same_seed_same_image(reference: Any, pipeline: Any, arguments: dict[str, Any]) -> None:
    expected = draw(reference, generator=torch.Generator().manual_seed(7), **arguments)
    assert psnr(draw(pipeline, generator=7, **arguments), expected) > MIN_PSNR


def test_first_latents_are_those_of_diffusers(reference: Any) -> None:
    """Given to diffusers in half precision too, whose own draws would be others."""
    arguments = {**SETTINGS, "prompt": PROMPTS, "generator": seeds(3, 4), "output_type": "np"}
    expected = reference(**arguments).images
    arguments["generator"] = seeds(3, 4)
    latents = first_latents(reference, arguments)
    assert (latents.dtype, latents.shape) == (torch.float32, (2, 4, 8, 8))
    assert np.array_equal(reference(**arguments, latents=latents).images, expected)


def test_fused_generates_the_same_image(reference: Any, fused: Any) -> None:
    assert psnr(draw(fused, generator=7), draw(reference, generator=seeds(7)[0])) > MIN_PSNR


@pytest.mark.parametrize(
    "name", ["euler", "EulerAncestralDiscreteScheduler", "dpmsolver", "heun", "PNDM", "UniPC", "ddim"]
)
@pytest.mark.filterwarnings("ignore:.*The configuration file of this scheduler:FutureWarning")
def test_scheduler_by_name(reference: Any, small_export: Path, pipeline: Any, name: str) -> None:
    """As diffusers drives it, whose pipeline turns off `clip_sample` (DDIM's default)."""
    scheduler = scheduler_class(name).from_pretrained(small_export / "scheduler")
    theirs = type(reference)(**{**reference.components, "scheduler": scheduler}, requires_safety_checker=False)
    before = pipeline.scheduler
    try:
        pipeline.scheduler = make_scheduler(small_export, name)
        assert type(pipeline.scheduler) is scheduler_class(name)
        assert psnr(draw(pipeline, generator=3), draw(theirs, generator=seeds(3)[0])) > MIN_PSNR
    finally:
        pipeline.scheduler = before


def test_one_generator_per_image_makes_each_image_alone_again(pipeline: Any) -> None:
    both = draw(pipeline, num_images_per_prompt=2, generator=seeds(1, 2))
    assert psnr(both[1:], draw(pipeline, generator=2)) > MIN_PSNR
    assert psnr(both[:1], draw(pipeline, generator=2)) < 30


def test_latents_argument(reference: Any, pipeline: Any) -> None:
    noise = torch.randn(1, 4, 8, 8, generator=seeds(5)[0])
    assert psnr(draw(pipeline, latents=noise), draw(reference, latents=noise)) > MIN_PSNR
    with pytest.raises(InputError, match=r"\(1, 4, 8, 8\) are needed"):
        draw(pipeline, latents=noise[:, :, :4])


def test_output_types(pipeline: Any) -> None:
    image = pipeline(PROMPTS[0], generator=1, **SETTINGS).images[0]
    assert isinstance(image, Image.Image)
    pixels = draw(pipeline, generator=1)[0]
    np.testing.assert_array_equal(np.asarray(image), (pixels * 255).round().astype(np.uint8))
    (rounded,) = pipeline(PROMPTS[0], generator=1, output_type="uint8", **SETTINGS).images
    assert (rounded.dtype, rounded.tobytes()) == (np.uint8, np.asarray(image).tobytes())
    latents = pipeline(PROMPTS[0], generator=1, output_type="latent", **SETTINGS).images
    decoded = pipeline.decode(latents)[0].permute(1, 2, 0).numpy() / 2 + 0.5
    np.testing.assert_allclose(decoded.clip(0, 1), pixels, atol=1e-6)
    with pytest.raises(InputError, match="output_type"):
        draw(pipeline, output_type="jpeg")


def test_callback_sees_and_replaces_latents(pipeline: Any) -> None:
    seen = []

    def zero(_pipeline: Any, index: int, _timestep: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        seen.append((index, tuple(state["latents"].shape)))
        return {"latents": torch.zeros_like(state["latents"])}

    result = pipeline(PROMPTS[0], output_type="latent", callback_on_step_end=zero, **SETTINGS).images
    assert seen == [(i, (1, 4, 8, 8)) for i in range(len(seen))]
    assert len(seen) >= SETTINGS["num_inference_steps"]
    assert not result.any()


def test_long_prompt_says_what_is_cut(pipeline: Any, caplog: pytest.LogCaptureFixture) -> None:
    draw(pipeline, prompt="x" * 75, num_inference_steps=1)
    assert not caplog.records
    draw(pipeline, prompt="x" * 75 + " tail", num_inference_steps=1)
    assert "cut after 75 tokens" in caplog.text
    assert "'tail'" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"height": 60}, "multiples of 8"),
        ({"num_inference_steps": 0}, "1 or more"),
        ({"num_inference_steps": 2000}, "2000 steps"),
        ({"prompt": []}, "no prompt"),
        ({"prompt": PROMPTS, "negative_prompt": ["a", "b", "c"]}, "3 negative prompts for 2"),
        ({"num_images_per_prompt": 3, "generator": seeds(1, 2)}, "2 generators for 3 images"),
    ],
)
def test_arguments_that_do_not_fit(pipeline: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        draw(pipeline, **arguments)


@pytest.mark.parametrize(
    "name", ["no_such", "FlowMatchEulerDiscreteScheduler", "KarrasVeScheduler", "LMSDiscreteScheduler"]
)
def test_scheduler_that_cannot_be_used(small_export: Path, name: str) -> None:
    if name.startswith("LMS"):
        try:
            import scipy  # noqa: F401
        except ImportError:
            pass
        else:
            pytest.skip("scipy is here, so this scheduler can be used")
    with pytest.raises(InputError):
        make_scheduler(small_export, name)


# --- The command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def generate(sd_ort: Cli) -> Cli:
    """Run `sd-ort generate` with a short prompt, two steps and small images."""

    def run(model: Path, *arguments: object) -> tuple[int, str, str]:
        size = ("--height", 64, "--width", 64, "--provider", "cpu")
        return sd_ort("generate", PROMPTS[0], "--model", model, "--steps", 2, *size, *arguments)

    return run


def expect_error(result: tuple[int, str, str], code: int, message: str) -> None:
    """`sd-ort` ended with `code` and one line on stderr that says `message`."""
    assert result[0] == code
    lines = result[2].strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]


@pytest.fixture
def copy(small_export: Path, tmp_path: Path) -> Path:
    """A copy of the export that a test may break."""
    return Path(shutil.copytree(small_export, tmp_path / "model", ignore=shutil.ignore_patterns("vae_encoder")))


def test_generate_writes_numbered_files_with_their_settings(
    generate: Cli, tmp_path: Path, small_export: Path, pipeline: Any
) -> None:
    arguments = ("--num-images", 3, "--batch", 2, "--seed", 5, "--guidance", 4, "--scheduler", "euler")
    code, out, _ = generate(small_export, *arguments, "--out", tmp_path / "new" / "images")
    paths = sorted((tmp_path / "new" / "images").iterdir())
    assert [p.name for p in paths] == [f"a-red-circle-on-a-blue-background-{seed}.png" for seed in (5, 6, 7)]
    assert (code, out.split()) == (0, list(map(str, paths)))
    image = Image.open(paths[2])
    text = image.text  # type: ignore[attr-defined]
    assert (text["seed"], text["prompt"], text["scheduler"]) == ("7", PROMPTS[0], "EulerDiscreteScheduler")
    before, pipeline.scheduler = pipeline.scheduler, make_scheduler(small_export, "euler")
    alone = draw(pipeline, num_inference_steps=2, generator=7, output_type="pil")[0]
    pipeline.scheduler = before
    assert metrics.psnr(np.asarray(image), alone) > 50


def test_generate_does_not_overwrite_and_says_what_it_leaves_out(
    generate: Cli, tmp_path: Path, small_export: Path
) -> None:
    out = tmp_path / "mine.png"
    out.write_text("precious")
    expect_error(generate(small_export, "--out", out), 5, "exists: choose another --out")
    assert out.read_text() == "precious"
    code, _, message = generate(small_export, "--out", out, "--overwrite", "--negative", "blue", "--guidance", 1)
    assert (code, "--negative has no effect: guidance 1 disables guidance." in message) == (0, True)
    assert np.asarray(Image.open(out)).shape == (64, 64, 3)


def test_missing_folder(generate: Cli, tmp_path: Path) -> None:
    expect_error(generate(tmp_path / "nowhere"), 2, "no such file or folder")


def test_not_a_pipeline_folder(generate: Cli, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    expect_error(generate(tmp_path), 2, "is not a pipeline folder")


def test_other_kind_of_pipeline(generate: Cli, copy: Path) -> None:
    index = copy / "model_index.json"
    index.write_text(index.read_text().replace("StableDiffusionPipeline", "PixArtAlphaPipeline"))
    expect_error(generate(copy), 2, "holds a PixArtAlphaPipeline: give a Stable Diffusion folder")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (f"unet/{MODEL}", "truncated"),
        (f"vae_decoder/{DATA}", "truncated"),
        ("text_encoder/config.json", "config.json cannot be read"),
        ("scheduler/scheduler_config.json", "scheduler_config.json cannot be read"),
    ],
)
def test_broken_file(generate: Cli, copy: Path, broken: str, message: str) -> None:
    path = copy / broken
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    expect_error(generate(copy, "--out", copy.parent / "x.png"), 2, message)
    assert not (copy.parent / "x.png").exists()


@pytest.mark.parametrize("gone", ["vae_decoder", "tokenizer", f"unet/{DATA}"])
def test_missing_file(generate: Cli, copy: Path, gone: str) -> None:
    path = copy / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    expect_error(generate(copy), 2, gone.partition("/")[0])


def test_provider_that_is_not_installed(generate: Cli, small_export: Path) -> None:
    name = next(n for n, p in PROVIDERS.items() if p.ep not in onnxruntime.get_available_providers())
    expect_error(generate(small_export, "--provider", name), 3, f"'sd-ort[{name}]'")


def test_interrupt_leaves_no_half_written_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.write_bytes(tmp_path / "a.png", b"all of it")
    assert list(tmp_path.iterdir()) == []


def test_full_disk_leaves_no_half_written_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OutputError, match="No space left"):
        files.write_bytes(tmp_path / "a.png", b"all of it")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_drawing(small_export: Path, tmp_path: Path) -> None:
    out = tmp_path / "images"
    arguments = [
        "generate",
        "x",
        "--model",
        str(small_export),
        "--steps",
        "500",
        "--scheduler",
        "ddim",
        "--out",
        str(out),
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", "from sd_ort.cli import main; main()", *arguments],
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # ignored where a script runs the tests as a job
    )
    assert process.stderr is not None
    shown = b""
    while b"/500" not in shown:  # the progress bar: it draws now
        byte = process.stderr.read(1)
        assert byte, shown.decode()
        shown += byte
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130
    assert rest.decode().strip().splitlines()[-1].startswith("sd-ort: interrupted")
    assert b"Traceback" not in rest
    assert not out.exists()


@pytest.mark.parametrize("where", ["constructor", "drawing", "after"])
def test_interrupt_has_a_line_of_its_own(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever it meets the progress bar: before it exists, while it is printed, or printed and not yet in a `with`."""

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            sys.stderr.write(text)
            if where == "drawing" and "0/500" in text and next(first, False):
                raise KeyboardInterrupt
            return len(text)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        bar = bar_class(*arguments, **options, file=Screen())
        if where == "constructor":
            raise KeyboardInterrupt
        return bar

    def draw(**_: object) -> None:
        if where == "after":
            bar = bar_class(range(500), file=Screen())
            assert bar.n == 0
            raise KeyboardInterrupt
        with progress.step_bar(range(500), True):
            raise AssertionError("an interrupt comes first")

    first, bar_class = iter([True]), tqdm.tqdm
    monkeypatch.setattr(bar_class, "_lock", threading.RLock(), raising=False)  # tqdm keeps it when it is interrupted
    monkeypatch.setattr(tqdm, "tqdm", interrupted)  # progress imports it when it draws
    monkeypatch.setattr(cli.cli, "main", draw)
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 130
    shown = capsys.readouterr().err.strip().splitlines()
    assert shown[-1] == "sd-ort: interrupted; no half-written output is left."
    assert where == "constructor" or "0/500" in shown[0]
