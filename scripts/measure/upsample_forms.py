#!/usr/bin/env python3
"""Three ways to convolve a doubled image, timed in torch on a GPU: which one should a graph be given?

    python scripts/measure/upsample_forms.py [--out results/upsample_forms.md]

The 3 x 3 convolution of the doubled image; a transposed convolution 4 x 4 of the image with stride 2 (a data gradient,
to cuDNN); the convolution 2 x 2 of the image with four times the filters (`fusion_passes/lower/subpixel_conv.py`).
All in float16, channels last, without a bias, for which torch launches a kernel of its own. The first needs the doubled
image made before it, the last its result shuffled: bench_ops.py times UpsampleNearest and SubpixelShuffle.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F

from fusion_passes import weight_recipes as recipes
from sd_ort.runtime import machine

# What it is in, batch, height and width before it is doubled, channels.
SIZES = (
    ("SD 1.5", 2, 8, 1280), ("SD 1.5", 2, 16, 1280), ("SD 1.5", 2, 32, 640), ("SDXL", 2, 32, 1280),
    ("SDXL", 2, 64, 640), ("VAE", 1, 64, 512), ("VAE", 1, 128, 512), ("VAE", 1, 256, 256),
)  # fmt: skip
CALLS = 30


def microseconds(call: Callable[[], torch.Tensor]) -> float:
    """The least time of a call, of five graphs of `CALLS`."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(5):
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / CALLS * 1e3)
    return min(times)


def transposed(filters: torch.Tensor) -> torch.Tensor:
    """(4 M, C, 2, 2), the filters of the four parities, as those (C, M, 4, 4) of a transposed convolution."""
    count, channels = filters.shape[0] // 4, filters.shape[1]
    phases = filters.reshape(2, 2, count, channels, 2, 2)
    made = filters.new_empty(channels, count, 4, 4)
    for p in (0, 1):
        for q in (
            0,
            1,
        ):  # row 2 i + p of the result reads tap a of row i + p + a - 1: that of the four which lands there
            for a in (0, 1):
                for b in (0, 1):
                    made[:, :, 3 - p - 2 * a, 3 - q - 2 * b] = phases[p, q, :, :, a, b].T
    return made


def row(label: str, batch: int, size: int, channels: int) -> str:
    """A line of the table."""
    x = torch.randn(batch, channels, size, size)
    w = torch.randn(channels, channels, 3, 3) / (3 * channels**0.5)
    small = torch.from_numpy(recipes.subpixel_phases(None, w.permute(0, 2, 3, 1).numpy())).permute(0, 3, 1, 2)
    given = [x, F.interpolate(x, scale_factor=2.0), w, transposed(small), small]
    if size == SIZES[0][2]:
        same = F.conv2d(given[1], w, padding=1) - F.conv_transpose2d(x, given[3], stride=2, padding=1)
        assert float(same.abs().max()) < 1e-4
    x, doubled, w, wide, small = (
        tensor.to("cuda", torch.float16, memory_format=torch.channels_last) for tensor in given
    )
    times = [
        microseconds(lambda: F.conv2d(doubled, w, padding=1)),
        microseconds(lambda: F.conv_transpose2d(x, wide, stride=2, padding=1)),
        microseconds(lambda: F.conv2d(x, small, padding=1)),
    ]
    return f"| {label}, {batch} x {size} x {size} x {channels} | " + " | ".join(f"{time:.1f}" for time in times) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/upsample_forms.md"))
    out: Path = parser.parse_args().out
    torch.backends.cudnn.benchmark = True
    torch.set_grad_enabled(False)
    head = ["3 x 3 of the doubled image", "transposed 4 x 4", "2 x 2, four times the filters"]
    where = f"{torch.cuda.get_device_name()}, {machine.commit()}."
    lines = ["# A convolution of a doubled image, three ways", "", where, ""]
    lines += [f"| microseconds | {' | '.join(head)} |", "|---|---:|---:|---:|"]
    for label, batch, size, channels in SIZES:
        lines.append(row(label, batch, size, channels))
        print(lines[-1], flush=True)
    out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
