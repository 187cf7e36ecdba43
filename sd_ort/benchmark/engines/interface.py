"""Interface of a benchmark engine, and the worker process that loads one and times its batches.

Two workloads: a pipeline that generates images from a prompt, or repeated calls of one component
(`BenchmarkSettings.component`) on synthetic inputs, which needs neither a tokenizer nor trained weights.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.core.errors import InputError, SdOrtError, describe_error, first_line
from sd_ort.runtime import machine


@dataclass(frozen=True)
class EngineType:
    """`module`: has `open_component` and `open_pipeline`, which take an Engine and settings and return a LoadedEngine.

    `imports`: modules imported before loading is timed. `names`: of --engines, with `Engine.variant` and label.
    """

    module: str
    imports: tuple[str, ...] = ()
    names: Mapping[str, tuple[str, str]] = field(default_factory=dict)


# Names for ONNX Runtime depend on the folder (`engine_selection`). Eager diffusers uses torch's
# scaled_dot_product_attention.
ENGINE_TYPES: Mapping[str, EngineType] = {
    "onnxruntime": EngineType("sd_ort.benchmark.engines.ort", ("sd_ort.pipelines.text_to_image",)),
    "torch": EngineType(
        "sd_ort.benchmark.engines.pytorch",
        ("diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion", "transformers.models.clip.modeling_clip"),
        {
            "torch": ("", "torch eager"),
            "torch-channels-last": ("channels_last", "torch channels last"),
            "torch-graph": ("graph", "torch eager + graph"),
            "torch-compile": ("compile", "torch.compile"),
            "xformers": ("xformers", "torch + xFormers"),
        },
    ),
    "tensorrt": EngineType("sd_ort.benchmark.engines.ort", names={"tensorrt": ("", "TensorRT fp16")}),
    "openvino": EngineType(
        "sd_ort.benchmark.engines.openvino",
        names={"openvino": ("float32", "OpenVINO fp32"), "openvino-bf16": ("bfloat16", "OpenVINO bf16")},
    ),
}


@dataclass(frozen=True)
class Engine:
    """One row of a benchmark: a pipeline folder, or the model it was exported from, in an engine of ENGINE_TYPES.

    Args:
        model: as for `sd-ort export`; with `random_weights` a preset, whose weights have the seed `weights_seed`.
        build_spec: how to build `directory` from `raw_export` (`benchmark.engine_builds`); () if it exists.
        variant: of torch ("" is eager), or the precision of OpenVINO.
        graph: calls are captured as GPU graphs.
        library: the op library is registered.
    """

    label: str
    engine: str
    directory: str
    model: str
    stage: str = ""
    target: str = ""
    random_weights: bool = False
    weights_seed: int | None = None
    build_spec: tuple[str, ...] = ()
    raw_export: str = ""
    variant: str = ""
    graph: bool = False
    library: bool = True

    @property
    def pipeline_graph(self) -> bool | None:
        """`graph` of a pipeline: optimized folders capture GPU graphs by default (None), others only if asked."""
        optimized = self.stage == "optimize" or self.build_spec[:1] == ("ours",)
        return True if self.graph else None if optimized else False


@dataclass(frozen=True)
class BenchmarkSettings:
    """Workload of a benchmark.

    Args:
        component: time `steps` calls of this component instead of generating images in `steps` steps.
        batches: images per batch, one row each; with guidance the UNet gets twice as many.
        height, width: in pixels; None: the model's own.
        one_latent: every image starts from the noise of `seed`, as in MLPerf.
        calls: batches that a run generates one after another; engines that can overlap them on host and device do.
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
    calls: int = 1


@dataclass
class Batch:
    """Result of one run: seconds of each UNet or component call, and PIL images or an output.

    `size`: (height, width) in pixels. `output`: float32, a component's output for the first image.
    """

    steps: list[float]
    size: tuple[int, int]
    images: Sequence[Any] | None = None
    output: np.ndarray | None = None


# Batch size; prompts of one or more batches, None for the settings' prompt and number of calls; first seed.
RunBatch = Callable[[int, list[str] | None, int], Batch]


@dataclass
class LoadedEngine:
    """An engine ready to run, and the precision of its UNet or component ("fp32", "fp16")."""

    run: RunBatch
    precision: str


_engine: LoadedEngine  # of this process, set by `load`


def start_process() -> None:
    """Set up a worker process: quiet libraries; the parent handles Ctrl-C, which reaches the whole process group."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ |= {"DIFFUSERS_VERBOSITY": "error", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}


def load(engine: Engine, settings: BenchmarkSettings) -> dict[str, Any]:
    """Load an engine in this process; return its precision, load time and memory. Raises SdOrtError on any failure."""
    global _engine
    engine_type = ENGINE_TYPES[engine.engine]
    names = engine_type.module, *engine_type.imports
    module, *_ = [convert_errors(importlib.import_module, name) for name in names]
    if engine.engine == "torch":
        torch = importlib.import_module("torch")
        if settings.threads:
            torch.set_num_threads(settings.threads)
        if settings.provider != "cpu" and torch.cuda.is_available():
            torch.cuda.init()
    base = machine.peak_memory_MB()
    start = time.perf_counter()
    _engine = convert_errors(module.open_component if settings.component else module.open_pipeline, engine, settings)
    return {
        "precision": _engine.precision,
        "load_s": time.perf_counter() - start,
        "base_memory_MB": base,
        "load_memory_MB": machine.peak_memory_MB(),
    }


def run_batch(batch: int, prompts: list[str] | None = None, seed: int = 0) -> dict[str, Any]:
    """Run one batch, or several (`RunBatch`); return the fields of `Batch` with images as one uint8 array (B, H, W, 3),
    the seconds until the images, and the peak memory of the process in MB."""
    machine.reset_peak_memory()
    start = time.perf_counter()
    result: Batch = convert_errors(_engine.run, batch, prompts, seed)
    usage = {"seconds": time.perf_counter() - start, "memory_MB": machine.peak_memory_MB()}
    images = None if result.images is None else np.stack([np.asarray(image) for image in result.images])
    return {**usage, **vars(result), "images": images}


def convert_errors(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; exceptions become an SdOrtError, because others may not survive pickling between processes."""
    try:
        return function(*arguments)
    except SdOrtError as error:
        raise SdOrtError(str(error)) from None
    except ModuleNotFoundError as error:
        raise SdOrtError(describe_error(error)[0]) from None
    except Exception as error:
        raise SdOrtError(f"{type(error).__name__}: {first_line(error)}") from None


def time_calls(call: Callable[[], Any], count: int) -> list[float]:
    """Return the seconds of each of `count` calls."""
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def pipeline_calls(
    settings: BenchmarkSettings, batch: int, prompts: list[str] | None, seed: int
) -> list[dict[str, Any]]:
    """Return the arguments of each pipeline call, for diffusers and sd-ort, with integer seeds as `generator`.

    Image i has the seed settings.seed + seed + i, or with `one_latent` settings.seed.
    """
    prompts = prompts or [settings.prompt] * batch * settings.calls
    seeds = [settings.seed if settings.one_latent else settings.seed + seed + i for i in range(len(prompts))]
    return [
        {
            "prompt": prompts[start : start + batch],
            "height": settings.height,
            "width": settings.width,
            "num_inference_steps": settings.steps,
            "guidance_scale": settings.guidance,
            "generator": seeds[start : start + batch],
        }
        for start in range(0, len(prompts), batch)
    ]


def component_call(
    engine: Engine, settings: BenchmarkSettings, batch: int
) -> tuple[dict[str, np.ndarray], tuple[int, int]]:
    """Return a component's synthetic inputs (float32 or int64) for `batch` images, and the image size in pixels.

    They are the same for every engine.

    Raises:
        InputError: if the folder's configs are missing, or a size does not fit.
    """
    import onnx_ir as ir

    from sd_ort.checkpoints import signatures
    from sd_ort.checkpoints.configs import component_config
    from sd_ort.checkpoints.synthetic_inputs import pixels_per_latent, random_inputs

    assert settings.component is not None
    name, folder = settings.component, Path(engine.raw_export or engine.directory)
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
    dtypes = {"float32": ir.DataType.FLOAT, "int64": ir.DataType.INT64}
    values = [
        ir.Value(name=t.name, shape=ir.Shape(t.axes), type=ir.TensorType(dtypes[t.dtype])) for t in signature.inputs
    ]
    return random_inputs(name, values, configs[name], sizes, settings.seed), (height * scale, width * scale)
