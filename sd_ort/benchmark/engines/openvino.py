"""OpenVINO as an engine: one component of a raw export, compiled for the CPU in float32 or bfloat16.

bfloat16 is OpenVINO's default on CPUs with AMX or AVX512-BF16.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.benchmark.engines import interface
from sd_ort.benchmark.engines.interface import Batch, BenchmarkSettings, Engine, LoadedEngine
from sd_ort.core.errors import InputError, SdOrtError
from sd_ort.core.pipeline_folder import MODEL

PRECISIONS = {"float32": ("f32", "fp32"), "bfloat16": ("bf16", "bf16")}  # OpenVINO's name and the label


def compile_model(path: Path, precision: str, threads: int | None) -> Any:
    """Compile a model.onnx for sequential calls in `precision`, "float32" or "bfloat16".

    Raises:
        SdOrtError: if OpenVINO is not installed, rejects the model, or the CPU has no bfloat16.
    """
    if importlib.util.find_spec("openvino") is None:
        raise SdOrtError("OpenVINO is not installed: pip install 'sd-ort[openvino]'.")
    core = importlib.import_module("openvino").Core()
    if precision == "bfloat16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise SdOrtError("this CPU has no bfloat16: it needs AMX or AVX512-BF16.")
    options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": PRECISIONS[precision][0]}
    if threads:
        options["INFERENCE_NUM_THREADS"] = str(threads)
    try:
        return core.compile_model(core.read_model(path.resolve()), "CPU", options)  # rejects weights behind a link
    except Exception as error:  # openvino's exceptions share no base class but Exception
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]  # its own source lines are first
        raise SdOrtError(f"OpenVINO rejects {path}: {''.join(lines[-1:])[:300]}") from error


def open_pipeline(engine: Engine, settings: BenchmarkSettings) -> LoadedEngine:
    """Raise InputError: OpenVINO is measured on one component."""
    raise InputError("OpenVINO is measured on one component: use --component or --unet-only.")


def open_component(engine: Engine, settings: BenchmarkSettings) -> LoadedEngine:
    """Open one component; calls use host arrays. Raises SdOrtError as `compile_model`."""
    if settings.provider != "cpu":
        raise InputError("OpenVINO is measured on the CPU: use --provider cpu.")
    path = Path(engine.directory) / str(settings.component) / MODEL
    compiled = compile_model(path, engine.variant, settings.threads)
    results: Any = None

    def run(batch: int, prompts: list[str] | None, seed: int) -> Batch:
        inputs, size = interface.component_call(engine, settings, batch)
        feeds = {port.any_name: inputs[port.any_name] for port in compiled.inputs}

        def step() -> None:
            nonlocal results
            results = compiled(feeds)

        seconds = interface.time_calls(step, settings.steps)
        return Batch(seconds, size, output=np.array(results[0][:1], np.float32))

    return LoadedEngine(run, PRECISIONS[engine.variant][1])
