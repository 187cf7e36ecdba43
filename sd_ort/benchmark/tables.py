"""Results as CSV in ONNX Runtime's columns, and as the table on the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from typing import Any

# Columns and units (s, MB) of onnxruntime/python/tools/transformers/models/stable_diffusion/benchmark.py.
CSV_COLUMNS = (
    "model_name",
    "directory",
    "engine",
    "version",
    "provider",
    "disable_safety_checker",
    "height",
    "width",
    "steps",
    "batch_size",
    "batch_count",
    "num_prompts",
    "average_latency",
    "median_latency",
    "first_run_memory_MB",
    "second_run_memory_MB",
    "enable_cuda_graph",
)


def to_csv(report: dict[str, Any]) -> str:
    """The engines that ran, in the columns of ONNX Runtime's Stable Diffusion benchmark; latencies in s per batch.

    Memory is the device's on a GPU, where it was read, as ONNX Runtime's benchmark has it. In component mode a latency
    is one call's and `steps` is 1.
    """
    settings, versions = report["settings"], report["versions"]
    onnxruntime = next((v for name, v in versions.items() if name.startswith("onnxruntime")), "")
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in report["engines"]:
        if row["status"] != "ok" or "step_ms" not in row:
            continue
        on_device = "device_" if "device_first_run_memory_MB" in row else ""
        version = versions.get(row["engine"], onnxruntime)
        key, scale = ("image_s", row["batch"]) if "image_s" in row else ("step_ms", 1e-3)
        writer.writerow(
            {
                "model_name": " ".join(filter(None, (row["model"], settings["component"]))),
                "directory": row["directory"],
                "engine": row["engine"],
                "version": version,
                "provider": settings["provider"],
                "disable_safety_checker": True,
                "height": row["height"],
                "width": row["width"],
                "steps": settings["steps"] if "image_s" in row else 1,
                "batch_size": row["batch"],
                "batch_count": len(row[key]["values"]),
                "num_prompts": 1,
                "average_latency": row[key]["mean"] * scale,
                "median_latency": row[key]["median"] * scale,
                "first_run_memory_MB": row[f"{on_device}first_run_memory_MB"],
                "second_run_memory_MB": row[f"{on_device}second_run_memory_MB"],
                "enable_cuda_graph": row["graph"] or row["variant"] in ("graph", "compile"),
            }
        )
    return text.getvalue()


def to_table(report: dict[str, Any]) -> str:
    """The report as an aligned table for a terminal, then the failures and the notes, one a line."""
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
    table = []
    for name, *numbers in lines:
        padded = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        table.append("  ".join([name.ljust(widths[0]), *padded]))
    return "\n".join([*table, *failures, *filter(None, [ratio_note(report)]), *report["notes"]])


def _number(row: dict[str, Any], key: str, form: str, unit: str = "") -> str:
    value = row.get(key)
    value = value["median"] if isinstance(value, dict) else value
    return "-" if value is None else f"{value:{form}}{unit}"


def faster(row: dict[str, Any]) -> str:
    """A row's speed-up and its spread; no number where the rounds do not even agree on which is faster."""
    ratio = row.get("image_speedup", row.get("step_speedup"))
    if not ratio:
        return "-"
    if ratio["min"] == ratio["max"] == 1:
        return "1.00x"  # the baseline itself
    spread = f"({ratio['min']:.2f}-{ratio['max']:.2f})"
    if ratio["min"] < 1 < ratio["max"]:
        return f"no difference measured {spread}"
    return (
        f"{ratio.get('of_medians', ratio['median']):.2f}x {spread}"  # before November 2026 there was the median alone
    )


def ratio_note(report: dict[str, Any]) -> str:
    """What the column `faster` is, in one line; nothing when no engine ran."""
    if report["baseline"] is None:
        return ""
    what = "a call" if report["settings"]["component"] else "an image"
    return (
        f"faster: {report['baseline']}'s median time of {what} over the row's; in brackets the lowest and highest "
        "ratio of a round."
    )


def _error(row: dict[str, Any]) -> str:
    return "not finite" if "error" in row and row["error"] is None else _number(row, "error", ".1e")


# Header -> a row's cell; columns that are "-" in every row are not shown.
COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("engine", lambda row: row["label"]),
    ("batch", lambda row: str(row["batch"])),
    ("dtype", lambda row: row.get("precision", "-")),
    ("step", lambda row: _number(row, "step_ms", ".2f", " ms")),
    ("image", lambda row: _number(row, "image_s", ".3f", " s")),
    ("faster (spread)", faster),
    ("host memory", lambda row: _number(row, "peak_memory_MB", ".0f", " MB")),
    ("device memory", lambda row: _number(row, "device_peak_memory_MB", ".0f", " MB")),
    ("energy", lambda row: _number(row, "energy_J", ".2f", " J")),
    ("make", lambda row: _number(row, "make_s", ".1f", " s")),
    ("load", lambda row: _number(row, "load_s", ".1f", " s")),
    ("first run", lambda row: _number(row, "first_run_s", ".2f", " s")),
    ("tuning", lambda row: _number(row, "tuning_s", ".1f", " s")),
    ("PSNR", lambda row: _number(row, "psnr_db", ".1f", " dB")),
    ("error", _error),
)
