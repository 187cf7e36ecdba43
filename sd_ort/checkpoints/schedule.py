"""Schedules of diffusers' schedulers. Coefficients of a linear one are found by steps on unit vectors."""

from __future__ import annotations

import copy
import inspect
import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from sd_ort.checkpoints.linear_schedule import LinearSchedule, window_of
from sd_ort.checkpoints.schedulers import REJECTIONS, set_timesteps
from sd_ort.core.errors import InputError, first_line

NOT_IN_A_GRAPH = "it cannot become part of a graph, use euler, dpmsolver, unipc or PNDM there"
MAX_CACHED = 32  # schedules; each took up to some hundred milliseconds to find

_cache: OrderedDict[Any, LinearSchedule] = OrderedDict()
_lock = threading.Lock()


@dataclass(frozen=True)
class NonlinearSchedule:
    """Steps of a scheduler that has no `LinearSchedule` and runs itself.

    reason: why the scheduler is not linear. The other fields are those of LinearSchedule.
    """

    scheduler: Any
    timesteps: torch.Tensor
    eta: float
    init_noise_sigma: float
    image_factors: np.ndarray
    noise_factors: np.ndarray
    reason: str


class NotFiniteScheduleError(InputError):
    """A scheduler whose steps compute NaN or infinity."""


class DiffusersTimetable:
    """A diffusers scheduler after set_timesteps, with the interface of `numpy_schedulers`."""

    def __init__(self, scheduler: Any, steps: int, eta: float, seed: Any = None, **options: Any) -> None:
        """`seed`: of a scheduler that samples its own noise and was made without a seed. `options`: `timesteps`,
        `sigmas` or `original_inference_steps`, as in `set_timesteps`; errors as there. The scheduler is copied."""
        self.scheduler, self.eta = copy.deepcopy(scheduler), eta
        if getattr(self.scheduler, "noise_sampler_seed", seed) is None:
            self.scheduler.noise_sampler_seed = seed
        self.steps = set_timesteps(self.scheduler, steps, **options)
        self.timesteps: np.ndarray = self.scheduler.timesteps.numpy()
        self.order: int = self.scheduler.order
        self.trained: int = self.scheduler.config.num_train_timesteps

    def schedule(self, start: int, stop: int) -> LinearSchedule | NonlinearSchedule:
        """Return the schedule of the steps from `start` to before `stop`.

        Raises InputError for a scheduler that rejects a step, or computes NaN.
        """
        try:
            return self._schedule(start, stop)
        except REJECTIONS as error:
            name = type(self.scheduler).__name__
            raise InputError(f"{name} cannot take these steps ({first_line(error)}): use another scheduler.") from error

    def _schedule(self, start: int, stop: int) -> LinearSchedule | NonlinearSchedule:
        scheduler, timesteps = copy.deepcopy(self.scheduler), self.scheduler.timesteps[start:stop]
        if start and hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(start)
        try:
            return linear_schedule(scheduler, timesteps, eta=self.eta)
        except NotFiniteScheduleError:
            raise
        except InputError as error:
            sigma, factors = float(scheduler.init_noise_sigma), _factors(scheduler, timesteps)
            return NonlinearSchedule(scheduler, timesteps, self.eta, sigma, *factors, str(error))


def linear_schedule(scheduler: Any, timesteps: torch.Tensor, *, eta: float = 0.0) -> LinearSchedule:
    """Return the linear schedule of a diffusers scheduler after `set_timesteps`, over `timesteps`.

    timesteps: all of the scheduler's, or a range from its begin index on. eta: of DDIM. The scheduler is not changed.
    The last `MAX_CACHED` schedules are cached by class, config, timesteps and eta.

    Raises InputError for a scheduler that is not linear: one that clips, or that draws otherwise than with torch.randn.
    """
    if hasattr(scheduler, "noise_sampler"):  # torchsde's, which draws with torch.randn, but from seeds of its own
        raise InputError(f"{type(scheduler).__name__} samples its own noise: {NOT_IN_A_GRAPH}.")
    config = json.dumps(dict(scheduler.config), sort_keys=True, default=str)
    every = [np.asarray(t, np.float64).tobytes() for t in (timesteps, scheduler.timesteps)]
    key = type(scheduler), config, *every, getattr(scheduler, "begin_index", None), eta
    with _lock:
        schedule = _cache.pop(key, None) or _probe(scheduler, timesteps, eta)
        _cache[key] = schedule
        if len(_cache) > MAX_CACHED:
            _cache.popitem(last=False)
    return schedule


def _probe(scheduler: Any, timesteps: torch.Tensor, eta: float) -> LinearSchedule:
    """Return the schedule from three runs.

    The first one counts the draws, the second one runs on unit vectors, and the third one checks the result on random
    numbers.
    """
    count = len(timesteps)
    initial = float(scheduler.init_noise_sigma)
    with torch.random.fork_rng(devices=[]):  # a scheduler that draws otherwise must not use up the caller's numbers
        nothing = torch.zeros(count, 1, 1, 1, 1)
        _, _, draws = _run(scheduler, timesteps, nothing[:1], nothing, nothing[:0], eta)
        unit = torch.eye(2 * count + draws).reshape(-1, 1, 2 * count + draws, 1, 1)
        latents, predictions, noise = unit.split([count, count, draws])
        after, scales, _ = _run(scheduler, timesteps, latents, predictions, noise, eta)
        samples = 3 * torch.randn(1 + count + draws, 1, 8, 1, 1, generator=torch.Generator().manual_seed(0))
        first, predictions, noise = samples.split([1, count, draws])
        sampled, _, _ = _run(scheduler, timesteps, first * initial, predictions, noise, eta)
        factors = _factors(scheduler, timesteps)
    table, random = after.reshape(count, -1).split([2 * count, draws], 1)
    schedule = LinearSchedule(
        timesteps.float().numpy(), scales.numpy(), window_of(table.reshape(count, 2, count).numpy()), random.numpy(),
        initial, *factors,
    )  # fmt: skip
    if not sampled.isfinite().all():
        raise NotFiniteScheduleError(
            f"{type(scheduler).__name__} computes NaN with this configuration, in diffusers too: use another scheduler."
        )
    with np.errstate(invalid="ignore"):  # a step that is finite only because it clips
        weighted = schedule.weights[1:] @ samples.reshape(len(samples), -1).numpy()
    expected = torch.from_numpy(weighted).reshape(sampled.shape)
    largest = float(expected.abs().max())
    if not (np.isfinite(largest) and torch.allclose(sampled, expected, rtol=1e-3, atol=1e-3 * largest)):
        raise InputError(f"{type(scheduler).__name__} draws random numbers or clips (clip_sample): {NOT_IN_A_GRAPH}.")
    return schedule


class _Draws(TorchFunctionMode):
    """In this thread, torch.randn returns `samples` (S, 1, C, 1, 1) in order, and zeros after the last one."""

    def __init__(self, samples: torch.Tensor) -> None:
        super().__init__()
        self.samples, self.count = samples, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in (torch.randn, torch.randn_like):
            return function(*args, **(kwargs or {}))
        self.count += 1
        return self.samples[self.count - 1] if self.count <= len(self.samples) else torch.zeros(self.samples.shape[1:])


def _run(
    scheduler: Any,
    timesteps: torch.Tensor,
    latents: torch.Tensor,
    predictions: torch.Tensor,
    noise: torch.Tensor,
    eta: float,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the latents after each step, the input scales and the number of draws.

    predictions: (T, 1, C, 1, 1). noise: (S, 1, C, 1, 1). latents: (1, 1, C, 1, 1) before the first step, or (T, 1, C,
    1, 1) before each step, in place of the result of the step before.
    """
    probe = copy.deepcopy(scheduler)
    options = {"eta": eta} if "eta" in inspect.signature(probe.step).parameters else {}
    after: list[torch.Tensor] = []
    scales = []
    with _Draws(noise) as draws:
        for index, timestep in enumerate(timesteps):
            one = torch.ones(1, 1, 1, 1)
            scales.append(torch.as_tensor(probe.scale_model_input(one, timestep)).reshape(()).float())
            before = latents[index] if index < len(latents) else after[-1]
            after.append(probe.step(predictions[index], timestep, before, **options).prev_sample.float())
    return torch.stack(after), torch.stack(scales), draws.count


def _factors(scheduler: Any, timesteps: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the factors (T + 1,) of image and noise in the noisy image of each step.

    They are NaN for a scheduler without `add_noise`.
    """
    if not hasattr(scheduler, "add_noise"):
        return np.full(len(timesteps) + 1, np.nan), np.full(len(timesteps) + 1, np.nan)
    probe, one, none = copy.deepcopy(scheduler), torch.ones(1, 1), torch.zeros(1, 1)
    first = getattr(probe, "begin_index", None) or 0
    factors = []
    for index in range(len(timesteps)):
        if hasattr(probe, "_step_index"):
            probe._step_index = first + index  # schedulers that count their steps look the noise up by that
        time = timesteps[index : index + 1]
        factors.append([float(probe.add_noise(one, none, time)), float(probe.add_noise(none, one, time))])
    image, noise = np.array([*factors, [1.0, 0.0]], np.float32).T
    return image, noise
