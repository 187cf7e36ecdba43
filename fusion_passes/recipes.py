"""Recipes: how each weight of a rewritten graph is made from the tensors of the checkpoint it came from.

A recipe is the name of a tensor, or [operation, argument, *recipes]: ["transpose", [1, 0], "mid_block.….weight"]. The
operations are those of OPERATIONS, which compute the weight as well, so that a recipe cannot say something else than
what was done. While a graph is rewritten a recipe lies in its initializer's `meta`; `collect` gathers them at the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

Recipe = str | list[Any]
KEY = "fusion_passes.recipe"
STRIP = 128  # columns of a matrix, filters of a convolution: pieces that caches hold
TAPS = (((0,), (1, 2)), ((0, 1), (2,)))  # of 3 in a row, by parity: those of the first pixel and of the second


def interleave(heads: int, *weights: np.ndarray) -> np.ndarray:
    """Projections (rows, heads * D) side by side, head by head: (rows, heads * parts * D)."""
    rows = weights[0].shape[0]
    return np.stack([w.reshape(rows, heads, -1) for w in weights], axis=2).reshape(rows, -1)


def cast(dtype: str, numbers: np.ndarray) -> np.ndarray:
    """Round to `dtype`, clamping finite numbers to its finite range: a mask of -3.4e38 must not become -infinity."""
    half = ir.DataType[dtype].numpy()
    if numbers.dtype == half:
        return numbers
    numbers = single(numbers)
    limit = float(ml_dtypes.finfo(half).max)
    if numbers.size and (np.max(numbers) > limit or np.min(numbers) < -limit):
        numbers = np.where(np.isfinite(numbers), np.clip(numbers, -limit, limit), numbers)
    return numbers.astype(half)


def single(numbers: np.ndarray) -> np.ndarray:
    """In float32, the type that is computed in: a copy of numbers of another type only."""
    return numbers.astype(np.float32, copy=False)


def contiguous(numbers: np.ndarray) -> np.ndarray:
    """Weights whose axes were moved are copied in pieces that caches hold: a sixth to a tenth of NumPy's time."""
    if numbers.flags.c_contiguous or numbers.ndim not in (2, 4):
        return np.ascontiguousarray(numbers).reshape(numbers.shape)  # NumPy makes a row of a number
    copied = np.empty(numbers.shape, numbers.dtype)
    if numbers.ndim == 2:
        for start in range(0, numbers.shape[1], STRIP):
            copied[:, start : start + STRIP] = numbers[:, start : start + STRIP]
    else:  # (filters, height, width, channels): a tap of some filters at once
        for start in range(0, numbers.shape[0], STRIP // 4):
            for y, x in np.ndindex(*numbers.shape[1:3]):
                copied[start : start + STRIP // 4, y, x] = numbers[start : start + STRIP // 4, y, x]
    return copied


def phases(_: None, filters: np.ndarray) -> np.ndarray:
    """Filters (M, 3, 3, C) of an image whose pixels are doubled -> (4 * M, 2, 2, C), those of the image before it.

    A filter for each parity of the row and the column it computes; its taps are sums of those that read one pixel.
    """
    count, _, _, channels = filters.shape
    made = np.zeros((2, 2, count, 2, 2, channels), np.float32)
    for p, q, a, b in np.ndindex(2, 2, 2, 2):
        for y, x in product(TAPS[p][a], TAPS[q][b]):
            made[p, q, :, a, b] += filters[:, y, x]
    return made.reshape(4 * count, 2, 2, channels)


OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "transpose": lambda permutation, a: a.transpose(permutation),
    "reshape": lambda shape, a: a.reshape(shape),
    "rows": lambda span, a: a[slice(*span)],
    "matrix": lambda filters, a: a.reshape(filters, -1).T,
    "repeat": lambda times, a: np.repeat(a, times),
    "add": lambda _, a, b: single(a) + single(b),
    "through": lambda _, filters, a: single(filters).reshape(len(filters), -1) @ single(a),  # filters of one pixel
    "interleave": interleave,
    "phases": phases,
    "cast": cast,
}
COMPUTED = frozenset({"add", "through", "phases"})  # in float32, of tensors of any float type


def of(value: ir.Value) -> Recipe | None:
    """The recipe of an initializer, None of a number that the graph itself brings."""
    recipe: Recipe | None = value.meta.get(KEY)
    return recipe


def note(value: ir.Value, operation: str, argument: Any, sources: Iterable[ir.Value]) -> ir.Value:
    """Remember that `value` was made by an operation from `sources`, if they all have recipes; returns `value`."""
    parts = [of(source) for source in sources]
    if all(part is not None for part in parts):
        value.meta[KEY] = [operation, argument, *parts]
    return value


def begin(model: ir.Model, known: Mapping[str, str] | None = None) -> None:
    """Give every float initializer the recipe that `known` has for its name (see `dump`), else its own name."""
    table = load(known or {})
    for name, value in model.graph.initializers.items():
        if known is not None and name not in table:
            continue  # a number of the graph's own, such as a scale
        value.meta[KEY] = table.get(name, name)


def collect(models: Iterable[ir.Model]) -> dict[str, Recipe]:
    """The recipes of all initializers that have one, by name."""
    found = {str(v.name): of(v) for model in models for v in model.graph.initializers.values()}
    return {name: recipe for name, recipe in found.items() if recipe is not None}


def sources(recipe: Recipe) -> list[str]:
    """The tensors that a recipe reads."""
    return [recipe] if isinstance(recipe, str) else [name for part in recipe[2:] for name in sources(part)]


def evaluate(recipe: Recipe, read: Callable[[str], np.ndarray]) -> np.ndarray:
    """The weight that a recipe makes of the tensors that `read` gives by name. Raises KeyError as `read` does.

    Tensors of any float type will do: what is computed is computed in float32, what is only moved stays of its type.
    """
    if isinstance(recipe, str):
        return read(recipe)
    operation, argument, *parts = recipe
    return contiguous(OPERATIONS[operation](argument, *(evaluate(part, read) for part in parts)))


def change(recipe: Recipe, changes: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """How much a weight changes when the tensors it reads change by `changes`, in float32; None when none does.

    All operations are linear but for the cast's rounding, which is left to whoever adds the result to the weight. What
    is interleaved or added is of one shape, so a tensor without a change counts as zeros of its neighbor's. Raises
    ValueError for a bias that went through filters: it is a product of two tensors, and the other is not at hand.
    """
    if isinstance(recipe, str):
        return changes.get(recipe)
    operation, argument, *parts = recipe
    made = [change(part, changes) for part in parts]
    known = next((part for part in made if part is not None), None)
    if known is None or operation == "cast":
        return known
    if operation == "through":
        raise ValueError("a bias that went through a convolution changes by the product with its filters")
    return OPERATIONS[operation](argument, *(np.zeros_like(known) if part is None else part for part in made))


def dump(recipes: Mapping[str, Recipe]) -> dict[str, str]:
    """Recipes as they are stored: a name as it is, others as JSON."""
    return {n: r if isinstance(r, str) else json.dumps(r, separators=(",", ":")) for n, r in recipes.items()}


def load(stored: Mapping[str, str]) -> dict[str, Recipe]:
    """What `dump` made. Raises ValueError for text that is no recipe."""
    return {name: json.loads(text) if text.startswith("[") else text for name, text in stored.items()}
