"""Captures of a session's runs on our provider, while other threads use the device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from sd_ort.core.errors import SdOrtError
from sd_ort.runtime import tuning
from sd_ort.runtime.bound_run import BoundRun
from sd_ort.runtime.providers import provider_named
from sd_ort.runtime.session import ModelOverride, SessionOptions, create_session
from sd_ort.runtime.updatable_weights import UpdatableWeights, update_callback

CHANNELS = 424  # of a convolution that is computed by Winograd's algorithm (custom_ops/operators/nhwc_conv/op.h)


def convolution(path: Path) -> tuple[Path, np.ndarray]:
    """A model of one NhwcConv of x (1, 16, 16, C), and its filters: 3 MB, which a session uploads and transforms.

    Its result is copied to the output.
    """
    filters = (np.random.default_rng(3).normal(size=(CHANNELS, 3, 3, CHANNELS)) / 60).astype(np.float16)
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 20, "sd_ort": 1]>
        g (float16[1, 16, 16, {CHANNELS}] x) => (float16[256, {CHANNELS}] y) {{
            z = sd_ort.NhwcConv <pads = [1, 1, 1, 1]> (x, filters)
            y = Flatten <axis = 3> (z)
        }}
        <opset_import: ["": 20], domain: "sd_ort"> NhwcConv <pads> (x, filters) => (y) {{ y = Identity (x) }}""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(filters, "filters"))
    onnx.save(model, path)
    return path, filters


@contextmanager
def stopped(work: Callable[[], Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Call `work`, which captures, in another thread, and stop it at its first captured launch until the block ends.

    Yields a list that has its result afterwards.
    """
    results: list[Any] = []
    failures: list[BaseException] = []

    def call() -> None:
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    monkeypatch.setenv("SD_ORT_SIMULATED_CAPTURES", str(folder))
    thread = threading.Thread(target=call)
    thread.start()
    try:
        while thread.is_alive() and not (folder / "captures").exists():
            time.sleep(0.001)
        assert thread.is_alive()
        yield results
    finally:
        (folder / "go").touch()
        thread.join()
    assert failures == []


@pytest.mark.parametrize("work", ["open", "run", "write", "close", "tune"])
def test_other_threads_do_not_end_a_capture(
    work: str, provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They open a session, run one, write weights, close one, or tune, and succeed; so does the capture."""
    path, filters = convolution(tmp_path / "convolution.onnx")
    device, x = provider_named(provider).device, np.ones((1, 16, 16, CHANNELS), np.float16)
    updatable = UpdatableWeights({"filters": filters}, device, update_callback(provider))
    sessions = [create_session(path, provider, override=ModelOverride(updatable=updatable.shared))]
    expected = sessions[0].run(None, {"x": x})[0]
    graph_session = create_session(path, provider, SessionOptions(capture=True))
    works: dict[str, Callable[[], None]] = {
        "open": lambda: sessions.append(create_session(path, provider)),
        "run": lambda: None,
        "write": lambda: updatable.update("filters", np.zeros_like(filters)),
        "tune": lambda: sessions.append(
            create_session(path, provider, SessionOptions(provider_options={"tuning": "1"}))
        ),
        "close": lambda: sessions.insert(0, sessions.pop() and create_session(path, provider)),
    }
    with stopped(lambda: BoundRun(graph_session, {"x": x}, device, graph_id=0), tmp_path, monkeypatch) as bound:
        works[work]()
        actual = sessions[-1].run(None, {"x": x})[0]
        tuning.GpuOps(Path(provider.removeprefix("plugin:"))).enable(False)
        rounding = 4e-3 if work == "tune" else 0  # another candidate may be chosen
        np.testing.assert_allclose(actual, expected * (work != "write"), rtol=0, atol=rounding)
    check_replays(bound[0], x, expected)


def check_replays(bound: BoundRun, x: np.ndarray, expected: np.ndarray) -> None:
    for scale in (1, -1, 2):
        bound.inputs["x"].update_inplace(scale * x)
        bound.run()
        np.testing.assert_array_equal(bound.outputs["y"].numpy(), scale * expected)


def test_a_thread_goes_on_after_a_capture_that_failed(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel fails halfway, at the copy after the convolution. The session stays open, and the same thread copies to
    the device and back."""
    path, _ = convolution(tmp_path / "convolution.onnx")
    device, x = provider_named(provider).device, np.ones((1, 16, 16, CHANNELS), np.float16)
    expected = create_session(path, provider).run(None, {"x": x})[0]
    graph_session = create_session(path, provider, SessionOptions(capture=True))

    def work() -> np.ndarray:
        with pytest.raises(SdOrtError, match="the device is gone"):
            BoundRun(graph_session, {"x": x}, device, graph_id=0)
        monkeypatch.delenv("SD_ORT_SIMULATED_LOST")
        return create_session(path, provider).run(None, {"x": x})[0]

    with stopped(work, tmp_path, monkeypatch) as outputs:
        monkeypatch.setenv("SD_ORT_SIMULATED_LOST", "1")
    np.testing.assert_array_equal(outputs[0], expected)
    check_replays(BoundRun(graph_session, {"x": x}, device, graph_id=0), x, expected)
