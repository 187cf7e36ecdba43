"""The user's cache folder: built libraries, optimized checkpoints, downloads, templates and small results."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sd_ort.core.errors import InputError, OutputError
from sd_ort.core.files import write_bytes

MAX_FILES = 256  # of one kind; of a few kB each


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/sd-ort, else ~/.cache/sd-ort. Raises InputError for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sd-ort"
    except RuntimeError as error:
        raise InputError("this user has no home folder: set HOME, or XDG_CACHE_HOME to a folder to keep.") from error


def is_reachable_file(path: Path) -> bool:
    """Whether a file exists and can be reached; False in a folder that may not be entered."""
    try:
        return path.is_file()
    except OSError:
        return False


def list_files(folder: Path, pattern: str) -> list[Path]:
    """Return the files below a folder that match a pattern; [] of a folder that may not be entered."""
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def cached_file(name: str) -> Path | None:
    """Return the file `kind/key` that an earlier process wrote; None without one."""
    path = cache_folder() / name
    return path if is_reachable_file(path) else None


def write_cached(name: str, data: bytes) -> None:
    """Write a file `kind/key` for later processes; does nothing if the cache cannot be written.

    The oldest of a kind go when there are more than `MAX_FILES`.
    """
    path = cache_folder() / name
    with suppress(OutputError, OSError):
        write_bytes(path, data)
        oldest_first = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime)
        for file in oldest_first[:-MAX_FILES]:
            file.unlink(missing_ok=True)


def cached_bytes(kind: str, key: bytes, compute: Callable[[], bytes]) -> bytes:
    """Return what `compute` returns for `key`, from the cache if an earlier process was there.

    A file begins with the SHA-256 of the rest: a damaged one is computed again.
    """
    name = f"{kind}/{hashlib.sha256(key).hexdigest()[:32]}"
    if path := cached_file(name):
        with suppress(OSError):
            stored = path.read_bytes()
            if hashlib.sha256(stored[32:]).digest() == stored[:32]:
                return stored[32:]
    content = compute()
    write_cached(name, hashlib.sha256(content).digest() + content)
    return content
