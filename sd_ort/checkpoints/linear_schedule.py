"""Schedule of a linear scheduler: each step is a weighted sum of latents, predictions and noise.

A scheduler without clipping (Euler, Heun, DDIM, PNDM, DPM-Solver, UniPC, LCM, the ancestral ones, ...) is linear: the
latents after step i are a weighted sum of the latents x and the noise predictions e of this step and the few before it,
and of the noise samples z that the scheduler draws,

    x_(i+1) = sum_j (coefficients[i, j, 0] x_(i-j) + coefficients[i, j, 1] e_(i-j)) + sum_s noise_coefficients[i, s] z_s

with 0 <= j < W. W is 1 for Euler and DDIM, 2 for DPM-Solver++ (2M) and Heun, 3 for UniPC, 5 for PNDM. The coefficients
are found by running the scheduler on unit vectors, with each step's latents independent of the steps before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from sd_ort.core.errors import InputError

MAX_WINDOW = 6  # steps; the windows of all but a few schedulers are shorter


@dataclass(frozen=True)
class LinearSchedule:
    """Schedule of T steps with a window of W steps and S noise samples; float32.

    `timesteps` (T,) as the UNet reads them, `input_scales` (T,) of the UNet's sample, `coefficients` (T, W, 2),
    `noise_coefficients` (T, S). The first latents are standard normal noise times `init_noise_sigma`. An image as noisy
    as step i expects it is image_factors[i] image + noise_factors[i] noise, both (T + 1,): 1 and 0 after the last step.
    """

    timesteps: np.ndarray
    input_scales: np.ndarray
    coefficients: np.ndarray
    noise_coefficients: np.ndarray
    init_noise_sigma: float
    image_factors: np.ndarray
    noise_factors: np.ndarray

    @property
    def noise_count(self) -> int:
        """S, the number of standard normal noise samples of the latents' shape that the scheduler draws, in order."""
        return self.noise_coefficients.shape[1]

    @cached_property
    def weights(self) -> np.ndarray:
        """Latents before each step and after the last one as sums of first noise, predictions and noise samples.

        Shape (T + 1, 1 + T + S), float32.
        """
        count, window = self.coefficients.shape[:2]
        states = np.zeros((count + 1, 1 + count + self.noise_count))
        states[0, 0] = self.init_noise_sigma
        for i in range(count):
            states[i + 1, 1 + count :] = self.noise_coefficients[i]
            for back in range(min(window, i + 1)):
                states[i + 1] += self.coefficients[i, back, 0].astype(np.float64) * states[i - back]
                states[i + 1, 1 + i - back] += self.coefficients[i, back, 1]
        return states.astype(np.float32)

    @cached_property
    def shortened(self) -> LinearSchedule:
        """Return an equal schedule with a window of at most `MAX_WINDOW` steps, or this one if there is none.

        It holds for latents that are not replaced between two steps.

        UniPC corrects latents that it stores, so step i reads all steps before it. But its latents also depend on
        these corrected latents, so a sum over few steps gives the same result.
        """
        if self.coefficients.shape[1] <= MAX_WINDOW or self.noise_count:
            return self
        weights = replace(self, init_noise_sigma=1.0).weights.astype(np.float64)
        count = len(self.coefficients)
        for window in range(2, MAX_WINDOW + 1):
            steps = np.zeros((count, window, 2), np.float32)
            for i in range(count):
                back = np.arange(min(window, i + 1))
                own = 1 + i - back  # the columns of these steps' predictions, of which any sum can be had
                others = np.delete(np.arange(weights.shape[1]), own)
                before, after = weights[i - back], weights[i + 1]
                steps[i, back, 0] = np.linalg.lstsq(before[:, others].T, after[others], rcond=1e-5)[0]
                steps[i, back, 1] = after[own] - steps[i, back, 0] @ before[:, own]
            short = replace(self, coefficients=steps)
            difference = replace(short, init_noise_sigma=1.0).weights - weights
            if np.abs(difference).max() < 1e-5 * np.abs(weights).max():
                return short
        return self


def fixed_schedule(timetable: Any) -> LinearSchedule:
    """Return all steps of a timetable as a linear schedule without noise samples, for a merged model.

    Raises InputError for any other scheduler.
    """
    schedule = timetable.schedule(0, len(timetable.timesteps))
    if not isinstance(schedule, LinearSchedule) or schedule.noise_count:
        raise InputError(
            "this scheduler draws random numbers or clips (clip_sample), so it cannot become part of a graph: "
            "use euler, dpmsolver, unipc or PNDM."
        )
    return schedule


def window_of(table: np.ndarray) -> np.ndarray:
    """Return coefficients (T, W, 2), the current step's first, from a table (T, 2, T).

    The table has the factors of each step's latents and predictions in the latents after each step. W is the largest
    number of steps that a step reads.
    """
    count = len(table)
    read = [(i, i - j) for i in range(count) for j in range(i + 1) if table[i, :, j].any()]
    coefficients = np.zeros((count, 1 + max((back for _, back in read), default=0), 2), np.float32)
    for i, back in read:
        coefficients[i, back] = table[i, :, i - back]
    return coefficients
