"""What a run of the benchmark keeps: cases, their numbers, and the files they are written to."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sd_ort.benchmark.engines.interface import Settings
from sd_ort.benchmark.tables import to_csv
from sd_ort.benchmark.worker import Worker
from sd_ort.core import files
from sd_ort.runtime import machine

FORMAT = 2


class Record:
    """The report of a run: kept on disk as it grows, so that an interrupt loses nothing that was measured."""

    def __init__(self, settings: Settings, out: Path, notes: Sequence[str], kind: str = "benchmark") -> None:
        """`out`: the folder of <kind>.json, <kind>.csv and the images."""
        self.out = out
        self.settings = settings
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
        """Write what is known now. Raises OutputError when `out` cannot be written."""
        rows = []
        for batch in self.settings.batches:
            cases = [(worker, worker.cases[batch]) for worker in self.workers if batch in worker.cases]
            first = next(((worker, case) for worker, case in cases if case.step_ms), None)
            if first is not None and self.report["baseline"] is None:
                self.report["baseline"] = first[0].engine.label
            rows += [worker.row(case, first[1] if first else None, self.settings) for worker, case in cases]
        self.report["engines"] = rows
        self.write()
        files.write_text(self.out / f"{self.report['kind']}.csv", to_csv(self.report))

    @contextmanager
    def kept(self, save: Callable[[], None]) -> Iterator[None]:
        """However the block ends, the report says so and is saved: it is `finished`, `interrupted`, or neither."""
        try:
            yield
            self.report["finished"] = True
        except KeyboardInterrupt:
            self.report["interrupted"] = True
            raise
        finally:
            save()

    def write(self) -> None:
        """Write the report as it is. Raises OutputError when `out` cannot be written."""
        files.write_json(self.out / f"{self.report['kind']}.json", self.report)
