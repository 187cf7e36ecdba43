"""The same picture another way: hoisted, merged, on the device, tiled, sliced, in little memory.

Draws the same unseen prompts from the same seeds with every variant of the demo model, one fused fp32 folder and what
is made of it, and takes the PSNR of each picture against the plain pipeline's. Tiles are of the model's own size, so
that case draws pictures of twice its side, and its plain pictures are of that size too. Writes a JSON file; exits with
1 when a variant is further from the plain pictures than its bound.
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

from sd_ort import StableDiffusionPipeline, demo, measure
from sd_ort.demo.fidelity import unseen_prompts
from sd_ort.export import export
from sd_ort.merge import merge
from sd_ort.merged import MergedPipeline
from sd_ort.optimize import optimize

# dB that every picture must reach. The first: rounding alone, as between two kernels of one operator. Tiles see other
# means than the whole picture in their GroupNorms, and meet in blended seams.
SAME, TILED = 55.0, 25.0


@dataclass(frozen=True)
class Variant:
    """`folder` of `folders` drawn with `options` of from_pretrained, at `scale` times the model's own size."""

    label: str
    folder: str
    options: dict[str, Any] = field(default_factory=dict)
    scale: int = 1
    bound: float = SAME


VARIANTS = (
    Variant("hoisted", "hoisted"),
    Variant("merged", "merged"),
    Variant("hoisted, then merged", "hoisted-merged"),
    Variant("guidance and scheduler on the device", "plain", {"device_loop": True}),
    Variant("hoisted, on the device", "hoisted", {"device_loop": True}),
    Variant("low memory", "plain", {"low_memory": True}),
    Variant("VAE slicing", "plain", {"vae_slicing": True}),
    Variant("VAE tiling", "plain", {"vae_tiling": True}, scale=2, bound=TILED),
)


def folders(work: Path, target: str, steps: int) -> dict[str, Path]:
    """What the variants draw with, made below `work` where it is missing."""
    makers: dict[str, Callable[[Path], object]] = {
        "raw": lambda out: export("demo", out, progress=print),
        "plain": lambda out: optimize(work / "raw", out, target=target, report=print),
        "hoisted": lambda out: optimize(work / "raw", out, target=target, hoisted=True, report=print),
        "merged": lambda out: merge(work / "plain", out, steps=steps, report=print),
        "hoisted-merged": lambda out: merge(work / "hoisted", out, steps=steps, report=print),
    }
    for name, make in makers.items():
        if not (work / name).is_dir():
            make(work / name)
    return {name: work / name for name in makers}


def draw(folder: Path, options: dict[str, Any], prompts: Sequence[str], steps: int, scale: int) -> np.ndarray:
    """Pictures (B, H, W, 3), uint8, all in one batch, prompt i from seed i."""
    cls = MergedPipeline if folder.name.endswith("merged") else StableDiffusionPipeline
    images = cls.from_pretrained(folder, **options)(
        prompts,
        height=scale * demo.HEIGHT,
        width=scale * demo.WIDTH,
        num_inference_steps=steps,
        guidance_scale=demo.GUIDANCE,
        generator=[torch.Generator().manual_seed(i) for i in range(len(prompts))],
        progress=False,
    ).images
    return np.stack([np.asarray(image) for image in images])


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8, help="unseen prompts (8)")
    parser.add_argument("--steps", type=int, default=demo.STEPS, help=f"denoising steps ({demo.STEPS})")
    parser.add_argument("--target", default="portable", help="target of the fused pipelines (portable)")
    parser.add_argument("--work", type=Path, default=Path("out/compare_variants"), help="folder for the pipelines")
    parser.add_argument("--out", type=Path, default=Path("results/variants.json"), help="the result")
    given = parser.parse_args()

    prompts = unseen_prompts(given.prompts, 0)
    made = folders(given.work, given.target, given.steps)
    plain = {s: draw(made["plain"], {}, prompts, given.steps, s) for s in sorted({v.scale for v in VARIANTS})}
    rows: list[dict[str, Any]] = []
    for variant in VARIANTS:
        pictures = draw(made[variant.folder], variant.options, prompts, given.steps, variant.scale)
        values = [measure.psnr(a, b) for a, b in zip(pictures, plain[variant.scale], strict=True)]
        rows.append(
            {
                "variant": variant.label,
                "pixels": list(pictures.shape[1:3]),
                "psnr_db": {"min": min(values), "median": median(values)},
                "equal_pictures": sum(value == measure.EQUAL_DB for value in values),
                "bound_db": variant.bound,
                "passed": min(values) >= variant.bound,
            }
        )
        print(f"{variant.label}: PSNR min {min(values):.1f} dB, median {median(values):.1f} dB", flush=True)
    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["scripts/compare_variants.py", *sys.argv[1:]]),
        "commit": measure.commit(),
        "machine": measure.machine(),
        "versions": measure.versions(),
        "settings": {"model": "demo", "target": given.target, "prompts": given.prompts, "steps": given.steps},
        "equal_db": measure.EQUAL_DB,
        "variants": rows,
    }
    measure.write_json(given.out, report)
    failed = [row["variant"] for row in rows if not row["passed"]]
    print(f"{given.out}: " + (f"outside the bounds: {', '.join(failed)}" if failed else "within the bounds"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
