"""Files that appear whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from sd_ort.core.errors import InputError, OutputError, first_line


def write_text(path: Path, text: str) -> None:
    """Replace a file as a whole: an interrupt leaves the old one or the new one. Raises OutputError when it cannot."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes, *, overwrite: bool = True) -> None:
    """Write a file that appears only when all of it is there; with `overwrite=False` never in another one's place.

    Raises OutputError when the file exists (and may not be replaced), or when it cannot be written.
    """
    if path.exists() and not overwrite:
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
    """Replace a JSON file as a whole."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def code_hash(*packages: Path) -> str:
    """SHA-256, 12 hex digits, over all Python files below `packages`: what a cached result of that code depends on."""
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted(package.rglob("*.py")):
            digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def read_json(path: Path, otherwise: str | None = None) -> dict[str, Any]:
    """A JSON object from a file. Raises InputError when it is broken, or missing: then for the reason `otherwise`."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        reason = f"{otherwise}: {path} is missing." if otherwise else f"{path} is missing: export the pipeline again."
        raise InputError(reason) from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({first_line(error)}): get it, or export it, again.") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a JSON object: get it, or export it, again.")
    return content
