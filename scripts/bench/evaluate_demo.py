"""Does the demo model still draw what the prompt says after export, fusion and float16?

Draws the same unseen prompts from the same seeds with torch fp32, the raw export, fused fp32, fp16 and bf16, and with
a U-Net in 8 bits, calibrated on prompts of the training's combinations. Reads the images back
(`sd_ort.demo.fidelity`) and compares each with torch's. Writes the shares and PSNRs to a JSON file as each engine ends,
and a sheet with the first images, one row per engine. Exits with 1 when a bound below is broken.
"""

from __future__ import annotations

import argparse
import datetime
import io
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from scripts.report import head
from sd_ort import StableDiffusionPipeline, demo
from sd_ort.checkpoints.torch_pipeline import torch_pipeline
from sd_ort.core import files, metrics
from sd_ort.demo.fidelity import score, unseen_prompts
from sd_ort.demo.scenes import training_prompts
from sd_ort.export.exporter import export
from sd_ort.pipelines.calibration_runs import record_runs
from sd_ort.stages import optimize

TORCH = "torch fp32"
# (points of fidelity an engine may lose against torch, dB its median image must reach): the project's bounds.
BOUNDS = {
    "raw ONNX": (0.5, 40.0),
    "fused fp32": (0.5, 40.0),
    "fused fp16": (1.0, 30.0),
    "fused bf16": (1.0, 30.0),
    "fused float8": (1.0, 30.0),
    "fused int8": (1.0, 30.0),
    "float8 convolutions": (1.0, 30.0),
}
CALIBRATION_PROMPTS = 64


def engines(work: Path, target: str, provider: str) -> dict[str, Callable[[], Any]]:
    """Label -> a function that makes what is missing below `work` and opens the engine's pipeline."""

    def opened(folder: Path) -> Any:
        return StableDiffusionPipeline.from_pretrained(folder, provider=provider)

    def optimized(name: str, dtype: str) -> Any:
        if not (work / "raw").is_dir():
            export("demo", work / "raw", on_progress=print)
        optimize(work / "raw", work / name, target=target, dtype=dtype, on_progress=print)
        return opened(work / name)

    def eight_bits(name: str, **options: Any) -> Any:
        runs = work / "calibration.npz"
        if not runs.is_file():
            optimize("demo", work / "calibrated", target="portable", on_progress=print)
            record_runs(work / "calibrated", training_prompts(CALIBRATION_PROMPTS), runs, vae_decoder=True)
        out = work / "-".join((target, name, *options))
        optimize("demo", out, target=target, eight_bits=name, inputs=runs, on_progress=print, **options)
        return opened(out)

    def raw() -> Any:
        export("demo", work / "raw", on_progress=print)
        return opened(work / "raw")

    return {
        TORCH: lambda: torch_pipeline("demo"),
        "raw ONNX": raw,
        "fused fp32": lambda: optimized(f"{target}-fp32", "float32"),
        "fused fp16": lambda: optimized(f"{target}-fp16", "float16"),
        "fused bf16": lambda: optimized(f"{target}-bf16", "bfloat16"),
        "fused float8": lambda: eight_bits("float8"),
        "fused int8": lambda: eight_bits("int8"),
        # of targets hip and gpu, the VAE decoder too
        "float8 convolutions": lambda: eight_bits("float8", dtype="float16", convolutions=True, vae_decoder=True),
    }


def draw(pipeline: Any, prompts: Sequence[str], batch: int, steps: int) -> np.ndarray:
    """Images (B, H, W, 3), uint8, prompt i generated from seed i; `pipeline` is ours or diffusers'."""
    quiet = {"progress": False} if isinstance(pipeline, StableDiffusionPipeline) else {}
    generated: list[np.ndarray] = []
    for start in tqdm(range(0, len(prompts), batch), unit="batch"):
        part = list(prompts[start : start + batch])
        images = pipeline(
            part,
            height=demo.HEIGHT,
            width=demo.WIDTH,
            num_inference_steps=steps,
            guidance_scale=demo.GUIDANCE,
            generator=[torch.Generator().manual_seed(start + i) for i in range(len(part))],
            **quiet,
        ).images
        generated += [np.asarray(image) for image in images]
    return np.stack(generated)


def row(label: str, prompts: Sequence[str], images: np.ndarray, reference: dict[str, Any] | None) -> dict[str, Any]:
    """Return the entry of an engine: percentage of right images, failures, and a comparison with `reference`."""
    fidelity = score(prompts, images)
    entry: dict[str, Any] = {
        "label": label,
        "right": fidelity.correct,
        "total": fidelity.total,
        "share_percent": 100 * fidelity.share,
        "failures": [{"prompt": prompt, "reason": reason} for prompt, reason in fidelity.failures],
    }
    if reference is not None:
        values = [metrics.psnr(ours, theirs) for ours, theirs in zip(images, reference["pictures"], strict=True)]
        points, decibel = BOUNDS[label]
        entry["psnr_db"] = {"median": median(values), "min": min(values)}
        entry["lost_points"] = reference["share_percent"] - entry["share_percent"]
        entry["passed"] = abs(entry["lost_points"]) <= points and entry["psnr_db"]["median"] >= decibel
    return entry


def sheet(rows: Sequence[np.ndarray]) -> bytes:
    """PNG of the images (B, H, W, 3) of each engine, one row per engine."""
    buffer = io.BytesIO()
    Image.fromarray(np.concatenate([np.concatenate(list(images), axis=1) for images in rows])).save(buffer, "PNG")
    return buffer.getvalue()


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200, help="unseen prompts (200)")
    parser.add_argument("--seed", type=int, default=0, help="which unseen prompts (0)")
    parser.add_argument("--steps", type=int, default=demo.STEPS, help=f"denoising steps ({demo.STEPS})")
    parser.add_argument("--batch", type=int, default=10, help="prompts generated at once (10)")
    parser.add_argument("--target", default="portable", help="target of the fused pipelines (portable)")
    parser.add_argument("--provider", default="auto", help="of the pipelines (auto)")
    parser.add_argument("--engines", nargs="+", choices=BOUNDS, default=list(BOUNDS)[:3], help="beside torch fp32")
    parser.add_argument("--work", type=Path, default=Path("out/evaluate_demo"), help="folder for the pipelines")
    parser.add_argument("--out", type=Path, default=Path("results/demo_fidelity.json"), help="the result")
    parser.add_argument("--sheet", type=Path, default=Path("results/demo_images.png"), help="the images")
    arguments = parser.parse_args()

    prompts = unseen_prompts(arguments.prompts, arguments.seed)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    report: dict[str, Any] = {
        "kind": "demo_fidelity",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **head("scripts/bench/evaluate_demo.py"),
        "settings": {**settings, "guidance": demo.GUIDANCE, "height": demo.HEIGHT, "width": demo.WIDTH},
        "bounds": {label: {"points": points, "median_psnr_db": db} for label, (points, db) in BOUNDS.items()},
        "engines": [],
    }
    reference: dict[str, Any] | None = None
    first_pictures = []
    for label, open_engine in engines(arguments.work, arguments.target, arguments.provider).items():
        if label not in (TORCH, *arguments.engines):
            continue
        pipeline = open_engine()
        start = time.perf_counter()
        images = draw(pipeline, prompts, arguments.batch, arguments.steps)
        entry = row(label, prompts, images, reference)
        entry["seconds"] = time.perf_counter() - start
        if reference is None:
            reference = {**entry, "pictures": images}
        first_pictures.append(images[:8])
        report["engines"].append(entry)
        files.write_json(arguments.out, report)
        files.write_bytes(arguments.sheet, sheet(first_pictures))
        compared = f", PSNR median {entry['psnr_db']['median']:.1f} dB" if "psnr_db" in entry else ""
        print(
            f"{label}: {entry['right']} of {entry['total']} right ({entry['share_percent']:.1f} %){compared}",
            flush=True,
        )
    failed = [entry["label"] for entry in report["engines"] if entry.get("passed") is False]
    print(f"{arguments.out}: " + (f"outside the bounds: {', '.join(failed)}" if failed else "within the bounds"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
