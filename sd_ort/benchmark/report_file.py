"""The report of a benchmark run: saved as JSON and CSV while it grows, and a table for the terminal."""

from __future__ import annotations

import csv
import datetime
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sd_ort.benchmark.engines.interface import BenchmarkSettings
from sd_ort.benchmark.worker import Worker
from sd_ort.core import files
from sd_ort.core.metrics import EQUAL_DB
from sd_ort.core.ownership import SharedFolder
from sd_ort.runtime import machine

FORMAT = 2
PAGE = "report.html"
KINDS = ("benchmark", "ablation", "mlperf", "profile")
MEASUREMENTS = {"step_ms", "SingleStream", "by_operator"}  # keys of a measured row: times, a scenario, a profile
NOTHING_MEASURED = "nothing was measured, so no report was written."


def results_folder(folder: Path, overwrite: bool = False) -> SharedFolder:
    """Return the folder of the results of benchmarks, whose files are replaced by later ones."""
    return SharedFolder(folder, overwrite, _is_older)


def _is_older(path: Path) -> bool:
    """Whether a file is from before there were records: a page or report that says so, or another file beside one."""
    if path.suffix == ".html":
        return b"<title>sd-ort: " in files.read_regular(path)[:1000]
    reports = [path.with_name(f"{kind}.json") for kind in KINDS]
    return any(
        str(files.read_json(report).get("command")).startswith("sd-ort ")
        for report in ([path] if path.suffix == ".json" and path in reports else reports)
        if report.is_file()
    )


class ReportFile:
    """Report of a run in `out`/<kind>.json, saved after each measurement, so that an interrupt loses nothing."""

    def __init__(
        self,
        settings: BenchmarkSettings,
        out: Path,
        notes: Sequence[str],
        kind: str = "benchmark",
        overwrite: bool = False,
        images: Sequence[str] = (),
    ) -> None:
        """Raise OutputError if a file in `out` would be lost: a report, a page, or one of `images`."""
        self.settings, self.out = settings, results_folder(out, overwrite)
        self.out.check(f"{kind}.json", f"{kind}.csv", PAGE, *images)
        self.images = set(images)
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
        if self.write():
            self.out.write(f"{self.report['kind']}.csv", to_csv(self.report).encode())

    @contextmanager
    def saving(self, save: Callable[[], object]) -> Iterator[None]:
        """Mark the report as `finished` or `interrupted`, or neither after an error, and save it.

        A KeyboardInterrupt before the first measurement gets the message `NOTHING_MEASURED`.
        """
        try:
            yield
            self.report["finished"] = True
        except KeyboardInterrupt as interrupt:
            self.report["interrupted"] = True
            if not self._is_measured():
                interrupt.args = (NOTHING_MEASURED,)
            raise
        finally:
            save()

    def write(self) -> bool:
        """Write the report as JSON; return False, and leave an earlier report, before the first measurement.

        A finished run is written in any case: its rows say why its engines failed. Raises OutputError if `out` cannot
        be written.
        """
        if not (self.report["finished"] or self._is_measured()):
            return False
        self.out.remove(*(self.images - self.out.written))  # of an earlier run
        self.out.write(f"{self.report['kind']}.json", files.json_bytes(self.report))
        return True

    def _is_measured(self) -> bool:
        return any(MEASUREMENTS & row.keys() for row in self.report["engines"])


# --- Tables ---------------------------------------------------------------------------------------------------------

# Columns and units (s, MB) of onnxruntime/python/tools/transformers/models/stable_diffusion/benchmark.py.
CSV_COLUMNS = (
    "model_name directory engine version provider disable_safety_checker height width steps batch_size batch_count "
    "num_prompts average_latency median_latency first_run_memory_MB second_run_memory_MB enable_cuda_graph"
).split()


def to_csv(report: dict[str, Any]) -> str:
    """Return the engines that ran, with the columns of ONNX Runtime's Stable Diffusion benchmark.

    Latencies are in s per batch. Memory is the device's on a GPU, if it is readable. In component mode a latency is one
    call's, and `steps` is 1.
    """
    settings, versions = report["settings"], report["versions"]
    onnxruntime = next((v for name, v in versions.items() if name.startswith("onnxruntime")), "")
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for row in report["engines"]:
        if row["status"] != "ok" or "step_ms" not in row:
            continue
        device = "device_" if "device_first_run_memory_MB" in row else ""
        key, scale = ("image_s", row["batch"]) if "image_s" in row else ("step_ms", 1e-3)
        columns = {
            "model_name": " ".join(filter(None, (row["model"], settings["component"]))),
            "version": versions.get(row["engine"], onnxruntime),
            "provider": settings["provider"],
            "disable_safety_checker": True,
            "steps": settings["steps"] if "image_s" in row else 1,
            "batch_size": row["batch"],
            "batch_count": len(row[key]["values"]),
            "num_prompts": 1,
            "average_latency": row[key]["mean"] * scale,
            "median_latency": row[key]["median"] * scale,
            "first_run_memory_MB": row[f"{device}first_run_memory_MB"],
            "second_run_memory_MB": row[f"{device}second_run_memory_MB"],
            "enable_cuda_graph": row["graph"] or row["variant"] in ("graph", "compile"),
        }
        writer.writerow(row | columns)
    return text.getvalue()


def to_table(report: dict[str, Any]) -> str:
    """Return the report as an aligned table, followed by the failures and the notes."""
    lines = [[name for name, _ in COLUMNS]]
    failures = []
    for row in report["engines"]:
        if row["status"] != "ok":
            failures.append(f"{row['label']} (batch {row['batch']}) failed: {row['reason']}")
        if "step_ms" in row:
            lines.append([cell(row) for _, cell in COLUMNS])
    used = [i for i in range(len(COLUMNS)) if i == 0 or any(line[i] != "-" for line in lines[1:])]
    lines = [[line[i] for i in used] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = [
        "  ".join([name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))])
        for name, *cells in lines
    ]
    return "\n".join([*table, *failures, *filter(None, [ratio_note(report)]), *report["notes"]])


def _format(key: str, spec: str, unit: str = "") -> Callable[[dict[str, Any]], str]:
    def cell(row: dict[str, Any]) -> str:
        value = row.get(key)
        value = value["median"] if isinstance(value, dict) else value
        return "-" if value is None else f"{value:{spec}}{unit}"

    return cell


MANY_ROUNDS = 5  # with fewer, one round that disagrees may be the right one


def format_speedup(row: dict[str, Any]) -> str:
    """Return a row's speed-up and spread, without a number if rounds disagree on which engine is faster.

    One round of `MANY_ROUNDS` or more that disagrees with all others was disturbed, and is named.
    """
    ratio = row.get("image_speedup", row.get("step_speedup"))
    if not ratio:
        return "-"
    if ratio["min"] == ratio["max"] == 1:
        return "1.00x"  # the baseline itself
    spread = f"({ratio['min']:.2f}-{ratio['max']:.2f})"
    if ratio["min"] < 1 < ratio["max"]:
        rounds = list(ratio.get("values", ()))
        faster = [value for value in rounds if value > 1]
        few = min(faster, [value for value in rounds if value <= 1], key=len)
        if len(rounds) < MANY_ROUNDS or len(few) > 1:
            return f"no difference measured {spread}"
        others = [value for value in rounds if value not in few]
        spread = f"({min(others):.2f}-{max(others):.2f}; round {rounds.index(few[0]) + 1}, disturbed: {few[0]:.2f})"
    return f"{ratio.get('of_medians', ratio['median']):.2f}x {spread}"  # reports before November 2026: median only


def _format_psnr(row: dict[str, Any]) -> str:
    return "equal" if row.get("psnr_db") == EQUAL_DB else _format("psnr_db", ".1f", " dB")(row)


def ratio_note(report: dict[str, Any]) -> str:
    """Return a line that explains the column `faster`, or "" if no engine ran."""
    if report["baseline"] is None:
        return ""
    unit = "a call" if report["settings"]["component"] else "an image"
    return (
        f"faster: {report['baseline']}'s median time of {unit} over the row's; in brackets the lowest and highest "
        "ratio of a round."
    )


def _format_error(row: dict[str, Any]) -> str:
    return "not finite" if "error" in row and row["error"] is None else _format("error", ".1e")(row)


# Header and cell of a row; columns with only "-" are not shown.
COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("engine", lambda row: row["label"]),
    ("batch", lambda row: str(row["batch"])),
    ("dtype", lambda row: row.get("precision", "-")),
    ("step", _format("step_ms", ".2f", " ms")),
    ("image", _format("image_s", ".3f", " s")),
    ("faster (spread)", format_speedup),
    ("host memory", _format("peak_memory_MB", ".0f", " MB")),
    ("device memory", _format("device_peak_memory_MB", ".0f", " MB")),
    ("energy", _format("energy_J", ".2f", " J")),
    ("make", _format("make_s", ".1f", " s")),
    ("load", _format("load_s", ".1f", " s")),
    ("first run", _format("first_run_s", ".2f", " s")),
    ("tuning", _format("tuning_s", ".1f", " s")),
    ("PSNR", _format_psnr),
    ("error", _format_error),
)
