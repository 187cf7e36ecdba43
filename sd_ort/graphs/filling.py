"""Weights of a graph taken from a checkpoint by their recipes, each when it is asked for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from fusion_passes import weight_recipes as recipes
from sd_ort.core.errors import InputError

Read = Callable[[str], np.ndarray]


def fill(model: ir.Model, read: Read) -> None:
    """Give every initializer with a recipe the numbers which that makes of the tensors that `read` gives by name.

    `read` is called when a weight is asked for; that raises what `read` raises, and InputError for tensors that make
    another shape than the initializer's. Where a weight was to be rounded and the checkpoint has that type already,
    nothing goes through float32.
    """
    for value in model.graph.initializers.values():
        recipe = recipes.recipe_of(value)
        if recipe is not None and value.const_value is not None:
            value.const_value = _lazy(value.const_value, recipe, read)


def _lazy(like: ir.TensorProtocol, recipe: recipes.WeightRecipe, read: Read) -> ir.LazyTensor:
    name, dtype, shape = like.name, like.dtype, ir.Shape(like.shape.numpy())

    def evaluate() -> ir.Tensor:
        names = ", ".join(recipes.sources(recipe))
        try:
            numbers = recipes.evaluate(recipe, read)
        except (ValueError, np.exceptions.AxisError) as error:
            raise InputError(f"{names} of the checkpoint do not fit its config: {error}.") from error
        if list(numbers.shape) != list(shape.numpy()):
            what = f"{names} make {list(numbers.shape)}, not {list(shape.numpy())}"
            raise InputError(f"the checkpoint's weights do not fit its config: {what}.")
        return ir.Tensor(numbers.astype(dtype.numpy(), copy=False), dtype=dtype, name=name)

    return ir.LazyTensor(evaluate, dtype=dtype, shape=shape, name=name)
