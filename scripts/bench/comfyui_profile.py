"""What a step in ComfyUI's sampler is made of: runs of our graphs, waits, and where the host's time goes."""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from sd_ort.integrations import tensors
from sd_ort.integrations.comfyui.model import DiffusionModel
from sd_ort.integrations.models import TorchComponentSessions
from sd_ort.runtime.bound_run import NO_GRAPH_ID

Draw = Callable[[int], Any]
SHOWN = 14  # functions of the profile


def watched(draw: Draw, steps: int, provider: str) -> dict[str, Any]:
    """One picture of `steps` steps, watched; numbers a step, but captures, which are those of the whole picture.

    Host times are of the picture as it is queued: where they add up to what a step takes, the device waits for the
    host. The profile's own overhead is in none but its own times.
    """
    found = {**_runs(draw, steps), **_times(draw, steps, provider)}
    if provider != "cpu":
        found["waits of torch for the device in a picture"] = _waits(draw, steps)
    return {**found, "host ms by function, profiled": _profile(draw, steps)}


def _runs(draw: Draw, steps: int) -> dict[str, Any]:
    """How often graphs are captured, replayed and run uncaptured, and for how many rows our U-Net is called."""
    counts: Counter[str] = Counter()
    captures, rows = 0, set()
    call, run, empty = TorchComponentSessions.call, tensors.TorchBinding.run, tensors.TorchBinding.__init__

    def called(self: TorchComponentSessions, component: str, given: Any, *more: Any, **options: Any) -> Any:
        counts[f"runs of {component}"] += 1
        if component == "unet":
            rows.add(len(given["sample"]))
        return call(self, component, given, *more, **options)

    def ran(self: tensors.TorchBinding) -> None:
        is_captured = self.graph is not None or self.graph_id != NO_GRAPH_ID
        counts["replays of a captured graph" if is_captured else "runs uncaptured"] += 1
        run(self)

    def bound(self: tensors.TorchBinding, *given: Any, **options: Any) -> None:
        nonlocal captures
        empty(self, *given, **options)
        captures += self.graph_id != NO_GRAPH_ID

    with (
        mock.patch.object(TorchComponentSessions, "call", called),
        mock.patch.object(tensors.TorchBinding, "run", ran),
        mock.patch.object(tensors.TorchBinding, "__init__", bound),
    ):
        draw(steps)
    per_step = {name: round(count / steps, 2) for name, count in sorted(counts.items())}
    return {**per_step, "captures in a picture": captures, "rows of our U-Net": sorted(rows)}


def _times(draw: Draw, steps: int, provider: str) -> dict[str, float]:
    """Ms a step: of the host until all is queued, in our U-Net and in asking for free memory; of the device in our
    U-Net, by its events."""
    from comfy import model_management

    forward, free = DiffusionModel.forward, model_management.get_free_memory
    free_asked: list[float] = []
    ours: list[float] = []
    began: list[float] = []
    marks: list[Any] = []

    def mark() -> None:
        if provider != "cpu":
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()

    def asked(*given: Any, **options: Any) -> Any:
        at = time.perf_counter()
        made = free(*given, **options)
        free_asked.append(time.perf_counter() - at)
        return made

    def predicted(self: DiffusionModel, *given: Any, **options: Any) -> torch.Tensor:
        at = time.perf_counter()
        began.append(at)
        mark()
        made: torch.Tensor = forward(self, *given, **options)
        mark()
        ours.append(time.perf_counter() - at)
        return made

    with (
        mock.patch.object(DiffusionModel, "forward", predicted),
        mock.patch.object(model_management, "get_free_memory", asked),
    ):
        draw(steps)
    found = {"host ms of asking once for free memory": 1e3 * statistics.median(free_asked)}
    found["host ms in our U-Net"] = 1e3 * sum(ours) / steps
    found["host ms from a step to the next"] = 1e3 * (began[-1] - began[0]) / (len(began) - 1)
    if marks:
        torch.cuda.synchronize()
        found["device ms in our U-Net"] = sum(a.elapsed_time(b) for a, b in zip(marks[::2], marks[1::2], strict=True))
        found["device ms in our U-Net"] /= len(began)
        found["device ms from a step to the next"] = marks[0].elapsed_time(marks[-2]) / (len(began) - 1)
    return {name: round(value, 3) for name, value in found.items()}


def _waits(draw: Draw, steps: int) -> dict[str, int]:
    """Where torch waited for the device, and how often."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            draw(steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = Counter(f"{w.filename.rpartition('/')[2]}:{w.lineno}" for w in caught if "synchroniz" in str(w.message))
    return dict(waits.most_common(SHOWN))


def _profile(draw: Draw, steps: int) -> dict[str, float]:
    """Functions by their own time, ms a step."""
    profile = cProfile.Profile()
    profile.runcall(draw, steps)
    stats: Any = pstats.Stats(profile)
    slowest = sorted(stats.stats.items(), key=lambda entry: -entry[1][2])[:SHOWN]
    return {
        f"{file.rpartition('/')[2]}:{line} {name}" if line else name: round(1e3 * own / steps, 3)
        for (file, line, name), (_, _, own, _, _) in slowest
    }
