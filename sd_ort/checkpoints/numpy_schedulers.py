"""diffusers' common schedulers in NumPy: their schedules without importing torch and diffusers, which takes seconds.

Before step i the latents are alpha[i] image + sigma[i] noise. Those of DDIM, DDPM, PNDM, LCM, DPM-Solver++ and UniPC
preserve the variance (alpha² + sigma² = 1), those of Euler, LMS and Heun do not scale the image (alpha = 1). An option
that is not implemented here returns None from `numpy_scheduler`, and the caller uses diffusers' class.
"""

# ruff: noqa: RUF012  (tables of class attributes, which nothing changes)
from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from sd_ort.checkpoints.linear_schedule import LinearSchedule, window_of

Array = np.ndarray
SampleNoise = Callable[[], Array]  # returns the next noise sample
MAX_STEPS = 1000  # a schedule's table takes the square of them in memory


class _Scheduler:
    """Schedule of `steps` steps for a scheduler's `config`, and its step rule."""

    defaults: Mapping[str, Any] = {}
    options: Mapping[str, tuple[Any, ...]] = {}  # supported values of options that select an algorithm
    ignored: tuple[str, ...] = ()  # options of other classes that diffusers' class does not read
    call_options: tuple[str, ...] = ()  # arguments of diffusers' set_timesteps that `config` may hold
    preserves_variance = True
    zero_snr = 0.0  # ᾱ of the last training timestep after rescale_betas_zero_snr
    extra_timesteps = 0  # spaced timesteps that are left out at the end
    order = 1  # UNet calls a step

    def __init__(self, config: Mapping[str, Any], steps: int, eta: float) -> None:
        self.config = config
        self.steps, self.eta, self.trained = steps, eta, config["num_train_timesteps"]
        self.alphas_cumprod = _alphas_cumprod(config, self.zero_snr)
        self.history: list[Array] = []
        self.begin = 0
        self.schedules: dict[tuple[int, int], LinearSchedule] = {}
        self.timesteps, self.alpha, self.sigma = self.points()  # (T,), (T + 1,), (T + 1,)

    def points(self) -> tuple[Array, Array, Array]:
        """Return the timesteps (T,), and alpha and sigma (T + 1,) before each step and after the last."""
        raise NotImplementedError

    def step(self, i: int, prediction: Array, latents: Array, sample_noise: SampleNoise) -> Array:
        """Return the latents after step i."""
        raise NotImplementedError

    @property
    def init_noise_sigma(self) -> float:
        if self.preserves_variance:
            return 1.0
        largest = float(self.sigma.astype(np.float32).max())
        return largest if self.config["timestep_spacing"] in ("linspace", "trailing") else math.hypot(largest, 1)

    def image_and_noise(self, i: int, prediction: Array, latents: Array) -> tuple[Array, Array]:
        """Return the image and the noise that the UNet's prediction stands for."""
        alpha, sigma = self.alpha[i], self.sigma[i]
        if self.config["prediction_type"] == "epsilon":
            return (latents - sigma * prediction) / alpha, prediction
        if self.config["prediction_type"] == "sample":
            return prediction, (latents - alpha * prediction) / sigma
        norm = math.hypot(alpha, sigma)
        alpha, sigma, latents = alpha / norm, sigma / norm, latents / norm
        return alpha * latents - sigma * prediction, alpha * prediction + sigma * latents

    def schedule(self, start: int, stop: int) -> LinearSchedule:
        """Return the schedule of the steps from `start` to before `stop`."""
        if (start, stop) not in self.schedules:
            self.schedules[start, stop] = self._tabulate(start, stop)
        return self.schedules[start, stop]

    def _tabulate(self, start: int, stop: int) -> LinearSchedule:
        count = stop - start
        samples = 0

        def unit(index: int) -> Array:
            vector = np.zeros(3 * count)
            vector[index] = 1
            return vector

        def sample_noise() -> Array:
            nonlocal samples
            samples += 1
            return unit(2 * count + samples - 1)

        run = copy.copy(self)  # other threads may use this scheduler
        run.history, run.begin = [], start
        after = np.stack([run.step(start + i, unit(count + i), unit(i), sample_noise) for i in range(count)])
        scales = 1 / np.hypot(self.alpha, self.sigma)[start:stop]
        return LinearSchedule(
            self.timesteps[start:stop].astype(np.float32),
            np.ones(count, np.float32) if self.preserves_variance else scales.astype(np.float32),
            window_of(after[:, : 2 * count].reshape(count, 2, count)),
            after[:, 2 * count : 2 * count + samples].astype(np.float32),
            self.init_noise_sigma,
            np.append(self.alpha[start:stop], 1).astype(np.float32),
            np.append(self.sigma[start:stop], 0).astype(np.float32),
        )

    # --- Timesteps --------------------------------------------------------------------------------------------------

    def spaced_timesteps(self) -> Array:
        """Return the timesteps from the noisiest on, float64: the caller's, or by `timestep_spacing`."""
        if (custom := self.config.get("timesteps")) is not None:
            return np.array(custom).astype(np.int64 if self.extra_timesteps else np.float32).astype(np.float64)
        spacing, count = self.config["timestep_spacing"], self.steps + self.extra_timesteps
        if spacing == "linspace":
            return np.linspace(0, self.trained - 1, count)[::-1][: self.steps]
        if spacing == "leading":
            multiples = (np.arange(count) * (self.trained // count))[::-1][: self.steps]
            return multiples + float(self.config["steps_offset"])
        return np.round(np.arange(self.trained, 0, -self.trained / self.steps)) - 1

    def variance_preserving(self, timesteps: Array) -> tuple[Array, Array]:
        """Return alpha and sigma of integer timesteps; those before the first are the noise-free end."""
        ends_at_one = self.config.get("set_alpha_to_one", True)
        last = 1.0 if ends_at_one else self.alphas_cumprod[0]
        product = np.where(timesteps >= 0, self.alphas_cumprod[np.maximum(timesteps, 0)], last)
        return np.sqrt(product), np.sqrt(1 - product)


class _Ancestral(_Scheduler):
    """Step to the next noise level with fresh noise: DDIM (`eta`), and with eta 1 DDPM and Euler ancestral."""

    def step(self, i: int, prediction: Array, latents: Array, sample_noise: SampleNoise) -> Array:
        image, noise = self.image_and_noise(i, prediction, latents)
        alpha, sigma = self.next_point(i)
        ratio = 0.0 if self.alpha[i] == 0 else (sigma / alpha) / (self.sigma[i] / self.alpha[i])
        fresh = self.eta * sigma * math.sqrt(max(0.0, 1 - ratio**2))
        after = alpha * image + math.sqrt(max(0.0, sigma**2 - fresh**2)) * noise
        return after + self.noise_floor(fresh) * sample_noise() if self.draws(i) else after

    def next_point(self, i: int) -> tuple[float, float]:
        return self.alpha[i + 1], self.sigma[i + 1]

    def draws(self, i: int) -> bool:
        return self.eta > 0

    def noise_floor(self, fresh: float) -> float:
        return fresh


class _Ddim(_Ancestral):
    defaults = {"timestep_spacing": "leading", "set_alpha_to_one": True}

    def points(self) -> tuple[Array, Array, Array]:
        timesteps = np.round(self.spaced_timesteps()).astype(np.int64)
        return timesteps, *self.variance_preserving(np.append(timesteps, -1))

    def next_point(self, i: int) -> tuple[float, float]:
        alpha, sigma = self.variance_preserving(self.timesteps[i : i + 1] - self.trained // self.steps)
        return float(alpha[0]), float(sigma[0])


class _Ddpm(_Ancestral):
    defaults = {"timestep_spacing": "leading", "variance_type": "fixed_small"}
    options = {"variance_type": ("fixed_small", "fixed_small_log")}

    def __init__(self, config: Mapping[str, Any], steps: int, eta: float) -> None:
        super().__init__(config, steps, 1.0)

    def points(self) -> tuple[Array, Array, Array]:
        timesteps = np.round(self.spaced_timesteps()).astype(np.int64)
        return timesteps, *self.variance_preserving(np.append(timesteps, -1))

    def draws(self, i: int) -> bool:
        return bool(self.timesteps[i] > 0)

    def noise_floor(self, fresh: float) -> float:
        return max(fresh, 1e-10)


class _Lcm(_Scheduler):
    call_options = ("strength",)
    defaults = {
        "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "set_alpha_to_one": True,
        "original_inference_steps": 50, "timestep_scaling": 10.0, "timestep_spacing": "leading", "strength": 1.0,
    }  # fmt: skip

    def points(self) -> tuple[Array, Array, Array]:
        distilled = int(self.config["original_inference_steps"])
        count = int(distilled * self.config["strength"])  # strength: an argument of diffusers' set_timesteps
        if not self.steps <= count <= self.trained:
            raise ValueError
        levels = (np.arange(1, count + 1) * (self.trained // distilled) - 1)[::-1]
        timesteps = levels[np.floor(np.linspace(0, count, self.steps, endpoint=False)).astype(np.int64)]
        return timesteps, *self.variance_preserving(np.append(timesteps, timesteps[-1]))

    def step(self, i: int, prediction: Array, latents: Array, sample_noise: SampleNoise) -> Array:
        image, _ = self.image_and_noise(i, prediction, latents)
        scaled = self.timesteps[i] * self.config["timestep_scaling"]
        image = (scaled * image + 0.25 / math.hypot(scaled, 0.5) * latents) / math.hypot(scaled, 0.5)
        return image if i == len(self.timesteps) - 1 else self.alpha[i + 1] * image + self.sigma[i + 1] * sample_noise()


class _Pndm(_Scheduler):
    """Linear multistep method without Runge-Kutta steps (Liu et al., 2022): the first step is taken twice."""

    defaults = {"timestep_spacing": "leading", "set_alpha_to_one": False, "skip_prk_steps": False}
    options = {"skip_prk_steps": (True,), "prediction_type": ("epsilon", "v_prediction")}
    ignored = ("rescale_betas_zero_snr",)
    first: Array  # latents of the first step
    adams = ((1,), (3 / 2, -1 / 2), (23 / 12, -16 / 12, 5 / 12), (55 / 24, -59 / 24, 37 / 24, -9 / 24))

    def points(self) -> tuple[Array, Array, Array]:
        timesteps = np.round(self.spaced_timesteps()).astype(np.int64)
        if len(timesteps) > 1:
            timesteps = np.insert(timesteps, 1, timesteps[1])
        return timesteps, *self.variance_preserving(np.append(timesteps, -1))

    def step(self, i: int, prediction: Array, latents: Array, sample_noise: SampleNoise) -> Array:
        stride, count = self.trained // self.steps, i - self.begin
        pair = np.array([self.timesteps[i], self.timesteps[i] - stride])
        if count == 1:  # the first step again, with the mean of both predictions
            prediction, latents, pair = (prediction + self.history[0]) / 2, self.first, pair + stride
        else:
            self.first, self.history = latents, [prediction, *self.history][:4]
            factors = self.adams[len(self.history) - 1]
            terms = [f * e for f, e in zip(factors, self.history, strict=True)]
            prediction = np.sum(terms, 0)
        (alpha, next_alpha), (sigma, next_sigma) = self.variance_preserving(pair)
        if self.config["prediction_type"] == "v_prediction":
            prediction = alpha * prediction + sigma * latents
        return next_alpha / alpha * latents + (next_sigma - next_alpha * sigma / alpha) * prediction


# --- Noise levels that are interpolated between timesteps ------------------------------------------------------------


class _Sigmas(_Scheduler):
    """Schedulers over noise levels sigma / alpha, spaced by timesteps or as Karras et al. (2022)."""

    defaults: Mapping[str, Any] = {
        "timestep_spacing": "linspace", "use_karras_sigmas": False, "use_exponential_sigmas": False,
        "final_sigmas_type": "zero", "sigma_min": None, "sigma_max": None,
    }  # fmt: skip
    options = {"final_sigmas_type": ("zero", "sigma_min")}
    preserves_variance = False
    zero_snr = 2.0**-24

    def points(self) -> tuple[Array, Array, Array]:
        levels = np.sqrt((1 - self.alphas_cumprod) / self.alphas_cumprod).astype(np.float32).astype(np.float64)
        indices = np.arange(len(levels))
        if self.config.get("sigmas") is not None:
            sigmas = np.array(self.config["sigmas"]).astype(np.float32).astype(np.float64)
            return np.interp(np.log(sigmas[:-1]), np.log(levels), indices), np.ones(len(sigmas)), sigmas
        timesteps = self.spaced_timesteps()
        timesteps = np.round(timesteps) if self.extra_timesteps else timesteps.astype(np.float32)
        sigmas = np.interp(timesteps, indices, levels)
        if self.config.get("use_karras_sigmas") or self.config.get("use_exponential_sigmas"):
            if self.config.get("timesteps") is not None:
                raise ValueError
            ends = levels[[-1, 0]] if self.extra_timesteps else sigmas[[0, -1]]
            first, last = (
                float(end) if self.config[name] is None else self.config[name]
                for name, end in zip(("sigma_max", "sigma_min"), ends, strict=True)
            )
            if self.config["use_karras_sigmas"]:
                sigmas = np.linspace(first ** (1 / 7), last ** (1 / 7), self.steps) ** 7
            else:
                sigmas = np.exp(np.linspace(math.log(first), math.log(last), self.steps))
            timesteps = np.interp(np.log(sigmas), np.log(levels), indices)
            if self.extra_timesteps:
                timesteps = (np.round(timesteps) if self.rounds_timesteps else timesteps).astype(np.int64)
        last = self.last_sigma(levels, sigmas) if self.config.get("final_sigmas_type") == "sigma_min" else 0.0
        sigmas = np.append(sigmas, last).astype(np.float32).astype(np.float64)
        if not self.preserves_variance:
            return timesteps, np.ones(len(sigmas)), sigmas
        return timesteps, 1 / np.hypot(1, sigmas), sigmas / np.hypot(1, sigmas)

    @property
    def rounds_timesteps(self) -> bool:
        return self.config["use_karras_sigmas"] and self.config["beta_schedule"] != "squaredcos_cap_v2"

    def last_sigma(self, levels: Array, sigmas: Array) -> float:
        return float(levels[0])


class _Euler(_Ancestral, _Sigmas):
    call_options = ("timesteps", "sigmas")
    options = {**_Sigmas.options, "timestep_type": ("discrete",), "interpolation_type": ("linear",)}
    defaults = {**_Sigmas.defaults, "timestep_type": "discrete", "interpolation_type": "linear"}

    def __init__(self, config: Mapping[str, Any], steps: int, eta: float) -> None:
        super().__init__(config, steps, 0.0)


class _EulerAncestral(_Ancestral, _Sigmas):
    options = {"prediction_type": ("epsilon", "v_prediction")}
    ignored = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "final_sigmas_type")

    def __init__(self, config: Mapping[str, Any], steps: int, eta: float) -> None:
        super().__init__(config, steps, 1.0)


class _Lms(_Sigmas):
    """Linear multistep method: the last four derivatives, integrated by Gauss and Legendre's quadrature."""

    ignored = ("rescale_betas_zero_snr", "final_sigmas_type")

    def step(self, i: int, prediction: Array, latents: Array, sample_noise: SampleNoise) -> Array:
        image, _ = self.image_and_noise(i, prediction, latents)
        self.history = [(latents - image) / self.sigma[i], *self.history][:4]
        levels = self.sigma[i - min(i + 1, 4) + 1 : i + 1][::-1]
        nodes, weights = np.polynomial.legendre.leggauss(4)
        begin, end = self.sigma[i : i + 2]
        points = (begin + end) / 2 + (end - begin) / 2 * nodes
        for k, derivative in enumerate(self.history[: len(levels)]):
            others = np.delete(levels, k)[:, None]
            lagrange = np.prod((points - others) / (levels[k] - others), 0)
            latents = latents + (end - begin) / 2 * (weights @ lagrange) * derivative
        return latents


class _Heun(_Sigmas):
    """Euler's step to the next noise level, then the same step with the mean of both derivatives."""

    defaults = {**_Sigmas.defaults, "beta_start": 0.00085, "beta_end": 0.012}
    ignored = ("rescale_betas_zero_snr", "final_sigmas_type")
    order = 2

    def points(self) -> tuple[Array, Array, Array]:
        timesteps, alpha, sigma = super().points()
        double = np.repeat(np.arange(self.steps), 2)[1:]
        return timesteps[double], np.append(alpha[double], 1), np.append(sigma[double], sigma[-1])

    def step(self, i: int, prediction: Array, latents: Array, sample_noise: SampleNoise) -> Array:
        image, _ = self.image_and_noise(i, prediction, latents)
        derivative = (latents - image) / self.sigma[i]
        if not self.history:
            self.history = [latents, derivative]
            return latents + derivative * (self.sigma[i + 1] - self.sigma[i])
        (before, first), self.history = self.history, []
        return before + (first + derivative) / 2 * (self.sigma[i] - self.sigma[i - 1])


class _Multistep(_Sigmas):
    """Solvers over half the log signal-to-noise ratio, lambda = log(alpha / sigma)."""

    preserves_variance = True
    options = {**_Sigmas.options, "use_exponential_sigmas": (False,)}  # diffusers truncates their timesteps
    extra_timesteps = 1

    def log_snr(self, i: int) -> float:
        return math.log(self.alpha[i] / self.sigma[i]) if self.sigma[i] else math.inf


class _DpmSolver(_Multistep):
    """DPM-Solver++ (Lu et al., 2022), deterministic or with noise (sde-dpmsolver++)."""

    call_options = ("timesteps",)
    defaults = {
        **_Sigmas.defaults, "solver_order": 2, "algorithm_type": "dpmsolver++", "solver_type": "midpoint",
        "lower_order_final": True, "euler_at_final": False, "lambda_min_clipped": -math.inf, "variance_type": None,
        "use_lu_lambdas": False,
    }  # fmt: skip
    options = {
        **_Multistep.options, "solver_order": (1, 2, 3), "algorithm_type": ("dpmsolver++", "sde-dpmsolver++", "deis"),
        "solver_type": ("midpoint", "heun", "logrho", "bh1", "bh2"), "lambda_min_clipped": (-math.inf,),
        "variance_type": (None,), "use_lu_lambdas": (False,),
    }  # fmt: skip

    def step(self, i: int, prediction: Array, latents: Array, sample_noise: SampleNoise) -> Array:
        image, _ = self.image_and_noise(i, prediction, latents)
        noisy = self.config["algorithm_type"] == "sde-dpmsolver++"
        solver_order, count = self.config["solver_order"], len(self.timesteps)
        self.history = [image, *self.history][:solver_order]
        few = self.config["lower_order_final"] and count < 15
        order = min(len(self.history), 2 if few and i == count - 2 else 3)
        if i == count - 1 and (few or self.config["euler_at_final"] or self.config["final_sigmas_type"] == "zero"):
            order = 1
        if noisy and order > 2:
            raise ValueError
        alpha, sigma = self.alpha[i + 1], self.sigma[i + 1]
        h = self.log_snr(i + 1) - self.log_snr(i)
        doubled = 2 * h if noisy else h  # noise takes the place of half of the way
        decay = math.expm1(-doubled)
        after = sigma / self.sigma[i] * (math.exp(-h) if noisy else 1) * latents - alpha * decay * image
        if order > 1:
            heun = self.config["solver_type"] == "heun"
            near = (image - self.history[1]) * h / (self.log_snr(i) - self.log_snr(i - 1))
            if order == 2:
                after = after + alpha * ((decay / doubled + 1) if heun else -decay / 2) * near
            else:
                r0, r1 = (self.log_snr(j) - self.log_snr(j - 1) for j in (i, i - 1))
                r0, r1 = r0 / h, r1 / h
                far = (self.history[1] - self.history[2]) / r1
                curve = (near - far) / (r0 + r1)
                after = after + alpha * (decay / h + 1) * (near + r0 * curve)
                after = after - alpha * ((decay + h) / h**2 - 0.5) * curve
        return after + sigma * math.sqrt(-math.expm1(-2 * h)) * sample_noise() if noisy else after


class _UniPc(_Multistep):
    """UniPC (Zhao et al., 2023): a predictor, whose result the next prediction corrects."""

    defaults = {
        **_Sigmas.defaults, "solver_order": 2, "predict_x0": True, "solver_type": "bh2", "lower_order_final": True,
        "disable_corrector": [], "solver_p": None,
    }  # fmt: skip
    options = {
        **_Multistep.options, "solver_order": (1, 2, 3), "predict_x0": (True,), "solver_p": (None,),
        "solver_type": ("bh1", "bh2", "midpoint", "heun", "logrho"),
    }  # fmt: skip
    before: Array  # latents before the last step, corrected
    order_before: int

    @property
    def rounds_timesteps(self) -> bool:
        return bool(self.config["use_karras_sigmas"])

    def last_sigma(self, levels: Array, sigmas: Array) -> float:
        return float(sigmas[-1] if self.config["use_karras_sigmas"] else levels[0])

    def step(self, i: int, prediction: Array, latents: Array, sample_noise: SampleNoise) -> Array:
        image, _ = self.image_and_noise(i, prediction, latents)
        if i > self.begin and i - 1 not in self.config["disable_corrector"]:
            latents = self.move(i - 1, self.order_before, self.before, self.history, image)
        self.history = [image, *self.history][: self.config["solver_order"]]
        remaining_steps = len(self.timesteps) - i if self.config["lower_order_final"] else 3
        self.before, self.order_before = latents, min(len(self.history), remaining_steps)
        return self.move(i, self.order_before, latents, self.history)

    def move(self, i: int, order: int, latents: Array, images: list[Array], after: Array | None = None) -> Array:
        """Return `latents` moved from noise level i to the next one.

        images: predicted images of the steps i, i - 1, ... after: the image after the step, which gives the corrected
        result.
        """
        h = self.log_snr(i + 1) - self.log_snr(i)
        decay = math.expm1(-h)
        scale = -h if self.config["solver_type"] == "bh1" else decay
        ratios = [(self.log_snr(i - k) - self.log_snr(i)) / h for k in range(1, order)]
        slopes = [(image - images[0]) / ratio for image, ratio in zip(images[1:], ratios, strict=False)]
        if after is not None:
            ratios, slopes = [*ratios, 1.0], [*slopes, after - images[0]]
        total: Any = 0.0
        if len(slopes) == 1:
            total = slopes[0] / 2
        elif slopes:
            moments, moment, factorial = [], decay / -h - 1, 1.0
            for k in range(1, len(slopes) + 1):
                moments.append(moment * factorial / scale)
                factorial *= k + 1
                moment = moment / -h - 1 / factorial
            powers = np.vander(ratios, len(ratios), increasing=True).T
            total = sum(f * slope for f, slope in zip(np.linalg.solve(powers, moments), slopes, strict=True))
        moved: Array = self.sigma[i + 1] / self.sigma[i] * latents - self.alpha[i + 1] * decay * images[0]
        return moved - self.alpha[i + 1] * scale * total if slopes else moved


# --- By name ----------------------------------------------------------------------------------------------------------

COMMON: Mapping[str, Any] = {
    "num_train_timesteps": 1000, "beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear", "trained_betas": None,
    "prediction_type": "epsilon", "steps_offset": 0, "rescale_betas_zero_snr": False, "thresholding": False,
    "use_beta_sigmas": False, "use_flow_sigmas": False,
}  # fmt: skip
OPTIONS = {
    "beta_schedule": ("linear", "scaled_linear", "squaredcos_cap_v2"), "thresholding": (False,),
    "prediction_type": ("epsilon", "v_prediction", "sample"), "use_beta_sigmas": (False,), "use_flow_sigmas": (False,),
    "timestep_spacing": ("linspace", "leading", "trailing"), "clip_sample": (False,),
}  # fmt: skip
CALL_OPTIONS = ("timesteps", "sigmas", "strength")  # arguments of set_timesteps
CLASSES: dict[str, type[_Scheduler]] = {
    "DDIMScheduler": _Ddim, "DDPMScheduler": _Ddpm, "PNDMScheduler": _Pndm, "LCMScheduler": _Lcm,
    "EulerDiscreteScheduler": _Euler, "EulerAncestralDiscreteScheduler": _EulerAncestral,
    "LMSDiscreteScheduler": _Lms, "HeunDiscreteScheduler": _Heun, "DPMSolverMultistepScheduler": _DpmSolver,
    "UniPCMultistepScheduler": _UniPc,
}  # fmt: skip


def short_name(name: str) -> str:
    """Return a scheduler's name without "Scheduler", case and punctuation."""
    return "".join(c for c in name.lower() if c.isalnum()).removesuffix("scheduler")


def class_name(name: str, names: Iterable[str] = CLASSES) -> str | None:
    """Return the one of the class `names` that `name` means, a class name or a short form; None if there is none.

    Short forms leave out "Scheduler", then "Discrete" and "Multistep"; case and punctuation do not matter.
    """
    names = list(names)
    short_form = short_name(name)
    by_form = {short_name(each).replace("discrete", "").replace("multistep", ""): each for each in names}
    return {**by_form, **{short_name(each): each for each in names}}.get(short_form)


@lru_cache(32)
def _cached(name: str, config: str, steps: int, eta: float) -> _Scheduler | None:
    return _create(name, json.loads(config), steps, eta)


def numpy_scheduler(name: str, config: Mapping[str, Any], steps: int, eta: float = 0.0) -> _Scheduler | None:
    """Return the NumPy implementation of diffusers' scheduler `name` after set_timesteps(steps), or None without one.

    `config` may also hold the `call_options` of the class: `timesteps` or `sigmas` count instead of `steps`. Not
    implemented are unknown classes, options and values, and numbers of steps that diffusers rejects. The last 32
    results are cached.
    """
    try:
        return _cached(name, json.dumps(dict(config), sort_keys=True), steps, eta)
    except TypeError:  # a value of the config is no JSON
        return None


def _create(name: str, config: Mapping[str, Any], steps: int, eta: float) -> _Scheduler | None:
    cls = CLASSES.get(name)
    call = {key: config[key] for key in CALL_OPTIONS if config.get(key) is not None}
    if cls is None or call.keys() - cls.call_options or len(call) > 1:
        return None
    if "strength" not in call:
        steps = next((len(values) - (key == "sigmas") for key, values in call.items()), steps)
    if not 1 <= steps <= MAX_STEPS:
        return None
    defaults = {**COMMON, "clip_sample": False, **cls.defaults, **call}
    defaults = {key: value for key, value in defaults.items() if key not in cls.ignored}
    config = {**defaults, **{key: value for key, value in config.items() if key in defaults}}
    options = {**OPTIONS, **cls.options}
    if any(config[key] not in values for key, values in options.items() if key in config):
        return None
    try:
        with np.errstate(all="raise", under="ignore"):
            scheduler = cls(config, steps, eta)
            scheduler.schedule(0, len(scheduler.timesteps))
    except (ArithmeticError, ValueError, TypeError, IndexError):
        return None  # diffusers says why
    return scheduler if steps <= scheduler.trained else None


def _alphas_cumprod(config: Mapping[str, Any], zero_snr: float) -> Array:
    """Return ᾱ (training timesteps,), float64, rounded as diffusers computes it in float32."""
    count, kind = config["num_train_timesteps"], config["beta_schedule"]
    if config["trained_betas"] is not None:
        betas = np.array(config["trained_betas"], np.float32)
    elif kind == "squaredcos_cap_v2":
        remaining = np.cos((np.arange(count + 1) / count + 0.008) / 1.008 * np.pi / 2) ** 2
        betas = np.minimum(1 - remaining[1:] / remaining[:-1], 0.999).astype(np.float32)
    else:
        power = 2 if kind == "scaled_linear" else 1
        ends = config["beta_start"] ** (1 / power), config["beta_end"] ** (1 / power)
        betas = np.linspace(*ends, count).astype(np.float32) ** np.float32(power)
    product = np.cumprod((1 - betas).astype(np.float64))
    if not config.get("rescale_betas_zero_snr"):
        return product.astype(np.float32).astype(np.float64)
    root = np.sqrt(product)  # scaled and shifted to end at 0 (Lin et al., 2024)
    product = ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
    product[-1] = zero_snr
    return product
