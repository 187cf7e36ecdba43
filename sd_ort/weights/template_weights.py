"""Lazy weights of a template graph, computed from a checkpoint by their weight recipes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from fusion_passes import weight_recipes
from sd_ort.core.errors import InputError

Read = Callable[[str], np.ndarray]


def fill(model: ir.Model, read: Read) -> None:
    """Replace every initializer with a recipe by a lazy tensor; `read(name)` returns a checkpoint tensor.

    Reading a weight raises the exceptions of `read`, and InputError if its shape is not the initializer's. A weight
    that is rounded to the dtype of the checkpoint's tensors is not converted to float32 in between.
    """
    for value in model.graph.initializers.values():
        recipe = weight_recipes.recipe_of(value)
        if recipe is not None and value.const_value is not None:
            value.const_value = _lazy(value.const_value, recipe, read)


def _lazy(like: ir.TensorProtocol, recipe: weight_recipes.WeightRecipe, read: Read) -> ir.LazyTensor:
    name, dtype, shape = like.name, like.dtype, ir.Shape(like.shape.numpy())

    def evaluate() -> ir.Tensor:
        names = ", ".join(weight_recipes.sources(recipe))
        try:
            values = weight_recipes.evaluate(recipe, read)
        except (ValueError, np.exceptions.AxisError) as error:
            raise InputError(f"{names} of the checkpoint do not fit its config: {error}.") from error
        if list(values.shape) != list(shape.numpy()):
            shapes = f"{names} have shape {list(values.shape)}, not {list(shape.numpy())}"
            raise InputError(f"the checkpoint's weights do not fit its config: {shapes}.")
        return ir.Tensor(values.astype(dtype.numpy(), copy=False), dtype=dtype, name=name)

    return ir.LazyTensor(evaluate, dtype=dtype, shape=shape, name=name)
