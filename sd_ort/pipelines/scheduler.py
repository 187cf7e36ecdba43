"""The scheduler of a pipeline: in NumPy where `numpy_schedulers` has it, else diffusers'."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from sd_ort.checkpoints.configs import scheduler_config
from sd_ort.checkpoints.linear_schedule import LinearSchedule
from sd_ort.checkpoints.numpy_schedulers import class_name, numpy_scheduler
from sd_ort.checkpoints.schedulers import check_interface, make_scheduler, scheduler_class

if TYPE_CHECKING:
    from sd_ort.checkpoints.schedule import NonlinearSchedule
    from sd_ort.pipelines.request import Request

    # The timesteps of one call, of which `schedule(start, stop)` returns a range.
    Timetable: TypeAlias = Any
    Schedule: TypeAlias = LinearSchedule | NonlinearSchedule


class PipelineScheduler:
    """A folder's scheduler, one of another class with the folder's configuration, or a diffusers object."""

    def __init__(self, folder: Path, scheduler: Any = None) -> None:
        """`scheduler`: None for the folder's own, a name, or a diffusers object. Raises InputError for a scheduler that
        is unknown or cannot drive a Stable Diffusion UNet."""
        self.folder = folder
        self._choice = scheduler if isinstance(scheduler, str) else None
        self._diffusers = None if isinstance(scheduler, str) else scheduler
        if self._diffusers is not None:
            check_interface(scheduler)
            self.name = type(scheduler).__name__
            return
        self._config = {**scheduler_config(folder), "clip_sample": False}  # as `make_scheduler`
        name = self._config.get("_class_name") or "" if scheduler is None else scheduler
        self.name = class_name(name) or scheduler_class(name).__name__
        if self._config.get("num_train_timesteps", 1000) is None or self._numpy(min(10, self.trained)) is None:
            assert self.diffusers  # diffusers says whether it can drive this UNet

    @property
    def diffusers(self) -> Any:
        """diffusers' scheduler."""
        if self._diffusers is None:
            self._diffusers = make_scheduler(self.folder, self._choice)
        return self._diffusers

    @property
    def config(self) -> Mapping[str, Any]:
        return self._config if self._diffusers is None else dict(self._diffusers.config)

    @property
    def trained(self) -> int:
        """Timesteps that the model was trained with."""
        return int(self.config.get("num_train_timesteps", 1000))

    def timetable(self, request: Request, with_strength: bool = False) -> Timetable:
        """Return the timesteps of a call.

        with_strength: whether the scheduler reads `request.strength`, as LCMScheduler can. Raises InputError for a
        schedule or a number of steps that the scheduler does not support.
        """
        names = ("timesteps", "sigmas", "original_inference_steps", *(["strength"] if with_strength else []))
        options = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
        if "original_inference_steps" not in options:
            numpy_timetable = self._numpy(request.num_inference_steps, request.eta, **options)
            if numpy_timetable is not None:
                return numpy_timetable
        from sd_ort.checkpoints.schedule import DiffusersTimetable

        seeds = request.generator if isinstance(request.generator, list) else [request.generator]
        seed = request.generator if all(isinstance(each, int) for each in seeds) else None
        return DiffusersTimetable(self.diffusers, request.num_inference_steps, request.eta, seed, **options)

    def _numpy(self, steps: int, eta: float = 0.0, **options: Any) -> Timetable | None:
        own = self._diffusers is not None and not type(self._diffusers).__module__.startswith("diffusers.schedulers.")
        return None if own else numpy_scheduler(self.name, {**self.config, **options}, steps, eta)
