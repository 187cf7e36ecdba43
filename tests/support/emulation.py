"""Build GPU kernels for the CPU with the headers of tests/gpu_emulator, with a cache of object files."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import re
import subprocess
from functools import cache
from pathlib import Path

from custom_ops import GPU_OPERATORS
from sd_ort.core.cache import cache_folder

ROOT = Path(__file__).parents[2]
# Architecture -> preprocessor definitions. CDNA has wavefronts of 64 lanes; RDNA has 32 and other matrix instructions.
DEVICES = {
    "cdna": ["-D__HIP_PLATFORM_AMD__", "-D__GFX9__", "-D__gfx942__"],
    "rdna2": ["-D__HIP_PLATFORM_AMD__", "-D__gfx1030__"],
    "rdna3": ["-D__HIP_PLATFORM_AMD__", "-D__GFX11__"],
    "rdna4": ["-D__HIP_PLATFORM_AMD__", "-D__GFX12__"],
    "nvidia": [],
}
COMPILER = "clang++-19"
FOLDERS = (ROOT / "tests/gpu_emulator", ROOT / "custom_ops")
PRECOMPILED = ROOT / "tests/gpu_emulator/precompiled.h"  # in every object file
# No unrolled loops: unrolling saves registers of a GPU, and without it the compiler takes half the time.
ROLLED = [word for name in ("pragma-unroll-threshold", "unroll-threshold") for word in ("-mllvm", f"-{name}=1")]
FLAGS = [
    *("-x", "c++", "-std=c++17", "-O1", "-fPIC", "-DSD_ORT_EMULATED", '-DSD_ORT_BUILD_HASH="emulated"'),
    *(*ROLLED, "-Wno-pass-failed"),
    *(f"-I{folder}" for folder in FOLDERS),
]


def gpu_sources() -> list[Path]:
    """Return the sources of a GPU op library, as in CMakeLists.txt."""
    folders = [ROOT / "custom_ops/operators" / name for name in GPU_OPERATORS]
    own = [path for folder in folders for path in (*folder.glob("kernels/*.hip"), *folder.glob("[cl]*.cc"))]
    shared = [ROOT / "custom_ops/gpu_library.cc", ROOT / "custom_ops/common/tuner.cc"]
    return [path for path in sorted(own) if path.name != "cpu.cc"] + shared


@cache
def source_and_includes(source: Path) -> frozenset[Path]:
    """Return a source and the files of FOLDERS that it includes, directly or indirectly."""
    files: set[Path] = set()
    unread = [source]
    while unread:
        file = unread.pop()
        if file in files:
            continue
        files.add(file)
        for name in re.findall(r'^#include ["<](.+?)[">]', file.read_text(), re.MULTILINE):
            places = (file.parent / name, *(folder / name for folder in FOLDERS))
            unread += [path.resolve() for path in places if path.is_file() and path != file][:1]
    return frozenset(files)


def compile_object(source: Path, device: str, folder: Path) -> Path:
    """Return the object file of a C++ or HIP source; compile it if ~/.cache/sd-ort has none.

    The object file of a source in `folder`, the temporary folder of a test, is written to `folder` instead.
    """
    own = source.is_relative_to(folder)
    path = folder / f"{device}_{source.name}.o" if own else cached_path(source, device, ".o")
    if path.is_file():
        return path
    header = header_options(device)
    return build_once(path, [*FLAGS, *DEVICES[device], *header, "-c", str(source)])


def header_options(device: str) -> list[str]:
    """Return compiler options that include a precompiled header with the headers of most sources."""
    # No timestamps: the file name has a hash of the headers, so another checkout at this path can use the file.
    own = ["-x", "c++-header", "-fpch-instantiate-templates", "-Xclang", "-fno-pch-timestamp"]
    path = cached_path(PRECOMPILED, device, ".pch", str(ROOT), *own)  # it stores absolute paths
    build_once(path, [*FLAGS, *DEVICES[device], *own, str(PRECOMPILED)])
    return ["-include-pch", str(path), "-Xclang", "-fno-validate-pch"]


def cached_path(source: Path, device: str, suffix: str, *more: str) -> Path:
    """Return the path of a compiled file in the cache: a hash of compiler, flags, source and includes."""
    digest = hashlib.sha256(repr((compiler_version(), FLAGS[:-2], DEVICES[device], *more)).encode())
    for path in sorted(source_and_includes(source) | source_and_includes(PRECOMPILED)):
        digest.update(path.read_bytes())
    folder = cache_folder() / "emulated"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{digest.hexdigest()[:32]}{suffix}"


@cache
def compiler_version() -> str:
    return subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout


def build_once(to: Path, options: list[str]) -> Path:
    """Compile to the file `to` if it does not exist, and return it. A failed compilation leaves no file."""
    with to.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not to.is_file():
            unfinished = to.with_suffix(".unfinished")
            subprocess.run([COMPILER, *options, "-o", str(unfinished)], check=True)
            unfinished.replace(to)
    return to


def link(objects: list[Path], library: Path) -> Path:
    subprocess.run([COMPILER, "-shared", *map(str, objects), "-o", str(library)], check=True)
    return library


def load_blas_lt(folder: Path) -> None:
    """Load tests/gpu_emulator/blas_lt.cc as cuBLASLt and hipBLASLt of this process.

    Operators load the vendors' libraries by name. The dynamic loader returns the library that already has this soname.
    """
    for name, flags in (("libcublasLt.so.13", []), ("libhipblaslt.so.1", ["-DSD_ORT_HIPBLASLT"])):
        source = str(ROOT / "tests/gpu_emulator/blas_lt.cc")
        shared = ["-shared", "-fvisibility=hidden", f"-Wl,-soname,{name}"]
        library = build_once(folder / f"blas_lt_{name}", [*FLAGS, *DEVICES["nvidia"], *flags, *shared, source])
        ctypes.CDLL(str(library))
