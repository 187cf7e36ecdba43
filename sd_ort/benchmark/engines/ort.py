"""ONNX Runtime as an engine: a pipeline folder that draws, or one of its components called with bound inputs."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.benchmark.engines.interface import Batch, Engine, Opened, Settings, component_call, pipeline_arguments
from sd_ort.core.errors import SdOrtError
from sd_ort.core.pipeline_folder import MODEL
from sd_ort.runtime import bound_run, ort_wheel, providers, session


def time_calls(opened: Any) -> list[float]:
    """A list that gets the seconds of every run of a session from now on, over host arrays or bound buffers."""
    seconds: list[float] = []

    def timed(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            results = run(*arguments)
            seconds.append(time.perf_counter() - start)
            return results

        return call

    opened.run, opened.run_with_iobinding = timed(opened.run), timed(opened.run_with_iobinding)
    return seconds


def _session_options(engine: Engine, settings: Settings) -> dict[str, Any]:
    return {
        "threads": settings.threads,
        "tuning": settings.tuning,
        "allow_fallback": settings.allow_fallback,
        "library": engine.library,
    }


def open_pipeline(engine: Engine, settings: Settings) -> Opened:
    """Our pipeline on an ONNX folder, as `from_pretrained` gives it: ours with all that it does of itself.

    Where all steps are queued on the device, a step's time is their mean there; else every UNet call is timed.
    """
    from sd_ort.pipelines.text_to_image import StableDiffusionPipeline

    if engine.engine == "tensorrt":
        raise SdOrtError("TensorRT is measured on one component: use --component.")
    options = _session_options(engine, settings)
    ours = engine.stage == "optimize" or engine.make[:1] == ("ours",)
    graph = True if engine.graph else None if ours else False
    pipeline = StableDiffusionPipeline.from_pretrained(engine.directory, settings.provider, graph=graph, **options)
    for name in ("text_encoder", "text_encoder_2", "unet_prompt", "unet_time", "unet", "vae_decoder"):
        if name in pipeline.models:
            assert pipeline.models[name]  # opened now, so that this is time to load
    unet = pipeline.models["unet"]
    seconds = time_calls(unet.session)

    def run(batch: int, prompts: list[str] | None, seed: int) -> Batch:
        seconds.clear()
        pipeline.loop.step_seconds = None
        drawn = pipeline(**pipeline_arguments(settings, batch, prompts, seed), progress=False).images
        images = np.stack([np.asarray(image) for image in drawn])
        mean = pipeline.loop.step_seconds
        return Batch([mean] if mean is not None else list(seconds), images.shape[1:3], images)

    return Opened(run, _precision(unet))


def open_component(engine: Engine, settings: Settings) -> Opened:
    """One component; on a GPU its inputs and outputs stay there, and with `engine.graph` calls are captured.

    A captured graph keeps its memory with its session, so such a session is opened again for each batch size.
    """
    model = open_model(engine, settings)
    calls: dict[int, tuple[Callable[[], Any], Callable[[], np.ndarray]]] = {}

    def run(batch: int, prompts: list[str] | None, seed: int) -> Batch:
        nonlocal model
        call = component_call(engine, settings, batch)
        if batch not in calls:
            if engine.graph and calls:
                calls.clear()
                del model
                model = open_model(engine, settings)
            calls[batch] = bind(model, all_feeds(engine, settings, call.feeds), settings)
        step, output = calls[batch]
        seconds = []
        for _ in range(settings.steps):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        return Batch(seconds, call.pixels, output=output()[:1].astype(np.float32))

    return Opened(run, _precision(model))


def all_feeds(engine: Engine, settings: Settings, feeds: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """The component's inputs; for a hoisted UNet also what its prompt and time graphs make of them, run once."""
    folder = Path(engine.directory)
    if settings.component != "unet" or not (folder / "unet_prompt" / MODEL).is_file():
        return feeds
    complete = {**feeds, "timestep": np.repeat(feeds["timestep"], len(feeds["sample"]))}
    for part in ("unet_prompt", "unet_time"):
        model = session.load(folder, part, settings.provider, **_session_options(engine, settings))
        complete |= model(**{name: complete[name] for name in model.inputs})
    return complete


def bind(
    model: session.Model, feeds: Mapping[str, np.ndarray], settings: Settings
) -> tuple[Callable[[], Any], Callable[[], np.ndarray]]:
    """(one call, its first output), over arrays on the host or over buffers on the device.

    A call returns when its results are there.
    """
    feeds = {name: np.ascontiguousarray(feeds[name], model.dtype(name)) for name in model.inputs}
    if settings.provider != "cpu":
        device = providers.provider_named(settings.provider).device
        bound = bound_run.bind(model, feeds, device)
        return bound.run, lambda: bound.outputs[model.outputs[0]].numpy()
    results: list[np.ndarray] = []

    def step() -> None:
        results[:] = model.session.run(None, feeds)

    return step, lambda: results[0]


def _precision(model: session.Model) -> str:
    floating = [model.dtype(name) for name in model.inputs if name != "timestep"]
    return "fp16" if np.float16 in floating else "fp32"


def open_model(engine: Engine, settings: Settings, profile: Path | None = None) -> session.Model:
    """The session of one component; `profile`: prefix of ONNX Runtime's profile."""
    path = Path(engine.directory) / str(settings.component) / MODEL
    if engine.engine == "tensorrt":
        return session.Model(_tensorrt_session(path))
    options = _session_options(engine, settings)
    if engine.graph:
        return bound_run.open_gpu_graph_model(path, settings.provider, profile=profile, **options)
    return session.Model(session.create_session(path, settings.provider, profile=profile, **options))


def _tensorrt_session(path: Path) -> Any:
    """ONNX Runtime's TensorRT provider, in float16. Raises SdOrtError that says what is missing."""
    onnxruntime = ort_wheel.runtime()
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
