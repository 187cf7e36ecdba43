"""Finished components of an interrupted export, which the same command reuses."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sd_ort.core.errors import InputError
from sd_ort.core.files import read_json, write_json


class FinishedComponents:
    """Finished components of the export to a folder OUT, in `.OUT.finished` beside it.

    Their files are hard links, which take no space while the export runs, and survive the end of its process. On file
    systems without hard links nothing is kept.
    """

    def __init__(self, out: Path, manifest: Mapping[str, Any]) -> None:
        """`manifest`: source, versions and options of the export; components of another export are removed."""
        text = json.dumps(manifest, sort_keys=True)
        self.folder = out.with_name(f".{out.name}.finished")
        self._export = self.folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        if self.folder.is_dir() and not self._export.is_dir():
            self.remove()

    def take(self, name: str, target: Path) -> dict[str, Any] | None:
        """Link a finished component to the folder `target` and return its manifest entry; None if there is none."""
        try:
            entry = read_json(self._entry(name))
            shutil.copytree(self._export / name, target, copy_function=os.link)
        except (InputError, OSError, shutil.Error):
            shutil.rmtree(target, ignore_errors=True)
            return None
        return entry

    def keep(self, name: str, source: Path, entry: Mapping[str, Any]) -> None:
        """Link the files of a component in folder `source`, and then write its manifest entry."""
        with suppress(OSError, shutil.Error):
            shutil.copytree(source, self._export / name, copy_function=os.link)
            write_json(self._entry(name), entry)

    def names(self) -> list[str]:
        return sorted(path.stem for path in self._export.glob("*.json"))

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _entry(self, name: str) -> Path:
        return self._export / f"{name}.json"
