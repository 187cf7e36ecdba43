"""OpenVINO as an engine: one component of a raw export, compiled for the CPU.

In bfloat16, its own default where a CPU has AMX or AVX512-BF16, and in float32.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.benchmark.engines.interface import Batch, Engine, Opened, Settings, component_call
from sd_ort.core.errors import InputError, SdOrtError
from sd_ort.core.pipeline_folder import MODEL

PRECISIONS = {"float32": ("f32", "fp32"), "bfloat16": ("bf16", "bf16")}


def compile_model(path: Path, precision: str, threads: int | None) -> Any:
    """A model.onnx compiled for calls in turn, computed in `precision` ("float32" or "bfloat16").

    Raises SdOrtError when OpenVINO is not installed, refuses the model, or the CPU has no bfloat16.
    """
    if importlib.util.find_spec("openvino") is None:
        raise SdOrtError("OpenVINO is not installed: pip install 'sd-ort[openvino]'.")
    openvino = importlib.import_module("openvino")
    core = openvino.Core()
    if precision == "bfloat16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise SdOrtError("this CPU has no bfloat16: it needs AMX or AVX512-BF16.")
    options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": PRECISIONS[precision][0]}
    if threads:
        options["INFERENCE_NUM_THREADS"] = str(threads)
    try:
        return core.compile_model(core.read_model(path.resolve()), "CPU", options)  # it refuses weights behind a link
    except Exception as error:  # openvino's exceptions share no base class but Exception
        reason = [line.strip() for line in str(error).splitlines() if line.strip()][
            -1:
        ]  # its own source lines are first
        raise SdOrtError(f"OpenVINO refuses {path}: {''.join(reason)[:300]}") from error


def open_pipeline(engine: Engine, settings: Settings) -> Opened:
    """Raises InputError: OpenVINO is measured on one component."""
    raise InputError("OpenVINO is measured on one component: use --component or --unet-only.")


def open_component(engine: Engine, settings: Settings) -> Opened:
    """One component; calls are over arrays on the host. Raises SdOrtError as `compile_model` does."""
    if settings.provider != "cpu":
        raise InputError("OpenVINO is measured on the CPU: use --provider cpu.")
    path = Path(engine.directory) / str(settings.component) / MODEL
    compiled = compile_model(path, engine.variant, settings.threads)

    def run(batch: int, prompts: list[str] | None, seed: int) -> Batch:
        call = component_call(engine, settings, batch)
        feeds = {port.any_name: call.feeds[port.any_name] for port in compiled.inputs}
        seconds = []
        for _ in range(settings.steps):
            start = time.perf_counter()
            results = compiled(feeds)
            seconds.append(time.perf_counter() - start)
        return Batch(seconds, call.pixels, output=np.array(results[0][:1], np.float32))

    return Opened(run, PRECISIONS[engine.variant][1])
