#!/usr/bin/env python3
"""The least time of a transformer's products and attentions when steps follow one another, at the card's power limit.

    python scripts/bench/transformer_floor.py flux-dev flux2-klein-4b sd35-medium:2 --out results/transformers/floor

writes <out>/<preset>_<pixels>.json, from which transformer_table.py takes a line for the preset's section. A preset may
name its rows after a colon (2 with guidance).

Every product and attention of torch's step is recorded; products of one input become one with all their columns. Each
distinct one runs alone, for SECONDS to heat up and twice as long to be timed: torch's linear layer, and each algorithm
that cuBLASLt proposes for our LinearAdd whose short time is within NEAR of the shortest. Those below MIN_SHARE of the
arithmetic count with their short time. The floor is the sum of the shortest times over all calls. At its power limit a
card takes as long for a step as the step's energy divided by that limit, so an engine that runs these kernels and
anything beside them is not faster. Products of fewer than MIN_ROWS rows are left out: they belong to the modulation,
which can be computed before the loop. Weights and activations are random normal numbers.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from custom_ops.libraries import GpuLibrary
from custom_ops.operator_spec import DTYPES
from custom_ops.operators.linear_add.cases import Params
from scripts.bench.bench_transformer_step import FLOAT32_INPUTS, Net, random_inputs, random_model
from scripts.bench.gpu_models import DEVICE, limits
from sd_ort.core.files import write_json
from sd_ort.runtime import machine
from sd_ort.runtime.device_meters import DeviceMeter, Nvml
from sd_ort.runtime.library import CUDA_LIBRARY, library_path

MIN_ROWS = 64
MIN_SHARE = 0.02
SETS = 3  # of buffers in turn, so that none is in the cache
SECONDS = 0.25
NEAR = 1.05
COUNT = 20  # launches of a captured graph


@dataclass(frozen=True)
class Product:
    """(rows, inner) by (inner, columns), with a bias."""

    rows: int
    inner: int
    columns: int

    @property
    def tflop(self) -> float:
        return 2 * self.rows * self.inner * self.columns / 1e12


@dataclass(frozen=True)
class Attention:
    """Query (batch, heads, tokens, head size), keys and values (batch, kv_heads, keys, head size)."""

    query: tuple[int, ...]
    key: tuple[int, ...]

    @property
    def tflop(self) -> float:
        return 4 * prod(self.query) * self.key[2] / 1e12


class Recorder(TorchDispatchMode):
    """Counts the products and attentions of a call of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[Product | Attention]()
        self.pending: tuple[torch.Tensor, Product] | None = None  # input and product that later ones may join

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name in ("mm", "addmm"):
            self.add_product(*args[-2:])
        elif name.startswith("_scaled_dot_product"):
            self.calls[Attention(tuple(args[0].shape), tuple(args[1].shape))] += 1
        return function(*args, **kwargs or {})

    def add_product(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Join a product with the one before if both have the same input."""
        columns = weight.shape[1]
        if self.pending is not None:
            before, product = self.pending
            if before.data_ptr() == x.data_ptr() and before.shape == x.shape:
                columns += product.columns
            else:
                self.finish()
        self.pending = x, Product(x.shape[0], x.shape[1], columns)

    def finish(self) -> Counter[Product | Attention]:
        """Count the product that nothing joins any more; return all counts."""
        if self.pending is not None and self.pending[1].rows >= MIN_ROWS:
            self.calls[self.pending[1]] += 1
        self.pending = None
        return self.calls


def record(preset: str, pixels: int, rows: int) -> Counter[Product | Attention]:
    """Return how often a step of torch's model computes each product and attention."""
    model, inputs = random_model(preset), random_inputs(preset, pixels, rows)
    if DEVICE == "cuda":
        model.set_attention_backend("_native_cudnn")
    net, recorder = Net(model, list(inputs)), Recorder()
    with torch.no_grad(), recorder:
        net(*(value if name in FLOAT32_INPUTS else value.bfloat16() for name, value in inputs.items()))
    return recorder.finish()


class Timer:
    """Microseconds of a launch, alone and after others, by graph replay."""

    def __init__(self, launch: Callable[[int, int], object]) -> None:
        """`launch`: takes the number of a set of buffers and a stream."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for index in range(SETS):
                launch(index, stream.cuda_stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            for index in range(COUNT):
                launch(index % SETS, stream.cuda_stream)
        self.replay(1)
        self.short = min(self.replay(1) for _ in range(2))

    def replay(self, times: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3 / times / COUNT

    def steady(self, meter: DeviceMeter) -> tuple[float, float]:
        """Return microseconds and watts of launches behind others."""
        times = max(1, int(SECONDS * 1e6 / self.short / COUNT))
        self.replay(times)
        begun, joules = time.perf_counter(), meter.energy_J() or 0.0
        microseconds = self.replay(2 * times)  # NVML's counter moves ten times a second
        return microseconds, ((meter.energy_J() or 0.0) - joules) / (time.perf_counter() - begun)


def product_launches(product: Product, library: GpuLibrary) -> dict[str, Callable[[int, int], object]]:
    """Return launches of torch's linear layer and of cuBLASLt's algorithms for LinearAdd."""

    def matrices(rows: int, columns: int) -> list[torch.Tensor]:
        return [torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16) for _ in range(SETS)]

    x, y = matrices(product.rows, product.inner), matrices(product.rows, product.columns)
    w = [each / product.inner**0.5 for each in matrices(product.inner, product.columns)]
    bias = torch.randn(product.columns, device=DEVICE, dtype=torch.bfloat16)
    transposed = [each.t().contiguous() for each in w]
    params = [
        Params(
            dtype=DTYPES["bfloat16"][0], x=x[i].data_ptr(), weight=w[i].data_ptr(), bias=bias.data_ptr(), skip=0,
            y=y[i].data_ptr(), rows=product.rows, inner=product.inner, columns=product.columns, gelu=0,
        ) for i in range(SETS)
    ]  # fmt: skip
    number = library.operator("LinearAdd", params[0])
    launches: dict[str, Callable[[int, int], object]] = {
        "torch": lambda index, stream: torch.nn.functional.linear(x[index], transposed[index], bias)
    }
    for candidate, name in enumerate(library.candidates(number)):
        if not name.startswith("blas_lt") or not library.is_supported(number, candidate, params[0]):
            continue
        size = max(library.workspace_bytes(number, candidate, params[0]), 1)
        workspace = torch.empty(size, device=DEVICE, dtype=torch.uint8)

        def launch(
            index: int, stream: int, candidate: int = candidate, workspace: torch.Tensor = workspace, _: Any = (w, y)
        ) -> None:  # `_`: the buffers live as long as the launch
            library.run(number, candidate, params[index], workspace.data_ptr(), stream)

        launches[name] = launch
    return launches


def attention_launches(attention: Attention) -> dict[str, Callable[[int, int], object]]:
    """Return cuDNN's launch by torch, tokens beside one another as a model's products write them."""

    def tensors(shape: tuple[int, ...]) -> list[torch.Tensor]:
        batch, heads, tokens, size = shape
        token_major = [
            torch.randn(batch, tokens, heads, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(SETS)
        ]
        return [each.transpose(1, 2) for each in token_major]

    query, key, value = tensors(attention.query), tensors(attention.key), tensors(attention.key)

    def launch(index: int, stream: int) -> object:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                query[index], key[index], value[index], enable_gqa=attention.query[1] != attention.key[1]
            )

    return {"cuDNN": launch}


def measure(call: Product | Attention, library: GpuLibrary, meter: DeviceMeter, steady: bool) -> dict[str, Any]:
    """Return the fastest launch of a call, behind others if `steady`: its name, microseconds and watts."""
    launches = product_launches(call, library) if isinstance(call, Product) else attention_launches(call)
    timers = {name: Timer(launch) for name, launch in launches.items()}
    fastest = min(timers, key=lambda name: timers[name].short)
    facts = {"tflop": call.tflop, "short_us": timers[fastest].short}
    if not steady:
        return {"by": fastest, "us": timers[fastest].short, **facts}
    times = {
        name: timer.steady(meter)
        for name, timer in timers.items()
        if timer.short <= NEAR * timers[fastest].short or name == "torch"
    }
    best = min(times, key=lambda name: times[name])
    torch_us = {"torch_us": times["torch"][0]} if "torch" in times else {}
    return {"by": best, "us": times[best][0], "watts": round(times[best][1]), **torch_us, **facts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="+", metavar="PRESET[:ROWS]")
    parser.add_argument("--pixels", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=Path("results/transformers/floor"))
    options = parser.parse_args()
    path = library_path(CUDA_LIBRARY)
    if path is None:
        raise SystemExit("Build the operators first: sd-ort build-ops --cuda sm_90.")
    library, meter = GpuLibrary(path), Nvml()
    for each in options.presets:
        preset, _, rows = each.partition(":")
        calls = record(preset, options.pixels, int(rows or 1))
        torch.cuda.empty_cache()
        total = sum(call.tflop * count for call, count in calls.items())
        table: list[dict[str, Any]] = []
        for call, count in sorted(calls.items(), key=lambda item: -item[0].tflop * item[1]):
            row = measure(call, library, meter, steady=call.tflop * count >= MIN_SHARE * total)
            table.append({"kind": type(call).__name__, **vars(call), "count": count, **row})
            print(table[-1], flush=True)
        floor = sum(row["count"] * row["us"] for row in table) / 1e3
        print(f"{preset}: {floor:.1f} ms", flush=True)
        facts = {"commit": machine.commit(), "machine": machine.machine(), "versions": machine.versions()}
        write_json(
            options.out / f"{preset}_{options.pixels}.json",
            {"preset": preset, "pixels": options.pixels, "rows": int(rows or 1), **facts, "limits": limits(),
             "floor_ms": floor, "calls": table},
        )  # fmt: skip


if __name__ == "__main__":
    main()
