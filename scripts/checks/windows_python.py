"""Run sd-ort's wheel for Windows in Python for Windows, under Wine.

    pip install ziglang && apt-get install wine64
    python -m scripts.checks.windows_python --log results/windows_python.txt    # 10 minutes, of which 5 cross-compile

CPython's DLL and extension modules are those that the win_amd64 wheel of panda3d carries for frozen programs, the
standard library is that of this Python (3.11 too), other packages are win_amd64 wheels from PyPI. zig compiles
python.exe and python3.dll, and what Wine 8 lacks: complex functions of the C runtime and bcryptprimitives.dll. Runs

- windows_locks.py: locks of files between processes, folders that replace others, caches;
- `sd-ort --help`, `doctor`, `optimize demo` and `generate`, whose image is compared with that of Linux.
"""

from __future__ import annotations

import argparse
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
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
SIZE = ("--steps", "2", "--height", "64", "--width", "64", "--seed", "0", "--provider", "cpu", "--overwrite")
LARGEST = 1  # of 255: sums are taken in another order


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


def draw_on_linux(model: Path, image: Path) -> None:
    """Generate the image that Windows' is compared with, from the same folder."""
    command = [sys.executable, "-m", "sd_ort", "generate", "a red circle", "--model", str(model), *SIZE]
    subprocess.run([*command, "--out", str(image)], check=True, cwd=ROOT)


def check(wine: Wine, home: Path, work: Path) -> list[str]:
    """Run the commands and return a line each."""

    def python(*words: str | Path) -> str:
        return wine.run(home / "python.exe", *words, timeout=900)

    claims = python(SOURCES / "windows_locks.py").splitlines()
    lines = [f"locks, folders, files: {sum(claim.startswith('holds: ') for claim in claims)} checks hold"]
    lines.append(f"{python('-m', 'sd_ort', '--version')}: Python {python('--version').removeprefix('Python ')}")
    if "generate" not in python("-P", "-m", "sd_ort", "--help"):
        sys.exit("sd-ort --help does not list its commands")
    doctor = python("-P", "-m", "sd_ort", "doctor").splitlines()
    found = [line for line in doctor if line.startswith(("op library", "cpu "))]
    lines += [" ".join(line.replace(windows_path(home), "PYTHON").split()) for line in found]
    if "libsd_ort_ops.dll" not in found[0]:
        sys.exit(f"the wheel's library is not found: {found[0]}")
    model, images = work / "demo", [work / "windows.png", work / "linux.png"]
    python("-P", "-m", "sd_ort", "optimize", "demo", model, "--target", "cpu", "--overwrite")
    python("-P", "-m", "sd_ort", "generate", "a red circle", "--model", model, *SIZE, "--out", images[0])
    draw_on_linux(model, images[1])
    windows, linux = (np.asarray(Image.open(path).convert("RGB"), np.int16) for path in images)
    largest = int(np.abs(windows - linux).max())
    lines.append(f"optimize demo, generate: at most {largest} of 255 from the image on Linux")
    if largest > LARGEST:
        sys.exit(lines[-1])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zig", type=Path, help="the program of this name")
    parser.add_argument("--wheel", type=Path, help="sd-ort's wheel for Windows, made before")
    parser.add_argument("--log", type=Path, help="write the report there too")
    options = parser.parse_args()
    options.mingw = False
    compiler = command_of(options)
    work = cache_folder() / "windows"
    with tempfile.TemporaryDirectory() as scratch:
        wheel = options.wheel or windows_wheel.make(compiler, Path(scratch))
        home = Path(scratch, "python")
        make_python(compiler[0], home)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(home / "Lib/site-packages")
        wine = Wine(work / "python-prefix")
        wine.environment |= {"PYTHONPATH": "", "OMP_NUM_THREADS": "1", "LOCALAPPDATA": windows_path(Path(scratch))}
        wine.run(Path("winecfg"), "-v", "win10")  # a new prefix is Windows 7 to programs
        lines = check(wine, home, Path(scratch))
    emulator = windows_sources.run([wine.program, "--version"]).splitlines()[-1]
    report = [
        f"commit {machine.commit()}, sources {sources_hash()}; {emulator}, {wheel.name}",
        *lines,
        "never ran: Windows itself, kernels of a GPU",
    ]
    print("\n".join(report))
    if options.log:
        options.log.write_text("\n".join(report) + "\n")


if __name__ == "__main__":
    main()
