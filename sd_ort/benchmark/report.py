"""One self-contained HTML page from a results folder, and a comparison of two runs.

Plots are inline SVG, images base64. Sources are the JSON files of `sd-ort benchmark` in the folder: benchmark,
ablation, mlperf, profile.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from sd_ort.benchmark import plot
from sd_ort.benchmark.report_file import COLUMNS, FORMAT, format_speedup, ratio_note
from sd_ort.benchmark.worker import image_name
from sd_ort.core import files
from sd_ort.core.errors import InputError, first_line

PAGE = "report.html"
OURS, TORCH, OTHER, RAW = "#d9480f", "#4263eb", "#868e96", "#ced4da"
STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
h1 { margin-bottom: 0 } h2 { margin-top: 2.2rem; border-bottom: 1px solid #8884 } h3 { margin-bottom: .3rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto }
th, td { font-size: .9rem; padding: .15rem .45rem; text-align: right; white-space: nowrap }
th, td { border-bottom: 1px solid #8883 }
th:first-child, td:first-child { text-align: left } td.reason { text-align: left; white-space: normal }
svg { max-width: 100%; height: auto; display: block }
figure { display: inline-block; margin: .3rem } figcaption { font-size: .85rem } code { font-size: .85em }
img { image-rendering: auto; max-width: 15rem; border-radius: 4px } .about { color: #888; font-size: .9rem }
"""
Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]


def read(folder: Path) -> dict[str, Row]:
    """Return the reports of a results folder by kind. Raises InputError if it has none, or one of another format."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give one that `sd-ort benchmark --out` wrote.")
    reports = {kind: files.read_json(path) for kind in SECTIONS if (path := folder / f"{kind}.json").is_file()}
    if not reports:
        raise InputError(f"{folder} has no {', '.join(f'{kind}.json' for kind in SECTIONS)}: run `sd-ort benchmark`.")
    for kind, report in reports.items():
        if report.get("format") != FORMAT:
            raise InputError(f"{folder / kind}.json is of another version of sd-ort: run the benchmark again.")
    return reports


# --- The page -------------------------------------------------------------------------------------------------------


def write(folder: Path) -> Path:
    """Write `folder`/report.html from the reports in it; return its path. Raises InputError if there are none."""
    reports = read(folder)
    try:
        text = page(reports, folder)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:  # any of its hundred fields
        raise InputError(f"{folder} holds a damaged report ({first_line(error)}): run the benchmark again.") from error
    files.write_text(folder / PAGE, text)
    return folder / PAGE


def page(reports: dict[str, Row], folder: Path) -> str:
    """Return the page as text, with the images in `folder`."""
    first = next(iter(reports.values()))
    sections = [_head(first)]
    for kind, report in reports.items():
        sections.append(f"<h2>{kind.capitalize() if kind != 'mlperf' else 'MLPerf scenarios'}</h2>")
        if not report["finished"]:
            sections.append("<p><b>This run did not finish:</b> it holds what was measured until then.</p>")
        sections.append(SECTIONS[kind](report))
        if kind == "benchmark":
            sections.append(_images(report, folder))
        sections.append(_about(report))
    models = sorted({row["model"] for row in first["engines"] if "model" in row})
    random_weights = " (random weights)" if any(row.get("random_weights") for row in first["engines"]) else ""
    title = escape(f"sd-ort: {', '.join(models)}{random_weights}")
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>"
    return f"{head}<body><h1>{title}</h1>{''.join(sections)}</body></html>\n"


def _head(report: Row) -> str:
    machine, settings = report["machine"], report["settings"]
    task = f"calls of {settings['component']}" if settings["component"] else f"images in {settings['steps']} steps"
    device = "; ".join(machine["gpus"]) if settings["provider"] != "cpu" and machine["gpus"] else machine["cpu"]
    threads = f", {settings['threads']} threads" if settings["threads"] else ""
    sizes = next((f", {row['width']} x {row['height']} pixels" for row in report["engines"] if "width" in row), "")
    guidance = "; with guidance the UNet sees twice the batch" if settings["guidance"] > 1 else ""
    text = f"{task}{sizes}, provider {settings['provider']} on {device}{threads}{guidance}"
    return f"<p>{escape(text)}</p>"


def _about(report: Row) -> str:
    machine = report["machine"]
    lines = [
        *report["notes"],
        f"{report['date']}, commit {report['commit'] or 'unknown'}",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_GB']} GB, {machine['system']}",
        "; ".join(machine["gpus"]) or "no GPU",
        ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
    ]
    text = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul class=about>{text}<li><code>{escape(report['command'])}</code></li></ul>"


def _benchmark(report: Row) -> str:
    rows = report["engines"]
    note = f"<p class=about>{escape(ratio_note(report))}</p>"
    return _charts(report, rows) + _throughput(rows) + _table(rows, COLUMNS) + note


def _ablation(report: Row) -> str:
    rows = []
    previous: dict[int, float] = {}
    for row in report["engines"]:
        gain = None
        if "step_ms" in row:
            time, before = row["step_ms"]["median"], previous.get(row["batch"])
            gain, previous[row["batch"]] = before and before / time, time
        rows.append({**row, "gain": gain})
    step = ("this step", lambda row: "-" if row.get("gain") is None else f"{row['gain']:.2f}x")
    return _charts(report, rows) + _table(rows, (*COLUMNS[:4], step, *COLUMNS[4:]))


def _charts(report: Row, rows: Sequence[Row]) -> str:
    """Return plots of the time per image (or per call), and of memory, for each batch size."""
    parts = []
    for batch in report["settings"]["batches"]:
        measured = [row for row in rows if row["batch"] == batch and "step_ms" in row]
        if not measured:
            continue
        key, unit, name = ("image_s", "s", "per image") if "image_s" in measured[0] else ("step_ms", "ms", "per call")
        bars = []
        for row in measured:
            times = row[key]
            text = f"{times['median']:.3g} {unit}  {format_speedup(row).partition(' (')[0].removeprefix('-')}"
            bars.append(plot.Bar(row["label"], times["median"], text, color(row), times["min"], times["max"]))
        parts.append(f"<h3>Time {name}, batch {batch}: median, line from fastest to slowest</h3>" + plot.bars(bars))
        for prefix, place in (("device_", "device"), ("", "host")):
            key = f"{prefix}peak_memory_MB"
            if all(key in row for row in measured):
                bars = [plot.Bar(row["label"], row[key], f"{row[key]:.0f} MB", color(row)) for row in measured]
                parts.append(f"<h3>Peak {place} memory, batch {batch}</h3>" + plot.bars(bars))
    return "".join(parts)


def _throughput(rows: Sequence[Row]) -> str:
    """Return a plot of images (or samples) per second by batch size, if there are several sizes."""
    lines: dict[str, plot.Line] = {}
    for row in rows:
        if "step_ms" in row:
            seconds = row["image_s"]["median"] if "image_s" in row else row["step_ms"]["median"] / 1e3 / row["batch"]
            points = lines[row["label"]].points if row["label"] in lines else ()
            point = (float(row["batch"]), 1 / seconds)
            lines[row["label"]] = plot.Line(row["label"], (*points, point), color(row))
    if not any(len(line.points) > 1 for line in lines.values()):
        return ""
    unit = "images/s" if "image_s" in rows[0] else "samples/s"
    return "<h3>Throughput</h3>" + plot.lines(list(lines.values()), "batch", unit)


def color(row: Row) -> str:
    """Return the color of an engine: sd-ort, torch, another optimizer, or the raw export."""
    if row.get("engine") == "torch":
        return TORCH
    if row.get("target") == "raw" or (row.get("stage") == "export" and row.get("engine") == "onnxruntime"):
        return RAW
    return OURS if row.get("target") else OTHER


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Return a table of all rows, without columns of "-"; failed rows show their reason."""
    measured = [row for row in rows if "step_ms" in row]
    used = [(name, cell) for i, (name, cell) in enumerate(columns) if i < 2 or any(cell(r) != "-" for r in measured)]
    body = []
    for row in rows:
        if "step_ms" in row:
            body.append(_cells(*(cell(row) for _, cell in used)))
        if row["status"] != "ok":
            body.append(_cells(row["label"], str(row["batch"])) + _failure(row, len(used) - 2))
    return _html_table([name for name, _ in used], body)


def _html_table(header: Iterable[str], body: Iterable[str]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{cells}</tr>" for cells in body) + "</table>"


def _cells(*values: str) -> str:
    return "".join(f"<td>{escape(value)}</td>" for value in values)


def _failure(row: Row, columns: int) -> str:
    return f"<td class=reason colspan={columns}>failed: {escape(row['reason'])}</td>"


def _images(report: Row, folder: Path) -> str:
    parts = []
    for label in dict.fromkeys(row["label"] for row in report["engines"]):
        path = folder / image_name(label)
        if path.is_file():
            data = base64.b64encode(path.read_bytes()).decode()
            source = f'<img src="data:image/png;base64,{data}" alt="{escape(label)}">'
            parts.append(f"<figure>{source}<figcaption>{escape(label)}</figcaption></figure>")
    prompt = escape(report["settings"]["prompt"])
    return f"<h3>The same prompt and seed: “{prompt}”</h3>{''.join(parts)}" if parts else ""


def _mlperf(report: Row) -> str:
    header = "engine,SingleStream p50,p90,p99,Offline,Server rate,p50,p90,p99,mean batch,fidelity,CLIP score,FID"
    bars, body = [], []
    for row in report["engines"]:
        if row["status"] != "ok":
            body.append(_cells(row["label"]) + _failure(row, 12))
            continue
        offline, server = row["Offline"]["images_per_s"], row["Server"]
        bars.append(plot.Bar(row["label"], offline, f"{offline:.3g}/s", color(row)))
        latencies = (
            [f"{scenario['latency_s'][p]:.2f} s" for p in ("p50", "p90", "p99")]
            for scenario in (row["SingleStream"], server)
        )
        single_stream, served = latencies
        scores = [row["quality"][name] for name in ("fidelity_percent", "clip_score", "fid")]
        body.append(
            _cells(
                row["label"], *single_stream, f"{offline:.2f}/s", f"{server['rate_per_s']:.2f}/s", *served,
                f"{server['mean_batch']:.1f}", *(f"{s:.1f}" if isinstance(s, float) else str(s) for s in scores),
            )
        )  # fmt: skip
    return "<h3>Offline: images per second</h3>" + plot.bars(bars) + _html_table(header.split(","), body)


def _profile(report: Row) -> str:
    parts = []
    for row in report["engines"]:
        if row["status"] != "ok":
            parts.append(f"<p>{escape(row['label'])} failed: {escape(row['reason'])}</p>")
            continue
        parts.append(
            f"<h3>{escape(row['label'])}: {row['total_ms']:.2f} ms per call in {escape(row['clock'])} "
            f"(<a href='{escape(row['trace'])}'>trace</a> for ui.perfetto.dev)</h3>"
        )
        for name in ("by_operator", "by_site"):
            bars = [
                plot.Bar(r["name"], r["ms"], f"{r['ms']:.3f} ms  {r['share']:.1%}  {r['count']:.0f}x", OURS)
                for r in row[name][:14]
            ]
            parts.append(f"<p>{name.replace('_', ' ')}</p>" + plot.bars(bars))
    return "".join(parts)


SECTIONS: dict[str, Callable[[Row], str]] = {
    "benchmark": _benchmark,
    "ablation": _ablation,
    "mlperf": _mlperf,
    "profile": _profile,
}


# --- Comparing two runs ---------------------------------------------------------------------------------------------

TIMES, RATIOS = ("step_ms", "image_s"), ("step_speedup", "image_speedup")
OTHER_METRICS = ("peak_memory_MB", "device_peak_memory_MB", "error", "psnr_db")
PSNR_TOLERANCE_DB = 1.0
ERROR_FACTOR = 1.5
MUST_MATCH = ("component", "provider", "steps", "height", "width", "guidance", "prompt", "seed", "threads", "tuning")


def compare(old: Row, new: Row, tolerance: float, *, ratios: bool = False) -> tuple[list[Row], list[str]]:
    """Compare two benchmark reports; return rows of metrics with `worse`, and notes on different conditions.

    A time or memory is worse if it grew by more than `tolerance` (0.05: 5 %), PSNR if it fell by more than 1 dB, a
    component's error if it grew 1.5 times. An engine that ran before and fails or is missing now is worse. With
    `ratios`, speed-ups over each run's baseline are compared instead of times, for runs on different machines.

    Raises:
        InputError: if the settings differ.
    """
    different = [key for key in MUST_MATCH if old["settings"][key] != new["settings"][key]]
    if different:
        raise InputError(f"the two runs differ in {', '.join(different)}: run the benchmark again with the same.")
    notes = [f"{key} differs" for key in ("machine", "versions", "commit") if old[key] != new[key]]
    new_rows = {(row["label"], row["batch"]): row for row in new["engines"]}
    rows = []
    for before in old["engines"]:
        if "step_ms" not in before:
            continue
        after = new_rows.get((before["label"], before["batch"]), {"reason": "it is not in the new run"})
        base = {"label": before["label"], "batch": before["batch"]}
        if "step_ms" not in after:
            rows.append({**base, "metric": "status", "old": "ok", "new": after.get("reason", "failed"), "worse": True})
            continue
        for metric in (*(RATIOS if ratios else TIMES), *OTHER_METRICS):
            values = [v["median"] if isinstance(v := row.get(metric), dict) else v for row in (before, after)]
            if None not in values:
                worse = _is_worse(metric, values[0], values[1], tolerance)
                rows.append({**base, "metric": metric, "old": values[0], "new": values[1], "worse": worse})
    return rows, notes


def _is_worse(metric: str, old: float, new: float, tolerance: float) -> bool:
    if metric == "psnr_db":
        return new < old - PSNR_TOLERANCE_DB
    if metric == "error":
        return new > ERROR_FACTOR * old
    return new < old * (1 - tolerance) if metric in RATIOS else new > old * (1 + tolerance)


def comparison_table(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """Return the comparison for a terminal, worse metrics first."""
    lines = []
    for row in sorted(rows, key=lambda row: not row["worse"]):
        numeric = isinstance(row["new"], (int, float)) and row["old"]
        change = f"{row['new'] / row['old'] - 1:+.1%}" if numeric else ""
        values = f"{row['old']:.4g} -> {row['new']:.4g}" if numeric else f"{row['old']} -> {row['new']}"
        name = f"{row['label']} (batch {row['batch']})"
        lines.append(f"{'WORSE' if row['worse'] else 'ok':<6}{name:<40}{row['metric']:<24}{values:<28}{change}")
    return "\n".join([*lines, *notes])
