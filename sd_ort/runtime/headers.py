"""Lookup of ONNX Runtime's C headers, which no Python wheel has: the user's, the system's, or a cached download."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sd_ort.core.cache import cache_folder
from sd_ort.core.progress import ProgressCallback, ignore_progress
from sd_ort.runtime.debian import DownloadError, unpack_packages
from sd_ort.runtime.library import BuildError

HEADER = "onnxruntime_c_api.h"
SYSTEM_FOLDERS = (Path("/usr/include/onnxruntime"), Path("/usr/local/include/onnxruntime"))
# Files of release 1.29.0 and their SHA-256: as npm's package served them in November 2026. Those of the tag on GitHub,
# which is not reached from here, have the same in a list of another project.
RELEASE = {
    HEADER: "acc0cf4b3f28d39339c76770d76164bb7a0637dc89f5fde764b4017b632f6743",
    "onnxruntime_ep_c_api.h": "e6c986c9e98583f8113b2c6bc3864814883b806d501cf24da4d239c45753e235",
    "onnxruntime_error_code.h": "5ce3b054e798eced8d14f5b86e98692fd33470463f96194ce0700a2d53dd8721",
}
# The one of Debian's package, served at the same time.
_DEBIAN = {HEADER: "7783e9664bdb0b1b36145b5c8587dd1bc9a399aa000edf2e3dd03003cafc6882"}
_RAW = "https://raw.githubusercontent.com/microsoft/onnxruntime/v1.29.0/include/onnxruntime/core/session/"
_NPM_PACKAGE = "com.github.asus4.onnxruntime@0.4.9"
Files = dict[str, bytes]


@dataclass(frozen=True)
class _Source:
    """Source of headers: version of the C API, command or address, and the SHA-256 that each file must have."""

    name: str
    api: int
    fetch: Callable[[], Files]
    sha256: Mapping[str, str]


def find_headers(folder: Path | None = None, on_progress: ProgressCallback = ignore_progress, api: int = 21) -> Path:
    """The folder of onnxruntime_c_api.h: the given one, the system's, one downloaded before, or one downloaded now.

    `api`: the oldest C API that will do; the operator library asks for that of 1.22 at most. What is downloaded is
    checked against the hashes below; the given folder and the system's are trusted.

    Raises BuildError when a given folder lacks the header, or no source has it.
    """
    folder = folder or (Path(os.environ["ORT_INCLUDE_DIR"]) if os.environ.get("ORT_INCLUDE_DIR") else None)
    if folder is not None:
        include = _folder_of_header([folder], api)
        if include is None:
            raise BuildError(f"{folder} has no {HEADER} of API {api} or later; give the include folder of ONNX Runtime")
        return include
    include = _folder_of_header(SYSTEM_FOLDERS, api)
    if include is not None:
        return include
    sources = [source for source in _sources() if source.api >= api]
    for source in sources:
        cached = _cached(source)
        if (
            cached.is_dir()
            and _unlike_pinned(source, {path.name: path.read_bytes() for path in cached.iterdir()}) is None
        ):
            return cached
    tried = []
    for source in sources:
        on_progress(f"fetching ONNX Runtime's headers ({source.name}) ...")
        try:
            files = source.fetch()
        except _FetchError as error:
            tried.append(f"{source.name}: {error}")
            continue
        if wrong := _unlike_pinned(source, files):
            tried.append(f"{source.name}: {wrong} is not the file that sd-ort knows")
            continue
        return _save(source, files)
    raise BuildError(
        f"ONNX Runtime's headers cannot be fetched ({'; '.join(tried)}); unpack its release archive and give --headers"
    )


def _sources() -> tuple[_Source, ...]:
    """Return all sources, in the order in which they are asked."""
    return (
        _Source("GitHub", 29, _from_github, RELEASE),
        _Source("Debian", 21, _from_debian, _DEBIAN),
        _Source("npm", 29, _from_npm, RELEASE),
    )


class _FetchError(Exception):
    """This source does not have the headers now."""


def _folder_of_header(roots: Iterable[Path], api: int) -> Path | None:
    for root in roots:
        for folder in (root, root / "include", root / "onnxruntime", root / "include/onnxruntime"):
            header = folder / HEADER
            if header.is_file():
                version = re.search(
                    r"^#define ORT_API_VERSION (\d+)", header.read_text("utf-8", "replace"), re.MULTILINE
                )
                if version and int(version[1]) >= api:
                    return folder
    return None


def _unlike_pinned(source: _Source, files: Files) -> str | None:
    """The first file that is missing or not what is pinned; None when all are."""
    for name, sha256 in source.sha256.items():
        if hashlib.sha256(files.get(name, b"")).hexdigest() != sha256:
            return name
    return None


def _cached(source: _Source) -> Path:
    return cache_folder() / "ort-headers" / str(source.api)


def _save(source: _Source, files: Files) -> Path:
    """Put the pinned files into the cache, whole or not at all; returns their folder."""
    folder = _cached(source)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        new = Path(work) / "headers"
        new.mkdir()
        for name in source.sha256:
            (new / name).write_bytes(files[name])
        shutil.rmtree(folder, ignore_errors=True)  # one that is not what is pinned
        with contextlib.suppress(OSError):  # another process saved the same
            new.rename(folder)
    return folder


def _from_github() -> Files:
    files = {}
    try:
        for name in RELEASE:
            with urllib.request.urlopen(_RAW + name, timeout=10) as response:
                files[name] = response.read()
    except (urllib.error.URLError, OSError) as error:
        raise _FetchError(getattr(error, "reason", None) or error) from error
    return files


def _from_debian() -> Files:
    """Return the headers of trixie's libonnxruntime-dev."""
    with tempfile.TemporaryDirectory() as work:
        try:
            unpack_packages(["libonnxruntime-dev"], ["trixie"], Path(work))
        except DownloadError as error:
            raise _FetchError(error) from error
        headers = (Path(work) / "usr/include/onnxruntime").glob("onnxruntime_*.h")
        return {path.name: path.read_bytes() for path in headers}


def _from_npm() -> Files:
    if shutil.which("npm") is None:
        raise _FetchError("npm is not here")
    with tempfile.TemporaryDirectory() as work:
        command = ["npm", "pack", "--silent", _NPM_PACKAGE]
        if subprocess.run(command, cwd=work, capture_output=True, check=False).returncode != 0:
            raise _FetchError(f"npm pack {_NPM_PACKAGE} failed")
        with tarfile.open(next(Path(work).glob("*.tgz"))) as archive:
            headers = [member for member in archive.getmembers() if member.isfile() and member.name.endswith(".h")]
            contents = {Path(member.name).name: archive.extractfile(member) for member in headers}
            return {name: file.read() for name, file in contents.items() if file is not None}


if __name__ == "__main__":  # for CMake
    print(find_headers(on_progress=lambda line: print(line, file=sys.stderr)))
