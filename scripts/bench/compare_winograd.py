#!/usr/bin/env python3
"""Where Winograd's F(2 x 2, 3 x 3) beats cuDNN's convolutions, timed in torch on a GPU under load.

    python scripts/bench/compare_winograd.py [--out results/compare_winograd.md]

float16, channels last, bias and residual added: torch's convolution (the fastest that cuDNN measured) and our
bias_add; nhwc_winograd by filters that were transformed before; how long that takes. Then of images that are doubled
first, bias added: a transposed convolution by taps that were summed before, and nhwc_winograd. Errors are relative,
against float32. A call has other images and weights than the three before it, so that the cache holds what it would in
a model; a third of a second of calls comes before those that are timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import torch
import torch.nn.functional as F

from sd_ort.core.files import write_text
from sd_ort.runtime import machine
from sd_ort.torch.operators import bias_add, nhwc_winograd, upsample_conv_weight, winograd_filters

Tensor = torch.Tensor

# Batch, height and width, channels, filters: SDXL, SD 1.5, a VAE's.
SIZES = (
    (2, 32, 1280, 1280), (2, 32, 2560, 1280), (2, 32, 640, 1280), (2, 64, 640, 640), (2, 64, 1920, 640),
    (2, 64, 320, 640), (2, 128, 320, 320), (2, 128, 640, 320), (2, 128, 960, 320), (2, 64, 320, 320), (2, 32, 640, 640),
    (2, 16, 1280, 1280), (2, 8, 1280, 1280), (1, 64, 512, 512), (1, 128, 512, 512),
)  # fmt: skip
DOUBLED = ((2, 32, 1280), (2, 64, 640), (2, 8, 1280), (2, 16, 1280), (2, 32, 640), (1, 64, 512), (1, 128, 512))
SETS, CALLS = 4, 20
SECONDS_OF_LOAD, SECONDS = 0.3, 0.1


def microseconds(calls: Iterator[Callable[[], Tensor]]) -> float:
    """A call, of graphs of CALLS, once the GPU's clocks are those of load."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(SETS):
            next(calls)()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            next(calls)()

    def seconds(replays: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    seconds(1)
    once = seconds(1)
    seconds(int(SECONDS_OF_LOAD / once) + 1)
    replays = int(SECONDS / once) + 1
    return seconds(replays) / replays / CALLS * 1e6


def turns(make: Callable[[int], Callable[[], Tensor]]) -> Iterator[Callable[[], Tensor]]:
    return cycle([make(i) for i in range(SETS)])


def image(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").half().to(memory_format=torch.channels_last)


def weights(filters: int, channels: int) -> list[Tensor]:
    return [image(filters, channels, 3, 3) / (9 * channels) ** 0.5 for _ in range(SETS)]


def error(made: Tensor, wanted: Tensor) -> str:
    return f"{float((made.float() - wanted).norm() / wanted.norm()):.2e}"


def added(y: Tensor, bias: Tensor, skip: Tensor | None = None) -> Tensor:
    rows = skip if skip is None else skip.permute(0, 2, 3, 1)
    return bias_add(y.permute(0, 2, 3, 1), bias, rows).permute(0, 3, 1, 2)


def row(batch: int, size: int, channels: int, count: int) -> str:
    """A line of the first table."""
    x = [F.silu(image(batch, channels, size, size)) for _ in range(SETS)]
    skip = [image(batch, count, size, size) for _ in range(SETS)]
    w, bias = weights(count, channels), torch.randn(count, device="cuda").half()
    filters = [winograd_filters(each) for each in w]

    def direct(i: int) -> Callable[[], Tensor]:
        return lambda: added(F.conv2d(x[i], w[i], padding=1), bias, skip[i])

    def winograd(i: int) -> Callable[[], Tensor]:
        return lambda: nhwc_winograd(x[i], filters[i], bias, skip[i])

    wanted = F.conv2d(x[0].float(), w[0].float(), bias.float(), padding=1) + skip[0].float()
    times = [
        microseconds(turns(lambda i: lambda: F.conv2d(x[i], w[i], padding=1))),
        microseconds(turns(direct)),
        microseconds(turns(winograd)),
        microseconds(turns(lambda i: lambda: winograd_filters(w[i]))),
    ]
    errors = [error(direct(0)(), wanted), error(winograd(0)(), wanted)]
    return line(f"{batch} x {size} x {size} x {channels} to {count}", times, errors)


def doubled_row(batch: int, size: int, channels: int) -> str:
    """A line of the second table."""
    x = [image(batch, channels, size, size) for _ in range(SETS)]
    w, bias = weights(channels, channels), torch.randn(channels, device="cuda").half()
    filters, taps = [winograd_filters(each, True) for each in w], [upsample_conv_weight(each) for each in w]

    def transposed(i: int) -> Callable[[], Tensor]:
        return lambda: added(F.conv_transpose2d(x[i], taps[i], stride=2, padding=1), bias)

    def winograd(i: int) -> Callable[[], Tensor]:
        return lambda: nhwc_winograd(x[i], filters[i], bias)

    wanted = F.conv2d(F.interpolate(x[0].float(), scale_factor=2), w[0].float(), bias.float(), padding=1)
    times = [microseconds(turns(transposed)), microseconds(turns(winograd))]
    times.append(microseconds(turns(lambda i: lambda: winograd_filters(w[i], True))))
    errors = [error(transposed(0)(), wanted), error(winograd(0)(), wanted)]
    return line(f"{batch} x {size} x {size} x {channels}", times, errors)


def line(label: str, times: list[float], errors: list[str]) -> str:
    made = " | ".join([label, *(f"{time:.1f}" for time in times), *errors])
    print(made, flush=True)
    return f"| {made} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/compare_winograd.md"))
    out: Path = parser.parse_args().out
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    torch.set_grad_enabled(False)
    lines = ["# 3 x 3 convolutions by F(2 x 2, 3 x 3) and by cuDNN", ""]
    lines += [f"Made by `scripts/bench/compare_winograd.py`. {torch.cuda.get_device_name()}, {machine.commit()}.", ""]
    lines += ["| microseconds | convolution | and bias_add | nhwc_winograd | filters | errors: conv2d | winograd |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|", *(row(*each) for each in SIZES), ""]
    lines += ["| of a doubled image, microseconds | transposed | winograd | filters | errors: transposed | winograd |"]
    lines += ["|---|---:|---:|---:|---:|---:|", *(doubled_row(*each) for each in DOUBLED)]
    write_text(out, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
