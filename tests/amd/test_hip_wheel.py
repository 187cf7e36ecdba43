"""The wheel with prebuilt kernels for AMD: it generates in an environment without compilers."""

from __future__ import annotations

import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from compiled_files import installed_wheel
from hip_library import HIP_WHEEL, TARGETS, copying_compiler, hip_library
from PIL import Image
from simulation import simulate

from custom_ops.amd_targets import TARGETS as SUPPORTED
from custom_ops.amd_targets import WHEEL_TARGETS, kernel_targets
from custom_ops.libraries import GpuLibrary
from scripts.amd import wheel_size
from sd_ort.runtime.build import wheel_options
from sd_ort.stages import optimize

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("libsd_ort_ops.so", "libsd_ort_hip.so", "libsd_ort_ep_hip.so")
COMPONENTS = ["text_encoder", "unet", "vae_decoder"]


def run(*command: object, **environment: str) -> None:
    done = subprocess.run(
        [*map(str, command)], env=environment or None, cwd="/", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As scripts/build_wheels --hip makes it, but the libraries for AMD are those of the other tests."""
    if HIP_WHEEL:
        return Path(HIP_WHEEL)
    work = tmp_path_factory.mktemp("wheel")
    built = hip_library().parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HIPCXX", str(copying_compiler(work)))
        patch.setenv("BUILT", str(built))
        patch.delenv("PYTHONPATH", raising=False)
        pip = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
        run(*pip, *wheel_options(TARGETS), "--wheel-dir", work / "made", ROOT)
    (path,) = (work / "made").iterdir()
    return path


def test_the_wheel_carries_the_libraries(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.endswith(".so")}
        assert names == {f"custom_ops/{name}" for name in LIBRARIES}
        _, operators, provider = (Path(archive.extract(f"custom_ops/{name}", tmp_path)) for name in LIBRARIES)
    targets = sorted(TARGETS)
    assert kernel_targets(provider) == targets
    assert operators.stat().st_size < 20_000  # loads the provider, whose functions these are
    assert GpuLibrary(operators).c.sd_ort_op_count() == GpuLibrary(provider).c.sd_ort_op_count() > 0
    assert wheel_size.main([wheel], tmp_path / "wheel.md") == 0  # small, and no library needs a newer glibc
    written = (tmp_path / "wheel.md").read_text()
    assert f"| libsd_ort_ep_hip.so | {', '.join(targets)} |" in written


def test_the_targets_of_the_wheel_are_supported() -> None:
    assert set(WHEEL_TARGETS) <= SUPPORTED.keys()


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """The folder of programs of an environment with the wheel."""
    return installed_wheel(wheel, tmp_path, run)


@pytest.mark.usefixtures("tinygrad")
def test_the_wheel_generates_without_compilers(installed: Path, small_export: Path, tmp_path: Path) -> None:
    """On the simulated GPU. Its emulator alone, a process of its own, has a compiler on its PATH."""
    seed = ["--height", "64", "--width", "64", "--steps", "1", "--seed", "0"]
    generate = ["generate", "a cat", *seed, "--model", str(tmp_path / "hip"), "--provider", "hip"]
    optimize(small_export, tmp_path / "hip", target="hip", dtype="float16", components=COMPONENTS)
    variables = simulate("gfx1100", ["env", "-0"]).stdout.rstrip("\0").split("\0")
    environment = dict(line.split("=", 1) for line in variables)
    path, compiler = environment["PATH"], environment["SIMULATED_HIP_COMPILER"]
    (tmp_path / "empty").mkdir()
    environment |= {
        "PATH": str(tmp_path / "empty"),
        "SIMULATED_HIP_COMPILER": f"/usr/bin/env PATH={shlex.quote(path)} PYTHONPATH= {compiler}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": "",
    }
    run(installed / "sd-ort", *generate, "--out", tmp_path / "hip.png", **environment)
    optimize(small_export, tmp_path / "cpu", target="cpu", components=COMPONENTS)
    cpu = [*generate[:-4], "--model", str(tmp_path / "cpu"), "--provider", "cpu"]
    run(installed / "sd-ort", *cpu, "--out", tmp_path / "cpu.png", **environment)
    images = [np.asarray(Image.open(tmp_path / f"{name}.png"), np.int16) for name in ("hip", "cpu")]
    assert np.abs(images[0] - images[1]).mean() < 2
