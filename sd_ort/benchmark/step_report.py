"""Report sections from JSON files of scripts/bench: times of a denoiser call or of complete images, by engine.

A file of calls has `rows` or `engines`, each with `engine` and `device_ms`, and beside them `limits` (measured rates of
the device) and `tflop` (operations of one call). A file of images has the seconds of both sides in `rounds`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sd_ort.benchmark import plot
from sd_ort.benchmark.report_blocks import KERNEL_COLORS, OTHER, OURS, RAW, TORCH, Block
from sd_ort.core import files

Row = dict[str, Any]
# Kernel classes of scripts/bench, in the order in which a bar shows them; others follow in gray.
CLASSES = ("matrix product", "convolution", "attention", "layer norm", "group norm", "gelu", "element-wise")
CLASS_COLORS = dict(zip(CLASSES, KERNEL_COLORS, strict=True))


def read_steps(folder: Path) -> dict[str, Row]:
    """Return the measurements of calls and images in `folder` by file stem: JSON objects with rows of engines."""
    reports = {}
    for path in sorted(folder.glob("*.json")):
        content = files.read_json(path)
        rows = _rows(content)
        if rows and all(isinstance(row, dict) and {"device_ms", "theirs_s"} & row.keys() for row in rows):
            reports[path.stem] = content
    return reports


def step_blocks(report: Row) -> list[Block]:
    """Return the plots of one file: times, the roofline of the products, and time by kernel class."""
    rows = _rows(report)
    if "theirs_s" in rows[0]:
        return [Block("Seconds an image: median, line from fastest to slowest", plot=plot.bars(list(_images(rows))))]
    blocks = [Block("Time on the device, a call", note=_roofline_note(report), plot=plot.bars(list(_calls(report))))]
    timelines = [
        (str(row["engine"]), tuple(_segments(row["profile"]["classes_ms"])))
        for row in rows
        if row.get("profile", {}).get("classes_ms")
    ]
    if timelines:
        note = "A product with GELU or a gate in its kernel counts as gelu."
        blocks.append(Block("Time by class of kernel", note, plot=plot.stacked_bars(timelines)))
    return blocks


def _rows(content: Row) -> list[Row]:
    values = (content.get(key) for key in ("rows", "engines"))
    return next((rows for rows in values if isinstance(rows, list)), [])


def _calls(report: Row) -> Iterator[plot.Bar]:
    rows = _rows(report)
    first = rows[0]["device_ms"]
    for row in rows:
        times = row["device_ms"]
        color = TORCH if row["engine"].startswith("torch") else OURS
        yield plot.Bar(str(row["engine"]), times, f"{times:.3g} ms  {times / first:.2f}", color)
    floor = roofline_ms(report)
    if floor is not None:
        yield plot.Bar("roofline of the products", floor, f"{floor:.3g} ms  {floor / first:.2f}", RAW)


def roofline_ms(report: Row) -> float | None:
    """Return the least time of a call: its operations at the rate of a large matrix product, measured on the device."""
    if not report.get("tflop") or not report.get("limits"):
        return None
    return float(1e3 * sum(report["tflop"].values()) / report["limits"]["matrix_tflops"])


def _roofline_note(report: Row) -> str:
    if roofline_ms(report) is None:
        return "The second number is the ratio to the first row."
    return (
        f"The second number is the ratio to the first row. Roofline: {sum(report['tflop'].values()):.3g} TFLOP at "
        f"{report['limits']['matrix_tflops']:.0f} TFLOP/s, the rate of a large matrix product on this device."
    )


def _images(rows: list[Row]) -> Iterator[plot.Bar]:
    ours = [seconds for row in rows for seconds in row["rounds"]["ours"]]
    median = statistics.median(ours)
    yield plot.Bar("sd-ort", median, f"{median:.3g} s", OURS, min(ours), max(ours))
    for row in rows:
        times = row["rounds"]["theirs"]
        text = f"{row['theirs_s']:.3g} s; sd-ort takes {row['ratio']:.2f} of it"
        yield plot.Bar(str(row["engine"]), row["theirs_s"], text, TORCH, min(times), max(times))


def _segments(classes: dict[str, float]) -> Iterator[plot.Segment]:
    for name, color in CLASS_COLORS.items():
        if name in classes:
            yield plot.Segment(name, classes[name], color)
    rest = sum(ms for name, ms in classes.items() if name not in CLASS_COLORS)
    if rest:
        yield plot.Segment("other", rest, OTHER)
