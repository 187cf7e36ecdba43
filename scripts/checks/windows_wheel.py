"""Make a wheel for Windows from one for any system and the library that windows_sources.py cross-compiles.

scripts/build_wheels --windows OUT
python -m scripts.checks.windows_wheel OUT     # the same
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from scripts.checks import windows_sources
from scripts.checks.windows_sources import ROOT, command_of
from sd_ort.core.cache import cache_folder
from sd_ort.runtime import build
from sd_ort.runtime.headers import find_headers

TAG = "win_amd64"
LIBRARY = "libsd_ort_ops.dll"


def cross_compile(compiler: list[str]) -> Path:
    """Return the folder with the libraries for Windows of these sources."""
    folder = ROOT / "out/windows"
    for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
        os.environ[name] = str(cache_folder() / "zig")
    windows_sources.libraries(compiler, find_headers(api=build.PROVIDER_API), folder)
    return folder


def portable_wheel(folder: Path) -> Path:
    """Return a wheel without compiled libraries, made by pip in `folder`."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    options = ["--no-build-isolation", "--config-settings=wheel.cmake=false", "--wheel-dir", str(folder)]
    subprocess.run([*pip, *options, str(ROOT)], check=True)
    (wheel,) = folder.glob("*-none-any.whl")
    return wheel


def add_library(wheel: Path, library: Path, out: Path) -> Path:
    """Write the wheel for Windows: the files of `wheel`, `library` beside its sources, and the tag of Windows."""
    target = out / wheel.name.replace("-none-any.whl", f"-none-{TAG}.whl")
    out.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        files = {entry.filename: archive.read(entry) for entry in archive.infolist() if not entry.is_dir()}
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    metadata = record.replace("RECORD", "WHEEL")
    files[f"custom_ops/{library.name}"] = library.read_bytes()
    text = files[metadata].decode()
    files[metadata] = text.replace("-none-any", f"-none-{TAG}").replace("Purelib: true", "Purelib: false").encode()
    del files[record]
    lines = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return target


def _digest(data: bytes) -> str:
    """Return a hash as RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def make(compiler: list[str], out: Path) -> Path:
    """Cross-compile and write the wheel into `out`."""
    library = cross_compile(compiler) / LIBRARY
    with tempfile.TemporaryDirectory() as work:
        return add_library(portable_wheel(Path(work)), library, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the wheel")
    parser.add_argument("--zig", type=Path, help="the program of this name")
    options = parser.parse_args()
    options.mingw = False
    print(make(command_of(options), options.out))


if __name__ == "__main__":
    main()
