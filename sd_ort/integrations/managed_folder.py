"""A folder of sd-ort's files inside an application: installed, updated and removed without touching other files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from sd_ort.core.errors import InputError, OutputError
from sd_ort.core.files import read_json, write_bytes

MARKER = "sd_ort_installed.json"


def install_folder(target: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Write `files` (relative path -> content) to the folder `target` and return their paths.

    Files that an earlier version of sd-ort wrote and this one does not are removed.

    Raises:
        OutputError: if the folder, or a file to write, exists and was not written by this function.
    """
    ours = _ours(target)
    if target.exists() and not ours:
        raise OutputError(f"{target} exists and is not sd-ort's: move it away, or rename it.")
    if foreign := [name for name in files if (target / name).exists() and name not in ours]:
        raise OutputError(f"{target / foreign[0]} was not written by sd-ort: move it away.")
    for name in ours - set(files) - {MARKER}:
        (target / name).unlink(missing_ok=True)
    content = {**files, MARKER: (json.dumps({"files": sorted([*files, MARKER])}, indent=1) + "\n").encode()}
    for name, data in content.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(target / name, data, overwrite=True)
    return [target / name for name in files]


def uninstall_folder(target: Path) -> None:
    """Remove the files that `install_folder` wrote, and the folder if it is empty then.

    Raises:
        InputError: if `install_folder` did not write to `target`.
    """
    ours = _ours(target)
    if not ours:
        raise InputError(f"{target} was not written by sd-ort: nothing to uninstall.")
    for name in ours:
        (target / name).unlink(missing_ok=True)
    for folder in (*sorted((p for p in target.rglob("*") if p.is_dir()), reverse=True), target):
        if folder.name == "__pycache__":
            for compiled in folder.glob("*.pyc"):
                compiled.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()


def _ours(target: Path) -> set[str]:
    """Return the file names in the marker. Raises InputError if one of them is outside of the folder."""
    path = target / MARKER
    if not path.is_file():
        return set()
    names = read_json(path).get("files")
    if not isinstance(names, list) or not all(isinstance(n, str) and _is_inside(n) for n in names):
        raise InputError(f"{path} is damaged: remove {target} yourself.")
    return set(names)


def _is_inside(name: str) -> bool:
    path = Path(name)
    return not path.is_absolute() and ".." not in path.parts
