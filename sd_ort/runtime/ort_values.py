"""Devices by name, and memory on them as ONNX Runtime takes a weight that it is to read where it lies.

ONNX Runtime refuses values that own their memory as weights (`AddInitializer`), and takes its file's own instead of one
that is not on exactly the device of the session, vendor included. What it makes of DLPack's tensors is always NVIDIA's.
A value that is bound as an output is on the device that it is said to be on, and owns nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from sd_ort.runtime.capture_lock import CAPTURE_LOCK, device_calls
from sd_ort.runtime.ort_wheel import runtime

BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16


@cache
def _any_session() -> Any:
    """A session that has an output to bind."""
    import onnx

    graph = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> any (float[N] x) => (float[N] y) { y = Neg (x) }'
    )
    options = runtime().SessionOptions()
    options.intra_op_num_threads = 1  # it never runs
    return runtime().InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])


def place(device: str) -> dict[str, Any]:
    """A device's name as ONNX Runtime's OrtValue takes it: "cpu" and "cuda", or "gpu:VENDOR" of a plugin provider; the
    second one is "cuda@1"."""
    name, _, number = device.partition("@")
    kind, _, vendor = name.partition(":")
    return {"device_type": kind, "device_id": int(number or 0), **({"vendor_id": int(vendor)} if vendor else {})}


def empty_value(shape: Sequence[int], dtype: Any, device: str) -> Any:
    """Return an OrtValue with undefined values on `device`."""
    with device_calls(device):
        try:
            return runtime().OrtValue.ortvalue_from_shape_and_type(list(shape), np.dtype(dtype).type, **place(device))
        except Exception:  # onnxruntime-rocm allocates nothing on "cuda" by shape and type, but copies an array there
            return device_value(np.empty(shape, dtype), device)


def device_value(array: np.ndarray, device: str) -> Any:
    """Return an OrtValue on `device` with a copy of `array`; on the CPU over the array itself if it is contiguous."""
    with device_calls(device):
        return runtime().OrtValue.ortvalue_from_numpy(np.asarray(array, order="C"), **place(device))


def write_value(value: Any, array: np.ndarray) -> None:
    """Copy an array of the same dtype to an OrtValue on any device."""
    with CAPTURE_LOCK.shared():
        value.update_inplace(np.ascontiguousarray(array))


def read_value(value: Any) -> np.ndarray:
    """Return an OrtValue's array: a copy, or a view for one on the CPU."""
    with CAPTURE_LOCK.shared():
        array: np.ndarray = value.numpy()
    return array


def host_value(array: np.ndarray) -> Any:
    """An OrtValue over a contiguous array of the host, which must outlive it, of any type that weights have."""
    value = runtime().OrtValue
    if array.dtype == ml_dtypes.bfloat16:
        return value.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), BFLOAT16)
    return value.ortvalue_from_numpy(array)


def unowned(value: Any) -> Any:
    """Return an OrtValue over the memory of `value` that does not count as its owner, as `AddInitializer` wants it.

    The public OrtValue.from_dlpack is missing in onnxruntime-rocm 1.22.2.
    """
    c_value = value._ortvalue
    return runtime().OrtValue(type(c_value).from_dlpack(c_value.to_dlpack(), False))


def view(device: str, address: int, element: int, shape: Sequence[int], owner: object = None) -> Any:
    """An OrtValue over numbers of onnx.TensorProto's type `element` at an address of a device with a vendor
    ("gpu:VENDOR"). It keeps `owner`; sessions that read it do not: see `keep`."""
    onnxruntime = runtime()
    where = place(device)
    memory = onnxruntime.OrtDevice.make(where["device_type"], where["device_id"], where["vendor_id"])
    binding = _any_session().io_binding()._iobinding  # its public methods know no vendor
    binding.bind_output("y", memory._get_c_device(), element, list(shape), address)
    made = onnxruntime.OrtValue(binding.get_outputs()[0])
    made.owner = owner
    return made


def memory_view(device: str, address: int, dtype: Any, shape: Sequence[int]) -> Any:
    """Return an OrtValue over memory at an address of a device without a vendor, which must outlive it."""
    binding = _any_session().io_binding()
    where = place(device)
    binding.bind_output("y", where["device_type"], where["device_id"], dtype, list(shape), address)
    return binding.get_outputs()[0]


def keep(session: Any, owner: object) -> Any:
    """The session; `owner` stays as long as any part of ONNX Runtime has it."""
    weakref.finalize(session._sess, _let_go, owner).atexit = False  # type: ignore[misc]  # a property
    return session


def _let_go(_: object) -> None:
    """Nothing: what is kept goes with the call's arguments."""
