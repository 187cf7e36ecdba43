"""A checkpoint of which a part comes from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sd_ort.checkpoints.checkpoint import Source
from sd_ort.checkpoints.signatures import Config
from sd_ort.checkpoints.tensor_readers import Holder

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Changed:
    """Another source with some of it taken from `file`: here is what stays as it was."""

    source: Source
    file: Path

    @property
    def name(self) -> str:
        return f"{self.source.name} with {self.file}"

    @property
    def index(self) -> Config:
        return self.source.index

    @property
    def configs(self) -> dict[str, Config]:
        return self.source.configs

    @property
    def random_weights(self) -> bool:
        return self.source.random_weights

    @property
    def about(self) -> str:
        return self.source.about

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.file, *self.source.folders)

    def holder(self, model: str) -> Holder | None:
        return self.source.holder(model)

    def load(self, model: str) -> torch.nn.Module:
        return self.source.load(model)

    def write_configs(self, out: Path) -> None:
        self.source.write_configs(out)
