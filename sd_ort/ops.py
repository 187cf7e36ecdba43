"""The custom-op library: finding headers and compilers, building it, and finding the built one again.

`build` compiles custom_ops/ with CMake into ~/.cache/sd-ort/ops/<hash>/, the hash being that of the sources, the
compilers and the architectures; `library_path` finds the newest build of the present sources. ONNX Runtime's headers
are in no Python wheel: they come from a folder, from the system, or are downloaded once into ~/.cache/sd-ort/.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sd_ort.errors import InputError, OutputError

SOURCES = Path(__file__).resolve().parent.parent / "custom_ops"
LIBRARY = "libsd_ort_ops.so"
HIP_LIBRARY = "libsd_ort_hip.so"
CUDA_LIBRARY = "libsd_ort_cuda.so"
HEADER = "onnxruntime_c_api.h"

# Any headers from 1.21 on do: the library asks for the C API of 1.22 at most.
_RELEASE = "https://github.com/microsoft/onnxruntime/releases/download/v1.22.0/onnxruntime-linux-x64-1.22.0.tgz"
_NPM_PACKAGE = "com.github.asus4.onnxruntime@0.4.9"


class BuildError(InputError):
    """The library cannot be built: something is missing, or a compiler refused."""


def cache_folder() -> Path:
    """Where built libraries and downloaded headers live: $XDG_CACHE_HOME/sd-ort, else ~/.cache/sd-ort."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sd-ort"


def library_path() -> Path | None:
    """The newest library built from the present sources, or None. Runs no compiler and no Python import of ORT."""
    builds = []
    for record in (cache_folder() / "ops").glob("*/build.json"):
        library = record.parent / LIBRARY
        if json.loads(record.read_text())["sources"] == sources_hash() and library.is_file():
            builds.append((record.stat().st_mtime, library))
    return max(builds)[1] if builds else None


# What the GPU libraries are not made of.
_CPU_SOURCES = {"registry.cc", "cpu_library.cc", "ort_op.h", "binding.h", "cpu.h", "cpu.cc"}


def sources_hash(cpu: bool = True) -> str:
    """Hash of everything that CMake compiles; without `cpu`, of what the GPU libraries alone are made of."""
    digest = hashlib.sha256()
    suffixes = {".cc", ".h", ".hip", ".txt"}
    for path in sorted(path for path in SOURCES.rglob("*") if path.suffix in suffixes):
        if not cpu and path.name in _CPU_SOURCES:
            continue
        digest.update(path.relative_to(SOURCES).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def build(
    cpu: bool = True,
    hip: Sequence[str] = (),
    cuda: Sequence[str] = (),
    headers: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Builds the library, or finds it in the cache; returns the path of libsd_ort_ops.so.

    `hip` are AMD architectures (gfx90a), `cuda` NVIDIA ones (sm_90). Without `cpu` only the GPU library is built (the
    GPU checks need no ONNX Runtime) and its path is returned. `headers` is the folder of onnxruntime_c_api.h.

    Raises BuildError when a compiler or the headers are missing, or compiling fails; the message says what to do.
    """
    if not cpu and not hip and not cuda:
        raise BuildError("nothing to build: ask for the CPU library, for HIP or for CUDA architectures")
    options = _Options(cpu=cpu, cmake=_need("cmake", "install it: pip install cmake"), cxx=_cxx_compiler())
    if cpu:
        options.headers = find_headers(headers, say)
    if hip:
        options.hip_archs = tuple(hip)
        options.hip = find_hip_compiler()
    if cuda:
        options.cuda_archs = tuple(arch.removeprefix("sm_") for arch in cuda)
        options.nvcc = _need("nvcc", "install the CUDA toolkit, or put its nvcc on PATH")
    folder = cache_folder() / "ops" / options.hash()
    library = folder / (LIBRARY if cpu else HIP_LIBRARY if hip else CUDA_LIBRARY)
    if not (folder / "build.json").is_file():
        say(f"building {library.name} ...")
        _compile(options, folder)
    if hip:
        from custom_ops import code_objects

        code_objects.publish(folder)
    say(str(library))
    return library


def build_gpu(arch: str) -> Path:
    """The GPU library alone, for one architecture: sm_90, gfx942, ... Raises BuildError as `build` does."""
    return build(cpu=False, cuda=[arch]) if arch.startswith("sm_") else build(cpu=False, hip=[arch])


@dataclass(frozen=True)
class HipCompiler:
    """A compiler for .hip files, the flags it needs, and where libamdhip64.so is (None when it knows)."""

    path: str
    flags: tuple[str, ...] = ()
    library_dir: str | None = None


@dataclass
class _Options:
    cpu: bool
    cmake: str
    cxx: str
    headers: Path | None = None
    hip_archs: tuple[str, ...] = ()
    hip: HipCompiler | None = None
    cuda_archs: tuple[str, ...] = ()
    nvcc: str | None = None

    def hash(self) -> str:
        """Of the sources, the compilers' versions and the architectures."""
        digest = hashlib.sha256(sources_hash(self.cpu).encode())
        for part in (*map(_version, self.compilers()), self.hip_archs, self.cuda_archs, self.cpu):
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
        if self.hip:
            values["HIP_ARCHS"] = ";".join(self.hip_archs)
            values["HIP_COMPILER"] = self.hip.path
            values["HIP_FLAGS"] = " ".join(self.hip.flags)
            values["HIP_LIBRARY_DIR"] = self.hip.library_dir or ""
            values["Python3_EXECUTABLE"] = sys.executable
        if self.nvcc:
            values["CUDA_ARCHS"] = ";".join(self.cuda_archs)
            values["NVCC"] = self.nvcc
        return [f"-D{name}={value}" for name, value in values.items()]


def _compile(options: _Options, folder: Path) -> None:
    """Builds in a temporary folder; the cache folder appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".build-") as work:
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        _run([options.cmake, *generator, "-S", str(SOURCES), "-B", work, *options.definitions()], "configuring failed")
        _run([options.cmake, "--build", work, "--parallel"], "compiling failed")
        done = Path(work) / "done"
        done.mkdir()
        for name in (LIBRARY, HIP_LIBRARY, CUDA_LIBRARY):
            if (Path(work) / name).is_file():
                shutil.move(Path(work) / name, done / name)
        record = {
            "sources": sources_hash(),
            "cpu": options.cpu,
            "hip": options.hip_archs,
            "cuda": options.cuda_archs,
            "compilers": [
                _version(path) for path in (options.cxx, options.hip and options.hip.path, options.nvcc) if path
            ],
        }
        if options.hip_archs:
            shutil.move(Path(work) / "code_objects", done / "code_objects")
            listing = json.loads((Path(work) / "kernels.json").read_text()) | {"folder": str(folder / "code_objects")}
            (done / "kernels.json").write_text(json.dumps(listing, indent=1) + "\n")
        (done / "build.json").write_text(json.dumps(record, indent=1) + "\n")
        try:
            done.rename(folder)
        except OSError as error:
            if not (folder / "build.json").is_file():  # else another process built the same at the same time
                raise OutputError(f"cannot write {folder}: {error.strerror}; is the disk full?") from error


def _run(command: Sequence[str], failure: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        output = result.stdout + result.stderr
        lines = [line for line in output.splitlines() if "error" in line.lower()] or output.splitlines()[-1:]
        print(output, file=sys.stderr)
        raise BuildError(f"{failure}: {lines[0].strip() if lines else ' '.join(command)} (whole output above)")


def _version(compiler: str) -> str:
    """What the compiler says of itself; its path too, as two installs may say the same."""
    result = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return f"{compiler}: {result.stdout.strip()}"


def _need(program: str, advice: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise BuildError(f"{program} is not on PATH; {advice}")
    return path


def _cxx_compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("g++", "clang++", "c++"):
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C++ compiler ({wanted or 'g++, clang++ or c++'}) on PATH; install one: apt-get install g++")


# ---- HIP


def find_hip_compiler() -> HipCompiler:
    """A clang that compiles HIP: $HIPCXX, a ROCm install's, or Debian's (scripts/install_hip_toolchain.sh).

    Raises BuildError naming what is missing.
    """
    if compiler := os.environ.get("HIPCXX"):
        return HipCompiler(_need(compiler, "HIPCXX names it"), tuple(os.environ.get("HIPCXXFLAGS", "").split()))
    rocm = Path(os.environ.get("ROCM_PATH", "/opt/rocm"))
    for clang in (rocm / "llvm/bin/clang++", rocm / "lib/llvm/bin/clang++"):
        if clang.is_file():
            return HipCompiler(str(clang), (f"--rocm-path={rocm}",), str(rocm / "lib"))
    tree = cache_folder() / "hip-tree"
    debian_clang = shutil.which("clang++-19")
    if debian_clang and (tree / "amdgcn").is_dir():
        return HipCompiler(debian_clang, (f"--rocm-path={tree}",))
    raise BuildError(
        "no HIP compiler: install ROCm (or set ROCM_PATH or HIPCXX), or on Debian run scripts/install_hip_toolchain.sh"
    )


# ---- ONNX Runtime's headers


def find_headers(given: Path | None = None, say: Callable[[str], None] = lambda line: None) -> Path:
    """The folder of onnxruntime_c_api.h: the given one, the system's, one downloaded before, or one downloaded now.

    Raises BuildError when a given folder lacks the header, or no source has it.
    """
    given = given or (Path(os.environ["ORT_INCLUDE_DIR"]) if "ORT_INCLUDE_DIR" in os.environ else None)
    if given is not None:
        found = _folder_of_header([given])
        if found is None:
            raise BuildError(f"{given} has no {HEADER}; give the include folder of ONNX Runtime")
        return found
    cached = cache_folder() / "ort-headers"
    found = _folder_of_header([Path("/usr/include/onnxruntime"), Path("/usr/local/include/onnxruntime"), cached])
    if found is not None:
        return found
    tried = []
    for source, fetch in (("GitHub release", _from_release), ("Debian", _from_debian), ("npm", _from_npm)):
        say(f"fetching ONNX Runtime's headers ({source}) ...")
        try:
            files = fetch()
        except _FetchError as error:
            tried.append(f"{source}: {error}")
            continue
        _save_headers(files, cached)
        return cached
    raise BuildError(
        f"ONNX Runtime's headers cannot be fetched ({'; '.join(tried)}); unpack its release archive and give --headers"
    )


class _FetchError(Exception):
    """This source does not have the headers now."""


def _folder_of_header(roots: Iterable[Path]) -> Path | None:
    for root in roots:
        for folder in (root, root / "include", root / "onnxruntime", root / "include/onnxruntime"):
            if (folder / HEADER).is_file():
                return folder
    return None


def _save_headers(files: dict[str, bytes], folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        new = Path(work) / "headers"
        new.mkdir()
        for name, content in files.items():
            (new / name).write_bytes(content)
        if not folder.is_dir():
            new.rename(folder)


def _headers_of_tar(archive: tarfile.TarFile) -> dict[str, bytes]:
    files = {}
    for member in archive.getmembers():
        path = Path(member.name)
        if member.isfile() and path.suffix == ".h" and path.name.startswith("onnxruntime_"):
            content = archive.extractfile(member)
            assert content is not None
            files[path.name] = content.read()
    if HEADER not in files:
        raise _FetchError(f"the archive has no {HEADER}")
    return files


def _from_release() -> dict[str, bytes]:
    try:
        with urllib.request.urlopen(_RELEASE, timeout=10) as response:
            data = response.read()
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            return _headers_of_tar(archive)
    except (urllib.error.URLError, OSError, tarfile.TarError) as error:
        raise _FetchError(getattr(error, "reason", None) or error) from error


def _from_debian() -> dict[str, bytes]:
    """From trixie's libonnxruntime-dev, through apt with a sources list of its own made from the machine's."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise _FetchError("apt-get is not here")
    with tempfile.TemporaryDirectory() as work_:
        work = Path(work_)
        (work / "lists/partial").mkdir(parents=True)
        (work / "cache").mkdir()
        (work / "sources").mkdir()
        (work / "sources/trixie.sources").write_text(_trixie_sources())
        apt = ["apt-get", "-q", f"-oDir::Etc::SourceParts={work}/sources", "-oDir::Etc::SourceList=/dev/null"]
        apt += [f"-oDir::State::Lists={work}/lists", f"-oDir::Cache={work}/cache"]
        for command in ([*apt, "update"], [*apt, "download", "libonnxruntime-dev"]):
            if subprocess.run(command, cwd=work, capture_output=True, check=False).returncode != 0:
                raise _FetchError(f"{' '.join(command[-2:])} failed")
        package = next(work.glob("libonnxruntime-dev_*.deb"))
        subprocess.run(["dpkg", "-x", str(package), str(work / "unpacked")], check=True)
        headers = (work / "unpacked/usr/include/onnxruntime").glob("onnxruntime_*.h")
        return {path.name: path.read_bytes() for path in headers}


def _trixie_sources() -> str:
    """A sources entry for Debian trixie from the mirror and key of the machine's own Debian entry."""
    for path in sorted(Path("/etc/apt/sources.list.d").glob("*.sources")):
        for entry in path.read_text().split("\n\n"):
            fields = dict(line.split(":", 1) for line in entry.splitlines() if ":" in line and not line.startswith("#"))
            uri = fields.get("URIs", "").strip()
            if uri.rstrip("/").endswith("debian"):
                key = fields.get("Signed-By", " /usr/share/keyrings/debian-archive-keyring.gpg").strip()
                return f"Types: deb\nURIs: {uri}\nSuites: trixie\nComponents: main\nSigned-By: {key}\n"
    for line in _lines_of("/etc/apt/sources.list"):
        words = line.split()
        if words[:1] == ["deb"] and words[1].rstrip("/").endswith("debian"):
            key = "/usr/share/keyrings/debian-archive-keyring.gpg"
            return f"Types: deb\nURIs: {words[1]}\nSuites: trixie\nComponents: main\nSigned-By: {key}\n"
    raise _FetchError("the machine's apt sources name no Debian mirror")


def _lines_of(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).is_file() else []


def _from_npm() -> dict[str, bytes]:
    if shutil.which("npm") is None:
        raise _FetchError("npm is not here")
    with tempfile.TemporaryDirectory() as work:
        command = ["npm", "pack", "--silent", _NPM_PACKAGE]
        if subprocess.run(command, cwd=work, capture_output=True, check=False).returncode != 0:
            raise _FetchError(f"npm pack {_NPM_PACKAGE} failed")
        with tarfile.open(next(Path(work).glob("*.tgz"))) as archive:
            return _headers_of_tar(archive)
