"""Schedulers as numbers: what a scheduler does between two UNet calls, as a table.

A scheduler without clipping (Euler, Heun, DDIM, PNDM, DPM-Solver, UniPC, LCM, the ancestral ones, ...) only ever adds
up what it has: the latents after step i are a weighted sum of the latents x and the noise predictions e of this step
and the few before it, and of the random numbers z that it draws,

    x_(i+1) = sum_j (steps[i, j, 0] x_(i-j) + steps[i, j, 1] e_(i-j)) + sum_s drawn[i, s] z_s         0 <= j < W

W is 1 for Euler and DDIM, 2 for DPM-Solver++ (2M) and Heun, 3 for UniPC, 5 for PNDM. The numbers are found by running
the scheduler on unit vectors, each step's latents independent of what came before, so no formula of any scheduler is
repeated here. With them a graph of few operators takes the place of the scheduler, on the device or inside a model.
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

from sd_ort.checkpoints.schedule_cache import REMEMBERED, LinearSchedule
from sd_ort.core.errors import InputError

LONG = 6  # steps that a window has at most, of all schedulers but a few

_remembered: OrderedDict[Any, LinearSchedule] = OrderedDict()
_lock = threading.Lock()


def linear_schedule(
    scheduler: Any, timesteps: torch.Tensor, initial: float = 1.0, *, eta: float = 0.0, draws: bool = False
) -> LinearSchedule:
    """The schedule of a diffusers scheduler after `set_timesteps`, over `timesteps` (all of its own, or its last ones).

    `initial`: factor of the first latents, `init_noise_sigma` when they are plain noise. `eta`: DDIM's. `draws`:
    whether it may draw random numbers. The scheduler is not changed. The last `REMEMBERED` schedules are kept, by
    class, configuration, timesteps and the other arguments.

    Raises InputError for a scheduler that clips, that draws otherwise than with torch.randn, or that draws at all
    without `draws`, and so is not linear.
    """
    config = json.dumps(dict(scheduler.config), sort_keys=True, default=str)
    every = [np.asarray(t, np.float64).tobytes() for t in (timesteps, scheduler.timesteps)]
    key = type(scheduler), config, *every, getattr(scheduler, "begin_index", None), initial, eta
    with _lock:
        schedule = _remembered.pop(key, None) or _find(scheduler, timesteps, initial, eta)
        _remembered[key] = schedule
        if len(_remembered) > REMEMBERED:
            _remembered.popitem(last=False)
    if schedule.draws and not draws:
        raise _not_linear(scheduler)
    return schedule


def _not_linear(scheduler: Any) -> InputError:
    return InputError(
        f"{type(scheduler).__name__} draws random numbers or clips (clip_sample), so it cannot become "
        "part of a graph: use euler, dpmsolver, unipc or PNDM."
    )


def _find(scheduler: Any, timesteps: torch.Tensor, initial: float, eta: float) -> LinearSchedule:
    """The schedule, from three runs: one that counts the draws, on unit vectors, and on numbers to check the result."""
    count = len(timesteps)
    with torch.random.fork_rng(devices=[]):  # what draws otherwise must not use up the caller's numbers
        nothing = torch.zeros(count, 1, 1, 1, 1)
        _, _, draws = _run(scheduler, timesteps, nothing[:1], nothing, nothing[:0], eta)
        unit = torch.eye(2 * count + draws).reshape(-1, 1, 2 * count + draws, 1, 1)
        latents, predictions, drawn = unit.split([count, count, draws])
        after, scales, _ = _run(scheduler, timesteps, latents, predictions, drawn, eta)
        numbers = 3 * torch.randn(1 + count + draws, 1, 8, 1, 1, generator=torch.Generator().manual_seed(0))
        first, predictions, drawn = numbers.split([1, count, draws])
        tried, _, _ = _run(scheduler, timesteps, first * initial, predictions, drawn, eta)
    table, random = after.reshape(count, -1).split([2 * count, draws], 1)
    steps = _window(table.reshape(count, 2, count).numpy())
    schedule = LinearSchedule(timesteps.float().numpy(), scales.numpy(), steps, random.numpy(), initial)
    expected = torch.from_numpy(schedule.weights[1:] @ numbers.reshape(len(numbers), -1).numpy()).reshape(tried.shape)
    if not torch.allclose(tried, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())):
        raise _not_linear(scheduler)
    return _shorter(schedule) if steps.shape[1] > LONG and not draws else schedule


def _window(table: np.ndarray) -> np.ndarray:
    """Factors (T, 2, T) of the latents and the predictions of each step, after each step -> those of this and the few
    before it that any step reads, (T, W, 2), the last one first."""
    count = len(table)
    read = [(i, i - j) for i in range(count) for j in range(i + 1) if table[i, :, j].any()]
    made = np.zeros((count, 1 + max(back for _, back in read), 2), np.float32)
    for i, back in read:
        made[i, back] = table[i, :, i - back]
    return made


def _shorter(schedule: LinearSchedule) -> LinearSchedule:
    """The same with a window of few steps, where there is one.

    UniPC corrects latents that it keeps to itself, and so reads, step by step, all that ever was. But what it gives
    has seen these latents too: of few steps there is one sum that gives the same.
    """
    weights = schedule.weights.astype(np.float64)
    count = len(schedule.steps)
    for window in range(2, LONG + 1):
        steps = np.zeros((count, window, 2), np.float32)
        for i in range(count):
            back = np.arange(min(window, i + 1))
            own = 1 + i - back  # the columns of these steps' predictions, of which any sum can be had
            others = np.delete(np.arange(weights.shape[1]), own)
            before, after = weights[i - back], weights[i + 1]
            steps[i, back, 0] = np.linalg.lstsq(before[:, others].T, after[others], rcond=1e-5)[0]
            steps[i, back, 1] = after[own] - steps[i, back, 0] @ before[:, own]
        short = replace(schedule, steps=steps)
        if np.abs(short.weights - weights).max() < 1e-5 * np.abs(weights).max():
            return short
    return schedule


class _Draws(TorchFunctionMode):
    """In this thread, torch.randn gives what lies in `given` (S, 1, C, 1, 1), in order, and zeros behind its end."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self.given, self.count = given, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in (torch.randn, torch.randn_like):
            return function(*args, **(kwargs or {}))
        self.count += 1
        return self.given[self.count - 1] if self.count <= len(self.given) else torch.zeros(self.given.shape[1:])


def _run(
    scheduler: Any,
    timesteps: torch.Tensor,
    latents: torch.Tensor,
    predictions: torch.Tensor,
    drawn: torch.Tensor,
    eta: float,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Latents after each step, the input scales and the number of draws, with `predictions` (T, 1, C, 1, 1) and what is
    `drawn` (S, 1, C, 1, 1). `latents` (1 or T, 1, C, 1, 1): before the first step, or before each, whatever the last
    one gave."""  # fmt: skip
    probe = copy.deepcopy(scheduler)
    options = {"eta": eta} if "eta" in inspect.signature(probe.step).parameters else {}
    after: list[torch.Tensor] = []
    scales = []
    with _Draws(drawn) as draws:
        for index, timestep in enumerate(timesteps):
            one = torch.ones(1, 1, 1, 1)
            scales.append(torch.as_tensor(probe.scale_model_input(one, timestep)).reshape(()).float())
            before = latents[index] if index < len(latents) else after[-1]
            after.append(probe.step(predictions[index], timestep, before, **options).prev_sample.float())
    return torch.stack(after), torch.stack(scales), draws.count
