#!/usr/bin/env python3
"""GB/s of the bandwidth-bound custom operators at Stable Diffusion's shapes, float16, beside torch and a plain copy.

    python scripts/bench_ops.py --arch sm_90 --out results/ops_bandwidth_sm_90.md

Every engine runs in a CUDA graph over as many sets of buffers as exceed the cache several times, so launch costs and
cache hits are the same for all. Bytes are those an operator must move: each input and output once. "copy" moves the
same number of bytes in the same way and is the limit; "tuned" is the candidate that the library's tuner chose.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F

from custom_ops.gpu import GpuLibrary
from custom_ops.op import Case, Operator, load
from sd_ort import ops

OPERATORS = ("group_norm", "skip_group_norm", "bias_split_gelu", "bias_add", "skip_layer_norm")
ROTATED_BYTES = 400e6  # several times the largest cache
Tensors = dict[str, torch.Tensor]


def group_norm(t: Tensors, case: Case) -> torch.Tensor:
    x = t["X"].permute(0, 3, 1, 2)  # channels-last memory, as torch runs a UNet fast
    y = F.silu(F.group_norm(x, int(case.attributes["groups"]), t["gamma"], t["beta"], 1e-5))
    return y.permute(0, 2, 3, 1)


def skip_group_norm(t: Tensors, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    skip = t["skip"] if t["skip"].ndim == 4 else t["skip"][:, None, None, :]
    total = t["X"] + skip
    if "bias" in t:
        total = total + t["bias"]
    return group_norm({**t, "X": total}, case), total


def bias_split_gelu(t: Tensors, case: Case) -> torch.Tensor:
    left, right = (t["X"] + t["bias"]).chunk(2, -1)
    return left * F.gelu(right)


def bias_add(t: Tensors, case: Case) -> torch.Tensor:
    return t["X"] + t["bias"] + t["skip"]


def skip_layer_norm(t: Tensors, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    total = t["input"] + t["skip"] + t["bias"]
    return F.layer_norm(total, total.shape[-1:], t["gamma"], t["beta"], 1e-5), total


TORCH: dict[str, Callable[[Tensors, Case], object]] = {
    "group_norm": group_norm,
    "skip_group_norm": skip_group_norm,
    "bias_split_gelu": bias_split_gelu,
    "bias_add": bias_add,
    "skip_layer_norm": skip_layer_norm,
}


def microseconds(launch: Callable[[int, int], None], sets: int) -> float:
    """Median time of one launch(set, stream), out of a graph that goes twice through the sets."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for index in range(min(sets, 3)):
            launch(index, stream.cuda_stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    count = max(2 * sets, 20)
    with torch.cuda.graph(graph, stream=stream):
        for index in range(count):
            launch(index % sets, stream.cuda_stream)
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / count)
    return sorted(times[2:])[len(times[2:]) // 2]


def allocate(operator: Operator, case: Case) -> Tensors:
    tensors = {}
    for name, shape in case.inputs.items():
        dtype = torch.float32 if name in operator.parameters else torch.float16
        tensors[name] = torch.randn(shape, device="cuda", dtype=dtype)
    return tensors


def measure(library: GpuLibrary, operator: Operator, case: Case, with_compiler: bool) -> dict[str, float | str]:
    """Microseconds by engine, the bytes moved, and the tuned candidate's name."""
    shapes = operator.output_shapes(case)
    moved = 2 * (sum(prod(shape) for shape in case.inputs.values()) + sum(prod(shape) for shape in shapes.values()))
    sets = max(2, int(ROTATED_BYTES / moved))
    inputs = [allocate(operator, case) for _ in range(sets)]
    outputs = [
        {name: torch.empty(shape, device="cuda", dtype=torch.float16) for name, shape in shapes.items()}
        for _ in range(sets)
    ]
    params = [
        operator.params(case, "float16", {name: t.data_ptr() for name, t in (ins | outs).items()})
        for ins, outs in zip(inputs, outputs, strict=True)
    ]
    number = library.operator(operator.name, params[0])
    library.tune(number, params[0], torch.cuda.current_stream().cuda_stream)
    times: dict[str, float | str] = {"bytes": moved}
    candidates = library.candidates(number)
    best = library.tuning_results()
    tuned = next(row[2] for row in best if row[0] == operator.name and row[1] == signature(library, number, params[0]))
    for label, candidate in (("default", 0), ("tuned", candidates.index(tuned))):
        size = library.workspace_bytes(number, candidate, params[0])
        workspace = torch.empty(max(size, 1), device="cuda", dtype=torch.uint8)

        def ours(index: int, stream: int, candidate: int = candidate, workspace: torch.Tensor = workspace) -> None:
            library.run(number, candidate, params[index], workspace.data_ptr(), stream)

        times[label] = microseconds(ours, sets)
    times["candidate"] = tuned
    function = TORCH[operator.folder]
    same_type = [{name: t.half() for name, t in each.items()} for each in inputs]
    times["eager"] = microseconds(lambda index, stream: void(function(same_type[index], case)), sets)
    if with_compiler:
        torch._dynamo.reset()
        compiled = torch.compile(lambda tensors: function(tensors, case), dynamic=False)
        compiled(same_type[0])
        times["compiled"] = microseconds(lambda index, stream: void(compiled(same_type[index])), sets)
    times["copy"] = copy_time(moved, sets)
    return times


def copy_time(moved: int, sets: int) -> float:
    """Microseconds of a copy that reads and writes `moved` bytes together: by the runtime or a kernel, the faster."""
    pairs = [[torch.zeros(moved // 4, device="cuda", dtype=torch.float16) for _ in range(2)] for _ in range(sets)]
    by_runtime = microseconds(lambda index, stream: void(pairs[index][1].copy_(pairs[index][0])), sets)
    by_kernel = microseconds(lambda index, stream: void(torch.neg(pairs[index][0], out=pairs[index][1])), sets)
    return min(by_runtime, by_kernel)


def signature(library: GpuLibrary, number: int, params: object) -> str:
    import ctypes

    text: bytes = library.c.sd_ort_signature(number, ctypes.addressof(params))  # type: ignore[arg-type]
    return text.decode()


def void(value: object) -> None:
    """Drops what torch returns: the graph's memory pool takes it again."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", required=True, help="sm_90, gfx942, ...: what to build for")
    parser.add_argument("--out", type=Path, required=True, help="Markdown table")
    parser.add_argument("--operators", nargs="*", default=OPERATORS)
    parser.add_argument("--compiled", type=int, default=100, help="cases an operator that torch.compile runs too")
    options = parser.parse_args()
    library = GpuLibrary(ops.build_gpu(options.arch))
    peak = 2**32 / copy_time(2**32, 1) / 1e3
    lines = [
        f"# Bandwidth-bound operators on {torch.cuda.get_device_name()} ({options.arch}), float16",
        "",
        f"Copy of 2 GiB: {peak:.0f} GB/s, read and written. Microseconds a call; torch {torch.__version__}.",
        "",
        "| operator | case | MB | copy | tuned | default | compiled | eager | GB/s | of copy | of peak | candidate |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    print("\n".join(lines), flush=True)
    for folder in options.operators:
        operator = load(folder)
        for index, case in enumerate(case for case in operator.cases if case.benchmark):
            t = measure(library, operator, case, index < options.compiled)
            moved, tuned = float(t["bytes"]), float(t["tuned"])
            engines = ("copy", "tuned", "default", "compiled", "eager")
            times = [f"{float(t[engine]):.1f}" if engine in t else "-" for engine in engines]
            rate = moved / tuned / 1e3
            shares = [f"{rate:.0f}", f"{float(t['copy']) / tuned:.0%}", f"{rate / peak:.0%}"]
            cells = [operator.name, case.name, f"{moved / 1e6:.1f}", *times, *shares, str(t["candidate"])]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
            torch.cuda.empty_cache()
            options.out.parent.mkdir(exist_ok=True, parents=True)
            options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
