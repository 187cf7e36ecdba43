"""The pipeline draws what diffusers draws from the same seed; `generate` writes whole files or none."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pipeline_fixtures import one_thread, tiny_fused, tiny_onnx, tiny_torch  # noqa: F401

from sd_ort import StableDiffusionPipeline, cli, measure
from sd_ort.errors import InputError, OutputError
from sd_ort.folder import DATA, MODEL
from sd_ort.pipeline import make_scheduler, scheduler_class

PROMPTS = ["a red circle on a blue background", "two green squares"]
SETTINGS: dict[str, Any] = {"num_inference_steps": 5, "guidance_scale": 4.0}
# Stated for the fp32 graph in uint8 pixels; measured on this pipeline: above 100 dB.
MIN_PSNR = 60.0


def seeds(*values: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(value) for value in values]


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """dB between two float pictures in 0..1, of which the second must not be flat."""
    assert a.shape == b.shape
    assert b.std() > 0.05, "a flat picture proves nothing"
    return float(-10 * np.log10(np.mean((a - b) ** 2) + 1e-20))


@pytest.fixture(scope="module")
def reference(tiny_torch: Path) -> Any:  # noqa: F811
    """The diffusers pipeline."""
    from diffusers import StableDiffusionPipeline as Reference

    pipeline = Reference.from_pretrained(tiny_torch)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def pipeline(tiny_onnx: Path) -> StableDiffusionPipeline:  # noqa: F811
    return StableDiffusionPipeline.from_pretrained(tiny_onnx)


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


def test_fused_draws_the_same(reference: Any, tiny_fused: Path) -> None:  # noqa: F811
    fused = StableDiffusionPipeline.from_pretrained(tiny_fused)
    assert psnr(draw(fused, generator=7), draw(reference, generator=seeds(7)[0])) > MIN_PSNR


@pytest.mark.parametrize("name", ["euler", "EulerAncestralDiscreteScheduler", "dpmsolver", "heun", "PNDM", "UniPC"])
def test_scheduler_by_name(reference: Any, tiny_onnx: Path, pipeline: Any, name: str) -> None:  # noqa: F811
    before = reference.scheduler, pipeline.scheduler
    try:
        reference.scheduler = make_scheduler(tiny_onnx, name)
        pipeline.scheduler = make_scheduler(tiny_onnx, name)
        assert type(pipeline.scheduler) is scheduler_class(name)
        expected = draw(reference, generator=seeds(3)[0])
        assert psnr(draw(pipeline, generator=3), expected) > MIN_PSNR
    finally:
        reference.scheduler, pipeline.scheduler = before


def test_one_generator_an_image_makes_each_image_alone_again(pipeline: Any) -> None:
    both = draw(pipeline, num_images_per_prompt=2, generator=seeds(1, 2))
    assert psnr(both[1:], draw(pipeline, generator=2)) > MIN_PSNR
    assert psnr(both[:1], draw(pipeline, generator=2)) < 30


def test_given_latents(reference: Any, pipeline: Any) -> None:
    noise = torch.randn(1, 4, 8, 8, generator=seeds(5)[0])
    assert psnr(draw(pipeline, latents=noise), draw(reference, latents=noise)) > MIN_PSNR
    with pytest.raises(InputError, match=r"\(1, 4, 8, 8\) are needed"):
        draw(pipeline, latents=noise[:, :, :4])


def test_output_types(pipeline: Any) -> None:
    image = pipeline(PROMPTS[0], generator=1, **SETTINGS).images[0]
    assert isinstance(image, Image.Image)
    pixels = draw(pipeline, generator=1)[0]
    np.testing.assert_array_equal(np.asarray(image), (pixels * 255).round().astype(np.uint8))
    latents = pipeline(PROMPTS[0], generator=1, output_type="latent", **SETTINGS).images
    np.testing.assert_allclose(pipeline.decode(latents)[0].permute(1, 2, 0) / 2 + 0.5, pixels, atol=0.51)
    with pytest.raises(InputError, match="output_type"):
        draw(pipeline, output_type="jpeg")


def test_callback_sees_and_replaces_latents(pipeline: Any) -> None:
    seen = []

    def zero(_pipeline: Any, index: int, _timestep: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        seen.append((index, tuple(state["latents"].shape)))
        return {"latents": torch.zeros_like(state["latents"])}

    result = pipeline(PROMPTS[0], output_type="latent", callback_on_step_end=zero, **SETTINGS).images
    assert seen == [(i, (1, 4, 8, 8)) for i in range(5)]
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
        ({"height": 60}, "multiples of 16"),
        ({"height": 72}, "multiples of 16"),
        ({"num_inference_steps": 0}, "1 or more"),
        ({"prompt": []}, "no prompt"),
        ({"prompt": PROMPTS, "negative_prompt": ["a", "b", "c"]}, "3 negative prompts for 2"),
        ({"num_images_per_prompt": 3, "generator": seeds(1, 2)}, "2 generators for 3 images"),
    ],
)
def test_arguments_that_do_not_fit(pipeline: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        draw(pipeline, **arguments)


@pytest.mark.parametrize("name", ["no_such", "FlowMatchEulerDiscreteScheduler", "LMSDiscreteScheduler"])
def test_scheduler_that_cannot_be_used(tiny_onnx: Path, name: str) -> None:  # noqa: F811
    if name.startswith("LMS"):
        try:
            import scipy  # noqa: F401
        except ImportError:
            pass
        else:
            pytest.skip("scipy is here, so this scheduler can be used")
    with pytest.raises(InputError):
        make_scheduler(tiny_onnx, name)


# --- The command ----------------------------------------------------------------------------------------------------


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run `sd-ort ...` in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["sd-ort", *map(str, arguments)])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    return int(ended.value.code or 0)


def expect_error(capsys: pytest.CaptureFixture[str], code: int, expected_code: int, message: str) -> None:
    """The error is one line on stderr that says `message`."""
    lines = capsys.readouterr().err.strip().splitlines()
    assert code == expected_code
    assert len(lines) == 1
    assert message in lines[0]


@pytest.fixture
def copy(tiny_onnx: Path, tmp_path: Path) -> Path:  # noqa: F811
    """A copy of the export that a test may break."""
    return Path(shutil.copytree(tiny_onnx, tmp_path / "model"))


def generate(monkeypatch: pytest.MonkeyPatch, model: Path, *arguments: object) -> int:
    return run_cli(monkeypatch, "generate", PROMPTS[0], "--model", model, "--steps", 2, *arguments)


def test_generate_writes_numbered_files_with_their_settings(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_onnx: Path,
    pipeline: Any,  # noqa: F811
) -> None:
    arguments = ("--num-images", 3, "--batch", 2, "--seed", 5, "--guidance", 4, "--scheduler", "euler")
    assert generate(monkeypatch, tiny_onnx, *arguments, "--out", tmp_path / "new" / "images") == 0
    paths = sorted((tmp_path / "new" / "images").iterdir())
    assert [p.name for p in paths] == [f"a-red-circle-on-a-blue-background-{seed}.png" for seed in (5, 6, 7)]
    image = Image.open(paths[2])
    assert isinstance(image, Image.Image)
    assert (image.text["seed"], image.text["prompt"]) == ("7", PROMPTS[0])  # type: ignore[attr-defined]
    assert image.text["scheduler"] == "EulerDiscreteScheduler"  # type: ignore[attr-defined]
    before, pipeline.scheduler = pipeline.scheduler, make_scheduler(tiny_onnx, "euler")
    alone = pipeline(PROMPTS[0], num_inference_steps=2, guidance_scale=4, generator=7).images[0]
    pipeline.scheduler = before
    assert measure.psnr(np.asarray(image), np.asarray(alone)) > 55  # a batch of 2 rounds otherwise than one alone


def test_generate_does_not_overwrite(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_onnx: Path,
    capsys: pytest.CaptureFixture[str],  # noqa: F811
) -> None:
    out = tmp_path / "mine.png"
    out.write_text("precious")
    expect_error(capsys, generate(monkeypatch, tiny_onnx, "--out", out), 5, "exists: choose another --out")
    assert out.read_text() == "precious"
    assert generate(monkeypatch, tiny_onnx, "--out", out, "--overwrite") == 0
    assert Image.open(out).size == (64, 64)


def test_missing_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expect_error(capsys, generate(monkeypatch, tmp_path / "nowhere"), 2, "is not a folder")


def test_not_a_pipeline_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").touch()
    expect_error(capsys, generate(monkeypatch, tmp_path), 2, "is not a pipeline folder")


def test_other_kind_of_pipeline(
    monkeypatch: pytest.MonkeyPatch, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = copy / "model_index.json"
    index.write_text(index.read_text().replace("StableDiffusionPipeline", "StableDiffusionInpaintPipeline"))
    expect_error(capsys, generate(monkeypatch, copy), 2, "only text-to-image is supported")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (f"unet/{MODEL}", "truncated"),
        (f"vae_decoder/{DATA}", "truncated"),
        ("text_encoder/config.json", "config.json is missing or broken"),
        ("scheduler/scheduler_config.json", "scheduler_config.json is missing or broken"),
    ],
)
def test_broken_file(
    monkeypatch: pytest.MonkeyPatch, copy: Path, capsys: pytest.CaptureFixture[str], broken: str, message: str
) -> None:
    path = copy / broken
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    expect_error(capsys, generate(monkeypatch, copy, "--out", copy.parent / "x.png"), 2, message)
    assert not (copy.parent / "x.png").exists()


@pytest.mark.parametrize("gone", ["vae_decoder", "tokenizer", f"unet/{DATA}"])
def test_missing_file(
    monkeypatch: pytest.MonkeyPatch, copy: Path, capsys: pytest.CaptureFixture[str], gone: str
) -> None:
    path = copy / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    expect_error(capsys, generate(monkeypatch, copy), 2, gone.partition("/")[0])


def test_provider_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
    tiny_onnx: Path,
    capsys: pytest.CaptureFixture[str],  # noqa: F811
) -> None:
    from sd_ort.session import PROVIDERS, runtime

    name = next(n for n, p in PROVIDERS.items() if p.ep not in runtime().get_available_providers())
    expect_error(capsys, generate(monkeypatch, tiny_onnx, "--provider", name), 3, f"'sd-ort[{name}]'")


def test_interrupt_leaves_no_half_written_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure.write_bytes(tmp_path / "a.png", b"all of it")
    assert list(tmp_path.iterdir()) == []


def test_full_disk_leaves_no_half_written_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OutputError, match="No space left"):
        measure.write_bytes(tmp_path / "a.png", b"all of it")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_drawing(tiny_onnx: Path, tmp_path: Path) -> None:  # noqa: F811
    command = [sys.executable, "-c", "from sd_ort.cli import main; main()", "generate", "x", "--model", str(tiny_onnx)]
    out = tmp_path / "images"
    process = subprocess.Popen(
        [*command, "--steps", "1000", "--height", "256", "--width", "256", "--out", str(out)],
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stderr is not None
    shown = b""
    while b"/1000" not in shown:  # the progress bar: it draws now
        byte = process.stderr.read(1)
        assert byte, shown.decode()
        shown += byte
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130
    assert rest.decode().strip().splitlines()[-1].startswith("sd-ort: interrupted")
    assert b"Traceback" not in rest
    assert not out.exists()
