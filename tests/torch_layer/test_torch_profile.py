"""sd_ort.torch.profile: the time of a call by operator and by module."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers.models.resnet import ResnetBlock2D

from sd_ort.core.errors import OutputError
from sd_ort.torch import optimize, profile


@pytest.mark.usefixtures("library")
@torch.no_grad()
def test_time_by_operator_and_module(tmp_path: Path) -> None:
    block = optimize(ResnetBlock2D(in_channels=8, out_channels=16, temb_channels=4, groups=4).eval())
    report = profile(block, torch.randn(1, 8, 6, 6), torch.randn(1, 4), trace=tmp_path / "trace.json")
    assert report.result.shape == (1, 16, 6, 6)
    kinds = {row.name: (row.kind, row.calls) for row in report.operators}
    assert kinds["sd_ort::group_norm"] == ("ours", 1)
    assert kinds["sd_ort::skip_group_norm"] == ("ours", 1)
    assert kinds["aten::conv2d"] == ("torch", 3)
    modules = {row.name: row.kind for row in report.modules}
    assert modules["FastResnetBlock2D"] == "FastResnetBlock2D"
    assert modules["FastResnetBlock2D.conv1"] == "Conv2d"
    # The time of an event counts for one operator and one module.
    assert sum(row.milliseconds for row in report.modules) == pytest.approx(report.milliseconds)
    assert "sd_ort::group_norm (ours)" in str(report)
    assert any(
        "sd_ort::group_norm" in str(event.get("name"))
        for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    )

    wide = profile(block.double(), torch.randn(1, 8, 6, 6).double(), torch.randn(1, 4).double())
    fallbacks = {row.name: row.kind for row in wide.operators if "by torch" in row.name}
    assert fallbacks == {"sd_ort::group_norm by torch": "torch", "sd_ort::skip_group_norm by torch": "torch"}
    with pytest.raises(OutputError, match="Cannot write"):
        profile(block, torch.randn(1, 8, 6, 6).double(), torch.randn(1, 4).double(), trace=tmp_path / "no/folder.json")
