"""Where the weights of an exported graph come from: the tensors of the torch module it was traced from.

Exporters rename, transpose, reshape and merge weights, each in its own way and none says how; so a weight's origin is
found by its numbers, and is right by construction: what the recipe makes was compared with the weight bit for bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir
import torch

from fusion_passes.weight_recipes import WeightRecipe

Key = tuple[int, float, float]


def origins(model: ir.Model, tensors: Mapping[str, torch.Tensor]) -> dict[str, WeightRecipe]:
    """A recipe for every float initializer of more than one number that is a tensor, its transpose or a reshape.

    Where two tensors are equal, the one of the initializer's own name is taken, else the first.
    """
    by_key: dict[Key, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel() > 1:
            by_key[_key(tensor.numpy())].append(name)
    found = {}
    for name, value in model.graph.initializers.items():
        if value.const_value is None or value.dtype != ir.DataType.FLOAT or value.const_value.size < 2:
            continue
        weight = value.const_value.numpy()
        candidates = sorted(by_key[_key(weight)], key=lambda candidate: candidate != name)
        recipes = (_recipe(candidate, tensors[candidate].numpy(), weight) for candidate in candidates)
        recipe = next((r for r in recipes if r is not None), None)
        if recipe is not None:
            found[name] = recipe
    return found


def equal_tensors(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Pairs of tensors that hold the same numbers: exporters merge them, so that a graph is not every checkpoint's."""
    by_key: dict[Key, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel() > 1:
            for other in by_key[_key(tensor.numpy())]:
                if tensors[other].shape == tensor.shape and torch.equal(tensors[other], tensor):
                    yield other, name
            by_key[_key(tensor.numpy())].append(name)


def _key(weight: np.ndarray) -> Key:
    """The size and the first and last number: what transposing and reshaping leave as it is."""
    return weight.size, float(weight[(0,) * weight.ndim]), float(weight[(-1,) * weight.ndim])


def _recipe(name: str, tensor: np.ndarray, weight: np.ndarray) -> WeightRecipe | None:
    if weight.shape == tensor.shape and np.array_equal(weight, tensor):
        return name
    if weight.ndim == 2 and weight.shape == tensor.T.shape and np.array_equal(weight, tensor.T):
        return ["transpose", [1, 0], name]
    if weight.size == tensor.size and weight.ndim != tensor.ndim and np.array_equal(weight.ravel(), tensor.ravel()):
        return ["reshape", list(weight.shape), name]
    return None
