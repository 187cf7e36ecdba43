"""Check calls with patch parallelism: one band of image rows per device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sd_ort.core.errors import InputError
from sd_ort.pipelines.step_cache import FEWEST_STEPS, takes_few_steps

if TYPE_CHECKING:
    from sd_ort.pipelines.request import Request
    from sd_ort.runtime.components import Components

ADVICE = "leave split_image (--split-image) out"


def bands_of(models: Components, guidance: float | None) -> int:
    """Return the number of bands of a call. With guidance, each half has half of the devices.

    Raises InputError if the devices cannot be shared out.
    """
    devices = 1 + len(models.placement.peers)
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
    """Raise InputError for a call that does not support patch parallelism."""
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
