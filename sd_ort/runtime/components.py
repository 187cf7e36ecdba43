"""The components of a pipeline folder, opened when they are first used; with little memory, one at a time."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.core.folder import check_component, components
from sd_ort.runtime.providers import check_provider
from sd_ort.runtime.session import Model, load

# Components that take turns at every step: with --low-memory they stay in memory together.
TOGETHER = frozenset({"unet", "controlnet"})


class Components(MutableMapping[str, Model]):
    """Name -> `Model` of a folder's components. A component that is assigned takes the place of the folder's.

    `low_memory`: opening one drops the others, so that only one is in memory (see `TOGETHER`).
    """

    def __init__(
        self, folder: Path, provider: str = "cpu", *, low_memory: bool = False, **session_options: Any
    ) -> None:
        """`session_options`: those of `sd_ort.runtime.session.create_session`.

        Raises InputError for a folder that holds no pipeline, ProviderError for a provider that is not installed.
        """
        self.folder = folder
        self.names = components(folder)
        self.provider = provider
        self.low_memory = low_memory
        self.options = session_options
        self.opened: dict[str, Model] = {}
        self.weights: dict[str, Mapping[str, np.ndarray]] = {}
        check_provider(provider, allow_fallback=bool(session_options.get("allow_fallback")))

    def require(self, *names: str) -> None:
        """Check that components are there and whole, before minutes go into the others. Raises InputError."""
        for name in names:
            if name not in self.names:
                raise InputError(
                    f"{self.folder} has no {name}: export the whole pipeline with `sd-ort export MODEL OUT`."
                )
            check_component(self.folder, name)

    def __getitem__(self, name: str) -> Model:
        if name not in self.opened:
            self.require(name)
            if self.low_memory:
                keep = TOGETHER if name in TOGETHER else ()
                for other in [other for other in self.opened if other not in keep]:
                    del self.opened[other]
                gc.collect()
            weights = self.weights.get(name)
            self.opened[name] = load(self.folder, name, self.provider, weights=weights, **self.options)
        return self.opened[name]

    def replace_weights(self, weights: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """From now on open components with these initializers (by component) instead of those in their files."""
        for name in {*self.weights, *weights}:
            self.opened.pop(name, None)
        self.weights = dict(weights)

    def __setitem__(self, name: str, model: Model) -> None:
        self.opened[name] = model

    def __delitem__(self, name: str) -> None:
        del self.opened[name]

    def __contains__(self, name: object) -> bool:
        return name in self.names or name in self.opened

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
