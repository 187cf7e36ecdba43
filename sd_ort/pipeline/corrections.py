"""Changes of a checkpoint's tensors, as changes of the weights that an optimized graph has, in open sessions.

The weights of an optimized graph are transposed, packed and rounded ones. Their recipes (`weight_recipes`) are
linear, so that the recipe of a change is the change of the weight.

    on a GPU      once a pipeline its sessions are opened over weights in memory of ours. From then on a change is
                  computed on the device and written there: nothing is opened, captured graphs stay valid, and a step
                  takes what it took
    on a CPU      sessions are opened again with the changed weights in place of those on disk, packed as any others:
                  kernels that read weights as they are took 7 to 12 % longer a step (`Components.in_place`)

In both a change is added to the numbers on disk, never to earlier sums: without changes the weights are those on disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir
from threadpoolctl import threadpool_limits

from fusion_passes import weight_recipes as recipes
from fusion_passes.operators.definition import DOMAIN
from sd_ort.core.errors import InputError, SdOrtError, first_line
from sd_ort.core.folder import check_component, read_manifest
from sd_ort.graphs import hoist, weight_update_graph
from sd_ort.graphs.load import load
from sd_ort.pipeline.adapters import LowRank
from sd_ort.runtime.components import Components
from sd_ort.runtime.device_memory import host_value
from sd_ort.runtime.held import HeldWeights
from sd_ort.runtime.providers import is_plugin
from sd_ort.runtime.session import open_graph

Change = LowRank | np.ndarray  # of a tensor in torch's layout, float32
Changes = Mapping[str, Change]  # by the tensor's name in the checkpoint
STRIP = 1 << 16  # numbers of a product that are computed at once

# Operators of ai.onnx whose kernels read a weight as it is, when none may be packed. What other operators read may be
# folded into other constants while a session is opened, such as what is cast.
READ_AS_THEY_ARE = frozenset({"MatMul", "Gemm", "Conv"})
OPERATORS = frozenset({DOMAIN, "com.microsoft"})
# ONNX Runtime's own GPU providers transpose filters of these when a session is opened, and read them wrong otherwise.
TRANSPOSED = frozenset({"NhwcConv"})


class Corrections:
    """The weights of one pipeline folder with changes of the checkpoint's tensors added."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError for a folder whose manifest does not say where its weights come from."""
        self.folder = folder
        entries = read_manifest(folder).get("components", {})
        self.recipes = {n: recipes.load(e["weights"]) for n, e in entries.items() if "weights" in e}
        if "unet" not in self.recipes:
            raise InputError(f"{folder} does not say where its weights come from: export it again with this sd-ort.")
        self.parts = {name: hoist.folders_of(name, entry) for name, entry in entries.items()}
        self.known: dict[str, dict[str, ir.Value]] = {}
        self.sessions: dict[weight_update_graph.WeightUpdateSpec, Any] = {}

    def modules(self, component: str) -> dict[str, str]:
        """Module with underscores -> its weight's name, of all that a component's recipes read."""
        names = {name for recipe in self.recipes.get(component, {}).values() for name in recipes.sources(recipe)}
        modules = {name.removesuffix(".weight"): name for name in names if name.endswith(".weight")}
        return {module.removeprefix("text_model.").replace(".", "_"): name for module, name in modules.items()}

    def check(self, changes: Mapping[str, Changes]) -> None:
        """Raise InputError for changes of other shapes than the folder's weights have."""
        for component in changes.keys() & self.recipes.keys():
            blank = {name: np.broadcast_to(np.int8(0), change.shape) for name, change in changes[component].items()}
            for part in self.parts[component]:
                for name in self._touched(component, part, blank):
                    self._change(component, part, name, blank)

    def corrected(self, component: str, changes: Changes) -> dict[str, dict[str, np.ndarray]]:
        """Component folder -> initializer -> its numbers with `changes` added, of those that change.

        Raises InputError for a change of another shape.
        """
        made = {part: self._numbers(component, part, changes) for part in self.parts[component]}
        return {part: numbers for part, numbers in made.items() if numbers}

    def apply(self, models: Components, changes: Mapping[str, Changes]) -> bool:
        """Have the folder's sessions run with these changes by component, and no others; whether any was closed for it.

        Nothing may run meanwhile. Raises InputError for changes of other shapes, before anything is changed.
        """
        self.check(changes)
        others: dict[str, dict[str, np.ndarray]] = {}
        with models.lock:
            spare = models.give_up_weights()  # new memory costs more than the sums that are written to it
            closed = bool(spare)
            for component in self.recipes:
                given = changes.get(component, {})
                for part in self.parts[component]:
                    left: Iterable[str] = self._touched(component, part, given)
                    if left and models.in_place and part not in models.held:
                        values = self._weights(part).items()
                        models.hold(part, {n: _numbers(v) for n, v in values if readable(v, models.provider)})
                        closed = True
                    if part in models.held:
                        self._write(models, component, part, given)
                        left = [name for name in left if name not in models.held[part].values]
                    others[part] = self._numbers(component, part, given, left, spare.get(part, {}))
            products = {part: [n for n in others[part] if _multiplies(self._weights(part)[n])] for part in others}
            return models.replace_weights(others, products) or closed

    def _weights(self, part: str) -> dict[str, ir.Value]:
        """The initializers of a component folder, by name; their numbers stay on disk."""
        if part not in self.known:
            found = load(check_component(self.folder, part)).graph.initializers
            self.known[part] = {name: value for name, value in found.items() if value.const_value is not None}
        return self.known[part]

    def _touched(self, component: str, part: str, changes: Mapping[str, Any]) -> list[str]:
        """The initializers that `changes` change."""
        table = self.recipes[component] if changes else {}
        here = [name for name in self._weights(part) if name in table] if changes else []
        return [name for name in here if any(source in changes for source in recipes.sources(table[name]))]

    def _numbers(
        self,
        component: str,
        part: str,
        changes: Changes,
        names: Iterable[str] | None = None,
        spare: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> dict[str, np.ndarray]:
        """Initializer -> its numbers with `changes` added, of all that change or of `names`. `spare`: earlier ones,
        which nobody reads any more, to be written over."""
        names = list(self._touched(component, part, changes) if names is None else names)

        def make(name: str) -> np.ndarray:
            weight = _numbers(self._weights(part)[name])
            factors = _factors(self.recipes[component][name], changes)
            if factors is not None and factors.up.shape[0] * factors.down.shape[1] == weight.size:
                return _sum(weight, factors, spare.get(name))
            change = self._change(component, part, name, changes)
            return np.add(weight, change.reshape(weight.shape), dtype=np.float32).astype(weight.dtype, copy=False)

        # Threads of BLAS's own would wait for each other in each of these: eight times the processor's time.
        with threadpool_limits(1, "blas"), ThreadPoolExecutor(os.cpu_count()) as threads:
            return dict(zip(names, threads.map(make, names), strict=True))

    def _change(self, component: str, part: str, name: str, changes: Changes) -> np.ndarray:
        """What is added to an initializer. Raises InputError when that is of another shape."""
        recipe, weight = self.recipes[component][name], self._weights(part)[name]
        shape = [int(size) for size in weight.const_value.shape]  # type: ignore[union-attr, arg-type]
        try:
            change = _change(recipe, changes)
            if change.size != np.prod(shape) or change.ndim < len(shape):
                raise ValueError(f"{list(change.shape)} instead of {shape}")
        except ValueError as error:
            where = ", ".join(recipes.sources(recipe))
            raise InputError(f"the LoRA is of another family: its {where} has another shape ({error}).") from error
        return change

    # --- In place ---------------------------------------------------------------------------------------------------

    def _write(self, models: Components, component: str, part: str, changes: Changes) -> None:
        """Write what changes, and what is changed no more, where a component's session reads it."""
        held, weights = models.held[part], self._weights(part)
        touched = held.values.keys() & set(self._touched(component, part, changes))
        for name in held.changed - touched:
            held.write(name, _numbers(weights[name]))
        held.changed |= touched
        for name in touched:
            numbers, recipe = _numbers(weights[name]), self.recipes[component][name]
            if not self._compute(models, held, name, numbers, recipe, changes):
                held.write(name, self._numbers(component, part, changes, [name])[name])
        held.changed = touched

    def _compute(
        self,
        models: Components,
        held: HeldWeights,
        name: str,
        base: np.ndarray,
        recipe: recipes.WeightRecipe,
        given: Changes,
    ) -> bool:
        """Compute a weight on the device, into its memory; False for changes that no graph of ours takes."""
        found = [given.get(source) for source in recipes.sources(recipe)]
        like = next(change for change in found if change is not None)
        if not all(change is None or isinstance(change, LowRank) for change in found):
            return False
        assert isinstance(like, LowRank)
        form = weight_update_graph.weight_update_spec(recipe, like.shape, base.dtype)
        if form is None:
            return False
        if form not in self.sessions:
            made = weight_update_graph.build_weight_update(form)
            self.sessions[form] = open_graph(made, models.provider, models.options["provider_options"])
        feed = {"base": np.ascontiguousarray(base)}
        for number, change in enumerate(found):
            factors = change if isinstance(change, LowRank) else like.zero()
            # Contiguous here, for ONNX Runtime reads the memory of these arrays when it runs.
            pair = {f"up_{number}": factors.up, f"down_{number}": factors.down}
            feed |= {key: np.ascontiguousarray(array) for key, array in pair.items()}
        binding = self.sessions[form].io_binding()
        for key, array in feed.items():
            binding.bind_ortvalue_input(key, host_value(array))
        with held.written(name) as weight:
            binding.bind_ortvalue_output("weight", weight)
            try:
                self.sessions[form].run_with_iobinding(binding)
            except Exception as error:  # pybind's exceptions share no base class but Exception
                raise SdOrtError(f"ONNX Runtime failed to add a LoRA to {name}: {first_line(error)}") from error
        return True


def _factors(recipe: recipes.WeightRecipe, changes: Changes) -> LowRank | None:
    """What a recipe makes of a change, as a product too: of a tensor as it is, or of a matrix's transpose."""
    if isinstance(recipe, str):
        change = changes[recipe]
        return change if isinstance(change, LowRank) else None
    if recipe[:2] == ["transpose", [1, 0]] and isinstance(recipe[2], str):
        change = changes[recipe[2]]
        if isinstance(change, LowRank) and len(change.shape) == 2:
            return change.transposed()
    return None


def _sum(weight: np.ndarray, change: LowRank, spare: np.ndarray | None = None) -> np.ndarray:
    """weight + up @ down, in strips that caches hold: the product is never there as a whole. Written to `spare`, if
    there is one, of the weight's shape and type."""
    made = np.empty(weight.shape, weight.dtype) if spare is None else spare
    rows = change.up.shape[0]
    base, total = weight.reshape(rows, -1), made.reshape(rows, -1)
    strip = max(1, STRIP // base.shape[1])
    product = np.empty((strip, base.shape[1]), np.float32)
    for start in range(0, rows, strip):
        part = slice(start, start + strip)
        few = np.matmul(change.up[part], change.down, out=product[: len(base[part])])
        if weight.dtype == np.float32:
            np.add(base[part], few, out=total[part])
        else:
            total[part] = np.add(base[part], few, dtype=np.float32)
    return made


def _change(recipe: recipes.WeightRecipe, changes: Changes) -> np.ndarray:
    """What a recipe makes of the changes of the tensors that it reads."""
    if (factors := _factors(recipe, changes)) is not None:
        return factors.dense()
    dense = {name: _dense(changes[name]) for name in recipes.sources(recipe) if name in changes}
    made = recipes.weight_delta(recipe, dense)
    assert made is not None  # the caller asks for what changes
    return made


def _dense(change: Change) -> np.ndarray:
    return change.dense() if isinstance(change, LowRank) else change


def _multiplies(weight: ir.Value) -> bool:
    """Whether a weight is the right side of matrix products, and nothing else. A product with a constant would be
    folded into another."""
    readers = weight.uses()
    return bool(readers) and all(
        node.op_type == "MatMul" and node.domain == "" and place == 1 and _computed(node.inputs[0])
        for node, place in readers
    )


def _computed(value: ir.Value | None) -> bool:
    return value is not None and value.producer() is not None and value.const_value is None


def _numbers(weight: ir.Value) -> np.ndarray:
    assert weight.const_value is not None
    numbers: np.ndarray = weight.const_value.numpy()
    return numbers


def readable(weight: ir.Value, provider: str) -> bool:
    """Whether a weight may lie in memory of ours: a matrix or filters that the provider's kernels read as they are."""
    shape, readers = weight.const_value.shape, weight.uses()  # type: ignore[union-attr]
    packed = frozenset() if provider == "cpu" or is_plugin(provider) else TRANSPOSED
    as_it_is = all(
        (node.domain in OPERATORS and node.op_type not in packed)
        or (node.domain in ("", "ai.onnx") and node.op_type in READ_AS_THEY_ARE)
        for node, _ in readers
    )
    return len(shape) >= 2 and bool(readers) and as_it_is and weight.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16)
