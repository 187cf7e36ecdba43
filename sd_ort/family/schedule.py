"""Schedulers as numbers: what a scheduler does between two UNet calls, as a matrix.

A scheduler without randomness and clipping (Euler, Heun, DDIM at eta 0, PNDM, DPM-Solver, UniPC, ...) only ever adds up
what it has: the latents before step i are a weighted sum of the first latents x and the noise predictions so far,

    latents_i = weights[i, 0] x + sum_k weights[i, k + 1] noise_k        (weights[i, k + 1] = 0 for k >= i)

The weights are found by running the scheduler on unit vectors, so no formula of any scheduler is repeated here. With
them a graph of three operators takes the place of the scheduler, on the device or inside a model.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sd_ort.core.errors import InputError


@dataclass(frozen=True)
class LinearSchedule:
    """T steps: `timesteps` (T,), `scales` (T,) of the UNet's input, `weights` (T + 1, T + 1); all float32."""

    timesteps: np.ndarray
    scales: np.ndarray
    weights: np.ndarray


def linear_schedule(scheduler: Any, timesteps: torch.Tensor, initial: float = 1.0) -> LinearSchedule:
    """The schedule of a diffusers scheduler after `set_timesteps`, over `timesteps` (all of its own, or its last ones).

    `initial`: factor of the first latents, `init_noise_sigma` when they are plain noise. The scheduler is not changed.
    Raises InputError for one that draws random numbers or clips, and so is not linear.
    """
    count = len(timesteps)
    unit = torch.eye(count + 1).reshape(count + 1, 1, count + 1, 1, 1)
    numbers = 3 * torch.randn(count + 1, 1, 8, 1, 1, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng(devices=[]):  # one that draws is refused, and must not have used up the caller's numbers
        states, scales = _run(scheduler, timesteps, unit, initial)
        tried, _ = _run(scheduler, timesteps, numbers, initial)
    weights = states.reshape(count + 1, count + 1)
    expected = (weights @ numbers.reshape(count + 1, -1)).reshape(tried.shape)
    if not torch.allclose(tried, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())):
        raise InputError(
            f"{type(scheduler).__name__} draws random numbers or clips (clip_sample), so it cannot become "
            "part of a graph: use euler, dpmsolver, unipc or PNDM."
        )
    return LinearSchedule(timesteps.float().numpy(), scales.numpy(), weights.numpy())


def _run(
    scheduler: Any, timesteps: torch.Tensor, sources: torch.Tensor, initial: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents before each step and after the last, and the input scales, with `sources` (T + 1, 1, C, 1, 1) as the
    first latents and the noise predictions."""
    probe = copy.deepcopy(scheduler)
    latents = sources[0] * initial
    states, scales = [latents], []
    for index, timestep in enumerate(timesteps):
        scales.append(torch.as_tensor(probe.scale_model_input(torch.ones(1, 1, 1, 1), timestep)).reshape(()).float())
        latents = probe.step(sources[index + 1], timestep, latents).prev_sample.float()
        states.append(latents)
    return torch.stack(states), torch.stack(scales)
