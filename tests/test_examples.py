"""The examples and the commands of docs, each as a user runs it."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from PIL import Image

from sd_ort.cli import cli
from sd_ort.demo import MODEL_DIR
from sd_ort.export import exporter

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "examples" / "checkpoint.py"
EXAMPLES = sorted({*(ROOT / "examples").glob("*.py")} - {CHECKPOINT})
ARGUMENTS = {"gradio_app": ["--check"]}  # Gradio is not installed here: scripts/checks/gradio_app.py
TUTORIALS = sorted((ROOT / "docs" / "tutorial").glob("*.md"))
HOWTOS = [ROOT / "README.md", *sorted((ROOT / "docs" / "howto").glob("*.md"))]


def run_here(command: list[Any]) -> None:
    """Run a Python command line in this process, and the `sd-ort` commands that it runs. A process would import torch.

    A script is not `__main__`, which the processes of a benchmark would run again.
    """
    if command[1:3] == ["-m", "sd_ort"]:
        assert not cli.main(list(map(str, command[3:])), standalone_mode=False)
        return
    run = subprocess.run

    def run_sd_ort_here(words: list[Any], *args: Any, **options: Any) -> Any:
        if words[:3] != [sys.executable, "-m", "sd_ort"]:
            return run(words, *args, **options)
        with contextlib.chdir(options.get("cwd", ".")):
            return run_here(words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", list(map(str, command[1:])))
        patch.setattr(subprocess, "run", run_sd_ort_here)
        script = runpy.run_path(str(command[1]))
        if "main" in script:
            script["main"](standalone_mode=False)


def run_process(command: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}\n{result.stderr}"
    assert result.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example for a first image in a process of its own, the others in this one."""
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, str(example), *ARGUMENTS.get(example.stem, [])]
    if example.stem == "generate":
        run_process(command)
        return
    run_here(command)
    assert capsys.readouterr().out


def test_example_with_a_controlnet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ControlNet is a copy of the demo's U-Net with output convolutions that are not zero.

    By the faster exporter; tests/export has the default one, with ControlNets too.
    """
    torch.manual_seed(0)
    controlnet: Any = ControlNetModel.from_unet(UNet2DConditionModel.from_pretrained(MODEL_DIR, subfolder="unet"))
    for convolution in controlnet.controlnet_down_blocks:
        torch.nn.init.normal_(convolution.weight, std=0.02)
    controlnet.save_pretrained(tmp_path / "net")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(exporter.EXPORTERS, "dynamo", exporter.EXPORTERS["torchscript"])
    run_here([sys.executable, str(CHECKPOINT), "demo", "out.png", "net"])
    assert capsys.readouterr().out.endswith("out.png\n")
    with Image.open(tmp_path / "out.png") as image:
        assert image.size == (128, 128)


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of a tutorial, in their order, as the page shows them, benchmarks of fewer calls.

    The first command of the first page is a process. The page on reports has torch's row as well; tests/benchmark has
    others.
    """
    for folder in ("scripts", "sd_ort"):  # as in a clone
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    commands = [line.strip() for line in page.read_text().splitlines() if re.match("    (sd-ort|python) ", line)]
    assert commands
    for command in commands:
        words = [sys.executable, *shlex.split(command.replace("sd-ort", "-m sd_ort", 1).removeprefix("python "))]
        if "benchmark" in words:
            words += ["--steps", "2"]  # calls a run: 20 on the page
            words += ["--torch", "none"] if page.stem != "benchmark_report" else []
        if page.stem == "first_image" and command == commands[0]:
            run_process(words)
        else:
            run_here(words)


# --- How-to pages ---------------------------------------------------------------------------------------------------

# What a command of these pages needs that a test has not: a GPU, another application, minutes, or a server that ends.
NOT_RUN = re.compile(
    r"--provider (cuda|rocm|hip|sdcuda)|--target (cuda|rocm)|--gpus|build-ops|PATH/TO|^serve|^export|^uninstall-host"
    r"|^install-host|--mlperf|--profile|--ablation|--engines|MODEL.safetensors|--clear|--ip-adapter|^merge|^tune"
    r"|^optimize (RAW|MODEL)"
)
# Names in commands -> files that the test makes.
FILES = {"OUT": "fused", "RAW": "fused", "MODEL": "demo", "...": "a circle", "results/DIR": "old", "OLD": "old",
         "NEW": "new", "style.safetensors:0.8": f"{ROOT}/sd_ort/demo/loras/night.safetensors:0.8"}  # fmt: skip
SMALL = ["--steps", "2", "--height", "64", "--width", "64", "--seed", "1", "--provider", "cpu", "--overwrite"]


@pytest.fixture(scope="module")
def workplace(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the pages name."""
    folder = tmp_path_factory.mktemp("pages")
    shutil.copytree(demo_folder, folder / "fused")
    Image.new("RGB", (64, 64), "red").save(folder / "in.png")
    graph = '<ir_version: 10, opset_import: ["" : 20]> g (float[N, 4] x) => (float[N, 4] y) { y = Relu (x) }'
    onnx.save(onnx.parser.parse_model(graph), folder / "model.onnx")
    np.savez(folder / "runs.npz", x=np.ones((2, 4), np.float32))
    for name in ("old", "new"):
        (folder / name).mkdir()
        shutil.copy(ROOT / "results" / "benchmark_demo_cpu" / "benchmark.json", folder / name)
    return folder


def commands_of(page: Path) -> list[str]:
    """Return the commands of a page without `sd-ort`, comments and doubled spaces."""
    lines = re.findall(r"^    sd-ort +(.+)$", page.read_text(), re.MULTILINE)
    return [re.sub(" +", " ", re.sub(" +#.*", "", line)) for line in lines]


RUN = [(page, command) for page in HOWTOS for command in commands_of(page) if not NOT_RUN.search(command)]


def test_most_kinds_of_commands_are_run() -> None:
    assert {"generate", "optimize", "verify", "explain", "report", "cache", "doctor"} <= {c.split()[0] for _, c in RUN}


@pytest.mark.parametrize(("page", "command"), RUN, ids=lambda value: getattr(value, "stem", value))
def test_howto(page: Path, command: str, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command of a page, with the page's names replaced by files, and images of few steps."""
    monkeypatch.chdir(workplace)
    words = [FILES.get(word, word) for word in shlex.split(command)]
    words += SMALL if words[0] == "generate" else []
    words += ["--steps", "10"] if "--cache" in words else []  # the fewest
    assert not cli.main(words, standalone_mode=False)
