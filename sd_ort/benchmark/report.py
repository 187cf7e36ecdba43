"""One self-contained HTML page from a results folder, and a comparison of two runs.

The page holds everything inline: plots as SVG, pictures as base64. It is made from the JSON files that `sd-ort
benchmark` writes (benchmark, ablation, mlperf, profile), whichever of them the folder has.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from sd_ort.benchmark import plot
from sd_ort.benchmark.report_file import FORMAT
from sd_ort.benchmark.tables import COLUMNS, faster, ratio_note
from sd_ort.benchmark.worker import image_name
from sd_ort.core import files
from sd_ort.core.errors import InputError, first_line

KINDS = ("benchmark", "ablation", "mlperf", "profile")
PAGE = "report.html"
OURS, TORCH, PEER, RAW = "#d9480f", "#4263eb", "#868e96", "#ced4da"
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


def read(folder: Path) -> dict[str, Row]:
    """The reports of a results folder, by kind. Raises InputError when it has none, or one of another format."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give one that `sd-ort benchmark --out` wrote.")
    found = {kind: _load(path) for kind in KINDS if (path := folder / f"{kind}.json").is_file()}
    if not found:
        raise InputError(f"{folder} has no {', '.join(f'{kind}.json' for kind in KINDS)}: run `sd-ort benchmark`.")
    return found


def _load(path: Path) -> Row:
    report = files.read_json(path)
    if report.get("format") != FORMAT:
        raise InputError(f"{path} is of another version of sd-ort: run the benchmark again.")
    return report


# --- The page -------------------------------------------------------------------------------------------------------


def write(folder: Path) -> Path:
    """Write `folder`/report.html from the reports in it, and return its path. Raises InputError when it has none."""
    reports = read(folder)
    try:
        text = page(reports, folder)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:  # any of its hundred fields
        raise InputError(f"{folder} holds a damaged report ({first_line(error)}): run the benchmark again.") from error
    files.write_text(folder / PAGE, text)
    return folder / PAGE


def page(reports: dict[str, Row], folder: Path) -> str:
    """The page as text; pictures are read from `folder`."""
    first = next(iter(reports.values()))
    sections = [_head(first)]
    for kind, report in reports.items():
        sections.append(f"<h2>{kind.capitalize() if kind != 'mlperf' else 'MLPerf scenarios'}</h2>")
        if not report["finished"]:
            sections.append("<p><b>This run did not finish:</b> it holds what was measured until then.</p>")
        sections.append(SECTIONS[kind](report))
        if kind == "benchmark":
            sections.append(_pictures(report, folder))
        sections.append(_about(report))
    title = f"sd-ort: {_model(first)}"
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>"
    return f"{head}<body><h1>{escape(title)}</h1>{''.join(sections)}</body></html>\n"


def _model(report: Row) -> str:
    models = {row["model"] for row in report["engines"] if "model" in row}
    weights = " (random weights)" if any(row.get("random_weights") for row in report["engines"]) else ""
    return ", ".join(sorted(models)) + weights


def _head(report: Row) -> str:
    machine, settings = report["machine"], report["settings"]
    what = f"calls of {settings['component']}" if settings["component"] else f"images in {settings['steps']} steps"
    where = "; ".join(machine["gpus"]) if settings["provider"] != "cpu" and machine["gpus"] else machine["cpu"]
    threads = f", {settings['threads']} threads" if settings["threads"] else ""
    sizes = next((f", {row['width']} x {row['height']} pixels" for row in report["engines"] if "width" in row), "")
    guided = "; with guidance the UNet sees twice the batch" if settings["guidance"] > 1 else ""
    return f"<p>{escape(what)}{sizes}, provider {escape(settings['provider'])} on {escape(where)}{threads}{guided}</p>"


def _about(report: Row) -> str:
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [
        *report["notes"],
        f"{report['date']}, commit {report['commit'] or 'unknown'}",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_GB']} GB, {machine['system']}",
        "; ".join(machine["gpus"]) or "no GPU",
        versions,
    ]
    text = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul class=about>{text}<li><code>{escape(report['command'])}</code></li></ul>"


def _benchmark(report: Row) -> str:
    rows = report["engines"]
    return _charts(report, rows) + _scaling(rows) + _table(rows) + f"<p class=about>{escape(ratio_note(report))}</p>"


def _ablation(report: Row) -> str:
    rows = []
    before: dict[int, Row] = {}
    for row in report["engines"]:
        previous = before.get(row["batch"])
        gain = previous["step_ms"]["median"] / row["step_ms"]["median"] if previous and "step_ms" in row else None
        rows.append({**row, "gain": gain})
        if "step_ms" in row:
            before[row["batch"]] = row
    step = ("this step", lambda row: "-" if row.get("gain") is None else f"{row['gain']:.2f}x")
    return _charts(report, rows) + _table(rows, (*COLUMNS[:4], step, *COLUMNS[4:]))


def _charts(report: Row, rows: Sequence[Row]) -> str:
    """For each batch size: time per image (or per call), and memory."""
    parts = []
    for batch in report["settings"]["batches"]:
        ran = [row for row in rows if row["batch"] == batch and "step_ms" in row]
        if not ran:
            continue
        key, unit, name = ("image_s", "s", "per image") if "image_s" in ran[0] else ("step_ms", "ms", "per call")
        parts.append(f"<h3>Time {name}, batch {batch}: median, line from fastest to slowest</h3>")
        parts.append(plot.bars([_time_bar(row, key, unit) for row in ran]))
        for prefix, where in (("device_", "device"), ("", "host")):
            if all(f"{prefix}peak_memory_MB" in row for row in ran):
                parts.append(f"<h3>Peak {where} memory, batch {batch}</h3>")
                parts.append(plot.bars([_memory_bar(row, f"{prefix}peak_memory_MB") for row in ran]))
    return "".join(parts)


def _time_bar(row: Row, key: str, unit: str) -> plot.Bar:
    times = row[key]
    text = f"{times['median']:.3g} {unit}  {faster(row).partition(' (')[0].removeprefix('-')}"
    return plot.Bar(row["label"], times["median"], text, color(row), times["min"], times["max"])


def _memory_bar(row: Row, key: str) -> plot.Bar:
    return plot.Bar(row["label"], row[key], f"{row[key]:.0f} MB", color(row))


def _scaling(rows: Sequence[Row]) -> str:
    """Images (or samples) a second over the batch size, where there are several."""
    labels = list(dict.fromkeys(row["label"] for row in rows if "step_ms" in row))
    drawn = []
    for label in labels:
        mine = [row for row in rows if row["label"] == label and "step_ms" in row]
        points = tuple((float(row["batch"]), _rate(row)) for row in mine)
        drawn.append(plot.Line(label, points, color(mine[0])))
    if not any(len(line.points) > 1 for line in drawn):
        return ""
    return "<h3>Throughput</h3>" + plot.lines(drawn, "batch", "images/s" if "image_s" in rows[0] else "samples/s")


def _rate(row: Row) -> float:
    if "image_s" in row:
        return 1 / float(row["image_s"]["median"])
    return 1e3 * float(row["batch"]) / float(row["step_ms"]["median"])


def color(row: Row) -> str:
    """Ours, torch, a peer's, or the raw export."""
    if row.get("engine") == "torch":
        return TORCH
    if row.get("target") == "raw" or (row.get("stage") == "export" and row.get("engine") == "onnxruntime"):
        return RAW
    return OURS if row.get("target") else PEER


Column = tuple[str, Callable[[Row], str]]


def _table(rows: Sequence[Row], columns: Sequence[Column] = COLUMNS) -> str:
    """All rows; columns in which nothing was measured are left out; a failed row shows its reason."""
    ran = [row for row in rows if "step_ms" in row]
    used = [(name, cell) for i, (name, cell) in enumerate(columns) if i < 2 or any(cell(row) != "-" for row in ran)]
    body = []
    for row in rows:
        if "step_ms" in row:
            body.append("".join(f"<td>{escape(cell(row))}</td>" for _, cell in used))
        if row["status"] != "ok":
            head = f"<td>{escape(row['label'])}</td><td>{row['batch']}</td>"
            body.append(f"{head}<td class=reason colspan={len(used) - 2}>failed: {escape(row['reason'])}</td>")
    return _html_table([name for name, _ in used], body)


def _html_table(header: Iterable[str], body: Iterable[str]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{cells}</tr>" for cells in body) + "</table>"


def _cells(*values: str) -> str:
    return "".join(f"<td>{escape(value)}</td>" for value in values)


def _pictures(report: Row, folder: Path) -> str:
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
    ok = [row for row in report["engines"] if row["status"] == "ok"]
    bars = [
        plot.Bar(row["label"], row["Offline"]["images_per_s"], f"{row['Offline']['images_per_s']:.3g}/s", color(row))
        for row in ok
    ]
    header = "engine,SingleStream p50,p90,p99,Offline,Server rate,p50,p90,p99,mean batch,fidelity,CLIP score,FID"
    body = []
    for row in report["engines"]:
        if row["status"] != "ok":
            body.append(
                f"<td>{escape(row['label'])}</td><td class=reason colspan=12>failed: {escape(row['reason'])}</td>"
            )
            continue
        single, served, quality = row["SingleStream"]["latency_s"], row["Server"], row["quality"]
        body.append(
            _cells(
                row["label"],
                *(f"{single[p]:.2f} s" for p in ("p50", "p90", "p99")),
                f"{row['Offline']['images_per_s']:.2f}/s",
                f"{served['rate_per_s']:.2f}/s",
                *(f"{served['latency_s'][p]:.2f} s" for p in ("p50", "p90", "p99")),
                f"{served['mean_batch']:.1f}",
                *(_score(quality[name]) for name in ("fidelity_percent", "clip_score", "fid")),
            )
        )
    return "<h3>Offline: images per second</h3>" + plot.bars(bars) + _html_table(header.split(","), body)


def _score(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


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
            rows = row[name][:14]
            text = [f"{r['ms']:.3f} ms  {r['share']:.1%}  {r['count']:.0f}x" for r in rows]
            drawn = [plot.Bar(r["name"], r["ms"], t, OURS) for r, t in zip(rows, text, strict=True)]
            parts.append(f"<p>{name.replace('_', ' ')}</p>" + plot.bars(drawn))
    return "".join(parts)


SECTIONS: dict[str, Callable[[Row], str]] = {
    "benchmark": _benchmark,
    "ablation": _ablation,
    "mlperf": _mlperf,
    "profile": _profile,
}


# --- Comparing two runs ---------------------------------------------------------------------------------------------

# What is compared, and whether more is worse.
WORSE_IF_MORE = ("step_ms", "image_s", "peak_memory_MB", "device_peak_memory_MB", "error")
WORSE_IF_LESS = ("psnr_db",)
RATIOS = ("step_speedup", "image_speedup")
PSNR_TOLERANCE_DB = 1.0
ERROR_FACTOR = 1.5


def compare(old: Row, new: Row, tolerance: float, *, ratios: bool = False) -> tuple[list[Row], list[str]]:
    """Rows of two benchmark reports side by side, each with `worse`, and notes on what makes them hard to compare.

    A time or memory is worse when it grew by more than `tolerance` (0.05: 5 %), PSNR when it fell by more than
    1 dB, a component's error when it grew 1.5 times. `ratios`: compare the speed-ups over each run's own baseline
    instead of times, for runs of different machines. An engine that ran and now fails or is missing is worse.
    Raises InputError when the two did not measure the same.
    """
    keys = ("component", "provider", "steps", "height", "width", "guidance", "prompt", "seed", "threads", "tuning")
    changed = [key for key in keys if old["settings"][key] != new["settings"][key]]
    if changed:
        raise InputError(f"the two runs differ in {', '.join(changed)}: run the benchmark again with the same.")
    notes = [f"{key} differs" for key in ("machine", "versions", "commit") if old[key] != new[key]]
    now = {(row["label"], row["batch"]): row for row in new["engines"]}
    rows = []
    for before in old["engines"]:
        if "step_ms" not in before:
            continue
        after = now.get((before["label"], before["batch"]), {"reason": "it is not in the new run"})
        base = {"label": before["label"], "batch": before["batch"]}
        if "step_ms" not in after:
            rows.append({**base, "metric": "status", "old": "ok", "new": after.get("reason", "failed"), "worse": True})
            continue
        times = RATIOS if ratios else ("step_ms", "image_s")
        for metric in (*times, *WORSE_IF_MORE[2:], *WORSE_IF_LESS):
            was, is_ = _median(before.get(metric)), _median(after.get(metric))
            if was is not None and is_ is not None:
                rows.append(
                    {**base, "metric": metric, "old": was, "new": is_, "worse": _worse(metric, was, is_, tolerance)}
                )
    return rows, notes


def _median(value: Any) -> float | None:
    return value["median"] if isinstance(value, dict) else value


def _worse(metric: str, old: float, new: float, tolerance: float) -> bool:
    if metric == "psnr_db":
        return new < old - PSNR_TOLERANCE_DB
    if metric == "error":
        return new > ERROR_FACTOR * old
    return new < old * (1 - tolerance) if metric in RATIOS else new > old * (1 + tolerance)


def comparison_table(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """The comparison for a terminal, what got worse first."""
    lines = []
    for row in sorted(rows, key=lambda row: not row["worse"]):
        numbers = isinstance(row["new"], (int, float)) and row["old"]
        change = f"{row['new'] / row['old'] - 1:+.1%}" if numbers else ""
        values = f"{row['old']:.4g} -> {row['new']:.4g}" if numbers else f"{row['old']} -> {row['new']}"
        name = f"{row['label']} (batch {row['batch']})"
        lines.append(f"{'WORSE' if row['worse'] else 'ok':<6}{name:<40}{row['metric']:<24}{values:<28}{change}")
    return "\n".join([*lines, *notes])
