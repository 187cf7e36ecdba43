"""ONNX Runtime as an engine: a pipeline folder that generates images, or one component with bound inputs."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from sd_ort.benchmark.engines import interface
from sd_ort.benchmark.engines.interface import Batch, BenchmarkSettings, Engine, LoadedEngine
from sd_ort.core.denoiser_graphs import ArrayDenoiserGraphs
from sd_ort.core.errors import SdOrtError
from sd_ort.core.pipeline_folder import HOISTED, MODEL, read_index
from sd_ort.runtime import bound_run, ort_wheel, providers, session
from sd_ort.runtime.component_opener import EditedGraph
from sd_ort.runtime.components import Components
from sd_ort.runtime.session import OrtModel, SessionOptions


def record_run_times(models: Components, name: str) -> list[float]:
    """Return a list to which the seconds of every later run of a component, or of its edited graph, are appended."""
    seconds: list[float] = []

    def timed(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            results = run(*arguments)
            seconds.append(time.perf_counter() - start)
            return results

        return call

    def record(model: OrtModel) -> OrtModel:
        opened = model.session
        opened.run, opened.run_with_iobinding = timed(opened.run), timed(opened.run_with_iobinding)
        return model

    def open_edited(component: str, graph: EditedGraph) -> OrtModel:
        model = open_graph(component, graph)
        return record(model) if component == name else model

    record(models[name])
    open_graph = models.opener.open_edited
    vars(models.opener)["open_edited"] = open_edited
    return seconds


def _session_options(engine: Engine, settings: BenchmarkSettings, profile: Path | None = None) -> SessionOptions:
    return SessionOptions(
        settings.threads, settings.allow_fallback, settings.tuning, library=engine.library, profile=profile
    )


def open_pipeline(engine: Engine, settings: BenchmarkSettings) -> LoadedEngine:
    """Open a pipeline folder with the defaults of `from_pretrained`.

    If all steps are enqueued on the device, the time of a step is their mean there; otherwise calls of the UNet or the
    transformer are timed.
    """
    import sd_ort

    if engine.engine == "tensorrt":
        raise SdOrtError("TensorRT is measured on one component: use --component.")
    name = read_index(Path(engine.directory)).get("_class_name")
    name = name if name in sd_ort.TRANSFORMER_PIPELINES else "StableDiffusionPipeline"
    pipeline = getattr(sd_ort, name).from_pretrained(
        engine.directory, settings.provider, graph=engine.pipeline_graph, threads=settings.threads,
        allow_fallback=settings.allow_fallback, tuning=settings.tuning, library=engine.library,
    )  # fmt: skip
    for name in ("text_encoder", "text_encoder_2", "unet_prompt", "unet_time", "unet", "vae_decoder"):
        if name in pipeline.models:
            assert pipeline.models[name]  # opens the session, which is part of the load time
    denoiser = "unet" if "unet" in pipeline.models else "transformer"
    seconds, loop = record_run_times(pipeline.models, denoiser), getattr(pipeline, "loop", SimpleNamespace())

    def run(batch: int, prompts: list[str] | None, seed: int) -> Batch:
        seconds.clear()
        loop.step_seconds = None
        calls = [{**call, "progress": False} for call in interface.pipeline_calls(settings, batch, prompts, seed)]
        outputs = [pipeline(**calls[0])] if len(calls) == 1 else pipeline.draw_each(calls)
        images = [image for output in outputs for image in output.images]
        mean = loop.step_seconds
        return Batch([mean] if mean is not None else list(seconds), images[0].size[::-1], images)

    return LoadedEngine(run, _precision(pipeline.models[denoiser]))


def open_component(engine: Engine, settings: BenchmarkSettings) -> LoadedEngine:
    """Open one component. On a GPU its inputs and outputs stay there, and with `engine.graph` calls are captured.

    A GPU graph retains its memory until its session closes, so each batch size gets a new session then.
    """
    model = open_model(engine, settings)
    calls: dict[int, tuple[Callable[[], Any], Callable[[], np.ndarray]]] = {}

    def run(batch: int, prompts: list[str] | None, seed: int) -> Batch:
        nonlocal model
        feeds, size = interface.component_call(engine, settings, batch)
        if batch not in calls:
            if engine.graph and calls:
                calls.clear()
                del model
                model = open_model(engine, settings)
            calls[batch] = bind(model, all_feeds(engine, settings, feeds), settings)
        step, output = calls[batch]
        return Batch(interface.time_calls(step, settings.steps), size, output=output()[:1].astype(np.float32))

    return LoadedEngine(run, _precision(model))


def all_feeds(engine: Engine, settings: BenchmarkSettings, feeds: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """Return the inputs of a component; for a hoisted UNet also the outputs of its prompt and time graphs."""
    folder = Path(engine.directory)
    if settings.component != "unet":
        return feeds
    options = _session_options(engine, settings)
    names = [name for part, name in HOISTED["unet"].items() if part != "step" and (folder / name / MODEL).is_file()]
    models = {name: session.load(folder, name, settings.provider, options) for name in names}
    return ArrayDenoiserGraphs("unet", models).step_tensors(feeds, np.repeat(feeds["timestep"], len(feeds["sample"])))


def bind(
    model: session.OrtModel, feeds: Mapping[str, np.ndarray], settings: BenchmarkSettings
) -> tuple[Callable[[], Any], Callable[[], np.ndarray]]:
    """Return (synchronous call, function that returns its first output), over host arrays or device buffers."""
    feeds = {name: np.ascontiguousarray(feeds[name], model.dtype(name)) for name in model.inputs}
    if settings.provider != "cpu":
        device = providers.provider_named(settings.provider).device
        bound = bound_run.bind(model, feeds, device)
        return bound.run, lambda: bound.outputs[model.outputs[0]].numpy()
    results: list[np.ndarray] = []

    def step() -> None:
        results[:] = model.session.run(None, feeds)

    return step, lambda: results[0]


def _precision(model: session.OrtModel) -> str:
    return "fp16" if np.float16 in [model.dtype(name) for name in model.inputs if name != "timestep"] else "fp32"


def open_model(engine: Engine, settings: BenchmarkSettings, profile: Path | None = None) -> session.OrtModel:
    """Open the session of one component; `profile`: path prefix of ONNX Runtime's profile."""
    path = Path(engine.directory) / str(settings.component) / MODEL
    if engine.engine == "tensorrt":
        return session.OrtModel(_tensorrt_session(path))
    options = _session_options(engine, settings, profile)
    if engine.graph:
        return bound_run.open_gpu_graph_model(path, settings.provider, options)
    return session.OrtModel(session.create_session(path, settings.provider, options))


def _tensorrt_session(path: Path) -> Any:
    """Open a session of ONNX Runtime's TensorRT provider in float16. Raises SdOrtError if something is missing."""
    onnxruntime = ort_wheel.import_onnxruntime()
    name, library = "TensorrtExecutionProvider", "libnvinfer.so.10"
    if name not in onnxruntime.get_available_providers():
        raise SdOrtError("this onnxruntime wheel has no TensorRT provider: pip install 'sd-ort[cuda]'.")
    try:
        ctypes.CDLL(library)
    except OSError:
        raise SdOrtError(f"TensorRT is not installed: {library} cannot be loaded.") from None
    options = {"trt_fp16_enable": "1", "trt_engine_cache_enable": "1", "trt_engine_cache_path": str(path.parent)}
    opened = onnxruntime.InferenceSession(str(path), providers=[(name, options), "CUDAExecutionProvider"])
    if name not in opened.get_providers():
        raise SdOrtError("ONNX Runtime dropped the TensorRT provider.")
    return opened
