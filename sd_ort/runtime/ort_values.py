"""OrtValue views over existing device memory, and device names in the form that ONNX Runtime expects.

`AddInitializer` rejects values that own their memory. A value that is not on exactly the session's device, vendor
included, is ignored in favor of the file's. OrtValues from DLPack are always on NVIDIA's devices. A value that is bound
as an output is on the device that the caller names, and owns nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from sd_ort.core.onnx_file import serialize
from sd_ort.runtime.capture_lock import CAPTURE_LOCK, device_calls
from sd_ort.runtime.ort_wheel import import_onnxruntime

# NumPy's dtypes that ONNX Runtime does not know -> integers of their size, and onnx.TensorProto's type.
EXTENDED_DTYPES = {np.dtype(ml_dtypes.bfloat16): (np.uint16, 16), np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, 17)}


def as_integers(array: np.ndarray) -> np.ndarray:
    """Return an array as ONNX Runtime reads it from NumPy: EXTENDED_DTYPES as integers, others unchanged."""
    return array.view(EXTENDED_DTYPES[array.dtype][0]) if array.dtype in EXTENDED_DTYPES else array


@cache
def _any_session() -> Any:
    """Return a session with an output to bind."""
    graph = serialize('<ir_version: 8, opset_import: ["" : 17]> any (float[N] x) => (float[N] y) { y = Neg (x) }')
    options = import_onnxruntime().SessionOptions()
    options.intra_op_num_threads = 1  # it never runs
    return import_onnxruntime().InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def device_arguments(device: str) -> dict[str, Any]:
    """Return OrtValue's arguments for a device: "cpu" and "cuda", or "gpu:VENDOR" of a plugin provider; "cuda@1" is the
    second one."""
    name, _, number = device.partition("@")
    device_type, _, vendor = name.partition(":")
    return {"device_type": device_type, "device_id": int(number or 0), **({"vendor_id": int(vendor)} if vendor else {})}


def empty_value(shape: Sequence[int], dtype: Any, device: str) -> Any:
    """Return an OrtValue with undefined values on `device`."""
    with device_calls(device):
        try:
            allocate = import_onnxruntime().OrtValue.ortvalue_from_shape_and_type
            return allocate(list(shape), np.dtype(dtype).type, **device_arguments(device))
        except Exception:  # onnxruntime-rocm allocates nothing on "cuda" by shape and type, but copies an array there
            return device_value(np.empty(shape, dtype), device)


def device_value(array: np.ndarray, device: str) -> Any:
    """Return an OrtValue on `device` with a copy of `array`; on the CPU over the array itself if it is contiguous."""
    with device_calls(device):
        return import_onnxruntime().OrtValue.ortvalue_from_numpy(
            np.asarray(array, order="C"), **device_arguments(device)
        )


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
    """Return an OrtValue over a contiguous host array, which must outlive it, of any dtype that weights have."""
    value = import_onnxruntime().OrtValue
    if array.dtype in EXTENDED_DTYPES:
        return value.ortvalue_from_numpy_with_onnx_type(as_integers(array), EXTENDED_DTYPES[array.dtype][1])
    return value.ortvalue_from_numpy(array)


def initializer_value(value: Any, device: str, dtype: np.dtype) -> Any:
    """Return an OrtValue over the memory of `value` for `AddInitializer`, which rejects values that own theirs.

    dtype: of the initializer, for a `value` of integers in its place.
    """
    if device == "cpu":
        return value
    if "vendor_id" in device_arguments(device):
        element = EXTENDED_DTYPES[dtype][1] if dtype in EXTENDED_DTYPES else value.element_type()
        return value_at(device, value.data_ptr(), element, value.shape(), owner=value)
    c_value = value._ortvalue  # the public OrtValue.from_dlpack is missing in onnxruntime-rocm 1.22.2
    return import_onnxruntime().OrtValue(type(c_value).from_dlpack(c_value.to_dlpack(), False))


def value_at(device: str, address: int, element: int, shape: Sequence[int], owner: object = None) -> Any:
    """Return an OrtValue over an address of a device with a vendor ("gpu:VENDOR"). `element`: onnx.TensorProto's type.

    It references `owner`; sessions that read it do not: see `keep`.
    """
    onnxruntime = import_onnxruntime()
    where = device_arguments(device)
    memory = onnxruntime.OrtDevice.make(where["device_type"], where["device_id"], where["vendor_id"])
    binding = _any_session().io_binding()._iobinding  # its public methods know no vendor
    binding.bind_output("y", memory._get_c_device(), element, list(shape), address)
    value = onnxruntime.OrtValue(binding.get_outputs()[0])
    value.owner = owner
    return value


def memory_view(device: str, address: int, dtype: Any, shape: Sequence[int]) -> Any:
    """Return an OrtValue over memory at an address of a device without a vendor, which must outlive it."""
    binding = _any_session().io_binding()
    where = device_arguments(device)
    binding.bind_output("y", where["device_type"], where["device_id"], dtype, list(shape), address)
    return binding.get_outputs()[0]


def view(value: Any, offset: int, like: Any, dtype: np.dtype, device: str) -> Any:
    """Return an OrtValue in the shape of `like` and its `dtype` over the memory of `value`, `offset` bytes from its
    start."""
    address = value.data_ptr() + offset
    if ":" in device:
        return value_at(device, address, like.element_type(), like.shape(), owner=value)
    memory = memory_view(device, address, dtype, like.shape())
    memory.owner = value
    return memory


def keep_alive(session: Any, owner: object) -> Any:
    """Return the session, after tying the lifetime of `owner` to that of ONNX Runtime's session."""
    weakref.finalize(session._sess, _release_reference, owner).atexit = False  # type: ignore[misc]  # a property
    return session


def _release_reference(_: object) -> None:
    """Finalizer with an empty body: weakref.finalize drops its argument, which releases the object."""
