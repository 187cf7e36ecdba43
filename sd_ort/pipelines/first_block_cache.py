"""Steps of a transformer that keep what the blocks behind the first one add (FirstBlockCache of diffusers)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import HOISTED
from sd_ort.pipelines.arguments import is_finite
from sd_ort.pipelines.step_cache import ADVICE, FEWEST_STEPS
from sd_ort.runtime.bound_run import GpuGraphModel, ShapeCache
from sd_ort.runtime.components import Components
from sd_ort.runtime.ort_values import read_value, write_value
from sd_ort.runtime.session import DTYPES, Model

if TYPE_CHECKING:
    import onnx_ir as ir

COMPONENT = HOISTED["transformer"]["step"]
# Inputs and outputs of the graphs of `graphs.first_block`, which is imported when a graph is cut.
LAST_RESIDUAL, LATER_RESIDUAL, CHANGE = "last_first_block_residual", "later_residual", "first_block_change"
OUTPUT = "out_hidden_states"


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
        head = models.variant(COMPONENT, "first block", partial(_cut, models.folder, "keep_head"), captured=True)
        rest = models.variant(COMPONENT, "later blocks", partial(_cut, models.folder, "keep_rest"), captured=True)
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
    """Tensors kept for one prompt. given: its inputs, alive as long as this. shared: those of the head, of the rest.

    number: of the prompt in the call. last: what the last full step gives the head, by the names of its inputs; None
    before the first step. runs: both graphs over buffers of a GPU, where the tensors of `last` stay.
    """

    given: Mapping[str, np.ndarray]
    shared: tuple[dict[str, np.ndarray], dict[str, np.ndarray]]
    number: int
    last: Mapping[str, np.ndarray] | None = None
    runs: BoundParts | None = None


class CachedTransformer:
    """Runs a transformer as two graphs, and skips the second one in steps whose first block changed little.

    head: the first block and the output; rest: the later blocks. For the steps of one call. full_steps: number of runs
    of all blocks. On a GPU both are captured, and the host reads one number a step, from which it decides.
    """

    def __init__(self, head: Model, rest: Model, threshold: float) -> None:
        self.head, self.rest, self.threshold = head, rest, threshold
        own = {*head.outputs, *rest.outputs}
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
            kept = self._kept[id(shared)] = _Kept(shared, (parts[0], parts[1]), len(self._kept))
        if isinstance(head, GpuGraphModel) and isinstance(rest, GpuGraphModel):
            return self._run_captured(head, rest, kept, arrays)
        last = kept.last or self._zeros(arrays["hidden_states"])
        own = {name: array for name, array in arrays.items() if name in head.inputs}
        outputs = head.run_with_shared(kept.shared[0], **own, **last)
        if not self._is_full(kept, outputs[CHANGE]):
            return outputs
        streams = {n: array for n, array in outputs.items() if n in rest.inputs}
        own = {name: array for name, array in arrays.items() if name in rest.inputs}
        result = rest.run_with_shared(kept.shared[1], **own, **streams)
        kept.last = {name: result[name] for name in last}
        return result

    def _run_captured(
        self, head: GpuGraphModel, rest: GpuGraphModel, kept: _Kept, arrays: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        with head.lock:
            feed: dict[str, np.ndarray] = {
                name: np.ascontiguousarray(array, DTYPES[self.inputs[name].type])
                for name, array in {**kept.given, **arrays}.items()
                if name in self.inputs
            }
            key = kept.number, *((name, array.shape) for name, array in sorted(feed.items()))
            make = partial(BoundParts, head, rest, {**feed, **self._zeros(arrays["hidden_states"])})
            runs = bound_parts.setdefault(head, ShapeCache()).get_or_make(key, make, BoundParts.release)
            is_new = runs is not kept.runs  # or made again, without what the last full step left
            kept.last, kept.runs = None if is_new else kept.last, runs
            runs.write(feed if is_new else {name: feed[name] for name in arrays})
            used = runs.head
            used.run()
            if self._is_full(kept, read_value(used.outputs[CHANGE])):
                used = runs.rest
                used.run()
                kept.last = {}  # on the device
            return {OUTPUT: read_value(used.outputs[OUTPUT])}

    def _is_full(self, kept: _Kept, change: np.ndarray) -> bool:
        """Return whether a step computes all blocks, and count it."""
        full = kept.last is None or not float(change) <= self.threshold
        self.full_steps += full
        return full

    def _zeros(self, hidden_states: np.ndarray) -> dict[str, np.ndarray]:
        """Return residuals before the first step (B, S, width)."""
        width = int(self.head.inputs[LATER_RESIDUAL].shape[2])
        shape, dtype = (*hidden_states.shape[:2], width), self.head.dtype(LATER_RESIDUAL)
        return {name: np.zeros(shape, dtype) for name in (LAST_RESIDUAL, LATER_RESIDUAL)}


class BoundParts:
    """Head and rest of a transformer, captured over buffers that they share: the rest writes the head's next inputs."""

    def __init__(self, head: GpuGraphModel, rest: GpuGraphModel, feed: Mapping[str, np.ndarray]) -> None:
        """Bind head and rest to device buffers. `feed`: their inputs, without those that the other one computes."""
        self.head = head.capture({name: feed[name] for name in head.inputs})
        values = {**self.head.inputs, **self.head.outputs}
        later = {name: self.head.inputs[name] for name in (LAST_RESIDUAL, LATER_RESIDUAL)}
        self.rest = rest.capture({name: values.get(name, feed.get(name)) for name in rest.inputs}, later)

    def write(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy arrays to the inputs."""
        for name, array in arrays.items():
            write_value(self.head.inputs.get(name) or self.rest.inputs[name], array)

    def release(self) -> None:
        """Free the GPU graphs."""
        self.head.release()
        self.rest.release()


bound_parts: WeakKeyDictionary[GpuGraphModel, ShapeCache[BoundParts]] = WeakKeyDictionary()  # by the head


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
        added then. Each prompt and negative prompt decides for itself. Images differ. Raises InputError for a threshold
        that is not between 0 and 1, and for transformers other than FLUX.1 and Qwen-Image, for which diffusers
        offers no cache that works.
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
