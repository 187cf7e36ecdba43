"""Measure time and image quality of caches between steps on the demo models.

Generates the same unseen prompts from the same seeds without and with `pipe.enable_cache(N)`, reads the images back
(`sd_ort.demo.fidelity`) and compares each with the image of full steps. Times are the processor's of one thread: other
processes may share the machine. `weights` is the share of the U-Net's weights that the shallow graph reads, which its
session holds a second time at most, for SD 1.5 and SDXL from the package's templates.

With --transformer, it does the same on `demo-dit` with the caches of transformers, at several thresholds and intervals;
MagCache's ratios are measured on one prompt of the training:
    scripts/bench/step_cache.py --transformer --prompts 60 --out results/transformer_caches.json

The images' quality over their time is drawn beside the page; --plot draws it again from the result.

With --speed FOLDER, it times images of any pipeline folder on any provider instead, by the clock:
    scripts/bench/step_cache.py --speed SD15 --provider sdcuda --batches 1 4 --out results/step_cache_gpu.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tqdm import tqdm

from scripts.report import decibels, head, save, table
from sd_ort import FluxPipeline, MagCacheConfig, StableDiffusionPipeline, TaylorSeerCacheConfig, demo
from sd_ort.benchmark.plot import Line, lines
from sd_ort.checkpoints.presets import open_preset
from sd_ort.core import files, metrics
from sd_ort.demo.fidelity import score, unseen_prompts
from sd_ort.demo.scenes import training_prompts
from sd_ort.export import templates
from sd_ort.graphs.step_cache import keep_shallow_part
from sd_ort.stages import optimize

INTERVALS = (2, 3, 5)
THRESHOLDS = (0.05, 0.1, 0.2)  # of FirstBlockCache
MAG_THRESHOLDS = (0.06, 0.12, 0.24)
TAYLOR_INTERVALS = (3, 5)
FULL = "full steps"
FEW = 2  # prompts that a cache may lose and still be the one that its page names first
LOST_BOUND = 3  # images of 200, at an interval of 3


def generate(pipeline: Any, prompts: list[str], batch: int) -> tuple[np.ndarray, float]:
    """Return images (B, H, W, 3) uint8, prompt i from seed i, and the processor's seconds an image."""
    pipeline(prompts[0], generator=0, progress=False)  # opens sessions
    images: list[np.ndarray] = []
    started = time.process_time()
    for start in tqdm(range(0, len(prompts), batch), unit="batch"):
        part = prompts[start : start + batch]
        seeds = list(range(start, start + len(part)))
        images += [np.asarray(image) for image in pipeline(part, generator=seeds, progress=False).images]
    return np.stack(images), (time.process_time() - started) / len(prompts)


def shallow_weights(preset: str, branch: int) -> float:
    """Return the share of the U-Net's weights that the shallow graph of a branch reads, from the exported graph."""
    source = open_preset(preset, 0)
    path = templates.find_template(templates.component_key(source, "unet", 20, "dynamo"))
    assert path is not None
    graph = templates.Template(path).graph(lambda name: np.empty(0, np.float32))
    sizes = {name: value.shape.numpy() for name, value in graph.graph.initializers.items() if value.shape is not None}
    total = sum(int(np.prod(shape)) for shape in sizes.values())
    keep_shallow_part(graph, branch)
    return sum(int(np.prod(sizes[name])) for name in graph.graph.initializers if name in sizes) / total


def transformer_rows(pipeline: Any) -> Iterator[str]:
    """Enable one cache of transformers after another in a pipeline of the demo, and yield its label."""
    steps = demo.TRANSFORMER_STEPS
    pipeline.enable_cache(MagCacheConfig(num_inference_steps=steps, calibrate=True))
    pipeline(training_prompts(1)[0], generator=0, progress=False)
    ratios = pipeline.mag_ratios
    pipeline.disable_cache()
    yield FULL
    for threshold in THRESHOLDS:
        pipeline.enable_cache(threshold=threshold)
        yield f"FirstBlockCache, threshold {threshold:g}"
    for threshold in MAG_THRESHOLDS:
        pipeline.enable_cache(MagCacheConfig(threshold, num_inference_steps=steps, mag_ratios=ratios))
        yield f"MagCache, threshold {threshold:g}"
    for is_lite in (False, True):
        for interval in TAYLOR_INTERVALS:
            pipeline.enable_cache(TaylorSeerCacheConfig(interval, use_lite_mode=is_lite))
            yield f"TaylorSeer{', lite' if is_lite else ''}, interval {interval}"


def unet_rows(pipeline: Any) -> Iterator[str]:
    """Enable one interval of DeepCache after another in a pipeline, and yield its label."""
    yield FULL
    for interval in INTERVALS:
        pipeline.enable_cache(interval)
        yield f"N = {interval}"


def page(report: dict[str, Any]) -> str:
    is_unet = "weights" in report
    name, steps = (
        ("DeepCache", demo.STEPS) if is_unet else ("Caches between a transformer's steps", demo.TRANSFORMER_STEPS)
    )
    guidance = f", guidance {demo.GUIDANCE:g}" if is_unet else ""
    first, *others = report["rows"]
    fastest = min((row for row in others if row["right"] >= first["right"] - FEW), key=lambda row: row["seconds"])
    text = [
        f"# {name} on the demo model", "",
        f"{fastest['label']} is {first['seconds'] / fastest['seconds']:.2f} times as fast as full steps and loses "
        f"{first['right'] - fastest['right']} of {report['settings']['prompts']} prompts: the fastest row that loses "
        f"{FEW} at most.", "",
        f"{report['settings']['prompts']} unseen prompts, {steps} steps{guidance}, target cpu "
        "in float32, one thread of a shared machine: seconds are the processor's. `lost`: fewer right than with full "
        "steps. PSNR is that to the images of full steps.", "",
    ]  # fmt: skip
    rows = (
        (row["label"], row["right"], first["right"] - row["right"], decibels(row["psnr_db"]), f"{row['seconds']:.3f}",
         f"{1 / row['seconds']:.2f}", f"{first['seconds'] / row['seconds']:.2f}")
        for row in report["rows"]
    )  # fmt: skip
    text += table(("steps", "right", "lost", "median PSNR", "processor s an image", "images/s", "speedup"), rows)
    if is_unet:
        times = ((name, f"{1000 * seconds:.2f}") for name, seconds in report["steps"].items())
        text += ["", *table(("a step, batch 2 (guidance)", "processor ms"), times)]
        shares = ((preset, *(f"{100 * share:.1f} %" for share in each)) for preset, each in report["weights"].items())
        text += ["", *table(("U-Net", *(f"branch {branch}" for branch in range(4))), shares)]
        text += ["", "Share of the U-Net's weights in the graph of shallow steps, cut from the same file."]
    text += ["", f"`{report['command']}` at {report['commit']}, {report['machine']['cpu']}", ""]
    return "\n".join(text)


def step_seconds(pipeline: Any) -> dict[str, float]:
    """Return the fastest of 30 calls of the full and of the shallow graph, in the processor's seconds."""
    random = np.random.default_rng(0)
    models = {
        "shallow" if "shallow" in name else "full": m for name, m in pipeline.models.opened.items() if " " in name
    }
    texts = random.normal(size=(2, 24, models["full"].inputs["encoder_hidden_states"].shape[2]))
    feed: dict[str, Any] = {"sample": random.normal(size=(2, 4, demo.HEIGHT // 8, demo.WIDTH // 8)),
                            "timestep": np.array([500]), "encoder_hidden_states": texts}  # fmt: skip
    features = models["full"](**feed)["deep_features"]
    result = {}
    for name in ("full", "shallow"):
        times = []
        for _ in range(30):
            started = time.process_time()
            models[name](**feed, **({} if name == "full" else {"deep_features": features}))
            times.append(time.process_time() - started)
        result[name] = min(times)
    return result


def speed(folder: Path, provider: str, batches: list[int], rounds: int) -> list[dict[str, Any]]:
    """Return seconds an image by the clock, the median of `rounds` calls, for each batch and interval."""
    pipeline = StableDiffusionPipeline.from_pretrained(folder, provider)
    rows = []
    for label in unet_rows(pipeline):
        for batch in batches:
            times = []
            for number in range(rounds + 2):
                started = time.perf_counter()
                pipeline("a red circle", num_images_per_prompt=batch, generator=number, progress=False)
                times.append((time.perf_counter() - started) / batch)
            seconds = median(times[2:])  # the first calls open sessions and capture graphs
            rows.append({"label": label, "batch": batch, "seconds_an_image": seconds, "images_per_s": 1 / seconds})
            print(rows[-1], flush=True)
    return rows


def plot(report: dict[str, Any]) -> str:
    """Return an SVG of the median PSNR over the seconds of an image, a point for each interval."""
    rows = sorted((row for row in report["rows"] if row["psnr_db"] is not None), key=lambda row: row["seconds"])
    points = tuple((round(row["seconds"], 3), row["psnr_db"]) for row in rows)
    label = f"{', '.join(row['label'] for row in rows)}, from the left"
    full = next(row["seconds"] for row in report["rows"] if row["psnr_db"] is None)
    x_title = f"processor seconds an image ({FULL}: {full:.3f})"
    return str(lines([Line(label, points, "#0072b2")], x_title, "median PSNR to full steps, dB"))


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200, help="unseen prompts (200)")
    parser.add_argument("--transformer", action="store_true", help="demo-dit and the caches of transformers")
    parser.add_argument("--batch", type=int, default=10, help="prompts generated at once (10)")
    parser.add_argument("--work", type=Path, default=Path("out/step_cache"), help="folder for the pipeline")
    parser.add_argument("--out", type=Path, default=Path("results/step_cache.json"), help="the result, and a .md page")
    parser.add_argument("--speed", type=Path, metavar="FOLDER", help="time a pipeline folder instead")
    parser.add_argument("--provider", default="cpu", help="provider of --speed (cpu)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1], help="images a call of --speed (1)")
    parser.add_argument("--rounds", type=int, default=7, help="calls that are timed, of --speed (7)")
    parser.add_argument("--plot", action="store_true", help="only draw --out again")
    arguments = parser.parse_args()
    if arguments.plot:
        files.write_text(arguments.out.with_suffix(".svg"), plot(json.loads(arguments.out.read_text())))
        return 0
    settings = {"prompts": arguments.prompts, "batch": arguments.batch}
    report = head("scripts/bench/step_cache.py") | {"rows": [], "settings": settings}
    if arguments.speed is not None:
        report["rows"] = speed(arguments.speed, arguments.provider, arguments.batches, arguments.rounds)
        report["settings"] = {"folder": str(arguments.speed), "provider": arguments.provider}
        save(arguments.out, report)
        return 0
    is_unet = not arguments.transformer
    if is_unet:
        report["weights"] = {preset: [shallow_weights(preset, b) for b in range(4)] for preset in ("sd15", "sdxl")}
    model = "demo" if is_unet else "demo-dit"
    folder = arguments.work / model
    if not folder.is_dir():
        optimize(model, folder, target="cpu", on_progress=print)
    pipeline: Any = (StableDiffusionPipeline if is_unet else FluxPipeline).from_pretrained(folder, "cpu", threads=1)
    prompts = unseen_prompts(arguments.prompts, 0)
    reference: np.ndarray | None = None
    for label in unet_rows(pipeline) if is_unet else transformer_rows(pipeline):
        images, seconds = generate(pipeline, prompts, arguments.batch)
        psnr = None if reference is None else median(map(metrics.psnr, images, reference))
        reference = images if reference is None else reference
        right = score(prompts, images).correct
        report["rows"].append({"label": label, "right": right, "psnr_db": psnr, "seconds": seconds})
        print(report["rows"][-1], flush=True)
        if not is_unet:
            save(arguments.out, report, page(report))
    if not is_unet:
        return 0
    report["steps"] = step_seconds(pipeline)
    save(arguments.out, report, page(report))
    files.write_text(arguments.out.with_suffix(".svg"), plot(report))
    lost = report["rows"][0]["right"] - report["rows"][1 + INTERVALS.index(3)]["right"]
    print(f"{arguments.out}: {lost} lost at N = 3 (at most {LOST_BOUND})")
    return int(lost > LOST_BOUND)


if __name__ == "__main__":
    sys.exit(main())
