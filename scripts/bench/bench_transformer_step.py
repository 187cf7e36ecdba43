#!/usr/bin/env python3
"""A step of a diffusion transformer of full size in bfloat16 on a GPU: our provider beside torch, in turn, one process.

    python scripts/bench/bench_transformer_step.py flux-dev --out results/transformers

writes <out>/<preset>_<pixels>.json, which transformer_table.py turns into results/transformers.md. Weights are random,
made on the GPU, the same for all engines. Peers are torch eager and torch.compile, of the repeated blocks where
diffusers names them, else of the whole model; both with cuDNN's attention. A step is from device buffers to device
buffers, queued behind others. Ours is hoisted: what depends on the prompt and the schedule alone runs before. Errors
are relative L2 norms against torch eager in bfloat16, beside those of torch.compile against it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch

from fusion_passes import weight_recipes
from fusion_passes.element_formats import FLOAT8
from scripts.bench.bench_gpu_step import ComparedEngine, operations, profile, synchronize, time_rounds
from scripts.bench.gpu_models import DEVICE, elapsed_log, limits, provider_library
from sd_ort.checkpoints.checkpoint import build_model, class_name
from sd_ort.checkpoints.diffusion_transformers import FAMILIES, TOKEN_MULTIPLE
from sd_ort.checkpoints.presets import PRESETS, open_preset
from sd_ort.checkpoints.random_weights import fill_random
from sd_ort.core import pipeline_folder
from sd_ort.core.files import write_json
from sd_ort.core.metrics import relative_l2_error
from sd_ort.export.templates import Template, component_key, find_template
from sd_ort.export.tracing import DEFAULT_OPSET
from sd_ort.graphs import hoist
from sd_ort.graphs.partition import partition_graph
from sd_ort.graphs.save import save
from sd_ort.optimize.eight_bits import EightBits
from sd_ort.optimize.optimizer import rewrite
from sd_ort.optimize.targets import TARGETS
from sd_ort.optimize.unoptimized import UnoptimizedComponent
from sd_ort.pipelines import transformer_flux2, transformer_qwen_image, transformer_z_image
from sd_ort.pipelines.transformer_pipelines import image_ids
from sd_ort.runtime import bound_run, machine, session
from sd_ort.runtime.partitioned import Partition
from sd_ort.runtime.providers import provider_named
from sd_ort.runtime.stream import DeviceLock, open_stream
from sd_ort.runtime.streamed import PinnedWeights, StreamedModel, StreamPlan, WeightStream

FLOAT32_INPUTS = ("timestep", "img_ids", "txt_ids")  # in torch too
TEXT = {  # tokens; of families whose prompts keep their own lengths, a long prompt's
    "FluxTransformer2DModel": 512, "Flux2Transformer2DModel": 512, "SD3Transformer2DModel": 333,
    "ZImageTransformer2DModel": 128, "QwenImageTransformer2DModel": 128,
    "Krea2Transformer2DModel": 128,
}  # fmt: skip
FLOAT8_RANGE = 16.0  # largest magnitude of all activations with --float8, which measures none


def float8_scale(weight: torch.Tensor) -> torch.Tensor:
    """The scale of a weight in float8, one for all of it as for cuBLASLt."""
    return torch.from_numpy(np.asarray(FLOAT8.scale(weight.abs().max().float().cpu().numpy(), round_up=True)))


def float8_elements(weight: torch.Tensor) -> torch.Tensor:
    """The elements of a weight in float8, saturated."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    scaled = weight.float() / float8_scale(weight).to(weight.device)
    return scaled.clamp(-limit, limit).to(torch.float8_e4m3fn)


OPERATIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    "quantize": lambda _, a: float8_elements(a),
    "channel_scale": lambda argument, a: float8_scale(a) * argument[2],
    "transpose": lambda permutation, a: a.permute(permutation),
    "reshape": lambda shape, a: a.reshape(shape),
    "rows": lambda span, a: a[slice(*span)],
    "columns": lambda span, a: a[:, slice(*span)],
    "last_frame": lambda _, a: a[:, :, -1],
    "add": lambda _, a, b: a.float() + b.float(),
    "scale": lambda _, a, scale: a.float() * scale.float().reshape(-1, *[1] * (a.ndim - 1)),
    "times": lambda factor, a: a.float() * factor,
    "plus": lambda number, a: a.float() + number,
    "concat": lambda _, *parts: torch.cat(parts),
    "cast": lambda _, a: a,
    "matrix": lambda filters, a: a.reshape(filters, -1).T,
    "position_axis": weight_recipes.position_axis,
    "interleave": lambda heads, *parts: torch.stack([p.unflatten(-1, (heads, -1)) for p in parts], -2).flatten(-3),
}


class Net(torch.nn.Module):
    """diffusers' model, which takes the graph's inputs by position and returns the graph's output."""

    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names
        self.call = CALLS.get(type(model).__name__, direct)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.call(self.model, dict(zip(self.names, inputs, strict=True)))


def direct(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return the output of a model whose forward has the arguments of the graph."""
    output: torch.Tensor = model(**inputs, return_dict=False)[0]
    return output


def qwen_image(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the output of QwenImageTransformer2DModel without a mask, like diffusers' for prompts without padding."""
    rows, tokens = inputs["hidden_states"].shape[:2]
    named = {name: inputs[name] for name in ("hidden_states", "encoder_hidden_states")}
    named["timestep"] = inputs["timestep"].expand(rows)
    return direct(model, {**named, "img_shapes": [[(1, math.isqrt(tokens), math.isqrt(tokens))]] * rows})


def z_image(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the output of ZImageTransformer2DModel. Lengths are multiples of 32, so diffusers adds no padding."""
    tokens, time = inputs["hidden_states"], inputs["timestep"]
    rows, edge = len(tokens), math.isqrt(tokens.shape[1])
    latents = (
        tokens.reshape(rows, edge, edge, 2, 2, -1).permute(0, 5, 1, 3, 2, 4).reshape(rows, -1, 1, 2 * edge, 2 * edge)
    )
    output = model(list(latents), time.expand(rows), list(inputs["encoder_hidden_states"]), return_dict=False)[0]
    split = torch.stack(output).reshape(rows, -1, edge, 2, edge, 2).permute(0, 2, 4, 3, 5, 1)
    return split.reshape(rows, edge * edge, -1)


def krea2(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the output of Krea2Transformer2DModel without a mask, like diffusers' for prompts without padding."""
    positions = torch.cat([inputs["txt_ids"], inputs["img_ids"]])
    named = {name: inputs[name] for name in ("hidden_states", "encoder_hidden_states")}
    rows = len(inputs["hidden_states"])
    return direct(model, {**named, "timestep": inputs["timestep"].expand(rows), "position_ids": positions})


CALLS = {
    "Krea2Transformer2DModel": krea2,
    "QwenImageTransformer2DModel": qwen_image,
    "ZImageTransformer2DModel": z_image,
}


def random_model(preset: str, component: str = "transformer") -> Any:
    """A model of a preset in bfloat16 on the device, its weights as `fill_random` draws them."""
    config = PRESETS[preset].models[component]
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            model = build_model(class_name(config), config)
    finally:
        torch.set_default_dtype(torch.float32)
    fill_random(model, 0)
    return model.eval()


def random_inputs(preset: str, pixels: int, rows: int) -> dict[str, torch.Tensor]:
    """Inputs of the graph by name, in float32 on the device."""
    config = PRESETS[preset].models["transformer"]
    generator = torch.Generator(DEVICE).manual_seed(1)
    edge, text = pixels // 16, TEXT[config["_class_name"]]
    axes = FAMILIES[config["_class_name"]].inputs(config)
    sizes = {"batch": rows, "sequence": text, "image_sequence": edge * edge, "height": 2 * edge, "width": 2 * edge}
    positions = POSITIONS[config["_class_name"]](edge, text) if "img_ids" in axes else {}
    if edge * edge % TOKEN_MULTIPLE and config["_class_name"] == "ZImageTransformer2DModel":
        raise SystemExit(f"{pixels} pixels are padded, which this benchmark does not do: take a multiple of 128.")
    arrays = {
        "timestep": np.array([500.0 if config["_class_name"].startswith("SD3") else 0.5]),
        "guidance": np.full(rows, 4.0),  # 4000 is a bfloat16, 3500 is not
        "encoder_hidden_states_mask": np.ones((rows, text)),
        **positions,
    }
    inputs = {}
    for name, shape in axes.items():
        if name in arrays:
            inputs[name] = torch.from_numpy(arrays[name]).to(DEVICE, torch.float32)
        else:
            size = [sizes[axis] if isinstance(axis, str) else axis for axis in shape]
            inputs[name] = torch.randn(size, generator=generator, device=DEVICE)
    return inputs


def text_positions(tokens: int, axis: int | None, axes: int = 3, first: int = 0) -> np.ndarray:
    """Positions of text (tokens, axes): first, first + 1, .. on one axis, on all of them without `axis`."""
    positions = np.zeros((tokens, axes))
    positions[:, slice(None) if axis is None else axis] = np.arange(first, first + tokens).reshape(
        -1, *[1] * (axis is None)
    )
    return positions


def flux_positions(edge: int, text: int) -> dict[str, np.ndarray]:
    return {"img_ids": image_ids(edge, edge), "txt_ids": np.zeros((text, 3))}


# Of images of edge x edge patches and of text: the positions that the pipelines give.
POSITIONS: Mapping[str, Callable[[int, int], dict[str, np.ndarray]]] = {
    **dict.fromkeys(("FluxTransformer2DModel", "Krea2Transformer2DModel"), flux_positions),
    "Flux2Transformer2DModel": lambda edge, text: {
        "img_ids": transformer_flux2.positions(0, edge, edge), "txt_ids": text_positions(text, 3, 4)
    },
    "ZImageTransformer2DModel": lambda edge, text: {
        "img_ids": transformer_z_image.positions(text + 1, edge, edge), "txt_ids": text_positions(text, 0, first=1)
    },
    "QwenImageTransformer2DModel": lambda edge, text: {
        "img_ids": transformer_qwen_image.positions(edge, edge),
        "txt_ids": text_positions(text, None, first=edge // 2),
    },
}  # fmt: skip


def evaluate(recipe: Any, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The weight of a recipe, computed on the device."""
    if isinstance(recipe, str):
        return tensors[recipe]
    operation, argument, *operands = recipe
    return OPERATIONS[operation](argument, *(evaluate(operand, tensors) for operand in operands))


def as_array(tensor: torch.Tensor, dtype: ir.DataType) -> np.ndarray:
    """A tensor in the host's memory; NumPy and torch share no bfloat16 and no float8."""
    if dtype == ir.DataType.FLOAT8E4M3FN:
        return tensor.contiguous().cpu().view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    if dtype == ir.DataType.BFLOAT16:
        return tensor.to(torch.bfloat16).contiguous().cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if dtype == ir.DataType.FLOAT16:
        return tensor.half().contiguous().cpu().numpy()
    return tensor.float().contiguous().cpu().numpy()


def write_graphs(
    template: Path, tensors: Mapping[str, torch.Tensor], work: Path, float8: bool = False
) -> dict[str, Path]:
    """Optimize a template for our provider and write its parts with their weights; return their paths.

    `float8`: linears multiply in float8, with FLOAT8_RANGE for all activations, and the rest computes in float16, as
    `sd-ort optimize` wants it.
    """
    parsed = Template(template)

    def read(name: str) -> np.ndarray:
        return as_array(tensors[name], ir.DataType.BFLOAT16)

    source = UnoptimizedComponent("transformer", lambda: parsed.graph(read), lambda: parsed.config, parsed.bytes)
    quantization = EightBits("float8", lambda _, names: dict.fromkeys(names, FLOAT8_RANGE)) if float8 else None
    parts, entry = rewrite(
        source, "transformer", TARGETS["gpu"], "float16" if float8 else "bfloat16", lambda _: None, hoisted=True,  # type: ignore[arg-type, return-value]
        quantization=quantization,
    )  # fmt: skip
    print(f"  {entry['rewrite_counts']} {entry.get('eight_bits', {}).get('layers', '')}", flush=True)
    paths = {}
    for key, part in zip(hoist.PARTS, parts.values(), strict=True):
        for value in part.graph.initializers.values():
            recipe, tensor = weight_recipes.recipe_of(value), value.const_value
            if recipe is None or tensor is None:
                continue
            value.const_value = ir.LazyTensor(
                lambda recipe=recipe, tensor=tensor: ir.Tensor(  # type: ignore[misc]
                    as_array(evaluate(recipe, tensors), tensor.dtype), dtype=tensor.dtype, name=tensor.name
                ),
                dtype=tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=tensor.name,
            )  # fmt: skip
        paths[key] = work / key / pipeline_folder.MODEL
        save(part, paths[key])
        nodes = [node.op_type for node in part.graph]
        print(f"  {key}: {len(nodes)} nodes, { {op: nodes.count(op) for op in sorted(set(nodes))} }", flush=True)
    return paths


class Ours:
    """The hoisted step on our provider, tuned and captured."""

    def __init__(self, paths: Mapping[str, Path], log: Callable[[str], None]) -> None:
        self.provider, self.paths, self.log = f"plugin:{provider_library()}", paths, log
        started = time.perf_counter()
        self.model = bound_run.open_gpu_graph_model(paths["step"], self.provider, session.SessionOptions(tuning=True))
        self.session_s = time.perf_counter() - started

    def feeds(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
        """Inputs of the step: those of the graph, and what the parts before the loop compute."""
        feeds = {name: value.float().cpu().numpy() for name, value in inputs.items()}
        feeds["timestep"] = np.repeat(feeds["timestep"], len(feeds["hidden_states"]))
        for part in ("prompt", "time"):
            model = session.OrtModel(session.create_session(self.paths[part], self.provider))
            run = {name: feeds[name] for name in model.inputs}
            feeds |= model(**run)
            begun = time.perf_counter()
            model(**run)
            self.log(f"{part}: {(time.perf_counter() - begun) * 1e3:.2f} ms once")
            del model
            gc.collect()
        return {name: feeds[name].astype(self.model.dtype(name)) for name in self.model.inputs}

    def contender(self, inputs: Mapping[str, torch.Tensor]) -> ComparedEngine:
        """Bind and capture the step for the sizes of `inputs`, with the tuning that they need."""
        feeds, started = self.feeds(inputs), time.perf_counter()
        bound = self.model.bind(feeds)
        ready_s = time.perf_counter() - started
        (value,) = bound.outputs.values()
        self.log(f"captured: {bound.graph is not None or bound.graph_id >= 0}")
        output = lambda: torch.from_numpy(value.numpy())  # noqa: E731
        return ComparedEngine("sd-ort", lambda: bound.run(wait=False), output, ready_s, self.session_s)

    def first_call_s(self, inputs: Mapping[str, torch.Tensor]) -> float:
        """Seconds of the first step of another size, waited for, with its capture and without tuning."""
        feeds = self.feeds(inputs)
        ctypes.CDLL(self.provider.partition(":")[2]).sd_ort_enable_tuning(0)
        started = time.perf_counter()
        self.model.bind(feeds).run()
        synchronize()
        return time.perf_counter() - started


def streamed_row(feeds: Mapping[str, np.ndarray], engine: Ours, gigabytes: float, calls: int) -> dict[str, Any]:
    """Steps as called, resident and with weights streamed on a device of so many GB, in turn: medians in ms, errors."""
    path, limit = engine.paths["step"], int(gigabytes * 1e9)
    size = (path.parent / pipeline_folder.DATA).stat().st_size
    plan = StreamPlan.of(size, limit)
    if plan is None:
        raise SystemExit(f"{size / 1e9:.1f} GB of weights fit in {gigabytes} GB.")
    stream = open_stream(engine.provider)
    if stream is None:
        raise SystemExit("Streams are of sd-ort's providers.")
    base = {"user_compute_stream": str(stream.handle)}

    def opened(part: Partition, views: Mapping[str, Any], settings: Mapping[str, str]) -> Any:
        options = session.SessionOptions(provider_options={**base, **settings})
        override = session.ModelOverride(updatable=views, graph=part.graph)
        return session.create_session(path, engine.provider, options, override)

    begun = time.perf_counter()
    pinned = PinnedWeights(partition_graph(path, plan.count), plan, path, {}, stream)
    seconds = {"pinned_s": time.perf_counter() - begun}
    device = provider_named(engine.provider).device
    begun = time.perf_counter()
    weights = WeightStream(pinned)
    streamed = StreamedModel(weights, opened, device, DeviceLock(stream), limit)
    seconds["opened_s"] = time.perf_counter() - begun
    models = {"resident": engine.model, "streamed": streamed}
    outputs = {name: next(iter(model(**feeds).values())) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(calls):
        for name, model in models.items():
            begun = time.perf_counter()
            model(**feeds)
            times[name].append((time.perf_counter() - begun) * 1e3)
    copied = sum(memory.size for memory in pinned.memory.values())
    begun = time.perf_counter()
    for index in plan.streamed:
        weights.copy(index)
    pinned.copies.synchronize()
    copies_s = time.perf_counter() - begun
    medians = {f"{name}_ms": statistics.median(values) for name, values in times.items()}
    error = relative_l2_error(outputs["streamed"].astype(float), outputs["resident"].astype(float))
    return medians | seconds | {
        "limit_gb": gigabytes, "partitions": plan.count, "streamed_partitions": len(plan.streamed),
        "weights_gb": size / 1e9, "streamed_gb": copied / 1e9, "weights_on_device_gb": weights.device_bytes / 1e9,
        "copies_ms": copies_s * 1e3, "copy_gbs": copied / copies_s / 1e9, "error": error,
    }  # fmt: skip


def first_call_s(net: Callable[..., torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> float:
    """Seconds of the first step of another size in torch."""
    arguments = [value if name in FLOAT32_INPUTS else value.bfloat16() for name, value in inputs.items()]
    synchronize()
    started = time.perf_counter()
    net(*arguments)
    synchronize()
    return time.perf_counter() - started


def peer(
    name: str, model: Any, net: torch.nn.Module, inputs: Mapping[str, torch.Tensor]
) -> tuple[ComparedEngine, Callable[..., torch.Tensor]]:
    """torch "eager" or "compile", and its function. Eager is compiled too afterwards if diffusers names the blocks."""
    arguments = [value if each in FLOAT32_INPUTS else value.bfloat16() for each, value in inputs.items()]
    if DEVICE == "cuda":
        model.set_attention_backend("_native_cudnn")
    label, last = "torch eager", list[torch.Tensor]()
    call: Callable[..., torch.Tensor] = net
    if name == "compile" and getattr(model, "_repeated_blocks", None):
        label = "torch.compile of the repeated blocks"
        model.compile_repeated_blocks(fullgraph=True)
    elif name == "compile":
        label, call = "torch.compile", torch.compile(net, fullgraph=True)

    def run() -> None:
        last[:] = [call(*arguments)]

    started = time.perf_counter()
    for _ in range(3):
        run()
    synchronize()
    return ComparedEngine(label, run, lambda: last[0].float(), time.perf_counter() - started), call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=sorted(PRESETS))
    parser.add_argument("--pixels", type=int, default=1024)
    parser.add_argument("--other-pixels", type=int, help="time the first step of this size too")
    parser.add_argument("--rows", type=int, default=1, help="2 with guidance")
    parser.add_argument("--calls", type=int, default=5, help="calls a round")
    parser.add_argument("--peers", default="eager,compile")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="profile, and print the N longest kernels")
    parser.add_argument(
        "--streamed", type=float, nargs="+", metavar="GB", help="only measure weights streamed to so many GB"
    )
    parser.add_argument(
        "--float8", action="store_true", help="linears in float8; activations are not measured, so errors say nothing"
    )
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/sd_ort_transformer"))
    parser.add_argument("--out", type=Path, default=Path("results/transformers"))
    options = parser.parse_args()
    log = elapsed_log()
    facts: dict[str, Any] = {
        "preset": options.preset, "pixels": options.pixels, "rows": options.rows,
        "layers": "float8" if options.float8 else "bfloat16", "commit": machine.commit(),
        "machine": machine.machine(), "versions": machine.versions(),
    }  # fmt: skip

    with torch.inference_mode():
        model = random_model(options.preset)
        log(f"torch {torch.__version__}, {sum(p.numel() for p in model.parameters()) / 1e9:.2f} B parameters")
        inputs = random_inputs(options.preset, options.pixels, options.rows)
        tensors = dict(model.state_dict())
        template = find_template(component_key(open_preset(options.preset, 0), "transformer", DEFAULT_OPSET, "dynamo"))
        assert template is not None
        paths = write_graphs(template, tensors, options.work / options.preset, options.float8)
        log("graphs written")
        engine = Ours(paths, log)
        if options.streamed:
            streamed: list[dict[str, Any]] = []
            feeds, path = engine.feeds(inputs), options.out / "streamed" / f"{options.preset}_{options.pixels}.json"
            for gigabytes in options.streamed:
                streamed.append(streamed_row(feeds, engine, gigabytes, options.calls))
                log("STREAMED " + json.dumps(streamed[-1]))
                write_json(path, {**facts, "streamed": streamed})
                gc.collect()
            return
        own = engine.contender(inputs)
        log(f"ours ready in {own.ready_s:.1f} s, session in {engine.session_s:.1f} s")
        which = options.peers.split(",")
        net = Net(model, list(inputs))
        flops = operations(
            net, {name: inputs[name] if name in FLOAT32_INPUTS else inputs[name].bfloat16() for name in inputs}
        )
        log(f"TFLOP {flops}")
        rows: list[dict[str, Any]] = []
        own.run()
        synchronize()
        outputs = {own.name: own.output().double().cpu().numpy()}
        # diffusers compiles blocks in place: eager is timed before that, beside ours, and both again with the compiled.
        times: dict[str, dict[str, list[float]]] = {}
        for name in [each for each in ("eager", "compile") if each in which]:
            other, call = peer(name, model, net, inputs)
            log(f"{other.name} ready in {other.ready_s:.1f} s")
            outputs[other.name] = other.output().double().cpu().numpy()
            measured = time_rounds([own, other], options.calls)
            times[f"{own.name} beside {other.name}"], times[other.name] = measured[own.name], measured[other.name]
            row: dict[str, Any] = {"engine": other.name, "ready_s": round(other.ready_s, 1)}
            row |= {f"{kind}_ms": statistics.median(values) for kind, values in measured[other.name].items()}
            ratios = [a / b for a, b in zip(measured[own.name]["device"], measured[other.name]["device"], strict=True)]
            row |= {"ours_ms": statistics.median(measured[own.name]["device"]), "ours_ratio": statistics.median(ratios)}
            if options.profile:
                row["profile"] = profile(other, calls=2, show=options.profile)
            if options.other_pixels:
                smaller = random_inputs(options.preset, options.other_pixels, options.rows)
                row["other_size_s"] = first_call_s(call, smaller)
            rows.append(row)
            log("ROW " + json.dumps({k: v for k, v in row.items() if k != "profile"}))
        row = {"engine": own.name, "ready_s": round(own.ready_s, 1), "session_s": own.session_s}
        if not times:
            times = time_rounds([own], options.calls)
        last = list(times.values())[-2 if len(times) > 1 else -1]
        row |= {f"{kind}_ms": statistics.median(values) for kind, values in last.items()}
        if options.profile and DEVICE == "cuda":
            row["profile"] = profile(own, calls=2, show=options.profile)
        if options.other_pixels:
            row["other_size_s"] = engine.first_call_s(random_inputs(options.preset, options.other_pixels, options.rows))
        rows.append(row)
        reference = outputs.get("torch eager")
        errors = {} if reference is None else {n: relative_l2_error(o, reference) for n, o in outputs.items()}
        log("ROW " + json.dumps({k: v for k, v in row.items() if k != "profile"}))
        log(f"errors against torch eager: {errors}")
        result = {
            **facts, "errors": errors, "tflop": flops,
            "limits": limits() if DEVICE == "cuda" else {}, "engines": rows,
        }  # fmt: skip
        name = f"{options.preset}_{options.pixels}{'_float8' * options.float8}"
        write_json(options.out / f"{name}.json", result)


if __name__ == "__main__":
    main()
