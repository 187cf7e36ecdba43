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
import os
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from custom_ops.amd_targets import WINDOWS_TARGETS
from scripts.checks import windows_sources
from scripts.checks.windows_sources import ROOT, command_of
from sd_ort.core.cache import cache_folder
from sd_ort.runtime import build
from sd_ort.runtime.headers import find_headers

TAG = "win_amd64"
LIBRARY = "libsd_ort_ops.dll"
HIP_LIBRARY, HIP_PROVIDER = "libsd_ort_hip.dll", "libsd_ort_ep_hip.dll"
ENTRY = "int DllMainCRTStartup(void* module, unsigned reason, void* reserved) { return 1; }\n"


def cross_compile(compiler: list[str], hip: Sequence[str] = ()) -> list[Path]:
    """Return the libraries for Windows of these sources. `hip`: AMD targets, none for CPUs alone."""
    folder = ROOT / "out/windows"
    for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
        os.environ[name] = str(cache_folder() / "zig")
    windows_sources.libraries(compiler, find_headers(api=build.PROVIDER_API), folder, hip)
    libraries = [folder / LIBRARY]
    if hip:
        share_kernels(compiler, folder / HIP_PROVIDER, folder / HIP_LIBRARY)
        libraries += [folder / HIP_PROVIDER, folder / HIP_LIBRARY]
    return libraries


def share_kernels(compiler: list[str], provider: Path, library: Path) -> None:
    """Link the operators for AMD: a library whose functions are those of the provider's, as SHARE_KERNELS on Linux."""
    names = [name for name in exported(provider) if name.startswith("sd_ort_")]
    with tempfile.TemporaryDirectory() as work:
        (entry := Path(work, "entry.c")).write_text(ENTRY)
        (definition := Path(work, "exports.def")).write_text(forwarder(names, provider.stem, {}))
        c = [compiler[0], "cc", *compiler[2:], "-shared", "-nostdlib"]
        windows_sources.run([*c, str(entry), str(definition), "-o", str(library)])


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


def portable_wheel(folder: Path) -> Path:
    """Return a wheel without compiled libraries, made by pip in `folder`."""
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
    options.mingw = False
    print(make(command_of(options), options.out, list(filter(None, options.hip.split(",")))))


if __name__ == "__main__":
    main()
