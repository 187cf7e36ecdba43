"""Differences of the demo model's images in bfloat16 and float16 from float32, by PyTorch and by our providers.

    python -m scripts.amd.batch_rounding
    scripts/amd/simulate gfx942 -- python -m scripts.amd.batch_rounding --provider hip --dtype bfloat16 --seeds 2

Each seed is generated alone and in a batch of two, with the prompt, size and steps of draw_hip.py. The reference is the
CPU provider's image in float32 of the same seed. Writes results/amd/batch_rounding.md and .json.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from scripts.amd.draw_hip import GUIDANCE, PROMPT, STEPS
from scripts.amd.simulated_runs import ROOT, Table, difference
from sd_ort import StableDiffusionPipeline
from sd_ort.demo import MODEL_DIR

TITLE = "Rounding of the demo model's images, 64x64"
NOTE = """No AMD GPU was used: `hip` ran on a simulated GPU. Each cell is the largest and, in parentheses, the mean
difference of an image from the CPU provider's in float32 with the same seed, in steps of 1/255. A batch has two images,
of seeds 0 and 1, 2 and 3, and so on. Prompt, size and steps are those of `sizes` in [hip.md](hip.md). PyTorch is
diffusers on the CPU, which starts from the same noise."""
COLUMNS = {
    "engine": "images by",
    "dtype": "dtype",
    "zero": "seed 0",
    "one": "seed 1",
    "one_in_batch": "seed 1, in the batch",
    "seeds": "seeds",
    "median": "median of all",
    "worst": "largest of all",
    "equal": "images in batches and alone are equal",
    "commit": "commit",
}
EDGE = 64
# Returns the images (B, H, W, 3) of one batch, one for each seed.
Draw = Callable[[Sequence[int]], "np.ndarray[Any, np.dtype[np.int16]]"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", choices=("cpu", "hip"), default="cpu", help="cpu: PyTorch too [%(default)s]")
    parser.add_argument("--dtype", nargs="+", choices=("float16", "bfloat16"), default=["float16", "bfloat16"])
    parser.add_argument("--seeds", type=int, default=16, help="an even number of seeds, from 0 on [%(default)s]")
    parser.add_argument("--work", type=Path, default=ROOT / "out/batch_rounding")
    parser.add_argument("--out", type=Path, default=ROOT / "results/amd")
    options = parser.parse_args()
    if options.seeds < 2 or options.seeds % 2:
        parser.error("--seeds must be an even number of at least 2")
    target = os.environ.get("SIMULATED_HIP_TARGET")
    if options.provider == "hip" and target is None:
        parser.error("--provider hip names its row after the simulated GPU: run it under scripts/amd/simulate TARGET")
    table = Table(options.out / "batch_rounding", TITLE, COLUMNS, NOTE, keys=("engine", "dtype"))
    expected = _alone(_provider(options.work, "float32", "cpu"), options.seeds)
    if options.provider == "hip":
        engines = [(f"`hip` on {target}", dtype) for dtype in options.dtype]
    else:
        engines = [("PyTorch", dtype) for dtype in ("float32", *options.dtype)]
        if "bfloat16" in options.dtype:  # float16 is only a storage type on a CPU
            engines.append(("the CPU provider", "bfloat16"))
    for engine, dtype in engines:
        torch = engine == "PyTorch"
        row = compare(expected, _torch(dtype) if torch else _provider(options.work, dtype, options.provider))
        table.add({"engine": engine, "dtype": dtype, **row})
        print(engine, dtype, {key: row[key] for key in COLUMNS if key in row}, flush=True)


def compare(expected: np.ndarray, draw: Draw) -> dict[str, Any]:
    """Return the columns of one engine: `expected` has the float32 image of each seed."""
    seeds = len(expected)
    alone = _alone(draw, seeds)
    batched = np.concatenate([draw((seed, seed + 1)) for seed in range(0, seeds, 2)])
    differences = [difference(*pair) for pair in zip(expected, alone, strict=True)]
    in_batches = [difference(*pair) for pair in zip(expected, batched, strict=True)]
    everything = [*differences, *in_batches]
    return {
        "zero": _cell(differences[0]),
        "one": _cell(differences[1]),
        "one_in_batch": _cell(in_batches[1]),
        "seeds": seeds,
        "median": f"{median(each[0] for each in everything):g} ({median(each[1] for each in everything):.3f})",
        "worst": f"{max(each[0] for each in everything)} ({max(each[1] for each in everything):.3f})",
        "equal": bool((alone == batched).all()),
        "alone": differences,
        "in_batches": in_batches,
    }


def _alone(draw: Draw, seeds: int) -> np.ndarray:
    return np.concatenate([draw((seed,)) for seed in range(seeds)])


def _cell(values: tuple[int, float]) -> str:
    return f"{values[0]} ({values[1]:.3f})"


def _pixels(images: Sequence[Any]) -> np.ndarray:
    return np.stack([np.asarray(image.convert("RGB"), np.int16) for image in images])


def _provider(work: Path, dtype: str, provider: str) -> Draw:
    """Return the function that generates images through our provider, from an optimized folder in `work`."""
    folder = work / f"{provider}-{dtype}"
    if not folder.is_dir():
        options = [] if dtype == "float32" else [f"--{dtype}"]
        command = [sys.executable, "-m", "sd_ort", "optimize", "demo", str(folder), "--target", provider, *options]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    pipeline = StableDiffusionPipeline.from_pretrained(folder, provider=provider)

    def draw(seeds: Sequence[int]) -> np.ndarray:
        request: dict[str, Any] = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE}
        prompts = [PROMPT] * len(seeds)
        return _pixels(pipeline(prompts, generator=list(seeds), height=EDGE, width=EDGE, **request).images)

    return draw


def _torch(dtype: str) -> Draw:
    """Return the function that generates images with diffusers on the CPU, from the noise of float32."""
    import torch
    from diffusers import StableDiffusionPipeline as Diffusers

    torch_dtype = getattr(torch, dtype)
    pipeline: Any = Diffusers.from_pretrained(MODEL_DIR, torch_dtype=torch_dtype)
    pipeline.set_progress_bar_config(disable=True)
    shape = (1, pipeline.unet.config.in_channels, *[EDGE // pipeline.vae_scale_factor] * 2)

    def draw(seeds: Sequence[int]) -> np.ndarray:
        noise = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        request: dict[str, Any] = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE}
        latents = torch.cat(noise).to(torch_dtype)
        prompts = [PROMPT] * len(seeds)
        return _pixels(pipeline(prompts, latents=latents, height=EDGE, width=EDGE, **request).images)

    return draw


if __name__ == "__main__":
    main()
