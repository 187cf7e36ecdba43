"""The engines a benchmark compares, and what each does in its own process: open once, run batches, time them.

Two workloads: a whole pipeline that draws images from a prompt, or one component (`Settings.component`) called again
and again on made-up inputs, which needs neither a tokenizer nor trained weights.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.benchmark.engines.registry import KINDS
from sd_ort.core.errors import InputError, SdOrtError, first_line
from sd_ort.runtime import machine


@dataclass(frozen=True)
class Engine:
    """One contender: an ONNX folder run by an `engine` of `kinds.KINDS`, or the `model` it came from, run by "torch".

    `model`: as given to `sd-ort export`, or with `random_weights` the preset whose weights `weights_seed` makes.
    `make`: how to make `directory` from `raw`, the raw export (see `benchmark.recipes`); () when it exists. `variant`:
    how torch runs, "" for eager, and the precision of OpenVINO. `graph`: calls are captured once and replayed as a
    device graph. `library`: whether the custom-op library is registered.
    """

    label: str
    engine: str
    directory: str
    model: str
    stage: str = ""
    target: str = ""
    random_weights: bool = False
    weights_seed: int | None = None
    make: tuple[str, ...] = ()
    raw: str = ""
    variant: str = ""
    graph: bool = False
    library: bool = True


@dataclass(frozen=True)
class Settings:
    """What every engine is asked to do, and how often. Height and width in pixels, None for the model's own.

    `batches`: images drawn at once, each size a row; with guidance the UNet sees twice as many. `component`: time
    `steps` calls of this one a round, instead of drawing images in `steps` steps. `one_latent`: every image starts
    from the noise of `seed`, as MLPerf has it.
    """

    provider: str = "cpu"
    component: str | None = None
    prompt: str = "a red circle on a blue background"
    steps: int = 20
    batches: tuple[int, ...] = (1,)
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
    one_latent: bool = False


@dataclass
class Batch:
    """What one batch gave: seconds of each UNet (or component) call, and uint8 images (B, H, W, 3) or an output.

    `output`: float32, of a component's first sample. `size`: pixels, (height, width).
    """

    steps: list[float]
    size: tuple[int, int]
    images: np.ndarray | None = None
    output: np.ndarray | None = None


Run = Callable[[int, list[str] | None, int], Batch]  # (batch size, its prompts or None for the settings', first seed)


@dataclass
class Opened:
    """An engine ready to run, and the precision of its UNet or component ("fp32", "fp16")."""

    run: Run
    precision: str
    notes: list[str] = field(default_factory=list)


_opened: Opened  # this process's engine, once `load` ran


def start_process() -> None:
    """Make this process an engine's: quiet libraries, and Ctrl-C, which reaches the whole group, left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ |= {"DIFFUSERS_VERBOSITY": "error", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}


def load(engine: Engine, settings: Settings) -> dict[str, Any]:
    """Open an engine in this process. Raises SdOrtError, which can travel between processes, for every failure."""
    global _opened
    kind = KINDS[engine.engine]
    opener = importlib.import_module(kind.module)
    for module in kind.imports:
        importlib.import_module(module)
    torch = importlib.import_module("torch")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if engine.engine == "torch" and settings.provider != "cpu" and torch.cuda.is_available():
        torch.cuda.init()
    base = machine.peak_memory_MB()
    start = time.perf_counter()
    _opened = with_plain_errors(opener.open_component if settings.component else opener.open_pipeline, engine, settings)
    return {
        "precision": _opened.precision,
        "load_s": time.perf_counter() - start,
        "base_memory_MB": base,
        "load_memory_MB": machine.peak_memory_MB(),
        "notes": _opened.notes,
    }


def draw_batch(batch: int, prompts: list[str] | None = None, seed: int = 0) -> dict[str, Any]:
    """One batch, timed: seconds in all, what `Batch` holds, and the process's peak memory in MB meanwhile."""
    machine.reset_peak_memory()
    start = time.perf_counter()
    result: Batch = with_plain_errors(_opened.run, batch, prompts, seed)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "steps": result.steps,
        "size": result.size,
        "memory_MB": machine.peak_memory_MB(),
        "images": result.images,
        "output": result.output,
    }


def with_plain_errors(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`; every exception leaves as an SdOrtError, since others may not survive pickling."""
    try:
        return function(*arguments)
    except SdOrtError as error:
        raise SdOrtError(str(error)) from None
    except Exception as error:
        raise SdOrtError(f"{type(error).__name__}: {first_line(error)}") from None


def pipeline_arguments(settings: Settings, batch: int, prompts: list[str] | None, seed: int) -> dict[str, Any]:
    """What our pipeline and diffusers' are called with; image i of the batch has the seed settings.seed + seed + i, or
    with `one_latent` settings.seed."""
    import torch

    first = settings.seed + seed
    return {
        "prompt": prompts or [settings.prompt] * batch,
        "height": settings.height,
        "width": settings.width,
        "num_inference_steps": settings.steps,
        "guidance_scale": settings.guidance,
        "generator": [
            torch.Generator().manual_seed(settings.seed if settings.one_latent else first + i) for i in range(batch)
        ],
    }


@dataclass(frozen=True)
class Call:
    """One call of a component: its signature, its made-up inputs in float32 or int64, and the image size in pixels."""

    signature: Any
    feeds: dict[str, np.ndarray]
    sizes: dict[str, int]
    pixels: tuple[int, int]


def component_call(engine: Engine, settings: Settings, batch: int) -> Call:
    """What a component is called with for `batch` images: the same for every engine. Sizes as the pipeline has them.

    Raises InputError when the folder's configs do not say what the component takes, or a size does not fit.
    """
    import onnx_ir as ir

    from sd_ort.checkpoints import signatures
    from sd_ort.checkpoints.configs import component_config
    from sd_ort.checkpoints.synthetic_inputs import pixels_per_latent, random_inputs

    assert settings.component is not None
    name, folder = settings.component, Path(engine.raw or engine.directory)
    configs = {c: component_config(folder, c) for c in ("unet", name)}
    if not all(configs.values()):
        raise InputError(f"{folder} has no config.json of its UNet and {name}: export it with sd-ort.")
    signature = signatures.signature(name, configs[name])
    scale, default = pixels_per_latent(folder), signatures.default_latents(configs["unet"])
    height, width = (pixels // scale if pixels else default for pixels in (settings.height, settings.width))
    rows = 2 * batch if name == "unet" and settings.guidance > 1 else batch
    sizes = {"batch": rows, "sequence": 77, "height": height, "width": width}
    for axis in ("height", "width"):
        if sizes[axis] % (multiple := signature.multiples.get(axis, 1)):
            raise InputError(f"{axis} must be a multiple of {multiple * scale} pixels for this {name}.")
    values = [
        ir.Value(name=t.name, shape=ir.Shape(t.axes), type=ir.TensorType(ir.DataType[_ONNX_TYPES[t.dtype]]))
        for t in signature.inputs
    ]
    feeds = random_inputs(name, values, configs[name], sizes, settings.seed)
    return Call(signature, feeds, sizes, (height * scale, width * scale))


_ONNX_TYPES = {"float32": "FLOAT", "int64": "INT64"}
