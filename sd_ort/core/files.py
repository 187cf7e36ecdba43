"""File helpers: atomic writes, checked reads of untrusted files, and JSON checked against a schema."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from sd_ort.core.errors import InputError, OutputError, SdOrtError, first_line
from sd_ort.core.paths import inside

# Opened files are not inherited, and a FIFO does not block; Windows has neither flag, and would translate line ends.
_READ = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
JSON_LIMIT = 64 << 20  # bytes: the largest met, a tokenizer.json, has 4 MB
JSON_COLUMNS = 200


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: an interrupt leaves the old or the new one. Raises OutputError on failure."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes, *, overwrite: bool = True) -> None:
    """Write a file atomically. Raises OutputError on failure, and for an existing file with `overwrite=False`."""
    if not overwrite and path.exists():
        raise OutputError(f"{path} exists: choose another name or pass --overwrite.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            temporary.chmod(0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}.") from error


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically."""
    write_bytes(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """Return a value as JSON text; values that fit into `JSON_COLUMNS` columns are on one line."""
    return (_json_text(value, JSON_COLUMNS - 1, "") + "\n").encode()


def _json_text(value: Any, room: int, indent: str) -> str:
    """Return a value as JSON text. room: columns left on its first line. indent: start of its other lines."""
    text = json.dumps(value)
    if not isinstance(value, (dict, list, tuple)) or len(text) <= room:
        return text
    lines: list[str] = []
    can_append = False
    width = JSON_COLUMNS - len(indent) - 2
    items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
    for name, item in items:
        key = json.dumps({name: 0})[1:-2] if isinstance(value, dict) else ""
        text = key + _json_text(item, width - len(key), indent + " ")
        is_scalar = not isinstance(item, (dict, list, tuple))
        if can_append and is_scalar and len(lines[-1]) + len(text) + 2 <= width:
            lines[-1] += f", {text}"
        else:
            lines.append(text)
        can_append = is_scalar
    start, end = ("{", "}") if isinstance(value, dict) else ("[", "]")
    return f"{start}\n{indent} " + f",\n{indent} ".join(lines) + f"\n{indent}{end}"


def read_ahead(paths: Iterable[Path]) -> None:
    """Prefetch files into the page cache, if they fit into half of the memory; return at once."""
    sizes = [(path, path.stat().st_size) for path in paths]
    if not hasattr(os, "posix_fadvise"):
        return
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if sum(size for _, size in sizes) < memory / 2:
        threading.Thread(target=_advise, args=(sizes,), daemon=True).start()


def _advise(files: list[tuple[Path, int]]) -> None:
    for path, size in files:
        with suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_WILLNEED)


def code_hash(*packages: Path) -> str:
    """Return SHA-256, 12 hex digits, over all Python files below `packages`, for the keys of cached results."""
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted(package.rglob("*.py")):
            digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def open_regular(path: Path, root: Path | None = None, limit: int | None = None) -> BinaryIO:
    """Open a file that others wrote, for reading. FIFOs, devices and sockets, which block or never end, are rejected.

    `root`: folder that must contain the file, links followed (see `paths.inside`). `limit`: bytes. Raises InputError
    for another kind of file, one outside of `root` or a larger one, and OSError as `open` does.
    """
    path = path if root is None else inside(path, root)
    _check_regular(path, path.stat(), limit)
    descriptor = os.open(path, _READ)
    file = os.fdopen(descriptor, "rb")
    try:
        _check_regular(path, os.fstat(descriptor), limit)  # it may have been replaced
    except BaseException:
        file.close()
        raise
    return file


def _check_regular(path: Path, status: os.stat_result, limit: int | None) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise InputError(f"{path} is a folder: give a file.")
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path} is no regular file (a FIFO, device or socket): put the file itself there.")
    if limit is not None and status.st_size > limit:
        raise InputError(f"{path} has {status.st_size} bytes, more than {limit}: get it, or export it, again.")


def check_regular(path: Path, root: Path | None = None, limit: int | None = None) -> Path:
    """Return `path`, checked as `open_regular` does, for a library that opens it. Raises InputError."""
    try:
        open_regular(path, root, limit).close()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    return path


def read_regular(path: Path, root: Path | None = None, limit: int | None = None) -> bytes:
    """Return the bytes of a file that others wrote. Raises as `open_regular`."""
    with open_regular(path, root, limit) as file:
        return file.read()


@contextmanager
def parsing(path: Path | str, kind: str) -> Iterator[None]:
    """Report as InputError what a parser raises for a damaged file: libraries have no common base class of errors.

    Errors of sd-ort, interrupts and a lack of memory pass.
    """
    try:
        yield
    except (SdOrtError, MemoryError):
        raise
    except Exception as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
        raise InputError(f"{path} cannot be read as {kind} ({reason}): get it, or make it, again.") from error


def read_json(path: Path, missing_message: str | None = None, root: Path | None = None) -> dict[str, Any]:
    """Return the JSON object in a file that others wrote, inside the folder `root` if that is given.

    Raises InputError if it is invalid, larger than JSON_LIMIT, or missing: then with `missing_message`.
    """
    try:
        content = json.loads(read_regular(path, root, JSON_LIMIT))
    except (FileNotFoundError, NotADirectoryError) as error:
        advice = f"{path} is missing: export the pipeline again."
        raise InputError(f"{missing_message}: {path} is missing." if missing_message else advice) from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read ({first_line(error)}): get it, or export it, again.") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a JSON object: get it, or export it, again.")
    return content


def without_nulls(value: Any) -> Any:
    """Return a JSON value without the null entries of its objects, which schemas treat as absent."""
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value
