"""The real ROCm and MIGraphX wheels on a machine without ROCm: a clear error, never the CPU in silence.

Run with `pytest -m wheels`: it downloads 150 MB once. results/provider_wheels.json keeps the last run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.checks import check_provider_wheels

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.wheels
@pytest.mark.parametrize(
    ("extra", "ep"), [("rocm", "ROCMExecutionProvider"), ("migraphx", "MIGraphXExecutionProvider")]
)
def test_real_wheel(extra: str, ep: str) -> None:
    report = check_provider_wheels.check(extra)
    assert ep in report["providers"]
    assert check_provider_wheels.is_right(report, ep), report
    if not report["ok"]:
        assert (report["kind"], report["exit_code"]) == ("ProviderError", 3)


def test_saved_run_shows_the_error() -> None:
    """What was measured with the real wheels, and that plain ONNX Runtime falls back without a word."""
    saved = json.loads((ROOT / "results" / "provider_wheels.json").read_text())
    assert saved["right"] == {"rocm": True, "migraphx": True}
    for report in saved["wheels"].values():
        assert report["ok"] or report["onnxruntime_alone_uses"] == ["CPUExecutionProvider"]
