"""The second demo checkpoint: other weights, the same scenes by night, generated from its file in one command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_type import Cli
from PIL import Image

from scripts.fixtures.make_second_demo import NIGHT, by_night, second
from scripts.fixtures.save_single_file import save
from sd_ort.checkpoints.diffusers_folder import open_folder
from sd_ort.core.metrics import psnr
from sd_ort.demo import GUIDANCE, HEIGHT, MODEL_DIR, WIDTH

PROMPT = "a red circle on a blue background"


@pytest.fixture(scope="module")
def models() -> dict[str, torch.nn.Module]:
    source = open_folder("demo", MODEL_DIR)
    loaded = {name: source.load(name) for name in source.configs}
    second(loaded)
    return loaded


@pytest.mark.usefixtures("one_thread")
def test_other_weights_that_compute_the_same(models: dict[str, torch.nn.Module]) -> None:
    first, torch_generator = open_folder("demo", MODEL_DIR), torch.Generator().manual_seed(0)
    latents, text = (torch.randn(shape, generator=torch_generator) for shape in ((1, 4, 16, 16), (1, 77, 128)))
    moved = total = 0
    with torch.no_grad():
        for name, model in models.items():
            original = first.load(name)
            if name == "unet":
                pair = [m(latents, 500, text).sample for m in (original, model)]
            elif name == "vae":
                pair = [m.decode(latents).sample for m in (original, model)]
                pair[0] = torch.einsum("ij,bjhw->bihw", NIGHT, pair[0])
            else:
                ids = torch.arange(77)[None]
                pair = [m(ids).last_hidden_state for m in (original, model)]
            torch.testing.assert_close(pair[1], pair[0], rtol=1e-3, atol=1e-3)
            for key, tensor in original.state_dict().items():
                total += tensor.numel()
                moved += int((tensor != model.state_dict()[key]).sum())
    assert moved > 0.8 * total


@pytest.mark.usefixtures("one_thread")
def test_from_file_to_image(models: dict[str, torch.nn.Module], sd_ort: Cli, tmp_path: Path) -> None:
    from sd_ort.checkpoints.torch_pipeline import torch_pipeline

    file, out, optimized = (
        save(models, tmp_path / "night.safetensors", torch.float16),
        tmp_path / "a.png",
        tmp_path / "kept",
    )
    arguments = ("--steps", 2, "--seed", 3, "--out", out)
    code, _, output = sd_ort("generate", PROMPT, "--model", file, "--keep", optimized, *arguments)
    assert code == 0, output
    assert "sd-ort's demo model" in output
    assert "nothing was traced" in output
    size = {"height": HEIGHT, "width": WIDTH}
    noise = torch.Generator().manual_seed(3)
    pipeline: Any = torch_pipeline("demo")
    image = pipeline(PROMPT, num_inference_steps=2, guidance_scale=GUIDANCE, generator=noise, **size).images[0]
    image.save(tmp_path / "first.png")
    decoded = Image.open(out)
    assert psnr(np.asarray(decoded), by_night(tmp_path / "first.png")) > 40
    assert decoded.info["model"] == str(file)
    assert "bit for bit" in sd_ort("verify", file, optimized)[1]
    code, output, _ = sd_ort("verify", "demo", optimized, "--json", "--component", "vae_decoder", "--component", "unet")
    assert code == 4
    rows = {row["component"]: row for row in json.loads(output)["rows"]}
    assert rows.keys() == {"unet", "vae_decoder"}
    assert rows["unet"]["passed"] == (not rows["unet"]["different"])
    assert not all(row["passed"] for row in rows.values())
    code, _, output = sd_ort("verify", file, optimized, "--tolerance", 1, "--seed", 0, "--json")
    assert code == 2
    assert output.strip().endswith("nothing is run; leave out --tolerance, --seed.")
    assert sd_ort("verify", optimized, optimized, "--config", "demo")[0] == 2
    code, _, output = sd_ort("verify", "demo", optimized)
    assert code == 4
    assert "of another checkpoint" in output
    code, _, output = sd_ort("generate", PROMPT, "--model", optimized, "--config", "demo", *arguments, "--overwrite")
    assert code == 2
    assert "go with a checkpoint" in output
