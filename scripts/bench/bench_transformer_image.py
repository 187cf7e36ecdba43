#!/usr/bin/env python3
"""Whole images of a diffusion transformer of full size in bfloat16, as called: our provider beside diffusers, in turn.

    python scripts/bench/bench_transformer_image.py flux-dev --out results/transformers

writes <out>/<preset>_image_<pixels>.json. Weights are random, made on the GPU, and saved as a diffusers folder, which
`optimize` takes; both pipelines are then called with a prompt and return a PIL image. Text encoders and the VAE are
included. diffusers runs eager, then with its repeated blocks compiled; both with cuDNN's attention. The file is written
after each of the two, so a run that is cut off has the first.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sd_ort
from scripts.bench.bench_gpu_step import synchronize
from scripts.bench.bench_transformer_step import random_model
from scripts.bench.gpu_models import DEVICE, elapsed_log, provider_library
from sd_ort.checkpoints.presets import PRESETS, preset_checkpoint
from sd_ort.core.files import write_json
from sd_ort.core.metrics import psnr
from sd_ort.runtime import machine
from sd_ort.stages import optimize

DTYPE = "bfloat16" if DEVICE == "cuda" else "float32"  # the simulated device, for a dry run, has no bfloat16
PROMPT = "a red square beside a blue circle"


def torch_pipeline(preset: str, folder: Path) -> Any:
    """Return diffusers' pipeline in bfloat16 on the device with random weights, and save it to `folder`."""
    from diffusers import DiffusionPipeline

    configs = folder.with_name("configs")
    configs.mkdir()
    preset_checkpoint(preset, PRESETS[preset], 0).write_configs(configs)
    models = {name: random_model(preset, name) for name in PRESETS[preset].models}
    absent = {"image_encoder": None, "feature_extractor": None}
    pipeline = DiffusionPipeline.from_pretrained(configs, **models, **absent)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(folder, max_shard_size="10GB")
    return pipeline


def seconds(call: Callable[[], object]) -> float:
    synchronize()
    started = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=sorted(PRESETS))
    parser.add_argument("--pixels", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--raw", type=Path, default=Path("/dev/shm/sd_ort_raw"), help="folder for diffusers' files")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/sd_ort_image"), help="folder for ours")
    parser.add_argument("--out", type=Path, default=Path("results/transformers"))
    options = parser.parse_args()
    log = elapsed_log()
    pipeline_class = getattr(sd_ort, PRESETS[options.preset].pipeline)
    library = provider_library()
    result: dict[str, Any] = {
        "preset": options.preset, "pixels": options.pixels, "steps": options.steps, "commit": machine.commit(),
        "machine": machine.machine(), "versions": machine.versions(), "engines": [],
    }  # fmt: skip
    arguments = {
        "height": options.pixels, "width": options.pixels, "num_inference_steps": options.steps, "output_type": "np"
    }  # fmt: skip
    try:
        for folder in (options.raw, options.work):
            folder.mkdir(parents=True)
        with torch.inference_mode():
            theirs = torch_pipeline(options.preset, options.raw / "model")
        gc.collect()
        log("random weights saved")
        result["optimize_s"] = seconds(
            lambda: optimize(
                options.raw / "model", options.work / "ours", target="gpu", dtype=DTYPE, hoist=True, on_progress=log
            )
        )
        shutil.rmtree(options.raw)
        pipelines = list[Any]()
        result["open_s"] = seconds(
            lambda: pipelines.append(
                pipeline_class.from_pretrained(options.work / "ours", f"plugin:{library}", tuning=DEVICE == "cuda")
            )
        )
        (ours,) = pipelines
        log(f"optimized in {result['optimize_s']:.1f} s, open in {result['open_s']:.1f} s")

        config, edge = PRESETS[options.preset].models["transformer"], options.pixels // 16
        channels = config["in_channels"]
        shape: tuple[int, ...] = (1, channels, 2 * edge, 2 * edge)
        if config["_class_name"] == "FluxTransformer2DModel":  # takes latents in patches
            shape = (1, edge * edge, channels)
        elif config["_class_name"] == "Flux2Transformer2DModel":
            shape = (1, channels, edge, edge)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))

        def generate(pipeline: Any, **changes: Any) -> np.ndarray:
            latents = noise if pipeline is ours else noise.to(DEVICE, torch.bfloat16)
            image: np.ndarray = pipeline(prompt=PROMPT, **arguments | changes, latents=latents).images[0]
            return image

        result["first_image_s"] = seconds(lambda: generate(ours))
        model = ours.models["transformer"]
        captured = [run.graph is not None or run.graph_id >= 0 for run in getattr(model, "runs", {}).values()]
        result |= {"captured": bool(captured) and all(captured), "hoisted": "transformer_prompt" in ours.models}
        log(f"first image {result['first_image_s']:.1f} s, captured {captured}, hoisted {result['hoisted']}")
        if DEVICE == "cuda":
            theirs.transformer.set_attention_backend("_native_cudnn")
        for label in ("torch eager", "torch.compile of the repeated blocks"):
            if label.startswith("torch.compile"):
                theirs.transformer.compile_repeated_blocks(fullgraph=True)
            row: dict[str, Any] = {"engine": label, "ready_s": seconds(lambda: generate(theirs))}
            times: dict[str, list[float]] = {"ours": [], "theirs": []}
            for _ in range(options.rounds):
                times["ours"].append(seconds(lambda: generate(ours, output_type="pil")))
                times["theirs"].append(seconds(lambda: generate(theirs, output_type="pil")))
            row |= {f"{name}_s": statistics.median(values) for name, values in times.items()}
            ratios = [a / b for a, b in zip(times["ours"], times["theirs"], strict=True)]
            row |= {"ratio": statistics.median(ratios), "rounds": times}
            row["psnr_db"] = float(psnr(generate(ours), generate(theirs), 0.01, peak=1.0))
            result["engines"].append(row)
            log("ROW " + json.dumps(row))
            write_json(options.out / f"{options.preset}_image_{options.pixels}.json", result)
    finally:
        for folder in (options.raw, options.work):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
