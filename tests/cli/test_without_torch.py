"""An installation without the extra `export`: imports of its packages fail, as where they are not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sd_ort.core.errors import EXPORT_PACKAGES

BLOCK = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXPORT_PACKAGES}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


# Runs one command after another; an exit code other than 0 ends the process.
COMMANDS = """
import json, sys
from sd_ort.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["sd-ort", *words]
    try:
        main()
    except SystemExit as exit_:
        if exit_.code:
            raise
"""
# What is a tensor elsewhere is an array.
CALLS = """
import numpy as np
from sd_ort import FluxPipeline, StableDiffusionPipeline

def callback(pipe, step, timestep, tensors):
    assert isinstance(tensors["latents"], np.ndarray)
    return {"latents": tensors["latents"] * 0}

for cls, model in ((StableDiffusionPipeline, "out"), (FluxPipeline, "demo-dit")):
    pipe = cls.from_pretrained(model, provider="cpu")
    settings = {"num_inference_steps": 1, "height": 64, "width": 64, "generator": 0}
    latents = pipe.to("cpu")("a", output_type="latent", callback_on_step_end=callback, **settings).images
    assert isinstance(latents, np.ndarray) and not latents.any()
    assert isinstance(pipe.encode_prompt("a")[0], np.ndarray)
"""


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(BLOCK)  # the benchmark's worker processes import it too
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=tmp_path)


def test_a_published_architecture_is_optimized_explained_and_run(tmp_path: Path) -> None:
    generate = ["generate", "a circle", "--steps", "1", "--height", "64", "--width", "64", "--seed", "0"]
    commands = [["optimize", "demo", "out", "--target", "cpu"], ["verify", "demo", "out"], ["explain", "out"],
                ["verify", "out", "out"], ["doctor"], ["cache"], [*generate, "--model", "out"],
                [*generate, "--model", "demo-dit", "--overwrite"],
                ["benchmark", "out", "--component", "vae_decoder", "--steps", "1"]]  # fmt: skip
    result = run(tmp_path, "-c", COMMANDS + CALLS, json.dumps(commands))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "torch eager (batch 1) failed: this needs torch, which is not installed" in result.stdout + result.stderr


@pytest.mark.parametrize("arguments", [["export", "demo", "raw"], ["optimize", "owner/name", "out"]])
def test_what_needs_the_extra_says_so(tmp_path: Path, arguments: list[str]) -> None:
    result = run(tmp_path, "-m", "sd_ort", *arguments)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].endswith("which is not installed: pip install 'sd-ort[export]'.")
