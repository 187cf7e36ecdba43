"""What a change of a checkpoint's tensors adds to one weight of an optimized graph, as a small graph for the device.

    base, and up (out, R) and down (R, ...) of each tensor it is made of  ->  weight = base + recipe(up @ down)

The recipe (`weight_recipes`) is linear, so that what it makes of the changes is the change of the weight. Sums
are made in float32 and rounded once. Weights of one form share a graph, whatever their sizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from fusion_passes import weight_recipes as recipes

OPSET = 18


@dataclass(frozen=True)
class Form:
    """`recipe`: as JSON, with numbers in place of tensors' names. `shapes`: of each tensor with more than two axes,
    else (). `dtype`: NumPy's name of the weight's type."""

    recipe: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str


def form(recipe: recipes.WeightRecipe, shape: tuple[int, ...], dtype: np.dtype) -> Form | None:
    """The form of a weight that is made of tensors of one `shape`; None when an operation has no graph."""
    names = recipes.sources(recipe)

    def numbered(part: recipes.WeightRecipe) -> Any:
        if isinstance(part, str):
            return names.index(part)
        return [*part[:2], *(numbered(each) for each in part[2:])]

    if not _operations(recipe) <= {*_OPERATIONS, "cast"}:
        return None
    shapes = (shape if len(shape) > 2 else (),) * len(set(names))
    return Form(json.dumps(numbered(recipe)), shapes, np.dtype(dtype).name)


def _operations(recipe: recipes.WeightRecipe) -> set[str]:
    return set() if isinstance(recipe, str) else {recipe[0]}.union(*(_operations(part) for part in recipe[2:]))


def correction(what: Form) -> bytes:
    """The graph of a form. Inputs: base, and up_<i>, down_<i> float32 for tensor i; output: weight, of base's type."""
    kind = onnx.helper.np_dtype_to_tensor_dtype(_dtype(what.dtype))
    named = onnx.TensorProto.DataType.Name(kind).lower()
    inputs, lines = [f"{named}[] base"], list[str]()
    names = iter(f"value_{i}" for i in range(10_000))

    def add(line: str, *integers: int) -> str:
        """A line of the graph, over a constant where it says {}; the name of its result."""
        made = next(names)
        if integers:
            lines.append(f"of_{made} = Constant <value_ints = [{', '.join(map(str, integers))}]> ()")
        lines.append(f"{made} = {line.format(f'of_{made}')}")
        return made

    def visit(recipe: Any) -> str:
        if isinstance(recipe, int):
            inputs.extend(f"float[] {name}_{recipe}" for name in ("up", "down"))
            product = add(f"MatMul (up_{recipe}, down_{recipe})")
            shape = what.shapes[recipe]
            return add(f"Reshape ({product}, {{}})", *shape) if shape else product
        operation, argument, *parts = recipe
        made = [visit(part) for part in parts]
        return made[0] if operation == "cast" else _OPERATIONS[operation](add, argument, made)

    change = visit(json.loads(what.recipe))
    lines += [
        "shape = Shape (base)",
        f"change = Reshape ({change}, shape)",
        "wide = Cast <to = 1> (base)",
        "sum = Add (wide, change)",
        f"weight = Cast <to = {kind}> (sum)",
    ]
    head = f'<ir_version: 10, opset_import: ["" : {OPSET}]>\n'
    text = f"{head}correction ({', '.join(inputs)}) => ({named}[] weight) {{\n" + "\n".join(lines) + "\n}"
    made: bytes = onnx.parser.parse_model(text).SerializeToString()
    return made


def _dtype(name: str) -> np.dtype:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


Add = Callable[..., str]


def _transpose(add: Add, permutation: list[int], parts: list[str]) -> str:
    return add(f"Transpose <perm = {permutation}> ({parts[0]})")


def _reshape(add: Add, shape: list[int], parts: list[str]) -> str:
    return add(f"Reshape ({parts[0]}, {{}})", *shape)


def _matrix(add: Add, filters: int, parts: list[str]) -> str:
    return _transpose(add, [1, 0], [_reshape(add, [filters, -1], parts)])


def _add(add: Add, _: None, parts: list[str]) -> str:
    return add(f"Add ({', '.join(parts)})")


def _interleave(add: Add, heads: int, parts: list[str]) -> str:
    columns = [_reshape(add, [0, heads, 1, -1], [part]) for part in parts]
    return _reshape(add, [0, -1], [add(f"Concat <axis = 2> ({', '.join(columns)})")])


def _subpixel_phases(add: Add, _: None, parts: list[str]) -> str:
    """As `recipes.subpixel_phases`, with a tap of zeros behind the three."""
    taps = add(f"Pad ({parts[0]}, {{}})", 0, 0, 0, 0, 0, 1, 1, 0)
    for axis in (1, 2):
        sums = [add(f"Gather <axis = {axis}> ({taps}, {{}})", *chosen) for chosen in ((0, 1, 0, 2), (3, 2, 1, 3))]
        taps = _add(add, None, sums)
    return _transpose(add, [1, 3, 0, 2, 4, 5], [_reshape(add, [0, 2, 2, 2, 2, -1], [taps])])


# As `fusion_passes.weight_recipes.OPERATIONS`, of which "repeat" makes no weight that LoRAs change.
_OPERATIONS: dict[str, Callable[[Add, Any, list[str]], str]] = {
    "transpose": _transpose,
    "reshape": _reshape,
    "matrix": _matrix,
    "add": _add,
    "interleave": _interleave,
    "subpixel_phases": _subpixel_phases,
}
