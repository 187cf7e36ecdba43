"""Reader of NumPy's .npz archives, which rejects pickled objects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.core.files import open_regular, parsing

MAGICS = (b"PK", b"\x93NUMPY")  # first bytes of an archive, and of one array


def npz_names(path: Path) -> list[str]:
    """Return the names of the arrays in an archive. Raises InputError as `read_npz`."""
    return list(read_npz(path, lambda name: False, named=True))


def read_npz(path: Path, is_selected: Callable[[str], bool], *, named: bool = False) -> dict[str, np.ndarray]:
    """Return the arrays of an archive whose names are wanted; `named`: all others too, empty and unread.

    Raises InputError for a file of another kind, a damaged one, and arrays of Python objects, which would run code.
    """
    try:
        opened = open_regular(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}. Save arrays there with numpy.savez.") from error
    with opened, parsing(path, "arrays: save it with numpy.savez"):
        if not opened.read(6).startswith(MAGICS):  # NumPy would take it for a pickle
            raise InputError(f"{path} is no .npz archive: save arrays with numpy.savez.")
        opened.seek(0)
        file = np.load(opened, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise InputError(f"{path} holds one array without a name: save it with numpy.savez.")
        with file:
            return {
                name: file[name] if is_selected(name) else np.empty(0)
                for name in file.files
                if named or is_selected(name)
            }
