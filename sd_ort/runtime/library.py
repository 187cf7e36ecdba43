"""Lookup of compiled operator libraries: where builds are stored, and which of them matches the current sources.

A wheel carries one with CPU kernels beside the sources it was made of; `sd-ort build-ops` puts others into the cache.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sd_ort.core.cache import cache_folder, list_files
from sd_ort.core.errors import InputError
from sd_ort.core.files import read_json
from sd_ort.core.ownership import compare, is_record

SOURCES = Path(__file__).resolve().parents[2] / "custom_ops"
_SUFFIX = ".dll" if sys.platform == "win32" else ".so"
LIBRARY = f"libsd_ort_ops{_SUFFIX}"
HIP_LIBRARY = f"libsd_ort_hip{_SUFFIX}" if sys.platform != "win32" else "libsd_ort_ep_hip.dll"  # has the same functions
CUDA_LIBRARY = f"libsd_ort_cuda{_SUFFIX}"
# Execution provider of ONNX Runtime -> the op library's GPU half that serves it.
GPU_LIBRARIES = {"CUDAExecutionProvider": CUDA_LIBRARY, "ROCMExecutionProvider": HIP_LIBRARY}
# The execution provider, by the vendor whose devices it drives; `simulated` is for tests.
PROVIDER_LIBRARIES = {vendor: f"libsd_ort_ep_{vendor}{_SUFFIX}" for vendor in ("hip", "cuda", "simulated")}


class BuildError(InputError):
    """The library cannot be built: something is missing, or a compiler failed."""


@dataclass(frozen=True)
class Build:
    """A built library folder in the cache; `last_use`: seconds since 1970."""

    folder: Path
    bytes: int
    last_use: float


def builds() -> list[Build]:
    """Return the builds in the cache, the least recently used first."""
    entries = []
    for record in list_files(cache_folder() / "ops", "*/build.json"):
        with suppress(OSError):
            size = sum(path.stat().st_size for path in record.parent.iterdir())
            entries.append(Build(record.parent, size, record.stat().st_mtime))
    return sorted(entries, key=lambda build: build.last_use)


def trim_builds(limit: int, keep: Path | None = None) -> list[Build]:
    """Remove the least recently used builds until at most `limit` bytes remain; return the removed builds.

    `keep` stays. A process that has loaded a library keeps it.
    """
    every, gone = builds(), []
    total = sum(build.bytes for build in every)
    for build in every:
        if total > limit and build.folder != keep:
            (build.folder / "build.json").unlink()  # first: an interrupted removal leaves no build
            shutil.rmtree(build.folder, ignore_errors=True)
            total -= build.bytes
            gone.append(build)
    return gone


def is_complete(folder: Path, name: str | None = None) -> bool:
    """Whether a build's files match its record: the size of the library `name`, or the contents of all.

    A process that loads a truncated library ends with SIGBUS. Records until 2026-11 list no libraries.
    """
    try:
        record = read_json(folder / "build.json").get("libraries", {})
        if name is not None:
            return name not in record or (folder / name).stat().st_size == record[name]["bytes"]
        return all(is_record(entry) for entry in record.values()) and len(compare(folder, record).owned) == len(record)
    except (InputError, OSError, TypeError, KeyError, AttributeError):
        return False


def library_path(name: str = LIBRARY) -> Path | None:
    """The newest library of this name built from the present sources, else the one that the wheel brought, or None.

    One with GPU kernels beside it comes before one without, which may be newer: it has the same CPU kernels, and
    sessions look for the others there. Runs no compiler and no Python import of ORT.
    """
    candidates = []
    for record in list_files(cache_folder() / "ops", "*/build.json"):
        library = record.parent / name
        with suppress(InputError, OSError):  # a damaged record is a build that was not finished
            if (
                read_json(record).get("sources") == sources_hash()
                and library.is_file()
                and is_complete(record.parent, name)
            ):
                has_gpu = any((record.parent / gpu).is_file() for gpu in (HIP_LIBRARY, CUDA_LIBRARY))
                candidates.append((has_gpu, record.stat().st_mtime_ns, library))
    if candidates:
        return max(candidates)[-1]
    return SOURCES / name if (SOURCES / name).is_file() else None


@cache
def sources_hash() -> str:
    """Hash of everything that CMake compiles. Read once a process."""
    digest = hashlib.sha256()
    suffixes = {".cc", ".h", ".hip", ".map", ".txt"}
    for path in sorted(path for path in SOURCES.rglob("*") if path.suffix in suffixes):
        digest.update(path.relative_to(SOURCES).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
