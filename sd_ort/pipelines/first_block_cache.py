"""FirstBlockCache of diffusers: transformer steps that reuse the residual of the later blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.pipelines.arguments import is_finite
from sd_ort.pipelines.cached_transformer import COMPONENT, CachedTransformer, PromptCache, Read, check_steps, open_cut
from sd_ort.runtime.components import Components
from sd_ort.runtime.session import OrtModel

# Inputs and outputs of the graphs of `graphs.block_cache_graphs`, which is imported when a graph is cut.
LAST_RESIDUAL, LATER_RESIDUAL, CHANGE = "last_first_block_residual", "later_residual", "first_block_change"


@dataclass(frozen=True)
class FirstBlockCacheConfig:
    """Settings of FirstBlockCache, with diffusers' names and defaults.

    threshold: change of the first block's residual from which all blocks are computed. Raises InputError for one that
    is not between 0 and 1.
    """

    threshold: float = 0.05

    def __post_init__(self) -> None:
        if not is_finite(self.threshold) or not 0 < self.threshold < 1:
            raise InputError(f"threshold must be between 0 and 1, got {str(self.threshold)[:80]}.")

    def check(self, steps: int) -> None:
        """Raise InputError for calls whose steps differ too much for the cache."""
        check_steps(steps)

    def open(self, models: Components) -> CachedTransformer:
        """Return the transformer for the steps of one call, and close the complete graph; it shares the weights.

        Raises InputError if its graph cannot be cut.
        """
        head = open_cut(models, "first block", "keep_head")
        rest = open_cut(models, "later blocks", "keep_rest")
        models.opened.pop(COMPONENT, None)
        return FirstBlockTransformer(head, rest, self.threshold)


class FirstBlockTransformer(CachedTransformer):
    """Transformer that skips the later blocks in steps where the first block's output changed little.

    On a GPU the host reads one number a step, from which it decides.
    """

    CACHED = (LAST_RESIDUAL, LATER_RESIDUAL)

    def __init__(self, head: OrtModel, rest: OrtModel, threshold: float) -> None:
        super().__init__(head, rest)
        self.threshold = threshold

    def step(self, cache: PromptCache, run_head: Callable[[], Read], run_rest: Callable[[], Read]) -> Read:
        read = run_head()
        return run_rest() if self._is_full(cache, read(CHANGE)) else read

    def _is_full(self, cache: PromptCache, change: np.ndarray) -> bool:
        """Return whether a step computes all blocks, and count it."""
        full = cache.last is None or not float(change) <= self.threshold
        self.full_steps += full
        return full
