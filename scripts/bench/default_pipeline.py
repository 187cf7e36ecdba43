#!/usr/bin/env python3
"""The default call on a GPU: `from_pretrained(folder, provider=...)` and nothing else, beside diffusers.

    default_pipeline.py make sd15 --graphs DIR         work/sd15/{raw,ours}: random weights, --target and --float16
    default_pipeline.py images sd15 --steps 50         whole images in turn: ours, ours with what it does switched off,
                                                 torch.compile (UNet and VAE decode), eager; first images; equal bytes
    default_pipeline.py make sd15 --float8             work/sd15/float8 too, calibrated on random inputs
    default_pipeline.py images sd15 --float8           whole images in turn: ours in float16 and float8, each with and
                                                 without tuning, torch.compile, eager
    default_pipeline.py fidelity --graphs DIR          200 unseen prompts of the demo model against torch in float32

Each writes a JSON to --out, with machine, versions and commit ($SD_ORT_COMMIT where there is no git). `--graphs` takes
what export_without_weights.py writes, for machines without an exporter; without it `make` exports.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from scripts.bench.gpu_models import calibration_run, fill
from sd_ort.checkpoints.checkpoint import class_name, model_class
from sd_ort.checkpoints.open import open_checkpoint
from sd_ort.checkpoints.presets import open_preset
from sd_ort.checkpoints.signatures import MODEL_OF
from sd_ort.core import metrics, pipeline_folder
from sd_ort.core.files import write_json
from sd_ort.export.exporter import export, save_config
from sd_ort.runtime import machine
from sd_ort.runtime.provider_choice import target_of
from sd_ort.stages import optimize

ROOT = Path(__file__).resolve().parents[2]

PROMPT = "a red circle left of a small blue square on a white background"
SIZES = {"sd15": 512, "sdxl": 1024, "sd15-tiny": 64, "sdxl-tiny": 64}
FIRST = """
import sys, time
from sd_ort import StableDiffusionPipeline
pipeline = StableDiffusionPipeline.from_pretrained({folder!r}, {provider!r})
loaded = time.time()
pipeline({prompt!r}, num_inference_steps={steps}, height={side}, width={side}, generator=0, progress=False)
print(loaded, time.time())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("make", "images", "fidelity"))
    parser.add_argument("preset", nargs="?", default="demo")
    parser.add_argument("--graphs", type=Path)
    parser.add_argument("--provider", default="cuda")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--float8", action="store_true")
    parser.add_argument("--work", type=Path, default=Path("out/plain_call"))
    parser.add_argument("--out", type=Path, default=Path("results/default_pipeline"))
    options = parser.parse_args()
    stages = {"make": make, "images": images, "fidelity": fidelity}
    started = time.perf_counter()
    with torch.no_grad():
        report = stages[options.stage](options)
    if report:
        report = {"when": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC", **where(), **report}
        name = f"{options.preset}.json" if options.stage == "images" else "fidelity.json"
        write_json(options.out / name, report)
    log(f"{options.stage} {options.preset}: {time.perf_counter() - started:.0f} s")


def log(line: str) -> None:
    print(line, flush=True)


def where() -> dict[str, Any]:
    return {"machine": machine.machine(), "versions": machine.versions(), "commit": machine.commit()}


# --- make -----------------------------------------------------------------------------------------------------------


def device_of(provider: str) -> str:
    return "cuda" if provider != "cpu" and torch.cuda.is_available() else "cpu"


def models(preset: str, device: str) -> dict[str, Any]:
    """The preset's models with random weights, made on the device: variance 1/fan_in, norms around 1, biases 0."""
    modules = {}
    generator = torch.Generator(device).manual_seed(0)
    for name, config in open_preset(preset, 0).configs.items():
        cls = model_class(class_name(config))
        with torch.device(device):
            model = cls(cls.config_class(**config)) if "model_type" in config else cls.from_config(config)
        for key, parameter in model.named_parameters():
            spread = 0.1 if parameter.ndim < 2 else parameter[0].numel() ** -0.5
            parameter.normal_(float(parameter.ndim < 2 and key.endswith("weight")), spread, generator=generator)
        modules[name] = model.eval()
    return modules


def save_checkpoint(preset: str, folder: Path, provider: str) -> dict[str, Any]:
    """Write a diffusers folder of a preset in float16 with the weights of `models`, and return its modules."""
    folder.mkdir(parents=True)
    open_preset(preset, 0).write_configs(folder)
    modules = models(preset, device_of(provider))
    for name, model in modules.items():
        model.half().cpu().save_pretrained(folder / name)
    return modules


def make(options: argparse.Namespace) -> None:
    """work/<preset>/raw and ours."""
    work = options.work / options.preset
    target = target_of(options.provider) if options.provider != "cpu" else "portable"
    if options.graphs:
        raw_folder(options.preset, options.graphs, work / "raw", device_of(options.provider))
    elif options.preset == "demo":
        export("demo", work / "raw", on_progress=log)
    else:
        export(None, work / "raw", preset=options.preset, random_weights=True, on_progress=log)
    optimize(work / "raw", work / "ours", target=target, dtype="float16", calibrate=False, on_progress=log)
    if options.float8:
        inputs = calibration_run(options.preset, work / "runs.npz")
        optimize(
            work / "raw", work / "float8", target=target, dtype="float16", calibrate=False, on_progress=log,
            inputs=inputs, eight_bits="float8", convolutions=True, vae_decoder=True,
        )  # fmt: skip


def raw_folder(preset: str, graphs: Path, out: Path, device: str) -> None:
    """A raw export from graphs without weights and the models' weights, the demo model's or random ones."""
    source = open_checkpoint("demo") if preset == "demo" else open_preset(preset, 0)
    modules = {} if preset == "demo" else models(preset, device)
    with pipeline_folder.staged(out) as work:
        source.write_configs(work)
        for path in sorted(graphs.glob(f"{preset}.*.onnx.xz")):
            component = path.name.split(".")[1]
            name = MODEL_OF.get(component, component)
            model = modules[name] if modules else source.load(name)
            (work / component).mkdir()
            save_config(model, work / component)
            fill(path, model.state_dict(), work / component)
        described = {"model": preset, "hash": source.hash, "random_weights": preset != "demo"}
        pipeline_folder.write_manifest(work, {"stage": "export", "source": described, "options": {"seed": 0}})


# --- images ---------------------------------------------------------------------------------------------------------


def images(options: argparse.Namespace) -> dict[str, Any]:
    """Whole images, in turn and in one process, each engine's first image apart."""
    from sd_ort import StableDiffusionPipeline

    ours = options.work / options.preset / "ours"
    side = SIZES[options.preset]
    arguments = {"num_inference_steps": options.steps, "height": side, "width": side}
    report: dict[str, Any] = {
        "settings": {"preset": options.preset, "random_weights": True, "dtype": "float16", **arguments}
    }
    if options.float8:
        compare_engines(float8_engines(options, arguments), options, arguments, report)
        return report
    report["first_images"] = [first_image(ours, options, side) for _ in range(2)]
    log(f"first image in a new process: {report['first_images']}")
    plain = StableDiffusionPipeline.from_pretrained(ours, options.provider)
    uncaptured = StableDiffusionPipeline.from_pretrained(ours, options.provider, graph=False)
    on_host = StableDiffusionPipeline.from_pretrained(ours, options.provider, graph=False, device_loop=False)

    engines = {
        "the plain call": image_call(lambda: plain, arguments),
        "waited for": image_call(lambda: plain, arguments, wait=True),
        "graph=False": image_call(lambda: uncaptured, arguments),
        "graph=False, waited for": image_call(lambda: uncaptured, arguments, wait=True),
        "graph=False, device_loop=False": image_call(lambda: on_host, arguments),
    }
    compare_engines(engines, options, arguments, report)
    report["parts"] = time_breakdown(plain, options, arguments)
    log(json.dumps(report["parts"]))
    return report


def image_call(
    open_pipeline: Callable[[], Any], arguments: dict[str, Any], wait: bool = False
) -> Callable[[], np.ndarray]:
    """Return a call of a pipeline of ours, which waits for each step if `wait`."""

    def draw() -> np.ndarray:
        pipeline = open_pipeline()
        pipeline.loop.wait = wait
        return np.asarray(pipeline(PROMPT, **arguments, generator=0, progress=False).images[0])

    return draw


def float8_engines(options: argparse.Namespace, arguments: dict[str, Any]) -> dict[str, Callable[[], np.ndarray]]:
    """Return image calls of our pipelines in float16 and float8.

    Each pipeline opens at its first image: an open one that tunes lets all of the process tune.
    """
    from sd_ort import StableDiffusionPipeline

    def of_folder(folder: str, tuning: bool) -> Callable[[], np.ndarray]:
        path = options.work / options.preset / folder
        return image_call(
            cache(lambda: StableDiffusionPipeline.from_pretrained(path, options.provider, tuning=tuning)), arguments
        )

    return {
        "the plain call": of_folder("ours", False),
        "float8": of_folder("float8", False),
        "float8, tuned": of_folder("float8", True),
        "the plain call, tuned": of_folder("ours", True),
    }


def compare_engines(
    engines: dict[str, Callable[[], np.ndarray]],
    options: argparse.Namespace,
    arguments: dict[str, Any],
    report: dict[str, Any],
) -> None:
    """Time the engines and diffusers' in turn; report times and each image's PSNR beside the plain call's."""
    engines = engines | diffusers_engines(options, arguments, device_of(options.provider))
    images, report["engines"] = in_turn(engines, options.rounds)
    base = images["the plain call"]
    for name, image in images.items():
        row = report["engines"][name]
        row["same_bytes_as_the_plain_call"] = bool(np.array_equal(image, base))
        row["psnr_db"] = metrics.psnr(image, base)
        log(f"{name:34} first {row['first_s']:7.2f} s  median {1e3 * row['median_s']:8.1f} ms  {row['psnr_db']:.1f} dB")


def first_image(ours: Path, options: argparse.Namespace, side: int) -> dict[str, float]:
    """Seconds from the start of a process to its pipeline, and to its first image."""
    values = {"root": str(ROOT), "folder": str(ours), "provider": options.provider, "prompt": PROMPT}
    code = FIRST.format(**values, steps=options.steps, side=side)
    start = time.time()
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    loaded, finished = map(float, done.stdout.split()[-2:])
    return {"loaded_s": loaded - start, "image_s": finished - start}


def in_turn(engines: dict[str, Callable[[], np.ndarray]], rounds: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """One image and the times of each engine: a first run, a second, then `rounds` in turn."""
    images: dict[str, np.ndarray] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, draw in engines.items():
        start = time.perf_counter()
        images[name] = draw()
        rows[name] = {"first_s": time.perf_counter() - start, "seconds": []}
        log(f"{name}: first in {rows[name]['first_s']:.2f} s")
        draw()
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, draw in engines.items():
            start = time.perf_counter()
            images[name] = draw()
            rows[name]["seconds"].append(time.perf_counter() - start)
    gc.enable()
    for row in rows.values():
        row["median_s"] = median(row["seconds"])
    return images, rows


def diffusers_engines(
    options: argparse.Namespace, arguments: dict[str, Any], device: str
) -> dict[str, Callable[[], np.ndarray]]:
    """diffusers on the same weights: compiled (UNet and VAE decode) unless it is left out, and eager."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    source = options.work / options.preset / "raw"
    modules: dict[str, Any] = {name: model.to(dtype) for name, model in models(options.preset, device).items()}
    eager = assemble(source, modules)
    engines = {"diffusers eager, channels last": call(eager, arguments, dtype)}
    if not options.no_compile:
        modules["unet"].to(memory_format=torch.channels_last)
        modules["vae"].to(memory_format=torch.channels_last)
        compiled = assemble(source, modules)
        mode = "reduce-overhead" if device == "cuda" else "default"
        compiled.unet = torch.compile(compiled.unet, mode=mode, fullgraph=True, dynamic=False)
        decode = torch.compile(modules["vae"].decode, mode=mode, fullgraph=True, dynamic=False)
        plain = modules["vae"].decode

        def run() -> np.ndarray:
            modules["vae"].decode = decode
            try:
                return call(compiled, arguments, dtype)()
            finally:
                modules["vae"].decode = plain

        engines = {"diffusers torch.compile": run, **engines}
    return engines


def assemble(source: Path, modules: dict[str, torch.nn.Module]) -> Any:
    """diffusers' pipeline of models in memory and the folder's tokenizers and scheduler."""
    import diffusers
    from transformers import CLIPTokenizer

    index = json.loads((source / "model_index.json").read_text())
    config = json.loads((source / "scheduler" / "scheduler_config.json").read_text())
    modules = dict(modules) | {"scheduler": getattr(diffusers, config["_class_name"]).from_config(config)}
    modules |= {name: CLIPTokenizer.from_pretrained(source / name) for name in index if name.startswith("tokenizer")}
    cls = getattr(diffusers, index["_class_name"])
    extra = {} if "XL" in index["_class_name"] else {"safety_checker": None, "feature_extractor": None}
    options = {} if extra == {} else {"requires_safety_checker": False}
    pipeline = cls(**modules, **extra, **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def call(pipeline: Any, arguments: dict[str, Any], dtype: torch.dtype) -> Callable[[], np.ndarray]:
    """One image from seed 0, with noise sampled in float32 like ours."""
    side = arguments["height"] // pipeline.vae_scale_factor
    noise = torch.randn((1, 4, side, side), generator=torch.Generator().manual_seed(0))
    device = pipeline.unet.device

    def draw() -> np.ndarray:
        return np.asarray(pipeline(PROMPT, **arguments, latents=noise.to(device, dtype)).images[0])

    return draw


def time_breakdown(pipeline: Any, options: argparse.Namespace, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of a default call (queued steps, UNet calls, the rest) and of steps of the other tasks."""
    from PIL import Image

    from sd_ort import StableDiffusionImg2ImgPipeline, StableDiffusionInpaintPipeline

    def timed(draw: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            draw()
            seconds.append(time.perf_counter() - start)
        return median(seconds)

    image_s = timed(lambda: pipeline(PROMPT, **arguments, generator=0, progress=False))
    buffers = next(reversed(pipeline.loop.buffer_cache.values())) if pipeline.loop.buffer_cache else None
    times: dict[str, Any] = {"image_ms": 1e3 * image_s}
    if buffers is None:
        return times
    times["step_ms"] = {"text to image": 1e3 * pipeline.loop.step_seconds}
    times["held_MB"], times["kept"] = pipeline.loop.buffer_bytes / 1e6, pipeline.loop.MAX_CACHED

    times["unet_calls"] = len(buffers.schedule.arrays["timesteps"]) - 1  # PNDM makes 51 of 50 steps

    def unets() -> None:
        for _ in range(times["unet_calls"] - 1):
            buffers.unet.run(False)
        buffers.unet.run()

    times["unet_calls_alone_ms"] = 1e3 * timed(unets)
    times["not_in_unet_ms"] = times["image_ms"] - times["unet_calls_alone_ms"]
    y, x = np.mgrid[: arguments["height"], : arguments["width"]]
    image = Image.fromarray(np.stack([x % 256, y % 256, (x + y) % 256], -1).astype(np.uint8))
    mask = Image.fromarray(np.where((x > 64) & (y > 64), 255, 0).astype(np.uint8))
    ours = options.work / options.preset / "ours"
    tasks: dict[str, Any] = {
        "image to image": (StableDiffusionImg2ImgPipeline, {}),
        "inpainting": (StableDiffusionInpaintPipeline, {"mask_image": mask}),
    }
    settings = {"strength": 1.0, "num_inference_steps": options.steps, "generator": 0, "progress": False}
    for name, (cls, more) in tasks.items():
        if (ours / "vae_encoder").is_dir():
            other = cls.from_pretrained(ours, options.provider)
            draw = lambda other=other, more=more: other(PROMPT, image=image, **settings, **more)  # noqa: E731
            draw()
            times.setdefault("image_of_task_ms", {})[name] = 1e3 * timed(draw)
            times["step_ms"][name] = 1e3 * other.loop.step_seconds
            del other
    return times


# --- fidelity -------------------------------------------------------------------------------------------------------


def fidelity(options: argparse.Namespace) -> dict[str, Any]:
    """Unseen prompts of the demo model: prompt i from seed i, ours one by one, torch in batches of 8."""
    from sd_ort import StableDiffusionPipeline, demo
    from sd_ort.checkpoints.torch_pipeline import torch_pipeline
    from sd_ort.demo.fidelity import score, unseen_prompts

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    prompts = unseen_prompts(options.prompts, 0)
    common = {"num_inference_steps": demo.STEPS, "guidance_scale": demo.GUIDANCE}
    size = {"height": demo.HEIGHT, "width": demo.WIDTH}
    reference = torch_pipeline("demo").to(device_of(options.provider))
    side = demo.HEIGHT // reference.vae_scale_factor
    shape = (1, reference.unet.config.in_channels, side, side)
    expected: list[np.ndarray] = []
    for start in range(0, len(prompts), 8):
        part = prompts[start : start + 8]
        noise = [torch.randn(shape, generator=torch.Generator().manual_seed(start + i)) for i in range(len(part))]
        latents = torch.cat(noise).to(reference.device)
        expected += [np.asarray(image) for image in reference(part, **common, **size, latents=latents).images]
    ours = StableDiffusionPipeline.from_pretrained(options.work / "demo" / "ours", options.provider)
    images = [
        np.asarray(ours(prompt, **common, **size, generator=seed, progress=False).images[0])
        for seed, prompt in enumerate(prompts)
    ]
    decibels = [metrics.psnr(a, b) for a, b in zip(images, expected, strict=True)]
    right = {"torch fp32": score(prompts, expected).correct, "ours": score(prompts, images).correct}
    values = {
        "prompts": len(prompts),
        "right": right,
        "psnr_db": {"median": median(decibels), "min": min(decibels)},
        "captured": type(ours.unet).__name__ == "GpuGraphModel",
        "hoisted": "unet_prompt" in ours.models,
        "queued": bool(ours.loop.buffer_cache) and not ours.loop.wait,
    }
    log(json.dumps(values))
    return values


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
