"""What a later process needs no more: transformers for a tokenizer, diffusers for a scheduler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from diffusers import EulerDiscreteScheduler, PNDMScheduler
from transformers import CLIPTokenizer

from sd_ort.demo import MODEL_DIR
from sd_ort.family import plans
from sd_ort.family.conditioning import token_ids
from sd_ort.family.schedule import linear_schedule
from sd_ort.family.tokenizer import ClipTokenizer

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
    assert not plans.known(config)
    plan = plans.Plan(euler.timesteps.numpy(), float(euler.init_noise_sigma), linear_schedule(euler, euler.timesteps))
    plans.remember(config, 5, 0.0, plan)
    found = plans.find(config, 5, 0.0)
    assert plans.known(config)
    assert found is not None
    assert found.initial == plan.initial
    np.testing.assert_array_equal(found.timesteps, plan.timesteps)
    np.testing.assert_array_equal(found.schedule.weights, plan.schedule.weights)
    assert plans.find(config, 6, 0.0) is None
    assert plans.find(config, 5, 0.5) is None
    assert not plans.known(dict(PNDMScheduler().config))
    (path,) = (cache / "schedules").iterdir()
    path.write_bytes(path.read_bytes()[:100])
    assert plans.find(config, 5, 0.0) is None


DRAW = """
import sys
from sd_ort import StableDiffusionPipeline
pipeline = StableDiffusionPipeline.from_pretrained(sys.argv[1], device_loop=True)
image = pipeline("a red circle", num_inference_steps=2, height=64, width=64, generator=0, progress=False).images[0]
print(sorted({name.partition(".")[0] for name in sys.modules} & {"diffusers", "transformers"}))
image.save(sys.argv[2])
"""


def test_a_later_process_imports_neither(cache: Path, tiny_export: Path, tmp_path: Path) -> None:
    imported = []
    for name in ("first.png", "second.png"):
        command = [sys.executable, "-c", DRAW, str(tiny_export), str(tmp_path / name)]
        imported.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    assert imported == ["['diffusers', 'transformers']", "[]"]
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "second.png").read_bytes()
