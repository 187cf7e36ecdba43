"""Background initialization of a GPU, while modules are imported and models are opened.

The driver's context and the provider's libraries (cuBLASLt or hipBLASLt, cuDNN) load mostly without Python's lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import threading
from functools import cache

from sd_ort.core.errors import SdOrtError
from sd_ort.runtime.provider_table import PROVIDERS
from sd_ort.runtime.providers import is_plugin, plugin_library

# One convolution, one attention and one GEMM: each loads its libraries.
MODEL = """<ir_version: 10, opset_import: ["" : 21, "sd_ort" : 1]>
warm_up (float16[1, 8, 8, 64] x, float16[64, 3, 3, 64] filters, float16[64, 64] weight) => (float16[1, 64, 64] y) {
    shape = Constant <value_ints = [1, 64, 64]> ()
    features = sd_ort.NhwcConv <pads = [1, 1, 1, 1]> (x, filters)
    tokens = Reshape (features, shape)
    values = MatMul (tokens, weight)
    y = sd_ort.MultiHeadAttention <num_heads = 1> (tokens, tokens, values)
}
<opset_import: ["" : 21], domain: "sd_ort"> NhwcConv <pads> (x, filters) => (y) { y = Identity (x) }
<opset_import: ["" : 21], domain: "sd_ort"> MultiHeadAttention <num_heads> (q, k, v) => (y) { y = Identity (v) }
"""


@cache
def warm_up(provider: str, device: int = 0) -> threading.Thread | None:
    """Initialize a device of an sd-ort provider in a thread, once per process; None for other providers and names."""
    if provider not in PROVIDERS or not is_plugin(provider):
        return None
    thread = threading.Thread(target=_initialize, args=(provider, device), name="warm_up")
    thread.start()
    return thread


def import_ahead(*modules: str) -> None:
    """Import modules in a thread, while libraries load and sessions open without Python's lock.

    A module that cannot be imported raises where it is used.
    """

    def load() -> None:
        for module in modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)

    threading.Thread(target=load, name="import_ahead").start()


def _initialize(provider: str, device: int) -> None:
    """Create the device's context and run MODEL. Errors are left to the sessions of the caller, which report them."""
    with contextlib.suppress(SdOrtError, OSError, AttributeError):
        library = ctypes.CDLL(str(plugin_library(provider)))
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        library.sd_ort_SetDevice(device)
        library.sd_ort_MemGetInfo(ctypes.byref(free), ctypes.byref(total))
        import numpy as np

        from sd_ort.core.onnx_file import serialize
        from sd_ort.runtime.capture_lock import CAPTURE_LOCK
        from sd_ort.runtime.session import open_graph

        session = open_graph(serialize(MODEL), provider, {"device_id": str(device)})
        shapes = {value.name: value.shape for value in session.get_inputs()}
        with CAPTURE_LOCK.shared():
            session.run(None, {name: np.zeros(shape, np.float16) for name, shape in shapes.items()})
