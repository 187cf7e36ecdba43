"""MLCommons' LoadGen: it decides when queries come, takes the times, and writes MLPerf's official logs.

A query is one image, query i with prompt i. LoadGen hands queries over as they come; threads here draw what waits, one
of them up to a batch at a time, or as many as keep replicas busy, and tell LoadGen when each is done.
`pip install 'sd-ort[mlperf]'` brings it.
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
LOGS = "mlperf_log_"  # + summary.txt, detail.txt, accuracy.json

Draw = Callable[[Sequence[int]], Sequence[np.ndarray]]  # numbers of prompts -> their images, uint8 (H, W, 3)


@dataclass(frozen=True)
class Load:
    """What LoadGen is asked for. `count`: queries, None for as many and as long as MLPerf's rules ask for.

    `samples`: prompts there are. `rate`: the server's arrivals a second. `accuracy`: every prompt once, images logged.
    `callers`: threads that draw at once; where there are several, each draws one prompt at a time.
    """

    scenario: str
    samples: int
    batch: int
    count: int | None = None
    rate: float = 1.0
    accuracy: bool = False
    callers: int = 1


def require() -> None:
    """Raise InputError unless LoadGen is installed."""
    if importlib.util.find_spec("mlperf_loadgen") is None:
        raise InputError("MLPerf's LoadGen is not installed: pip install 'sd-ort[mlperf]'.")


def run(draw: Draw, load: Load, out: Path) -> dict[str, Any]:
    """Run one scenario; LoadGen's logs and the user.conf lie in `out`, and what they say is returned.

    Raises SdOrtError when an engine fails while it draws.
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
    system = System(draw, load.batch, loadgen, load.callers)
    sut = loadgen.ConstructSUT(system.issue, lambda: None)
    library = loadgen.ConstructQSL(load.samples, load.samples, lambda numbers: None, lambda numbers: None)
    try:
        system.serve(lambda: loadgen.StartTestWithLogSettings(sut, library, settings, logs))
    finally:
        loadgen.DestroyQSL(library)
        loadgen.DestroySUT(sut)
    found = parse((out / f"{LOGS}summary.txt").read_text(errors="replace"))
    return found | {"queries": system.queries}


class System:
    """The system under test: a queue of queries, and the threads that draw them."""

    def __init__(self, draw: Draw, batch: int, loadgen: Any, callers: int = 1) -> None:
        self.draw, self.loadgen, self.callers = draw, loadgen, callers
        self.batch = batch if callers == 1 else 1
        self.waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.queries = 0  # that were drawn
        self.counting = threading.Lock()
        self.failure: BaseException | None = None

    def issue(self, samples: Sequence[Any]) -> None:
        """LoadGen's call: queries that have come."""
        for sample in samples:
            self.waiting.put((sample.id, sample.index))

    def serve(self, test: Callable[[], None]) -> None:
        """Draw until `test` ends. After a failure or an interrupt queries are answered undrawn, and it is raised."""
        ended = threading.Thread(target=test, daemon=True)
        drawing = [threading.Thread(target=self._draw_all, daemon=True) for _ in range(self.callers)]
        for each in [*drawing, ended]:
            each.start()
        try:
            while ended.is_alive():
                ended.join(0.2)  # LoadGen holds no Python lock, but a join without end would hold Ctrl-C
        except KeyboardInterrupt as interrupt:
            self.failure = interrupt
            ended.join()
        for _ in drawing:
            self.waiting.put(None)
        for each in drawing:
            each.join()
        if self.failure is not None:
            raise self.failure

    def _draw_all(self) -> None:
        while (first := self.waiting.get()) is not None:
            samples = [first]
            while len(samples) < self.batch and not self.waiting.empty():
                samples.append(self.waiting.get())
            self._answer([sample for sample in samples if sample is not None])
            if None in samples:
                return

    def _answer(self, samples: Sequence[tuple[int, int]]) -> None:
        """Draw a batch and hand its images over, which LoadGen copies where it logs them."""
        images: Sequence[np.ndarray] = ()
        if self.failure is None:
            try:
                images = [np.ascontiguousarray(image) for image in self.draw([number for _, number in samples])]
                with self.counting:
                    self.queries += len(samples)
            except SdOrtError as error:
                self.failure = error
        where = [(image.ctypes.data, image.nbytes) for image in images] or [(0, 0)] * len(samples)
        response = self.loadgen.QuerySampleResponse
        self.loadgen.QuerySamplesComplete(
            [response(identity, *place) for (identity, _), place in zip(samples, where, strict=True)]
        )


# --- Rules ----------------------------------------------------------------------------------------------------------


def _rules(load: Load, out: Path) -> dict[str, Any]:
    """LoadGen's settings by name: MLPerf's own for this task, then what `load` asks for."""
    config = out / "user.conf"
    write_text(config, f"*.Server.target_qps = {load.rate}\n*.Offline.target_qps = {load.rate}\n")
    # LoadGen reads the rules it carries once a process, for the first scenario that asks: each gets a process.
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        rules = pool.submit(read_rules, str(config), load.scenario).result()
    rules |= {"server_target_qps": load.rate, "offline_expected_qps": load.rate}
    if load.count is not None:
        rules |= {"min_query_count": load.count, "max_query_count": load.count, "min_duration_ms": 0}
        rules["performance_sample_count_override"] = load.samples
    return rules


def read_rules(config: str, scenario: str) -> dict[str, Any]:
    """The numbers that LoadGen sets for this task, in a process that has not asked before."""
    import mlperf_loadgen as loadgen

    settings = loadgen.TestSettings()
    if loadgen.TestSettings.FromConfig(settings, config, MODEL, scenario, 1):
        raise SdOrtError(f"LoadGen does not read {config}.")
    numbers = {name: getattr(settings, name) for name in dir(settings) if not name.startswith("_")}
    return {name: value for name, value in numbers.items() if isinstance(value, int | float)}


# --- What LoadGen says ----------------------------------------------------------------------------------------------

# Lines of mlperf_log_summary.txt: the name here, and what they begin with.
_RATES = {"Samples per second": "images_per_s", "Completed samples per second": "images_per_s"}
_LATENCY = re.compile(r"(?:([\d.]+) percentile|(Mean|Max)) latency \(ns\)\s*:\s*(\d+)$")


def parse(summary: str) -> dict[str, Any]:
    """mlperf_log_summary.txt -> valid (bool), images_per_s, and latency_s by percentile ("p50", ..., "mean", "max")."""
    found: dict[str, Any] = {"latency_s": {}}
    for line in map(str.strip, summary.splitlines()):
        name, _, value = (part.strip() for part in line.partition(":"))
        if name in _RATES:
            found[_RATES[name]] = float(value)
        elif name == "Result is":
            found["valid"] = value == "VALID"
        elif match := _LATENCY.match(line):
            percentile, other, nanoseconds = match.groups()
            key = f"p{float(percentile):g}" if percentile else other.lower()
            found["latency_s"][key] = int(nanoseconds) / 1e9
    return found
