"""MagCache of diffusers: transformer steps that reuse the residual of all blocks, chosen by calibrated ratios."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.pipelines.arguments import is_finite, is_integer
from sd_ort.pipelines.cached_transformer import COMPONENT, CachedTransformer, PromptCache, Read, check_steps, open_cut
from sd_ort.runtime.components import Components
from sd_ort.runtime.session import OrtModel

BLOCKS_RESIDUAL = "blocks_residual"  # of the graphs of `graphs.block_cache_graphs`
RATIO_LIMIT = 10_000  # more than any schedule has


@dataclass(frozen=True)
class MagCacheConfig:
    """Settings of MagCache, with diffusers' names and defaults.

    The blocks are left out while the magnitude of their residual, by the ratios, would change by at most `threshold` in
    sum, for at most `max_skip_steps` steps in a row and not in the first `retention_ratio` of the steps.

    Attributes:
        mag_ratios: Magnitude of the residual in each step, by that of the step before. They depend on the model and its
            scheduler. Other numbers than `num_inference_steps` are interpolated to the nearest.
        calibrate: Compute all blocks, and measure the ratios: `pipe.mag_ratios` has them after a call.

    Raises InputError for settings that cannot be used.
    """

    threshold: float = 0.06
    max_skip_steps: int = 3
    retention_ratio: float = 0.2
    num_inference_steps: int = 28
    mag_ratios: Sequence[float] | None = None
    calibrate: bool = False

    def __post_init__(self) -> None:
        if not is_finite(self.threshold) or self.threshold < 0:
            raise InputError(f"threshold must be a number from 0 on, got {str(self.threshold)[:80]}.")
        if not is_finite(self.retention_ratio) or not 0 <= self.retention_ratio <= 1:
            raise InputError(f"retention_ratio must be between 0 and 1, got {str(self.retention_ratio)[:80]}.")
        for name in ("max_skip_steps", "num_inference_steps"):
            if not is_integer(getattr(self, name)) or getattr(self, name) < 1:
                raise InputError(f"{name} must be an integer from 1 on, got {str(getattr(self, name))[:80]}.")
        if self.calibrate:
            return
        if self.mag_ratios is None:
            raise InputError(
                "mag_ratios are missing, which depend on the model: measure them with MagCacheConfig(calibrate=True)."
            )
        try:
            ratios = [float(ratio) for ratio in self.mag_ratios]
        except (TypeError, ValueError) as error:
            raise InputError(f"mag_ratios must be one number a step, got {str(self.mag_ratios)[:80]}.") from error
        if not 0 < len(ratios) <= RATIO_LIMIT or not all(is_finite(ratio) for ratio in ratios):
            raise InputError(f"mag_ratios must be one number a step, got {len(ratios)} with others than numbers.")

    def check(self, steps: int) -> None:
        """Raise InputError for calls with another number of steps, or whose steps differ too much for the cache."""
        check_steps(steps)
        if steps != self.num_inference_steps:
            raise InputError(
                f"MagCache was enabled for {self.num_inference_steps} steps, not {steps}: enable it with "
                f"num_inference_steps={steps}, or give {self.num_inference_steps} steps."
            )

    def full_steps(self) -> list[bool]:
        """Return for each step whether it computes all blocks: the decisions of diffusers' hook, before the call."""
        count = self.num_inference_steps
        if self.calibrate:
            return [True] * count
        assert self.mag_ratios is not None
        # float32, as torch computes with its tensor of ratios
        ratios = np.asarray(self.mag_ratios, np.float32)[nearest(len(self.mag_ratios), count)]
        first, full = int(self.retention_ratio * count + 0.5), []
        ratio, error, skipped = np.float32(1), np.float32(0), 0
        for step in range(count):
            is_full = True
            if step >= first:
                ratio, skipped = ratio * ratios[step], skipped + 1
                error = error + abs(np.float32(1) - ratio)
                is_full = step == 0 or not (error <= self.threshold and skipped <= self.max_skip_steps)
                if is_full:
                    ratio, error, skipped = np.float32(1), np.float32(0), 0
            full.append(is_full)
        return full

    def open(self, models: Components) -> CachedTransformer:
        """Return the transformer for the steps of one call, and close the original graph; it shares the weights.

        Raises InputError if its graph cannot be cut.
        """
        light = open_cut(models, "MagCache's ends", "leave_blocks_out")
        full = open_cut(models, "MagCache's blocks", "return_residual")
        models.opened.pop(COMPONENT, None)
        return MagCacheTransformer(light, full, self)


def nearest(length: int, count: int) -> np.ndarray:
    """Return the indices (count,) that resize `length` values to `count` by nearest interpolation."""
    if length == count:
        return np.arange(count)
    if count == 1:
        return np.array([length - 1])
    scale = np.float32((length - 1) / (count - 1))
    return np.rint(np.arange(count, dtype=np.float32) * scale).astype(np.int64)


class MagCacheTransformer(CachedTransformer):
    """Leaves all blocks out in the steps that `MagCacheConfig.full_steps` tells; a GPU reads no number back for it."""

    CACHED = (BLOCKS_RESIDUAL,)

    def __init__(self, light: OrtModel, full: OrtModel, config: MagCacheConfig) -> None:
        super().__init__(light, full)
        self.config, self.plan = config, config.full_steps()
        self.ratios: list[float] = []  # of the first prompt, with `calibrate`
        self._previous: np.ndarray | None = None

    def step(self, cache: PromptCache, run_head: Callable[[], Read], run_rest: Callable[[], Read]) -> Read:
        if not self.plan[cache.step] and cache.last is not None:
            return run_head()
        self.full_steps += 1
        read = run_rest()
        if self.config.calibrate and cache.number == 0:
            self._measure(read(BLOCKS_RESIDUAL))
        return read

    def _measure(self, residual: np.ndarray) -> None:
        """Add the mean over tokens of the residual's magnitude by that of the step before; 1 in the first step."""
        magnitudes = np.linalg.norm(residual.astype(np.float32), axis=-1)
        previous = magnitudes if self._previous is None else self._previous + np.float32(1e-8)
        self.ratios.append(float((magnitudes / previous).mean()))
        self._previous = magnitudes
