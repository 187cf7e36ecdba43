"""Schedulers as tables: what diffusers' schedulers do, and how many steps they read."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from sd_ort.checkpoints.linear_schedule import fixed_schedule
from sd_ort.checkpoints.schedule import DiffusersTimetable, linear_schedule
from sd_ort.checkpoints.schedulers import make_scheduler
from sd_ort.core.errors import InputError
from sd_ort.demo import MODEL_DIR


@pytest.mark.parametrize(
    ("name", "window"),
    [("euler", 1), ("ddim", 1), ("pndm", 5), ("heun", 2), ("dpmsolver", 2), ("unipc", 3), ("deis", 2)],
)
def test_linear_schedule(name: str, window: int) -> None:
    scheduler = make_scheduler(MODEL_DIR, name)
    config = {key: value for key, value in scheduler.config.items() if not key.startswith("_")}
    more = {"skip_prk_steps": True} if name == "pndm" else {}  # as in all folders of Stable Diffusion
    scheduler = type(scheduler).from_config({**config, **more})
    scheduler.set_timesteps(9)
    initial = float(scheduler.init_noise_sigma)
    schedule = linear_schedule(scheduler, scheduler.timesteps).shortened
    assert schedule.coefficients.shape == (len(scheduler.timesteps), window, 2), "it reads more steps than it needs"
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 4, 4, 4, generator=generator)
    history, latents = [latents], latents * initial
    for index, timestep in enumerate(scheduler.timesteps):
        scaled = scheduler.scale_model_input(latents, timestep)
        torch.testing.assert_close(scaled, latents * float(schedule.input_scales[index]))
        history.append(torch.randn(1, 4, 4, 4, generator=generator))
        latents = scheduler.step(history[-1], timestep, latents).prev_sample
    weights = torch.from_numpy(schedule.weights)
    torch.testing.assert_close(
        torch.einsum("k,k...->...", weights[-1], torch.stack(history)), latents, rtol=1e-4, atol=1e-4
    )


def test_random_scheduler_is_refused() -> None:
    timetable = DiffusersTimetable(make_scheduler(MODEL_DIR, "euler_ancestral"), 4, 0.0)
    with pytest.raises(InputError, match="draws random numbers or clips"):
        fixed_schedule(timetable)


def test_schedules_are_remembered() -> None:
    scheduler = make_scheduler(MODEL_DIR, "euler")
    scheduler.set_timesteps(5)
    first = linear_schedule(scheduler, scheduler.timesteps)
    assert linear_schedule(copy.deepcopy(scheduler), scheduler.timesteps.clone()) is first
    config = {key: value for key, value in scheduler.config.items() if not key.startswith("_")}
    other = type(scheduler).from_config({**config, "use_karras_sigmas": True})
    other.set_timesteps(5)
    for changed in (linear_schedule(other, other.timesteps), linear_schedule(scheduler, scheduler.timesteps[1:])):
        assert changed.weights.shape != first.weights.shape or not np.allclose(changed.weights, first.weights)
