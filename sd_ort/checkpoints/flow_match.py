"""diffusers' FlowMatchEulerDiscreteScheduler in NumPy: the latents are (1 - sigma) image + sigma noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sd_ort.core.errors import InputError

CLASS = "FlowMatchEulerDiscreteScheduler"
SET_SHIFT = "set_shift"  # what diffusers' method of this name sets: the ends of the schedule keep the config's shift
# Options that select another schedule or step rule, and the values that are implemented.
OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "invert_sigmas": (False,),
    "use_karras_sigmas": (False,),
    "use_exponential_sigmas": (False,),
    "use_beta_sigmas": (False,),
    "use_flow_sigmas": (False,),
    "stochastic_sampling": (False,),
    "time_shift_type": ("exponential", "linear"),
}


@dataclass(frozen=True)
class FlowMatchSchedule:
    """A schedule of T steps: timesteps (T,) and sigmas (T + 1,), both float32; the last sigma is 0."""

    timesteps: np.ndarray
    sigmas: np.ndarray

    def step(self, i: int, prediction: np.ndarray, latents: np.ndarray) -> np.ndarray:
        """Return the latents after step i."""
        return latents + (self.sigmas[i + 1] - self.sigmas[i]) * prediction

    def add_noise(self, i: int, image: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Return the latents before step i, or after the last one, of an image's latents."""
        return self.sigmas[i] * noise + (1 - self.sigmas[i]) * image

    def for_strength(self, strength: float) -> FlowMatchSchedule:
        """Return the last `strength` (0..1) of the steps. Raises InputError if none are left."""
        steps = len(self.timesteps)
        first = int(max(steps - min(steps * strength, steps), 0)) if 0 <= strength <= 1 else steps
        if first == steps:
            raise InputError(f"{steps} steps at strength {strength} leave none: strength must be above 0, at most 1.")
        return FlowMatchSchedule(self.timesteps[first:], self.sigmas[first:])


@dataclass(frozen=True)
class InpaintBlend:
    """Latents and noise that restore the region outside of the mask after each step, and the mask, all of one shape."""

    image: np.ndarray
    noise: np.ndarray
    mask: np.ndarray

    def apply(self, schedule: FlowMatchSchedule, i: int, latents: np.ndarray) -> np.ndarray:
        """Return the latents after step i with the image, as noisy as they are, outside of the mask."""
        image = schedule.add_noise(i + 1, self.image, self.noise)
        return (1 - self.mask) * image + self.mask * latents

    def packed(self, pack: Callable[[np.ndarray], np.ndarray]) -> InpaintBlend:
        """Return the arrays in another layout."""
        return InpaintBlend(pack(self.image), pack(self.noise), pack(self.mask))


def check_config(config: Mapping[str, Any]) -> None:
    """Raise InputError for the config of another scheduler, or an option that is not implemented."""
    name = config.get("_class_name")
    if name != CLASS:
        raise InputError(f"Scheduler {name} is not supported for diffusion transformers: use {CLASS}.")
    for option, values in OPTIONS.items():
        if (value := config.get(option, values[0])) not in values:
            raise InputError(f"{CLASS} with {option} = {value} is not supported.")


def linear_mu(config: Mapping[str, Any], image_tokens: int) -> float:
    """Return the shift of dynamic shifting, linear in the number of image tokens."""
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    first, last = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (last - first) / (high - low)
    return float(image_tokens * slope + (first - slope * low))


def empirical_mu(image_tokens: int, steps: int) -> float:
    """Return the shift of FLUX.2: lines through measured values at 10 and 200 steps, linear in between."""
    many = 0.00016927 * image_tokens + 0.45666666
    if image_tokens > 4300:
        return many
    few = 8.73809524e-05 * image_tokens + 1.89833333
    slope = (many - few) / 190.0
    return slope * steps + (many - 200.0 * slope)


def make_schedule(
    config: Mapping[str, Any], steps: int, image_tokens: int, sigmas: Sequence[float] | None, mu: float | None = None
) -> FlowMatchSchedule:
    """Return the schedule of a config.

    Args:
        steps: Number of steps, if `sigmas` is None.
        image_tokens: Determines the shift, if the config has dynamic shifting.
        sigmas: Unshifted sigmas; None for equal distances between the largest and the smallest trained sigma.
        mu: Shift instead of the one of `image_tokens`.
    """
    trained = int(config.get("num_train_timesteps", 1000))
    shift = float(config.get("shift", 1.0))
    dynamic = bool(config.get("use_dynamic_shifting"))
    if mu is not None and not dynamic:
        mu = None  # diffusers ignores it
    if sigmas is None:
        ends = np.array([trained, 1], np.float32) / np.float32(trained)
        if not dynamic:
            ends = np.float32(shift) * ends / (1 + np.float32(shift - 1) * ends)
        values = np.linspace(float(ends[0]) * trained, float(ends[1]) * trained, steps) / trained
    else:
        values = np.asarray(sigmas, np.float64).astype(np.float32)
        if values.ndim != 1 or not values.size or not ((values > 0) & (values <= 1)).all():
            raise InputError("sigmas must be numbers above 0 and up to 1, one for each step.")
    if dynamic:
        mu = linear_mu(config, image_tokens) if mu is None else mu
        factor = math.exp(mu) if config.get("time_shift_type", "exponential") == "exponential" else mu
        values = factor / (factor + (1 / values - 1))
    else:
        shift = float(config.get(SET_SHIFT, shift))
        values = shift * values / (1 + (shift - 1) * values)
    if terminal := config.get("shift_terminal"):
        values = 1 - (1 - values) * ((1 - float(terminal)) / (1 - values[-1])) if values[-1] < 1 else values
    values = values.astype(np.float32)
    return FlowMatchSchedule(values * np.float32(trained), np.append(values, np.float32(0)))
