"""File locks between processes, released when the process ends: flock, and LockFileEx on Windows."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path

if sys.platform == "win32":
    import msvcrt

    SHARED, EXCLUSIVE, NON_BLOCKING = 0, 2, 1  # LOCKFILE_EXCLUSIVE_LOCK, LOCKFILE_FAIL_IMMEDIATELY
    _BYTE = 1 << 62  # which is locked: none that anybody reads, as a lock would keep them from it

    def lock(descriptor: int, kind: int) -> None:
        """Lock an open file. Raises BlockingIOError if another process has it and `kind` has NON_BLOCKING."""
        handle = ctypes.c_void_p(msvcrt.get_osfhandle(descriptor))
        overlapped = (ctypes.c_uint64 * 4)(0, 0, _BYTE, 0)  # OVERLAPPED: two of the system's own, offset, event
        if not ctypes.windll.kernel32.LockFileEx(handle, kind, 0, 1, 0, ctypes.byref(overlapped)):
            raise BlockingIOError(f"Another process has locked file {descriptor}.")

    def _lock_file(folder: Path) -> Path:
        """Return the file beside a folder that is locked in its place: Windows moves no folder with an open file."""
        return folder.with_name(f"lock-of-{folder.name}")

    def _open_folder(folder: Path) -> int:
        return os.open(_lock_file(folder), os.O_RDWR | os.O_CREAT)

else:
    import fcntl

    SHARED, EXCLUSIVE, NON_BLOCKING = fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_NB

    def lock(descriptor: int, kind: int) -> None:
        """Lock an open file. Raises BlockingIOError if another process has it and `kind` has NON_BLOCKING."""
        fcntl.flock(descriptor, kind)

    def _open_folder(folder: Path) -> int:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def lock_folder(folder: Path) -> int:
    """Lock a folder and return the lock's descriptor.

    Raises BlockingIOError if another process has locked it, and another OSError in a file system without locks.
    """
    descriptor = _open_folder(folder)
    try:
        lock(descriptor, EXCLUSIVE | NON_BLOCKING)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def unlock_folder(folder: Path, descriptor: int) -> None:
    """Release a lock of `lock_folder`."""
    os.close(descriptor)
    if sys.platform == "win32":
        with suppress(OSError):  # another process may have opened it
            _lock_file(folder).unlink()
