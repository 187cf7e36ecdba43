"""Weights in memory of ours, on a provider's device, where open sessions read them: the next run, or the next replay of
a captured graph, sees what was written. ONNX Runtime takes them in place of those in the file (`AddInitializer`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from sd_ort.core.errors import SdOrtError
from sd_ort.runtime.captured import place
from sd_ort.runtime.session import open_graph
from sd_ort.runtime.wheels import runtime

BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16


def host_value(array: np.ndarray) -> Any:
    """An OrtValue over a contiguous array of the host, which must outlive it, of any type that weights have."""
    value = runtime().OrtValue
    if array.dtype == ml_dtypes.bfloat16:
        return value.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), BFLOAT16)
    return value.ortvalue_from_numpy(array)


class HeldWeights:
    """`values`: initializer -> OrtValue on `device`, to be written; `shared`: the same memory as a session takes it;
    `changed`: those that hold other numbers than the file."""

    def __init__(self, weights: Mapping[str, np.ndarray], device: str) -> None:
        """`weights`: float16 or float32, which are copied."""
        value = runtime().OrtValue
        copies = {name: np.array(array, order="C") if device == "cpu" else array for name, array in weights.items()}
        self.values = {name: value.ortvalue_from_numpy(array, **place(device)) for name, array in copies.items()}
        # A session refuses values that own their memory, as those made on a device do; a view by DLPack only keeps it.
        self.shared = (
            self.values if device == "cpu" else {name: value.from_dlpack(v) for name, v in self.values.items()}
        )
        self.changed: set[str] = set()

    def write(self, name: str, array: np.ndarray) -> None:
        """From the next run on a weight has these numbers, of its shape and type."""
        self.values[name].update_inplace(np.ascontiguousarray(array))


# x (8, 8) times weights of ones: what it gives when they are zeros by then says where they are read.
_PRODUCT = """<ir_version: 8, opset_import: ["" : 17]>
product (float[8,8] x) => (float[8,8] y) <float[8,8] weight = {%s}> { y = MatMul (x, weight) }"""


def reads_in_place(provider: str, device: str, options: Mapping[str, str]) -> bool:
    """Whether a session on the provider follows its held weights: tried on one product."""
    import onnx

    ones = np.ones((8, 8), np.float32)
    held = HeldWeights({"weight": ones}, device)
    graph = onnx.parser.parse_model(_PRODUCT % ", ".join(["1.0"] * 64)).SerializeToString()
    try:
        session = open_graph(graph, provider, options, held=held.shared)
        held.write("weight", 0 * ones)
        made: np.ndarray = session.run(None, {"x": ones})[0]
    except (SdOrtError, RuntimeError):
        return False
    return bool((made == 0).all())
