"""The profile: times by operator and by place in the model, and its trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_type import Cli, success

from sd_ort.benchmark import profile

SMALL = ("--torch", "none", "--steps", 1, "--height", 64, "--width", 64, "--threads", 1)


def ort_trace() -> list[dict[str, Any]]:
    """Two runs of three nodes each; the first run is a warm-up."""
    events: list[dict[str, Any]] = [{"cat": "Session", "name": "session_initialization", "ts": 0, "dur": 50}]
    for start in (100, 200):
        events.append({"cat": "Session", "name": "model_run", "ts": start, "dur": 90})
        for i, (name, op) in enumerate((("conv", "Conv"), ("conv_nchwc", "Conv"), ("attn_1", "MatMul"))):
            arguments = {"op_name": op, "provider": "CPUExecutionProvider"}
            where = {"ts": start + 10 + 20 * i, "dur": 10 * (i + 1)}
            events.append({"cat": "Node", "name": f"{name}_kernel_time", "args": arguments, **where})
            events.append({"cat": "Node", "name": f"{name}_fence_before", "args": {"op_name": op}, **where})
    return events


def test_profile_sums_by_operator_and_site() -> None:
    events = profile.node_events(ort_trace(), runs=1)
    assert [event.name for event in events] == ["conv", "conv_nchwc", "attn_1"]
    sites = {"conv": "down_blocks.0.resnets.0", "attn_1": "mid_block.attentions.0"}
    report = profile.summary(profile.with_sites(events, sites))
    assert report["total_ms"] == pytest.approx(0.06)
    assert [(r["name"], r["ms"], r["count"]) for r in report["by_operator"]] == [
        ("Conv [CPU]", 0.03, 2),
        ("MatMul [CPU]", 0.03, 1),
    ]
    assert {r["name"]: r["ms"] for r in report["by_site"]} == {"down_blocks.0": 0.03, "mid_block.attentions": 0.03}


def test_kernels_belong_to_the_node_that_launched_them() -> None:
    events = profile.node_events(ort_trace(), runs=2)
    trace: list[dict[str, Any]] = []
    for number, start in enumerate((1000, 5000)):
        trace.append({"ph": "X", "cat": "user_annotation", "name": profile.STEP, "ts": start, "dur": 120})
        for i, (launch, duration) in enumerate(
            ((12, 500), (33, 70), (51, 3), (85, 1))
        ):  # 7 us from Python into the run
            correlation = {"correlation": 10 * number + i}
            trace.append(
                {
                    "ph": "X",
                    "cat": "cuda_runtime",
                    "name": "cudaLaunchKernel",
                    "ts": start + 7 + launch,
                    "dur": 2,
                    "args": correlation,
                }
            )
            trace.append(
                {"ph": "X", "cat": "kernel", "name": f"k{i}", "ts": start + 900, "dur": duration, "args": correlation}
            )
    kernels = profile.kernel_events({"traceEvents": trace})
    assert len(kernels) == 8
    timed = profile.by_kernels(events, kernels)
    assert [event.duration for event in timed[:3]] == [500, 70, 3]
    assert [(event.operator, event.duration) for event in timed[6:]] == [("(other kernels)", 1)] * 2


def test_time_line_of_the_last_run() -> None:
    """It has nodes with gaps between them, and no gaps if durations are of another clock."""
    events = profile.node_events(ort_trace(), runs=2)
    parts = profile.time_line(events, sequential=False)
    assert parts == [
        ("Conv", pytest.approx(0.01)), ("", pytest.approx(0.01)), ("Conv", pytest.approx(0.02)),
        ("MatMul", pytest.approx(0.03)),
    ]  # fmt: skip
    assert profile.time_line(events, sequential=True) == [
        ("Conv", pytest.approx(0.03)), ("MatMul", pytest.approx(0.03)),
    ]  # fmt: skip
    assert profile.time_line([], sequential=True) == []


def test_trace_loads_in_perfetto() -> None:
    events = profile.node_events(ort_trace(), runs=1)
    trace = profile.to_trace(events, sequential=False)["traceEvents"]
    assert [event["ph"] for event in trace] == ["M", "X", "X", "X"]
    assert all(event["dur"] > 0 and event["ts"] >= 200 for event in trace[1:])


def test_profile_of_a_tiny_unet(sd_ort: Cli, small_export: Path, tmp_path: Path) -> None:
    table = success(sd_ort, "benchmark", small_export, "--profile", *SMALL, "--out", tmp_path)
    (row,) = json.loads((tmp_path / "profile.json").read_text())["engines"]
    assert (row["status"], row["clock"]) == ("ok", "nodes")
    for title in ("by_operator", "by_site"):
        assert sum(r["ms"] for r in row[title]) == pytest.approx(row["total_ms"])
    convolutions = next(r for r in row["by_operator"] if r["name"] == "Conv [CPU]")
    assert convolutions["count"] == 54
    sites = {r["name"]: r["share"] for r in row["by_site"]}
    assert {"down_blocks.0", "mid_block.attentions", "up_blocks.3"} <= sites.keys()
    assert sites.get(profile.OTHER, 0) < 0.5
    assert 0 < sum(ms for operator, ms in row["time_line"] if operator) < 3 * row["total_ms"]
    assert "Time line of one call" in (tmp_path / "report.html").read_text()
    events = json.loads((tmp_path / row["trace"]).read_text())["traceEvents"]
    assert sum(e.get("dur", 0) for e in events) / 1e3 == pytest.approx(row["total_ms"])
    assert "Conv [CPU]" in table
