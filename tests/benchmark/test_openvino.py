"""OpenVINO beside the others: it computes what ONNX Runtime does, and what it cannot do is said in a line."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import pytest

from sd_ort.benchmark.engines import openvino
from sd_ort.benchmark.engines.interface import BenchmarkSettings, Engine
from sd_ort.core.errors import SdOrtError

ENGINE = Engine("OpenVINO fp32", "openvino", "folder", "model", variant="float32")


def test_what_is_not_measured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SdOrtError, match="--component"):
        openvino.open_pipeline(ENGINE, BenchmarkSettings())
    with pytest.raises(SdOrtError, match="--provider cpu"):
        openvino.open_component(ENGINE, BenchmarkSettings(provider="cuda", component="unet"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SdOrtError, match=r"pip install 'sd-ort\[openvino\]'"):
        openvino.open_component(ENGINE, BenchmarkSettings(component="unet"))


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is an extra")
def test_computes_in_float32_by_default(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]> g (float[N,64] x, float[64,64] w) => (float[N,64] y) {
        y = MatMul (x, w) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    random = np.random.default_rng(0)
    x, w = random.normal(size=(2, 64)).astype(np.float32), random.normal(size=(64, 64)).astype(np.float32)
    actual = openvino.compile_model(tmp_path / "model.onnx", "float32", 1)({"x": x, "w": w})[0]
    np.testing.assert_allclose(actual, x @ w, rtol=1e-4, atol=1e-4)
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    with pytest.raises(SdOrtError, match="OpenVINO rejects"):
        openvino.compile_model(tmp_path / "broken.onnx", "float32", None)
