"""The same picture another way: hoisted, merged, on the device, tiled, sliced, in little memory.

Draws the same unseen prompts from the same seeds with every variant of the demo model, one fused fp32 folder and what
is made of it, and takes the PSNR of each picture against the plain pipeline's. Tiles are no bound on that: they see
other means than the whole picture in their GroupNorms, in a small VAE above all. So pictures of twice the model's side,
drawn in tiles, are also compared with torch's, drawn in tiles by diffusers. Writes a JSON file; exits with 1 when a
picture is further away than BOUND.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from sd_ort import StableDiffusionPipeline, demo
from sd_ort.benchmark.engines.pytorch import torch_pipeline
from sd_ort.core import files, metrics
from sd_ort.demo.fidelity import unseen_prompts
from sd_ort.export.exporter import export
from sd_ort.optimize.merge import merge
from sd_ort.pipelines.merged import MergedPipeline
from sd_ort.runtime import machine
from sd_ort.stages import optimize

BOUND = 55.0  # dB that every picture must reach: rounding alone, as between two kernels of one operator
SCALE = 2  # sides of the pictures that are tiled, in those of the model's own


@dataclass(frozen=True)
class Variant:
    """`folder` of `folders`, drawn with `options` of from_pretrained."""

    label: str
    folder: str
    options: dict[str, Any] = field(default_factory=dict)


VARIANTS = (
    Variant("hoisted", "hoisted"),
    Variant("merged", "merged"),
    Variant("hoisted, then merged", "hoisted-merged"),
    Variant("guidance and scheduler on the device", "plain", {"device_loop": True}),
    Variant("hoisted, on the device", "hoisted", {"device_loop": True}),
    Variant("low memory", "plain", {"low_memory": True}),
    Variant("VAE slicing", "plain", {"vae_slicing": True}),
)


def folders(work: Path, target: str, steps: int) -> dict[str, Path]:
    """What the variants draw with, made below `work`; each stage knows whether what is there is of these options."""
    makers: dict[str, Callable[[Path], object]] = {
        "raw": lambda out: export("demo", out, on_progress=print),
        "plain": lambda out: optimize(work / "raw", out, target=target, on_progress=print),
        "hoisted": lambda out: optimize(work / "raw", out, target=target, hoist=True, on_progress=print),
        "merged": lambda out: merge(work / "plain", out, steps=steps, on_progress=print),
        "hoisted-merged": lambda out: merge(work / "hoisted", out, steps=steps, on_progress=print),
    }
    for name, make in makers.items():
        make(work / name)
    return {name: work / name for name in makers}


def open_pipeline(folder: Path, **options: Any) -> Any:
    """Our pipeline of a folder."""
    cls = MergedPipeline if folder.name.endswith("merged") else StableDiffusionPipeline
    return cls.from_pretrained(folder, **options)


def draw(pipeline: Any, prompts: Sequence[str], steps: int, scale: int = 1) -> np.ndarray:
    """Pictures (B, H, W, 3), uint8, all in one batch, prompt i from seed i; `pipeline` is ours or diffusers'."""
    images = pipeline(
        list(prompts),
        height=scale * demo.HEIGHT,
        width=scale * demo.WIDTH,
        num_inference_steps=steps,
        guidance_scale=demo.GUIDANCE,
        generator=[torch.Generator().manual_seed(i) for i in range(len(prompts))],
    ).images
    return np.stack([np.asarray(image) for image in images])


def row(
    label: str, against: str, pictures: np.ndarray, reference: np.ndarray, *, bound: float | None
) -> dict[str, Any]:
    """PSNRs of pictures, printed and as an entry of the report."""
    values = [metrics.psnr(ours, theirs) for ours, theirs in zip(pictures, reference, strict=True)]
    print(f"{label}, against {against}: PSNR min {min(values):.1f} dB, median {median(values):.1f} dB", flush=True)
    return {
        "variant": label,
        "against": against,
        "pixels": list(pictures.shape[1:3]),
        "psnr_db": {"min": min(values), "median": median(values)},
        "equal_pictures": sum(value == metrics.EQUAL_DB for value in values),
        "passed": bound is None or min(values) >= bound,
    }


def tiled_rows(plain: Path, prompts: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """Ours in tiles against torch's in tiles; and either against its own whole pictures, which bounds nothing."""
    torch_plain = torch_pipeline("demo")
    theirs = draw(torch_plain, prompts, steps, SCALE)
    torch_plain.vae.enable_tiling()
    theirs_tiled = draw(torch_plain, prompts, steps, SCALE)
    ours = draw(open_pipeline(plain), prompts, steps, SCALE)
    ours_tiled = draw(open_pipeline(plain, vae_tiling=True), prompts, steps, SCALE)
    return [
        row("VAE tiling", "diffusers' tiling in torch", ours_tiled, theirs_tiled, bound=BOUND),
        row("VAE tiling", "whole pictures", ours_tiled, ours, bound=None),
        row("diffusers' tiling in torch", "torch's whole pictures", theirs_tiled, theirs, bound=None),
    ]


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8, help="unseen prompts (8)")
    parser.add_argument("--steps", type=int, default=demo.STEPS, help=f"denoising steps ({demo.STEPS})")
    parser.add_argument("--target", default="portable", help="target of the fused pipelines (portable)")
    parser.add_argument("--work", type=Path, default=Path("out/compare_variants"), help="folder for the pipelines")
    parser.add_argument("--out", type=Path, default=Path("results/variants.json"), help="the result")
    options = parser.parse_args()

    prompts = unseen_prompts(options.prompts, 0)
    model_folders = folders(options.work, options.target, options.steps)
    plain = draw(open_pipeline(model_folders["plain"]), prompts, options.steps)
    rows = []
    for variant in VARIANTS:
        pictures = draw(open_pipeline(model_folders[variant.folder], **variant.options), prompts, options.steps)
        rows.append(row(variant.label, "plain", pictures, plain, bound=BOUND))
    rows += tiled_rows(model_folders["plain"], prompts, options.steps)
    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["scripts/bench/compare_variants.py", *sys.argv[1:]]),
        "commit": machine.commit(),
        "machine": machine.machine(),
        "versions": machine.versions(),
        "settings": {"model": "demo", "target": options.target, "prompts": options.prompts, "steps": options.steps},
        "bound_db": BOUND,
        "equal_db": metrics.EQUAL_DB,
        "variants": rows,
    }
    files.write_json(options.out, report)
    failed = [row["variant"] for row in rows if not row["passed"]]
    print(f"{options.out}: " + (f"outside the bounds: {', '.join(failed)}" if failed else "within the bounds"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
