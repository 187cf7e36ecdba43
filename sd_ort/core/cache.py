"""The user's cache folder: built libraries, downloads, templates, and small files that spare a later process work."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from sd_ort.core.errors import InputError, OutputError
from sd_ort.core.files import write_bytes

MOST_FILES = 256  # of one kind; of a few kB each


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/sd-ort, else ~/.cache/sd-ort. Raises InputError for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sd-ort"
    except RuntimeError as error:
        raise InputError("this user has no home folder: set HOME, or XDG_CACHE_HOME to a folder to keep.") from error


def is_there(path: Path) -> bool:
    """Whether a file is there and can be reached: a cache that may not be entered is one that holds nothing."""
    try:
        return path.is_file()
    except OSError:
        return False


def listed(folder: Path, pattern: str) -> list[Path]:
    """Files below a folder that match a pattern; none of a folder that may not be entered."""
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def kept(name: str) -> Path | None:
    """The file `kind/key` that an earlier process kept, if there is one."""
    path = cache_folder() / name
    return path if is_there(path) else None


def keep(name: str, data: bytes) -> None:
    """Keep a file `kind/key` for later processes; where nothing can be written they do the work again.

    The oldest of a kind go when there are more than `MOST_FILES`.
    """
    path = cache_folder() / name
    with suppress(OutputError, OSError):
        write_bytes(path, data)
        oldest_first = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime)
        for file in oldest_first[:-MOST_FILES]:
            file.unlink(missing_ok=True)
