"""Lock between captures and the device calls of other threads; the device is a stand-in that records its calls."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from sd_ort.core.errors import SdOrtError
from sd_ort.runtime import bound_run as bound_run_module
from sd_ort.runtime import ort_values, session
from sd_ort.runtime.bound_run import NO_GRAPH_ID, BoundRun
from sd_ort.runtime.capture_lock import CaptureLock
from sd_ort.runtime.gpu_graphs import CAPTURE_ATTEMPTS, NotCapturable, capture_graph
from sd_ort.runtime.ort_values import device_value, empty_value, read_value, write_value
from sd_ort.runtime.provider_table import PROVIDERS
from sd_ort.runtime.session import OrtModel, open_graph

LONG = 60


def started(*targets: Callable[[], Any]) -> list[threading.Thread]:
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    return threads


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in threads), "a deadlock"


def test_a_capture_waits_for_sections_which_do_not_wait_for_each_other() -> None:
    lock, events = CaptureLock(), []
    inside, leave = threading.Barrier(3), threading.Event()

    def open_session() -> None:
        with lock.shared():
            inside.wait(LONG)
            leave.wait(LONG)
            events.append("opened")

    def capture() -> None:
        with lock.exclusive():
            events.append("captured")

    threads = started(open_session, open_session)
    inside.wait(LONG)  # both are in their sections
    threads += started(capture)
    leave.set()
    join(threads)
    assert events == ["opened", "opened", "captured"]


def test_a_section_waits_for_the_capture_of_another_thread() -> None:
    lock, events, begun = CaptureLock(), [], threading.Event()

    def open_session() -> None:
        begun.set()
        with lock.shared():
            events.append("opened")

    with lock.exclusive():
        threads = started(open_session)
        begun.wait(LONG)
        threads[0].join(0.2)
        with lock.shared(), lock.exclusive(), lock.shared():  # of the same thread
            events.append("captured")
    join(threads)
    assert events == ["captured", "opened"]


def test_a_capture_that_waits_goes_before_new_sections() -> None:
    lock, events, leave = CaptureLock(), [], threading.Event()
    inside = threading.Event()

    def first() -> None:
        with lock.shared():
            inside.set()
            leave.wait(LONG)
            with lock.shared():  # reentrant although a capture waits
                events.append("first")

    def capture() -> None:
        with lock.exclusive():
            events.append("captured")

    def second() -> None:
        with lock.shared():
            events.append("second")

    threads = started(first)
    inside.wait(LONG)
    threads += started(capture)
    while not lock.waiting:
        time.sleep(0.001)
    threads += started(second)
    threads[-1].join(0.2)
    leave.set()
    join(threads)
    assert events == ["first", "captured", "second"]


def test_threads_in_sections_can_all_capture() -> None:
    lock, inside, captures = CaptureLock(), threading.Barrier(3), []

    def capture_in_section() -> None:
        with lock.shared():
            inside.wait(LONG)
            with lock.exclusive():
                captures.append("begin")
                time.sleep(0.01)
                captures.append("end")

    threads = started(capture_in_section, capture_in_section)
    inside.wait(LONG)
    join(threads)
    assert captures == ["begin", "end"] * 2


class Device:
    """Stand-in for a GPU: `wrong` are the plain calls that came while another thread captured."""

    def __init__(self) -> None:
        self.capturing: int | None = None
        self.wrong: list[str] = []
        self.calls = 0

    def plain_call(self, name: str) -> None:
        if self.capturing not in (None, threading.get_ident()):
            self.wrong.append(name)
        self.calls += 1

    def value(self) -> Any:
        return SimpleNamespace(
            update_inplace=lambda _: self.plain_call("update_inplace"),
            numpy=lambda: (self.plain_call("numpy"), np.zeros(1, np.float32))[1],
            shape=lambda: [1],
        )

    def new_value(self, name: str) -> Any:
        self.plain_call(name)
        return self.value()


class Stream:
    """The functions of `sd_ort.runtime.stream.Stream` that captures call."""

    prefix, handle = "cuda", 1

    def __init__(self, device: Device, void: int = 0) -> None:
        """void: number of captures that fail."""
        self.device, self.void = device, void

    def call(self, name: str, *_: Any) -> None:
        if name == "StreamBeginCapture":
            assert self.device.capturing is None
            self.device.capturing = threading.get_ident()

    def c_function(self, name: str) -> Callable[..., int]:
        def end_capture(_: object, graph: Any) -> int:
            time.sleep(0.001)  # for calls of other threads
            self.device.capturing = None
            self.void -= 1
            if self.void >= 0:
                return 901  # cudaErrorStreamCaptureInvalidated
            ctypes.cast(graph, ctypes.POINTER(ctypes.c_void_p))[0] = 1
            return 0

        return end_capture if name == "StreamEndCapture" else lambda *_: 0

    def synchronize(self) -> None:
        pass


class Session:
    """A session of one float32 input x and one output y."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def io_binding(self) -> Any:
        ignored = lambda *_: None  # noqa: E731
        return SimpleNamespace(bind_ortvalue_input=ignored, bind_ortvalue_output=ignored)

    def get_inputs(self) -> list[Any]:
        return [SimpleNamespace(name="x", type="tensor(float)", shape=[1])]

    def get_outputs(self) -> list[Any]:
        return [SimpleNamespace(name="y", type="tensor(float)", shape=[1])]

    def get_providers(self) -> list[str]:
        return [PROVIDERS["cuda"].ep, PROVIDERS["cpu"].ep]

    def run(self, *_: Any) -> list[np.ndarray]:
        self.device.plain_call("run")
        return [np.zeros(1, np.float32)]

    def run_with_iobinding(self, *_: Any) -> None:
        self.device.plain_call("run_with_iobinding")


class OpenSession:
    """What ONNX Runtime returns for a small graph."""

    def __init__(self, device: Device) -> None:
        device.plain_call("InferenceSession")
        self._sess = Session(device)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    value_class = SimpleNamespace(
        ortvalue_from_numpy=lambda *_, **__: device.new_value("ortvalue_from_numpy"),
        ortvalue_from_shape_and_type=lambda *_, **__: device.new_value("ortvalue_from_shape_and_type"),
    )
    wheel = SimpleNamespace(
        OrtValue=value_class,
        SessionOptions=onnxruntime.SessionOptions,
        get_available_providers=lambda: [PROVIDERS["cuda"].ep],
        InferenceSession=lambda *_, **__: OpenSession(device),
    )
    for module in (ort_values, session):
        monkeypatch.setattr(module, "import_onnxruntime", lambda: wheel)
    return device


X = np.zeros(1, np.float32)
CALLS: dict[str, Callable[[Device], Any]] = {
    "write_value": lambda device: write_value(device.value(), X),
    "read_value": lambda device: read_value(device.value()),
    "device_value": lambda _: device_value(X, "cuda"),
    "empty_value": lambda _: empty_value([1], np.float32, "cuda"),
    "an opening session": lambda _: open_graph(b"", "cuda"),
    "Model": lambda device: OrtModel(Session(device))(x=X),  # type: ignore[arg-type]
    "BoundRun": lambda device: bound_run(device).run(),
}


def bound_run(device: Device, stream: Stream | None = None) -> BoundRun:
    outputs = {"y": device.value()}
    opened: Any = Session(device)
    return BoundRun(opened, {"x": X}, "cuda", stream=stream, outputs=outputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CALLS)
def test_no_device_call_of_another_thread_comes_during_a_capture(device: Device, name: str) -> None:
    threads: list[threading.Thread] = []

    def run() -> None:
        threads.extend(started(lambda: CALLS[name](device)))
        threads[0].join(0.2)
        CALLS[name](device)  # the thread that captures may make it

    stream: Any = Stream(device)
    capture_graph(stream, run)
    join(threads)
    assert device.calls >= 2
    assert not device.wrong


def test_a_capture_that_failed_is_repeated(device: Device) -> None:
    """As when another thread destroys a cuBLAS handle. Nothing is reported, unless all attempts fail."""
    runs: list[int] = []
    stream: Any = Stream(device, void=CAPTURE_ATTEMPTS - 1)
    assert capture_graph(stream, lambda: runs.append(1))
    assert len(runs) == CAPTURE_ATTEMPTS
    stream = Stream(device, void=CAPTURE_ATTEMPTS)
    with pytest.raises(NotCapturable, match="the capture failed with error 901"):
        capture_graph(stream, lambda: None)
    assert capture_graph(stream, lambda: None)


@pytest.mark.parametrize("void", [1, CAPTURE_ATTEMPTS - 1, CAPTURE_ATTEMPTS])
def test_a_provider_captures_again_after_a_failure(device: Device, void: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until all attempts have failed, which is reported; then the run is not captured."""
    graph_ids: list[int] = []
    reports: list[Exception] = []

    def run(self: BoundRun, graph_id: int, wait: bool) -> None:
        graph_ids.append(graph_id)
        if graph_id == 7 and len(graph_ids) <= void:
            raise SdOrtError("void")

    monkeypatch.setattr(BoundRun, "_run", run)
    monkeypatch.setattr(bound_run_module, "report_failed_capture", reports.append)
    opened: Any = Session(device)
    outputs: Any = {"y": device.value()}
    bound = BoundRun(opened, {"x": X}, "cuda", graph_id=7, outputs=outputs)
    if void < CAPTURE_ATTEMPTS:
        assert (graph_ids, bound.graph_id, reports) == ([7] * (void + 1), 7, [])
    else:
        assert (graph_ids, bound.graph_id) == ([*[7] * void, NO_GRAPH_ID], NO_GRAPH_ID)
        assert [str(report) for report in reports] == ["void"]


def test_threads_that_open_run_and_copy_while_others_capture(device: Device) -> None:
    failures = []

    def capture() -> None:
        for _ in range(20):
            try:
                assert bound_run(device, Stream(device)).graph is not None
            except (AssertionError, NotCapturable) as error:
                failures.append(error)

    def call() -> None:
        for _ in range(20):
            for each in CALLS.values():
                each(device)

    join(started(*[capture] * 4, *[call] * 4))
    assert not failures
    assert not device.wrong
