"""The engines a benchmark compares, and what each does in its own process: open once, draw batches, time them."""

from __future__ import annotations

import importlib
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort import measure
from sd_ort.errors import SdOrtError
from sd_ort.session import Model, first_line


@dataclass(frozen=True)
class Engine:
    """One row: an ONNX pipeline folder run by "onnxruntime", or the `model` it was exported from, run by "torch".

    `model`: as given to `sd-ort export`, or with `random_weights` the preset whose weights `weights_seed` makes.
    """

    label: str
    engine: str
    directory: str
    model: str
    stage: str = ""
    target: str = ""
    random_weights: bool = False
    weights_seed: int | None = None


@dataclass(frozen=True)
class Settings:
    """What every engine is asked to draw, and how often. Height and width in pixels, None for the model's own."""

    provider: str = "cpu"
    prompt: str = "a red circle on a blue background"
    steps: int = 20
    batch: int = 1
    height: int | None = None
    width: int | None = None
    guidance: float = 7.5
    seed: int = 0
    warmup: int = 1
    runs: int = 5
    threads: int | None = None
    tuning: bool = False
    allow_fallback: bool = False
    sequential: bool = False


# What each engine imports, beyond this module.
IMPORTS = {
    "torch": (
        "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
        "transformers.models.clip.modeling_clip",
    ),
    "onnxruntime": ("sd_ort.pipeline", "transformers.models.clip.tokenization_clip", "onnxruntime"),
}

_drawing: Callable[[], tuple[np.ndarray, list[float]]]  # this process's engine, once `load` ran


def start_process() -> None:
    """Make this process an engine's: quiet libraries, and Ctrl-C, which reaches the whole group, left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ |= {"DIFFUSERS_VERBOSITY": "error", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}


def load(engine: Engine, settings: Settings) -> dict[str, Any]:
    """Open an engine in this process. Raises SdOrtError, which can travel between processes, for every failure."""
    global _drawing
    for module in IMPORTS[engine.engine]:  # Python's imports are not the engine's time to load
        importlib.import_module(module)
    if settings.threads:
        importlib.import_module("torch").set_num_threads(settings.threads)
    try:
        opener = _open_torch if engine.engine == "torch" else _open_onnx
        base = measure.peak_memory_MB()
        start = time.perf_counter()
        _drawing, precision = opener(engine, settings)
        seconds = time.perf_counter() - start
    except SdOrtError:
        raise
    except Exception as error:
        raise SdOrtError(f"{type(error).__name__}: {first_line(error)}") from None
    return {
        "precision": precision,
        "load_s": seconds,
        "base_memory_MB": base,
        "load_memory_MB": measure.peak_memory_MB(),
    }


def draw_batch() -> dict[str, Any]:
    """One batch of images, timed: seconds in all, seconds of each UNet call, peak memory, and the uint8 images."""
    measure.reset_peak_memory()
    try:
        start = time.perf_counter()
        images, steps = _drawing()
        seconds = time.perf_counter() - start
    except SdOrtError:
        raise
    except Exception as error:
        raise SdOrtError(f"{type(error).__name__}: {first_line(error)}") from None
    memory = measure.peak_memory_MB()
    return {"seconds": seconds, "steps": steps, "memory_MB": memory, "images": images}


class TimedModel(Model):
    """A component that keeps the seconds of each of its calls."""

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self.seconds: list[float] = []

    def __call__(self, **arrays: Any) -> dict[str, np.ndarray]:
        start = time.perf_counter()
        outputs = super().__call__(**arrays)
        self.seconds.append(time.perf_counter() - start)
        return outputs


def _open_onnx(engine: Engine, settings: Settings) -> tuple[Any, str]:
    """A function that draws one batch with an ONNX folder, and the precision of its UNet ("fp32", "fp16")."""
    from sd_ort.pipeline import StableDiffusionPipeline

    pipeline = StableDiffusionPipeline.from_pretrained(
        engine.directory,
        settings.provider,
        threads=settings.threads,
        tuning=settings.tuning,
        allow_fallback=settings.allow_fallback,
    )
    unet = TimedModel(pipeline.unet.session)
    pipeline.unet = unet
    precision = "fp16" if unet.dtype("sample") == np.float16 else "fp32"

    def draw() -> tuple[np.ndarray, list[float]]:
        unet.seconds.clear()
        images = pipeline(**_arguments(settings), progress=False).images
        return np.stack([np.asarray(image) for image in images]), list(unet.seconds)

    return draw, precision


def _open_torch(engine: Engine, settings: Settings) -> tuple[Any, str]:
    """As `_open_onnx` for diffusers and torch eager: float32 on the CPU, float16 on a GPU."""
    import torch

    on_gpu = settings.provider != "cpu"
    if on_gpu and not torch.cuda.is_available():
        raise SdOrtError("this torch sees no GPU: install the torch build for it to compare with.")
    pipeline = torch_pipeline(engine.model, engine.random_weights, engine.weights_seed or 0)
    if on_gpu:
        pipeline.to("cuda", torch.float16)
    starts: list[float] = []
    seconds: list[float] = []

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    pipeline.unet.register_forward_pre_hook(lambda *_: starts.append(now()))
    pipeline.unet.register_forward_hook(lambda *_: seconds.append(now() - starts[-1]))

    def draw() -> tuple[np.ndarray, list[float]]:
        seconds.clear()
        images = pipeline(**_arguments(settings)).images
        return np.stack([np.asarray(image) for image in images]), list(seconds)

    return draw, "fp16" if on_gpu else "fp32"


def torch_pipeline(model: str, random_weights: bool = False, seed: int = 0) -> Any:
    """The diffusers pipeline, in float32 on the CPU, of what `sd-ort export` was given; without safety checker.

    `model`: "demo", a diffusers folder or a hub id; or with `random_weights` a preset, its weights made from `seed`.
    Raises InputError when it cannot be loaded.
    """
    from diffusers import DiffusionPipeline

    from sd_ort.sources import open_source

    checkpoint, preset = (None, model) if random_weights else (model, None)
    source = open_source(checkpoint, preset, random_weights, seed)
    parts: dict[str, Any] = {name: source.load(name) for name in source.configs}
    parts |= {name: None for name in ("safety_checker", "feature_extractor") if name in source.index}
    with tempfile.TemporaryDirectory() as folder:
        source.write_configs(Path(folder))
        pipeline = DiffusionPipeline.from_pretrained(folder, **parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _arguments(settings: Settings) -> dict[str, Any]:
    import torch

    generators = [torch.Generator().manual_seed(settings.seed + i) for i in range(settings.batch)]
    return {
        "prompt": [settings.prompt] * settings.batch,
        "height": settings.height,
        "width": settings.width,
        "num_inference_steps": settings.steps,
        "guidance_scale": settings.guidance,
        "generator": generators,
    }
