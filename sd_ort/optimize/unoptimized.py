"""A component before it is optimized: exported to a folder, or a template with the weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from fusion_passes import weight_recipes
from fusion_passes.weight_recipes import WeightRecipe
from sd_ort.checkpoints.configs import model_config
from sd_ort.core import pipeline_folder
from sd_ort.graphs.load import load
from sd_ort.weights.recipes import Read, read_recipes


@dataclass(frozen=True)
class UnoptimizedComponent:
    """A component before optimization.

    model: loads the graph; its weights have recipes and are read lazily. config: loads the config. bytes: size of the
    weights in float32. path: of its ONNX file, if it has one. read: reads tensors of its checkpoint, if it has one.
    """

    name: str
    model: Callable[[], ir.Model]
    config: Callable[[], Mapping[str, Any]]
    bytes: int
    path: Path | None = None
    read: Read | None = None


def file_component(path: Path, recipes: Mapping[str, WeightRecipe] | None = None) -> UnoptimizedComponent:
    """Return the model in an ONNX file.

    recipes: of its weights (see `fusion_passes.weight_recipes`); by default each weight is a tensor of its own name.
    """

    def model() -> ir.Model:
        loaded = load(path)
        weight_recipes.init_recipes(loaded, recipes)
        return loaded

    size = sum(file.stat().st_size for file in path.parent.iterdir() if file.is_file())
    return UnoptimizedComponent(pipeline_folder.model_name(path), model, lambda: model_config(path), size, path)


def folder_components(source: Path, names: list[str]) -> list[UnoptimizedComponent]:
    """Return components of a pipeline folder. Raises InputError if one is incomplete."""
    paths = {name: pipeline_folder.check_component(source, name) for name in names}
    recipes = read_recipes(source)
    return [file_component(path, recipes.get(name)) for name, path in paths.items()]
