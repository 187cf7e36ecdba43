"""Run sd-ort's wheel for Windows in Python for Windows, under Wine.

    pip install ziglang && apt-get install wine64
    python -m scripts.checks.windows_python --log results/windows_python.txt    # 10 minutes, of which 5 cross-compile

CPython's DLL and extension modules are those that the win_amd64 wheel of panda3d carries for frozen programs, the
standard library is that of this Python (3.11 too), other packages are win_amd64 wheels from PyPI. zig compiles
python.exe and python3.dll, and what Wine 8 lacks: complex functions of the C runtime and bcryptprimitives.dll. Runs

- windows_locks.py: locks of files between processes, folders that replace others, caches;
- `sd-ort --help`, `doctor`, `optimize demo` and `generate`, whose image is compared with that of Linux.

With --hip the wheel has operators and provider for AMD. `doctor` and `generate --provider hip` run on a simulated GPU:
its runtime is that of Linux, which amdhip64_7.dll calls. It needs `apt-get install wine64-tools libwine-dev`, and
`sd-ort build-ops --hip gfx1100` for the image of Linux.

    scripts/amd/simulate gfx1100 --only-hip -- python -m scripts.checks.windows_python --hip gfx1100
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pip
from PIL import Image

from scripts.checks import windows_sources, windows_wheel
from scripts.checks.windows import Wine, windows_path
from scripts.checks.windows_sources import ROOT, command_of
from sd_ort.core.cache import cache_folder
from sd_ort.runtime import machine
from sd_ort.runtime.library import sources_hash

SOURCES = ROOT / "scripts/checks"
PYTHON = "panda3d==1.10.16"  # the last wheel for CPython 3.11 whose DLL was tried
PACKAGES = (
    "click jinja2 markupsafe numpy ml-dtypes msgspec packaging psutil pillow safetensors threadpoolctl onnx onnx-ir "
    "onnxscript onnx-graphsurgeon tokenizers tqdm onnxruntime typing-extensions flatbuffers protobuf huggingface-hub "
    "filelock fsspec pyyaml sympy mpmath"
).split()
RUNTIME = b"api-ms-win-crt-math-l1-1-0.dll"  # Wine takes this for ucrtbase.dll, whatever is in the folder
OURS = b"crtmath.dll"
# Functions of the C runtime whose stubs end a program.
COMPLEX = "real imag abs arg exp log sqrt pow sin cos tan sinh cosh tanh asin acos atan asinh acosh atanh".split()
MAIN = """
#include <windows.h>
int wmain(int count, wchar_t** arguments) {
  int (*run)(int, wchar_t**) = (int (*)(int, wchar_t**))GetProcAddress(LoadLibraryW(L"python311.dll"), "Py_Main");
  return run ? run(count, arguments) : 99;
}
"""
ENTRY = "int DllMainCRTStartup(void* module, unsigned reason, void* reserved) { return 1; }\n"
RANDOM = """
__declspec(dllimport) unsigned char SystemFunction036(void*, unsigned long);
__declspec(dllexport) int ProcessPrng(unsigned char* data, unsigned long long size) {
  return SystemFunction036(data, (unsigned long)size);
}
"""
SIZE = ("--steps", "2", "--height", "64", "--width", "64", "--seed", "0", "--overwrite")
LARGEST = 1  # of 255: sums are taken in another order
# What the libraries for AMD and custom_ops/rocm.py call, with the functions of HIP's headers that are macros.
_TABLE = (ROOT / "custom_ops/common/vendors/hip_runtime.h").read_text()
HIP_FUNCTIONS = {
    *re.findall(r"SD_ORT_HIP_FUNCTION\((hip\w+)\)", _TABLE),
    *"__hipRegisterFatBinary __hipRegisterFunction __hipPushCallConfiguration __hipPopCallConfiguration".split(),
    *"hipGetDevicePropertiesR0600 hipLaunchKernel hipDeviceGetName hipDeviceGetPCIBusId".split(),
} - {"hipGetDeviceProperties"}


def exported(library: Path) -> list[str]:
    """Return the names that a DLL exports."""
    data = library.read_bytes()

    def integer(at: int) -> int:
        return int(struct.unpack_from("<I", data, at)[0])

    header = integer(0x3C)
    count, optional = struct.unpack_from("<H12xH", data, header + 6)
    sections = [struct.unpack_from("<8xIIII", data, header + 24 + optional + 40 * i) for i in range(count)]

    def offset(address: int) -> int:
        return next(raw + address - begin for size, begin, _, raw in sections if begin <= address < begin + size)

    table = offset(integer(header + 24 + 112))
    names = [offset(integer(offset(integer(table + 32)) + 4 * i)) for i in range(integer(table + 24))]
    return [data[name : data.index(b"\0", name)].decode() for name in names]


def forwarder(names: list[str], library: str, own: dict[str, str]) -> str:
    """Return a module definition of functions that are those of `library`, or `own` ones by other names."""
    lines = [f"{name}={own.get(name) or f'{library}.{name}'}" for name in names]
    return "\n".join(["EXPORTS", *lines, ""])


def download(folder: Path, *packages: str) -> list[Path]:
    """Return the wheels of packages for Windows."""
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "-q", "--no-deps"]
    tags = ["--only-binary=:all:", "--platform", "win_amd64", "--python-version", "3.11"]
    windows_sources.run([*pip, *tags, "-d", str(folder), *packages])
    return sorted(folder.glob("*.whl"))


def compile_python(zig: str, home: Path, math: list[str]) -> None:
    """Compile python.exe, python3.dll and the two DLLs of functions that Wine lacks."""
    own = {f"{prefix}{name}{f}": f"my_{prefix}{name}{f}" for name in COMPLEX for prefix in ("c",) for f in ("", "f")}
    own |= {"conj": "my_conj", "conjf": "my_conjf"}
    texts = {
        "python.c": MAIN,
        "entry.c": ENTRY,
        "random.c": RANDOM,
        "python3.def": forwarder(exported(home / "python311.dll"), "python311", {}),
        "math.def": forwarder(math, "ucrtbase", own),
    }
    with tempfile.TemporaryDirectory() as work:
        for name, text in texts.items():
            Path(work, name).write_text(text)
        commands = {
            "python.exe": ["-municode", "python.c"],
            "python3.dll": ["-shared", "-nostdlib", "entry.c", "python3.def"],
            "bcryptprimitives.dll": ["-shared", "random.c", "-ladvapi32"],
            OURS.decode(): ["-shared", "-fno-builtin", str(SOURCES / "windows_complex.c"), "math.def"],
        }
        for name, command in commands.items():
            target = ["cc", "-target", "x86_64-windows-gnu", "-O1", "-o", str(home / name)]
            words = [str(Path(work, word)) if word in texts else word for word in command]
            windows_sources.run([zig, *target, *words])


def make_python(zig: str, home: Path) -> None:
    """Put Python for Windows and sd-ort's dependencies into the folder `home`."""
    packages = home / "Lib/site-packages"
    unneeded = shutil.ignore_patterns(
        "__pycache__", "site-packages", "test", "idlelib", "ensurepip", "*.so", "config-*"
    )
    shutil.copytree(Path(shutil.__file__).parent, home / "Lib", ignore=unneeded)
    packages.mkdir()
    with tempfile.TemporaryDirectory() as work:
        (panda,) = download(Path(work), PYTHON)
        math = Path(work, "math.dll")
        with zipfile.ZipFile(panda) as archive:
            for name in archive.namelist():
                if name.startswith("deploy_libs/") and name.endswith((".dll", ".pyd")) and "api-ms" not in name:
                    (home / Path(name).name).write_bytes(archive.read(name))
            math.write_bytes(archive.read(f"deploy_libs/{RUNTIME.decode()}"))
        compile_python(zig, home, exported(math))
        panda.unlink()
        for wheel in download(Path(work), *(f"{name}=={version(name)}" for name in PACKAGES), "colorama"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(packages)
    for path in [*packages.rglob("*.pyd"), *packages.rglob("*.dll")]:
        if RUNTIME in (data := path.read_bytes()):
            path.write_bytes(data.replace(RUNTIME, OURS.ljust(len(RUNTIME), b"\0")))


def install_wheel(wine: Wine, home: Path, wheel: Path) -> None:
    """Install sd-ort by pip, which is Linux's: it has no compiled code."""
    shutil.copytree(Path(pip.__file__).parent, home / "Lib/site-packages/pip")
    options = ("--quiet", "--no-index", "--no-deps", "--no-warn-script-location", "--disable-pip-version-check")
    wine.run(home / "python.exe", "-P", "-m", "pip", "install", *options, wheel, timeout=900)


def compare_images(wine: Wine, home: Path, model: Path, provider: str) -> str:
    """Generate an image on Windows and on Linux, from the same folder. Returns a line, and exits if they differ."""
    images = [model.parent / f"{system}-{provider}.png" for system in ("windows", "linux")]
    words = ["generate", "a red circle", "--provider", provider, *SIZE, "--model"]
    wine.run(home / "python.exe", "-P", "-m", "sd_ort", *words, model, "--out", images[0], timeout=1800)
    linux = [sys.executable, "-m", "sd_ort", *words, str(model), "--out", str(images[1])]
    subprocess.run(linux, check=True, cwd=ROOT)
    windows, expected = (np.asarray(Image.open(path).convert("RGB"), np.int16) for path in images)
    largest = int(np.abs(windows - expected).max())
    line = f"optimize demo, generate --provider {provider}: at most {largest} of 255 from the image on Linux"
    if largest > LARGEST:
        sys.exit(line)
    return line


def install_simulated_hip(wine: Wine, folder: Path) -> None:
    """Put amdhip64_7.dll into Windows' folder of libraries: functions of libamdhip64.so of the simulated ROCm."""
    if "SIMULATED_HIP_TARGET" not in os.environ:
        sys.exit("no simulated GPU: run this through scripts/amd/simulate")
    runtime = Path(os.environ["LD_LIBRARY_PATH"].split(":")[0]) / "libamdhip64.so.7"
    functions, spec, builtin = folder / "functions", folder / "amdhip64_7.spec", folder / "amdhip64_7.dll.so"
    functions.write_text("".join(f"FORWARD({name})\n" for name in HIP_FUNCTIONS))
    spec.write_text("".join(f"@ cdecl {name}() windows_{name}\n" for name in HIP_FUNCTIONS))
    flags = ["-std=c++17", "-O1", "-fPIC", "-D__HIP_PLATFORM_AMD__", f'-DFUNCTIONS="{functions}"']
    source, object_file = SOURCES / "windows_amdhip64.cc", folder / "bridge.o"
    windows_sources.run(
        ["g++", *flags, f"-I{windows_sources.hip_headers()}", "-c", str(source), "-o", str(object_file)]
    )
    windows_sources.run(["wineg++", "-shared", str(spec), str(object_file), str(runtime), "-o", str(builtin)])
    dll = wine.prefix / "drive_c/windows/system32/amdhip64_7.dll"  # which Wine takes for the one on WINEDLLPATH
    fake = ["winebuild", "--dll", "--fake-module", "-m64", "-E", str(spec), "-F", dll.name, "-o", str(dll)]
    windows_sources.run(fake)
    wine.environment["WINEDLLPATH"] = str(folder)


def check_hip(wine: Wine, home: Path, work: Path) -> list[str]:
    """Run the commands on the simulated GPU and return a line each."""
    doctor = wine.run(home / "python.exe", "-P", "-m", "sd_ort", "doctor", timeout=900).splitlines()
    lines_of_gpus = [line for line in doctor if line.startswith(("AMD ", "HIP ", "hip "))]
    lines = [" ".join(line.replace(windows_path(home), "PYTHON").split()) for line in lines_of_gpus]
    target = os.environ["SIMULATED_HIP_TARGET"]
    if not any(line.startswith("AMD GPU 0") and target in line for line in lines_of_gpus):
        sys.exit(f"doctor does not name {target}:\n" + "\n".join(doctor))
    model = work / "demo-hip"
    words = ("-P", "-m", "sd_ort", "optimize", "demo", model, "--target", "hip", "--float16", "--overwrite")
    wine.run(home / "python.exe", *words, timeout=900)
    return [*lines, compare_images(wine, home, model, "hip")]


def check(wine: Wine, home: Path, work: Path) -> list[str]:
    """Run the commands and return a line each."""

    def python(*words: str | Path) -> str:
        return wine.run(home / "python.exe", *words, timeout=900)

    claims = python(SOURCES / "windows_locks.py").splitlines()
    lines = [f"locks, folders, files: {sum(claim.startswith('holds: ') for claim in claims)} checks hold"]
    version = wine.run(home / "Scripts/sd-ort.exe", "--version")
    lines.append(f"pip install, {version}: {python('--version')}")
    if "generate" not in python("-P", "-m", "sd_ort", "--help"):
        sys.exit("sd-ort --help does not list its commands")
    doctor = python("-P", "-m", "sd_ort", "doctor").splitlines()
    lines_of_library = [line for line in doctor if line.startswith(("op library", "cpu "))]
    lines += [" ".join(line.replace(windows_path(home), "PYTHON").split()) for line in lines_of_library]
    if "libsd_ort_ops.dll" not in lines_of_library[0]:
        sys.exit(f"the wheel's library is not found: {lines_of_library[0]}")
    model = work / "demo"
    python("-P", "-m", "sd_ort", "optimize", "demo", model, "--target", "cpu", "--overwrite")
    return [*lines, compare_images(wine, home, model, "cpu")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zig", type=Path, help="the program of this name")
    parser.add_argument("--wheel", type=Path, help="sd-ort's wheel for Windows, made before")
    parser.add_argument("--log", type=Path, help="write the report there too")
    windows_wheel.add_hip_option(parser)
    options = parser.parse_args()
    compiler = command_of(options.zig)
    targets = list(filter(None, options.hip.split(",")))
    work = cache_folder() / "windows"
    with tempfile.TemporaryDirectory() as scratch:
        wheel = options.wheel or windows_wheel.make(compiler, Path(scratch), targets)
        home = Path(scratch, "python")
        make_python(compiler[0], home)
        wine = Wine(work / "python-prefix")
        wine.environment |= {"PYTHONPATH": "", "OMP_NUM_THREADS": "1", "LOCALAPPDATA": windows_path(Path(scratch))}
        wine.run(Path("winecfg"), "-v", "win10")  # a new prefix is Windows 7 to programs
        install_wheel(wine, home, wheel)
        lines = check(wine, home, Path(scratch))
        if targets:
            install_simulated_hip(wine, Path(scratch))
            lines += check_hip(wine, home, Path(scratch))
    emulator = windows_sources.run([wine.program, "--version"]).splitlines()[-1]
    report = [
        f"commit {machine.commit()}, sources {sources_hash()}; {emulator}, {wheel.name}",
        *lines,
        "never ran: Windows itself, an AMD GPU",
    ]
    windows_sources.write_report(report, options.log)


if __name__ == "__main__":
    main()
