"""Weights of rewritten graphs, made again by their recipes."""

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


def tensors(model: ir.Model) -> dict[str, np.ndarray]:
    """The initializers of a graph as it came, each of which is its own recipe from now on."""
    recipes.init_recipes(model)
    return {str(value.name): numbers(value) for value in model.graph.initializers.values()}


def numbers(weight: ir.Value) -> np.ndarray:
    assert weight.const_value is not None
    found: np.ndarray = weight.const_value.numpy()
    return found


def rebuilt(models: Iterable[ir.Model], tensors: Mapping[str, np.ndarray]) -> int:
    """How many weights have recipes, each of which makes the weight of `tensors` bit for bit; what has none is the
    graph's own: integers, few numbers, or all the same, or sines."""
    count = 0
    for value in (value for model in models for value in model.graph.initializers.values()):
        weight, recipe = numbers(value), recipes.recipe_of(value)
        if recipe is None:
            own = weight.dtype.kind == "i" or weight.size <= 32 or (weight == weight.flat[0]).all()
            assert own or "sin" in str(value.name), value.name
            continue
        made = recipes.evaluate(recipe, tensors.__getitem__)
        assert (made.dtype, made.shape, made.tobytes()) == (weight.dtype, weight.shape, weight.tobytes()), value.name
        count += 1
    return count


def rebuilt_for_every_target(
    name: str, canonical: ir.Model, fused: ir.Model, tensors: Mapping[str, np.ndarray]
) -> None:
    """In float16, a U-Net hoisted for one that does it by default. `fused`: with the fusions that most targets have."""
    gc.disable()  # it walks the large graphs again and again
    try:
        for target in (target for name, target in TARGETS.items() if name != "gpu"):  # as hip
            model = (fused if target.fusions == FUSIONS else canonical).clone()
            if target.fusions != FUSIONS:
                fuse(model, target.fusions)
            hoisted = name.endswith(".unet") and target.name == HOIST_TARGETS[0]  # the split takes as long as all else
            parts = lowered(model, target, "float16", hoisted=hoisted)
            assert rebuilt(parts, tensors) > 50, target.name
    finally:
        gc.enable()


def lowered(model: ir.Model, target: Target, dtype: str, *, hoisted: bool) -> list[ir.Model]:
    """What a fused graph becomes for a target, as `optimize_component` makes it."""
    run_all(model, target.passes_for(dtype))
    if dtype != "float32" and not target.half_storage_only:
        precision.convert(model, dtype, float32_inputs=target.float32_inputs)
    lower_operators(model, target)
    parts = list(hoist.split(model).values()) if hoisted else [model]
    if dtype != "float32" and target.half_storage_only:
        for part in parts:
            precision.store_weights(part, dtype)
    return parts
