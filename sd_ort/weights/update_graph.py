"""ONNX graphs that add LoRA deltas to one weight of an optimized graph on the device.

    base, and up (out, R), scale (R,) and down (R, ...) of each source tensor
        ->  weight = base + recipe((up * scale) @ down)

Weight recipes (`fusion_passes.weight_recipes`) are linear, so the recipe of the deltas is the delta of the weight. Sums
are in float32 and rounded once. Weights with equal specs share a graph; their sizes may differ.

A weight in float8 is quantized again from its source tensors, as a delta may be below half a step of it:

    source, up, scale and down of each source tensor
        ->  elements and scale of recipe(source + (up * scale) @ down)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from fusion_passes import weight_recipes
from fusion_passes.element_formats import FLOAT8, SMALLEST_SCALE
from sd_ort.core.onnx_file import serialize

OPSET = 18
QUANTIZE_OPSET = 21  # of QuantizeLinear's output_dtype
# NumPy's name of a weight's dtype -> ONNX's, and onnx.TensorProto.DataType.
_TYPES = {"float32": ("float", 1), "float16": ("float16", 10), "bfloat16": ("bfloat16", 16)}


@dataclass(frozen=True)
class WeightUpdateSpec:
    """Key of a weight-update graph.

    `recipe`: JSON with tensor indices instead of names. `has_shape`: whether source tensors have more than two axes.
    `dtype`: NumPy name of the weight's dtype. `is_quantized`: whether the weight is in float8 with one scale, and
    `dtype` that of its source tensors.
    """

    recipe: str
    has_shape: bool
    dtype: str
    is_quantized: bool = False


def weight_update_spec(
    recipe: weight_recipes.WeightRecipe, shape: tuple[int, ...], dtype: np.dtype
) -> WeightUpdateSpec | None:
    """Return the update spec for a recipe with source tensors of `shape`; None if an operation is not supported.

    `recipe` of a weight in float8: that of its elements. Sums that are rounded before (`cast`) are not supported.
    """
    quantized = float8_elements(recipe)
    is_quantized = quantized is not None
    if quantized is not None:
        recipe = quantized[1]
    names = weight_recipes.sources(recipe)

    def numbered(operand: weight_recipes.WeightRecipe) -> Any:
        if isinstance(operand, str):
            return names.index(operand)
        return [*operand[:2], *(numbered(each) for each in operand[2:])]

    supported = _OPERATIONS.keys() if is_quantized else {*_OPERATIONS, "cast"}
    if not weight_recipes.operations(recipe) <= supported or np.dtype(dtype).name not in _TYPES:
        return None
    return WeightUpdateSpec(json.dumps(numbered(recipe)), len(shape) > 2, np.dtype(dtype).name, is_quantized)


def float8_elements(recipe: weight_recipes.WeightRecipe) -> tuple[Any, Any] | None:
    """Return two recipes of the values of float8 elements with one scale: in the layout in which they are
    quantized, and in the layout of the elements. Return None for other recipes.
    """
    layouts = []
    while not isinstance(recipe, str) and recipe[0] == "transpose":
        layouts.append(recipe[1])
        recipe = recipe[2]
    if isinstance(recipe, str) or recipe[0] != "quantize" or list(recipe[1]) != [FLOAT8.name, None]:
        return None
    return recipe[2], reduce(lambda moved, layout: ["transpose", layout, moved], reversed(layouts), recipe[2])


def float8_scale(recipe: weight_recipes.WeightRecipe) -> tuple[Any, float] | None:
    """Return the recipe of the values that are quantized to float8 with one scale, and a factor on this scale. Return
    None if `recipe` is not that of such a scale, or if it has two factors, which are rounded twice."""
    factor = 1.0
    if not isinstance(recipe, str) and recipe[0] == "times":
        factor, recipe = recipe[1], recipe[2]
    if isinstance(recipe, str) or recipe[0] != "channel_scale" or list(recipe[1][:2]) != [FLOAT8.name, None]:
        return None
    return (recipe[2], factor * recipe[1][2]) if 1.0 in (factor, recipe[1][2]) else None


def build_weight_update(spec: WeightUpdateSpec) -> bytes:
    """Build the graph of a spec.

    Inputs: base, and up_<i>, scale_<i>, down_<i> (float32) for tensor i; `source_shape` (int64) of all tensors if the
    spec has it. Output: weight, in the dtype of base.

    Of a weight in float8 there are source_<i>, and `factor` (float32) on the scale, instead of base. Outputs: elements
    (float8) and scale (float32).
    """
    type_name, element_type = _TYPES[spec.dtype]
    inputs, lines = ["float factor" if spec.is_quantized else f"{type_name}[] base"], list[str]()
    if spec.has_shape:
        inputs.append("int64[] source_shape")
    names = iter(f"value_{i}" for i in range(10_000))

    def add(line: str, *integers: int) -> str:
        """Append a statement and return its output name; {} stands for a constant of `integers`."""
        output = next(names)
        if integers:
            lines.append(f"of_{output} = Constant <value_ints = [{', '.join(map(str, integers))}]> ()")
        lines.append(f"{output} = {line.format(f'of_{output}')}")
        return output

    def visit(recipe: Any) -> str:
        if isinstance(recipe, int):
            rows, rank, columns = (f"{axis}_{recipe}" for axis in ("rows", "rank", "columns"))
            inputs.append(f"float[{rows}, {rank}] up_{recipe}")  # without ranks, sdcuda leaves MatMul to the CPU
            inputs.extend([f"float[{rank}] scale_{recipe}", f"float[{rank}, {columns}] down_{recipe}"])
            scaled = add(f"Mul (up_{recipe}, scale_{recipe})")
            delta = add(f"MatMul ({scaled}, down_{recipe})")
            delta = add(f"Reshape ({delta}, source_shape)") if spec.has_shape else delta
            if not spec.is_quantized:
                return delta
            inputs.append(f"{type_name}[] source_{recipe}")
            source = add(f"Cast <to = 1> (source_{recipe})")
            return add(f"Add ({source}, {delta})")
        operation, argument, *operands = recipe
        values = [visit(operand) for operand in operands]
        return values[0] if operation == "cast" else _OPERATIONS[operation](add, argument, values)

    result = visit(json.loads(spec.recipe))
    outputs = "float8e4m3fn[] elements, float[] scale" if spec.is_quantized else f"{type_name}[] weight"
    lines += (
        [_QUANTIZE.format(value=result)]
        if spec.is_quantized
        else [
            "shape = Shape (base)",
            f"delta = Reshape ({result}, shape)",
            "wide = Cast <to = 1> (base)",
            "sum = Add (wide, delta)",
            f"weight = Cast <to = {element_type}> (sum)",
        ]
    )
    head = f'<ir_version: 10, opset_import: ["" : {QUANTIZE_OPSET if spec.is_quantized else OPSET}]>\n'
    body = "\n".join(lines)
    return serialize(f"{head}weight_update ({', '.join(inputs)}) => ({outputs}) {{\n{body}\n}}")


def build_copy(dtype: np.dtype) -> bytes:
    """Build the graph that copies input `base` to output `weight`."""
    type_name, _ = _TYPES[dtype.name]
    head = f'<ir_version: 10, opset_import: ["" : {OPSET}]>'
    return serialize(f"{head} copy ({type_name}[] base) => ({type_name}[] weight) {{ weight = Identity (base) }}")


# `ElementFormat.scale` and `quantize` of float8. A scale is rounded up to float16: if rounding to nearest is below it,
# 3/4 to 3/2 of a last place are added and rounded to nearest. 3/4096 of a number are that, 2 ** -24 of the smallest.
_QUANTIZE = f"""
limit = Constant <value_float = {FLOAT8.limit}> ()
smallest = Constant <value_float = {float(SMALLEST_SCALE)!r}> ()
more = Constant <value_float = {1 + 3 / 4096!r}> ()
zero = Constant <value_float = 0.0> ()
one = Constant <value_float = 1.0> ()
magnitude = Abs ({{value}})
largest = ReduceMax <keepdims = 0> (magnitude)
exact = Div (largest, limit)
half = Cast <to = 10> (exact)
nearest = Cast <to = 1> (half)
larger = Mul (nearest, more)
next = Add (nearest, smallest)
above = Max (larger, next)
half_above = Cast <to = 10> (above)
higher = Cast <to = 1> (half_above)
is_below = Greater (exact, nearest)
rounded_up = Where (is_below, higher, nearest)
at_least = Max (rounded_up, smallest)
is_positive = Greater (exact, zero)
step = Where (is_positive, at_least, one)
elements = QuantizeLinear <output_dtype = 17> ({{value}}, step)
scale = Mul (step, factor)
"""

Add = Callable[..., str]


def _transpose(add: Add, permutation: list[int], operands: list[str]) -> str:
    return add(f"Transpose <perm = {permutation}> ({operands[0]})")


def _reshape(add: Add, shape: list[int], operands: list[str]) -> str:
    return add(f"Reshape ({operands[0]}, {{}})", *shape)


def _matrix(add: Add, filters: int, operands: list[str]) -> str:
    return _transpose(add, [1, 0], [_reshape(add, [filters, -1], operands)])


def _add(add: Add, _: None, operands: list[str]) -> str:
    return add(f"Add ({', '.join(operands)})")


def _interleave(add: Add, heads: int, operands: list[str]) -> str:
    columns = [_reshape(add, [0, heads, 1, -1], [operand]) for operand in operands]
    return _reshape(add, [0, -1], [add(f"Concat <axis = 2> ({', '.join(columns)})")])


def _subpixel_phases(add: Add, _: None, operands: list[str]) -> str:
    """Add the statements of `weight_recipes.subpixel_phases`, with a fourth tap of zeros."""
    taps = add(f"Pad ({operands[0]}, {{}})", 0, 0, 0, 0, 0, 1, 1, 0)
    for axis in (1, 2):
        sums = [add(f"Gather <axis = {axis}> ({taps}, {{}})", *indices) for indices in ((0, 1, 0, 2), (3, 2, 1, 3))]
        taps = _add(add, None, sums)
    return _transpose(add, [1, 3, 0, 2, 4, 5], [_reshape(add, [0, 2, 2, 2, 2, -1], [taps])])


# The graphs of `weight_recipes.OPERATIONS`, without "repeat": LoRAs change no weight with it.
_OPERATIONS: dict[str, Callable[[Add, Any, list[str]], str]] = {
    "transpose": _transpose,
    "reshape": _reshape,
    "matrix": _matrix,
    "add": _add,
    "interleave": _interleave,
    "subpixel_phases": _subpixel_phases,
}
