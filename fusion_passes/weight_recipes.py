"""Weight recipes: expressions that compute each weight of a rewritten graph from the checkpoint's tensors.

A recipe is a tensor name, or [operation, argument, *recipes]: ["transpose", [1, 0], "mid_block.….weight"]. OPERATIONS
also compute the weights, so a recipe cannot differ from the computation. During rewriting each initializer has its
recipe in `meta`; `collect` gathers them at the end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from fusion_passes import quantized_weights

if TYPE_CHECKING:
    import onnx_ir as ir

WeightRecipe = str | list[Any]
# NumPy's dtypes by the names of ONNX.
DTYPES = {"FLOAT": np.float32, "FLOAT16": np.float16, "BFLOAT16": ml_dtypes.bfloat16, "DOUBLE": np.float64}
KEY = "fusion_passes.recipe"
STRIP = 128  # columns of a matrix copied at once, or 4 times the filters of a convolution: blocks that fit in caches
# Taps of a 3-tap filter on a 2x upsampled row, by the parity of the output pixel, that read each of two input pixels.
TAPS = (((0,), (1, 2)), ((0, 1), (2,)))


def interleave(heads: int, *weights: np.ndarray) -> np.ndarray:
    """Concatenate projections (..., heads * D) head by head: (..., heads * len(weights) * D)."""
    lead = weights[0].shape[:-1]
    return np.stack([w.reshape(*lead, heads, -1) for w in weights], axis=-2).reshape(*lead, -1)


def cast(dtype: str, values: np.ndarray) -> np.ndarray:
    """Round to `dtype`. Finite values are clamped to its finite range: a mask of -3.4e38 must not become -infinity."""
    target = np.dtype(DTYPES[dtype])
    if values.dtype == target:
        return values
    values = as_float32(values)
    limit = float(ml_dtypes.finfo(target).max)
    if values.size and (np.max(values) > limit or np.min(values) < -limit):
        values = np.where(np.isfinite(values), np.clip(values, -limit, limit), values)
    return values.astype(target)


def as_float32(values: np.ndarray) -> np.ndarray:
    """Convert to float32; float32 arrays are returned without a copy."""
    return values.astype(np.float32, copy=False)


def contiguous(values: np.ndarray) -> np.ndarray:
    """Copy to C order, 2-D and 4-D arrays in blocks that fit in caches: a sixth to a tenth of NumPy's time."""
    if values.flags.c_contiguous or values.ndim not in (2, 4):
        return np.ascontiguousarray(values).reshape(values.shape)  # NumPy makes a scalar 1-D
    copy = np.empty(values.shape, values.dtype)
    if values.ndim == 2:
        for start in range(0, values.shape[1], STRIP):
            copy[:, start : start + STRIP] = values[:, start : start + STRIP]
    else:  # (filters, height, width, channels): one tap of some filters at once
        for start in range(0, values.shape[0], STRIP // 4):
            for y, x in np.ndindex(*values.shape[1:3]):
                copy[start : start + STRIP // 4, y, x] = values[start : start + STRIP // 4, y, x]
    return copy


def subpixel_phases(_: None, filters: np.ndarray) -> np.ndarray:
    """Convert 3x3 filters (M, 3, 3, C) on a 2x upsampled image to 2x2 filters (4 * M, 2, 2, C) on the image itself.

    One filter for each parity of the output row and column. Each tap is the sum of the taps that read the same pixel.
    """
    count, _, _, channels = filters.shape
    phases = np.zeros((2, 2, count, 2, 2, channels), np.float32)
    for p, q, a, b in np.ndindex(2, 2, 2, 2):
        for y, x in product(TAPS[p][a], TAPS[q][b]):
            phases[p, q, :, a, b] += filters[:, y, x]
    return phases.reshape(4 * count, 2, 2, channels)


def conv1x1_bias(_: None, filters: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Multiply a bias on the input channels of 1x1 filters by the filters: a bias on the output channels."""
    return as_float32(filters).reshape(len(filters), -1) @ as_float32(bias)


def position_axis(argument: Sequence[int], table: Any) -> Any:
    """Return the positions (size, D / 2) of one axis of SD3's table (1, size * size, D), an array or a tensor.

    argument: [size, axis]; the first half of D depends on axis 1 (columns) alone, the second on axis 0. Raises
    ValueError for another table.
    """
    size, axis = argument
    grid = table.reshape(size, size, -1)
    half = grid.shape[2] // 2
    part = grid[:, :, :half].swapaxes(0, 1) if axis == 1 else grid[:, :, half:]
    if not (part == part[:, :1]).all():
        raise ValueError("the table of positions is not separable into lines and columns")
    return part[:, 0]


OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "transpose": lambda permutation, a: a.transpose(permutation),
    "reshape": lambda shape, a: a.reshape(shape),
    "rows": lambda span, a: a[slice(*span)],
    "columns": lambda span, a: a[:, slice(*span)],
    "last_frame": lambda _, a: a[:, :, -1],  # filters of a causal 3-D convolution that read the frame itself
    "matrix": lambda filters, a: a.reshape(filters, -1).T,
    "concat": lambda _, *parts: np.concatenate(parts),
    "repeat": lambda times, a: np.repeat(a, times),
    "add": lambda _, a, b: as_float32(a) + as_float32(b),
    "conv1x1_bias": conv1x1_bias,
    "interleave": interleave,
    "subpixel_phases": subpixel_phases,
    "cast": cast,
    "position_axis": position_axis,
    "scale": lambda _, a, scale: as_float32(a) * as_float32(scale).reshape(-1, *[1] * (a.ndim - 1)),
    "deviation": lambda epsilon, variance: np.sqrt(as_float32(variance) + np.float32(epsilon)),
    **quantized_weights.OPERATIONS,
    "times": lambda factor, a: as_float32(a) * np.float32(factor),
    "plus": lambda number, a: as_float32(a) + np.float32(number),
}
# Inverses of operations on one tensor, up to rounding.
UNDO: dict[str, Callable[[Any, np.ndarray], np.ndarray]] = {
    "cast": lambda _, a: a,
    "transpose": lambda permutation, a: a.transpose(np.argsort(permutation)),
    "matrix": lambda filters, a: a.T.reshape(filters, 1, 1, -1),  # of 1x1 filters with the channels last
    "subpixel_phases": lambda _, a: subpixel_filters(a),
}
# Operations that compute in float32 whatever the float dtype of their operands; the others move elements.
FLOAT32_OPERATIONS = frozenset(
    {"add", "conv1x1_bias", "subpixel_phases", "deviation", "scale", "channel_scale", "times", "plus"}
)
# Operations whose result does not change by what they make of a source's delta, and why.
NOT_LINEAR: Mapping[str, str] = {
    **dict.fromkeys(quantized_weights.OPERATIONS, "a weight in fewer bits is not linear in the tensor"),
    "plus": "a sum with a number is not linear in the tensor",
    "deviation": "a standard deviation is not linear in the variance",
    "conv1x1_bias": "a bias multiplied by 1x1 filters changes by the product with its filters",
}
ALIASES = {"through": "conv1x1_bias", "phases": "subpixel_phases"}  # operations in folders of earlier versions


def recipe_of(value: ir.Value) -> WeightRecipe | None:
    """Return the recipe of an initializer, or None for a constant of the graph itself."""
    return value.meta.get(KEY)


def record_recipe(value: ir.Value, operation: str, argument: Any, sources: Iterable[ir.Value]) -> ir.Value:
    """Set the recipe of `value` to an operation on `sources`, if all of them have recipes; return `value`."""
    operands = [recipe_of(source) for source in sources]
    if all(operand is not None for operand in operands):
        value.meta[KEY] = [operation, argument, *operands]
    return value


def init_recipes(model: ir.Model, recipes: Mapping[str, WeightRecipe] | None = None) -> None:
    """Set the recipe of every initializer: its entry in `recipes`, or without `recipes` its own name.

    Initializers without an entry are constants of the graph itself, such as a scale.
    """
    for name, value in model.graph.initializers.items():
        if recipes is None or name in recipes:
            value.meta[KEY] = name if recipes is None else recipes[name]


def collect(models: Iterable[ir.Model]) -> dict[str, WeightRecipe]:
    """Return the recipes of all initializers that have one, by name."""
    recipes = {str(v.name): recipe_of(v) for model in models for v in model.graph.initializers.values()}
    return {name: recipe for name, recipe in recipes.items() if recipe is not None}


def sources(recipe: WeightRecipe) -> list[str]:
    """Return the names of the tensors in a recipe, in order, with duplicates."""
    return [recipe] if isinstance(recipe, str) else [name for operand in recipe[2:] for name in sources(operand)]


def operations(recipe: WeightRecipe) -> set[str]:
    """Return the names of the operations in a recipe."""
    return set() if isinstance(recipe, str) else {recipe[0]}.union(*map(operations, recipe[2:]))


def is_quantized(recipe: WeightRecipe) -> bool:
    """Return whether a recipe computes a weight in fewer bits, its scales or its zero points."""
    return not operations(recipe).isdisjoint(quantized_weights.OPERATIONS)


def evaluate(recipe: WeightRecipe, read: Callable[[str], np.ndarray]) -> np.ndarray:
    """Compute a weight; `read(name)` returns a checkpoint tensor of any float dtype and may raise KeyError.

    FLOAT32_OPERATIONS return float32; the others keep the dtype.
    """
    if isinstance(recipe, str):
        return read(recipe)
    operation, argument, *operands = recipe
    return contiguous(OPERATIONS[operation](argument, *(evaluate(operand, read) for operand in operands)))


def weight_delta(recipe: WeightRecipe, deltas: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Return the delta of a weight from the deltas of its source tensors, in float32, or None if none has a delta.

    All operations are linear except the rounding of `cast`, which the caller applies to the sum of weight and delta.
    Operands of `interleave` and `add` have the same shape, so an operand without a delta counts as zeros.

    Raises:
        ValueError: for an operation of `NOT_LINEAR`.
    """
    if isinstance(recipe, str):
        return deltas.get(recipe)
    operation, argument, *operands = recipe
    operand_deltas = [weight_delta(operand, deltas) for operand in operands]
    first = next((delta for delta in operand_deltas if delta is not None), None)
    if first is None or operation == "cast":
        return first
    if operation in NOT_LINEAR:
        raise ValueError(NOT_LINEAR[operation])
    return OPERATIONS[operation](
        argument, *(np.zeros_like(first) if delta is None else delta for delta in operand_deltas)
    )


def source_shape(recipe: WeightRecipe, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape of the first source tensor of a weight of `shape`, or None if the recipe leaves it open."""
    if isinstance(recipe, str):
        return shape
    operation, argument, *operands = recipe
    if operation == "transpose":
        shape = tuple(shape[axis] for axis in np.argsort(argument))
    elif operation == "interleave":
        shape = (*shape[:-1], shape[-1] // len(operands))
    elif operation == "matrix":
        shape = (argument, 1, 1, shape[0])
    elif operation == "subpixel_phases":
        shape = (shape[0] // 4, 3, 3, shape[3])
    elif operation not in ("cast", "add", "quantize"):
        return None
    return source_shape(operands[0], shape)


def restore_source(recipe: WeightRecipe, weight: np.ndarray, name: str) -> np.ndarray | None:
    """Return source tensor `name` in float32, restored from a weight of the recipe; the rounding of `cast` stays.

    None if the weight does not have every element of the tensor, or does not tell its shape.
    """
    while not isinstance(recipe, str) and recipe[0] in UNDO:
        weight, recipe = UNDO[recipe[0]](recipe[1], weight), recipe[2]
    if isinstance(recipe, str):
        return as_float32(weight) if recipe == name else None
    shape = source_shape(recipe, weight.shape)
    if shape is None or not operations(recipe) <= {"transpose", "interleave", "cast"}:
        return None
    # A recipe that moves elements moves their positions likewise; position 0 stands for the other sources.
    positions = np.arange(1, math.prod(shape) + 1).reshape(shape)
    moved = weight_delta(recipe, {name: positions})
    if moved is None or np.count_nonzero(moved) != positions.size:
        return None
    source = np.empty(positions.size, np.float32)
    source[moved[moved > 0] - 1] = weight.reshape(moved.shape)[moved > 0]
    return source.reshape(shape)


def subpixel_filters(phases: np.ndarray) -> np.ndarray:
    """Return the 3x3 filters (M, 3, 3, C) of `subpixel_phases` (4 * M, 2, 2, C), in float32."""
    taps = as_float32(phases).reshape(2, 2, -1, *phases.shape[1:])  # (row parity, column parity, M, 2, 2, C)
    rows = _three_taps(taps[0].take(0, 2), taps[0].take(1, 2), taps[1].take(1, 2))  # (3, column parity, M, 2, C)
    columns = _three_taps(rows[:, 0].take(0, 2), rows[:, 0].take(1, 2), rows[:, 1].take(1, 2))  # (3, 3, M, C)
    return columns.transpose(2, 1, 0, 3)


def _three_taps(first: np.ndarray, others: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Return the three taps on a new first axis: an even pixel has the first and the sum of the others (TAPS)."""
    return np.stack([first, others - last, last])


def dump(recipes: Mapping[str, WeightRecipe]) -> dict[str, str]:
    """Return the stored form of recipes: a tensor name unchanged, other recipes as JSON."""
    return {n: r if isinstance(r, str) else json.dumps(r, separators=(",", ":")) for n, r in recipes.items()}


def load(stored: Mapping[str, str]) -> dict[str, WeightRecipe]:
    """Parse recipes that `dump` wrote, also with the ALIASES of operations. Raises ValueError for malformed text."""
    return {name: _parse(text) if text.startswith("[") else text for name, text in stored.items()}


def _parse(text: str) -> WeightRecipe:
    for old, new in ALIASES.items():
        text = text.replace(f'["{old}",', f'["{new}",')  # quotes inside of names are escaped
    return json.loads(text)
