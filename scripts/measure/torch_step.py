#!/usr/bin/env python3
"""One U-Net call in torch with our operators and without, timed in turn in one process on a GPU.

    python scripts/measure/torch_step.py sd15 sdxl --profile

Engines, all float16: diffusers' U-Net as it loads, without and under a CUDA graph; the same channels last; `optimize`
at level "performance" as it is called (it captures itself), under a CUDA graph of the script's, and without one;
torch.compile (reduce-overhead, channels last); `optimize` and torch.compile. Weights are random, made on the GPU, the
same for all. Errors are relative, against torch in float32 (TF32 off). Rounds of calls take turns between the engines,
and a ratio is the median of the rounds' ratios.

Writes <out>.json after each model, and <out>.md from it, with machine, versions and commit ($SD_ORT_COMMIT where there
is no git). Without a GPU, a -tiny preset tries the script: nothing is captured, and compiling is tracing alone.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from bench_gpu_step import Contender, profile  # noqa: E402
from gpu_models import DEVICE, random_module  # noqa: E402

from sd_ort.core.files import write_text  # noqa: E402
from sd_ort.family.presets import PRESETS  # noqa: E402
from sd_ort.runtime import machine  # noqa: E402
from sd_ort.torch import optimize, reset_status, status  # noqa: E402

PLAIN, PLAIN_OURS = "eager, no graph", "eager + optimize, no graph"
AS_CALLED = "eager + optimize, as called"
EAGER, LAST, OURS = "eager, CUDA graph", "eager channels last, CUDA graph", "eager + optimize, CUDA graph"
COMPILED, BOTH = "torch.compile", "optimize + torch.compile"
# What issue 17 asks for: an engine's time over another's, at most.
# A plain call must not be slower than eager's, captured or not.
GOALS = (
    (OURS, EAGER, 0.62), (AS_CALLED, EAGER, 0.62), (BOTH, COMPILED, 0.92), (PLAIN_OURS, PLAIN, 1.0),
    (AS_CALLED, PLAIN, 1.0),
)  # fmt: skip
SIZES = {"sd15": 64, "sdxl": 128}  # edge of the latent
ROUNDS = 7
Call = Callable[[], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="+", choices=sorted(PRESETS))
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--size", type=int, help="edge of the latent")
    parser.add_argument("--calls", type=int, default=20, help="calls a round")
    parser.add_argument("--no-compile", action="store_true", help="without the two compiled engines")
    parser.add_argument("--profile", action="store_true", help="add each engine's time by kernel class")
    parser.add_argument("--out", type=Path, default=Path("results/torch_step"))
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    begun = time.perf_counter()
    record: dict[str, Any] = {
        "when": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "machine": machine.machine(),
        "versions": machine.versions() | {"torch": torch.__version__},
        "commit": machine.commit(),
        "models": {},
    }
    for preset in options.presets:
        with torch.no_grad():
            record["models"][preset] = measure(preset, options, lambda text: say(begun, text))
        write_text(options.out.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
        write_text(options.out.with_suffix(".md"), table(record))
        gc.collect()
    print(table(record), flush=True)


def say(begun: float, text: str) -> None:
    print(f"[{time.perf_counter() - begun:6.1f} s] {text}", flush=True)


def measure(preset: str, options: argparse.Namespace, tell: Callable[[str], None]) -> dict[str, Any]:
    """All engines of one model."""
    device, size = DEVICE, options.size or SIZES.get(preset, 16)
    unet: Any = random_module(preset, "unet")
    arguments = random_arguments(unet, options.batch, size)
    reference = unet(**arguments)[0].clone()
    dtype = torch.float16 if device == "cuda" else torch.float32
    unet.to(dtype)
    arguments = tree_to(arguments, dtype)
    tell(f"{preset}: float32 reference {tuple(reference.shape)}")
    engines: dict[str, Call] = {}
    ready: dict[str, float] = {}

    def add(name: str, make: Callable[[], Call]) -> None:
        started = time.perf_counter()
        engines[name] = make()
        synchronize(device)
        ready[name] = time.perf_counter() - started
        tell(f"{name} ready in {ready[name]:.1f} s")

    add(PLAIN, lambda: lambda: unet(**arguments)[0])
    add(EAGER, lambda: captured(unet, arguments, device))
    last = copy.deepcopy(unet).to(memory_format=torch.channels_last)
    add(LAST, lambda: captured(last, arguments, device))
    if not options.no_compile:
        add(COMPILED, lambda: compiled(last, arguments, device))
    # last: level "performance" lets cuDNN measure its convolutions, in the whole process
    reset_status()
    torch.backends.cudnn.benchmark = False
    ours = optimize(copy.deepcopy(unet), "performance", graph=False)
    ours(**arguments)
    counts = str(status())
    tell(counts)
    add(OURS, lambda: captured(ours, arguments, device))
    add(PLAIN_OURS, lambda: lambda: ours(**arguments)[0])
    reset_status()
    as_called = optimize(copy.deepcopy(unet), "performance")
    add(AS_CALLED, lambda: self_captured(as_called, arguments))
    tell("\n".join(line for line in str(status()).splitlines() if "graph" in line))
    if not options.no_compile:
        add(BOTH, lambda: compiled(ours, arguments, device))
    times = time_rounds(engines, options.calls, device)
    tell("timed")
    rows = []
    for name, run in engines.items():
        row: dict[str, Any] = {
            "engine": name,
            "ms": statistics.median(times[name]),
            "over_eager": ratio(times, name, EAGER),
            "over_compiled": ratio(times, name, COMPILED),
            "error": float((run().double() - reference.double()).norm() / reference.double().norm()),
            "ready_s": ready[name],
        }
        if options.profile and device == "cuda":
            row["profile"] = profile(Contender(name, run, run, 0.0), show=30)
            row["profile"]["top"] = row["profile"]["top"][:30]
        tell(json.dumps({key: value for key, value in row.items() if key != "profile"}))
        rows.append(row)
    goals = [
        {"engine": name, "over": base, "goal": goal, "measured": ratio(times, name, base)}
        for name, base, goal in GOALS
        if name in times and base in times
    ]
    return {"batch": options.batch, "size": size, "rows": rows, "goals": goals, "status": counts.splitlines()}


# ---- The inputs


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
        edge = 8.0 * size
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        arguments["added_cond_kwargs"] = {
            "text_embeds": normal(batch, pooled),
            "time_ids": torch.tensor([[edge, edge, 0, 0, edge, edge]] * batch, device=device),
        }
    return arguments


def tree_to(arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The arguments in a type; the time step stays in float32."""
    made = {}
    for name, value in arguments.items():
        if isinstance(value, dict):
            value = tree_to(value, dtype)
        elif isinstance(value, torch.Tensor) and name != "timestep":
            value = value.to(dtype)
        made[name] = value
    return made


# ---- Engines


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def captured(unet: Any, arguments: dict[str, Any], device: str) -> Call:
    """Replays a captured call; three calls before it on a side stream, as torch's manual asks."""
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


def self_captured(unet: Any, arguments: dict[str, Any]) -> Call:
    """Calls as anybody makes them; the second captures."""
    for _ in range(3):
        unet(**arguments)
    return lambda: unet(**arguments)[0]


def compiled(unet: Any, arguments: dict[str, Any], device: str) -> Call:
    """torch.compile with its own CUDA graphs; three calls make and record them."""
    if device == "cuda":
        made = torch.compile(unet, mode="reduce-overhead", fullgraph=True, dynamic=False)
    else:
        made = torch.compile(unet, backend="eager", fullgraph=True, dynamic=False)

    def run() -> torch.Tensor:
        return made(**arguments)[0]

    for _ in range(3):
        run()
    return run


# ---- Timing


def time_rounds(engines: dict[str, Call], calls: int, device: str) -> dict[str, list[float]]:
    """Milliseconds a call, of `calls` queued behind one another: a number a round, the engines in turn."""
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


def table(record: dict[str, Any]) -> str:
    gpus = ", ".join(record["machine"].get("gpus", [])) or record["machine"]["cpu"]
    lines = [
        "# A U-Net call in torch with our operators",
        "",
        f"Made by `scripts/measure/torch_step.py`, whose head says what is measured. {gpus}; torch "
        f"{record['versions']['torch']}, diffusers {record['versions'].get('diffusers')}; {record['when']}, commit "
        f"{record['commit']}. Random weights, float16. ms a call, queued; ratios round by round.",
    ]
    for preset, model in record["models"].items():
        lines += ["", f"## {preset}, batch {model['batch']}, latent {model['size']} x {model['size']}", ""]
        lines += [
            "| engine | ms | of eager | of torch.compile | error | ready, s |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        for row in model["rows"]:
            over = [f"{row[key]:.2f}" if row[key] is not None else "-" for key in ("over_eager", "over_compiled")]
            numbers = [f"{row['ms']:.2f}", *over, f"{row['error']:.1e}", f"{row['ready_s']:.0f}"]
            lines.append(f"| {row['engine']} | {' | '.join(numbers)} |")
        for goal in model["goals"]:
            reached = "reached" if goal["measured"] <= goal["goal"] else "not reached"
            lines += ["", f"Goal: {goal['engine']} at most {goal['goal']} of {goal['over']}: "
                      f"{goal['measured']:.3f}, {reached}."]  # fmt: skip
        if any("profile" in row for row in model["rows"]):
            lines += ["", *by_class(model["rows"])]
    return "\n".join(lines) + "\n"


def by_class(rows: list[dict[str, Any]]) -> list[str]:
    """A table of kernel classes, ms a call."""
    shown = [row for row in rows if "profile" in row]
    classes = sorted({name for row in shown for name in row["profile"]["classes_ms"]})
    head = "| kernels, ms | " + " | ".join(row["engine"] for row in shown) + " |"
    lines = [head, "| --- |" + " ---: |" * len(shown)]
    for name in classes:
        values = (f"{row['profile']['classes_ms'].get(name, 0.0):.2f}" for row in shown)
        lines.append(f"| {name} | {' | '.join(values)} |")
    lines.append("| number of kernels | " + " | ".join(f"{row['profile']['kernels']:.0f}" for row in shown) + " |")
    return lines


if __name__ == "__main__":
    main()
