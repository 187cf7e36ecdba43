"""Schedulers as numbers: what a scheduler does between two UNet calls, as a matrix.

A scheduler without clipping (Euler, Heun, DDIM, PNDM, DPM-Solver, UniPC, LCM, the ancestral ones, ...) only ever adds
up what it has: the latents before step i are a weighted sum of the first latents x, the noise predictions so far and
the random numbers z that it has drawn so far,

    latents_i = weights[i, 0] x + sum_k weights[i, 1 + k] noise_k + sum_s weights[i, 1 + T + s] z_s
                                                                        (weights[i, 1 + k] = 0 for k >= i)

The weights are found by running the scheduler on unit vectors, so no formula of any scheduler is repeated here. With
them a graph of three operators takes the place of the scheduler, on the device or inside a model.
"""

from __future__ import annotations

import copy
import inspect
import json
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from sd_ort.core.errors import InputError
from sd_ort.family.plans import REMEMBERED, LinearSchedule

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
        _, _, draws = _run(scheduler, timesteps, torch.zeros(count + 1, 1, 1, 1, 1), initial, eta)
        columns = count + 1 + draws
        unit = torch.eye(columns).reshape(columns, 1, columns, 1, 1)
        numbers = 3 * torch.randn(columns, 1, 8, 1, 1, generator=torch.Generator().manual_seed(0))
        states, scales, _ = _run(scheduler, timesteps, unit, initial, eta)
        tried, _, _ = _run(scheduler, timesteps, numbers, initial, eta)
    weights = states.reshape(count + 1, columns)
    expected = (weights @ numbers.reshape(columns, -1)).reshape(tried.shape)
    if not torch.allclose(tried, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())):
        raise _not_linear(scheduler)
    return LinearSchedule(timesteps.float().numpy(), scales.numpy(), weights.numpy(), draws)


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
    scheduler: Any, timesteps: torch.Tensor, sources: torch.Tensor, initial: float, eta: float
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Latents before each step and after the last, the input scales and the number of draws, with `sources`
    (1 + T + S, 1, C, 1, 1) as the first latents, the noise predictions and what is drawn."""
    probe = copy.deepcopy(scheduler)
    options = {"eta": eta} if "eta" in inspect.signature(probe.step).parameters else {}
    latents = sources[0] * initial
    states, scales = [latents], []
    with _Draws(sources[1 + len(timesteps) :]) as drawn:
        for index, timestep in enumerate(timesteps):
            one = torch.ones(1, 1, 1, 1)
            scales.append(torch.as_tensor(probe.scale_model_input(one, timestep)).reshape(()).float())
            latents = probe.step(sources[index + 1], timestep, latents, **options).prev_sample.float()
            states.append(latents)
    return torch.stack(states), torch.stack(scales), drawn.count
