"""The HTML page is complete, self-contained and shows failures; the comparison finds what got worse, and only that."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cli_type import Cli
from PIL import Image

from sd_ort.benchmark import plot, report
from sd_ort.benchmark.engines.interface import BenchmarkSettings
from sd_ort.benchmark.report_file import ReportFile, format_speedup, to_table
from sd_ort.benchmark.worker import speedup
from sd_ort.core import metrics
from sd_ort.core.errors import InputError, OutputError
from sd_ort.core.ownership import RECORD


def row(label: str, batch: int, step: float, **more: Any) -> dict[str, Any]:
    """A row as `sd_ort.benchmark.runner` writes it, of an engine twice as slow to draw as `step` ms."""
    base = {
        "label": label,
        "batch": batch,
        "status": "ok",
        "model": "demo",
        "engine": "onnxruntime",
        "stage": "export",
        "target": "",
        "precision": "fp32",
        "load_s": 1.0,
        "first_run_s": 0.5,
        "peak_memory_MB": 800.0,
        "step_ms": metrics.summary([step, step * 1.1, step * 0.9]),
        "image_s": metrics.summary([step / 500] * 3),
        "step_speedup": metrics.summary([10 / step] * 3),
        "image_speedup": metrics.summary([10 / step] * 3),
        "psnr_db": 60.0,
    }
    return base | more


def test_ratios_do_not_contradict_seconds() -> None:
    baseline, unclear, clear = [1.0, 1.1, 1.2], [1.05, 1.0, 1.1], [0.8, 0.7, 0.6]
    cells = [format_speedup({"image_speedup": speedup(times, baseline)}) for times in (baseline, unclear, clear)]
    assert cells == ["1.00x", "no difference measured (0.95-1.10)", "1.57x (1.25-2.00)"]
    assert format_speedup({}) == "-"
    one_slow = [speedup([1.0, 1.0, 1.0, 9.0, 1.0], [2.0, 2.2, 2.0, 2.0, 2.1]), speedup([1, 1, 9, 9, 1], [2] * 5)]
    cells = [format_speedup({"image_speedup": each}) for each in one_slow]
    assert cells == ["2.00x (2.00-2.20; round 4, disturbed: 0.22)", "no difference measured (0.22-2.00)"]


def test_equal_images_are_called_equal() -> None:
    report = results()
    report["engines"][1]["psnr_db"] = metrics.EQUAL_DB
    text = to_table(report)
    assert "equal" in text
    assert "60.0 dB" in text
    assert "120" not in text


def results(kind: str = "benchmark", **more: Any) -> dict[str, Any]:
    failed = {"label": "ORT <optimizer>", "batch": 1, "status": "failed", "reason": "unet: it & that", "model": "demo"}
    rows = [row("raw ONNX", 1, 10.0), row("ours fp32", 1, 5.0, target="cpu", stage="made"), failed]
    rows += [row("raw ONNX", 4, 30.0), row("ours fp32", 4, 16.0, target="cpu", stage="made")]
    settings = {"component": None, "provider": "cpu", "steps": 20, "height": None, "width": None, "guidance": 3.0}
    settings |= {"prompt": "a red circle", "seed": 0, "threads": 2, "tuning": False, "batches": [1, 4]}
    return {
        "format": 2,
        "kind": kind,
        "date": "2026-11-21T10:00:00+00:00",
        "command": "sd-ort benchmark raw",
        "commit": "abc1234",
        "machine": {"cpu": "A CPU", "cores": 2, "memory_GB": 8.0, "gpus": [], "system": "Linux"},
        "versions": {"onnxruntime": "1.31.1"},
        "settings": settings,
        "notes": ["energy: not readable."],
        "finished": True,
        "interrupted": False,
        "baseline": "raw ONNX",
        "engines": rows,
        **more,
    }


def save(folder: Path, *reports: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for entry in reports:
        (folder / f"{entry['kind']}.json").write_text(json.dumps(entry))
    return folder


class Balanced(HTMLParser):
    """Collects the attributes that would load something, and fails on tags that do not close in order."""

    VOID = ("img", "meta")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.sources: list[str] = []
        self.count: dict[str, int] = {}
        self.feed(text.replace("<html lang=en><meta charset=utf-8>", "").replace("</html>", ""))
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ablation = results("ablation")
    ablation["engines"] = [row("raw fp32", 1, 10.0), row("raw fp16", 1, 8.0), row("+ NHWC", 1, 4.0, target="cuda")]
    path = save(tmp_path / "run", results(), ablation)
    Image.new("RGB", (8, 8), "red").save(path / "raw-ONNX.png")
    return path


def test_page_is_self_contained_and_complete(folder: Path) -> None:
    text = report.write(folder).read_text()
    page = Balanced(text)
    assert [source[:22] for source in page.sources] == ["data:image/png;base64,"]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert (
        page.count["svg"] == 4 + 1 + 2
    )  # times and memory at two batch sizes, throughput; the ablation's time, memory
    for expected in ("abc1234", "A CPU", "onnxruntime 1.31.1", "sd-ort benchmark raw", "energy: not readable."):
        assert expected in text
    assert "ORT &lt;optimizer&gt;" in text
    assert "failed: unet: it &amp; that" in text


def test_ablation_shows_what_each_step_gained(folder: Path) -> None:
    text = report.write(folder).read_text()
    cells = re.findall(r"<td>\+ NHWC</td>(.*?)</tr>", text)[0]
    assert "<td>2.00x</td>" in cells  # 8 ms -> 4 ms
    assert "2.50x" in cells  # over raw fp32, 10 ms


def test_bars_are_as_long_as_their_values() -> None:
    svg = plot.bars([plot.Bar("a<b", 4, "4 ms", "red"), plot.Bar("c", 1, "1 ms", "blue", 0.5, 2)])
    widths = [float(w) for w in re.findall(r'<rect [^>]*width="([\d.]+)"', svg)]
    assert widths == [plot.BARS, plot.BARS / 4]
    assert f"M{plot.LABELS + plot.BARS / 8:.1f}" in svg  # the spread starts at 0.5 of 4
    assert "a&lt;b" in svg
    Balanced(svg)


def test_line_labels_do_not_overlap() -> None:
    same = [plot.Line(str(i), ((1, 5.0), (8, 5.0 + i / 100)), "red") for i in range(6)]
    svg = plot.lines(same, "batch", "images/s")
    heights = sorted(
        float(y) for x, y in re.findall(r'<text x="(\d+)" y="([\d.]+)" text-anchor="start">\d</text>', svg)
    )
    assert len(heights) == 6
    assert min(b - a for a, b in pairwise(heights)) >= 14


def test_nothing_of_a_report_is_markup(tmp_path: Path) -> None:
    """Every string and number of a report, replaced by markup in turn, is text in the page, or refused."""
    evil = '"><script>alert(1)</script><a href="javascript:1">'
    profile = results("profile", engines=[{
        "label": "a", "status": "ok", "total_ms": 1.0, "clock": "nodes", "trace": "javascript:alert(1)",
        "by_operator": [{"name": "MatMul", "ms": 1.0, "share": 0.5, "count": 1}], "by_site": [],
        "time_line": [["MatMul", 1.0], ["", 0.5]],
    }])  # fmt: skip
    base = {"benchmark": results(), "profile": profile}
    pages = 0

    def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
        return [path] if items is None else [p for key, entry in items for p in places(entry, (*path, key))]

    for kind, *keys in places(base):
        if keys[0] in ("format", "kind"):
            continue
        changed = copy.deepcopy(base[kind])
        target: Any = changed
        for key in keys[:-1]:
            target = target[key]
        target[keys[-1]] = evil
        folder = save(tmp_path / kind, changed)
        try:
            text = report.write(folder).read_text()
        except InputError:
            continue
        pages += 1
        tags = Balanced(text)
        assert "script" not in tags.count, keys
        assert not tags.sources, keys
        assert "default-src 'none'" in text
    assert pages > 50


def test_image_outside_or_of_another_format_is_refused(tmp_path: Path, folder: Path) -> None:
    image = folder / "raw-ONNX.png"
    Image.open(image).save(tmp_path / "elsewhere.png")
    for replace in (
        lambda: image.symlink_to(tmp_path / "elsewhere.png"), lambda: image.symlink_to("/etc/passwd"),
        lambda: image.write_text("no picture"),
    ):  # fmt: skip
        image.unlink()
        replace()
        with pytest.raises(InputError, match="raw-ONNX"):
            report.write(folder)


def test_unfinished_run_is_said(tmp_path: Path) -> None:
    text = report.write(save(tmp_path, results(finished=False))).read_text()
    assert "did not finish" in text


def test_files_of_others_are_replaced_only_with_overwrite(tmp_path: Path, sd_ort: Cli) -> None:
    """Those of sd-ort are replaced, also in a folder without records, unless they were changed."""
    save(tmp_path, results())
    page = tmp_path / report.PAGE
    page.write_text("mine")
    code, _, err = sd_ort("report", tmp_path)
    assert (code, "--overwrite" in err, page.read_text()) == (5, True, "mine")
    assert sd_ort("report", tmp_path, "--overwrite")[0] == 0
    assert sd_ort("report", tmp_path)[0] == 0
    page.write_text(page.read_text().replace("<title>", "<title>my "))
    assert sd_ort("report", tmp_path)[0] == 5
    page.unlink()
    assert sd_ort("report", tmp_path)[0] == 0
    (tmp_path / RECORD).unlink()
    assert sd_ort("report", tmp_path)[0] == 0, "a page of an earlier version"

    out = ReportFile(BenchmarkSettings(), tmp_path, [], images=["raw-ONNX.png"])
    out.save()
    (tmp_path / "torch-eager.png").write_text("mine")
    with pytest.raises(OutputError, match=r"torch-eager\.png"):
        ReportFile(BenchmarkSettings(), tmp_path, [], images=["torch-eager.png"])
    (tmp_path / "benchmark.json").write_text("edited")
    with pytest.raises(OutputError, match=r"benchmark\.json"):
        ReportFile(BenchmarkSettings(), tmp_path, [])
    ReportFile(BenchmarkSettings(), tmp_path, [], overwrite=True).save()
    assert (tmp_path / "torch-eager.png").read_text() == "mine"


def test_an_unrecorded_file_that_is_no_report_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "benchmark.json").write_text('{"command": "mine"}')
    with pytest.raises(OutputError, match=r"benchmark\.json"):
        ReportFile(BenchmarkSettings(), tmp_path, [])


def test_what_is_no_results_folder_is_refused(tmp_path: Path) -> None:
    for content, reason in (
        (None, "has no benchmark.json"),
        ("{", "cannot be read"),
        ('{"format": 1}', "another version"),
    ):
        if content is not None:
            (tmp_path / "benchmark.json").write_text(content)
        with pytest.raises(InputError, match=reason):
            report.write(tmp_path)
    assert not (tmp_path / report.PAGE).exists()


# --- Comparing ------------------------------------------------------------------------------------------------------


def changed(index: int, **values: Any) -> dict[str, Any]:
    new = copy.deepcopy(results())
    new["engines"][index] |= values
    return new


@pytest.mark.parametrize(
    ("index", "values", "metric"),
    [
        (1, {"step_ms": metrics.summary([5.4])}, "step_ms"),
        (4, {"peak_memory_MB": 900.0}, "peak_memory_MB"),
        (0, {"psnr_db": 58.0}, "psnr_db"),
    ],
)
def test_regressions_are_reported(index: int, values: dict[str, Any], metric: str) -> None:
    rows, _ = report.compare(results(), changed(index, **values), 0.05)
    assert [r["metric"] for r in rows if r["worse"]] == [metric]
    rows, _ = report.compare(changed(index, **values), results(), 0.05)  # the other way round it got better
    assert not any(r["worse"] for r in rows)


def test_within_the_tolerance_is_not_worse() -> None:
    new = changed(1, step_ms=metrics.summary([5.4]))
    assert not any(r["worse"] for r in report.compare(results(), new, 0.1)[0])


def test_engine_that_now_fails_or_is_gone_is_worse() -> None:
    failing = results()
    failing["engines"][1] = {"label": "ours fp32", "batch": 1, "status": "failed", "reason": "no memory"}
    gone = results()
    del gone["engines"][1]
    for new in (failing, gone):
        assert [r["metric"] for r in report.compare(results(), new, 0.05)[0] if r["worse"]] == ["status"]


def test_ratios_ignore_a_slower_machine() -> None:
    slow = results(machine={**results()["machine"], "cpu": "A slower CPU"})
    for r in slow["engines"]:
        if "step_ms" in r:
            r["step_ms"] = metrics.summary([2 * v for v in r["step_ms"]["values"]])
    rows, notes = report.compare(results(), slow, 0.05)
    assert any(r["worse"] for r in rows)
    assert notes == ["machine differs"]
    assert not any(r["worse"] for r in report.compare(results(), slow, 0.05, ratios=True)[0])


def test_different_settings_are_not_compared() -> None:
    with pytest.raises(InputError, match="differ in steps"):
        report.compare(results(), results(settings={**results()["settings"], "steps": 5}), 0.05)


def test_command_exits_with_4_when_something_is_worse(sd_ort: Cli, tmp_path: Path) -> None:
    old, new = save(tmp_path / "old", results()), save(tmp_path / "new", changed(1, step_ms=metrics.summary([9.0])))
    code, out, _ = sd_ort("report", "--compare", old, old)
    assert (code, "WORSE" in out) == (0, False)
    code, out, error = sd_ort("report", "--compare", old, new, "--tolerance", 0.2)
    assert code == 4
    assert out.splitlines()[0].startswith("WORSE ours fp32 (batch 1)")
    assert error == f"sd-ort: 1 measurements are worse than in {old}.\n"
    assert sd_ort("report", "--compare", old, new, "--tolerance", 1)[0] == 0
    assert sd_ort("report")[0] == 2


def test_command_writes_the_page(sd_ort: Cli, folder: Path) -> None:
    assert sd_ort("report", folder) == (0, f"{folder / 'report.html'}\n", "")


def calls(**more: Any) -> dict[str, Any]:
    """A file as scripts/bench/bench_transformer_step.py writes it."""
    profile = {"classes_ms": {"matrix product": 30.0, "attention": 9.0, "<memcpy>": 1.0}}
    return {
        "preset": "flux-dev",
        "commit": "abc1234",
        "machine": {"cpu": "A CPU", "cores": 2, "memory_GB": 8.0, "gpus": ["A GPU"], "system": "Linux"},
        "versions": {"onnxruntime": "1.31.1"},
        "limits": {"matrix_tflops": 500.0},
        "tflop": {"mm": 10.0, "attention": 5.0},
        "engines": [
            {"engine": "torch <eager>", "device_ms": 50.0, "profile": profile},
            {"engine": "sd-ort", "device_ms": 40.0},
        ],
        **more,
    }


def test_calls_beside_peers_have_roofline_and_classes(tmp_path: Path) -> None:
    (tmp_path / "flux-dev_1024.json").write_text(json.dumps(calls()))
    images = [
        {"engine": "torch", "theirs_s": 0.4, "ratio": 0.75, "rounds": {"ours": [0.3, 0.31], "theirs": [0.4, 0.5]}}
    ]
    (tmp_path / "flux-dev_image.json").write_text(json.dumps(calls(engines=images)))
    text = report.write(tmp_path).read_text()
    page = Balanced(text)
    assert page.count["svg"] == 3
    for expected in ("torch &lt;eager&gt;", "40 ms  0.80", "30 ms  0.60", "0.4 s; sd-ort takes 0.75 of it", "A GPU"):
        assert expected in text  # the roofline: 15 TFLOP at 500 TFLOP/s
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height="18" fill="[^"]+"><title>', text)]
    assert [round(width / widths[2]) for width in widths] == [30, 9, 1]


def test_calls_without_limits_have_no_roofline(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(calls(limits={})))
    assert "roofline" not in report.write(tmp_path).read_text()


def test_a_benchmark_beside_calls_is_reported_alone(folder: Path) -> None:
    """The folder of a benchmark also has a profile, a JSON list, which the report does not read."""
    (folder / "calls.json").write_text(json.dumps(calls()))
    (folder / "trace.json").write_text("[]")
    text = report.write(folder).read_text()
    assert "raw ONNX" in text
    assert "torch &lt;eager&gt;" not in text


def test_damaged_calls_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(calls(machine=3)))
    with pytest.raises(InputError, match="benchmark results"):
        report.write(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps({"engines": [3]}))
    with pytest.raises(InputError, match=r"has no benchmark\.json"):
        report.write(tmp_path)
