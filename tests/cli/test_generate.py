"""`sd-ort generate` beside Python: one seed is one image."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sd_ort.from_checkpoint import optimize_checkpoint

from sd_ort import StableDiffusionImg2ImgPipeline, StableDiffusionPipeline

Cli = Callable[..., tuple[int, str, str]]
SIZE = {"height": 64, "width": 64}


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "folder"
    optimize_checkpoint("demo", folder, target="cpu")
    return folder


def test_shell_and_python_draw_the_same_image(sd_ort: Cli, demo_folder: Path, tmp_path: Path) -> None:
    """With the defaults of the model, which the PNG file names."""
    png, prompt = tmp_path / "a.png", "a red circle on a blue background"
    size = [part for name, value in SIZE.items() for part in (f"--{name}", value)]
    code, _, error = sd_ort("generate", prompt, "--model", demo_folder, "--seed", 7, *size, "--out", png)
    assert code == 0, error
    assert "provider cpu: no GPU is visible" in error
    pipeline = StableDiffusionPipeline.from_pretrained(demo_folder)
    drawn = Image.open(png)
    assert (drawn.info["steps"], drawn.info["guidance"]) == ("25", "3.0")
    np.testing.assert_array_equal(pipeline(prompt, generator=7, **SIZE).images[0], drawn)

    again = tmp_path / "b.png"
    sd_ort("generate", prompt, "--model", demo_folder, "--seed", 7, "--image", png, "--out", again)
    over = StableDiffusionImg2ImgPipeline.from_pipe(pipeline)(prompt, image=drawn.convert("RGB"), generator=7)
    np.testing.assert_array_equal(over.images[0], Image.open(again))
