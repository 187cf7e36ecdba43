"""scripts/amd/first_numbers: its environment, and what it runs when steps fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/amd/first_numbers"
OUT = "results/amd/first_numbers_gfx1100"

# Stands for .venv/bin/sd-ort: it records its arguments, creates a folder named last, fails where $FAILING is said, and
# hangs where $HANGING is.
SD_ORT = """#!/bin/bash
echo "$*" >> calls
case "$*" in *$FAILING*) exit 1 ;; *$HANGING*) exec sleep 60 ;; esac
case $1 in export | optimize) for last; do [ "${last#--}" = "$last" ] && case $last in out/*) made=$last ;; esac; done
  mkdir -p "$made" ;; esac
"""

STEPS = [
    "build-ops --hip gfx1100",
    "doctor",
    "export demo",
    "optimize out/amd/demo/raw",
    "benchmark out/amd/demo/ours",
    "generate",
    "export --preset sd15",
    "optimize out/amd/sd15/raw",
    "benchmark out/amd/sd15/ours",
    "benchmark out/amd/sd15/ours",
]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the script and stand-ins of what it calls."""
    (tmp_path / "scripts/amd").mkdir(parents=True)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    shutil.copy(SCRIPT, tmp_path / "scripts/amd")
    (tmp_path / "scripts/amd/expected.py").write_text("import sys\nprint('compared:', *sys.argv[1:])\n")
    program(tmp_path / ".venv/bin/sd-ort", SD_ORT)
    program(tmp_path / ".venv/bin/python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program(tmp_path / ".venv/bin/cmake", "#!/bin/sh\n")
    program(tmp_path / "scripts/setup", "#!/bin/sh\nexit 1\n")
    return tmp_path


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def run(
    checkout: Path, failing: str = "nothing", **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The script's result, and the arguments of its calls of sd-ort."""
    command = [str(checkout / "scripts/amd/first_numbers"), "gfx1100"]
    environment = os.environ | {"FAILING": failing, "HANGING": "nothing"} | variables
    environment.pop("TORCH_INDEX", None)
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    calls = checkout / "calls"
    return result, calls.read_text().splitlines() if calls.is_file() else []


def begin_with(calls: list[str], steps: list[str]) -> bool:
    return len(calls) == len(steps) and all(call.startswith(step) for call, step in zip(calls, steps, strict=True))


def test_every_step_runs(checkout: Path) -> None:
    result, calls = run(checkout)
    assert result.returncode == 0
    assert begin_with(calls, STEPS)
    assert "Failed" not in result.stdout
    assert re.search(f"compared: --compare {OUT} --target gfx1100 --seconds [0-9]+\n", result.stdout)
    assert result.stdout.endswith(f"Done: please send us the file {OUT}.tar.gz, whatever is in it.\n")


def test_one_file_has_all_that_was_measured(checkout: Path) -> None:
    """The log to its last line included, also when steps fail."""
    (checkout / "results/tuning").mkdir(parents=True)
    (checkout / "results/tuning/gfx1100.json").write_text("{}")
    (checkout / "results/tuning/.gfx1100.json.lock").touch()
    run(checkout, "generate")
    with tarfile.open(checkout / f"{OUT}.tar.gz") as archive:
        names = set(archive.getnames())
        log = archive.extractfile("first_numbers_gfx1100/log.txt")
        assert log is not None
        assert log.read().decode().endswith("Failed: generate demo\n")
    assert {"first_numbers_gfx1100/doctor.json", "first_numbers_gfx1100/tuning/gfx1100.json"} <= names
    assert not any(name.endswith(".lock") for name in names)


def test_a_step_that_hangs_is_ended(checkout: Path) -> None:
    result, calls = run(checkout, HANGING="generate", STEP_SECONDS="1")
    assert result.returncode == 1
    assert begin_with(calls, STEPS)
    assert "Failed: generate demo\n" in result.stdout


@pytest.mark.parametrize(("version", "arguments"), [("None", " --torch none"), ("'7.2'", "")])
def test_torch_without_a_gpu_is_not_timed_on_large_models(checkout: Path, version: str, arguments: str) -> None:
    (checkout / "torch.py").write_text(f"class version:\n    hip = {version}\n")
    program(checkout / ".venv/bin/python", f'#!/bin/sh\nPYTHONPATH=. exec {sys.executable} "$@"\n')
    _, calls = run(checkout)
    assert next(call for call in calls if "--component unet" in call).endswith(
        f"--component unet --steps 2 --runs 3{arguments}"
    )
    assert "--torch" not in next(call for call in calls if call.startswith("benchmark out/amd/demo"))


def test_a_failed_step_does_not_end_the_others(checkout: Path) -> None:
    result, calls = run(checkout, "benchmark out/amd/demo")
    assert result.returncode == 1
    assert begin_with(calls, STEPS)
    assert "Failed: benchmark demo\n" in result.stdout


def test_without_kernels_the_machine_is_still_described(checkout: Path) -> None:
    result, calls = run(checkout, "build-ops")
    assert result.returncode == 1
    assert begin_with(calls, STEPS[:2])
    assert "Failed: build-ops\n" in result.stdout


def test_an_environment_without_onnxruntime_is_set_up(checkout: Path) -> None:
    """With our provider's ONNX Runtime, and torch from PyTorch's index for ROCm."""
    program(checkout / ".venv/bin/python", "#!/bin/sh\n[ -e has_onnxruntime ]\n")
    program(checkout / "scripts/setup", '#!/bin/sh\necho "$* $TORCH_INDEX" > set_up\ntouch has_onnxruntime\n')
    result, calls = run(checkout)
    assert result.returncode == 0
    assert (checkout / "set_up").read_text() == "hip https://download.pytorch.org/whl/rocm7.2\n"
    assert begin_with(calls, STEPS)


def test_a_failed_setup_says_what_to_do(checkout: Path) -> None:
    program(checkout / ".venv/bin/python", "#!/bin/sh\nexit 1\n")
    result, calls = run(checkout)
    assert result.returncode == 1
    assert calls == []
    assert "No environment: see above, and run this again.\n" in result.stdout
