"""Schedulers as numbers, and those of a folder's own scheduler that an earlier process found.

Finding them (`family.schedule`) needs torch and diffusers, whose imports take seconds, longer than a picture on a GPU.
They are a few kB, and depend on the configuration and the number of steps alone.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.core.cache import cache_folder, keep, kept, listed
from sd_ort.core.files import code_hash

KIND = "schedules"
MOST_BYTES = 1 << 20  # of a schedule's numbers: those of 500 steps that draw, which have the square of the steps
REMEMBERED = 32  # schedules; each took up to some hundred milliseconds to find


@dataclass(frozen=True)
class LinearSchedule:
    """T steps that read the last W latents and predictions, and S draws: `timesteps` (T,), `scales` (T,) of the UNet's
    input, `steps` (T, W, 2), `drawn` (T, S); float32. What they mean is in `family.schedule`. `initial`: factor of the
    first latents in `weights`.
    """

    timesteps: np.ndarray
    scales: np.ndarray
    steps: np.ndarray
    drawn: np.ndarray
    initial: float = 1.0

    @property
    def draws(self) -> int:
        """S, how many times the scheduler draws standard normal numbers of the latents' shape, in that order."""
        return self.drawn.shape[1]

    @cached_property
    def weights(self) -> np.ndarray:
        """(T + 1, 1 + T + S), float32: the latents before each step and after the last as sums of the first ones, all
        predictions and all draws."""
        count, window = self.steps.shape[:2]
        made = np.zeros((count + 1, 1 + count + self.draws))
        made[0, 0] = self.initial
        for i in range(count):
            made[i + 1, 1 + count :] = self.drawn[i]
            for back in range(min(window, i + 1)):
                made[i + 1] += self.steps[i, back, 0].astype(np.float64) * made[i - back]
                made[i + 1, 1 + i - back] += self.steps[i, back, 1]
        return made.astype(np.float32)


@dataclass(frozen=True)
class Plan:
    """A scheduler's timesteps (T,), the factor of the first noise, and what it does in between."""

    timesteps: np.ndarray
    initial: float
    schedule: LinearSchedule


def known(config: Mapping[str, Any]) -> bool:
    """Whether an earlier process found a schedule of this configuration, so that diffusers can drive a UNet with it."""
    return bool(listed(cache_folder() / KIND, f"{_key(config)}-*"))


def find(config: Mapping[str, Any], steps: int, eta: float) -> Plan | None:
    """The plan of a scheduler with this configuration, if an earlier process kept it."""
    path = kept(_name(config, steps, eta))
    with suppress(OSError):  # another process may clear it away
        if path is not None:
            state = path.stat()
            return _read(path, state.st_mtime_ns, state.st_size)
    return None


@lru_cache(REMEMBERED)
def _read(path: Path, changed_ns: int, size: int) -> Plan | None:
    """The plan in a file, read once a process for each state of the file: every image asks."""
    with (
        suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile),
        np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file,
    ):
        schedule = LinearSchedule(file["told"], file["scales"], file["steps"], file["drawn"])
        steps, window, kinds = schedule.steps.shape
        if (kinds, len(schedule.drawn)) == (2, steps) and 1 <= window <= steps and schedule.scales.shape == (steps,):
            return Plan(file["timesteps"], float(file["initial"]), schedule)
    return None  # a damaged file is found again, and replaced


def remember(config: Mapping[str, Any], steps: int, eta: float, plan: Plan) -> None:
    """Keep a plan for later processes."""
    schedule = plan.schedule
    if schedule.steps.nbytes + schedule.drawn.nbytes > MOST_BYTES:
        return
    file = io.BytesIO()
    np.savez(
        file, timesteps=plan.timesteps, initial=np.float64(plan.initial), told=schedule.timesteps,
        scales=schedule.scales, steps=schedule.steps, drawn=schedule.drawn,
    )  # fmt: skip
    keep(_name(config, steps, eta), file.getvalue())


def _name(config: Mapping[str, Any], steps: int, eta: float) -> str:
    return f"{KIND}/{_key(config)}-{steps}-{float(eta)!r}.npz"


def _key(config: Mapping[str, Any]) -> str:
    """Hash over all that decides the numbers beside steps and eta, the code that finds them included."""
    what = json.dumps([dict(config), _made_by()], sort_keys=True, default=str)
    return hashlib.sha256(what.encode()).hexdigest()[:20]


@cache
def _made_by() -> list[str]:
    """The code that finds schedules: it does not change within a process."""
    return [version("diffusers"), version("torch"), code_hash(Path(__file__).parent)]
