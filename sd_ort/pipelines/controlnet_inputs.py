"""What the ControlNets of a call are shown, and how much each of them says at each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.pipelines.images import for_batch, preprocess
from sd_ort.pipelines.request import Request

# ControlNet output -> UNet input, where their names differ.
MIDDLE = {"mid_block_res_sample": "mid_block_additional_residual"}


@dataclass
class ControlNetInput:
    """Of one ControlNet: its component's `name`, image (rows, 3, H, W) in 0..1, the factor of its residuals at each
    step. `guess`: it sees the positive rows alone and its outer residuals count less, as diffusers' guess_mode."""

    name: str
    image: np.ndarray
    scales: list[float]
    guess: bool = False


def names(components: Any) -> list[str]:
    """The ControlNets of a pipeline: controlnet, controlnet_2, ..."""
    found = ["controlnet"] if "controlnet" in components else []
    while found and (following := f"controlnet_{len(found) + 1}") in components:
        found.append(following)
    return found


def controls(request: Request, there: Sequence[str], steps: int) -> list[ControlNetInput]:
    """Of each ControlNet in `there` that has an image; [] without one. Raises InputError where counts differ."""
    if request.control_image is None:
        return []
    if not there:
        raise InputError("this folder has no ControlNet for the control image: export with --controlnet.")
    count = len(there)
    images = [request.control_image] if count == 1 else list(request.control_image)
    if len(images) != count:
        raise InputError(f"{len(images)} control images for {count} ControlNets: give one each.")
    scale = request.controlnet_conditioning_scale
    scales = _each(1.0 if scale is None else scale, count, "controlnet_conditioning_scale")
    starts = _each(request.control_guidance_start, count, "control_guidance_start")
    ends = _each(request.control_guidance_end, count, "control_guidance_end")
    made = []
    for name, image, factor, start, end in zip(there, images, scales, starts, ends, strict=True):
        if not 0 <= start < end <= 1:
            raise InputError(f"control_guidance from {start} to {end} is no part of the schedule between 0 and 1.")
        height, width = request.size
        shown = for_batch(preprocess(image, height, width, signed=False), request, "control images")
        rows = shown if request.guidance is None or request.guess_mode else np.concatenate([shown, shown])
        by_step = [factor * (i / steps >= start and (i + 1) / steps <= end) for i in range(steps)]
        made.append(ControlNetInput(name, rows, by_step, request.guess_mode))
    return made


def _each(given: float | Sequence[float], count: int, what: str) -> list[float]:
    listed = [float(each) for each in given] if isinstance(given, Sequence) else [float(given)] * count
    if len(listed) != count:
        raise InputError(f"{what} has {len(listed)} numbers for {count} ControlNets: give one, or one each.")
    return listed
