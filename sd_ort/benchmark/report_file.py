"""The report of a benchmark run, saved while it grows."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sd_ort.benchmark.engines.interface import BenchmarkSettings
from sd_ort.benchmark.tables import to_csv
from sd_ort.benchmark.worker import Worker
from sd_ort.core import files
from sd_ort.runtime import machine

FORMAT = 2


class ReportFile:
    """Report of a run in `out`/<kind>.json, saved after each measurement, so that an interrupt loses nothing."""

    def __init__(self, settings: BenchmarkSettings, out: Path, notes: Sequence[str], kind: str = "benchmark") -> None:
        self.settings, self.out = settings, out
        self.workers: list[Worker] = []
        self.report: dict[str, Any] = {
            "format": FORMAT,
            "kind": kind,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": " ".join(["sd-ort", *sys.argv[1:]]),
            "commit": machine.commit(),
            "machine": machine.machine(),
            "versions": machine.versions(),
            "settings": asdict(settings),
            "notes": list(notes),
            "finished": False,
            "interrupted": False,
            "baseline": None,
            "engines": [],
        }

    def save(self) -> None:
        """Write the measurements of the workers as JSON and CSV. Raises OutputError if `out` cannot be written."""
        rows = []
        for batch in self.settings.batches:
            measured = [(w, w.measurements[batch]) for w in self.workers if batch in w.measurements]
            baseline = next(((worker, m) for worker, m in measured if m.step_ms), None)
            if baseline is not None and self.report["baseline"] is None:
                self.report["baseline"] = baseline[0].engine.label
            rows += [worker.row(m, baseline[1] if baseline else None, self.settings) for worker, m in measured]
        self.report["engines"] = rows
        self.write()
        files.write_text(self.out / f"{self.report['kind']}.csv", to_csv(self.report))

    @contextmanager
    def saving(self, save: Callable[[], None]) -> Iterator[None]:
        """Mark the report as `finished` or `interrupted`, or neither after an error, and save it."""
        try:
            yield
            self.report["finished"] = True
        except KeyboardInterrupt:
            self.report["interrupted"] = True
            raise
        finally:
            save()

    def write(self) -> None:
        """Write the report as JSON. Raises OutputError if `out` cannot be written."""
        files.write_json(self.out / f"{self.report['kind']}.json", self.report)
