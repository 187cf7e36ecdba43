"""MLCommons' LoadGen: schedules queries, measures their latencies, and writes MLPerf's official logs.

A query is one image; query i has prompt i. LoadGen issues queries; threads here generate the waiting ones, either one
thread up to a batch at a time, or several to keep replicas busy, and report each completion to LoadGen.
`pip install 'sd-ort[mlperf]'` installs it.
"""

from __future__ import annotations

import importlib.util
import queue
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.core.errors import InputError, SdOrtError
from sd_ort.core.files import write_text

MODEL = "stable-diffusion-xl"  # MLPerf's name for its text-to-image task
SCENARIOS = ("SingleStream", "Offline", "Server")
LOGS = "mlperf_log_"
FILES = ("user.conf", *(LOGS + name for name in ("summary.txt", "detail.txt", "accuracy.json", "trace.json")))

Generate = Callable[[Sequence[int]], Sequence[np.ndarray]]  # prompt indices -> images, uint8 (H, W, 3)


@dataclass(frozen=True)
class LoadGenSettings:
    """One LoadGen run.

    Args:
        samples: number of prompts.
        count: number of queries; None: count and duration of MLPerf's rules.
        rate: arrivals per second in the Server scenario.
        accuracy: one query per prompt, with logged images.
        callers: threads that generate at once; several generate one prompt at a time each.
    """

    scenario: str
    samples: int
    batch: int
    count: int | None = None
    rate: float = 1.0
    accuracy: bool = False
    callers: int = 1


def require() -> None:
    """Raise InputError if LoadGen is not installed."""
    if importlib.util.find_spec("mlperf_loadgen") is None:
        raise InputError("MLPerf's LoadGen is not installed: pip install 'sd-ort[mlperf]'.")


def run(generate: Generate, load: LoadGenSettings, out: Path) -> dict[str, Any]:
    """Run one scenario; return the results in LoadGen's logs, which are in `out` with user.conf.

    Raises:
        SdOrtError: if an engine fails.
    """
    import mlperf_loadgen as loadgen

    out.mkdir(parents=True, exist_ok=True)
    settings = loadgen.TestSettings()
    for name, value in _rules(load, out).items():
        setattr(settings, name, value)
    settings.scenario = getattr(loadgen.TestScenario, load.scenario)
    settings.mode = loadgen.TestMode.AccuracyOnly if load.accuracy else loadgen.TestMode.PerformanceOnly
    logs = loadgen.LogSettings()
    logs.enable_trace = False
    logs.log_output.outdir, logs.log_output.prefix = str(out), LOGS
    system = SystemUnderTest(generate, load.batch, loadgen, load.callers)
    sut = loadgen.ConstructSUT(system.issue, lambda: None)
    library = loadgen.ConstructQSL(load.samples, load.samples, lambda indices: None, lambda indices: None)
    try:
        system.serve(lambda: loadgen.StartTestWithLogSettings(sut, library, settings, logs))
    finally:
        loadgen.DestroyQSL(library)
        loadgen.DestroySUT(sut)
    summary = (out / f"{LOGS}summary.txt").read_text(errors="replace")
    return parse(summary) | {"queries": system.queries}


class SystemUnderTest:
    """A queue of queries, and the threads that generate their images."""

    def __init__(self, generate: Generate, batch: int, loadgen: Any, callers: int = 1) -> None:
        self.generate, self.loadgen, self.callers = generate, loadgen, callers
        self.batch = batch if callers == 1 else 1
        self.waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.queries = 0  # generated
        self.lock = threading.Lock()
        self.failure: BaseException | None = None

    def issue(self, samples: Sequence[Any]) -> None:
        """Enqueue queries; LoadGen's callback."""
        for sample in samples:
            self.waiting.put((sample.id, sample.index))

    def serve(self, test: Callable[[], None]) -> None:
        """Answer queries until `test` ends; re-raise a failure or interrupt, after which answers have no images."""
        test_thread = threading.Thread(target=test, daemon=True)
        callers = [threading.Thread(target=self._serve_queue, daemon=True) for _ in range(self.callers)]
        for thread in [*callers, test_thread]:
            thread.start()
        try:
            while test_thread.is_alive():
                test_thread.join(0.2)  # a join without timeout would block Ctrl-C
        except KeyboardInterrupt as interrupt:
            self.failure = interrupt
            test_thread.join()
        for _ in callers:
            self.waiting.put(None)
        for thread in callers:
            thread.join()
        if self.failure is not None:
            raise self.failure

    def _serve_queue(self) -> None:
        while (first := self.waiting.get()) is not None:
            samples = [first]
            while len(samples) < self.batch and not self.waiting.empty():
                samples.append(self.waiting.get())
            self._answer([sample for sample in samples if sample is not None])
            if None in samples:
                return

    def _answer(self, samples: Sequence[tuple[int, int]]) -> None:
        """Generate a batch and pass on its images, which LoadGen copies if it logs them."""
        images: Sequence[np.ndarray] = ()
        if self.failure is None:
            try:
                images = [np.ascontiguousarray(image) for image in self.generate([index for _, index in samples])]
                with self.lock:
                    self.queries += len(samples)
            except SdOrtError as error:
                self.failure = error
        data = [(image.ctypes.data, image.nbytes) for image in images] or [(0, 0)] * len(samples)
        self.loadgen.QuerySamplesComplete(
            [self.loadgen.QuerySampleResponse(id_, *span) for (id_, _), span in zip(samples, data, strict=True)]
        )


# --- Rules ----------------------------------------------------------------------------------------------------------


def _rules(load: LoadGenSettings, out: Path) -> dict[str, Any]:
    """Return LoadGen's settings by name: MLPerf's own for this task, changed by `load`."""
    config = out / "user.conf"
    write_text(config, f"*.Server.target_qps = {load.rate}\n*.Offline.target_qps = {load.rate}\n")
    # LoadGen reads its rules once per process, for the first scenario: each scenario gets a process.
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        rules = pool.submit(read_rules, str(config), load.scenario).result()
    rules |= {"server_target_qps": load.rate, "offline_expected_qps": load.rate}
    if load.count is not None:
        rules |= {"min_query_count": load.count, "max_query_count": load.count, "min_duration_ms": 0}
        rules["performance_sample_count_override"] = load.samples
    return rules


def read_rules(config: str, scenario: str) -> dict[str, Any]:
    """Return the numeric settings of LoadGen for this task; call it once per process."""
    import mlperf_loadgen as loadgen

    settings = loadgen.TestSettings()
    if loadgen.TestSettings.FromConfig(settings, config, MODEL, scenario, 1):
        raise SdOrtError(f"LoadGen does not read {config}.")
    values = {name: getattr(settings, name) for name in dir(settings) if not name.startswith("_")}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


# --- Logs -----------------------------------------------------------------------------------------------------------

_RATES = ("Samples per second", "Completed samples per second")
_LATENCY = re.compile(r"(?:([\d.]+) percentile|(Mean|Max)) latency \(ns\)\s*:\s*(\d+)$")


def parse(summary: str) -> dict[str, Any]:
    """Return valid (bool), images_per_s, and latency_s by "p50", ..., "mean", "max" from mlperf_log_summary.txt."""
    result: dict[str, Any] = {"latency_s": {}}
    for line in map(str.strip, summary.splitlines()):
        name, _, value = (part.strip() for part in line.partition(":"))
        if name in _RATES:
            result["images_per_s"] = float(value)
        elif name == "Result is":
            result["valid"] = value == "VALID"
        elif match := _LATENCY.match(line):
            percentile, statistic, nanoseconds = match.groups()
            key = f"p{float(percentile):g}" if percentile else statistic.lower()
            result["latency_s"][key] = int(nanoseconds) / 1e9
    return result
