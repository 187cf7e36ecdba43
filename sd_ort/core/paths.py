"""Resolution of paths: decides which files a model folder may read and where an output may lie."""

from __future__ import annotations

import os
import re
from pathlib import Path

from sd_ort.core.errors import InputError, OutputError

# Bytes of a file's name that file systems take, less what a temporary sibling's name adds.
NAME_LIMIT = 255 - 32


def real(path: Path) -> Path:
    """Return an absolute path without links and `..`. Parts that do not exist stay in the path."""
    return Path(os.path.realpath(path))


def inside(path: Path, root: Path) -> Path:
    """Return the target of `path`, which must lie in the folder `root` after all links are followed.

    The Hugging Face hub's cache keeps files in `<model>/blobs` and links to them from `<model>/snapshots/<revision>`:
    a root in a snapshot may read those blobs too. Raises InputError for a path that leads anywhere else.
    """
    try:
        target, home = real(path), real(root)
    except ValueError as error:  # a zero byte in a name that a file gave
        raise InputError(f"{root} names a file that cannot exist: do not trust it.") from error
    snapshots = (parent for parent in (home, *home.parents) if parent.parent.name == "snapshots")
    blobs = [snapshot.parent.parent / "blobs" for snapshot in snapshots]
    if not any(allowed in target.parents for allowed in (home, *blobs)):
        raise InputError(f"{path} leads outside its folder to {target}: do not trust it, or put the file itself there.")
    return target


def output_path(output: Path, *sources: Path) -> Path:
    """Return the path of an output that replaces `output`, with links followed.

    Raises OutputError when it is one of the folders `sources`, holds one or lies in one: writing would destroy or
    change the input. Also for a name that no file system takes.
    """
    try:
        path = real(output)
        path.exists()
    except OSError as error:
        raise OutputError(f"{str(output)[:80]} cannot be written: {error.strerror}. Choose another name.") from error
    if len(os.fsencode(path.name)) > NAME_LIMIT:
        raise OutputError(f"{path.name[:40]}… is too long a name: choose one of at most {NAME_LIMIT} bytes.")
    for source in map(real, sources):
        if path == source or path in source.parents or source in path.parents:
            raise OutputError(f"{output} and {source} are one folder, or one lies in the other: choose another OUT.")
    return path


def check_writable(path: Path) -> None:
    """Raise OutputError if a file cannot be created. Commands call this before long work."""
    folder = next(parent for parent in real(path).parents if os.path.exists(parent))
    if not os.path.isdir(folder):
        raise OutputError(f"cannot write {path}: {folder} is no folder.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write {path}: {folder} may not be written to.")


def slugify(prompt: str) -> str:
    """Return a prompt as part of a file name: its letters and digits, joined by hyphens; "image" without any."""
    return re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:48] or "image"
