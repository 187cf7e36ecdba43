"""Transformer split into two graphs, so that a step that reuses cached tensors runs only one of them."""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import HOISTED
from sd_ort.pipelines.step_cache import ADVICE, FEWEST_STEPS
from sd_ort.runtime.bound_run import BoundRun, GpuGraphModel, ShapeCache
from sd_ort.runtime.components import Components
from sd_ort.runtime.ort_values import read_value, write_value
from sd_ort.runtime.session import DTYPES, OrtModel

if TYPE_CHECKING:
    import onnx_ir as ir

COMPONENT = HOISTED["transformer"]["step"]
OUTPUT = "out_hidden_states"

Read: TypeAlias = "Callable[[str], np.ndarray]"  # returns an output of a run by name


def check_steps(steps: int) -> None:
    """Raise InputError for calls whose steps differ too much for the cache."""
    if steps < FEWEST_STEPS:
        raise InputError(
            f"{steps} steps are too few to keep blocks between them, as schnell and Turbo models take: give "
            f"{FEWEST_STEPS} or more, or {ADVICE}."
        )


def open_cut(models: Components, label: str, edit: str) -> OrtModel:
    """Return the transformer with its graph cut by a function of `graphs.block_cache_graphs`, opened once.

    Raises InputError if its graph cannot be cut.
    """
    return models.variant(COMPONENT, label, partial(_cut, models.folder, edit), captured=True)


def _cut(folder: Path, edit: str, path: Path) -> bytes:
    from sd_ort.graphs import block_cache_graphs
    from sd_ort.graphs.load import load, serialize_over_data
    from sd_ort.weights.recipes import read_recipes

    model: ir.Model = load(path)
    getattr(block_cache_graphs, edit)(model, read_recipes(folder).get("transformer", {}))
    return serialize_over_data(model, path.parent)


@dataclass(eq=False)
class PromptCache:
    """Cached tensors of one prompt.

    prompt_inputs: inputs of the prompt, alive as long as the cache. shared: those of the head, those of the rest.
    number: of the prompt in the call. step: number of steps before. last: what the last full step gives the head, by
    the names of its inputs; None before the first step. runs: both graphs over buffers of a GPU, where the tensors of
    `last` stay. slot: of `runs` among those of the same shapes.
    """

    prompt_inputs: Mapping[str, np.ndarray]
    shared: tuple[dict[str, np.ndarray], dict[str, np.ndarray]]
    number: int
    step: int = 0
    last: Mapping[str, np.ndarray] | None = None
    runs: BoundBlocks | None = None
    slot: int = 0


class CachedTransformer(ABC):
    """Runs a transformer as two graphs: `head` reads the tensors that `rest` computed in the last full step.

    For the steps of one call. full_steps: number of runs of all blocks. On a GPU both are captured, over buffers that
    they share.
    """

    CACHED: tuple[str, ...]  # inputs of the head, outputs of the rest

    def __init__(self, head: OrtModel, rest: OrtModel) -> None:
        self.head, self.rest = head, rest
        own = {*head.outputs, *rest.outputs}
        both = {**rest.inputs, **head.inputs}
        self.inputs = {name: value for name, value in both.items() if name not in own}
        self.full_steps = 0
        self._prompts: dict[int, PromptCache] = {}  # by the identity of the inputs that the steps of a prompt share

    @abstractmethod
    def step(self, cache: PromptCache, run_head: Callable[[], Read], run_rest: Callable[[], Read]) -> Read:
        """Run one step and return a function that reads its outputs. run_rest reads outputs of the head if it ran."""

    def run_with_shared(self, shared: Mapping[str, np.ndarray], **arrays: Any) -> dict[str, np.ndarray]:
        """Run a step as `Model.run_with_shared` does."""
        head, rest = self.head, self.rest
        cache = self._prompts.get(id(shared))
        if cache is None:
            parts = [{n: a for n, a in shared.items() if n in model.inputs} for model in (head, rest)]
            cache = self._prompts[id(shared)] = PromptCache(shared, (parts[0], parts[1]), len(self._prompts))
        if isinstance(head, GpuGraphModel) and isinstance(rest, GpuGraphModel):
            output = self._run_captured(head, rest, cache, arrays)
        else:
            output = self._run(cache, arrays)
        cache.step += 1
        return {OUTPUT: output}

    def _run(self, cache: PromptCache, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        streams: dict[str, np.ndarray] = {}

        def run_head() -> Read:
            last = cache.last or self._zeros(arrays["hidden_states"])
            own = {name: array for name, array in arrays.items() if name in self.head.inputs}
            outputs = self.head.run_with_shared(cache.shared[0], **own, **last)
            streams.update({n: array for n, array in outputs.items() if n in self.rest.inputs})
            return outputs.__getitem__

        def run_rest() -> Read:
            own = {name: array for name, array in arrays.items() if name in self.rest.inputs}
            outputs = self.rest.run_with_shared(cache.shared[1], **own, **streams)
            cache.last = {name: outputs[name] for name in self.CACHED}
            return outputs.__getitem__

        return self.step(cache, run_head, run_rest)(OUTPUT)

    def _run_captured(
        self, head: GpuGraphModel, rest: GpuGraphModel, cache: PromptCache, arrays: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        inputs = {n: array for n, array in {**cache.prompt_inputs, **arrays}.items() if n in self.inputs}

        def make() -> BoundBlocks:
            return BoundBlocks(head, rest, {**converted(inputs), **self._zeros(arrays["hidden_states"])}, self.CACHED)

        def converted(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {n: np.ascontiguousarray(array, DTYPES[self.inputs[n].type]) for n, array in values.items()}

        with head.lock:
            shapes = tuple((name, array.shape) for name, array in sorted(inputs.items()))
            runs = self._bound_blocks(head, cache, shapes, make)
            is_new = runs is not cache.runs  # or made again, without what the last full step left
            cache.last, cache.runs = None if is_new else cache.last, runs
            runs.write(converted({n: array for n, array in inputs.items() if is_new or n in arrays}))

            def run(bound: BoundRun) -> Read:
                bound.run()
                return lambda name: read_value(bound.outputs[name])

            def run_rest() -> Read:
                cache.last = {}  # on the device
                return run(runs.rest)

            return self.step(cache, partial(run, runs.head), run_rest)(OUTPUT)

    @staticmethod
    def _bound_blocks(
        head: GpuGraphModel, cache: PromptCache, shapes: tuple[Any, ...], make: Callable[[], BoundBlocks]
    ) -> BoundBlocks:
        """Return the buffers and captured runs of a prompt.

        A prompt has them alone until its call ends: other prompts of the call, and calls in other threads, have others.
        """
        runs_by_shapes = bound_blocks.setdefault(head, ShapeCache())
        for slot in itertools.chain([cache.slot], itertools.count()):  # its own first, then the first free one
            runs = runs_by_shapes.get_or_make((slot, *shapes), make, BoundBlocks.release)
            if runs.prompt() in (None, cache):
                runs.prompt, cache.slot = weakref.ref(cache), slot
                return runs
        raise AssertionError("itertools.count ends")

    def _zeros(self, hidden_states: np.ndarray) -> dict[str, np.ndarray]:
        """Return residuals before the first step (B, S, width)."""
        width = int(self.head.inputs[self.CACHED[0]].shape[2])
        shape = (*hidden_states.shape[:2], width)
        return {name: np.zeros(shape, self.head.dtype(name)) for name in self.CACHED}


class BoundBlocks:
    """Head and rest of a transformer, captured over buffers that they share: the rest writes the head's next inputs."""

    def __init__(
        self, head: GpuGraphModel, rest: GpuGraphModel, feed: Mapping[str, np.ndarray], cached: tuple[str, ...]
    ) -> None:
        """Bind head and rest to device buffers.

        feed: their inputs, without those that the head computes for the rest. cached: outputs of the rest that are
        inputs of the head.
        """
        self.prompt: Callable[[], PromptCache | None] = lambda: None  # whose tensors the buffers hold
        self.head = head.capture({name: feed[name] for name in head.inputs})
        values = {**self.head.inputs, **self.head.outputs}
        later = {name: self.head.inputs[name] for name in cached}
        self.rest = rest.capture({name: values.get(name, feed.get(name)) for name in rest.inputs}, later)

    def write(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy arrays to the inputs."""
        for name, array in arrays.items():
            write_value(self.head.inputs.get(name) or self.rest.inputs[name], array)

    def release(self) -> None:
        """Free the GPU graphs."""
        self.head.release()
        self.rest.release()


bound_blocks: WeakKeyDictionary[GpuGraphModel, ShapeCache[BoundBlocks]] = WeakKeyDictionary()  # by the head
