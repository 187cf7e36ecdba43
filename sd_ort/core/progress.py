"""Progress: the callback that receives lines, and the progress bar of a sampling loop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

ProgressCallback = Callable[[str], None]


def ignore_progress(line: str) -> None:
    """Discard a progress line."""


def print_line(line: str) -> None:
    print(f"sd-ort: {line}", file=sys.stderr, flush=True)


announce = cache(print_line)  # once per process


@contextmanager
def step_bar(steps: Iterable[Any], is_visible: bool) -> Iterator[Any]:
    """Context manager of a progress bar over `steps`, which it yields.

    An exit or an interrupt closes the bar, so that later output starts on a new line. tqdm's constructor draws, and an
    interrupt meanwhile leaves a bar that nobody closes: with a delay, here shorter than its clock can tell, it does
    not, and the first drawing comes once the bar is in `with`.
    """
    from tqdm import tqdm  # tqdm.auto imports asyncio

    with tqdm(steps, disable=not is_visible, unit="step", delay=1e-9) as bar:
        bar.refresh()
        yield bar
