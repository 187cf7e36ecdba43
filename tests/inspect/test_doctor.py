"""doctor: what this machine has, with and without onnxruntime."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from cli_type import Cli

from sd_ort.core import onnx_file
from sd_ort.core.errors import InputError, SdOrtError
from sd_ort.inspect import doctor
from sd_ort.runtime import bound_run


def test_doctor_as_json(sd_ort: Cli) -> None:
    code, out, _ = sd_ort("doctor", "--json")
    findings = json.loads(out)
    assert code == 0
    assert findings["providers"]["cpu"] == {"ok": True, "problem": None, "missing_libraries": [], "note": None}
    assert set(findings["wheels"]) <= set(findings["versions"])


def test_doctor_counts_failed_captures(sd_ort: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "sd-ort").mkdir()
    for reason in ("no memory", "the arena grew\nin the capture"):
        bound_run.report_failed_capture(SdOrtError(reason))
    assert json.loads(sd_ort("doctor", "--json")[1])["failed_captures"] == ["no memory", "the arena grew"]
    assert re.search("2 runs were not captured.*the last one: the arena grew", sd_ort("doctor")[1])


def test_doctor_without_onnxruntime(sd_ort: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise SdOrtError("onnxruntime is not installed")

    monkeypatch.setattr("sd_ort.runtime.providers.import_onnxruntime", absent)
    code, out, _ = sd_ort("doctor")
    assert code == 3
    assert out.count("onnxruntime is not installed") == len(doctor.PROVIDERS)


def test_what_clashes_in_an_environment_of_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = ["click>=8.1", "numpy<1", "surely-not-there>=2", "numpy<1; extra == 'dev'"]
    too_new, missing = doctor.clashes(requirements)
    assert too_new.startswith("numpy ")
    assert too_new.endswith("is installed, and <1 was tested")
    assert missing == "surely-not-there is not installed: pip install 'surely-not-there>=2'"
    assert doctor.clashes() == [], "what the tests run with was tested"
    (old,) = doctor.clashes(["torch<1; extra == 'export'", "surely-not-there; extra == 'export'"])
    assert old.startswith("torch "), "a package of the extra is checked if it is installed"
    (tmp_path / "outer-1.0.dist-info").mkdir()
    about = "Metadata-Version: 2.1\nName: outer\nVersion: 1.0\nRequires-Dist: numpy<1\n"
    (tmp_path / "outer-1.0.dist-info" / "METADATA").write_text(about)
    monkeypatch.syspath_prepend(str(tmp_path))
    (inner,) = doctor.clashes(["outer>=1"])
    assert inner.endswith("is installed, and outer needs <1")


def test_onnx_beside_a_protobuf_too_old_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As AUTOMATIC1111 pins it: one line that leads here, not a bug of ours."""
    monkeypatch.setitem(sys.modules, "onnx", None)
    (tmp_path / "model.onnx").write_bytes(b"x")
    with pytest.raises(InputError, match="onnx cannot be used here, see `sd-ort doctor`: "):
        onnx_file.read(tmp_path / "model.onnx")
