"""Checkpoints are optimized once: the cache's keys, its limit, and entries that were damaged or are in use."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_pipeline
from cli_type import Cli, success

from sd_ort import StableDiffusionPipeline, demo, model_cache
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import InputError


@pytest.fixture
def optimized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of `optimize`, which writes a tiny pipeline here, into a cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(model_cache, "IN_USE", {})
    calls = []

    def optimize(model: str, output: Path, **options: Any) -> None:
        calls.append({"model": model, **options})
        with pipeline_folder.staged(output) as work:
            tiny_pipeline.write(work / "folder")
            for path in (work / "folder").iterdir():
                path.rename(work / path.name)
            (work / "folder").rmdir()
            manifest = {"stage": "optimize", "source": {"model": model}, "options": {"target": options["target"]}}
            pipeline_folder.write_manifest(work, manifest)

    monkeypatch.setattr("sd_ort.stages.optimize", optimize)
    return calls


def entry_of(model: Path | str, **options: Any) -> Path:
    return model_cache.open_model(model, "cpu", **options)[0]


def test_contents_decide(optimized: list[dict[str, Any]], tmp_path: Path) -> None:
    first = entry_of("demo")
    assert entry_of("demo") == first
    shutil.copytree(demo.MODEL_DIR, tmp_path / "demo")
    copied = entry_of(tmp_path / "demo")
    assert (copied, len(optimized)) == (first, 1)
    config = tmp_path / "demo/scheduler/scheduler_config.json"
    config.write_text(config.read_text() + "\n")
    assert entry_of(tmp_path / "demo") != first
    half = entry_of("demo", dtype="float16")
    assert half != first
    assert [(call["target"], call["dtype"]) for call in optimized] == [("cpu", "float32")] * 2 + [("cpu", "float16")]
    with pytest.raises(InputError, match="dtype float8 is unknown"):
        entry_of("demo", dtype="float8")


def test_only_a_new_entry_trims_the_cache(optimized: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    monkeypatch.setattr(model_cache, "trim", trims.append)
    monkeypatch.setenv("SD_ORT_CACHE_GB", "2")
    for _ in range(3):
        entry_of("demo")
    assert trims == [2_000_000_000]


@pytest.mark.parametrize("damage", ["truncated", "missing", "manifest", "interrupted", "tokenizer"])
def test_a_damaged_entry_is_rebuilt(optimized: list[dict[str, Any]], damage: str) -> None:
    entry = entry_of("demo")
    model = entry / "unet/model.onnx"
    content = model.read_bytes()
    if damage == "truncated":
        model.write_bytes(content[:-1])
    elif damage == "missing":
        model.unlink()
    elif damage == "tokenizer":
        (entry / "tokenizer" / "vocab.json").write_text("")
    elif damage == "manifest":
        (entry / "sd_ort.json").write_text("{")
    else:
        (entry / "sd_ort.json").unlink()
    assert entry_of("demo") == entry
    assert len(optimized) == 2
    assert model.read_bytes() == content


def test_the_least_recently_used_goes(
    optimized: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, sd_ort: Cli
) -> None:
    old, new = (entry_of("demo", dtype=dtype) for dtype in ("float32", "float16"))
    os.utime(old.with_suffix(".lock"), (1, 1))
    assert [entry.folder for entry in model_cache.entries()] == [old, new]
    assert model_cache.trim(0) == [], "this process uses both"
    hold = (
        f"import fcntl, os; f = os.open({str(old.with_suffix('.lock'))!r}, os.O_RDWR); fcntl.flock(f, fcntl.LOCK_SH); "
    )
    command = [sys.executable, "-c", hold + "print(); input()"]
    for descriptor in model_cache.IN_USE.values():
        os.close(descriptor)
    monkeypatch.setattr(model_cache, "IN_USE", {})
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert [entry.folder for entry in model_cache.trim(0)] == [new], "another process uses the old one"
        other.communicate("\n")
    out = success(sd_ort, "cache")
    assert re.search(r"demo, cpu, None  .*\n +0.00 GB in 1 entries\n", out)
    assert "Removed 1 entries" in sd_ort("cache", "--clear")[1]
    assert model_cache.entries() == []


def test_a_missing_file_is_called_so(sd_ort: Cli, tmp_path: Path) -> None:
    missing = tmp_path / "model.safetensors"
    with pytest.raises(InputError, match="no such file"):
        StableDiffusionPipeline.from_pretrained(missing)
    with pytest.raises(InputError, match="no such file"):
        StableDiffusionPipeline.from_single_file(missing)
    code, _, error = sd_ort("generate", "a cat", "--model", missing)
    assert (code, "no such file" in error) == (2, True)


def test_python_takes_what_the_shell_takes(optimized: list[dict[str, Any]], tmp_path: Path) -> None:
    """A checkpoint's name, its folder, a file and an optimized folder."""
    pipeline = StableDiffusionPipeline.from_pretrained("demo", "cpu")
    assert StableDiffusionPipeline.from_pretrained(demo.MODEL_DIR, "cpu").folder == pipeline.folder
    assert StableDiffusionPipeline.from_pretrained(pipeline.folder).folder == pipeline.folder
    (tmp_path / "a.safetensors").write_bytes(b"weights")
    of_file = StableDiffusionPipeline.from_single_file(tmp_path / "a.safetensors", "cpu", config="x/y")
    assert of_file.folder != pipeline.folder
    assert [call["checkpoint"].config for call in optimized] == [None, "x/y"]
