"""What ran so far: calls by operator, our kernel or torch and why; modules that `optimize` replaced or left alone; CUDA
graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Status:
    """Counts since the start of the process or the last `reset_status`.

    `kernels`: calls by operator that one of our kernels ran. `fallbacks`: calls by (operator, reason) that the plain
    torch expression ran. `replaced` and `left_alone`: modules by class name, or (class name, reason), of `optimize`.
    `graphs`: how often a model, by class name, was "captured" in a CUDA graph and "replayed", and how many of these
    were "replayed for the same prompt", whose keys and values were not made again; replays call no operators and count
    none. `not_captured`: calls of such a model by (class name, reason) that ran without a graph; the first of its
    shapes is not counted.
    """

    kernels: Mapping[str, int]
    fallbacks: Mapping[tuple[str, str], int]
    replaced: Mapping[str, int]
    left_alone: Mapping[tuple[str, str], int]
    graphs: Mapping[tuple[str, str], int]
    not_captured: Mapping[tuple[str, str], int]

    def __str__(self) -> str:
        lines = [f"{count:6} {name}: our kernel" for name, count in sorted(self.kernels.items())]
        lines += [f"{count:6} {name}: torch, {why}" for (name, why), count in sorted(self.fallbacks.items())]
        lines += [f"{count:6} {name} replaced" for name, count in sorted(self.replaced.items())]
        lines += [f"{count:6} {name} left alone: {why}" for (name, why), count in sorted(self.left_alone.items())]
        lines += [f"{count:6} {name} {what} in a CUDA graph" for (name, what), count in sorted(self.graphs.items())]
        lines += [
            f"{count:6} {name} without a graph: {why}" for (name, why), count in sorted(self.not_captured.items())
        ]
        return "\n".join(lines) or "nothing ran yet"


kernels: Counter[str] = Counter()
fallbacks: Counter[tuple[str, str]] = Counter()
replaced: Counter[str] = Counter()
left_alone: Counter[tuple[str, str]] = Counter()
graphs: Counter[tuple[str, str]] = Counter()
not_captured: Counter[tuple[str, str]] = Counter()
_ALL = (kernels, fallbacks, replaced, left_alone, graphs, not_captured)


def status() -> Status:
    """What ran since the start of the process or the last `reset_status`; `print(status())` is a table."""
    return Status(*(dict(counter) for counter in _ALL))  # type: ignore[arg-type]


def reset_status() -> None:
    """Count from zero again."""
    for counter in _ALL:
        counter.clear()
