"""The soak of a pipeline folder in small: on a CPU, and on our provider for AMD on the simulated GPU."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hip_library import hip_library
from safetensors.numpy import save_file
from simulation import ROOT, simulate

from scripts.checks import soak_gpu
from sd_ort.checkpoints.presets import open_preset
from sd_ort.core.errors import SdOrtError
from sd_ort.runtime import bound_run, component_opener
from sd_ort.stages import optimize

SOAK = str(ROOT / "scripts/checks/soak_gpu.py")
MODULES = "mid_block.attentions.0.proj_in", "mid_block.resnets.0.conv1", "time_embedding.linear_1"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA of rank 2 for sd15-small: a 1x1 and a 3x3 convolution and a product of the time embedding."""
    rng, tensors = np.random.default_rng(0), {}
    weights = open_preset("sd15-small", 0).load("unet").state_dict()
    for module in MODULES:
        out, *kernel = weights[f"{module}.weight"].shape
        tensors[f"unet.{module}.lora_A.weight"] = rng.standard_normal((2, *kernel), np.float32)
        tensors[f"unet.{module}.lora_B.weight"] = rng.standard_normal((out, 2, *[1] * (len(kernel) - 1)), np.float32)
    path = tmp_path_factory.mktemp("lora") / "adapter.safetensors"
    save_file(tensors, path)
    return path


def soak(folder: Path, provider: str, *options: object) -> list[str]:
    command = [sys.executable, SOAK, folder, "--provider", provider, "--scale", "0.125", *options]
    return [*map(str, command), "--out", str(folder.with_suffix(".json"))]


def check(folder: Path, tasks: list[str]) -> None:
    report: dict[str, Any] = json.loads(folder.with_suffix(".json").read_text())
    assert report["failures"] == []
    assert report["other_tasks"] == tasks
    assert set(report["lora_seconds"]) == {"load", "scale", "unload"}
    assert len(report["stages"]) == 10


def test_what_threads_did_when_a_run_was_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that another thread opens at that moment, and one that is open by then, are named with their times."""
    reasons: list[str] = []
    monkeypatch.setattr(bound_run, "report_failed_capture", lambda error: reasons.append(str(error)))
    opens, ends = threading.Event(), threading.Event()

    def create_session(path: Path) -> None:
        if path.parent.name == "unet":
            opens.set()
            ends.wait()

    monkeypatch.setattr(component_opener, "create_session", create_session)
    monkeypatch.setattr(soak_gpu, "device_megabytes", lambda: None)
    state = soak_gpu.Soak(Path(), "sdcuda", 1)
    with state.record_failed_captures():
        component_opener.create_session(Path("text_encoder/model.onnx"))
        thread = threading.Thread(target=component_opener.create_session, args=[Path("unet/model.onnx")], name="opens")
        thread.start()
        opens.wait()
        bound_run.report_failed_capture(SdOrtError("no memory"))
        ends.set()
        thread.join()
    (row,) = state.uncaptured
    assert (row["reason"], row["thread"], reasons) == ("no memory", "MainThread", ["no memory"])
    text, unet = row["openings"]
    assert (text["session"], unet["session"], unet["thread"], unet["end"]) == ("text_encoder", "unet", "opens", None)
    assert text["begin"] <= text["end"] <= unet["begin"] <= 0
    assert any("create_session" in line for line in row["stacks"]["opens"])
    assert component_opener.create_session is create_session


def test_cpu(
    small_export: Path, controlled: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """In this process, whose imports a process of its own would repeat."""
    folder, with_control = tmp_path / "cpu", tmp_path / "controlnet"
    optimize(small_export, folder, target="cpu", calibrate=False)
    optimize(controlled, with_control, target="cpu", calibrate=False)
    options = ["--controlnet", with_control, "--lora", adapter, "--lora-rounds", "2", "--requests", "6"]
    _, *command = soak(folder, "cpu", *options, "--steps", "2", "--pipelines", "1")
    monkeypatch.setattr(sys, "argv", command)
    assert soak_gpu.main() == 0, capsys.readouterr()
    check(folder, ["image to image", "inpainting", "ControlNet"])


@pytest.mark.usefixtures("tinygrad")
def test_simulated_gpu(small_export: Path, adapter: Path, tmp_path: Path) -> None:
    """An emulated image takes seconds: no other tasks, and pipelines open only while another one captures."""
    folder, components = tmp_path / "hip", ["text_encoder", "unet", "vae_decoder"]
    optimize(small_export, folder, target="hip", dtype="float16", calibrate=False, components=components)
    hip_library()
    options = ["--steps", "1", "--lora", adapter, "--lora-rounds", "2", "--requests", "2", "--pipelines", "0"]
    result = simulate("gfx1100", soak(folder, "hip", *options))
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    check(folder, [])
