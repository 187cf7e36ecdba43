"""Files that sd-ort writes into a folder of the user."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from sd_ort.core import ownership
from sd_ort.core.errors import OutputError
from sd_ort.core.ownership import SharedFolder


def test_a_disk_that_fills_before_the_record_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command goes on when there is space again. Files of the user stay refused."""
    folder = SharedFolder(tmp_path, overwrite=False, is_older=lambda _: False)
    folder.write("report.html", b"first")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ownership, "write_json", full)
        with pytest.raises(OSError, match="No space left"):
            folder.write("report.html", b"second")
    assert folder.write("report.html", b"third").read_bytes() == b"third"
    (tmp_path / "report.html").write_bytes(b"of the user")
    with pytest.raises(OutputError, match="was not written by sd-ort, or changed since"):
        folder.write("report.html", b"fourth")
    assert (tmp_path / "report.html").read_bytes() == b"of the user"
