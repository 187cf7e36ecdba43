"""Staging folders: an output is written beside its destination and replaces it atomically.

At every instant the old or the new folder is complete at its place, or at `.NAME.former`, from where `recover` renames
it back: Linux exchanges two folders in one call, and the second name serves file systems that cannot. Old folders are
removed last. Files that sd-ort did not write are linked into the new folder before the exchange, so none is ever moved.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sd_ort.core import locks
from sd_ort.core.errors import OutputError
from sd_ort.core.interrupts import with_watchdog
from sd_ort.core.ownership import tree_names

RENAME_EXCHANGE = 2  # linux/fs.h
AT_FDCWD = -100


def replace_folder(new: Path, output: Path, keep: Iterable[str] = ()) -> None:
    """Put the folder `new` at `output`. A former folder lies at `new` then; its entries `keep` are in both.

    Raises OutputError if `new` has a file of its own for one of `keep`, or it cannot be linked; `output` stays then.
    """
    if not output.exists():
        new.rename(output)
        return
    keep, before = list(keep), tree_names(output)
    for name in keep:
        if os.path.lexists(new / name) and not name.endswith("/"):
            raise OutputError(f"{output / name} was not written by sd-ort and would be lost: move it away.")
        _link(output, new, name)
    if not exchange(new, output):
        former = _former(output)
        output.rename(former)
        new.rename(output)
        former.rename(new)
    for name in sorted(tree_names(new) - before):  # written meanwhile
        with suppress(OSError, OutputError):
            _link(new, output, name)


def _link(source: Path, target: Path, name: str) -> None:
    """Make the entry `name` of a folder appear in another one: a hard link, or an empty folder."""
    try:
        if name.endswith("/"):
            (target / name).mkdir(parents=True, exist_ok=True)
        else:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            follows = os.link not in os.supports_follow_symlinks  # on Windows, where nothing else can be asked for
            os.link(source / name, target / name, follow_symlinks=follows)
    except OSError as error:
        raise OutputError(f"{source / name} cannot be kept ({error.strerror}): move it away.") from error


def exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; return False if the system or its file system cannot."""
    if sys.platform == "win32":
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _former(output: Path) -> Path:
    return output.with_name(f".{output.name}.former")


def recover(output: Path) -> None:
    """Finish what a killed process left: the old folder returns to its place, unless the new one is there."""
    former = _former(output)
    if former.is_dir() and not former.is_symlink():
        if os.path.lexists(output):
            former.rename(Path(tempfile.mkdtemp(prefix=_prefix(output.name), dir=output.parent)))
        else:
            former.rename(output)


def _prefix(name: str) -> str:
    return f".{name}.partial-"


@contextmanager
def scratch_folder(parent: Path, name: str) -> Iterator[Path]:
    """Yield a folder `parent`/.`name`.partial-..., which is removed on leaving unless it was moved.

    Such folders of killed processes are removed first: each is locked while its process lives. Raises OutputError if
    the folder cannot be created.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(parent, _prefix(name))
        work, lock = _locked_folder(parent, _prefix(name))
    except OSError as error:
        raise OutputError(f"cannot write to {parent}: {error.strerror}.") from error
    try:
        with with_watchdog(work):
            try:
                yield work
            finally:
                for _ in range(5):  # a thread that is told to stop may write a last file meanwhile
                    if work.exists():
                        shutil.rmtree(work, ignore_errors=True)
    finally:
        if lock is not None:
            locks.unlock_folder(work, lock)


def remove_leftovers(parent: Path, prefix: str) -> None:
    """Remove the folders in `parent` whose name starts with `prefix` and whose process is gone."""
    for path in [path for path in parent.iterdir() if path.name.startswith(prefix)]:
        with suppress(OSError):
            lock = locks.lock_folder(path)
            try:
                shutil.rmtree(path, ignore_errors=True)
            finally:
                locks.unlock_folder(path, lock)


def _locked_folder(parent: Path, prefix: str) -> tuple[Path, int | None]:
    """Return a new folder and the descriptor that locks it. Retries if another process removed it as a leftover.

    The descriptor is None in a file system without locks: nothing is taken for a leftover there.
    """
    while True:
        work = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            lock = locks.lock_folder(work)
        except (BlockingIOError, FileNotFoundError):
            continue
        except OSError:
            return work, None
        if work.is_dir():
            return work, lock
        locks.unlock_folder(work, lock)
