"""Linear schedules: the coefficients of a scheduler's update between two UNet calls.

A scheduler without clipping (Euler, Heun, DDIM, PNDM, DPM-Solver, UniPC, LCM, the ancestral ones, ...) is linear: the
latents after step i are a weighted sum of latents x and predictions e of the last W steps and of noise samples z,

    x_(i+1) = sum_j (steps[i, j, 0] x_(i-j) + steps[i, j, 1] e_(i-j)) + sum_s drawn[i, s] z_s         0 <= j < W

W is 1 for Euler and DDIM, 2 for DPM-Solver++ (2M) and Heun, 3 for UniPC, 5 for PNDM. The coefficients are the outputs
of the scheduler for unit vectors, with independent latents for each step, so no formula of a scheduler is repeated
here. A graph of few operators with these coefficients replaces the scheduler, on the device or inside a model.
"""

from __future__ import annotations

import copy
import inspect
import json
import threading
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from sd_ort.checkpoints.schedule_cache import MAX_SCHEDULES, LinearSchedule
from sd_ort.core.errors import InputError

MAX_WINDOW = 6  # steps; longer windows are replaced by a shorter one if there is one

_schedules: OrderedDict[Any, LinearSchedule] = OrderedDict()
_lock = threading.Lock()


def linear_schedule(
    scheduler: Any, timesteps: torch.Tensor, initial: float = 1.0, *, eta: float = 0.0, draws: bool = False
) -> LinearSchedule:
    """Return the schedule of a diffusers scheduler after `set_timesteps`, over `timesteps`, all or the last.

    initial: factor of the first latents; `init_noise_sigma` if they are noise. eta: of DDIM. draws: whether the
    scheduler may sample noise. The scheduler is not modified. The last `MAX_SCHEDULES` schedules are cached.

    Raises InputError for a scheduler that clips, that samples noise by another function than torch.randn, or that
    samples any without `draws`: it is not linear.
    """
    config = json.dumps(dict(scheduler.config), sort_keys=True, default=str)
    every = [np.asarray(t, np.float64).tobytes() for t in (timesteps, scheduler.timesteps)]
    key = type(scheduler), config, *every, getattr(scheduler, "begin_index", None), initial, eta
    with _lock:
        schedule = _schedules.pop(key, None) or _compute(scheduler, timesteps, initial, eta)
        _schedules[key] = schedule
        if len(_schedules) > MAX_SCHEDULES:
            _schedules.popitem(last=False)
    if schedule.draws and not draws:
        raise _not_linear(scheduler)
    return schedule


def _not_linear(scheduler: Any) -> InputError:
    return InputError(
        f"{type(scheduler).__name__} draws random numbers or clips (clip_sample), so it cannot become "
        "part of a graph: use euler, dpmsolver, unipc or PNDM."
    )


def _compute(scheduler: Any, timesteps: torch.Tensor, initial: float, eta: float) -> LinearSchedule:
    """Return the schedule, from three runs: to count noise samples, on unit vectors, and to check the result."""
    count = len(timesteps)
    with torch.random.fork_rng(devices=[]):  # other random functions must not advance the caller's state
        zeros = torch.zeros(count, 1, 1, 1, 1)
        _, _, draws = _run(scheduler, timesteps, zeros[:1], zeros, zeros[:0], eta)
        unit = torch.eye(2 * count + draws).reshape(-1, 1, 2 * count + draws, 1, 1)
        latents, predictions, noise = unit.split([count, count, draws])
        after, scales, _ = _run(scheduler, timesteps, latents, predictions, noise, eta)
        values = 3 * torch.randn(1 + count + draws, 1, 8, 1, 1, generator=torch.Generator().manual_seed(0))
        first, predictions, noise = values.split([1, count, draws])
        actual, _, _ = _run(scheduler, timesteps, first * initial, predictions, noise, eta)
    table, random = after.reshape(count, -1).split([2 * count, draws], 1)
    steps = _window(table.reshape(count, 2, count).numpy())
    schedule = LinearSchedule(timesteps.float().numpy(), scales.numpy(), steps, random.numpy(), initial)
    expected = torch.from_numpy(schedule.weights[1:] @ values.reshape(len(values), -1).numpy()).reshape(actual.shape)
    if not torch.allclose(actual, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())):
        raise _not_linear(scheduler)
    return _shorten(schedule) if steps.shape[1] > MAX_WINDOW and not draws else schedule


def _window(table: np.ndarray) -> np.ndarray:
    """Return coefficients (T, W, 2) of the last W steps, the last first, from those of all steps (T, 2, T)."""
    count = len(table)
    read = [(i, i - j) for i in range(count) for j in range(i + 1) if table[i, :, j].any()]
    window = np.zeros((count, 1 + max(back for _, back in read), 2), np.float32)
    for i, back in read:
        window[i, back] = table[i, :, i - back]
    return window


def _shorten(schedule: LinearSchedule) -> LinearSchedule:
    """Return an equal schedule with a window of at most `MAX_WINDOW` steps, or the schedule itself if there is none.

    UniPC corrects internal latents, so each step depends on all steps before. Its outputs depend on these latents too,
    so a sum over few steps is equal.
    """
    weights = schedule.weights.astype(np.float64)
    count = len(schedule.steps)
    for window in range(2, MAX_WINDOW + 1):
        steps = np.zeros((count, window, 2), np.float32)
        for i in range(count):
            back = np.arange(min(window, i + 1))
            own = 1 + i - back  # the columns of these steps' predictions, whose coefficients are free
            others = np.delete(np.arange(weights.shape[1]), own)
            before, after = weights[i - back], weights[i + 1]
            steps[i, back, 0] = np.linalg.lstsq(before[:, others].T, after[others], rcond=1e-5)[0]
            steps[i, back, 1] = after[own] - steps[i, back, 0] @ before[:, own]
        short = replace(schedule, steps=steps)
        if np.abs(short.weights - weights).max() < 1e-5 * np.abs(weights).max():
            return short
    return schedule


class _ReplacedNoise(TorchFunctionMode):
    """Lets torch.randn return `noise` (S, 1, C, 1, 1) in this thread, in order, and zeros after its end."""

    def __init__(self, noise: torch.Tensor) -> None:
        super().__init__()
        self.noise, self.count = noise, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in (torch.randn, torch.randn_like):
            return function(*args, **(kwargs or {}))
        self.count += 1
        return self.noise[self.count - 1] if self.count <= len(self.noise) else torch.zeros(self.noise.shape[1:])


def _run(
    scheduler: Any,
    timesteps: torch.Tensor,
    latents: torch.Tensor,
    predictions: torch.Tensor,
    noise: torch.Tensor,
    eta: float,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the latents after each step, the input scales, and the number of noise samples.

    latents (1 or T, 1, C, 1, 1): before the first step, or before each step. predictions (T, 1, C, 1, 1). noise
    (S, 1, C, 1, 1).
    """
    probe = copy.deepcopy(scheduler)
    options = {"eta": eta} if "eta" in inspect.signature(probe.step).parameters else {}
    after: list[torch.Tensor] = []
    scales = []
    with _ReplacedNoise(noise) as replaced:
        for index, timestep in enumerate(timesteps):
            one = torch.ones(1, 1, 1, 1)
            scales.append(torch.as_tensor(probe.scale_model_input(one, timestep)).reshape(()).float())
            before = latents[index] if index < len(latents) else after[-1]
            after.append(probe.step(predictions[index], timestep, before, **options).prev_sample.float())
    return torch.stack(after), torch.stack(scales), replaced.count
