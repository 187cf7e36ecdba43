"""Linear schedules, and an on-disk cache of those of a folder's own scheduler.

Computing a schedule (`checkpoints.schedule`) needs torch and diffusers, whose imports take seconds, longer than an
image on a GPU. A schedule has a few kB, and depends only on the scheduler's config and the number of steps.
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
MAX_BYTES = 1 << 20  # of a cached schedule: 500 steps with noise, whose coefficients grow with the square of steps
MAX_SCHEDULES = 32  # in memory; each takes up to some hundred milliseconds to compute


@dataclass(frozen=True)
class LinearSchedule:
    """A schedule of T steps that depend on the last W latents and predictions and on S noise samples.

    Arrays are float32: `timesteps` (T,), `scales` (T,) of the UNet's input, coefficients `steps` (T, W, 2) of latents
    and predictions and `drawn` (T, S) of noise samples (see `checkpoints.schedule`). `initial`: factor of the first
    latents in `weights`.
    """

    timesteps: np.ndarray
    scales: np.ndarray
    steps: np.ndarray
    drawn: np.ndarray
    initial: float = 1.0

    @property
    def draws(self) -> int:
        """S, the number of standard normal noise samples with the shape of the latents."""
        return self.drawn.shape[1]

    @cached_property
    def weights(self) -> np.ndarray:
        """Coefficients (T + 1, 1 + T + S), float32, of the latents before each step and after the last.

        They are sums of the first latents, all predictions and all noise samples.
        """
        count, window = self.steps.shape[:2]
        weights = np.zeros((count + 1, 1 + count + self.draws))
        weights[0, 0] = self.initial
        for i in range(count):
            weights[i + 1, 1 + count :] = self.drawn[i]
            for back in range(min(window, i + 1)):
                weights[i + 1] += self.steps[i, back, 0].astype(np.float64) * weights[i - back]
                weights[i + 1, 1 + i - back] += self.steps[i, back, 1]
        return weights.astype(np.float32)


@dataclass(frozen=True)
class CachedSchedule:
    """A scheduler's timesteps (T,), its init_noise_sigma, and the linear schedule."""

    timesteps: np.ndarray
    init_noise_sigma: float
    schedule: LinearSchedule


def has_schedule(config: Mapping[str, Any]) -> bool:
    """Return whether any schedule of this config is cached, so that this scheduler works with a UNet."""
    return bool(listed(cache_folder() / KIND, f"{_key(config)}-*"))


def load_schedule(config: Mapping[str, Any], steps: int, eta: float) -> CachedSchedule | None:
    """Return the cached schedule of a scheduler with this config, or None."""
    path = kept(_name(config, steps, eta))
    with suppress(OSError):  # another process may remove it
        if path is not None:
            state = path.stat()
            return _read(path, state.st_mtime_ns, state.st_size)
    return None


@lru_cache(MAX_SCHEDULES)
def _read(path: Path, changed_ns: int, size: int) -> CachedSchedule | None:
    """Return the schedule in a file, read again only if the file has changed."""
    with (
        suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile),
        np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file,
    ):
        schedule = LinearSchedule(file["told"], file["scales"], file["steps"], file["drawn"])
        steps, window, kinds = schedule.steps.shape
        if (kinds, len(schedule.drawn)) == (2, steps) and 1 <= window <= steps and schedule.scales.shape == (steps,):
            return CachedSchedule(file["timesteps"], float(file["initial"]), schedule)
    return None  # a damaged file is replaced


def store_schedule(config: Mapping[str, Any], steps: int, eta: float, cached: CachedSchedule) -> None:
    """Store a schedule for later processes, unless it is larger than `MAX_BYTES`."""
    schedule = cached.schedule
    if schedule.steps.nbytes + schedule.drawn.nbytes > MAX_BYTES:
        return
    file = io.BytesIO()
    np.savez(
        file, timesteps=cached.timesteps, initial=np.float64(cached.init_noise_sigma), told=schedule.timesteps,
        scales=schedule.scales, steps=schedule.steps, drawn=schedule.drawn,
    )  # fmt: skip
    keep(_name(config, steps, eta), file.getvalue())


def _name(config: Mapping[str, Any], steps: int, eta: float) -> str:
    return f"{KIND}/{_key(config)}-{steps}-{float(eta)!r}.npz"


def _key(config: Mapping[str, Any]) -> str:
    """Return a hash of the config and the versions of the code that computes schedules."""
    content = json.dumps([dict(config), _versions()], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:20]


@cache
def _versions() -> list[str]:
    return [version("diffusers"), version("torch"), code_hash(Path(__file__).parent)]
