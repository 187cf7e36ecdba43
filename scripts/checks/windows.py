"""Run the libraries for Windows under Wine, in Microsoft's onnxruntime.dll, and compare with Linux.

    pip install ziglang && apt-get install wine64                # clang with Windows' headers; Wine
    python -m scripts.checks.windows --log results/windows.txt    # 10 minutes; one later

Cross-compiles libsd_ort_ops.dll, libsd_ort_ep_simulated.dll (windows_sources.py) and two programs. Then:

- The demo's U-Net and VAE decoder in float32 run in onnxruntime.dll of the win_amd64 wheel of the installed version,
  with the operator library and with the provider on the simulated device. The output is that of Linux.
- The table of HIP functions, which the libraries for AMD use, finds amdhip64_7.dll and amdhip64_6.dll: a stand-in with
  one function, in the process, in %HIP_PATH% and on %PATH%.

No Python runs there, and no kernel of a GPU: libraries for AMD and NVIDIA are not built for Windows.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from scripts.checks import windows_sources
from scripts.checks.windows_sources import ROOT, command_of
from sd_ort.core.cache import cache_folder
from sd_ort.core.pipeline_folder import MODEL
from sd_ort.runtime import build, machine
from sd_ort.runtime.headers import find_headers
from sd_ort.runtime.library import sources_hash
from sd_ort.runtime.session import create_session
from sd_ort.stages import optimize

SOURCES = ROOT / "scripts/checks"
COMPONENTS = ("unet", "vae_decoder")
TOLERANCE = 1e-4  # relative L2: sums are taken in another order
FLAGS = ("-std=c++17", "-O1")
# hipGetDeviceCount alone, of a machine with as many GPUs as the version's number.
HIP = 'extern "C" __declspec(dllexport) int hipGetDeviceCount(int* count) { return *count = VERSION, 0; }\n'


class Wine:
    """Windows programs in a folder of their own."""

    def __init__(self, prefix: Path) -> None:
        program = shutil.which("wine64") or shutil.which("wine")
        if program is None:
            sys.exit("no Wine: apt-get install wine64")
        self.program, self.prefix = program, prefix
        prefix.parent.mkdir(parents=True, exist_ok=True)  # Wine makes its own folder, but not the one above
        self.environment = {
            **os.environ,
            "WINEPREFIX": str(prefix),
            "WINEDEBUG": "-all",
            "WINEDLLOVERRIDES": "mscoree=",
        }

    def run(self, program: Path, *arguments: str | Path, timeout: float = 300, **variables: str) -> str:
        """Return what a program prints. Exits with it if the program fails."""
        words = [windows_path(each) if isinstance(each, Path) else each for each in arguments]
        command = [self.program, str(program), *words]
        options: dict[str, Any] = {"env": self.environment | variables, "timeout": timeout, "check": False}
        options["stdin"] = subprocess.DEVNULL
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", **options)
        if done.returncode:
            sys.exit(f"{program.name} {' '.join(words)}: ended with {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout.strip()


def windows_path(path: Path) -> str:
    """Return the name of a file as Wine's programs see it."""
    return "Z:" + str(path.absolute()).replace("/", "\\")


def fetch_onnxruntime(folder: Path) -> Path:
    """Return onnxruntime.dll of the installed version, from its wheel for Windows."""
    library = folder / "onnxruntime/capi/onnxruntime.dll"
    if not library.is_file():
        wheel = f"onnxruntime=={version('onnxruntime')}"
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--disable-pip-version-check",
            "--no-deps",
            "--only-binary=:all:",
        ]
        windows_sources.run([*pip, "--platform", "win_amd64", "--python-version", "3.11", "-d", str(folder), wheel])
        (path,) = folder.glob("onnxruntime-*.whl")
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder)
        path.unlink()
    return library


def write_inputs(folder: Path, inputs: Mapping[str, np.ndarray]) -> None:
    """Write inputs as windows_run.cc reads them."""
    lines = []
    for name, array in inputs.items():
        kind = {"float32": "f", "int64": "i"}[str(array.dtype)]
        lines.append(" ".join([name, kind, str(array.ndim), *map(str, array.shape)]))
        (folder / f"{name}.bin").write_bytes(array.tobytes())
    (folder / "inputs.txt").write_text("\n".join(lines) + "\n")


def check_models(wine: Wine, program: Path, ort: Path, libraries: Path, work: Path) -> list[str]:
    """Run the demo's components on Windows' libraries; a line each. Exits if one differs from Linux."""
    for target in ("cpu", "gpu"):
        if not (work / target).is_dir():
            optimize("demo", work / target, target=target, components=list(COMPONENTS), hoist=False)
    cases = {"library": ("cpu", "libsd_ort_ops.dll"), "provider": ("gpu", "libsd_ort_ep_simulated.dll")}
    random, lines = np.random.default_rng(0), []
    for component in COMPONENTS:
        session = create_session(work / "cpu" / component / MODEL)
        sizes = {"batch": 2, "sequence": 77, "height": 16, "width": 8}
        inputs = {}
        for value in session.get_inputs():
            shape = [sizes.get(axis, axis) for axis in value.shape]
            is_float = value.type == "tensor(float)"
            inputs[value.name] = random.standard_normal(shape, np.float32) if is_float else np.full(shape, 500)
        expected = session.run(None, inputs)[0]
        for kind, (target, name) in cases.items():
            with tempfile.TemporaryDirectory(dir=work) as folder:
                write_inputs(Path(folder), inputs)
                model = work / target / component / MODEL
                printed = wine.run(program, ort, model, Path(folder), kind, libraries / name)
                output = np.fromfile(Path(folder) / "output.bin", np.float32).reshape(expected.shape)
            error = float(np.linalg.norm(output - expected) / np.linalg.norm(expected))
            lines.append(f"{name}, demo's {component}: error {error:.1e} of Linux; {', '.join(printed.splitlines())}")
            if not error < TOLERANCE:
                sys.exit(lines[-1])
    return lines


def check_hip(wine: Wine, compiler: list[str], headers: Path, work: Path) -> list[str]:
    """Check where the table of HIP functions finds its library; a line each. Exits at a wrong place."""
    table = ROOT / "custom_ops/common/vendors/hip_runtime.cc"
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        folder = Path(scratch)
        program = folder / "program/windows_hip.exe"
        includes = ["-D__HIP_PLATFORM_AMD__", f"-I{ROOT / 'custom_ops'}", f"-I{headers}"]
        program.parent.mkdir()
        link = [*compiler, *FLAGS, *includes, str(SOURCES / "windows_hip.cc"), str(table), "-o", str(program)]
        windows_sources.run(link)
        (folder / "hip.cc").write_text(HIP)
        places = {"sdk/bin/amdhip64_7.dll": 7, "path/amdhip64_6.dll": 6, "torch/amdhip64_7.dll": 7}
        for location, number in places.items():
            (folder / location).parent.mkdir(parents=True)
            build_library = [*compiler, "-shared", f"-DVERSION={number}", str(folder / "hip.cc")]
            windows_sources.run([*build_library, "-o", str(folder / location)])
        sdk, path, torch = (folder / library for library in places)
        root = windows_path(sdk.parents[1])
        cases = {  # location -> what the program prints, the end of the library's path, error and number of GPUs
            "in %HIP_PATH%": (wine.run(program, HIP_PATH=root), f"bin/{sdk.name}", "0 7"),
            "on %PATH%": (wine.run(program, WINEPATH=windows_path(path.parent)), path.name, "0 6"),
            "in the process": (wine.run(program, torch, HIP_PATH=root), f"torch/{torch.name}", "0 7"),
            "nowhere": (wine.run(program), "set HIP_PATH to its folder.", "303 -1"),
        }
        for location, (output, end, numbers) in cases.items():
            library, *rest = output.replace("\\", "/").splitlines()
            if not library.endswith(end) or rest != [numbers]:
                sys.exit(f"HIP runtime {location}: expected {end} and {numbers}, got {output!r}")
        return [f"HIP runtime {place}: {end}" for place, (_, end, _) in cases.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zig", type=Path, help="the program of this name")
    parser.add_argument("--hip-headers", type=Path, help="include folder of ROCm [scripts/amd/rocm_headers.py]")
    parser.add_argument("--build", type=Path, help="build folder, kept for the next time [in the cache]")
    parser.add_argument("--log", type=Path, help="write the report there too")
    options = parser.parse_args()
    work = cache_folder() / "windows"
    work.mkdir(parents=True, exist_ok=True)
    compiler, headers = command_of(options.zig), find_headers(api=build.PROVIDER_API)
    wine = Wine(work / "prefix")
    lines = check_hip(wine, compiler, options.hip_headers or windows_sources.hip_headers(), work)
    libraries = options.build or work / "build"
    windows_sources.libraries(compiler, headers, libraries)
    program = work / "windows_run.exe"
    windows_sources.run([*compiler, *FLAGS, f"-I{headers}", str(SOURCES / "windows_run.cc"), "-o", str(program)])
    lines += check_models(wine, program, fetch_onnxruntime(work), libraries, work)
    zig = windows_sources.run([compiler[0], "version"]).strip()
    emulator = windows_sources.run([wine.program, "--version"]).splitlines()[-1]
    report = [
        f"commit {machine.commit()}, sources {sources_hash()}; zig {zig}, {emulator}, "
        f"onnxruntime {version('onnxruntime')}",
        *lines,
        "never ran: Windows itself, Python there, kernels of a GPU",
    ]
    windows_sources.write_report(report, options.log)


if __name__ == "__main__":
    main()
