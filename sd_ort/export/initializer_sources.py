"""Finds the checkpoint tensor that each initializer of an exported graph was created from.

Exporters rename, transpose, reshape and merge weights without a record of it. So the tensor is found by comparing
values: a recipe is used only if its result equals the initializer bit for bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import onnx_ir as ir
import torch

from fusion_passes.weight_recipes import WeightRecipe

Fingerprint = tuple[int, float, float]


def initializer_recipes(
    initializers: Iterable[ir.Value],
    tensors: Mapping[str, torch.Tensor],
    derived: Mapping[str, WeightRecipe] | None = None,
) -> dict[str, WeightRecipe]:
    """Return recipes of the float32 initializers of more than one element that are tensors, transposed or reshaped.

    derived: recipes of tensors that are none of the checkpoint's, but computed from these. If several tensors are
    equal, the one with the initializer's name is used, else the first.
    """
    by_fingerprint: dict[Fingerprint, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel() > 1:
            by_fingerprint[_fingerprint(tensor.numpy())].append(name)
    recipes = {}
    for value in initializers:
        name = str(value.name)
        if value.const_value is None or value.dtype != ir.DataType.FLOAT or value.const_value.size < 2:
            continue
        weight = value.const_value.numpy()
        candidates = sorted(by_fingerprint[_fingerprint(weight)], key=lambda candidate: candidate != name)
        matches = (_matching_recipe(candidate, tensors[candidate].numpy(), weight) for candidate in candidates)
        recipe = next((match for match in matches if match is not None), None)
        if recipe is not None:
            recipes[name] = substitute(recipe, derived or {})
    return recipes


def substitute(recipe: WeightRecipe, derived: Mapping[str, WeightRecipe]) -> WeightRecipe:
    """Return a recipe with the tensors in `derived` replaced by their own recipes."""
    if isinstance(recipe, str):
        return derived.get(recipe, recipe)
    return [*recipe[:2], *(substitute(operand, derived) for operand in recipe[2:])]


def duplicate_tensors(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Yield pairs of equal tensors. Exporters merge these, so the graph does not fit other checkpoints."""
    by_fingerprint: dict[Fingerprint, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel() > 1:
            for other in by_fingerprint[_fingerprint(tensor.numpy())]:
                if tensors[other].data_ptr() == tensor.data_ptr():
                    continue  # one parameter of two modules, in every checkpoint
                if tensors[other].shape == tensor.shape and torch.equal(tensors[other], tensor):
                    yield other, name
            by_fingerprint[_fingerprint(tensor.numpy())].append(name)


def _fingerprint(weight: np.ndarray) -> Fingerprint:
    """Return the size and the first and last element, which transposing and reshaping do not change."""
    return weight.size, float(weight[(0,) * weight.ndim]), float(weight[(-1,) * weight.ndim])


def _matching_recipe(name: str, tensor: np.ndarray, weight: np.ndarray) -> WeightRecipe | None:
    """Return the recipe that computes `weight` from the tensor `name`, or None."""
    if weight.shape == tensor.shape and np.array_equal(weight, tensor):
        return name
    if weight.ndim == 2 and weight.shape == tensor.T.shape and np.array_equal(weight, tensor.T):
        return ["transpose", [1, 0], name]
    if weight.size == tensor.size and weight.ndim != tensor.ndim and np.array_equal(weight.ravel(), tensor.ravel()):
        return ["reshape", list(weight.shape), name]
    return None
