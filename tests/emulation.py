"""GPU kernels compiled for the host against tests/gpu_emulator; an object serves all tests and workers of a run."""

from __future__ import annotations

import ctypes
import fcntl
import subprocess
from pathlib import Path

from custom_ops import GPU_OPERATORS

ROOT = Path(__file__).parent.parent
# What the emulator stands in for: waves of 64 lanes (CDNA), and of 32 with different matrix instructions.
DEVICES = {
    "cdna": ["-D__HIP_PLATFORM_AMD__", "-D__GFX9__"],
    "rdna3": ["-D__HIP_PLATFORM_AMD__", "-D__GFX11__"],
    "rdna4": ["-D__HIP_PLATFORM_AMD__", "-D__GFX12__"],
    "nvidia": [],
}
FLAGS = [
    *("-x", "c++", "-std=c++17", "-O1", "-fPIC", "-DSD_ORT_EMULATED", '-DSD_ORT_BUILD_HASH="emulated"'),
    *(f"-I{ROOT / 'tests/gpu_emulator'}", f"-I{ROOT / 'custom_ops'}"),
]


def gpu_sources() -> list[Path]:
    """What a GPU library is made of, as CMakeLists.txt has it."""
    folders = [ROOT / "custom_ops" / name for name in GPU_OPERATORS]
    own = [path for folder in folders for path in (*folder.glob("kernels/*.hip"), *folder.glob("[cp]*.cc"))]
    shared = [ROOT / "custom_ops/gpu_library.cc", ROOT / "custom_ops/common/tuner.cc"]
    return [path for path in sorted(own) if path.name != "cpu.cc"] + shared


def compile_object(source: Path, device: str, folder: Path) -> Path:
    """The object file of a C++ or HIP source in `folder`, compiled by the first who asks for it."""
    to = folder / f"{device}_{source.parent.parent.name}_{source.parent.name}_{source.name}.o"
    return build_once(to, [*FLAGS, *DEVICES[device], "-c", str(source)])


def build_once(to: Path, options: list[str]) -> Path:
    """`to`, made by clang with these options by the first who asks for it."""
    with to.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not to.is_file():
            subprocess.run(["clang++-19", *options, "-o", str(to)], check=True)
    return to


def link(objects: list[Path], library: Path) -> Path:
    """A shared library of objects."""
    subprocess.run(["clang++-19", "-shared", *map(str, objects), "-o", str(library)], check=True)
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
