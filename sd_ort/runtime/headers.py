"""ONNX Runtime's C headers, which are in no Python wheel: given, the system's, or downloaded once."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from sd_ort.runtime.library import BuildError, cache_folder

HEADER = "onnxruntime_c_api.h"

# For the op library any headers from 1.21 on do: it asks for the C API of 1.22 at most. A provider needs those of 1.26.
_RELEASE = "https://github.com/microsoft/onnxruntime/releases/download/v1.22.0/onnxruntime-linux-x64-1.22.0.tgz"
_PROVIDER_RELEASE = _RELEASE.replace("1.22.0", "1.31.1")
PROVIDER_API = 26
_NPM_PACKAGE = "com.github.asus4.onnxruntime@0.4.9"


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
    found = _folder_of_header([*_SYSTEM, cached])
    if found is not None:
        return found
    sources = {"GitHub release": partial(_from_release, _RELEASE), "Debian": _from_debian, "npm": _from_npm}
    return _fetch(sources, cached, say)


def find_provider_headers(given: Path | None = None, say: Callable[[str], None] = lambda line: None) -> Path:
    """As `find_headers`, but of ONNX Runtime 1.26 or later, which an execution provider is built with."""
    given = given or (Path(os.environ["ORT_INCLUDE_DIR"]) if "ORT_INCLUDE_DIR" in os.environ else None)
    cached = cache_folder() / "ort-headers-provider"
    for root in [given] if given else [*_SYSTEM, cached]:
        found = _folder_of_header([root])
        if found is not None and api_version(found) >= PROVIDER_API:
            return found
    if given is not None:
        raise BuildError(f"{given} lacks the headers of ONNX Runtime 1.{PROVIDER_API} or later, which a provider needs")
    return _fetch({"GitHub release": partial(_from_release, _PROVIDER_RELEASE), "npm": _from_npm}, cached, say)


def api_version(folder: Path) -> int:
    """The C API's version of the headers in `folder`: 29 for ONNX Runtime 1.29; 0 where they do not say."""
    found = re.search(r"#define ORT_API_VERSION (\d+)", (folder / HEADER).read_text())
    return int(found.group(1)) if found else 0


def _fetch(
    sources: Mapping[str, Callable[[], dict[str, bytes]]], cached: Path, say: Callable[[str], None]
) -> Path:
    tried = []
    for source, fetch in sources.items():
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


_SYSTEM = (Path("/usr/include/onnxruntime"), Path("/usr/local/include/onnxruntime"))


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


def _from_release(url: str) -> dict[str, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
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
