"""The real ROCm and MIGraphX wheels on a machine without ROCm: a clear error, never the CPU in silence.

Run with `pytest -m wheels`: it downloads 150 MB once. results/provider_wheels.json keeps the last run.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "checks" / "check_provider_wheels.py"


def script() -> Any:
    spec = importlib.util.spec_from_file_location("check_provider_wheels", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.wheels
@pytest.mark.parametrize(
    ("extra", "ep"), [("rocm", "ROCMExecutionProvider"), ("migraphx", "MIGraphXExecutionProvider")]
)
def test_real_wheel(extra: str, ep: str) -> None:
    found = script().check(extra)
    assert ep in found["providers"]
    assert script().is_right(found, ep), found
    if not found["ok"]:
        assert (found["kind"], found["exit_code"]) == ("ProviderError", 3)


def test_kept_run_shows_the_error() -> None:
    """What was measured with the real wheels, and that plain ONNX Runtime falls back without a word."""
    kept = json.loads((ROOT / "results" / "provider_wheels.json").read_text())
    assert kept["right"] == {"rocm": True, "migraphx": True}
    for found in kept["wheels"].values():
        assert found["ok"] or found["onnxruntime_alone_uses"] == ["CPUExecutionProvider"]
