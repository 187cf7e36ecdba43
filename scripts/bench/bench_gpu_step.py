#!/usr/bin/env python3
"""One model call on a GPU (a denoising step, a VAE decode): sd-ort beside torch.compile, timed in turn in one process.

    python scripts/bench/bench_gpu_step.py --preset sd15 --batch 2 --size 64 --out results/gpu_step
    python scripts/bench/bench_gpu_step.py --preset sd15 --component vae_decoder --batch 1 --out results/gpu_step
    scripts/bench/bench_provider               # all that results/gpu_provider holds: our provider beside the others

writes <out>/<preset>_<component>_b<batch>_<size>.json. Weights are random, made on the GPU, the same for all
engines; `size` is the latent's edge. Every engine runs float16 from device buffers to device buffers; errors are those
of the outputs against torch in float32 (TF32 off). Rounds of calls take turns between the engines, so that a change of
the machine's clocks meets all of them; a ratio is the median of the rounds' ratios.

--graph FILE takes a raw export without weights (export_without_weights.py) instead of exporting again, which takes
a minute or two; an export in --work is taken again. --variants names sessions to compare, see VARIANTS; --provider adds
our own execution provider, in the same process, and --without PASS that provider without one of its lowerings.
--profile adds each one's time by kernel class. Rows say how long a session took to open (`session_s`) and how long the
host is busy with a call, on an idle GPU (`host_ms`) and behind others, as a pipeline's (`queueing_ms`). The commit is
$SD_ORT_COMMIT where there is no git. Without a GPU all runs on the host, to see that it works.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import json
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fusion_passes.lower import conv_relu
from scripts.bench.gpu_models import (
    CONFIGS,
    DEVICE,
    elapsed_log,
    export_raw,
    fill,
    limits,
    provider_library,
    random_inputs,
    random_module,
)
from sd_ort.checkpoints.modules import wrap
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import SdOrtError
from sd_ort.core.files import write_json
from sd_ort.core.metrics import relative_l2_error
from sd_ort.graphs import hoist
from sd_ort.optimize.optimizer import optimize_component
from sd_ort.optimize.targets import CUDA, CUDA_CONTRIB, TARGETS
from sd_ort.runtime import bound_run, machine, providers, session
from sd_ort.runtime.library import CUDA_LIBRARY, library_path

ROUNDS = 7
COMPILED_BLOCKS = ("BasicTransformerBlock", "ResnetBlock2D")  # of a U-Net, for torchao
# torchao's own settings of Inductor for what it has quantized (recommended_inductor_config_setter).
TORCHAO_OPTIONS = {"coordinate_descent_tuning": True, "coordinate_descent_check_all_directions": True}
TORCHAO_MODES = {"torchao": "default", "torchao-autotuned": "max-autotune-no-cudagraphs"}  # of torch.compile

# Kernels by what they do, first match first. The names are those of cuDNN, cuBLAS, ONNX Runtime, torch and ours.
CLASSES = (
    ("attention", r"flash|fmha|attention|sdpa|_mha|Q.*K.*V.*Kernel|AddBiasUnpack|AddBiasTranspose"),
    ("group norm", r"group_?norm|groupNorm"),
    ("layer norm", r"layer_?norm|LayerNorm|adaptive_norm|rotary_qkv"),
    ("gelu", r"(?<!linear_split_)gelu"),
    ("convolution", r"conv|wgrad|fprop|implicit|xmma.*(nhwc|indexed)|nhwcAddPadding|nchwToNhwc|nhwcToNchw|cudnn"),
    ("matrix product", r"gemm|nvjet|cutlass|splitK|cublas|triton_tem|linear_split_gelu|quantized_linear"),
    ("concat, resize, transpose", r"[Cc]oncat|[Rr]esize|[Uu]psample|subpixel|[Tt]ranspose|[Uu]pSample"),
    ("memset, memcpy", r"[Mm]emset|[Mm]emcpy"),
    ("element-wise", r""),
)


@dataclass(frozen=True)
class Variant:
    """A variant of the cuda target.

    target: fields that differ. hoist: whether the UNet is hoisted; its prompt and time parts run once, untimed. tune:
    whether the op library tunes its kernels in the first run.
    """

    target: Mapping[str, Any] = field(default_factory=dict)
    hoist: bool = False
    tune: bool = False


_OUR_ATTENTION = {name: limit for name, limit in CUDA.contrib_constraints.items() if name != "MultiHeadAttention"}


def _without(*names: str) -> dict[str, Any]:
    return {"lowering_passes": tuple(each for each in CUDA.lowering_passes if each.name not in names)}


_RELUS_IN_CONVOLUTIONS = tuple(
    each for after in CUDA.lowering_passes for each in (after, conv_relu.PASS)[: 1 + (after.name == "subpixel_conv")]
)
_OURS = ("linear_add", "layer_norm", "upsample_nearest", "subpixel_conv")
# Each adds to the one before: a waterfall. The fifth is the cuda target as it is. The ninth is the seventh without one
# of its passes, the tenth with one more.
VARIANTS = {
    "1 contrib operators": Variant({**_without(*_OURS, "fold_bias"), "contrib_constraints": CUDA_CONTRIB}),
    "2 + convolution biases folded": Variant({**_without(*_OURS), "contrib_constraints": CUDA_CONTRIB}),
    "3 + our GroupNorm, gates, BiasAdd, attention of wide heads": Variant(_without(*_OURS)),
    "4 + our LayerNormalization, UpsampleNearest": Variant(_without("linear_add", "subpixel_conv")),
    "5 + LinearAdd, sub-pixel convolutions": Variant(),
    "6 + hoisting": Variant(hoist=True),
    "7 + tuning": Variant(hoist=True, tune=True),
    "8 + our attention": Variant({"contrib_constraints": _OUR_ATTENTION}, hoist=True, tune=True),
    "9 as 7, without sub-pixel convolutions": Variant(_without("subpixel_conv"), hoist=True, tune=True),
    "10 as 7, with Relus in convolutions": Variant({"lowering_passes": _RELUS_IN_CONVOLUTIONS}, hoist=True, tune=True),
}


@dataclass
class ComparedEngine:
    """One way to make the step: `run()` makes one call, `output()` is what the last finished call made."""

    name: str
    run: Callable[[], Any]  # returns when the call is queued
    output: Callable[[], torch.Tensor]
    ready_s: float  # from the model in memory or on disk to the first timed call
    session_s: float | None = None  # of that, opening ONNX Runtime's session


# ---- Engines


def torch_engines(net: torch.nn.Module, inputs: Mapping[str, torch.Tensor], which: list[str]) -> list[ComparedEngine]:
    """torch in float16, channels last: eager under a CUDA graph, torch.compile with its own graphs, torchao's float8.

    Converts `net` in place.
    """
    net.half()
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    arguments = [half(name, value) for name, value in inputs.items()]
    arguments = [a.to(memory_format=torch.channels_last) if a.ndim == 4 else a for a in arguments]
    engines = []
    if "eager" in which:
        engines.append(captured_engine("torch eager, CUDA graph", net, arguments, time.perf_counter()))
    if "compile" in which:
        engines.append(compiled_engine("torch.compile", net, arguments, time.perf_counter()))
    for peer, mode in TORCHAO_MODES.items():
        if peer in which:
            engines.append(torchao_engine(f"torchao float8, blocks compiled, mode {mode}", net, arguments, mode))
    return engines


def captured_engine(name: str, net: torch.nn.Module, arguments: list[torch.Tensor], started: float) -> ComparedEngine:
    """Return an engine that runs a module as one CUDA graph, or eagerly on the CPU."""
    if DEVICE != "cuda":
        last = [net(*arguments)]
        return ComparedEngine(name, lambda: last.__setitem__(0, net(*arguments)), lambda: last[0], 0.0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            net(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = net(*arguments)
    return ComparedEngine(name, graph.replay, lambda: output, time.perf_counter() - started)


def torchao_engine(name: str, net: torch.nn.Module, arguments: list[torch.Tensor], mode: str) -> ComparedEngine:
    """Return a copy of the module with torchao's float8 linears: repeated blocks compiled, all under one CUDA graph.

    Its blocks have few shapes, and each shape is compiled once. torchao switches Inductor's search for launch settings
    on, with which a ResNet block of SDXL takes 30 s and a transformer block 40 to 90: only transformer blocks, which
    have the linears in float8, are searched. torchao scales by row in bfloat16 alone, and takes no tensors of the
    inference mode.
    """
    started = time.perf_counter()
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64  # shapes of ResnetBlock2D: 12 in SDXL; the default is 8
    with torch.inference_mode(False), torch.no_grad():
        quantized = float8_linears(copy.deepcopy(net).bfloat16())
        inputs = [a.bfloat16() if a.dtype == torch.float16 else a.clone() for a in arguments]
        for module in quantized.modules():
            block = type(module).__name__
            if block == "BasicTransformerBlock" and mode == "default":
                module.compile(fullgraph=True, dynamic=False, options=TORCHAO_OPTIONS)
            elif block in COMPILED_BLOCKS:
                module.compile(fullgraph=True, dynamic=False, mode=mode)
        return captured_engine(name, quantized, inputs, started)


def compiled_engine(name: str, net: torch.nn.Module, arguments: list[torch.Tensor], started: float) -> ComparedEngine:
    """Return a module under torch.compile, with its own CUDA graphs."""
    compiled = torch.compile(net, mode="reduce-overhead", fullgraph=True)
    last: list[torch.Tensor] = []

    def run() -> None:
        last[:] = [compiled(*arguments)]

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    return ComparedEngine(name, run, lambda: last[0], time.perf_counter() - started)


def float8_linears(net: torch.nn.Module) -> torch.nn.Module:
    """Quantize the linears of the blocks to float8 by torchao: weights by row, activations dynamically by row."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    def takes_float8(module: torch.nn.Module, name: str) -> bool:
        sizes = (module.in_features, module.out_features) if isinstance(module, torch.nn.Linear) else (1,)
        return "transformer_blocks" in name and all(size % 16 == 0 for size in sizes)

    config = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)
    quantize_(net, config, filter_fn=takes_float8)
    return net


def half(name: str, value: torch.Tensor) -> torch.Tensor:
    """An input as the float16 models take it: the timestep stays in float32."""
    return value if name == "timestep" else value.half()


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def ort_engine(
    label: str, number: int, variant: Variant, raw: Path, inputs: Mapping[str, torch.Tensor], shape: torch.Size
) -> ComparedEngine:
    """A captured session of the variant on the CUDA provider, made from the raw export."""
    path = raw.parents[2] / f"variant-{number}" / raw.parent.name / pipeline_folder.MODEL
    started = time.perf_counter()
    hoisted = variant.hoist and path.parent.name == hoist.PARTS["step"]
    target = replace(CUDA, **variant.target)
    report = optimize_component(raw, path, target, "float16", calibrate=False, hoisted=hoisted)
    print(f"  optimized in {time.perf_counter() - started:.1f} s: {report['op_counts']}", flush=True)
    started = time.perf_counter()
    library = library_path()
    if library is None or not (library.parent / CUDA_LIBRARY).is_file():
        raise SdOrtError("build the op library first: sd-ort build-ops --cuda sm_90")
    ctypes.CDLL(str(library.parent / CUDA_LIBRARY)).sd_ort_enable_tuning(int(variant.tune))
    return session_engine(label, "cuda", path, hoisted, inputs, shape, started)


def session_engine(
    label: str,
    provider: str,
    path: Path,
    hoisted: bool,
    inputs: Mapping[str, torch.Tensor],
    shape: torch.Size,
    started: float,
    **options: Any,
) -> ComparedEngine:
    """A captured session on the optimized component, its inputs and output in buffers; `options` of the session."""
    feeds = {key: half(key, value).cpu().numpy() for key, value in inputs.items()}
    if hoisted:
        feeds["timestep"] = np.repeat(feeds["timestep"], len(feeds["sample"]))
        for name in ("prompt", "time"):
            part = path.parent.with_name(hoist.PARTS[name]) / path.name
            once = session.OrtModel(session.create_session(part, provider))
            feeds |= once(**{key: feeds[key] for key in once.inputs})
    before = time.perf_counter()
    model = bound_run.open_gpu_graph_model(path, provider, session.SessionOptions(**options))
    session_s = time.perf_counter() - before
    bound = model.bind({key: feeds[key] for key in model.inputs})
    (value,) = bound.outputs.values()
    assert tuple(value.shape()) == tuple(shape)
    output = lambda: torch.from_numpy(value.numpy())  # noqa: E731
    return ComparedEngine(label, lambda: bound.run(wait=False), output, time.perf_counter() - started, session_s)


def provider_engine(
    library: Path, raw: Path, inputs: Mapping[str, torch.Tensor], shape: torch.Size, without: str = ""
) -> ComparedEngine:
    """As `ort_engine`, on our own provider: hoisted, tuned, captured; without one of its lowerings."""
    provider = f"plugin:{library}"
    path = raw.parents[2] / f"provider{without}" / raw.parent.name / pipeline_folder.MODEL
    hoisted = path.parent.name == hoist.PARTS["step"]
    target = replace(
        TARGETS["gpu"], lowering_passes=tuple(each for each in TARGETS["gpu"].lowering_passes if each.name != without)
    )
    report = optimize_component(raw, path, target, "float16", calibrate=False, hoisted=hoisted)
    print(f"  optimized: {report['op_counts']}", flush=True)
    name = providers.provider_named(provider).ep + (f" without {without}" if without else "")
    return session_engine(name, provider, path, hoisted, inputs, shape, time.perf_counter(), tuning=True)


def our_engines(
    numbers: str, raw: Path, inputs: Mapping[str, torch.Tensor], shape: torch.Size, log: Callable[[str], None]
) -> list[ComparedEngine]:
    """Open the VARIANTS with these comma-separated numbers, or all. A variant that fails is reported and skipped."""
    engines = []
    for number, (label, variant) in enumerate(VARIANTS.items(), 1):
        if numbers != "all" and str(number) not in numbers.split(","):
            continue
        try:
            engines.append(ort_engine(label, number, variant, raw, inputs, shape))
        except SdOrtError as error:
            log(f"{label} FAILED: {error}")
            continue
        log(f"{label} ready in {engines[-1].ready_s:.1f} s, session in {engines[-1].session_s:.2f} s")
        gc.collect()
    return engines


# ---- Timing


def time_rounds(engines: list[ComparedEngine], count: int) -> dict[str, dict[str, list[float]]]:
    """Return milliseconds a call by engine and measure, one number a round.

    `device`: `count` calls in a queue. `queueing`: the host's time to queue these. `call`: count / 2 single calls, each
    waited for on an idle GPU. `host`: the launch of these alone.
    """
    times: dict[str, dict[str, list[float]]] = {e.name: defaultdict(list) for e in engines}
    for engine in engines:
        for _ in range(count // 2):
            engine.run()
    synchronize()
    for _ in range(ROUNDS):
        for engine in engines:
            started = time.perf_counter()
            for _ in range(count):
                engine.run()
            times[engine.name]["queueing"].append((time.perf_counter() - started) * 1e3 / count)
            synchronize()
            times[engine.name]["device"].append((time.perf_counter() - started) * 1e3 / count)
            calls, launches = [], []
            for _ in range(max(count // 2, 1)):
                started = time.perf_counter()
                engine.run()
                launches.append((time.perf_counter() - started) * 1e3)
                synchronize()
                calls.append((time.perf_counter() - started) * 1e3)
            times[engine.name]["call"].append(statistics.median(calls))
            times[engine.name]["host"].append(statistics.median(launches))
    return times


def profile(engine: ComparedEngine, calls: int = 5, show: int = 0) -> dict[str, Any]:
    """Milliseconds a call by kernel class, the number of kernels, and the kernels themselves.

    "span_ms" is from the start of the first kernel to the end of the last: what it has over "kernels_ms" the device
    was idle.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(calls):
            engine.run()
        torch.cuda.synchronize()
    kernels: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    starts, ends = [], []
    for event in profiler.events():
        if event.device_type == torch.profiler.DeviceType.CUDA:
            starts.append(event.time_range.start)
            ends.append(event.time_range.end)
            kernels[event.name] += event.device_time_total / calls / 1e3
            counts[event.name] += 1
    classes: Counter[str] = Counter()
    for name, spent in kernels.items():
        classes[next(label for label, pattern in CLASSES if re.search(pattern, name))] += spent
    for name, spent in kernels.most_common(show):
        print(f"  {spent:7.3f} ms x{counts[name] / calls:5.1f}  {name[:130]}", flush=True)
    return {
        "kernels_ms": sum(kernels.values()),
        "span_ms": (max(ends, default=0) - min(starts, default=0)) / calls / 1e3,
        "kernels": sum(counts.values()) / calls,
        "classes_ms": dict(classes.most_common()),
        "top": [[round(t, 4), counts[n] / calls, n[:160]] for n, t in kernels.most_common(60)],
    }


def operations(net: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """TFLOP of one call, by torch's operator."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        net(*inputs.values())
    return {str(op): round(count / 1e12, 4) for op, count in counter.get_flop_counts()["Global"].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="sd15", choices=sorted(CONFIGS))
    parser.add_argument("--component", default="unet", choices=("unet", "vae_decoder"))
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--size", type=int, default=64, help="edge of the latent")
    parser.add_argument("--graph", type=Path, help="raw export without weights")
    parser.add_argument("--variants", default="all", help="numbers of VARIANTS, as 1,2,5")
    parser.add_argument("--provider", action="store_true", help="measure our own provider too, as build-ops made it")
    parser.add_argument("--without", nargs="*", default=[], metavar="PASS", help="and once without each, as linear_add")
    parser.add_argument("--calls", type=int, default=20, help="calls a round")
    parser.add_argument("--peers", default="compile", help="of eager, compile; empty for none")
    parser.add_argument("--work", type=Path, default=Path("/tmp/sd_ort_step"))
    parser.add_argument("--out", type=Path, default=Path("results/gpu_step"))
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="profile, and print the N longest kernels")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    log = elapsed_log()
    sdxl = "addition_embed_type" in CONFIGS[options.preset]["unet"]
    name = f"{options.preset}_{options.component}_b{options.batch}_{options.size}"
    with torch.inference_mode():
        module = random_module(options.preset, options.component)
        inputs = random_inputs(options.preset, options.component, options.batch, options.size)
        net = wrap(options.component, module, sdxl, False)
        reference = net(*inputs.values()).clone()
        flops = operations(net, inputs)
        log(f"torch {torch.__version__}, float32 reference {tuple(reference.shape)}, TFLOP {flops}")
        raw = options.work / options.preset / "raw" / options.component / pipeline_folder.MODEL
        if raw.is_file():
            pass  # of the same seed
        elif options.graph:
            fill(options.graph, module.state_dict(), raw.parent)
        else:
            export_raw(options.preset, options.component, net, raw)
        log("raw export")
        peers = torch_engines(net, inputs, options.peers.split(","))
        log("peers ready")
        engines = [*peers, *our_engines(options.variants, raw, inputs, reference.shape, log)]
        if options.provider:
            library = provider_library()
            for without in ["", *options.without]:
                engines.append(provider_engine(library, raw, inputs, reference.shape, without))
                log(f"our provider ready in {engines[-1].ready_s:.1f} s, session in {engines[-1].session_s:.2f} s")
        times = time_rounds(engines, options.calls)
        log("timed")
        rows = []
        base = times[peers[-1].name] if peers else None
        for engine in engines:
            engine.run()
            synchronize()
            row: dict[str, Any] = {"engine": engine.name, "ready_s": round(engine.ready_s, 1)}
            if engine.session_s is not None:
                row["session_s"] = round(engine.session_s, 3)
            for kind, values in times[engine.name].items():
                row[f"{kind}_ms"] = statistics.median(values)
                if base is not None:
                    row[f"{kind}_ratio"] = statistics.median(a / b for a, b in zip(values, base[kind], strict=True))
            row["error"] = relative_l2_error(*(t.double().cpu().numpy() for t in (engine.output(), reference)))
            rows.append(row)
            log("ROW " + json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}))
            if options.profile:
                row["profile"] = profile(engine, show=options.profile)
                log(f"  {row['profile']['kernels']:.0f} kernels, {row['profile']['kernels_ms']:.3f} ms: "
                    f"{ {k: round(v, 3) for k, v in row['profile']['classes_ms'].items()} }")  # fmt: skip
        result = {
            "preset": options.preset, "component": options.component, "batch": options.batch, "size": options.size,
            "commit": machine.commit(), "machine": machine.machine(),
            "versions": machine.versions(), "limits": limits() if DEVICE == "cuda" else {}, "tflop": flops,
            "rows": rows,
        }  # fmt: skip
        write_json(options.out / f"{name}.json", result)
        log(f"limits {result['limits']}")


if __name__ == "__main__":
    np.set_printoptions(precision=4)
    main()
