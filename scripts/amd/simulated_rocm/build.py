"""Build the libraries of the simulated ROCm into one folder of the cache, with g++ and the real headers."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_COMPILE = ("-std=c++17", "-O2", "-g", "-fPIC", "-Wall", "-Wextra", "-Wno-attributes")
_LINK = ("-shared", "-Wl,--no-undefined", "-static-libstdc++", "-static-libgcc", "-lpthread", "-ldl")


class BuildError(Exception):
    """A missing compiler, missing headers or a failed compilation; the message is one line."""


@dataclass(frozen=True)
class Library:
    """A shared library: the sources, the file name, other file names that link to it, and its version script.

    `needs` are file names of libraries that are linked; they come earlier in LIBRARIES. `options` are those of the
    compiler besides the common ones.
    """

    sources: tuple[str, ...]
    file_name: str
    links: tuple[str, ...]
    version_script: str
    needs: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


_HIP = ("libamdhip64.so.7",)
_AMD = ("-D__HIP_PLATFORM_AMD__",)
_FAST = (*_AMD, "-O3", "-march=x86-64-v3")  # they multiply matrices

LIBRARIES = (
    Library(
        ("hip/*.cc",),
        "libamdhip64.so.7",
        ("libamdhip64.so", "libamdhip64.so.5", "libamdhip64.so.6"),
        "hip/libamdhip64.map",
    ),
    Library(("libraries/hipblaslt.cc",), "libhipblaslt.so.1", ("libhipblaslt.so",), "libraries/blas.map", _HIP, _FAST),
    Library(("libraries/hipblas.cc",), "libhipblas.so.3", ("libhipblas.so",), "libraries/blas.map", _HIP, _FAST),
    Library(("libraries/miopen.cc",), "libMIOpen.so.1", ("libMIOpen.so",), "libraries/miopen.map", _HIP, _FAST),
    Library(
        ("libraries/others.cc",), "libhipfft.so.0", (), "libraries/others.map", _HIP, (*_AMD, "-DSIMULATED_HIPFFT")
    ),
    Library(
        ("libraries/others.cc",),
        "librocm_smi64.so.1",
        (),
        "libraries/others.map",
        _HIP,
        (*_AMD, "-DSIMULATED_ROCM_SMI"),
    ),
    Library(
        ("libraries/others.cc",),
        "libroctracer64.so.4",
        (),
        "libraries/others.map",
        _HIP,
        (*_AMD, "-DSIMULATED_ROCTRACER"),
    ),
)


def build(cache: Path, headers: Path) -> Path:
    """Return the folder with all libraries, after building them if these sources have not been built.

    Its folder `hip` has libamdhip64 alone, for a machine without the other libraries.

    `headers` is an include folder of ROCm 7.2.4. Raises BuildError.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise BuildError(f"The simulated ROCm is built with {compiler}, which is not on PATH. Install g++.")
    if not (headers / "hip/hip_runtime_api.h").is_file():
        raise BuildError(f"{headers} has no hip/hip_runtime_api.h. Fetch ROCm's headers: scripts/amd/rocm_headers.py.")
    folder = cache / _hash(headers)
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as work:
        built = Path(work, "lib")
        built.mkdir()
        for library in LIBRARIES:
            _build_library(library, compiler, headers, built, Path(work))
        (built / "hip").mkdir()
        for name in (LIBRARIES[0].file_name, *LIBRARIES[0].links):
            (built / "hip" / name).symlink_to(f"../{LIBRARIES[0].file_name}")
        try:
            built.rename(folder)
        except OSError:  # another process built the same
            if not folder.is_dir():
                raise
    return folder


def _build_library(library: Library, compiler: str, headers: Path, built: Path, work: Path) -> None:
    sources = sorted(path for pattern in library.sources for path in _HERE.glob(pattern))
    objects = [work / f"{library.file_name}-{source.stem}.o" for source in sources]
    commands = [
        [compiler, *_COMPILE, *library.options, f"-I{headers}", "-c", str(source), "-o", str(target)]
        for source, target in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, commands))
    needs = [str(built / name) for name in library.needs]
    script = f"-Wl,--version-script={_HERE / library.version_script}"
    options = (f"-Wl,-soname,{library.file_name}", script, "-Wl,-rpath,$ORIGIN")
    _run([compiler, *map(str, objects), *needs, *options, *_LINK, "-o", str(built / library.file_name)])
    for link in library.links:
        (built / link).symlink_to(library.file_name)


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if "error" in line] or [" ".join(command)]
        raise BuildError(f"The simulated ROCm cannot be built: {lines[0]}")


def _hash(headers: Path) -> str:
    """Hash of the sources, the flags and the folder of the headers."""
    digest = hashlib.sha256(repr((_COMPILE, _LINK, LIBRARIES, str(headers))).encode())
    for path in sorted(_HERE.rglob("*")):
        if path.suffix in (".cc", ".h", ".map") or path.name == "build.py":
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
