"""Initializers in memory of sd-ort (`AddInitializer`), which are updated in place while sessions are open.

The next run, or the next replay of a captured graph, reads the new values.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from sd_ort.core.errors import SdOrtError
from sd_ort.runtime.ort_values import as_integers, device_value, initializer_value, write_value
from sd_ort.runtime.providers import is_plugin, plugin_library
from sd_ort.runtime.session import open_graph
from sd_ort.runtime.weight_prefetch import PrefetchedWeights

WEIGHT_UPDATED = "sd_ort_WeightUpdated"  # of our provider's library: custom_ops/provider/winograd_filter_cache.cc


def update_callback(provider: str) -> Callable[[Any], None]:
    """Return the function to call with an updated weight (OrtValue) that sessions on the provider read in place.

    The sd-ort provider then transforms its cached filters again. The function raises SdOrtError if the device fails.
    """
    written = getattr(ctypes.CDLL(str(plugin_library(provider))), WEIGHT_UPDATED, None) if is_plugin(provider) else None

    def update_copies(value: Any) -> None:
        if written is not None and written(ctypes.c_void_p(value.data_ptr())):
            raise SdOrtError("the device failed when weights were changed: load the pipeline again.")

    return update_copies


class UpdatableWeights:
    """Initializers of open sessions that are updated in place.

    values: OrtValues on `device` by initializer; those of float8 weights are bytes. shared: views of the same memory,
    which sessions accept. changed: names of initializers whose values differ from the file's. originals: device copies
    of some values of the file. sources: device copies of tensors of the checkpoint, by name, for float8 weights.
    """

    def __init__(
        self,
        weights: Mapping[str, np.ndarray],
        device: str,
        on_update: Callable[[Any], None] = lambda _: None,
        prefetched: PrefetchedWeights | None = None,
    ) -> None:
        """`weights`: float16, float32, or on a plugin's device float8; copied unless `prefetched` has them there.
        `on_update`: the provider's `update_callback`."""
        self.prefetched = prefetched  # owns the memory of its values
        self.originals: dict[str, Any] = {}
        self.sources: dict[str, Any] = {}
        if prefetched is None:
            arrays = {name: array.copy() if device == "cpu" else array for name, array in weights.items()}
            self.values = {name: device_value(as_integers(array), device) for name, array in arrays.items()}
            self.shared = {n: initializer_value(value, device, weights[n].dtype) for n, value in self.values.items()}
        else:
            self.values = self.shared = {name: prefetched.values[name] for name in weights}
        self.changed: set[str] = set()
        self.on_update = on_update

    @contextmanager
    def updating(self, name: str) -> Iterator[Any]:
        """Context manager for writing to a weight's OrtValue, which it yields.

        No session may run meanwhile; the next run reads the new values.
        """
        yield self.values[name]
        self.on_update(self.values[name])

    def update(self, name: str, array: np.ndarray) -> None:
        """Copy `array`, of the weight's shape and dtype, into the weight. The next run reads it."""
        with self.updating(name) as value:
            write_value(value, as_integers(array))


# Operation -> dtype, shapes of x and of the weight, and a graph whose output is x (1, 72) by the weight (8, 72).
_TRIALS = {
    "MatMul": ("float", (1, 72), (72, 8), "y = MatMul (x, weight)"),
    "NhwcConv": (
        "float16",
        (1, 3, 3, 8),
        (8, 3, 3, 8),
        "y = com.microsoft.NhwcConv <kernel_shape = [3, 3]> (x, weight)",
    ),
}


def supports_in_place_update(provider: str, device: str, options: Mapping[str, str], operation: str = "MatMul") -> bool:
    """Return whether sessions on the provider read an updatable weight of an operation unchanged and at every run.

    The trial compares products of small integers, which are exact, before and after an update.
    """
    import onnx

    dtype, x_shape, shape, node = _TRIALS[operation]
    head = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>'
    model = onnx.parser.parse_model(f"{head} trial ({dtype}{list(x_shape)} x) => ({dtype}[] y) {{ {node} }}")
    integers = (np.arange(math.prod(each)).reshape(each) % 7 - 3 for each in (x_shape, shape))
    x, weight = (array.astype(np.float16 if dtype == "float16" else np.float32) for array in integers)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "weight"))
    try:
        updatable = UpdatableWeights({"weight": weight}, device)
        session = open_graph(model.SerializeToString(), provider, options, updatable=updatable.shared)
        for values in (weight, np.roll(weight, 1)):
            updatable.update("weight", values)
            columns = values if operation == "MatMul" else values.reshape(8, 72).T
            output: np.ndarray = session.run(None, {"x": x})[0]
            if not np.array_equal(output.reshape(1, 8), np.matmul(x.reshape(1, 72), columns)):
                return False
    except Exception:  # pybind's exceptions share no base class but Exception
        return False
    return True
