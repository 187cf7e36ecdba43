"""Weight recipes of a pipeline folder, and weights that are computed from a checkpoint by their recipes.

The recipes and their evaluation are in `fusion_passes.weight_recipes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fusion_passes import weight_recipes
from sd_ort.core.errors import InputError
from sd_ort.core.files import parsing
from sd_ort.core.pipeline_folder import MANIFEST, read_manifest

if TYPE_CHECKING:
    import onnx_ir as ir

Read = Callable[[str], np.ndarray]  # returns a checkpoint tensor by name
KEY = "weight_recipes"  # of a component in the manifest


def read_recipes(folder: Path) -> dict[str, Mapping[str, weight_recipes.WeightRecipe]]:
    """Return the weight recipes in the manifest of a pipeline folder: by component, then by initializer."""
    entries = read_manifest(folder).get("components", {})
    with parsing(folder / MANIFEST, "weight recipes"):
        return {name: weight_recipes.load(entry[KEY]) for name, entry in entries.items() if KEY in entry}


def fill_initializers(model: ir.Model, read: Read) -> None:
    """Replace every initializer that has a recipe by a lazy tensor, which raises the exceptions of `derived_weight`."""
    import onnx_ir as ir

    def lazy(tensor: ir.TensorProtocol, recipe: weight_recipes.WeightRecipe) -> ir.LazyTensor:
        shape = ir.Shape(tensor.shape.numpy())
        return ir.LazyTensor(
            lambda: ir.Tensor(derived_weight(recipe, tensor, read), dtype=tensor.dtype, name=tensor.name),
            dtype=tensor.dtype, shape=shape, name=tensor.name,
        )  # fmt: skip

    for value in model.graph.initializers.values():
        recipe = weight_recipes.recipe_of(value)
        if recipe is not None and value.const_value is not None:
            value.const_value = lazy(value.const_value, recipe)


def derived_weight(recipe: weight_recipes.WeightRecipe, like: ir.TensorProtocol, read: Read) -> np.ndarray:
    """Return the weight of a recipe, with the shape and dtype of `like`; exceptions of `read` pass through.

    A weight that is rounded to the dtype of the checkpoint's tensors is not converted to float32 in between.

    Raises:
        InputError: if the checkpoint's tensors do not give the shape of `like`.
    """
    names, shape = ", ".join(weight_recipes.sources(recipe)), list(like.shape.numpy())
    try:
        values = weight_recipes.evaluate(recipe, read)
    except (ValueError, np.exceptions.AxisError) as error:
        raise InputError(f"{names} of the checkpoint do not fit its config: {error}.") from error
    if list(values.shape) != shape:
        shapes = f"{names} have shape {list(values.shape)}, not {shape}"
        raise InputError(f"the checkpoint's weights do not fit its config: {shapes}.")
    return values.astype(like.dtype.numpy(), copy=False)
