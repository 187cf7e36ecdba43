"""Make a wheel for Windows from one for any system and the libraries that windows_sources.py cross-compiles.

scripts/build_wheels --windows OUT                    # the operators for CPUs
scripts/build_wheels --hip --windows OUT              # with the operators and the provider for AMD too
python -m scripts.checks.windows_wheel --hip gfx1100 OUT

Host code for AMD is compiled by zig, and kernels by a HIP compiler for Linux: they are the same on both systems.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from custom_ops.amd_targets import WINDOWS_TARGETS
from scripts.checks import windows_sources
from scripts.checks.windows_sources import ROOT, command_of
from sd_ort.runtime import build
from sd_ort.runtime.headers import find_headers

TAG = "win_amd64"
LIBRARY = "libsd_ort_ops.dll"
HIP_LIBRARY = "libsd_ort_ep_hip.dll"


def cross_compile(compiler: list[str], hip: Sequence[str] = ()) -> list[Path]:
    """Return the libraries for Windows of these sources. `hip`: AMD targets, none for CPUs alone."""
    folder = ROOT / "out/windows"
    windows_sources.libraries(compiler, find_headers(api=build.PROVIDER_API), folder, hip, simulated=False)
    return [folder / name for name in (LIBRARY, *([HIP_LIBRARY] if hip else []))]


def portable_wheel(folder: Path) -> Path:
    """Build a wheel without compiled libraries with pip in `folder`, and return it."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    options = ["--no-build-isolation", "--config-settings=wheel.cmake=false", "--wheel-dir", str(folder)]
    subprocess.run([*pip, *options, str(ROOT)], check=True)
    (wheel,) = folder.glob("*-none-any.whl")
    return wheel


def add_libraries(wheel: Path, libraries: Sequence[Path], out: Path) -> Path:
    """Write the wheel for Windows: the files of `wheel`, `libraries` beside their sources, and the tag of Windows."""
    target = out / wheel.name.replace("-none-any.whl", f"-none-{TAG}.whl")
    out.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        files = {entry.filename: archive.read(entry) for entry in archive.infolist() if not entry.is_dir()}
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    metadata = record.replace("RECORD", "WHEEL")
    files |= {f"custom_ops/{library.name}": library.read_bytes() for library in libraries}
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


def make(compiler: list[str], out: Path, hip: Sequence[str] = ()) -> Path:
    """Cross-compile and write the wheel into `out`."""
    libraries = cross_compile(compiler, hip)
    with tempfile.TemporaryDirectory() as work:
        return add_libraries(portable_wheel(Path(work)), libraries, out)


def add_hip_option(parser: argparse.ArgumentParser) -> None:
    """Add --hip, which takes targets with commas, or none for those of the wheel."""
    default = ",".join(WINDOWS_TARGETS)
    parser.add_argument("--hip", nargs="?", const=default, default="", help=f"targets, with commas [{default}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the wheel")
    parser.add_argument("--zig", type=Path, help="the program of this name")
    add_hip_option(parser)
    options = parser.parse_args()
    print(make(command_of(options.zig), options.out, list(filter(None, options.hip.split(",")))))


if __name__ == "__main__":
    main()
