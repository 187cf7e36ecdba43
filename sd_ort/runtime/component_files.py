"""The files of a pipeline's components: its own folder's, and ControlNets of other folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import MODEL, check_component, components


class ComponentFiles:
    """Locations of the files of each component. names: all component names.

    `others`: ControlNets by name, each the component `controlnet` of another folder.
    """

    def __init__(self, folder: Path, others: Mapping[str, Path] | None = None) -> None:
        """Raises InputError for a folder that holds no pipeline."""
        self.folder, self.others = folder, dict(others or {})
        self.names = list(dict.fromkeys([*components(folder), *self.others]))
        self.checked: set[str] = set()

    def location(self, name: str) -> tuple[Path, str]:
        """Return the folder of a component, and its name there."""
        return (self.others[name], "controlnet") if name in self.others else (self.folder, name)

    def model(self, name: str) -> Path:
        folder, component = self.location(name)
        return folder / component / MODEL

    def weight_bytes(self, name: str) -> int:
        """Return the size of a component's files."""
        return sum(path.stat().st_size for path in self.model(name).parent.iterdir() if path.is_file())

    def require(self, *names: str) -> None:
        """Raise InputError if files of components are missing or truncated, before sessions are opened."""
        for name in names:
            if name not in self.names:
                raise InputError(
                    f"{self.folder} has no {name}: export the whole pipeline with `sd-ort export MODEL OUT`."
                )
            check_component(*self.location(name))
            self.checked.add(name)
