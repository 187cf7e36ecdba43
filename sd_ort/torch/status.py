"""Counters of this process: operator calls by kernel or fallback, modules that `optimize` replaced, CUDA graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Status:
    """Counts since the start of the process or the last `reset_status`.

    kernels: operator -> calls that a kernel of the operator library ran.
    fallbacks: (operator, reason) -> calls that the torch fallback ran.
    replaced: class name -> modules that `optimize` replaced.
    not_replaced: (class name, reason) -> modules that `optimize` did not replace.
    graphs: (class name, event) -> count. Events: "captured", "replayed", and "replayed for the same prompt" (the
        replays that reused the prompt's keys and values). A replay calls no operators, so it counts none.
    not_captured: (class name, reason) -> model calls that ran without a graph. The first call of each set of input
        shapes is not counted.
    """

    kernels: Mapping[str, int]
    fallbacks: Mapping[tuple[str, str], int]
    replaced: Mapping[str, int]
    not_replaced: Mapping[tuple[str, str], int]
    graphs: Mapping[tuple[str, str], int]
    not_captured: Mapping[tuple[str, str], int]

    @property
    def left_alone(self) -> Mapping[tuple[str, str], int]:
        """Deprecated alias of `not_replaced`."""
        return self.not_replaced

    def __str__(self) -> str:
        lines = [f"{count:6} {name}: sd_ort kernel" for name, count in sorted(self.kernels.items())]
        lines += [f"{count:6} {name}: torch, {reason}" for (name, reason), count in sorted(self.fallbacks.items())]
        lines += [f"{count:6} {name} replaced" for name, count in sorted(self.replaced.items())]
        lines += [f"{count:6} {name} not replaced: {why}" for (name, why), count in sorted(self.not_replaced.items())]
        lines += [f"{count:6} {name} {event} in a CUDA graph" for (name, event), count in sorted(self.graphs.items())]
        lines += [
            f"{count:6} {name} without a CUDA graph: {reason}"
            for (name, reason), count in sorted(self.not_captured.items())
        ]
        return "\n".join(lines) or "No operator has run yet."


kernels: Counter[str] = Counter()
fallbacks: Counter[tuple[str, str]] = Counter()
replaced: Counter[str] = Counter()
not_replaced: Counter[tuple[str, str]] = Counter()
graphs: Counter[tuple[str, str]] = Counter()
not_captured: Counter[tuple[str, str]] = Counter()
_ALL = (kernels, fallbacks, replaced, not_replaced, graphs, not_captured)


def status() -> Status:
    """Return a snapshot of the counters; `print(status())` shows them as a table."""
    return Status(*(dict(counter) for counter in _ALL))  # type: ignore[arg-type]


def reset_status() -> None:
    """Set all counters to zero."""
    for counter in _ALL:
        counter.clear()
