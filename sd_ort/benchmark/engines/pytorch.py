"""torch as an engine: diffusers' pipeline or one component, eager, channels-last, compiled, or with xFormers."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from sd_ort import demo
from sd_ort.benchmark.engines import interface
from sd_ort.benchmark.engines.interface import Batch, BenchmarkSettings, Engine, LoadedEngine
from sd_ort.checkpoints.signatures import default_latents
from sd_ort.checkpoints.torch_pipeline import open_model, torch_device, torch_pipeline
from sd_ort.core.errors import SdOrtError

# Arguments of diffusers' call that draws with sd-ort's defaults.
DEMO_TRANSFORMER = {"height": demo.HEIGHT, "width": demo.WIDTH, "max_sequence_length": demo.TEXT_LENGTH}
PRECISIONS = {torch.float32: "fp32", torch.float16: "fp16"}


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _apply_variant(module: Any, variant: str, device: str) -> Any:
    if variant in ("channels_last", "compile"):
        module = module.to(memory_format=torch.channels_last)
    if variant == "compile":
        mode = "reduce-overhead" if device == "cuda" else "default"
        module = torch.compile(module, mode=mode, fullgraph=True, dynamic=False)
    if variant == "xformers":
        if importlib.util.find_spec("xformers") is None:
            raise SdOrtError("xformers is not installed: pip install xformers.")
        parts = [part for part in module.modules() if hasattr(part, "enable_xformers_memory_efficient_attention")]
        if not parts:
            raise SdOrtError("this component has no attention that xFormers can replace.")
        parts[0].enable_xformers_memory_efficient_attention()
    return module


def open_pipeline(engine: Engine, settings: BenchmarkSettings) -> LoadedEngine:
    """Open diffusers' pipeline of the engine's model; every call of the UNet or the transformer is timed.

    Each time begins and ends synchronized with the device.
    """
    device, dtype = torch_device(settings.provider)
    if engine.variant == "graph":
        raise SdOrtError("torch's graphs are captured for one component: use --component.")
    pipeline = torch_pipeline(engine.model, engine.random_weights, engine.weights_seed or 0)
    pipeline.to(device, dtype)
    name = "unet" if "unet" in pipeline.components else "transformer"
    denoiser = _apply_variant(getattr(pipeline, name), engine.variant, device)
    setattr(pipeline, name, denoiser)
    own = DEMO_TRANSFORMER if engine.model == "demo-dit" else {}
    starts: list[float] = []
    seconds: list[float] = []

    def now() -> float:
        _synchronize(device)
        return time.perf_counter()

    denoiser.register_forward_pre_hook(lambda *_: starts.append(now()))
    denoiser.register_forward_hook(lambda *_: seconds.append(now() - starts[-1]))

    def run(batch: int, prompts: list[str] | None, seed: int) -> Batch:
        seconds.clear()
        images: list[Any] = []
        for arguments in interface.pipeline_calls(settings, batch, prompts, seed):
            arguments |= {key: value for key, value in own.items() if arguments.get(key) is None}
            arguments["generator"] = [torch.Generator().manual_seed(each) for each in arguments["generator"]]
            images += pipeline(**arguments, latents=first_latents(pipeline, arguments).to(device, dtype)).images
        return Batch(list(seconds), images[0].size[::-1], images)

    return LoadedEngine(run, PRECISIONS[dtype])


def first_latents(pipeline: Any, arguments: Mapping[str, Any]) -> torch.Tensor:
    """Return the noise (B, C, h, w) that diffusers' pipeline samples for these arguments in float32 on the CPU.

    In half precision torch 2.11 and older sample other values from the same seed, so images could not be compared.
    """
    from diffusers.utils.torch_utils import randn_tensor

    if "unet" in pipeline.components:
        config, default = pipeline.unet.config, default_latents(pipeline.unet.config)
    else:
        config, default = pipeline.transformer.config, pipeline.default_sample_size
    scale, channels, packs = pipeline.vae_scale_factor, config.in_channels, hasattr(pipeline, "_pack_latents")
    sides = [arguments[name] // scale if arguments[name] else default for name in ("height", "width")]
    is_flux = type(pipeline).__name__ == "FluxPipeline"
    if is_flux:  # samples latents, and packs 2x2 of them; FLUX.2 samples packed ones
        channels //= 4
    elif packs:
        sides = [side // 2 for side in sides]
    count = len(arguments["prompt"])
    noise = randn_tensor((count, channels, *sides), arguments["generator"], torch.device("cpu"), torch.float32)
    return pipeline._pack_latents(noise, count, channels, *sides) if is_flux else noise


def open_component(engine: Engine, settings: BenchmarkSettings) -> LoadedEngine:
    """Open one component as the module that the exporter traces; its inputs are on the device before timing starts."""
    from sd_ort.checkpoints.checkpoint import has_penultimate_states
    from sd_ort.checkpoints.modules import wrap
    from sd_ort.checkpoints.signatures import MODEL_OF

    assert settings.component is not None
    device, dtype = torch_device(settings.provider)
    source = open_model(engine.model, engine.random_weights, engine.weights_seed or 0)
    with torch.no_grad():
        model = source.load(MODEL_OF.get(settings.component, settings.component))
    module = wrap(settings.component, model, has_penultimate_states(source), "controlnet" in source.configs).to(
        device, dtype
    )
    module = _apply_variant(module, engine.variant, device)
    calls: dict[int, Any] = {}
    output: Any = None

    @torch.inference_mode()
    def run(batch: int, prompts: list[str] | None, seed: int) -> Batch:
        feeds, size = interface.component_call(engine, settings, batch)
        if batch not in calls:
            inputs = [_tensor(name, array, device, dtype) for name, array in feeds.items()]
            calls[batch] = _captured(module, inputs) if engine.variant == "graph" else lambda: module(*inputs)

        def step() -> None:
            nonlocal output
            output = calls[batch]()
            _synchronize(device)

        seconds = interface.time_calls(step, settings.steps)
        first = output[0] if isinstance(output, tuple) else output
        return Batch(seconds, size, output=first[:1].float().cpu().numpy().copy())

    return LoadedEngine(run, PRECISIONS[dtype])


def _tensor(name: str, array: np.ndarray, device: str, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.from_numpy(array).to(device)
    return tensor.to(dtype) if tensor.is_floating_point() and name != "timestep" else tensor


def _captured(module: Any, inputs: list[torch.Tensor]) -> Any:
    """Return a function that replays one captured call, after three calls on a side stream as torch's manual says."""
    if inputs[0].device.type != "cuda":
        raise SdOrtError("graphs are captured on a GPU.")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            module(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = module(*inputs)

    def replay(_inputs: list[torch.Tensor] = inputs) -> Any:  # keeps the memory alive that the GPU graph reads
        graph.replay()
        return output

    return replay
