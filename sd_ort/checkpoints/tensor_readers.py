"""Files that a model's tensors are read from one at a time."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from fusion_passes import weight_recipes as recipes

Read = Callable[[str], np.ndarray]


class Holder(Protocol):
    """Where a model's tensors are, by diffusers' names."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that hold them."""

    def has(self, name: str, stored: Container[str]) -> bool:
        """Whether there is such a tensor, of files that hold `stored`."""

    def sources(self, name: str) -> list[str]:
        """The tensors of the files that `name` is made of."""

    def make(self, name: str, read: Read) -> np.ndarray:
        """The tensor `name`, in the files' type, of what `read` gives by their names."""


@dataclass(frozen=True)
class StoredFiles:
    """A diffusers folder's: tensors are stored under the names they are asked for."""

    paths: tuple[Path, ...]

    def has(self, name: str, stored: Container[str]) -> bool:
        return name in stored

    def sources(self, name: str) -> list[str]:
        return [name]

    def make(self, name: str, read: Read) -> np.ndarray:
        return read(name)


@dataclass(frozen=True)
class LaidOut:
    """A model in a file of other names: `made` has the recipe of each of its tensors."""

    path: Path
    made: Mapping[str, recipes.WeightRecipe]

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.path,)

    def has(self, name: str, stored: Container[str]) -> bool:
        return name in self.made

    def sources(self, name: str) -> list[str]:
        return recipes.sources(self.made[name])

    def make(self, name: str, read: Read) -> np.ndarray:
        return recipes.evaluate(self.made[name], read)
