"""Updates of an optimized folder's weights in open sessions: deltas of checkpoint tensors are added to initializers.

The initializers are transposed, packed and rounded checkpoint tensors. Their weight recipes are linear, so the recipe
of a delta is the delta of the initializer.

    GPU    sessions are opened once over updatable weights. Each delta is computed on the device into their memory
           (`weights.update_graph`): no session is reopened, GPU graphs stay valid, and steps take as long as before
    CPU    sessions are reopened with the new weights, prepacked like those on disk: kernels that read unpacked weights
           took 7 to 12 % longer per step (`Components.in_place`). Weights of the op library's WinogradConv and
           LinearAdd are neither copied nor prepacked, and computed while the sessions are opened

Deltas are added to the weights on disk, never to earlier sums: without deltas the weights are those on disk.

Weights in fewer bits are quantized again: the deltas are added to the checkpoint's tensors
(`weights.checkpoint_weights`), as a delta below half a step would vanish if it were added to rounded weights. Float8
weights of our provider are quantized on the device, into the memory that open sessions read. The checkpoint's tensors
stay on the device until the deltas are removed, if at most half of its free memory is needed for them: then a change of
scales uploads nothing but scales. For other providers, and for int8, the host quantizes and sessions are reopened.
"""

from __future__ import annotations

import math
import operator
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from threadpoolctl import threadpool_limits

from fusion_passes import CONTRIB, DOMAIN
from fusion_passes import weight_recipes as recipes
from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import check_component, folders_of, read_manifest
from sd_ort.runtime.bound_run import BoundRun
from sd_ort.runtime.capture_lock import device_calls
from sd_ort.runtime.components import Components
from sd_ort.runtime.op_library import op_library
from sd_ort.runtime.ort_values import as_integers, device_value, empty_value, host_value, initializer_value, write_value
from sd_ort.runtime.providers import is_plugin
from sd_ort.runtime.session import DTYPES, open_graph
from sd_ort.runtime.updatable_weights import UpdatableWeights
from sd_ort.weights import update_graph
from sd_ort.weights.checkpoint_weights import CheckpointWeights
from sd_ort.weights.deltas import Delta, LowRankDelta
from sd_ort.weights.initializers import Consumer, Initializer, read_initializers
from sd_ort.weights.recipes import read_recipes

Deltas = Mapping[str, Delta | np.ndarray]  # by checkpoint tensor, in torch's layout, float32
FOUR_BITS = frozenset({"int4", "uint4"})  # two elements a byte, which ONNX Runtime takes from files alone
Computed = TypeVar("Computed")
BLOCK_ELEMENTS = 1 << 16  # elements of up @ down that are computed at once
READ_THREADS = 4  # that read tensors of the checkpoint while earlier ones are uploaded

# ai.onnx operators whose kernels read a weight unchanged if prepacking is off. Weights that other operators read, such
# as Cast, may be folded into other constants when a session is opened.
UNCHANGED_OPS = frozenset({"MatMul", "Gemm", "Conv"})
# Operators of the op library that read their weights on the CPU when they run, and not before.
READ_BY_RUNS = frozenset({"WinogradConv", "LinearAdd"})


class WeightUpdater:
    """Applies deltas of checkpoint tensors to the sessions of one optimized pipeline folder.

    `recipes`: of the initializers, by component. `parts`: the component folders of each component (three if hoisted).
    """

    def __init__(self, folder: Path) -> None:
        """Raises InputError if the manifest of the folder has no weight recipes, or the folder was removed."""
        if not folder.is_dir():
            raise InputError(f"{folder} is gone: make the folder again, and open the pipeline again.")
        self.folder = folder
        self.recipes = read_recipes(folder)
        if not self.recipes.keys() & {"unet", "transformer"}:
            raise InputError(f"{folder} does not say where its weights come from: export it again with this sd-ort.")
        entries = read_manifest(folder)["components"]
        self.parts = {name: folders_of(name, entry) for name, entry in entries.items()}
        self._loaded: dict[str, dict[str, Initializer]] = {}
        self._by_source: dict[str, dict[str, list[tuple[str, str]]]] = {}  # by component and checkpoint tensor
        self._modules: dict[str, dict[str, str]] = {}
        self._sources: dict[str, dict[str, list[str]]] = {}  # by component folder and initializer
        self._data_files: dict[str, np.ndarray] = {}  # mapped into memory, by path
        self._checkpoint = CheckpointWeights(folder)
        self._source_shapes: dict[tuple[str, str], tuple[int, ...] | None] = {}  # by component and tensor
        self._source_types: dict[tuple[str, str], tuple[tuple[int, ...], np.dtype]] = {}  # by component and tensor
        self._verified: set[tuple[str, str]] = set()  # component folder and initializer in fewer bits
        self._sessions: dict[update_graph.WeightUpdateSpec | np.dtype, Any] = {}
        self._device_updates: dict[tuple[str, str], DeviceUpdate] = {}  # by component folder and initializer

    def modules(self, component: str) -> dict[str, str]:
        """Return the weight that each module (with underscores) has in the recipes of a component."""
        if component not in self._modules:
            weights = [name for name in self._initializers_by_source(component) if name.endswith(".weight")]
            modules = {name.removesuffix(".weight").removeprefix("text_model."): name for name in weights}
            self._modules[component] = {module.replace(".", "_"): name for module, name in modules.items()}
        return self._modules[component]

    def initializers_of(self, component: str, tensor: str) -> list[tuple[str, str]]:
        """Return component folder and name of the initializers whose recipes have checkpoint tensor `tensor`."""
        return self._initializers_by_source(component).get(tensor, [])

    def _initializers_by_source(self, component: str) -> dict[str, list[tuple[str, str]]]:
        if component not in self._by_source:
            by_source: dict[str, list[tuple[str, str]]] = {}
            for part in self.parts.get(component, ()):
                for name in self._initializers(part).keys() & self.recipes.get(component, {}).keys():
                    for source in dict.fromkeys(recipes.sources(self.recipes[component][name])):
                        by_source.setdefault(source, []).append((part, name))
            self._by_source[component] = by_source
        return self._by_source[component]

    def source_shape(self, component: str, tensor: str) -> tuple[int, ...] | None:
        """Return the shape of a checkpoint tensor, or None if no initializer tells it."""
        if (component, tensor) not in self._source_shapes:
            shapes = (
                recipes.source_shape(self.recipes[component][name], self._initializers(part)[name].shape)
                for part, name in self.initializers_of(component, tensor)
            )
            self._source_shapes[component, tensor] = next((shape for shape in shapes if shape is not None), None)
        return self._source_shapes[component, tensor]

    def source(self, component: str, tensor: str) -> np.ndarray:
        """Return a checkpoint tensor in float32: restored from an initializer, or read if that is quantized.

        Raises:
            InputError: if no initializer has all its elements, or the checkpoint cannot be read.
        """
        for part, name in self.initializers_of(component, tensor):
            if recipes.is_quantized(self.recipes[component][name]):
                return recipes.as_float32(self._checkpoint.read(component, self.recipes[component])(tensor))
            weight = self._values(self._initializers(part)[name])
            if (source := recipes.restore_source(self.recipes[component][name], weight, tensor)) is not None:
                return source
        raise InputError(f"the LoRA needs {tensor}, which {self.folder} has only within sums: use it in diffusers.")

    def check(self, deltas: Mapping[str, Deltas]) -> None:
        """Raise InputError if the shapes of `deltas` (by component) are not those of the folder's weights, or if they
        are of weights in fewer bits that cannot be computed again."""
        for component in deltas.keys() & self.recipes.keys():
            blank = {name: np.broadcast_to(np.int8(0), delta.shape) for name, delta in deltas[component].items()}
            quantized: list[tuple[str, str]] = []
            for part in self.parts[component]:
                for name in self._affected_initializers(component, part, blank):
                    recipe = self.recipes[component][name]
                    if self._initializers(part)[name].dtype.name in FOUR_BITS:
                        raise InputError(
                            f"{self.folder} stores {recipes.sources(recipe)[0]} in 4 bits, to which no LoRA can be "
                            "added: use --weights int8 or float8, or optimize a checkpoint with the LoRA fused."
                        )
                    if recipes.is_quantized(recipe):
                        quantized.append((part, name))
                        continue
                    shapes = {blank[each].shape for each in recipes.sources(recipe) if each in blank}
                    if shapes != {recipes.source_shape(recipe, self._initializers(part)[name].shape)}:
                        self._dense_delta(component, part, name, blank)
            self._check_quantized(component, quantized, blank)

    def _check_quantized(self, component: str, names: Sequence[tuple[str, str]], blank: Deltas) -> None:
        """Raise InputError if the checkpoint does not give these initializers bit for bit, or a delta's shape differs.

        names: component folder and initializer.
        """
        table = self.recipes[component]
        if names:
            self._checkpoint.read(component, table)  # raises if the checkpoint is gone
        for tensor in dict.fromkeys(t for _, name in names for t in recipes.sources(table[name]) if t in blank):
            shape, _ = self._source_type(component, tensor)
            if [size for size in shape if size != 1] != [size for size in blank[tensor].shape if size != 1]:
                shapes = f"{list(blank[tensor].shape)} instead of {list(shape)}"
                raise InputError(f"the LoRA is of another family: its {tensor} has another shape ({shapes}).")
        new = [each for each in names if each not in self._verified]
        parts = dict.fromkeys(part for part, _ in new)
        groups = [(part, group) for part in parts for group in _by_sources(table, [n for p, n in new if p == part])]
        values = compute_sums([partial(self._quantized, component, part, group, {}) for part, group in groups])
        for (part, group), arrays in zip(groups, values, strict=True):
            for name, quantized in zip(group, arrays, strict=True):
                if quantized.tobytes() != self._values(self._initializers(part)[name]).tobytes():
                    raise InputError(
                        f"{self.folder} has {recipes.sources(table[name])[0]} in fewer bits, and "
                        f"{self._checkpoint.name} is another checkpoint by now: optimize it again."
                    )
        self._verified.update(new)

    def _read_source(self, component: str, tensor: str) -> np.ndarray:
        """Return a tensor of a component's quantized weights in the checkpoint's dtype, contiguous."""
        array = np.ascontiguousarray(self._checkpoint.read(component, self.recipes[component])(tensor))
        self._source_types[component, tensor] = array.shape, array.dtype
        return array

    def _source_type(self, component: str, tensor: str) -> tuple[tuple[int, ...], np.dtype]:
        """Return shape and dtype of a tensor of quantized weights, which is read once for this."""
        if (component, tensor) not in self._source_types:
            self._read_source(component, tensor)
        return self._source_types[component, tensor]

    def apply(self, components: Components, deltas: Mapping[str, Deltas]) -> bool:
        """Let the folder's sessions run with `deltas` (by component) instead of the current ones.

        No session may run meanwhile. Returns whether a session was closed.

        Raises:
            InputError: if a shape differs from the weight's; nothing was updated then.
        """
        self.check(deltas)
        replaced: dict[str, dict[str, np.ndarray]] = {}
        sums: list[Callable[[], np.ndarray]] = []
        has_operators = components.provider == "cpu" and op_library(components.options.library, "cpu") is not None
        with components.lock, device_calls(components.device):
            reuse_buffers = components.release_replaced_weights()  # allocating memory takes longer than the sums
            closed = bool(reuse_buffers)
            for component in self.recipes:
                added = deltas.get(component, {})
                for part in self.parts[component]:
                    names: Collection[str] = self._affected_initializers(component, part, added)
                    if names and components.in_place and part not in components.overrides.updatable:
                        weights, transposed = self._initializers(part), components.transposed_operations
                        shareable = {n: self._values(w) for n, w in weights.items() if is_shareable(w, transposed)}
                        if is_plugin(components.provider):
                            shareable |= {n: self._values(weights[n]) for n in self._float8_names(component, part)}
                        closed |= components.make_updatable(part, shareable)
                    if part in components.overrides.updatable:
                        self._update_in_place(components, component, part, added)
                        names = [name for name in names if name not in components.overrides.updatable[part].values]
                    buffers = reuse_buffers.get(part, {})
                    later = self._computed_later(component, part, added, names, buffers) if has_operators else {}
                    sums += [partial(self._sum, component, part, added, name, out) for name, out in later.items()]
                    names = [name for name in names if name not in later]
                    replaced[part] = {**self.updated_weights(component, part, added, names, buffers), **later}
            shared = {
                part: [name for name in weights if _is_only_multiplied(self._initializers(part)[name], has_operators)]
                for part, weights in replaced.items()
            }
            if not any(deltas.values()):
                self._release()
            return components.replace_weights(replaced, shared, start_sums(sums)) or closed

    def _release(self) -> None:
        """Close files and free factors on the device. The sessions of update graphs stay: they hold no weights."""
        self._data_files.clear()
        self._device_updates.clear()
        self._checkpoint.close()

    def updated_weights(
        self,
        component: str,
        part: str,
        deltas: Deltas,
        names: Iterable[str] | None = None,
        reuse_buffers: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> dict[str, np.ndarray]:
        """Return the initializers `names` of a component folder, by default all affected ones, with `deltas` added.

        `reuse_buffers`: earlier results without readers, which are overwritten.
        """
        names = list(self._affected_initializers(component, part, deltas) if names is None else names)
        if not names:
            return {}

        table = self.recipes[component]
        groups = [[name] for name in names if not recipes.is_quantized(table[name])]
        groups += _by_sources(table, [name for name in names if recipes.is_quantized(table[name])])

        def compute(group: Sequence[str]) -> list[np.ndarray]:
            if recipes.is_quantized(table[group[0]]):
                return self._quantized(component, part, group, deltas)
            return [self._sum(component, part, deltas, name, reuse_buffers.get(name)) for name in group]

        values = compute_sums([partial(compute, group) for group in groups])
        return dict(zip(chain(*groups), chain(*values), strict=True))

    def _sum(self, component: str, part: str, deltas: Deltas, name: str, out: np.ndarray | None = None) -> np.ndarray:
        """Return an initializer of 16 or 32 bits with `deltas` added, in `out` if they are low-rank."""
        weight = self._values(self._initializers(part)[name])
        factors = self._factors(component, part, deltas, name)
        if factors is not None:
            return _add_low_rank(weight, factors, out)
        delta = self._dense_delta(component, part, name, deltas)
        return np.add(weight, delta.reshape(weight.shape), dtype=np.float32).astype(weight.dtype, copy=False)

    def _quantized(self, component: str, part: str, names: Sequence[str], deltas: Deltas) -> list[np.ndarray]:
        """Return initializers in fewer bits of the same tensors (elements and scales), computed from the checkpoint's
        tensors and `deltas`. Each sum is computed once."""
        table = self.recipes[component]
        read = self._checkpoint.read(component, table)

        @cache
        def read_sum(tensor: str) -> np.ndarray:
            weight, delta = read(tensor), deltas.get(tensor)
            if delta is None:
                return weight
            dense = delta if isinstance(delta, np.ndarray) else delta.dense()
            return recipes.as_float32(weight) + dense.reshape(weight.shape)

        try:
            values = [recipes.evaluate(table[name], read_sum) for name in names]
        except ValueError as error:
            raise InputError(f"the LoRA cannot be added to {recipes.sources(table[names[0]])[0]}: {error}.") from error
        dtypes = [self._initializers(part)[name].dtype for name in names]
        return [array.astype(dtype, copy=False) for array, dtype in zip(values, dtypes, strict=True)]

    def _factors(self, component: str, part: str, deltas: Deltas, name: str) -> LowRankDelta | None:
        """Return the factors of the product that is added to an initializer; None for other recipes."""
        factors = _low_rank(self.recipes[component][name], deltas)
        elements = math.prod(self._initializers(part)[name].shape)
        full = factors is not None and factors.up.shape[0] * factors.down.shape[1] == elements
        return factors if full else None

    def _computed_later(
        self, component: str, part: str, deltas: Deltas, names: Iterable[str], buffers: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return the memory of initializers whose sums may be written while sessions are opened, as runs alone read
        them; of SD 1.5's UNet these are 89 %."""
        weights = {name: self._initializers(part)[name] for name in names}
        return {
            name: buffers[name] if name in buffers else np.empty(weight.shape, weight.dtype)
            for name, weight in weights.items()
            if weight.tensor.external_data  # values in the graph itself are copied when it is opened
            and _is_only_multiplied(weight, has_operators=True)
            and all(map(_is_read_by_runs, weight.consumers))
            and self._factors(component, part, deltas, name) is not None
        }

    def _initializers(self, part: str) -> dict[str, Initializer]:
        """Return the initializers of a component folder by name; their values stay on disk."""
        if part not in self._loaded:
            self._loaded[part] = read_initializers(check_component(self.folder, part))
        return self._loaded[part]

    def _affected_initializers(self, component: str, part: str, deltas: Mapping[str, Any]) -> list[str]:
        if not deltas:
            return []
        if part not in self._sources:
            table = self.recipes[component]
            self._sources[part] = {n: recipes.sources(table[n]) for n in self._initializers(part) if n in table}
        return [name for name, sources in self._sources[part].items() if not deltas.keys().isdisjoint(sources)]

    def _dense_delta(self, component: str, part: str, name: str, deltas: Deltas) -> np.ndarray:
        """Return the delta of an affected initializer. Raises InputError if its shape differs."""
        recipe, weight = self.recipes[component][name], self._initializers(part)[name]
        shape = list(weight.shape)
        sources = recipes.sources(recipe)
        try:
            if (factors := _low_rank(recipe, deltas)) is not None:
                delta = factors.dense()
            else:
                dense = {n: d if isinstance(d, np.ndarray) else d.dense() for n, d in deltas.items() if n in sources}
                delta = recipes.weight_delta(recipe, dense)  # type: ignore[assignment]  # not None if affected
            if delta.size != np.prod(shape) or delta.ndim < len(shape):
                raise ValueError(f"{list(delta.shape)} instead of {shape}")
        except ValueError as error:
            names = ", ".join(sources)
            raise InputError(f"the LoRA is of another family: its {names} has another shape ({error}).") from error
        return delta

    def _values(self, weight: Initializer) -> np.ndarray:
        """Return the values of an initializer; those in a data file are a view of one mapping of it."""
        entries = {entry.key: entry.value for entry in weight.tensor.external_data}
        if "location" not in entries:
            return weight.values
        path, start = entries["location"], int(entries.get("offset", 0))
        if path not in self._data_files:
            self._data_files[path] = np.memmap(path, np.uint8, "r").view(np.ndarray)
        size = math.prod(weight.shape) * weight.dtype.itemsize
        return self._data_files[path][start : start + size].view(weight.dtype).reshape(weight.shape)

    # --- In place ---------------------------------------------------------------------------------------------------

    def _update_in_place(self, components: Components, component: str, part: str, deltas: Deltas) -> None:
        """Update the initializers that `deltas` affect, and restore those that earlier deltas affected."""
        updatable, weights = components.overrides.updatable[part], self._initializers(part)
        affected = updatable.values.keys() & set(self._affected_initializers(component, part, deltas))
        restored = updatable.changed - affected
        quantized = [name for name in sorted(affected) if recipes.is_quantized(self.recipes[component][name])]
        summed = sorted(affected.difference(quantized))
        requantizations: list[Requantization] = []
        on_host: list[str] = []
        for group in _by_sources(self.recipes[component], quantized):
            if (requantization := self._requantization(component, group, deltas)) is not None:
                requantizations.append(requantization)
            else:
                on_host += group
        self._keep_originals(components, updatable, summed)
        self._keep_sources(components, component, part, requantizations)
        updatable.changed |= affected
        runs: list[DeviceUpdate] = []
        for name in sorted(restored):
            if name in updatable.originals:
                runs.append(self._copy(components, updatable.originals[name], updatable.values[name]))
            else:
                updatable.update(name, self._values(weights[name]))
        for name in summed:
            if (update := self._device_update(components, component, part, name, deltas)) is not None:
                runs.append(update)
            else:
                updatable.update(name, self.updated_weights(component, part, deltas, [name])[name])
        uploads: list[Requantization] = []
        for each in requantizations:
            if updatable.sources.keys() >= set(each.sources):
                runs.append(self._requantization_run(components, part, each))
            else:
                uploads.append(each)
        for update in runs:
            update.run(wait=update is runs[-1])  # all are on one stream
        self._requantize_uploaded(components, component, part, uploads)
        for name, array in self.updated_weights(component, part, deltas, on_host).items():
            updatable.update(name, array)
        for name in affected | restored:
            updatable.on_update(updatable.values[name])
        updatable.changed = affected
        if not affected:
            updatable.originals.clear()
            updatable.sources.clear()
            self._device_updates = {key: each for key, each in self._device_updates.items() if key[0] != part}

    def _float8_names(self, component: str, part: str) -> list[str]:
        """Return the names of a folder's initializers that are float8 elements with one scale, or such a scale."""
        table = self.recipes[component]
        return [
            name
            for name in self._initializers(part)
            if name in table and (update_graph.float8_elements(table[name]) or update_graph.float8_scale(table[name]))
        ]

    def _requantization(self, component: str, names: Sequence[str], deltas: Deltas) -> Requantization | None:
        """Return how the device quantizes the weight with initializers `names` again, or None if it cannot."""
        table = self.recipes[component]
        elements = {name: values for name in names if (values := update_graph.float8_elements(table[name]))}
        scales = {name: values for name in names if (values := update_graph.float8_scale(table[name]))}
        if not len(elements) == len(scales) == len(names) - 1 == 1:
            return None  # another format, or a scale that `float8_scale` does not support
        ((name, (values, _)),), ((scale, (scaled_values, factor)),) = elements.items(), scales.items()
        if values != scaled_values:
            return None
        factors = self._low_rank_factors(table[name], deltas)
        if factors is None:
            return None
        sources = tuple(recipes.sources(table[name]))
        types = {self._source_type(component, tensor) for tensor in sources}
        (shape, dtype), *others = types
        spec = update_graph.weight_update_spec(table[name], shape, dtype)
        if spec is None or others or shape != factors[0].shape:
            return None
        return Requantization(name, scale, factor, sources, factors, spec)

    def _keep_sources(
        self, components: Components, component: str, part: str, requantizations: Sequence[Requantization]
    ) -> None:
        """Copy the source tensors to memory of the device, if at most half of its free memory is needed for them.

        With a `memory_limit` none is copied: the copies would count against it, and images need that memory.
        """
        if "memory_limit" in components.target.options.provider_options:
            return
        updatable = components.overrides.updatable[part]
        tensors = dict.fromkeys(tensor for each in requantizations for tensor in each.sources)
        missing = [tensor for tensor in tensors if tensor not in updatable.sources]
        types = [self._source_type(component, tensor) for tensor in missing]
        needed = sum(math.prod(shape) * dtype.itemsize for shape, dtype in types)
        if not missing or components.target.free_bytes() < 2 * needed:
            return
        arrays = call_ahead([partial(self._read_source, component, tensor) for tensor in missing])
        for tensor, array in zip(missing, arrays, strict=True):
            value = device_value(as_integers(array), components.device)
            updatable.sources[tensor] = initializer_value(value, components.device, array.dtype)

    def _requantize_uploaded(
        self, components: Components, component: str, part: str, requantizations: Sequence[Requantization]
    ) -> None:
        """Quantize weights again from source tensors that are uploaded for this, one weight at a time."""
        tensors = [tensor for each in requantizations for tensor in each.sources]
        arrays = call_ahead([partial(self._read_source, component, tensor) for tensor in tensors])
        for each in requantizations:
            uploaded = [next(arrays) for _ in each.sources]
            self._requantization_run(components, part, each, uploaded).run(wait=True)

    def _requantization_run(
        self, components: Components, part: str, weight: Requantization, uploaded: Sequence[np.ndarray] | None = None
    ) -> DeviceUpdate:
        """Return the run that quantizes one weight again on the device.

        `uploaded`: its source tensors. The run is not cached then, as its inputs would keep them in memory. Without
        `uploaded`, the sources are on the device, and a run for the same LoRA modules is reused with new scales.
        """
        updatable, key = components.overrides.updatable[part], (part, weight.elements)
        if uploaded is None and (update := self._reused_update(key, weight.factors)) is not None:
            return update
        session = self._session(components, weight.spec, lambda: update_graph.build_weight_update(weight.spec))
        inputs = {"factor": host_value(np.array(weight.factor, np.float32))}
        for index, tensor in enumerate(weight.sources):
            source = updatable.sources[tensor] if uploaded is None else host_value(uploaded[index])
            inputs[f"source_{index}"] = source
        inputs |= self._factor_inputs(components, weight.spec, weight.factors)
        outputs = {"elements": updatable.shared[weight.elements], "scale": updatable.shared[weight.scale]}
        scales = [inputs[f"scale_{index}"] for index in range(len(weight.factors))]
        update = DeviceUpdate(session, inputs, outputs, scales, _modules(weight.factors))
        if uploaded is None:
            self._device_updates[key] = update
        return update

    def _keep_originals(self, components: Components, updatable: UpdatableWeights, names: Collection[str]) -> None:
        """Copy unchanged weights to memory of the device, if at most half of its free memory is needed for them."""
        missing = {name: updatable.values[name] for name in names - updatable.originals.keys() - updatable.changed}
        if not missing:
            return
        dtypes = {name: np.dtype(DTYPES[value.data_type()]) for name, value in missing.items()}
        needed = sum(math.prod(value.shape()) * dtypes[name].itemsize for name, value in missing.items())
        if components.target.free_bytes() < 2 * needed:
            return
        for name, value in missing.items():
            updatable.originals[name] = empty_value(value.shape(), dtypes[name], components.device)
        copies = [self._copy(components, value, updatable.originals[name]) for name, value in missing.items()]
        for copy in copies:
            copy.run(wait=copy is copies[-1])

    def _copy(self, components: Components, source: Any, target: Any) -> DeviceUpdate:
        dtype = np.dtype(DTYPES[source.data_type()])
        session = self._session(components, dtype, lambda: update_graph.build_copy(dtype))
        return DeviceUpdate(session, {"base": source}, {"weight": target})

    def _session(
        self, components: Components, key: update_graph.WeightUpdateSpec | np.dtype, build: Callable[[], bytes]
    ) -> Any:
        if key not in self._sessions:
            self._sessions[key] = open_graph(build(), components.provider, components.options.provider_options)
        return self._sessions[key]

    def _device_update(
        self, components: Components, component: str, part: str, name: str, deltas: Deltas
    ) -> DeviceUpdate | None:
        """Return the run that adds `deltas` to an initializer on the device; None if no update graph supports them.

        A run for the same LoRA modules is reused with new scales.
        """
        recipe, weight = self.recipes[component][name], self._initializers(part)[name]
        factors = self._low_rank_factors(recipe, deltas)
        if factors is None:
            return None
        if (update := self._reused_update((part, name), factors)) is not None:
            return update
        updatable = components.overrides.updatable[part]
        spec = update_graph.weight_update_spec(recipe, factors[0].shape, weight.dtype)
        if spec is None:
            return None
        session = self._session(components, spec, lambda: update_graph.build_weight_update(spec))
        base = updatable.originals.get(name)
        inputs = {"base": host_value(np.ascontiguousarray(self._values(weight))) if base is None else base}
        inputs |= self._factor_inputs(components, spec, factors)
        scales = [inputs[f"scale_{index}"] for index in range(len(factors))]
        update = DeviceUpdate(session, inputs, {"weight": updatable.values[name]}, scales, _modules(factors))
        self._device_updates[part, name] = update
        return update

    def _reused_update(self, key: tuple[str, str], factors: Sequence[LowRankDelta]) -> DeviceUpdate | None:
        """Return the cached run for the LoRA modules of `factors` after writing their scales, or None."""
        update = self._device_updates.get(key)
        if update is None or not update.is_of(_modules(factors)):
            return None
        for value, delta in zip(update.scales, factors, strict=True):
            write_value(value, delta.scale)
        return update

    def _low_rank_factors(self, recipe: recipes.WeightRecipe, deltas: Deltas) -> list[LowRankDelta] | None:
        """Return the deltas of a recipe's source tensors, zero for those without; None if they are not low-rank."""
        operands = [deltas.get(source) for source in recipes.sources(recipe)]
        first = next(delta for delta in operands if delta is not None)
        if not isinstance(first, LowRankDelta) or not all(isinstance(d, LowRankDelta | None) for d in operands):
            return None
        return [delta if isinstance(delta, LowRankDelta) else first.zero() for delta in operands]

    def _factor_inputs(
        self, components: Components, spec: update_graph.WeightUpdateSpec, factors: Sequence[LowRankDelta]
    ) -> dict[str, Any]:
        """Return the inputs of an update graph for the factors of each source tensor."""
        inputs = {"source_shape": host_value(np.array(factors[0].shape, np.int64))} if spec.has_shape else {}
        for index, delta in enumerate(factors):
            for key, array in (("up", delta.up), ("scale", delta.scale), ("down", delta.down)):
                inputs[f"{key}_{index}"] = device_value(array, components.device)
        return inputs


@dataclass(frozen=True, eq=False)
class Requantization:
    """A float8 weight that the device quantizes again, with the deltas of its source tensors.

    elements, scale: its initializers. factor: on the scale. sources: tensors of the checkpoint. factors: their deltas.
    """

    elements: str
    scale: str
    factor: float
    sources: tuple[str, ...]
    factors: Sequence[LowRankDelta]
    spec: update_graph.WeightUpdateSpec


class DeviceUpdate:
    """A run of an update graph over values on the device. `scales`: inputs that differ between LoRA scales."""

    def __init__(
        self,
        session: Any,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        scales: Sequence[Any] = (),
        modules: Sequence[object] = (),
    ) -> None:
        self.inputs, self.scales, self.modules = inputs, scales, modules
        self.bound = BoundRun(session, inputs, "", outputs=outputs)

    def is_of(self, modules: Sequence[object]) -> bool:
        """Return whether the inputs are those of the same LoRA modules."""
        return len(modules) == len(self.modules) and all(map(operator.is_, modules, self.modules))

    def run(self, wait: bool) -> None:
        """Run, or enqueue without `wait`. Raises SdOrtError if ONNX Runtime fails."""
        self.bound.run(wait)


def _modules(factors: Sequence[LowRankDelta]) -> list[object]:
    """Return the LoRA modules of the deltas, with None after those of each delta."""
    return [module for delta in factors for module in (*delta.modules, None)]


def _by_sources(table: Mapping[str, recipes.WeightRecipe], names: Sequence[str]) -> list[list[str]]:
    """Group initializers by the checkpoint tensors that they are computed from."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        groups.setdefault(tuple(recipes.sources(table[name])), []).append(name)
    return list(groups.values())


def _low_rank(recipe: recipes.WeightRecipe, deltas: Deltas) -> LowRankDelta | None:
    """Return the delta of a tensor, or of the transpose of a matrix, as factors; None for other recipes and deltas."""
    if isinstance(recipe, str):
        delta = deltas[recipe]
        return delta if isinstance(delta, LowRankDelta) else None
    if recipe[:2] == ["transpose", [1, 0]] and isinstance(recipe[2], str):
        delta = deltas[recipe[2]]
        if isinstance(delta, LowRankDelta) and len(delta.shape) == 2:
            return delta.transposed()
    return None


def _add_low_rank(weight: np.ndarray, delta: LowRankDelta, out: np.ndarray | None = None) -> np.ndarray:
    """Return weight + up @ down, computed in blocks of rows that fit in caches; `out` has its shape and dtype."""
    total = np.empty(weight.shape, weight.dtype) if out is None else out
    up, rows = delta.scaled_up, delta.up.shape[0]
    base, sums = weight.reshape(rows, -1), total.reshape(rows, -1)
    count = max(1, BLOCK_ELEMENTS // base.shape[1])
    buffer = np.empty((count, base.shape[1]), np.float32)
    for start in range(0, rows, count):
        block = slice(start, start + count)
        product = np.matmul(up[block], delta.down, out=buffer[: len(base[block])])
        if weight.dtype == np.float32:
            np.add(base[block], product, out=sums[block])
        else:
            sums[block] = np.add(base[block], product, dtype=np.float32)
    return total


def _is_only_multiplied(weight: Initializer, has_operators: bool) -> bool:
    """Return whether ONNX Runtime's graph optimizers do not ask for the values of a weight.

    Its consumers are products of a computed value by it (that of two constants would be folded), or the op library's
    WinogradConv; without the library (`has_operators`) that is inlined, and its Conv transformed.
    """
    return bool(weight.consumers) and all(
        consumer.multiplies or (has_operators and _is_read_by_runs(consumer)) for consumer in weight.consumers
    )


def _is_read_by_runs(consumer: Consumer) -> bool:
    return consumer.domain == DOMAIN and consumer.op_type in READ_BY_RUNS


def compute_sums(sums: Sequence[Callable[[], Computed]]) -> list[Computed]:
    """Call `sums` in a thread per processor. BLAS threads would wait for each other in each of these threads: eight
    times the processor time."""
    if not sums:
        return []
    with threadpool_limits(1, "blas"), ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(lambda compute: compute(), sums))


def call_ahead(calls: Sequence[Callable[[], Computed]]) -> Iterator[Computed]:
    """Yield the results of `calls` in their order; at most `READ_THREADS` are computed before they are asked for."""
    if not calls:
        return
    with ThreadPoolExecutor(READ_THREADS) as threads:
        pending: deque[Future[Computed]] = deque()
        for call in calls:
            pending.append(threads.submit(call))
            if len(pending) > READ_THREADS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def start_sums(sums: Sequence[Callable[[], np.ndarray]]) -> Future[Any] | None:
    """Call `sums` beside the calling thread; None if there are none."""
    if not sums:
        return None
    executor = ThreadPoolExecutor(1)
    started = executor.submit(compute_sums, sums)
    executor.shutdown(wait=False)
    return started


def is_shareable(weight: Initializer, transposed: Collection[str] = ()) -> bool:
    """Return whether sessions can share a weight: a matrix or filters that kernels read unchanged.

    `transposed`: names of operations that read other layouts (`Components.transposed_operations`).
    """
    unchanged = all(
        (consumer.domain in (DOMAIN, CONTRIB) and consumer.op_type not in transposed)
        or (consumer.domain in ("", "ai.onnx") and consumer.op_type in UNCHANGED_OPS)
        for consumer in weight.consumers
    )
    return len(weight.shape) >= 2 and bool(weight.consumers) and unchanged and weight.dtype in (np.float32, np.float16)
