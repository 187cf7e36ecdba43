"""Schedules of full and partial UNet steps: partial ones run shallow layers (DeepCache) or one band of image rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sd_ort.runtime.session import OrtModel

# Steps that compute the whole image on each device: the first ones, which change most, and every so many from there, so
# that the corrections of normalizations and the devices' rows do not drift (results/split_image.md).
FULL_STEPS, FULL_INTERVAL = 2, 8


@dataclass(frozen=True)
class ShallowSteps:
    """The shallow steps of a call. open_model: returns the session of the shallow graph, once the full one is open."""

    interval: int
    open_model: Callable[[], OrtModel]

    def is_full(self, index: int) -> bool:
        """Return whether step `index` computes all of the UNet."""
        return index % self.interval == 0


@dataclass(frozen=True)
class BandSteps:
    """The steps of a call that compute one of `count` bands of rows, `index`.

    open_model: returns the session of the band's graph. full_steps: number of first steps that compute all rows, at
    least two; interval: number of steps from one that computes all rows to the next.
    """

    index: int
    count: int
    open_model: Callable[[], OrtModel]
    full_steps: int = FULL_STEPS
    interval: int = FULL_INTERVAL

    def is_full(self, step: int) -> bool:
        """Return whether a step computes all rows."""
        return step < self.full_steps or step % self.interval == 0
