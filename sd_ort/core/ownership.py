"""Records of the files that sd-ort wrote into a folder, by size and SHA-256.

A command replaces or removes a file only if it still matches the record. A recorded file that differs is *changed*: it
goes only with --overwrite. All others are *foreign*, and always stay.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sd_ort.core.errors import InputError, OutputError
from sd_ort.core.files import open_regular, read_json, write_bytes, write_json
from sd_ort.core.schema import record_type, schema_mismatch

FileRecord = Mapping[str, Any]  # bytes and sha256
FILE_RECORD = record_type("FileRecord", {}, {"bytes": int, "sha256": str})
Stamp = tuple[int, int, int]  # inode, size and time of a file


def is_record(entry: Any) -> bool:
    """Whether a JSON value is the record of a file."""
    return schema_mismatch(entry, FILE_RECORD) is None


def sha256(path: Path) -> str:
    """Return the hex SHA-256 of a regular file."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def record_file(path: Path, digest: str | None = None) -> dict[str, Any]:
    """Return the record of a file; `digest`: its SHA-256, if it was computed already."""
    return {"bytes": path.stat().st_size, "sha256": digest or sha256(path)}


def tree_names(folder: Path) -> set[str]:
    """Return the relative paths of all entries below a folder: files, links, and empty folders with a final slash."""
    names = set()
    for parent, folders, files in os.walk(folder):
        home = Path(parent).relative_to(folder)
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        names |= {(home / name).as_posix() for name in (*files, *links)}
        if not folders and not files and parent != str(folder):
            names.add(f"{home.as_posix()}/")
    return names


def file_stamp(status: os.stat_result) -> Stamp:
    """Return the inode, size and time of a file, which change when it is replaced."""
    return status.st_ino, status.st_size, status.st_mtime_ns


@dataclass
class FolderState:
    """Entries of a folder compared with its record, by relative path. owned: files that match, with their stamps."""

    owned: dict[str, Stamp] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def adopt(self, folder: Path, is_ours: Callable[[str], bool], before: FolderState | None) -> None:
        """Count foreign files as owned by their names, for a folder without records; as changed if not as `before`."""
        for name in [name for name in self.foreign if is_ours(name)]:
            status = (folder / name).lstat()
            if stat.S_ISREG(status.st_mode):
                self.foreign.remove(name)
                if before is None or before.owned.get(name) == file_stamp(status):
                    self.owned[name] = file_stamp(status)
                else:
                    self.changed.append(name)

    def check_replaceable(self, folder: Path, overwrite: bool) -> None:
        """Raise OutputError if replacing the recorded files of `folder` would lose changes."""
        if self.changed and not overwrite:
            raise OutputError(
                f"{folder} has files that were changed since sd-ort wrote them: {format_names(self.changed)}. Move "
                "them away, choose another folder, or pass --overwrite to replace them."
            )


RECORD = "sd_ort_files.json"


class SharedFolder:
    """A folder of the user in which commands write single files, listed in the file RECORD.

    is_older: tells of a file, in a folder without any record, whether sd-ort wrote it before there were records.
    """

    def __init__(self, folder: Path, overwrite: bool, is_older: Callable[[Path], bool]) -> None:
        self.folder, self.overwrite, self.is_older = folder, overwrite, is_older
        self.written: set[str] = set()  # names, by this object

    def check(self, *names: str) -> None:
        """Raise OutputError if writing files would replace one that sd-ort did not write, or that was changed."""
        record = self._record()
        for name in names:
            path = self.folder / name
            if self.overwrite or not os.path.lexists(path):
                continue
            if path.is_symlink() or name not in record or record_file(path) != record[name]:
                raise OutputError(
                    f"{path} was not written by sd-ort, or changed since: move it away, choose another folder, or "
                    "pass --overwrite."
                )

    def write(self, name: str, data: bytes) -> Path:
        """Write a file and its record; return its path. Raises as `check`."""
        self.check(name)
        path = self.folder / name
        write_bytes(path, data)
        self.written.add(name)
        try:
            self.record(name)
        except BaseException:  # a full disk: without its record the file would be taken for the user's
            path.unlink()
            raise
        return path

    def remove(self, *names: str) -> None:
        """Remove files, if they are there. Raises as `check`."""
        self.check(*names)
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def record(self, *names: str) -> None:
        """Record files that other code wrote; missing files are skipped."""
        records = {name: record_file(self.folder / name) for name in names if (self.folder / name).is_file()}
        write_json(self.folder / RECORD, {**self._record(), **records})

    def _record(self) -> dict[str, FileRecord]:
        if not os.path.lexists(self.folder / RECORD):
            files = [path for path in self.folder.glob("*") if path.is_file() and not path.is_symlink()]
            return {path.name: record_file(path) for path in files if self.is_older(path)}
        try:
            content = read_json(self.folder / RECORD, root=self.folder)
        except InputError:  # damaged: nothing is recorded
            return {}
        return {name: entry for name, entry in content.items() if is_record(entry)}


def compare(folder: Path, record: Mapping[str, FileRecord], before: FolderState | None = None) -> FolderState:
    """Compare the files of a folder with its record. Files with a stamp as `before` are not read again."""
    state = FolderState()
    for name in sorted(tree_names(folder)):
        if name not in record:
            state.foreign.append(name)
            continue
        status = (folder / name).lstat()
        stamp = file_stamp(status)
        same = stat.S_ISREG(status.st_mode) and status.st_size == record[name]["bytes"]
        is_unchanged = before is not None and before.owned.get(name) == stamp
        if same and (is_unchanged or sha256(folder / name) == record[name]["sha256"]):
            state.owned[name] = stamp
        else:
            state.changed.append(name)
    return state


def format_names(names: list[str]) -> str:
    """Return the first names of a list, for a message."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
