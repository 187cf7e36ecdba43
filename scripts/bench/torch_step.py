#!/usr/bin/env python3
"""Time one UNet call in torch with and without the sd_ort operators, in alternation in one process on a GPU.

    python scripts/bench/torch_step.py sd15 sdxl --profile

Engines, all float16: diffusers' UNet without and with a CUDA graph; the same channels last; `optimize` at level
"performance" as users call it (it captures its own graph), in a CUDA graph of this script, and without a graph;
torch.compile (reduce-overhead, channels last); `optimize` and torch.compile. Weights are random, generated on the GPU,
and the same for all. Errors are relative to torch in float32 (TF32 off). The engines alternate between rounds of calls,
and a ratio is the median of the ratios of the rounds.

Writes <out>.json after each model, and <out>.md from it, with machine, versions and commit ($SD_ORT_COMMIT if there is
no git). Without a GPU, use a -tiny preset to try the script: nothing is captured, and compiling is only tracing.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scripts.bench.bench_gpu_step import Contender, profile
from scripts.bench.gpu_models import DEVICE, random_module
from sd_ort.checkpoints.presets import PRESETS
from sd_ort.core.files import write_text
from sd_ort.runtime import machine
from sd_ort.torch import optimize, reset_status, status

NO_GRAPH, OPTIMIZE_NO_GRAPH = "eager, no graph", "eager + optimize, no graph"
AS_CALLED = "eager + optimize, as called"
EAGER, CHANNELS_LAST, OPTIMIZE = "eager, CUDA graph", "eager channels last, CUDA graph", "eager + optimize, CUDA graph"
COMPILED, OPTIMIZE_COMPILED = "torch.compile", "optimize + torch.compile"
# Engine, other engine, and the maximum ratio of their times. A call must not be slower than an eager one, captured or
# not.
GOALS = (
    (OPTIMIZE, EAGER, 0.62), (AS_CALLED, EAGER, 0.62), (OPTIMIZE_COMPILED, COMPILED, 0.92),
    (OPTIMIZE_NO_GRAPH, NO_GRAPH, 1.0), (AS_CALLED, NO_GRAPH, 1.0),
)  # fmt: skip
SIZES = {"sd15": 64, "sdxl": 128}  # height and width of the latents
ROUNDS = 7
Call = Callable[[], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="+", choices=sorted(PRESETS))
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--size", type=int, help="height and width of the latents")
    parser.add_argument("--calls", type=int, default=20, help="calls per round")
    parser.add_argument("--no-compile", action="store_true", help="leave out the two compiled engines")
    parser.add_argument("--profile", action="store_true", help="add each engine's time by kernel class")
    parser.add_argument("--out", type=Path, default=Path("results/torch_step"))
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    started = time.perf_counter()
    report: dict[str, Any] = {
        "when": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "machine": machine.machine(),
        "versions": machine.versions() | {"torch": torch.__version__},
        "commit": machine.commit(),
        "models": {},
    }
    for preset in options.presets:
        with torch.no_grad():
            report["models"][preset] = measure(preset, options, lambda text: print_progress(started, text))
        write_text(options.out.with_suffix(".json"), json.dumps(report, indent=1) + "\n")
        write_text(options.out.with_suffix(".md"), table(report))
        gc.collect()
    print(table(report), flush=True)


def print_progress(started: float, text: str) -> None:
    print(f"[{time.perf_counter() - started:6.1f} s] {text}", flush=True)


def measure(preset: str, options: argparse.Namespace, on_progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure all engines on one model."""
    device, size = DEVICE, options.size or SIZES.get(preset, 16)
    unet: Any = random_module(preset, "unet")
    arguments = random_arguments(unet, options.batch, size)
    reference = unet(**arguments)[0].clone()
    dtype = torch.float16 if device == "cuda" else torch.float32
    unet.to(dtype)
    arguments = cast_arguments(arguments, dtype)
    on_progress(f"{preset}: float32 reference {tuple(reference.shape)}")
    engines: dict[str, Call] = {}
    load_s: dict[str, float] = {}

    def add(name: str, load: Callable[[], Call]) -> None:
        started = time.perf_counter()
        engines[name] = load()
        synchronize(device)
        load_s[name] = time.perf_counter() - started
        on_progress(f"{name} ready in {load_s[name]:.1f} s")

    add(NO_GRAPH, lambda: lambda: unet(**arguments)[0])
    add(EAGER, lambda: capture_call(unet, arguments, device))
    channels_last = copy.deepcopy(unet).to(memory_format=torch.channels_last)
    add(CHANNELS_LAST, lambda: capture_call(channels_last, arguments, device))
    if not options.no_compile:
        add(COMPILED, lambda: compile_call(channels_last, arguments, device))
    # These engines come last: level "performance" enables cuDNN's benchmark mode in the whole process.
    reset_status()
    torch.backends.cudnn.benchmark = False
    optimized = optimize(copy.deepcopy(unet), "performance", graph=False)
    optimized(**arguments)
    counts = str(status())
    on_progress(counts)
    add(OPTIMIZE, lambda: capture_call(optimized, arguments, device))
    add(OPTIMIZE_NO_GRAPH, lambda: lambda: optimized(**arguments)[0])
    reset_status()
    as_called = optimize(copy.deepcopy(unet), "performance")
    add(AS_CALLED, lambda: call_after_warmup(as_called, arguments))
    on_progress("\n".join(line for line in str(status()).splitlines() if "graph" in line))
    if not options.no_compile:
        add(OPTIMIZE_COMPILED, lambda: compile_call(optimized, arguments, device))
    times = time_rounds(engines, options.calls, device)
    on_progress("timed")
    rows = []
    for name, run in engines.items():
        row: dict[str, Any] = {
            "engine": name,
            "ms": statistics.median(times[name]),
            "over_eager": ratio(times, name, EAGER),
            "over_compiled": ratio(times, name, COMPILED),
            "error": float((run().double() - reference.double()).norm() / reference.double().norm()),
            "ready_s": load_s[name],
        }
        if options.profile and device == "cuda":
            row["profile"] = profile(Contender(name, run, run, 0.0), show=30)
            row["profile"]["top"] = row["profile"]["top"][:30]
        on_progress(json.dumps({key: value for key, value in row.items() if key != "profile"}))
        rows.append(row)
    goals = [
        {"engine": name, "over": base, "goal": goal, "measured": ratio(times, name, base)}
        for name, base, goal in GOALS
        if name in times and base in times
    ]
    return {"batch": options.batch, "size": size, "rows": rows, "goals": goals, "status": counts.splitlines()}


# ---- Inputs


def random_arguments(unet: Any, batch: int, size: int) -> dict[str, Any]:
    device = str(unet.device)
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    config = unet.config
    arguments: dict[str, Any] = {
        "sample": normal(batch, config.in_channels, size, size),
        "timestep": torch.tensor([500.0], device=device),
        "encoder_hidden_states": normal(batch, 77, config.cross_attention_dim),
        "return_dict": False,
    }
    if config.addition_embed_type == "text_time":
        pixels = 8.0 * size
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        arguments["added_cond_kwargs"] = {
            "text_embeds": normal(batch, pooled),
            "time_ids": torch.tensor([[pixels, pixels, 0, 0, pixels, pixels]] * batch, device=device),
        }
    return arguments


def cast_arguments(arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments in a dtype; the timestep stays in float32."""
    cast = {}
    for name, value in arguments.items():
        if isinstance(value, dict):
            value = cast_arguments(value, dtype)
        elif isinstance(value, torch.Tensor) and name != "timestep":
            value = value.to(dtype)
        cast[name] = value
    return cast


# ---- Engines


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def capture_call(unet: Any, arguments: dict[str, Any], device: str) -> Call:
    """Return the replay of a captured call, after three calls on a side stream as torch's manual requires."""
    if device != "cuda":
        return lambda: unet(**arguments)[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            unet(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = unet(**arguments)[0]

    def replay() -> torch.Tensor:
        graph.replay()
        return output

    return replay


def call_after_warmup(unet: Any, arguments: dict[str, Any]) -> Call:
    """Return the call of an optimized UNet after three warm-up calls, of which the second captures its graph."""
    for _ in range(3):
        unet(**arguments)
    return lambda: unet(**arguments)[0]


def compile_call(unet: Any, arguments: dict[str, Any], device: str) -> Call:
    """Return the call of a UNet under torch.compile with its own CUDA graphs, after three calls that capture these."""
    if device == "cuda":
        module = torch.compile(unet, mode="reduce-overhead", fullgraph=True, dynamic=False)
    else:
        module = torch.compile(unet, backend="eager", fullgraph=True, dynamic=False)

    def run() -> torch.Tensor:
        return module(**arguments)[0]

    for _ in range(3):
        run()
    return run


# ---- Timing


def time_rounds(engines: dict[str, Call], calls: int, device: str) -> dict[str, list[float]]:
    """Return the milliseconds per call of each engine and round: `calls` queued calls. The engines alternate."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(ROUNDS):
        for name, run in engines.items():
            run()
            synchronize(device)
            started = time.perf_counter()
            for _ in range(calls):
                run()
            synchronize(device)
            times[name].append((time.perf_counter() - started) * 1e3 / calls)
    return times


def ratio(times: dict[str, list[float]], name: str, base: str) -> float | None:
    if base not in times:
        return None
    return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))


def table(report: dict[str, Any]) -> str:
    gpus = ", ".join(report["machine"].get("gpus", [])) or report["machine"]["cpu"]
    lines = [
        "# A UNet call in torch with the sd_ort operators",
        "",
        f"Made by `scripts/bench/torch_step.py`, whose head says what is measured. {gpus}; torch "
        f"{report['versions']['torch']}, diffusers {report['versions'].get('diffusers')}; {report['when']}, commit "
        f"{report['commit']}. Random weights, float16. ms per call, queued; ratios per round.",
    ]
    for preset, model in report["models"].items():
        lines += ["", f"## {preset}, batch {model['batch']}, latent {model['size']} x {model['size']}", ""]
        lines += [
            "| engine | ms | of eager | of torch.compile | error | ready, s |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        for row in model["rows"]:
            over = [f"{row[key]:.2f}" if row[key] is not None else "-" for key in ("over_eager", "over_compiled")]
            values = [f"{row['ms']:.2f}", *over, f"{row['error']:.1e}", f"{row['ready_s']:.0f}"]
            lines.append(f"| {row['engine']} | {' | '.join(values)} |")
        for goal in model["goals"]:
            reached = "reached" if goal["measured"] <= goal["goal"] else "not reached"
            lines += ["", f"Goal: {goal['engine']} at most {goal['goal']} of {goal['over']}: "
                      f"{goal['measured']:.3f}, {reached}."]  # fmt: skip
        if any("profile" in row for row in model["rows"]):
            lines += ["", *by_class(model["rows"])]
    return "\n".join(lines) + "\n"


def by_class(rows: list[dict[str, Any]]) -> list[str]:
    """Return a table of kernel classes in ms per call."""
    profiled = [row for row in rows if "profile" in row]
    classes = sorted({name for row in profiled for name in row["profile"]["classes_ms"]})
    head = "| kernels, ms | " + " | ".join(row["engine"] for row in profiled) + " |"
    lines = [head, "| --- |" + " ---: |" * len(profiled)]
    for name in classes:
        values = (f"{row['profile']['classes_ms'].get(name, 0.0):.2f}" for row in profiled)
        lines.append(f"| {name} | {' | '.join(values)} |")
    lines.append("| number of kernels | " + " | ".join(f"{row['profile']['kernels']:.0f}" for row in profiled) + " |")
    return lines


if __name__ == "__main__":
    main()
