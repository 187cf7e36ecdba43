"""Staged folders: whatever is killed when, the old or the new folder is complete, and nobody's file is lost."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sd_ort.core import pipeline_folder, staging
from sd_ort.core.errors import InputError, OutputError
from sd_ort.integrations.managed_folder import MARKER, install_folder, uninstall_folder

FOREIGN = {"NOTES.txt": "mine", "loras/red.safetensors": "mine too", "unet/notes/a.md": "deep"}


class Killed(BaseException):
    """Stands for the end of the process."""


@contextmanager
def killed_at(number: int) -> Iterator[list[str]]:
    """Raise Killed instead of operation `number` on the file system and all later ones; yield the operations."""
    done: list[str] = []
    patch = pytest.MonkeyPatch()

    def wrap(module: Any, name: str) -> None:
        operation = getattr(module, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            if len(done) >= number:
                raise Killed
            done.append(name)
            return operation(*arguments, **options)

        patch.setattr(module, name, counted)

    for name in ("rename", "replace", "link", "unlink", "remove", "rmdir", "mkdir"):
        wrap(os, name)
    wrap(staging, "exchange")
    try:
        yield done
    finally:
        patch.undo()


def write(output: Path, content: str, **options: Any) -> None:
    """Write a pipeline folder with files of that content, as a stage does."""
    with pipeline_folder.staged(output, **options) as work:
        for name in ("unet/model.onnx", "unet/model.onnx.data", "scheduler/scheduler_config.json", "model_index.json"):
            (work / name).parent.mkdir(exist_ok=True)
            (work / name).write_text(f"{name} {content}")
        (work / content).write_text("")
        pipeline_folder.write_manifest(work, {"stage": "export"})


def add_foreign(output: Path) -> None:
    for name, text in FOREIGN.items():
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text(text)
    (output / "link").symlink_to("/etc/passwd")
    (output / "empty").mkdir()


def has_foreign(output: Path) -> bool:
    texts = all((output / name).read_text() == text for name, text in FOREIGN.items())
    return texts and (output / "link").is_symlink() and (output / "empty").is_dir()


def version_at(output: Path) -> str:
    """Which of the two versions lies there, complete."""
    manifest = pipeline_folder.read_manifest(output)
    assert pipeline_folder.is_intact(output, manifest)
    (version,) = {"old", "new"} & set(manifest["files"]["."])
    return version


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("foreign", [False, True])
def test_a_kill_at_every_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool, foreign: bool
) -> None:
    kills, seen = 0, set()
    while True:
        parent = tmp_path / str(kills)
        output = parent / "out"
        write(output, "old")
        if foreign:
            add_foreign(output)
        with monkeypatch.context() as patch:
            if not can_exchange:
                patch.setattr(staging, "exchange", lambda one, other: False)
            with killed_at(kills) as operations:
                try:
                    write(output, "new")
                    finished = True
                except Killed:
                    finished = False
        with pytest.raises(InputError), pipeline_folder.staged(output):
            raise InputError("the next run fails")
        seen.add(version_at(output))
        assert not foreign or has_foreign(output)
        write(output, "new")
        assert version_at(output) == "new"
        assert not foreign or has_foreign(output)
        assert [path.name for path in parent.iterdir()] == ["out"], operations
        if finished:
            break
        kills += 1
        shutil.rmtree(parent)
    assert kills >= 10
    assert seen == {"old", "new"}


def test_200_kills_of_three_runs(tmp_path: Path) -> None:
    """Three runs in a row, killed 200 times in all, and each time the next one goes on."""
    output, kills = tmp_path / "out", 0
    write(output, "old")
    add_foreign(output)
    while kills < 200:
        with killed_at(kills % 40):
            try:
                for version in ("new", "old", "new"):
                    write(output, version)
            except Killed:
                kills += 1
            else:
                pytest.fail("three runs have fewer than 40 operations")
        staging.recover(output)
        assert version_at(output) in ("old", "new")
        assert has_foreign(output)
    write(output, "new")
    assert os.listdir(tmp_path) == ["out"]


def test_files_of_others_stay_and_are_named(tmp_path: Path) -> None:
    output, lines = tmp_path / "out", list[str]()
    write(output, "old")
    add_foreign(output)
    write(output, "new", on_progress=lines.append)
    assert has_foreign(output)
    assert "NOTES.txt" in lines[0]
    assert not (output / "old").exists()


def test_a_changed_file_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    output, lines = tmp_path / "out", list[str]()
    write(output, "old")
    (output / "model_index.json").write_text("edited")
    with pytest.raises(OutputError, match=r"model_index\.json.*--overwrite"):
        write(output, "new")
    assert (output / "model_index.json").read_text() == "edited"
    write(output, "new", overwrite=True, on_progress=lines.append)
    assert version_at(output) == "new"
    assert "model_index.json" in lines[0]


def test_a_file_of_others_in_the_way_is_never_replaced(tmp_path: Path) -> None:
    output = tmp_path / "out"
    write(output, "old")
    (output / "new").write_text("mine")
    with pytest.raises(OutputError, match="would be lost"):
        write(output, "new", overwrite=True)
    assert (output / "new").read_text() == "mine"
    assert version_at(output) == "old"


@pytest.mark.parametrize("manifest", ["{}", "[]", "{", '{"format": 1}', '{"format": 1, "files": {}}'])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_manifest_that_records_nothing_owns_nothing(tmp_path: Path, manifest: str, overwrite: bool) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "sd_ort.json").write_text(manifest)
    (output / "thesis.doc").write_text("mine")
    with pytest.raises(OutputError, match="choose another folder"):
        write(output, "new", overwrite=overwrite)
    assert {path.name for path in output.iterdir()} == {"sd_ort.json", "thesis.doc"}


@pytest.mark.parametrize("recorded", [["unet"], []], ids=["components", "nothing"])
def test_a_folder_of_an_earlier_version_is_replaced(tmp_path: Path, recorded: list[str]) -> None:
    """Its manifest records the files of components alone, or none: others of sd-ort's names are sd-ort's."""
    output, lines = tmp_path / "out", list[str]()
    write(output, "old")
    (output / "old").unlink()
    manifest = json.loads((output / "sd_ort.json").read_text())
    manifest["files"] = {home: manifest["files"][home] for home in recorded}
    (output / "sd_ort.json").write_text(json.dumps({**manifest, "components": {"unet": {}}}))
    write(output, "new", on_progress=lines.append)
    assert (version_at(output), lines) == ("new", [])

    (output / "sd_ort.json").write_text(json.dumps({**manifest, "components": {"unet": {}}, "files": {}}))
    add_foreign(output)
    (output / "scheduler" / "mine.json").write_text("mine")
    (output / "new").unlink()
    with pytest.raises(OutputError, match="were changed"), pipeline_folder.staged(output):
        (output / "model_index.json").write_text("changed while the stage runs")
    assert (output / "model_index.json").read_text() == "changed while the stage runs"
    write(output, "new", on_progress=lines.append)
    assert version_at(output) == "new"
    assert has_foreign(output)
    assert (output / "scheduler" / "mine.json").read_text() == "mine"
    assert "NOTES.txt" in lines[0]


def test_a_file_written_during_the_exchange_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, exchange = tmp_path / "out", staging.exchange
    write(output, "old")

    def late(one: Path, other: Path) -> bool:
        (other / "late.txt").write_text("mine")
        return exchange(one, other)

    monkeypatch.setattr(staging, "exchange", late)
    write(output, "new")
    assert (output / "late.txt").read_text() == "mine"


# --- Extensions in applications ------------------------------------------------------------------------------------

FILES = {"__init__.py": b"one", "example_workflows/a.json": b"{}", "old.py": b"goes"}


@pytest.mark.parametrize("action", [uninstall_folder, lambda target: install_folder(target, FILES)])
def test_an_edited_workflow_stays(tmp_path: Path, action: Callable[[Path], object]) -> None:
    target = tmp_path / "sd_ort_nodes"
    install_folder(target, FILES)
    workflow = target / "example_workflows" / "a.json"
    workflow.write_text("my work")
    if action is uninstall_folder:
        assert uninstall_folder(target) == ["example_workflows/a.json"]
        assert [path.name for path in target.rglob("*") if path.is_file()] == ["a.json"]
    else:
        with pytest.raises(OutputError, match="--overwrite"):
            action(target)
    assert workflow.read_text() == "my work"


def test_a_second_install_removes_what_is_ours_alone(tmp_path: Path) -> None:
    target = tmp_path / "sd_ort_nodes"
    install_folder(target, FILES)
    (target / "notes.txt").write_text("mine")
    install_folder(target, {"__init__.py": b"two"})
    files = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert files == {"__init__.py", "notes.txt", MARKER}


def test_a_marker_through_a_link_removes_nothing_outside(tmp_path: Path) -> None:
    target, outside = tmp_path / "sd_ort_nodes", tmp_path / "outside"
    install_folder(target, FILES)
    outside.mkdir()
    (outside / "a.json").write_bytes(FILES["example_workflows/a.json"])
    shutil.rmtree(target / "example_workflows")
    (target / "example_workflows").symlink_to(outside)
    record = json.loads((target / MARKER).read_text())["files"]["example_workflows/a.json"]
    content = {"files": {"../outside/a.json": record, **json.loads((target / MARKER).read_text())["files"]}}
    (target / MARKER).write_text(json.dumps(content))
    assert uninstall_folder(target) == ["example_workflows"]
    assert (outside / "a.json").exists()
