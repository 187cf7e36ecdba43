"""NVIDIA targets: those that are built, and which of them were measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_type import Cli

from custom_ops import nvidia_targets
from sd_ort.runtime import build


def test_targets_are_listed_and_said_to_be_measured_or_not() -> None:
    assert list(nvidia_targets.TARGETS) == ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
    assert nvidia_targets.describe("sm_90") == "sm_90 (H100, H200): measured"
    assert nvidia_targets.describe("sm_120") == "sm_120 (RTX 50): not measured"


def test_build_ops_takes_each_and_refuses_others(sd_ort: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr(build, "_compile", lambda options, folder: built.append(options.cuda_archs))
    monkeypatch.setattr(build, "find_program", lambda program, advice: "true")
    monkeypatch.setattr(build, "cache_folder", lambda: Path("/nowhere"))
    arguments = [part for target in nvidia_targets.TARGETS for part in ("--cuda", target)]
    code, _, error = sd_ort("build-ops", "--no-cpu", "--no-provider", *arguments)
    assert (code, built) == (0, [("80", "86", "89", "90", "100", "120")])
    assert "sm_80 (A100): not measured" in error
    assert "sm_90" not in error
    code, _, error = sd_ort("build-ops", "--no-cpu", "--cuda", "sm_75")
    assert (code, "sm_75 is not supported: choose from sm_80, sm_86" in error) == (2, True)
