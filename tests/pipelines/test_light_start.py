"""What a later process needs no more: transformers for a tokenizer, diffusers for a scheduler, torch for noise."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import EulerDiscreteScheduler, PNDMScheduler
from transformers import CLIPTokenizer

from sd_ort.checkpoints import schedule_cache
from sd_ort.checkpoints.conditioning import token_ids
from sd_ort.checkpoints.schedule import linear_schedule
from sd_ort.checkpoints.tokenizer import ClipTokenizer
from sd_ort.demo import MODEL_DIR
from sd_ort.pipelines import noise

PROMPTS = ["", "a red circle", "A  Red\tCIRCLE's — naïve ß 東京 🙂 <|endoftext|> x", "word " * 100, "é é it's 2³"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sd-ort"


def test_kept_rules_give_the_same_tokens(cache: Path) -> None:
    folder = MODEL_DIR / "tokenizer"
    first, second = ClipTokenizer(folder), ClipTokenizer(folder)
    assert len(list((cache / "tokenizers").iterdir())) == 1
    theirs = CLIPTokenizer.from_pretrained(folder)(
        PROMPTS, padding="max_length", max_length=77, truncation=True, return_tensors="np"
    ).input_ids
    np.testing.assert_array_equal(token_ids(first, PROMPTS, 77), theirs)
    np.testing.assert_array_equal(token_ids(second, PROMPTS, 77), theirs)
    second.add_tokens(["<made-up>"])  # of transformers' tokenizer, which takes over
    assert second.ids(["<made-up>"])[0][1] == len(second) - 1


def test_plans_are_kept_by_configuration(cache: Path) -> None:
    euler = EulerDiscreteScheduler(beta_schedule="scaled_linear")
    euler.set_timesteps(5)
    config = dict(euler.config)
    assert not schedule_cache.known(config)
    plan = schedule_cache.Plan(
        euler.timesteps.numpy(), float(euler.init_noise_sigma), linear_schedule(euler, euler.timesteps)
    )
    schedule_cache.remember(config, 5, 0.0, plan)
    found = schedule_cache.find(config, 5, 0.0)
    assert schedule_cache.known(config)
    assert found is not None
    assert found.initial == plan.initial
    np.testing.assert_array_equal(found.timesteps, plan.timesteps)
    np.testing.assert_array_equal(found.schedule.weights, plan.schedule.weights)
    assert schedule_cache.find(config, 6, 0.0) is None
    assert schedule_cache.find(config, 5, 0.5) is None
    assert not schedule_cache.known(dict(PNDMScheduler().config))
    (path,) = (cache / "schedules").iterdir()
    path.write_bytes(path.read_bytes()[:100])
    assert schedule_cache.find(config, 5, 0.0) is None


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="torch draws other numbers elsewhere")
def test_noise_is_torchs_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (0, 1, 7, 2**31, 2**32 + 5, 2**64 - 1, -1, -(2**63), *range(100, 120)):
        theirs, ours = torch.Generator().manual_seed(seed), noise.Normals(seed)
        for shape in ((1, 4, 72, 64), (2, 4, 8, 24), (3, 7), (16,)):  # some are no whole number of blocks
            assert ours.draw(shape).tobytes() == torch.randn(shape, generator=theirs).numpy().tobytes()
    seeds = [3, torch.Generator().manual_seed(4)]
    each = [torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(seed)).numpy() for seed in (3, 4)]
    assert (noise.draw_noise((2, 4, 8, 8), noise.sources(seeds, torch_too=False)) == np.concatenate(each)).all()
    monkeypatch.delitem(sys.modules, "torch")
    drawn = noise.draw_noise((1, 4, 8, 8), noise.sources(3, torch_too=False))
    assert drawn.tobytes() == each[0].tobytes()
    by_chance = noise.draw_noise((2, 4, 8, 8), None)
    assert abs(by_chance.std() - 1) < 0.3
    assert (by_chance[0] != by_chance[1]).all()


def test_products_and_sums_are_rounded_once() -> None:
    last = np.float32(2**-23)  # the last bit of 1
    a, b, c = np.float32(2**-24) * (1 + last), 1 - last, 1 + last  # a b is a little less than half of that bit
    assert np.float32(np.float64(a) * np.float64(b) + np.float64(c)) != c  # rounded to the half, and then up
    assert noise.multiply_add(np.array([a, -a]), b, np.array([c, -c])).tolist() == [c, -c]


DRAW = """
import sys
from sd_ort import StableDiffusionPipeline
pipeline = StableDiffusionPipeline.from_pretrained(sys.argv[1], device_loop=True)
image = pipeline("a red circle", num_inference_steps=2, height=64, width=64, generator=0, progress=False).images[0]
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"diffusers", "onnx_ir", "torch", "transformers"}))
image.save(sys.argv[2])
"""


def test_a_later_process_imports_none_of_them(cache: Path, small_export: Path, tmp_path: Path) -> None:
    imported = []
    for name in ("first.png", "second.png"):
        command = [sys.executable, "-c", DRAW, str(small_export), str(tmp_path / name)]
        imported.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    assert imported == ["diffusers torch transformers", ""]
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "second.png").read_bytes()
