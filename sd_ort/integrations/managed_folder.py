"""A folder of sd-ort's files inside an application: installed, updated and removed without touching other files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sd_ort.core.errors import InputError, OutputError
from sd_ort.core.files import read_json, without_nulls, write_json
from sd_ort.core.ownership import FILE_RECORD, FileRecord, compare, record_file
from sd_ort.core.schema import dict_of, record_type, schema_mismatch
from sd_ort.core.staging import recover, replace_folder, scratch_folder

MARKER = "sd_ort_installed.json"
_MARKER = record_type("Marker", {"files": dict_of(FILE_RECORD)})


def install_folder(target: Path, files: Mapping[str, bytes], *, overwrite: bool = False) -> list[Path]:
    """Write `files` (relative path -> content) to the folder `target` and return their paths.

    Files that an earlier version of sd-ort wrote and this one does not are removed. `overwrite`: replace files that
    were changed since.

    Raises:
        OutputError: if the folder, or a file to write, exists and was not written by this function, or was changed.
    """
    recover(target)
    record = _record(target)
    if target.exists() and not record:
        raise OutputError(f"{target} exists and is not sd-ort's: move it away, or rename it.")
    state = compare(target, record)
    state.check_replaceable(target, overwrite)
    with scratch_folder(target.parent, target.name) as work:
        work.chmod(0o755)
        for name, data in files.items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_bytes(data)
        write_json(work / MARKER, {"files": {name: record_file(work / name) for name in files}})
        replace_folder(work, target, [name for name in state.foreign if name != MARKER])
    return [target / name for name in files]


def uninstall_folder(target: Path) -> list[str]:
    """Remove the files that `install_folder` wrote and nobody changed, and the folder if it is empty then.

    Returns the names of the files that stay.

    Raises:
        InputError: if `install_folder` did not write to `target`.
    """
    record = _record(target)
    if not record:
        raise InputError(f"{target} was not written by sd-ort: nothing to uninstall.")
    state = compare(target, record)
    compiled = [name for name in state.foreign if Path(name).match("__pycache__/*.pyc")]
    for name in (*state.owned, *compiled, MARKER):  # the marker last: an interrupted call can be repeated
        (target / name).unlink()
    for folder in (*sorted((path for path in target.rglob("*") if path.is_dir()), reverse=True), target):
        if not folder.is_symlink() and not any(folder.iterdir()):
            folder.rmdir()
    return [name for name in (*state.changed, *state.foreign) if name != MARKER and name not in compiled]


def _record(target: Path) -> dict[str, FileRecord]:
    """Return the records in the marker. Raises InputError if it is damaged; {} without one."""
    path = target / MARKER
    if not path.is_file():
        return {}
    content = without_nulls(read_json(path, root=target))
    if schema_mismatch(content, _MARKER) or not content.get("files"):
        raise InputError(f"{path} is damaged, or of an earlier version: remove {target} yourself.")
    return dict(content["files"])
