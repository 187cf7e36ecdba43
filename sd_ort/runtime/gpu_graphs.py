"""A run captured on a stream as a CUDA or HIP graph.

sd-ort captures the runs of ONNX Runtime's own CUDA and ROCm providers itself, through the runtime library that the
provider is linked to. ONNX Runtime's capture belongs to one thread, executes a run three times, and is void if the
arena grows meanwhile. The sd-ort provider captures its runs inside; see `bound_run.BoundRun`.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable

from sd_ort.core.errors import SdOrtError, first_line
from sd_ort.core.garbage_collection import gc_disabled
from sd_ort.runtime.capture_lock import CAPTURE_LOCK
from sd_ort.runtime.stream import Stream

# Of a capture. Another thread that creates or destroys a cuBLAS handle ends it, as closing a session of ONNX Runtime's
# CUDA provider does, and so does a wait for the device by another library (results/capture_calls.md).
CAPTURE_ATTEMPTS = 3
RELAXED = 2  # StreamCaptureModeRelaxed: memory may be allocated during the capture, by this thread and by others
MEMCPY_NODE, HOST_NODE = 1, 3  # GraphNodeTypeMemcpy and GraphNodeTypeHost
HOST_TO_DEVICE = 1  # MemcpyHostToDevice

HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class HostNodeParams(ctypes.Structure):
    """cudaHostNodeParams and hipHostNodeParams."""

    _fields_ = [("fn", HostFunction), ("userData", ctypes.c_void_p)]


class MemcpyParams(ctypes.Structure):
    """cudaMemcpy3DParms and hipMemcpy3DParms."""

    _fields_ = [
        ("srcArray", ctypes.c_void_p), ("srcPos", ctypes.c_size_t * 3), ("srcPtr", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t * 3), ("dstArray", ctypes.c_void_p), ("dstPos", ctypes.c_size_t * 3),
        ("dstPtr", ctypes.c_void_p), ("dstPitch", ctypes.c_size_t * 3), ("extent", ctypes.c_size_t * 3),
        ("kind", ctypes.c_int),
    ]  # fmt: skip


class NotCapturable(SdOrtError):
    """A run that cannot be captured as a GPU graph. Nothing of it was executed."""


class GpuGraph:
    """A captured run. Any thread launches it on its stream, and any thread may release it.

    Some kernels of ONNX Runtime (Concat, Split) copy pointers from pinned staging memory to the device, and launches
    read that memory again. ONNX Runtime frees it at the end of the next synchronous run of the session (see
    `bound_run.SessionCaptures`), or by a host function at the end of the captured run. That function is not part of the
    graph; it is called when the graph is released.
    """

    def __init__(self, stream: Stream, run: Callable[[], object]) -> None:
        """Capture the work that `run` enqueues on `stream`, of which nothing is executed.

        Raises NotCapturable.
        """
        self.stream = stream
        graph = capture_graph(stream, run)
        try:
            release = take_release(stream, graph)
            self.executable = ctypes.c_void_p()
            stream.call("GraphInstantiateWithFlags", ctypes.byref(self.executable), graph, ctypes.c_ulonglong(0))
        except SdOrtError as error:
            raise NotCapturable(str(error)) from error
        finally:
            stream.call("GraphDestroy", graph)
        # Without it a driver sends long graphs in parts at every launch.
        stream.call("GraphUpload", self.executable, ctypes.c_void_p(stream.handle))
        self._finalizer = weakref.finalize(self, _release, stream, self.executable, release)
        self._finalizer.atexit = False  # type: ignore[misc]  # a property

    def launch(self) -> None:
        """Enqueue the captured run."""
        self.stream.call("GraphLaunch", self.executable, ctypes.c_void_p(self.stream.handle))

    def release(self) -> None:
        """Free the graph once its launches are done."""
        self._finalizer()


def capture_graph(stream: Stream, run: Callable[[], object]) -> ctypes.c_void_p:
    """Capture the work that `run` enqueues on `stream` as a GPU graph. A failed capture is repeated.

    Raises NotCapturable after CAPTURE_ATTEMPTS.
    """
    for _ in range(CAPTURE_ATTEMPTS):
        graph, reason = _capture(stream, run)
        if not reason:
            return graph
    raise NotCapturable(reason)


def _capture(stream: Stream, run: Callable[[], object]) -> tuple[ctypes.c_void_p, str]:
    """Return the graph, and why there is none."""
    graph, handle = ctypes.c_void_p(), ctypes.c_void_p(stream.handle)
    with CAPTURE_LOCK.exclusive(), gc_disabled():  # a finalizer may wait for the stream
        stream.call("StreamBeginCapture", handle, RELAXED)
        try:
            run()
            failure = None
        except SdOrtError as error:
            failure = error
        code = stream.c_function("StreamEndCapture")(handle, ctypes.byref(graph))
    if failure is None and not code:
        return graph, ""
    stream.c_function("GetLastError")()  # which would be taken for that of the next kernel
    if graph:
        stream.call("GraphDestroy", graph)
    return graph, f"the capture failed with error {code}" if failure is None else first_line(
        failure.__cause__ or failure
    )


def take_release(stream: Stream, graph: ctypes.c_void_p) -> HostNodeParams | None:
    """Remove from `graph` the host function that frees ONNX Runtime's staging memory, and return it.

    Raises NotCapturable for several of them, and for a copy from pageable memory: a node on the CPU wrote its values,
    and a launch would copy the values of a later run.
    """
    release = None
    for node in nodes_of(stream, graph):
        node_type = ctypes.c_int()
        stream.call("GraphNodeGetType", node, ctypes.byref(node_type))
        if node_type.value == HOST_NODE:
            if release is not None:
                raise NotCapturable("the run calls several host functions")
            release = HostNodeParams()
            stream.call("GraphHostNodeGetParams", node, ctypes.byref(release))
            stream.call("GraphDestroyNode", node)
        elif node_type.value == MEMCPY_NODE and copies_pageable_memory(stream, node):
            raise NotCapturable("a node runs on the CPU, and its output is copied to the device")
    return release


def nodes_of(stream: Stream, graph: ctypes.c_void_p) -> list[ctypes.c_void_p]:
    count, handles = ctypes.c_size_t(), ctypes.POINTER(ctypes.c_void_p)
    stream.call("GraphGetNodes", graph, handles(), ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    if count.value:
        stream.call("GraphGetNodes", graph, ctypes.cast(nodes, handles), ctypes.byref(count))
    return [ctypes.c_void_p(node) for node in nodes]


def copies_pageable_memory(stream: Stream, node: ctypes.c_void_p) -> bool:
    """Whether a node copies from host memory that is not pinned. HIP does not tell of captured copies."""
    if stream.prefix != "cuda":
        return False
    params = MemcpyParams()
    stream.call("GraphMemcpyNodeGetParams", node, ctypes.byref(params))
    if params.kind != HOST_TO_DEVICE:
        return False
    flags = ctypes.c_uint()
    if not stream.c_function("HostGetFlags")(ctypes.byref(flags), ctypes.c_void_p(params.srcPtr)):
        return False
    stream.c_function("GetLastError")()
    return True


def _release(stream: Stream, executable: ctypes.c_void_p, release: HostNodeParams | None) -> None:
    with CAPTURE_LOCK.shared():
        stream.synchronize()
        stream.call("GraphExecDestroy", executable)
    if release is not None:
        release.fn(release.userData)
