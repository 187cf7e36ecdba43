"""Compare the weights of rewritten graphs with the results of their weight recipes."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir

from fusion_passes import weight_recipes as recipes
from fusion_passes.fuse import FUSIONS, fuse
from fusion_passes.graph_pass import run_all
from sd_ort.graphs import hoist
from sd_ort.optimize import precision
from sd_ort.optimize.optimizer import lower_operators
from sd_ort.optimize.options import HOIST_TARGETS
from sd_ort.optimize.targets import TARGETS, Target


def init_tensors(model: ir.Model) -> dict[str, np.ndarray]:
    """Return the initializers of an exported graph by name, and start the recipes of the graph with them."""
    recipes.init_recipes(model)
    return {str(value.name): numbers(value) for value in model.graph.initializers.values()}


def numbers(weight: ir.Value) -> np.ndarray:
    assert weight.const_value is not None
    values: np.ndarray = weight.const_value.numpy()
    return values


def checked_recipes(models: Iterable[ir.Model], tensors: Mapping[str, np.ndarray]) -> int:
    """Return how many weights have recipes; assert that each recipe computes its weight from `tensors` bit for bit.

    Weights without a recipe are constants of the graph: integers, at most 32 values, equal values, or sines.
    """
    count = 0
    for value in (value for model in models for value in model.graph.initializers.values()):
        weight, recipe = numbers(value), recipes.recipe_of(value)
        if recipe is None:
            own = weight.dtype.kind == "i" or weight.size <= 32 or (weight == weight.flat[0]).all()
            assert own or "sin" in str(value.name), value.name
            continue
        recomputed = recipes.evaluate(recipe, tensors.__getitem__)
        assert (recomputed.dtype, recomputed.shape, recomputed.tobytes()) == (
            weight.dtype,
            weight.shape,
            weight.tobytes(),
        ), value.name
        count += 1
    return count


def check_recipes_of_targets(
    name: str, canonical: ir.Model, fused: ir.Model, tensors: Mapping[str, np.ndarray]
) -> None:
    """Assert the recipes of a graph in float16 for each target but gpu, whose graphs are those of hip.

    A U-Net is hoisted for the first target that does this by default. fused: `canonical` after all FUSIONS.
    """
    gc.disable()  # its repeated walks of the large graphs take most of the time
    try:
        fused_with = {FUSIONS: fused}
        for target in (target for name, target in TARGETS.items() if name != "gpu"):  # gpu: as hip
            if target.fusions not in fused_with:
                fused_with[target.fusions] = canonical.clone()
                fuse(fused_with[target.fusions], target.fusions)
            model = fused_with[target.fusions].clone()
            hoisted = name.endswith(".unet") and target.name == HOIST_TARGETS[0]  # the split takes as long as all else
            parts = lowered_parts(model, target, "float16", hoisted=hoisted)
            assert checked_recipes(parts, tensors) > 50, target.name
    finally:
        gc.enable()


def lowered_parts(model: ir.Model, target: Target, dtype: str, *, hoisted: bool) -> list[ir.Model]:
    """Return the graphs of a fused model after passes, dtype conversion and lowering of a target."""
    run_all(model, target.passes_for(dtype))
    if dtype != "float32" and not target.half_storage_only:
        precision.convert(model, dtype, float32_inputs=target.float32_inputs)
    lower_operators(model, target)
    parts = list(hoist.split(model).values()) if hoisted else [model]
    if dtype != "float32" and target.half_storage_only:
        for part in parts:
            precision.store_weights(part, dtype)
    return parts
