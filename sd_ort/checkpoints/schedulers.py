"""diffusers' schedulers by name, checked before they are used."""

from __future__ import annotations

import inspect
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sd_ort.checkpoints.configs import scheduler_config
from sd_ort.checkpoints.numpy_schedulers import class_name
from sd_ort.core.errors import InputError, first_line, report_missing_package

# What the sampling loop reads of a scheduler, and the number of arguments of `step`.
INTERFACE, STEP_ARGUMENTS = ("set_timesteps", "scale_model_input", "step", "init_noise_sigma", "order", "config"), 3
# Each scheduler has its own way to reject a configuration or a call.
REJECTIONS = (ValueError, TypeError, AssertionError, LookupError, AttributeError, ArithmeticError, RuntimeError)
STEP_LIMIT = 5000  # denoising steps; a schedule as a matrix has their square


def make_scheduler(folder: Path, scheduler: Any = None) -> Any:
    """Return the folder's scheduler, or one of another class with the folder's config; an object is returned unchanged.

    These schedulers never clip (`clip_sample`, the default of DDIM and DDPM): latents have no bounds, and
    diffusers' Stable Diffusion pipelines turn it off as well.

    Raises InputError for a name that is no diffusers scheduler, or one that cannot drive a Stable Diffusion UNet.
    """
    if scheduler is not None and not isinstance(scheduler, str):
        return scheduler
    config = scheduler_config(folder)
    cls = scheduler_class(config.get("_class_name") or "" if scheduler is None else scheduler)
    if "clip_sample" in inspect.signature(cls).parameters:
        config = {**config, "clip_sample": False}
    try:
        _try_a_step(cls.from_config(config))
        return cls.from_config(config)
    except ImportError as error:
        raise InputError(" ".join(str(error).split())) from error  # names the package and how to install it
    except Exception as error:  # each scheduler has its own way to reject a configuration, or other arguments
        raise InputError(
            f"{cls.__name__} cannot drive this UNet ({first_line(error)}): try euler, ddim or dpmsolver."
        ) from error


def check_interface(scheduler: Any) -> None:
    """Raise InputError for an object that is no scheduler of a U-Net. None of its methods is called."""
    reason = next((f"it has no {name}" for name in INTERFACE if not hasattr(scheduler, name)), None)
    if reason is None:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(scheduler.step).parameters.values()
        required = [p.name for p in parameters if p.kind in kinds and p.default is p.empty][STEP_ARGUMENTS:]
        reason = f"its step needs {' and '.join(required)}" if required else None
    if reason is not None:
        raise InputError(
            f"{type(scheduler).__name__} cannot drive a U-Net, since {reason}: use euler, ddim or dpmsolver."
        )


def _try_a_step(scheduler: Any) -> None:
    """Run one step of a scheduler as the sampling loop does. Raises the scheduler's exceptions."""
    import torch

    scheduler.set_timesteps(10)
    latents = torch.zeros(1, 4, 1, 1) * scheduler.init_noise_sigma
    with torch.random.fork_rng(devices=[]):  # ancestral schedulers draw
        sample = scheduler.scale_model_input(latents, scheduler.timesteps[0])
        scheduler.step(sample, scheduler.timesteps[0], latents)


def set_timesteps(scheduler: Any, steps: int, **options: Any) -> int:
    """Set the schedule of a scheduler and return the number of steps.

    options: `timesteps` or `sigmas` instead of `steps`, and LCM's `original_inference_steps` and `strength`; None for
    the default.

    Raises InputError for a number of steps that the scheduler rejects, such as more than LCM was distilled for, and for
    a schedule that it does not take.
    """
    options = {name: value for name, value in options.items() if value is not None}
    name = type(scheduler).__name__
    if unknown := options.keys() - inspect.signature(scheduler.set_timesteps).parameters.keys():
        raise InputError(f"{name} takes no {unknown.pop()}: leave them out, or use another scheduler.")
    if {"timesteps", "sigmas"} <= options.keys():
        raise InputError("timesteps and sigmas both are a schedule: give one of them.")
    schedule = options.get("timesteps", options.get("sigmas"))
    count = steps if schedule is None else len(schedule)
    if not 1 <= count <= STEP_LIMIT:
        raise InputError(f"{count} steps are not between 1 and {STEP_LIMIT}.")
    try:
        scheduler.set_timesteps(**options) if schedule is not None else scheduler.set_timesteps(steps, **options)
    except REJECTIONS as error:
        rejected = f"{count} steps" if schedule is None else "this schedule"
        raise InputError(
            f"{name} cannot take {rejected} ({first_line(error)}): change it, or the scheduler."
        ) from error
    if "strength" in options:  # LCMScheduler counts the steps before it drops some, and its last step then adds noise
        scheduler.num_inference_steps = len(scheduler.timesteps)
    return steps if schedule is None else len(scheduler.timesteps)


def scheduler_class(name: str) -> Any:
    """Return a diffusers scheduler by class name or short form, such as "euler", "ddim" or "dpmsolver".

    Short forms are those of `numpy_schedulers.class_name`. Raises InputError if there is none, and without diffusers.
    """
    with report_missing_package():
        class_: str | None = name
        if (spec := find_spec("diffusers")) is not None:
            text = Path(spec.origin or "").read_text()  # importing it takes seconds, for a name that may be mistyped
            class_ = class_name(name, sorted(set(re.findall(r'"(\w+Scheduler)"', text)), reverse=True))
        if class_ is None:
            raise InputError(f"{name!r} is no diffusers scheduler: use euler, ddim, dpmsolver, unipc or a class name.")
        import diffusers

    return getattr(diffusers, class_)
