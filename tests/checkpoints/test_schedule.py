"""Schedulers as tables: what diffusers' schedulers do, and how many steps they read."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

import sd_ort
from sd_ort.checkpoints.linear_schedule import LinearSchedule, fixed_schedule
from sd_ort.checkpoints.schedule import DiffusersTimetable, NonlinearSchedule, linear_schedule
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


def test_a_step_that_reads_nothing() -> None:
    """IPNDM's only step returns zeros, whatever it reads."""
    schedule = DiffusersTimetable(make_scheduler(MODEL_DIR, "ipndm"), 1, 0.0).schedule(0, 1)
    assert isinstance(schedule, LinearSchedule)
    assert not schedule.weights[-1].any()


def test_clipping_makes_an_infinite_step_finite() -> None:
    """DDPM divides by 0 without signal in the first step, and clips the result: its steps run as diffusers'."""
    options: dict[str, Any] = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    schedule = DiffusersTimetable(diffusers.DDPMScheduler(**options, clip_sample=True), 9, 0.0).schedule(0, 9)
    assert isinstance(schedule, NonlinearSchedule)
    with pytest.raises(InputError, match="computes NaN"):
        DiffusersTimetable(diffusers.DDPMScheduler(**options, clip_sample=False), 9, 0.0).schedule(0, 9)


def test_what_a_scheduler_rejects_is_one_line() -> None:
    """As objects of the caller, which are not tried before. Another class may raise anything."""

    class Broken(diffusers.EulerDiscreteScheduler):  # type: ignore[misc]
        def set_timesteps(self, *arguments: Any, **options: Any) -> None:
            raise KeyError("a key")

    for scheduler, reason in (
        (diffusers.EulerDiscreteScheduler(prediction_type="nope"), r"\(prediction_type given as nope must be one of"),
        (diffusers.DDIMScheduler(trained_betas=[0.1, 0.2]), r"\(index 750 is out of bounds"),
        (Broken(), "'a key'"),
    ):
        with pytest.raises(InputError, match=f"{type(scheduler).__name__} cannot take .*{reason}"):
            DiffusersTimetable(scheduler, 4, 0.0).schedule(0, 4)


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


class OwnNoise(diffusers.EulerDiscreteScheduler):
    """A scheduler that samples its own noise as DPMSolverSDEScheduler does, which needs torchsde."""

    noise_sampler = None

    def __init__(self, *arguments: Any, noise_sampler_seed: int | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.noise_sampler_seed = noise_sampler_seed

    def step(self, prediction: Any, timestep: Any, sample: torch.Tensor, return_dict: bool = True) -> Any:  # type: ignore[override]
        if self.noise_sampler is None:
            seed = self.noise_sampler_seed
            seed = int(torch.randint(0, 2**31, [])) if seed is None else seed
            self.noise_sampler = torch.Generator().manual_seed(seed)
        noise = 0.1 * torch.randn(sample.shape, generator=self.noise_sampler)
        return super().step(prediction, timestep, sample + noise, return_dict=return_dict)


def test_a_scheduler_that_samples_its_own_noise_is_run_as_diffusers_does(small_export: Path) -> None:
    options = {"num_inference_steps": 2, "output_type": "latent"}
    pipe = sd_ort.StableDiffusionPipeline.from_pretrained(small_export, "cpu")
    config = dict(pipe.scheduler.config)

    def draw(generator: Any, seed: int | None = None) -> np.ndarray:
        pipe.scheduler = OwnNoise.from_config(config, noise_sampler_seed=seed)
        return np.asarray(pipe("a red circle", generator=generator, **options).images)

    timetable = DiffusersTimetable(OwnNoise.from_config(config), 2, 0.0)
    with pytest.raises(InputError, match="samples its own noise"):
        linear_schedule(timetable.scheduler, timetable.scheduler.timesteps)
    generator, other = (torch.Generator().manual_seed(3) for _ in range(2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        first = draw(generator)
        torch.randn(first.shape, generator=other)  # the latents alone come from the generator
        assert torch.equal(generator.get_state(), other.get_state())
        assert not np.array_equal(draw(torch.Generator().manual_seed(3)), first)
        torch.manual_seed(5)
        assert np.array_equal(draw(torch.Generator().manual_seed(3)), first)
    assert np.array_equal(draw(3, seed=8), draw(3, seed=8))
    assert np.array_equal(draw(3), draw(3, seed=3)), "an integer is also the seed of the scheduler's noise"
