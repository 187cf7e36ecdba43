"""`sd-ort generate` beside Python: one seed is one image."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_type import Cli
from PIL import Image

from sd_ort import StableDiffusionImg2ImgPipeline, StableDiffusionPipeline
from sd_ort.runtime import provider_choice
from sd_ort.runtime.provider_choice import Gpu

PROMPT = "a red circle on a blue background"


def test_shell_and_python_generate_the_same_image(sd_ort: Cli, tmp_path: Path) -> None:
    """By the model's own defaults, which signatures do not name; the checkpoint is optimized once for both."""
    png, again = tmp_path / "a.png", tmp_path / "b.png"
    options = ("--model", "demo", "--seed", 7, "--height", 64, "--width", 64)
    code, _, error = sd_ort("generate", PROMPT, *options, "--out", png)
    assert code == 0, error
    assert "provider cpu: no GPU is visible" in error
    pipeline = StableDiffusionPipeline.from_pretrained("demo")
    image = Image.open(png)
    assert (image.info["steps"], image.info["guidance"]) == ("25", "3.0")
    np.testing.assert_array_equal(pipeline(PROMPT, generator=7, height=64, width=64).images[0], image)
    as_in_diffusers = {"num_inference_steps": 50, "guidance_scale": 7.5}
    other = pipeline(PROMPT, generator=7, height=64, width=64, **as_in_diffusers).images[0]
    assert (np.asarray(other) != np.asarray(image)).any()

    code, _, error = sd_ort("generate", PROMPT, *options, "--image", png, "--out", again)
    assert (code, "once" in error) == (0, False), error
    over = StableDiffusionImg2ImgPipeline.from_pipe(pipeline)(PROMPT, image=image.convert("RGB"), generator=7)
    np.testing.assert_array_equal(over.images[0], Image.open(again))


def test_the_first_call_on_a_gpu_without_a_build_says_the_one_command(
    sd_ort: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the shell and in Python, and draws on the CPU."""
    monkeypatch.setattr(provider_choice, "installed_gpus", lambda: [Gpu("hip", "AMD gfx942", "gfx942")])
    monkeypatch.setattr(provider_choice, "library_path", lambda *_: None)
    expected = "AMD gfx942 is not used: no provider for it is installed; `sd-ort build-ops --hip gfx942` builds hip"
    options = ("--model", "demo", "--steps", 1, "--height", 64, "--width", 64, "--out", tmp_path / "a.png")
    code, _, error = sd_ort("generate", PROMPT, *options)
    assert (code, expected in error) == (0, True), error
    StableDiffusionPipeline.from_pretrained("demo")
    assert expected in capsys.readouterr().err


def test_old_options_are_read(sd_ort: Cli, tmp_path: Path) -> None:
    """Each fails for its value, not for its name."""
    for option, value in [("--unet-on", "x"), ("--unet-devices", "x"), ("--decode-on", "x"), ("--decode-device", "x")]:
        code, _, error = sd_ort("generate", "a cat", "--model", "demo", option, value)
        assert (code, f"Invalid value for '{option}'" in error or "Invalid value for" in error) == (2, True), error
    for options in (["--keep", tmp_path], ["--save-optimized", tmp_path]):
        code, _, error = sd_ort("generate", "a cat", "--model", tmp_path, *options, "--weights", "--no-graph")
        assert (code, "--save-optimized and --config go with a checkpoint" in error) == (2, True), error


def test_the_lines_of_the_readme_run() -> None:
    """As they stand, in a folder of a fresh clone."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    lines = re.search(r"\n## Python\n\n((?:    .*\n|\n)+)", text)
    assert lines is not None
    names: dict[str, Any] = {}
    exec(textwrap.dedent(lines[1]), names)
    assert names["image"].size == (128, 128)
