"""GPU kernels compiled for the host against tests/gpu_emulator; an object serves all tests and runs."""

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
# What the emulator stands in for: waves of 64 lanes (CDNA), and of 32 with different matrix instructions.
DEVICES = {
    "cdna": ["-D__HIP_PLATFORM_AMD__", "-D__GFX9__"],
    "rdna2": ["-D__HIP_PLATFORM_AMD__", "-D__gfx1030__"],
    "rdna3": ["-D__HIP_PLATFORM_AMD__", "-D__GFX11__"],
    "rdna4": ["-D__HIP_PLATFORM_AMD__", "-D__GFX12__"],
    "nvidia": [],
}
COMPILER = "clang++-19"
FOLDERS = (ROOT / "tests/gpu_emulator", ROOT / "custom_ops")
# Loops stay loops: the host needs none of the registers that unrolling saves, and compiles in half the time.
ROLLED = [word for name in ("pragma-unroll-threshold", "unroll-threshold") for word in ("-mllvm", f"-{name}=1")]
FLAGS = [
    *("-x", "c++", "-std=c++17", "-O1", "-fPIC", "-DSD_ORT_EMULATED", '-DSD_ORT_BUILD_HASH="emulated"'),
    *(*ROLLED, "-Wno-pass-failed"),
    *(f"-I{folder}" for folder in FOLDERS),
]


def gpu_sources() -> list[Path]:
    """What a GPU library is made of, as CMakeLists.txt has it."""
    folders = [ROOT / "custom_ops/operators" / name for name in GPU_OPERATORS]
    own = [path for folder in folders for path in (*folder.glob("kernels/*.hip"), *folder.glob("[cl]*.cc"))]
    shared = [ROOT / "custom_ops/gpu_library.cc", ROOT / "custom_ops/common/tuner.cc"]
    return [path for path in sorted(own) if path.name != "cpu.cc"] + shared


@cache
def included(source: Path) -> frozenset[Path]:
    """The source, and every file of ours that it includes, directly or not."""
    found = {source}
    for name in re.findall(r'^#include "(.+)"$', source.read_text(), re.MULTILINE):
        for path in (source.parent / name, *(folder / name for folder in FOLDERS)):
            if path.is_file() and path != source:
                found |= included(path.resolve())
                break
    return frozenset(found)


def compile_object(source: Path, device: str, folder: Path) -> Path:
    """The object file of a C++ or HIP source, compiled by the first who asks for it; kept in ~/.cache/sd-ort.

    A source in `folder`, which a test brings along, is compiled there.
    """
    own = source.is_relative_to(folder)
    made = folder / f"{device}_{source.name}.o" if own else kept(source, device, ".o")
    if made.is_file():
        return made
    header = precompiled(device)
    return build_once(made, [*FLAGS, *DEVICES[device], *header, "-c", str(source)])


def precompiled(device: str) -> list[str]:
    """Options that put what most sources include before a source, read once for all of them."""
    header = ROOT / "tests/gpu_emulator/precompiled.h"
    # No times: another checkout at this place has the same headers, whose content the name says.
    own = ["-x", "c++-header", "-fpch-instantiate-templates", "-Xclang", "-fno-pch-timestamp"]
    made = kept(header, device, ".pch", str(ROOT), *own)  # at another place, a header is another file
    build_once(made, [*FLAGS, *DEVICES[device], *own, str(header)])
    return ["-include-pch", str(made), "-Xclang", "-fno-validate-pch"]


def kept(source: Path, device: str, suffix: str, *more: str) -> Path:
    """Where what is made of a source lies, by everything that it is made of."""
    digest = hashlib.sha256(repr((compiler_version(), FLAGS[:-2], DEVICES[device], *more)).encode())
    for path in sorted(included(source)):
        digest.update(path.read_bytes())
    folder = cache_folder() / "emulated"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{digest.hexdigest()[:32]}{suffix}"


@cache
def compiler_version() -> str:
    return subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout


def build_once(to: Path, options: list[str]) -> Path:
    """`to`, made by clang with these options by the first who asks for it; whole or not at all."""
    with to.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not to.is_file():
            unfinished = to.with_suffix(".unfinished")
            subprocess.run([COMPILER, *options, "-o", str(unfinished)], check=True)
            unfinished.replace(to)
    return to


def link(objects: list[Path], library: Path) -> Path:
    """A shared library of objects."""
    subprocess.run([COMPILER, "-shared", *map(str, objects), "-o", str(library)], check=True)
    return library


def load_blas_lt(folder: Path) -> None:
    """Puts tests/gpu_emulator/blas_lt.cc in the place of cuBLASLt and hipBLASLt for this process.

    The operators find the vendors' libraries by name: the loader gives them these, which already carry the names.
    """
    for name, flags in (("libcublasLt.so.13", []), ("libhipblaslt.so.1", ["-DSD_ORT_HIPBLASLT"])):
        source = str(ROOT / "tests/gpu_emulator/blas_lt.cc")
        shared = ["-shared", "-fvisibility=hidden", f"-Wl,-soname,{name}"]
        library = build_once(folder / f"blas_lt_{name}", [*FLAGS, *DEVICES["nvidia"], *flags, *shared, source])
        ctypes.CDLL(str(library))
