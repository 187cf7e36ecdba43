"""A folder that sd-ort wrote, opened by optimum-onnx: its `ORTDiffusionPipeline` draws what our own pipeline draws.

    python scripts/checks/optimum_onnx.py --python OTHER/bin/python [--folder FOLDER] [--out FILE.json]

OTHER is an environment with optimum-onnx, which holds transformers below 4.58 and so cannot live in sd-ort's:
`pip install torch==2.13.0 "optimum-onnx[onnxruntime]"`. FOLDER is the demo model, optimized for the portable target;
without it the demo model is exported and optimized here. Neither environment needs the other's packages: what passes
between them is the folder, the noise and the picture.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from scripts.checks.check_report import report
from sd_ort import StableDiffusionPipeline, demo
from sd_ort.core.metrics import psnr
from sd_ort.export.exporter import export
from sd_ort.stages import optimize

PROMPT, STEPS = "a red circle on a blue background", 10
MIN_PSNR = 40.0
# What the other environment runs: folder, noise, prompt, steps, guidance, file for the picture.
THEIRS = """
import json, sys
from importlib import metadata
import numpy as np
from optimum.onnxruntime import ORTDiffusionPipeline
folder, noise, prompt, steps, guidance, out = sys.argv[1:]
pipe = ORTDiffusionPipeline.from_pretrained(folder, provider="CPUExecutionProvider")
pipe.set_progress_bar_config(disable=True)
latents = np.load(noise)
import torch
image = pipe(prompt, latents=torch.from_numpy(latents), num_inference_steps=int(steps), guidance_scale=float(guidance),
             height=8 * latents.shape[2], width=8 * latents.shape[3], output_type="np").images[0]
np.save(out, image)
names = ("optimum-onnx", "optimum", "diffusers", "transformers", "torch", "onnxruntime")
print(json.dumps({"class": type(pipe).__name__, **{name: metadata.version(name) for name in names}}))
"""


def drawn_there(python: str, folder: Path, noise: np.ndarray, scratch: Path) -> tuple[np.ndarray, dict[str, str]]:
    """The picture (H, W, 3), uint8, by optimum-onnx, and its versions. Raises ClickException when it fails."""
    np.save(scratch / "noise.npy", noise)
    arguments = [
        str(folder),
        str(scratch / "noise.npy"),
        PROMPT,
        str(STEPS),
        str(demo.GUIDANCE),
        str(scratch / "out.npy"),
    ]
    done = subprocess.run([python, "-c", THEIRS, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"optimum-onnx: {done.stderr.strip().splitlines()[-1]}")
    picture = np.load(scratch / "out.npy")
    versions: dict[str, str] = json.loads(done.stdout.strip().splitlines()[-1])
    return (255 * picture).round().clip(0, 255).astype(np.uint8), versions


@click.command()
@click.option("--python", required=True, help="The Python of an environment with optimum-onnx.")
@click.option("--folder", type=click.Path(path_type=Path, exists=True), help="The demo model, target portable.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the findings here, .json and .md.")
def main(python: str, folder: Path | None, out: Path | None) -> None:
    """Draw with both and compare the pictures."""
    with tempfile.TemporaryDirectory(prefix="sd-ort-optimum-") as temporary:
        scratch = Path(temporary)
        if folder is None:
            export("demo", scratch / "raw")
            folder = scratch / "portable"
            optimize(scratch / "raw", folder, target="portable")
        shape = (1, 4, demo.HEIGHT // 8, demo.WIDTH // 8)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(7))
        ours = StableDiffusionPipeline.from_pretrained(folder)
        arguments: dict[str, Any] = {"num_inference_steps": STEPS, "guidance_scale": demo.GUIDANCE}
        size = {"height": demo.HEIGHT, "width": demo.WIDTH}
        expected = np.asarray(ours(PROMPT, latents=noise, progress=False, **arguments, **size).images[0])
        picture, versions = drawn_there(python, folder.absolute(), noise.numpy(), scratch)
    assert expected.std() > 10, "a flat picture proves nothing"
    decibels = psnr(picture, expected)
    found = {"opened by": versions, "PSNR to our own pipeline, dB": round(decibels, 1)}
    report("A portable folder in optimum-onnx", "scripts/checks/optimum_onnx.py --python OTHER/bin/python", found, out)
    if decibels < MIN_PSNR:
        raise click.ClickException(f"{decibels:.1f} dB is below {MIN_PSNR}")


if __name__ == "__main__":
    main()
