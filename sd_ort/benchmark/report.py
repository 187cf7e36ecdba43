"""Self-contained HTML page of a results folder, and a comparison of two runs.

Plots are inline SVG, images base64. Sources are the JSON files of `sd-ort benchmark` in the folder (benchmark,
ablation, mlperf, profile), or those of scripts/bench: calls and images beside peers. The page is the template
report.html.jinja, which escapes every string; its policy lets a browser load nothing.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from sd_ort.benchmark import plot
from sd_ort.benchmark.report_blocks import KERNEL_COLORS, OTHER, OURS, RAW, TORCH, Block, TableRow
from sd_ort.benchmark.report_file import COLUMNS, FORMAT, PAGE, format_speedup, ratio_note, results_folder
from sd_ort.benchmark.step_report import read_steps, step_blocks
from sd_ort.benchmark.worker import image_name
from sd_ort.core import files
from sd_ort.core.errors import InputError
from sd_ort.core.image_file import read_image
from sd_ort.pipelines.png import png_bytes

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
TEMPLATE = Path(__file__).with_name("report.html.jinja")
LOCAL_FILE = re.compile(r"\w[\w .+-]*")  # a trace beside the page; all else is no link


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


def write(folder: Path, overwrite: bool = False) -> Path:
    """Write `folder`/report.html from the reports in it; return its path.

    Raises InputError if there are none, OutputError for a page that sd-ort did not write, unless `overwrite`.
    """
    is_benchmark = any((folder / f"{kind}.json").is_file() for kind in SECTIONS)
    steps = {} if is_benchmark else read_steps(folder)  # beside a benchmark lie traces of many MB
    with files.parsing(folder, "benchmark results"):  # any of a hundred fields
        text = _steps_page(steps) if steps else page(read(folder), folder)
    return results_folder(folder, overwrite).write(PAGE, text.encode())


def page(reports: dict[str, Row], folder: Path) -> str:
    """Return the page as text, with the images in `folder`."""
    first = next(iter(reports.values()))
    sections = []
    for kind, report in reports.items():
        images = [_images(report, folder)] if kind == "benchmark" else []
        sections.append({
            "title": "MLPerf scenarios" if kind == "mlperf" else kind.capitalize(),
            "finished": report["finished"],
            "blocks": [*SECTIONS[kind](report), *images],
            "lines": [*report["notes"], str(report["date"]), *_machine(report)],
            "command": report["command"],
        })  # fmt: skip
    models = sorted({str(row["model"]) for row in first["engines"] if "model" in row})
    random_weights = " (random weights)" if any(row.get("random_weights") for row in first["engines"]) else ""
    return _render(f"sd-ort: {', '.join(models)}{random_weights}", _summary(first), sections)


def _steps_page(reports: dict[str, Row]) -> str:
    """Return the page of a folder of scripts/bench: a section for each file."""
    sections = [
        {"title": name, "finished": True, "blocks": step_blocks(report), "lines": _machine(report), "command": ""}
        for name, report in reports.items()
    ]
    presets = sorted({str(report["preset"]) for report in reports.values()})
    return _render("sd-ort: calls and images beside peers", f"{', '.join(presets)}; random weights", sections)


def _render(title: str, summary: str, sections: Sequence[Row]) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    text: str = environment.from_string(TEMPLATE.read_text()).render(
        title=title, summary=summary, sections=sections, style=Markup(STYLE),
        style_hash=f"sha256-{digest}",
    )  # fmt: skip
    return text.lstrip() + "\n"


def _summary(report: Row) -> str:
    machine, settings = report["machine"], report["settings"]
    task = f"calls of {settings['component']}" if settings["component"] else f"images in {settings['steps']} steps"
    device = "; ".join(machine["gpus"]) if settings["provider"] != "cpu" and machine["gpus"] else machine["cpu"]
    threads = f", {settings['threads']} threads" if settings["threads"] else ""
    sizes = next((f", {row['width']} x {row['height']} pixels" for row in report["engines"] if "width" in row), "")
    guidance = "; with guidance the UNet sees twice the batch" if settings["guidance"] > 1 else ""
    return f"{task}{sizes}, provider {settings['provider']} on {device}{threads}{guidance}"


def _machine(report: Row) -> list[str]:
    machine = report["machine"]
    return [
        f"commit {report.get('commit') or 'unknown'}",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_GB']} GB, {machine['system']}",
        "; ".join(machine["gpus"]) or "no GPU",
        ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
    ]


def _benchmark(report: Row) -> list[Block]:
    rows = report["engines"]
    note = Block(note=ratio_note(report), is_aside=True)
    return [*_charts(report, rows), *_throughput(rows), _table(rows, COLUMNS), note]


def _ablation(report: Row) -> list[Block]:
    rows = []
    previous: dict[int, float] = {}
    for row in report["engines"]:
        gain = None
        if "step_ms" in row:
            time, before = row["step_ms"]["median"], previous.get(row["batch"])
            gain, previous[row["batch"]] = before and before / time, time
        rows.append({**row, "gain": gain})
    step = ("this step", lambda row: "-" if row.get("gain") is None else f"{row['gain']:.2f}x")
    return [*_charts(report, rows), _table(rows, (*COLUMNS[:4], step, *COLUMNS[4:]))]


def _charts(report: Row, rows: Sequence[Row]) -> list[Block]:
    """Return plots of the time per image (or per call), and of memory, for each batch size."""
    blocks = []
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
        blocks.append(Block(f"Time {name}, batch {batch}: median, line from fastest to slowest", plot=plot.bars(bars)))
        for prefix, side in (("device_", "device"), ("", "host")):
            key = f"{prefix}peak_memory_MB"
            if all(key in row for row in measured):
                bars = [plot.Bar(row["label"], row[key], f"{row[key]:.0f} MB", color(row)) for row in measured]
                blocks.append(Block(f"Peak {side} memory, batch {batch}", plot=plot.bars(bars)))
    return blocks


def _throughput(rows: Sequence[Row]) -> list[Block]:
    """Return a plot of images (or samples) per second by batch size, if there are several sizes."""
    lines: dict[str, plot.Line] = {}
    for row in rows:
        if "step_ms" in row:
            seconds = row["image_s"]["median"] if "image_s" in row else row["step_ms"]["median"] / 1e3 / row["batch"]
            points = lines[row["label"]].points if row["label"] in lines else ()
            point = (float(row["batch"]), 1 / seconds)
            lines[row["label"]] = plot.Line(row["label"], (*points, point), color(row))
    if not any(len(line.points) > 1 for line in lines.values()):
        return []
    unit = "images/s" if "image_s" in rows[0] else "samples/s"
    return [Block("Throughput", plot=plot.lines(list(lines.values()), "batch", unit))]


def color(row: Row) -> str:
    """Return the color of an engine: sd-ort, torch, another optimizer, or the raw export."""
    if row.get("engine") == "torch":
        return TORCH
    if row.get("target") == "raw" or (row.get("stage") == "export" and row.get("engine") == "onnxruntime"):
        return RAW
    return OURS if row.get("target") else OTHER


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> Block:
    """Return a table of all rows, without columns of "-"; failed rows show their reason."""
    measured = [row for row in rows if "step_ms" in row]
    used = [(name, cell) for i, (name, cell) in enumerate(columns) if i < 2 or any(cell(r) != "-" for r in measured)]
    body = []
    for row in rows:
        if "step_ms" in row:
            body.append(TableRow([cell(row) for _, cell in used]))
        if row["status"] != "ok":
            body.append(TableRow([row["label"], row["batch"]], row["reason"]))
    return Block(columns=[name for name, _ in used], rows=body)


def _images(report: Row, folder: Path) -> Block:
    """Return the images of the engines, which lie in `folder` and are encoded anew: pixels alone."""
    images = []
    for label in dict.fromkeys(row["label"] for row in report["engines"]):
        path = folder / image_name(label)
        if path.is_file():
            images.append((label, base64.b64encode(png_bytes(read_image(path, folder), {})).decode()))
    return Block(f"The same prompt and seed: “{report['settings']['prompt']}”" if images else "", images=images)


def _mlperf(report: Row) -> list[Block]:
    header = "engine,SingleStream p50,p90,p99,Offline,Server rate,p50,p90,p99,mean batch,fidelity,CLIP score,FID"
    bars, body = [], []
    for row in report["engines"]:
        if row["status"] != "ok":
            body.append(TableRow([row["label"]], row["reason"]))
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
            TableRow([
                row["label"], *single_stream, f"{offline:.2f}/s", f"{server['rate_per_s']:.2f}/s", *served,
                f"{server['mean_batch']:.1f}", *(f"{s:.1f}" if isinstance(s, float) else str(s) for s in scores),
            ])
        )  # fmt: skip
    return [Block("Offline: images per second", plot=plot.bars(bars), columns=header.split(","), rows=body)]


def _time_lines(engines: Sequence[Row]) -> list[Block]:
    """Return the plot of one call of each engine, node after node; reports of earlier versions have none."""
    rows = [row for row in engines if row.get("time_line")]
    sums: Counter[str] = Counter()
    for row in rows:
        for operator, ms in row["time_line"]:
            sums[operator] += ms
    del sums[""]
    colors = dict(zip((operator for operator, _ in sums.most_common()), KERNEL_COLORS, strict=False))

    def part(operator: str, ms: float) -> plot.Segment:
        name = operator if operator in colors or not operator else "other"
        return plot.Segment(name, ms, colors.get(operator, OTHER))

    lines = [(row["label"], tuple(part(*each) for each in row["time_line"])) for row in rows]
    note = "Node after node, in order of time; neighbors of one operator are one part."
    return [Block("Time line of one call", note, plot=plot.stacked_bars(lines))] if lines else []


def _profile(report: Row) -> list[Block]:
    blocks = _time_lines(report["engines"])
    for row in report["engines"]:
        if row["status"] != "ok":
            blocks.append(Block(note=f"{row['label']} failed: {row['reason']}"))
            continue
        link = row["trace"] if LOCAL_FILE.fullmatch(row["trace"]) else ""
        blocks.append(Block(f"{row['label']}: {row['total_ms']:.2f} ms per call in {row['clock']}", link=link))
        for name in ("by_operator", "by_site"):
            bars = [
                plot.Bar(r["name"], r["ms"], f"{r['ms']:.3f} ms  {r['share']:.1%}  {r['count']:.0f}x", OURS)
                for r in row[name][:14]
            ]
            blocks.append(Block(note=name.replace("_", " "), plot=plot.bars(bars)))
    return blocks


SECTIONS: dict[str, Callable[[Row], list[Block]]] = {
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
MUST_MATCH = ("component", "provider", "steps", "height", "width", "guidance", "prompt", "seed", "threads", "tuning",
              "calls")  # fmt: skip


def compare(old: Row, new: Row, tolerance: float, *, ratios: bool = False) -> tuple[list[Row], list[str]]:
    """Compare two benchmark reports; return rows of metrics with `worse`, and notes on different conditions.

    A time or memory is worse if it grew by more than `tolerance` (0.05: 5 %), PSNR if it fell by more than 1 dB, a
    component's error if it grew 1.5 times. An engine that ran before and fails or is missing now is worse. With
    `ratios`, speed-ups over each run's baseline are compared instead of times, for runs on different machines.

    Raises:
        InputError: if the settings differ.
    """
    with files.parsing("a report", "benchmark results"):
        return _compare(old, new, tolerance, ratios)


def _compare(old: Row, new: Row, tolerance: float, ratios: bool) -> tuple[list[Row], list[str]]:
    settings = [{"calls": 1, **report["settings"]} for report in (old, new)]  # older reports have one call a run
    different = [key for key in MUST_MATCH if settings[0][key] != settings[1][key]]
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
