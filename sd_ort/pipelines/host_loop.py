"""The sampling loop on the host: diffusers' scheduler between two runs of the UNet, in float32 torch."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch

from sd_ort.core.progress import step_bar
from sd_ort.pipelines.denoiser import Denoiser
from sd_ort.pipelines.request import Request
from sd_ort.pipelines.sampling_job import Kept


@torch.no_grad()
def denoise(
    pipeline: Any,
    first: np.ndarray,
    timesteps: torch.Tensor,
    denoiser: Denoiser,
    request: Request,
    channels: np.ndarray | None,
    kept: Kept | None,
) -> np.ndarray:
    """The latents (B, C, h, w) after the last step. With guidance the UNet sees 2B rows: negative, then positive.

    `pipeline`: what callbacks are given, with `num_timesteps`; one that sets `_interrupt`, as in diffusers, ends the
    loop. `channels`, `kept`: see `pipeline.sampling`.
    """
    vars(pipeline).pop("_interrupt", None)
    pipeline.num_timesteps = len(timesteps)
    scheduler, options, latents = request.scheduler, _step_options(request), torch.from_numpy(first)
    with step_bar(timesteps, request.progress) as bar:
        for index, timestep in enumerate(bar):
            sample = scheduler.scale_model_input(latents, timestep)
            if channels is not None:
                sample = torch.cat([sample, torch.from_numpy(channels)], 1)
            if request.guidance is None:
                noise = denoiser(index, sample)
            else:
                noise = guided(denoiser(index, torch.cat([sample, sample])), request)
            latents = scheduler.step(noise, timestep, latents, **options).prev_sample
            if kept is not None:
                latents = torch.from_numpy(kept.after_step(latents.numpy(), index))
            if request.callback_on_step_end is not None:
                changed = request.callback_on_step_end(pipeline, index, timestep, {"latents": latents}) or {}
                latents = changed.get("latents", latents)
                if vars(pipeline).pop("_interrupt", False):
                    break
    made: np.ndarray = latents.numpy()
    return made


def guided(noise: torch.Tensor, request: Request) -> torch.Tensor:
    """The prediction of 2B rows, negative first -> the guided one of B rows.

    `guidance_rescale` gives it back some of the positive prediction's deviation (Lin et al., 2023, section 3.4).
    """
    assert request.guidance is not None
    negative, positive = noise.chunk(2)
    made = negative + request.guidance * (positive - negative)
    if not request.guidance_rescale:
        return made
    axes = tuple(range(1, made.ndim))
    rescaled = made * (positive.std(axes, keepdim=True) / made.std(axes, keepdim=True))
    return request.guidance_rescale * rescaled + (1 - request.guidance_rescale) * made


def _step_options(request: Request) -> dict[str, Any]:
    """What this scheduler's step takes of `eta` (DDIM) and `generator` (ancestral and SDE schedulers)."""
    takes = inspect.signature(request.scheduler.step).parameters
    options = {"eta": request.eta, "generator": request.generator}
    return {name: value for name, value in options.items() if name in takes}
