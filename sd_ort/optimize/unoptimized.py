"""A component before it is optimized, wherever it comes from: an exported folder, or a template that is filled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from fusion_passes import weight_recipes as recipes
from sd_ort.checkpoints.configs import config_beside
from sd_ort.core import pipeline_folder
from sd_ort.graphs.load import load
from sd_ort.weights.recipes import Read


@dataclass(frozen=True)
class Raw:
    """A component `name`; `model` reads its graph, whose weights have recipes and stay where they are until they are
    asked for; `config` reads the config of its model; `bytes` are those of its weights in float32; `path`: of its
    model.onnx, where there is one; `read`: what gives the tensors of its checkpoint, where that is at hand."""

    name: str
    model: Callable[[], ir.Model]
    config: Callable[[], Mapping[str, Any]]
    bytes: int
    path: Path | None = None
    read: Read | None = None


def of_file(path: Path, known: Mapping[str, str] | None = None) -> Raw:
    """The model in an ONNX file, of a pipeline folder or by itself.

    known: the recipes of its weights (see `fusion_passes.weight_recipes`); without, they are made of its own names.
    """

    def model() -> ir.Model:
        loaded = load(path)
        recipes.init_recipes(loaded, None if known is None else recipes.load(known))
        return loaded

    size = sum(file.stat().st_size for file in path.parent.iterdir() if file.is_file())
    return Raw(pipeline_folder.model_name(path), model, lambda: config_beside(path), size, path)


def of_folder(source: Path, names: list[str]) -> list[Raw]:
    """The components of a pipeline folder. Raises InputError for one that is not whole."""
    paths = {name: pipeline_folder.check_component(source, name) for name in names}
    described = pipeline_folder.read_manifest(source).get("components", {})
    return [of_file(path, described.get(name, {}).get("weights")) for name, path in paths.items()]
