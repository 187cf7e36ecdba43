"""Steps of an image that is split into bands of rows, one a device (patch parallelism): checks, and what a job says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sd_ort.core.errors import InputError
from sd_ort.pipelines.step_cache import FEWEST_STEPS, takes_few_steps

if TYPE_CHECKING:
    from sd_ort.pipelines.request import Request
    from sd_ort.runtime.components import Components
    from sd_ort.runtime.session import Model

# Steps that compute the whole image on each device: the first ones, which change most, and every so many from there, so
# that the corrections of normalizations and the devices' rows do not drift (results/split_image.md).
WHOLE_STEPS, WHOLE_INTERVAL = 4, 8
ADVICE = "leave split_image (--split-image) out"


@dataclass(frozen=True)
class BandSteps:
    """The steps of a call that compute one of `count` bands of rows, `index`.

    open_model: returns the session of the band's graph. whole_steps: number of first steps that compute all rows, at
    least two; interval: number of steps from one that computes all rows to the next.
    """

    index: int
    count: int
    open_model: Callable[[], Model]
    whole_steps: int = WHOLE_STEPS
    interval: int = WHOLE_INTERVAL

    def is_whole(self, step: int) -> bool:
        """Return whether a step computes all rows."""
        return step < self.whole_steps or step % self.interval == 0


def bands_of(models: Components, guidance: float | None) -> int:
    """Return the number of bands of a call: with guidance, each half of it has half of the devices.

    Raises InputError if the devices cannot be shared out.
    """
    devices = 1 + len(models.peers)
    if guidance is None:
        return devices
    if devices == 2:
        raise InputError(
            "two devices split the guidance of an image exactly: use split_guidance (--split-guidance), or four "
            "devices for its rows, too."
        )
    if devices % 2:
        raise InputError(f"split_image: {devices} devices have no halves for the two of guidance: give an even number.")
    return devices // 2


def check(request: Request, scheduler: str, models: Components, size_multiple: int, edits: Sequence[str]) -> None:
    """Raise InputError for a call whose image cannot be split."""
    bands = bands_of(models, request.guidance)
    if edits:
        raise InputError(f"an image is not split with another graph of the UNet ({', '.join(edits)}): {ADVICE}.")
    if request.batch > 1:
        raise InputError(f"split_image is for one large image at a time, not {request.batch}: {ADVICE}.")
    if request.control_image is not None:
        raise InputError(f"an image with a ControlNet is not split into rows: {ADVICE}, or use split_guidance.")
    if takes_few_steps(request, scheduler):
        raise InputError(f"LCM models take few steps, which differ too much for rows of the last one: {ADVICE}.")
    if request.num_inference_steps < FEWEST_STEPS:
        raise InputError(
            f"{request.num_inference_steps} steps differ too much from each other for rows of the last one: give "
            f"{FEWEST_STEPS} or more, or {ADVICE}."
        )
    height = request.size[0]
    if height % (bands * size_multiple):
        raise InputError(
            f"height {height} has no {bands} bands of whole rows at each level of the UNet: give a multiple of "
            f"{bands * size_multiple}, or {ADVICE}."
        )
