"""Fixtures that several test files share: one tiny export a session, and the command line in this process."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sd_ort import cli


@pytest.fixture(scope="session")
def tiny_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `sd15-tiny` pipeline folder with all components, written once by the default exporter. Do not change it."""
    from sd_ort.export import export

    out = tmp_path_factory.mktemp("tiny") / "raw"
    export(None, out, preset="sd15-tiny", random_weights=True)
    return out


@pytest.fixture
def tiny_copy(tiny_export: Path, tmp_path: Path) -> Path:
    """A copy of `tiny_export` without its U-Net, to damage."""
    copy = tmp_path / "copy"
    shutil.copytree(tiny_export, copy, ignore=shutil.ignore_patterns("unet"))
    return copy


@pytest.fixture
def sd_ort(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run `sd-ort ARGS...` as a shell would: (exit code, stdout, stderr)."""

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sd-ort", *map(str, args)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        code = exit_.value.code
        return (code if isinstance(code, int) else int(code is not None)), captured.out, captured.err

    return run
