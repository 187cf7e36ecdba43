"""Build of the custom-op library with CMake: headers, compilers and GPU architectures.

`build` compiles custom_ops/ with CMake into ~/.cache/sd-ort/ops/<hash>/, the hash being that of the sources, the
compilers and the architectures; `library_path` finds the newest build of the present sources. ONNX Runtime's headers
are in no Python wheel: they come from a folder, from the system, or are downloaded once into ~/.cache/sd-ort/.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd_ort.core.cache import cache_folder
from sd_ort.core.errors import OutputError
from sd_ort.core.interrupts import defer_interrupts
from sd_ort.core.ownership import record_file
from sd_ort.core.progress import ProgressCallback, ignore_progress
from sd_ort.runtime.headers import find_headers
from sd_ort.runtime.library import (
    CUDA_LIBRARY,
    HIP_LIBRARY,
    LIBRARY,
    PROVIDER_LIBRARIES,
    SOURCES,
    BuildError,
    is_complete,
    sources_hash,
    trim_builds,
)

BUILDS_GB = 4  # of built libraries in the cache; least recently used ones go
PROVIDER_API = 29  # the C API that custom_ops/provider is written against: graph capture, memory devices


def build(
    cpu: bool = True,
    hip: Sequence[str] = (),
    cuda: Sequence[str] = (),
    headers: Path | None = None,
    on_progress: ProgressCallback = ignore_progress,
    provider: bool = False,
) -> Path:
    """Builds the library, or finds it in the cache; returns the path of libsd_ort_ops.so.

    `hip` are AMD architectures (gfx90a), `cuda` NVIDIA ones (sm_90). Without `cpu` only the GPU library is built (the
    GPU checks need no ONNX Runtime) and its path is returned. `headers` is the folder of onnxruntime_c_api.h.
    `provider` also builds the execution provider of each vendor, and with `cpu` its stand-in on the host, for tests.

    Raises BuildError when a compiler or the headers are missing, or compiling fails; the message says what to do.
    """
    if not cpu and not hip and not cuda:
        raise BuildError("nothing to build: ask for the CPU library, for HIP or for CUDA architectures")
    options = _Options(cpu=cpu, cmake=find_program("cmake", "install it: pip install cmake"), cxx=_cxx_compiler())
    if cpu:
        options.headers = find_headers(headers, on_progress)
    if provider:
        options.provider_headers = find_headers(headers, on_progress, api=PROVIDER_API)
    if hip:
        options.hip_archs = tuple(hip)
        _check_targets(hip)
        options.hip = find_hip_compiler()
        check_compiler(options.hip, hip)
    if cuda:
        options.cuda_archs = tuple(arch.removeprefix("sm_") for arch in cuda)
        _check_targets([f"sm_{arch}" for arch in options.cuda_archs])
        options.nvcc = find_program("nvcc", "install the CUDA toolkit, or put its nvcc on PATH")
    folder = cache_folder() / "ops" / options.hash()
    library = folder / (LIBRARY if cpu else HIP_LIBRARY if hip else CUDA_LIBRARY)
    if not ((folder / "build.json").is_file() and is_complete(folder)):
        shutil.rmtree(folder, ignore_errors=True)  # a damaged build
        on_progress(f"building {library.name} ...")
        _compile(options, folder)
        trim_builds(int(float(os.environ.get("SD_ORT_BUILDS_GB", BUILDS_GB)) * 1e9), keep=folder)
    with suppress(OSError):  # a cache that may be read alone
        os.utime(folder / "build.json", ns=(time.time_ns(),) * 2)  # `library_path` finds what was asked for last
    on_progress(str(library))
    return library


def build_gpu(arch: str) -> Path:
    """The GPU library alone, for one architecture: sm_90, gfx942, ... Raises BuildError as `build` does."""
    return build(cpu=False, cuda=[arch]) if arch.startswith("sm_") else build(cpu=False, hip=[arch])


def wheel_options(hip: Sequence[str]) -> list[str]:
    """Return pip's options for a wheel whose libraries have kernels for AMD targets.

    Raises BuildError as `build` does.
    """
    _check_targets(hip)
    options = _Options(cpu=True, cmake=find_program("cmake", "install it: pip install cmake"), cxx=_cxx_compiler())
    options.hip_archs, options.hip = tuple(hip), find_hip_compiler()
    check_compiler(options.hip, hip)
    options.headers = find_headers()
    options.provider_headers = find_headers(api=PROVIDER_API)
    settings = [f"cmake.define.{definition.removeprefix('-D')}" for definition in options.definitions()]
    settings += ["cmake.define.SHARE_KERNELS=ON", "build.targets=sd_ort_ops;sd_ort_hip;sd_ort_ep_hip"]
    return [f"--config-settings={setting}" for setting in settings]


@dataclass(frozen=True)
class HipCompiler:
    """A compiler for .hip files and the flags it needs."""

    path: str
    flags: tuple[str, ...] = ()


@dataclass
class _Options:
    cpu: bool
    cmake: str
    cxx: str
    headers: Path | None = None
    provider_headers: Path | None = None
    hip_archs: tuple[str, ...] = ()
    hip: HipCompiler | None = None
    cuda_archs: tuple[str, ...] = ()
    nvcc: str | None = None

    def hash(self) -> str:
        """Return the hash of the sources, the compilers' versions, HIP's flags and the architectures."""
        digest = hashlib.sha256(sources_hash().encode())
        for part in (
            *map(_version, self.compilers()),
            self.hip_archs,
            self.hip.flags if self.hip else (),
            self.cuda_archs,
            self.cpu,
            bool(self.provider_headers),
        ):
            digest.update(repr(part).encode())
        return digest.hexdigest()[:16]

    def compilers(self) -> list[str]:
        return [path for path in (self.cxx, self.hip.path if self.hip else None, self.nvcc) if path]

    def definitions(self) -> list[str]:
        values = {
            "BUILD_HASH": self.hash(),
            "BUILD_ORT_LIBRARY": "ON" if self.cpu else "OFF",
            "CMAKE_CXX_COMPILER": self.cxx,
        }
        if self.headers:
            values["ORT_INCLUDE_DIR"] = str(self.headers)
        if self.provider_headers:
            values["PROVIDER_INCLUDE_DIR"] = str(self.provider_headers)
        if self.hip:
            values["HIP_ARCHS"] = ";".join(self.hip_archs)
            values["HIP_COMPILER"] = self.hip.path
            values["HIP_FLAGS"] = " ".join(self.hip.flags)
        if self.nvcc:
            values["CUDA_ARCHS"] = ";".join(self.cuda_archs)
            values["NVCC"] = self.nvcc
        return [f"-D{name}={value}" for name, value in values.items()]


def _compile(options: _Options, folder: Path) -> None:
    """Builds in a temporary folder; the cache folder appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".build-") as work:
        # ccache: the folder's name is another one each time, and sources are the same.
        environment = {"CCACHE_BASEDIR": work} | os.environ
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        configure = [options.cmake, *generator, "-S", str(SOURCES), "-B", work, *options.definitions()]
        _run(configure, "configuring failed", environment)
        jobs = [] if "CMAKE_BUILD_PARALLEL_LEVEL" in os.environ else ["--parallel"]  # which would override it
        _run([options.cmake, "--build", work, *jobs], "compiling failed", environment)
        done = Path(work) / "done"
        done.mkdir()
        for name in (LIBRARY, HIP_LIBRARY, CUDA_LIBRARY, *PROVIDER_LIBRARIES.values()):
            if (Path(work) / name).is_file():
                shutil.move(Path(work) / name, done / name)
        record = {
            "libraries": {path.name: record_file(path) for path in sorted(done.iterdir())},
            "sources": sources_hash(),
            "cpu": options.cpu,
            "hip": options.hip_archs,
            "cuda": options.cuda_archs,
            "compilers": [
                _version(path) for path in (options.cxx, options.hip and options.hip.path, options.nvcc) if path
            ],
        }
        (done / "build.json").write_text(json.dumps(record, indent=1) + "\n")
        try:
            done.rename(folder)
        except OSError as error:
            if not (folder / "build.json").is_file():  # else another process built the same at the same time
                raise OutputError(f"cannot write {folder}: {error.strerror}; is the disk full?") from error


def _run(command: Sequence[str], failure: str, environment: Mapping[str, str]) -> None:
    """Run a build step. An interrupt ends it and the compilers it started, which are a process group of their own."""
    options: dict[str, Any] = {"text": True, "errors": "replace", "start_new_session": True, "env": environment}
    process = None
    try:
        with defer_interrupts() as signals:  # an interrupt inside Popen would leave compilers that nobody knows
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
        if signals:
            raise KeyboardInterrupt
        output, _ = process.communicate()
    except BaseException:
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill() if sys.platform == "win32" else os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        raise
    if process.returncode != 0:
        if "No space left on device" in output:
            raise OutputError(f"no space left for {cache_folder()} or {tempfile.gettempdir()}: free some disk space.")
        signs = ("error", "fatal")
        lines = [line for line in output.splitlines() if any(sign in line.lower() for sign in signs)]
        lines = lines or output.splitlines()[-1:]
        print(output, file=sys.stderr)
        raise BuildError(f"{failure}: {lines[0].strip() if lines else ' '.join(command)} (whole output above)")


def _version(compiler: str) -> str:
    """Return the compiler's version line and its path, as two installs may print the same line."""
    result = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return f"{compiler}: {result.stdout.strip()}"


def _check_targets(targets: Sequence[str]) -> None:
    """Raise BuildError for a target that no kernel is written for."""
    from custom_ops import amd_targets, nvidia_targets

    try:
        for target in targets:
            nvidia_targets.describe(target) if target.startswith("sm_") else amd_targets.simd(target)
    except ValueError as error:
        raise BuildError(str(error)) from error


def check_compiler(compiler: HipCompiler, targets: Sequence[str]) -> None:
    """Raise BuildError for a target that the compiler or its device libraries do not know."""
    for target in targets:
        flags = ["-mcode-object-version=6"] if target.endswith("-generic") else []
        flags += ["-x", "hip", f"--offload-arch={target}", "--cuda-device-only", "-nogpuinc", "-E"]
        command = [compiler.path, *compiler.flags, *flags, os.devnull]
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if result.returncode == 0:
            continue
        if match := re.search(r"cannot find (ROCm device library.*?);", result.stderr):
            raise BuildError(
                f"{compiler.path} finds no {match[1]}, so it cannot build for {target}: install a newer ROCm, "
                "or set HIPCXXFLAGS=--rocm-path= to the folder of one."
            )
        raise BuildError(
            f"{compiler.path} does not know {target}: install a newer ROCm, or set HIPCXX to a newer clang++."
        )


def _which(program: str) -> str | None:
    """Return the path of a program on PATH or beside the running Python, where pip puts it; None if there is none."""
    return shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent))


def find_program(program: str, advice: str) -> str:
    path = _which(program)
    if path is None:
        raise BuildError(f"{program} is not on PATH; {advice}")
    return path


def _cxx_compiler() -> str:
    compiler = os.environ.get("CXX")
    for name in (compiler,) if compiler else ("g++", "clang++", "c++"):
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C++ compiler ({compiler or 'g++, clang++ or c++'}) on PATH; install one: apt-get install g++")


def _hip_headers(root: Path) -> tuple[str, ...]:
    """Flags that put ROCm's headers before those of a distribution in /usr/include; clang puts them behind."""
    include = root / "include"
    return () if include.resolve() == Path("/usr/include") else ("-isystem", str(include))


def find_hip_compiler() -> HipCompiler:
    """A clang that compiles HIP: $HIPCXX, that of ROCm (custom_ops/rocm.py), or Debian's
    (scripts/amd/install_hip_toolchain.sh).

    Raises BuildError naming what is missing.
    """
    if compiler := os.environ.get("HIPCXX"):
        return HipCompiler(find_program(compiler, "HIPCXX names it"), tuple(os.environ.get("HIPCXXFLAGS", "").split()))
    from custom_ops import rocm

    for root in rocm.roots():
        for clang in (root / "llvm/bin/clang++", root / "lib/llvm/bin/clang++"):
            if clang.is_file():
                return HipCompiler(str(clang), (f"--rocm-path={root}", *_hip_headers(root)))
    tree = cache_folder() / "hip-tree"
    debian_clang = shutil.which("clang++-19")
    if debian_clang and (tree / "amdgcn").is_dir():
        return HipCompiler(debian_clang, (f"--rocm-path={tree}",))
    raise BuildError(
        "no HIP compiler: install ROCm (or set ROCM_PATH or HIPCXX), or on Debian run "
        "scripts/amd/install_hip_toolchain.sh"
    )


if __name__ == "__main__":  # scripts/build_wheels
    from custom_ops.amd_targets import WHEEL_TARGETS

    print("\n".join(wheel_options(sys.argv[1:] or WHEEL_TARGETS)))
