"""Folders that a benchmark makes: whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from sd_ort.benchmark import engine_builds
from sd_ort.core.errors import SdOrtError
from sd_ort.core.pipeline_folder import DATA, MODEL


def raw_component(raw: Path) -> Path:
    (raw / "unet" / "config.json").write_text("{}")
    (raw / "unet" / DATA).write_bytes(b"0")
    return raw


def test_built_component_appears_at_once(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(task: engine_builds.BuildTask, word: str) -> None:
        assert (task.source, word) == (raw / "unet" / MODEL, "twice")
        task.out.write_text("made")
        part = task.out.parent.with_name("unet_prompt")
        part.mkdir()
        (part / MODEL).write_text("a part")

    monkeypatch.setitem(engine_builds.BUILDERS, "copy", copy)
    out = tmp_path / "home" / "copy-twice"
    out.mkdir(parents=True)
    engine_builds.build_component(("copy", "twice"), raw_component(raw), out, "unet")
    assert (out / "unet" / MODEL).read_text() == "made"
    assert (out / "unet_prompt" / MODEL).read_text() == "a part"
    assert (out / "unet" / "config.json").read_text() == "{}"
    assert float((out / "unet" / engine_builds.SECONDS).read_text()) >= 0


def test_failed_component_leaves_nothing(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(task: engine_builds.BuildTask) -> None:
        task.out.write_text("half")
        raise ValueError("\nno such pattern\nmore")

    monkeypatch.setitem(engine_builds.BUILDERS, "fail", fail)
    out = tmp_path / "home" / "fail"
    out.mkdir(parents=True)
    with pytest.raises(SdOrtError, match=r"^unet: ValueError: no such pattern$"):
        engine_builds.build_component(("fail",), raw_component(raw), out, "unet")
    assert list(out.iterdir()) == []
