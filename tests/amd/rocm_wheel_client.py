"""What test_rocm_wheel.py runs in processes of their own, under onnxruntime-rocm: `python rocm_wheel_client.py FUNCTION
ARGUMENTS` prints the result of a function as JSON."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from sd_ort import StableDiffusionPipeline
from sd_ort.core.errors import SdOrtError
from sd_ort.core.pipeline_folder import MODEL
from sd_ort.pipelines import sampling, text, text_to_image
from sd_ort.pipelines.device import loop, text_encoders
from sd_ort.runtime import bound_run, gpu_graphs, session_device
from sd_ort.runtime.bound_run import failed_captures, open_gpu_graph_model
from sd_ort.runtime.session import DTYPES, OrtModel, SessionOptions, create_session
from sd_ort.runtime.updatable_weights import UpdatableWeights

SIZES = {"batch": 2, "sequence": 77, "height": 8, "width": 8, "height*8": 64, "width*8": 64}
REQUEST: dict[str, Any] = {"num_inference_steps": 1, "height": 64, "width": 64, "output_type": "np"}


def feeds(session: Any) -> dict[str, np.ndarray]:
    """Inputs of a component, each dimension by its name."""
    rng = np.random.default_rng(0)
    arrays = {}
    for each in session.get_inputs():
        shape = [size if isinstance(size, int) else SIZES.get(size, 2) for size in each.shape]
        dtype = DTYPES[each.type]
        is_integer = np.issubdtype(dtype, np.integer)
        arrays[each.name] = np.full(shape, 7, dtype) if is_integer else rng.standard_normal(shape).astype(dtype)
    return arrays


def differences(folder: str, library: str) -> dict[str, float]:
    """Largest difference between the kernels of the op library and the function bodies on the CPU provider."""
    result = {}
    for name in ("text_encoder", "unet"):
        path = Path(folder, name, MODEL)
        first, second = (create_session(path, options=SessionOptions(library=each)) for each in (Path(library), False))
        inputs = feeds(first)
        outputs = [OrtModel(session)(**inputs) for session in (first, second)]
        result[name] = max(float(np.abs(outputs[0][key] - outputs[1][key]).max()) for key in outputs[0])
        assert all(np.isfinite(value).all() for value in outputs[0].values())
    return result


def draw(folder: str, library: str) -> list[float]:
    """Mean and deviation of an image by the CPU provider."""
    pipeline = StableDiffusionPipeline.from_pretrained(folder, provider="cpu", library=Path(library))
    image = pipeline("a red circle", **REQUEST).images[0]
    return [float(image.mean()), float(image.std())]


def placement(folder: str, library: str, *components: str) -> dict[str, dict[str, dict[str, int]]]:
    """Nodes that a run executes: component -> provider -> operator -> number. Memcpy nodes are ROCm's."""
    result = {}
    for name in components:
        session = create_session(
            Path(folder, name, MODEL), "rocm", SessionOptions(library=Path(library), profile=Path(folder, name))
        )
        session.run(None, feeds(session))
        events = [event for event in json.loads(Path(session.end_profiling()).read_text()) if event["cat"] == "Node"]
        counts: dict[str, Counter[str]] = {}
        for event in events:
            if event["name"].endswith("_kernel_time"):
                counts.setdefault(event["args"]["provider"], Counter())[event["args"]["op_name"]] += 1
        result[name] = {provider: dict(count) for provider, count in counts.items()}
    return result


def captures(folder: str, library: str, *components: str) -> dict[str, list[int]]:
    """Component -> number of captured graphs after two calls of one shape and one of another, and of shape sets."""
    result = {}
    for name in components:
        options = {"tuning": True, "provider_options": {"device_id": "0"}}
        model = open_gpu_graph_model(
            Path(folder, name, MODEL), "rocm", SessionOptions(library=Path(library), **options)
        )
        inputs = feeds(model.session)
        for _ in range(2):
            model(**inputs)
        model(**{key: np.concatenate([value, value]) for key, value in inputs.items()})
        result[name] = [sum(run.graph is not None for run in model.runs.values()), len(model.runs)]
    return result


def staging(folder: str, library: str, generation: str) -> dict[str, Any]:
    """The pinned memory from which the U-Net's graphs copy pointers to the GPU, of graphs that are not stale: whether
    it is unchanged after runs of other shapes, captured and not. `generation`: captures of one."""
    staged: dict[int, list[tuple[int, bytes]]] = {}  # by the address of the executable
    original = gpu_graphs.take_release

    def record(stream: Any, graph: Any) -> Any:
        source, size = ctypes.c_void_p(), ctypes.c_size_t()
        copies = staged[len(staged)] = []
        for node in gpu_graphs.nodes_of(stream, graph):
            if not stream.c.simulated_hip_copy_of(node, ctypes.byref(source), ctypes.byref(size)) and source:
                copies.append((source.value, ctypes.string_at(source, size.value)))
        return original(stream, graph)

    gpu_graphs.take_release = record
    bound_run.MAX_CAPTURES = int(generation)
    model = open_gpu_graph_model(Path(folder, "unet", MODEL), "rocm", SessionOptions(library=Path(library)))
    small = feeds(model.session)
    current: list[bool] = []
    of_run: dict[tuple[int, int], int] = {}  # run and generation -> its graph
    for times in (1, 2, 3, 1, 2, 4, 3):
        feed = {key: np.concatenate([value] * times) for key, value in small.items()}
        model(**feed)
        run = model.bind(feed)
        run._run(bound_run.NO_GRAPH_ID, wait=True)  # as a run that could not be captured
        of_run.setdefault((id(run), run.generation), len(staged) - 1)
        for each in model.runs.values():
            if each.generation == each.captures.generation:
                copies = staged[of_run[id(each), each.generation]]
                current.append(all(ctypes.string_at(source, len(data)) == data for source, data in copies))
    return {
        "copies": len(staged[0]),
        "unchanged": all(current),
        "checks": len(current),
        "captures": len(staged),
        "captured": all(each.graph is not None for each in model.runs.values()),
    }


def workspaces(folder: str, library: str, cache: str) -> dict[str, Any]:
    """Captures whose workspaces make ONNX Runtime's arena grow, which HIP allows in relaxed mode alone."""
    os.environ["XDG_CACHE_HOME"] = cache
    (Path(cache) / "sd-ort").mkdir(parents=True)
    original = gpu_graphs.capture_graph

    def capture(*arguments: Any) -> Any:
        os.environ["SD_ORT_IDLE_WORKSPACE"] = str(2 * int(os.environ.get("SD_ORT_IDLE_WORKSPACE", 256 << 20)))
        return original(*arguments)

    gpu_graphs.capture_graph = capture
    model = open_gpu_graph_model(Path(folder, "unet", MODEL), "rocm", SessionOptions(library=Path(library)))
    small = feeds(model.session)
    relaxed = model.bind(small).graph is not None
    gpu_graphs.RELAXED = 0  # global mode
    large = {key: np.concatenate([value, value]) for key, value in small.items()}
    outputs = [model(**large), model(**small)]
    return {
        "relaxed": relaxed,
        "global": model.bind(large).graph is not None,
        "outputs": [list(map(np.shape, each.values())) for each in outputs],
        "failed": failed_captures(),
        "earlier graph": model.bind(small).graph is not None,
    }


def threads(folder: str, library: str, count: str) -> dict[str, Any]:
    """Images of two batch sizes in the main thread, then in other threads, in turn and at once: what is captured, and
    what the captured sessions run then beside the launches of their graphs."""
    for module in (sampling, text, text_to_image, loop, text_encoders):
        module.check_finite = lambda *_: None  # type: ignore[attr-defined]
    loop.SamplingBuffers._read = lambda buffers, *_: buffers.values["latents"].numpy()  # type: ignore[method-assign]
    counts: Counter[str] = Counter()

    def counted(owner: Any, name: str, label: Callable[..., str | None]) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **more: Any) -> Any:
            counts[label(*arguments, **more) or "uncounted"] += 1
            return original(*arguments, **more)

        setattr(owner, name, call)

    counted(gpu_graphs.GpuGraph, "__init__", lambda *_: "captures")
    counted(gpu_graphs.GpuGraph, "launch", lambda *_: "launches")
    counted(bound_run.BoundRun, "_run", lambda run, *_, **__: "runs" if run.stream is not None else None)
    pipeline = StableDiffusionPipeline.from_pretrained(folder, provider="rocm", library=Path(library))
    calls = [{**REQUEST, "num_images_per_prompt": batch, "num_inference_steps": 3} for batch in (1, 2)]
    for call in calls:
        pipeline("a red circle", **call)
    first = dict(counts)
    counts.clear()
    for call in calls:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(pipeline, "a red circle", **call).result()
    with ThreadPoolExecutor(int(count)) as pool:
        for each in [pool.submit(pipeline, "a red circle", **call) for call in calls * 3]:
            each.result()
    counts.pop("uncounted")
    return {"captures": first["captures"], "first launches": first["launches"], **counts}


def opening(folder: str, library: str) -> dict[str, Any]:
    """Failures of a capture and of another thread that opens a session during that capture."""
    earlier = len(failed_captures())  # of other tests that share the cache
    original, openings = bound_run.BoundRun._run, []
    pool = ThreadPoolExecutor(1)

    def run(bound: bound_run.BoundRun, graph_id: int, wait: bool) -> None:
        if not wait and not openings:
            openings.append(
                pool.submit(create_session, Path(folder, "unet", MODEL), "rocm", SessionOptions(library=Path(library)))
            )
            futures.wait(openings, 5)
        original(bound, graph_id, wait)

    bound_run.BoundRun._run = run  # type: ignore[method-assign]
    model = open_gpu_graph_model(Path(folder, "unet", MODEL), "rocm", SessionOptions(library=Path(library)))
    model(**feeds(model.session))
    return {"capture": failed_captures()[earlier:], "opening": [str(each.exception()) for each in openings]}


def lora(folder: str, library: str, adapter: str) -> dict[str, Any]:
    """Whether a LoRA is loaded, changed and unloaded in one session, and how many weights lie where it can be written.

    The deltas are computed on the device: values mean nothing where kernels do nothing, and may be NaN.
    """
    for module in (sampling, text, text_to_image):
        module.check_finite = lambda *_: None  # type: ignore[attr-defined]
    session_device.supports_in_place_update = lambda *_: True  # its trial multiplies on the GPU
    pipeline = StableDiffusionPipeline.from_pretrained(
        folder, provider="rocm", library=Path(library), device_loop=False
    )
    pipeline.load_lora_weights(adapter, adapter_name="a")
    pipeline("a red circle", **REQUEST)
    session = pipeline.models["unet"].session
    pipeline.set_adapters(["a"], [0.5])
    pipeline("a red circle", **REQUEST)
    pipeline.unload_lora_weights()
    pipeline("a red circle", **REQUEST)
    return {
        "in place": pipeline.models.in_place,
        "same session": pipeline.models["unet"].session is session,
        "weights": len(pipeline.models.overrides.updatable["unet"].values),
    }


def shared_memory() -> bool:
    """Whether an updatable weight and the value that sessions share have the same memory."""
    updatable = UpdatableWeights({"weight": np.ones((4, 4), np.float16)}, "cuda")
    value, shared = updatable.values["weight"], updatable.shared["weight"]
    return value.data_ptr() == shared.data_ptr() and shared.device_name() == "cuda"


def without_gpu_half(folder: str, library: str) -> str:
    """What is said of a session on the ROCm provider whose op library has kernels for CPUs alone."""
    try:
        create_session(Path(folder, "unet", MODEL), "rocm", SessionOptions(library=Path(library)))
    except SdOrtError as error:
        return f"{type(error).__name__}: {error}"
    return "opened"


def refusals(folder: str) -> dict[str, str]:
    """Return the errors for graphs that the wheel would run wrong, or on the CPU."""
    graphs = {
        "softmax": (20, "float[N,64] x", "y = Softmax (x)"),
        "norm": (20, "float[64] x", "y = LayerNormalization (x, x)"),
        "attention": (20, "float[N,8,64] x", "y = com.microsoft.MultiHeadAttention <num_heads = 2> (x, x, x)"),
        "new opset": (23, "float[N,64] x", "y = Neg (x)"),
        "opset": (21, "float[N,64] x", "s = Shape (x)  t = Transpose (x)  y = Reshape (t, s)"),
    }
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sd_ort").addHandler(handler)
    errors = {}
    for name, (opset, inputs, body) in graphs.items():
        path = Path(folder, name, MODEL)
        path.parent.mkdir()
        header = f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]>'
        shape = inputs.rpartition(" ")[0]
        model = onnx.parser.parse_model(f"{header} g ({inputs}) => ({shape} y) {{ {body} }}")
        path.write_bytes(model.SerializeToString())
        messages.clear()
        try:
            create_session(path, "rocm", SessionOptions(library=False))
        except SdOrtError as error:
            messages.append(f"{type(error).__name__}: {error}")
        errors[name] = messages[-1]
    return errors


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
