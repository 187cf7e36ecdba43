"""Images and conditioning scales of the ControlNets of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.pipelines.images import as_image, for_batch, preprocess
from sd_ort.pipelines.request import Request

# ControlNet output -> UNet input, where their names differ.
MIDDLE = {"mid_block_res_sample": "mid_block_additional_residual"}


@dataclass
class ControlNetInput:
    """Inputs of one ControlNet.

    `name`: its component. `image` (rows, 3, H, W) in 0..1. `scales`: the factor of its residuals in each step. `guess`:
    diffusers' guess_mode, where it reads the positive rows only and its outer residuals are scaled down.
    """

    name: str
    image: np.ndarray
    scales: list[float]
    guess: bool = False


def names(components: Any) -> list[str]:
    """Return the names of a pipeline's ControlNets: controlnet, controlnet_2, ..."""
    names = ["controlnet"] if "controlnet" in components else []
    while names and (following := f"controlnet_{len(names) + 1}") in components:
        names.append(following)
    return names


def by_controlnet(image: Any, count: int) -> Any:
    """Return `readable` control images. A list of lists, each with one prompt's images, becomes one of each ControlNet.

    Raises InputError if a prompt's list does not have one image for each ControlNet.
    """
    images = as_image(image, "control image")
    if not isinstance(images, list) or not isinstance(images[0], list):
        return images
    if any(not isinstance(each, list) or len(each) != count for each in images):
        raise InputError(f"a list of lists of control images has one list per prompt, of {count} images each.")
    columns = [list(column) for column in zip(*images, strict=True)]
    return columns if count > 1 else columns[0]


def controls(request: Request, controlnets: Sequence[str], steps: int) -> list[ControlNetInput]:
    """Return the inputs of all ControlNets; [] without an image. Raises InputError if counts differ."""
    if request.control_image is None:
        return []
    if not controlnets:
        raise InputError("this folder has no ControlNet for the control image: export with --controlnet.")
    count = len(controlnets)
    images = [request.control_image] if count == 1 else list(request.control_image)
    if len(images) != count:
        raise InputError(f"{len(images)} control images for {count} ControlNets: give one each.")
    scale = request.controlnet_conditioning_scale
    scales = _per_controlnet(1.0 if scale is None else scale, count, "controlnet_conditioning_scale")
    starts = _per_controlnet(request.control_guidance_start, count, "control_guidance_start")
    ends = _per_controlnet(request.control_guidance_end, count, "control_guidance_end")
    inputs = []
    for name, image, factor, start, end in zip(controlnets, images, scales, starts, ends, strict=True):
        if not 0 <= start < end <= 1:
            raise InputError(f"control_guidance from {start} to {end} is no part of the schedule between 0 and 1.")
        height, width = request.size
        pixels = for_batch(preprocess(image, height, width, signed=False), request, "control images")
        copies = 1 if request.guess_mode and not request.is_perturbed else request.rows_per_image
        rows = np.concatenate([pixels] * copies)
        by_step = [factor * (i / steps >= start and (i + 1) / steps <= end) for i in range(steps)]
        inputs.append(ControlNetInput(name, rows, by_step, request.guess_mode))
    return inputs


def _per_controlnet(value: float | Sequence[float], count: int, argument: str) -> list[float]:
    values = [float(number) for number in value] if isinstance(value, Sequence) else [float(value)] * count
    if len(values) != count:
        raise InputError(f"{argument} has {len(values)} numbers for {count} ControlNets: give one, or one each.")
    return values
