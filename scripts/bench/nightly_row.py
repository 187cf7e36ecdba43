"""Append the rows of a benchmark to a CSV table, for the nightly workflow.

python -m scripts.bench.nightly_row RESULTS TABLE.csv
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sd_ort.core.files import read_json

FIELDS = ("date", "commit", "engine", "batch", "status", "step_ms", "image_s", "speedup", "peak_memory_MB", "psnr_db")


def rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each engine and batch."""
    table = []
    for row in report["engines"]:
        values = {"step_ms": row.get("step_ms"), "image_s": row.get("image_s"), "speedup": row.get("image_speedup")}
        medians = {name: round(value["median"], 4) for name, value in values.items() if value}
        others = {name: row[name] for name in ("batch", "status", "peak_memory_MB", "psnr_db") if name in row}
        table.append({"date": report["date"], "commit": report["commit"], "engine": row["label"], **others, **medians})
    return table


def append(results: Path, table: Path) -> None:
    """Append the rows of results/benchmark.json, under a heading in a new table."""
    is_new = not table.exists()
    with table.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if is_new:
            writer.writeheader()
        writer.writerows(rows(read_json(results / "benchmark.json")))


if __name__ == "__main__":
    append(Path(sys.argv[1]), Path(sys.argv[2]))
