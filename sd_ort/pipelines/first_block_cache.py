"""Steps of a transformer that keep what the blocks behind the first one add (FirstBlockCache of diffusers)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import HOISTED
from sd_ort.pipelines.arguments import is_finite
from sd_ort.pipelines.step_cache import ADVICE, FEWEST_STEPS
from sd_ort.runtime.components import Components
from sd_ort.runtime.session import Model

if TYPE_CHECKING:
    import onnx_ir as ir

COMPONENT = HOISTED["transformer"]["step"]


@dataclass(frozen=True)
class FirstBlockCache:
    """Settings of the cache. threshold: change of the first block's residual from which all blocks are computed."""

    threshold: float = 0.05

    def check(self, steps: int) -> None:
        """Raise InputError for calls whose steps differ too much from each other."""
        if steps < FEWEST_STEPS:
            raise InputError(
                f"{steps} steps are too few to keep blocks between them, as schnell and Turbo models take: give "
                f"{FEWEST_STEPS} or more, or {ADVICE}."
            )

    def open(self, models: Components) -> CachedTransformer:
        """Return the transformer for the steps of one call, whose whole graph is closed: it would be in memory twice.

        Raises InputError if its graph cannot be cut.
        """
        head = models.variant(COMPONENT, "first block", partial(_cut, models.folder, "keep_head"))
        rest = models.variant(COMPONENT, "later blocks", partial(_cut, models.folder, "keep_rest"))
        models.opened.pop(COMPONENT, None)
        return CachedTransformer(head, rest, self.threshold)


def _cut(folder: Path, edit: str, path: Path) -> bytes:
    from sd_ort.graphs import first_block
    from sd_ort.graphs.load import load, serialize_over_data
    from sd_ort.weights.recipes import read_recipes

    model: ir.Model = load(path)
    getattr(first_block, edit)(model, read_recipes(folder).get("transformer", {}))
    return serialize_over_data(model, path.parent)


@dataclass
class _Kept:
    """Tensors kept for one prompt. given: its inputs, alive as long as this. shared: those of the head, of the rest."""

    given: Mapping[str, np.ndarray]
    shared: tuple[dict[str, np.ndarray], dict[str, np.ndarray]]
    residual: np.ndarray | None = None
    later: np.ndarray | None = None


class CachedTransformer:
    """Runs a transformer as two graphs, and skips the second one in steps whose first block changed little.

    head: the first block and the output; rest: the later blocks. For the steps of one call. full_steps: number of runs
    of all blocks.
    """

    def __init__(self, head: Model, rest: Model, threshold: float) -> None:
        self.head, self.rest, self.threshold = head, rest, threshold
        own = {*head.outputs, *rest.outputs, "last_first_block_residual"}
        both = {**rest.inputs, **head.inputs}
        self.inputs = {name: value for name, value in both.items() if name not in own}
        self.full_steps = 0
        self._kept: dict[int, _Kept] = {}  # by the identity of the inputs that the steps of a prompt share

    def run_with_shared(self, shared: Mapping[str, np.ndarray], **arrays: Any) -> dict[str, np.ndarray]:
        """Run a step as `Model.run_with_shared` does, all blocks or the first one."""
        head, rest = self.head, self.rest
        kept = self._kept.get(id(shared))
        if kept is None:
            parts = [{n: a for n, a in shared.items() if n in model.inputs} for model in (head, rest)]
            kept = self._kept[id(shared)] = _Kept(shared, (parts[0], parts[1]))
        own = {name: array for name, array in arrays.items() if name in head.inputs}
        if kept.residual is None or kept.later is None:
            zeros = self._zeros(arrays["hidden_states"])
            last = {"last_first_block_residual": zeros, "later_residual": zeros}
        else:
            last = {"last_first_block_residual": kept.residual, "later_residual": kept.later}
        outputs = head.run_with_shared(kept.shared[0], **own, **last)
        if kept.later is not None and float(outputs["first_block_change"]) <= self.threshold:
            return outputs
        self.full_steps += 1
        streams = {n: array for n, array in outputs.items() if n in rest.inputs}
        own = {name: array for name, array in arrays.items() if name in rest.inputs}
        result = rest.run_with_shared(kept.shared[1], **own, **streams)
        kept.residual, kept.later = outputs["first_block_residual"], result["later_residual"]
        return result

    def _zeros(self, hidden_states: np.ndarray) -> np.ndarray:
        """Return residuals before the first step (B, S, width)."""
        width = int(self.head.inputs["later_residual"].shape[2])
        return np.zeros((*hidden_states.shape[:2], width), self.head.dtype("later_residual"))


class FirstBlockCacheMixin:
    """Methods of a transformer's pipeline that keep blocks between steps."""

    folder: Path
    models: Any
    block_cache: FirstBlockCache | None = None

    @property
    def is_cache_enabled(self) -> bool:
        return self.block_cache is not None

    def enable_cache(self, threshold: float = 0.05) -> None:
        """Compute all blocks only in steps whose first block changes by more than `threshold`, until `disable_cache`.

        The change is that of the first block's residual since the last full step, as with diffusers'
        `FirstBlockCacheConfig`: its mean magnitude beside that of the residual. Other steps add what the later blocks
        added then. Images differ. Raises InputError for a threshold that is not between 0 and 1, and for transformers
        other than FLUX.1.
        """
        if not is_finite(threshold) or not 0 < threshold < 1:
            raise InputError(f"threshold must be between 0 and 1, got {str(threshold)[:80]}.")
        self.disable_cache()
        cache = FirstBlockCache(float(threshold))
        try:
            cache.open(self.models)
        except BaseException:
            self.models.drop_variants(COMPONENT)
            raise
        self.block_cache = cache

    def disable_cache(self) -> None:
        """Compute all blocks in every step again."""
        self.block_cache = None
        self.models.drop_variants(COMPONENT)
