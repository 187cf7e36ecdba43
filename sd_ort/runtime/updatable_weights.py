"""Weights in memory of ours, on a provider's device, where open sessions read them: the next run, or the next replay of
a captured graph, sees what was written. ONNX Runtime takes them in place of those in the file (`AddInitializer`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from sd_ort.core.errors import SdOrtError
from sd_ort.runtime.ort_values import device_value, place, unowned, view, write_value
from sd_ort.runtime.providers import is_plugin, plugin_library
from sd_ort.runtime.session import open_graph

WRITTEN = "sd_ort_WeightUpdated"  # of our provider's library: custom_ops/provider/winograd_filter_cache.cc


def update_callback(provider: str) -> Callable[[Any], None]:
    """What is to be called with an OrtValue that sessions on the provider read as a weight, once it was written: our
    own keeps transformed filters beside it, which it makes again then. Raises SdOrtError when the device fails."""
    written = getattr(ctypes.CDLL(str(plugin_library(provider))), WRITTEN, None) if is_plugin(provider) else None

    def renew(value: Any) -> None:
        if written is not None and written(ctypes.c_void_p(value.data_ptr())):
            raise SdOrtError("the device failed when weights were changed: load the pipeline again.")

    return renew


class UpdatableWeights:
    """`values`: initializer -> OrtValue on `device`; `shared`: the same memory as a session takes it; `changed`: those
    that hold other numbers than the file; `originals`: copies of the file's numbers on the device, of some of them."""

    def __init__(
        self, weights: Mapping[str, np.ndarray], device: str, renew: Callable[[Any], None] = lambda _: None
    ) -> None:
        """`weights`: float16 or float32, which are copied. `renew`: the provider's `update_callback`."""
        self.values = {
            name: device_value(array.copy() if device == "cpu" else array, device) for name, array in weights.items()
        }
        self.originals: dict[str, Any] = {}
        self.shared = {name: _shared(made, device) for name, made in self.values.items()}
        self.changed: set[str] = set()
        self.renew = renew

    @contextmanager
    def written(self, name: str) -> Iterator[Any]:
        """A weight's OrtValue, to be written meanwhile: from the next run on sessions have the new numbers. Nothing may
        run until then."""
        yield self.values[name]
        self.renew(self.values[name])

    def write(self, name: str, array: np.ndarray) -> None:
        """From the next run on a weight has these numbers, of its shape and type."""
        with self.written(name) as value:
            write_value(value, array)


def _shared(value: Any, device: str) -> Any:
    """A value's memory as a session takes it, which refuses values that own theirs, as those made on a device do."""
    if device == "cpu":
        return value
    if "vendor_id" in place(device):
        return view(device, value.data_ptr(), value.element_type(), value.shape(), owner=value)
    return unowned(value)


# x (8, 8) times weights of ones: what it gives when they are zeros by then says where they are read.
_PRODUCT = """<ir_version: 8, opset_import: ["" : 17]>
product (float[8,8] x) => (float[8,8] y) <float[8,8] weight = {%s}> { y = MatMul (x, weight) }"""


def supports_in_place_update(provider: str, device: str, options: Mapping[str, str]) -> bool:
    """Whether a session on the provider follows its held weights: tried on one product."""
    import onnx

    ones = np.ones((8, 8), np.float32)
    graph = onnx.parser.parse_model(_PRODUCT % ", ".join(["1.0"] * 64)).SerializeToString()
    try:
        held = UpdatableWeights({"weight": ones}, device)
        session = open_graph(graph, provider, options, held=held.shared)
        held.write("weight", 0 * ones)
        made: np.ndarray = session.run(None, {"x": ones})[0]
    except (SdOrtError, RuntimeError):
        return False
    return bool((made == 0).all())
