"""Proof that all elements of a computed value are one number: masks that mask nothing, and tensors of ones or zeros.

Exporters compute such tensors from the sizes of the inputs. A bidirectional mask of transformers is
Where(Expand(Range(0, n) >= 0), 0, -inf); a time step is multiplied by Expand(1, the batch size).
"""

from __future__ import annotations

import math
import operator

import onnx_ir as ir

from fusion_passes import value_queries as values

MAX_DEPTH = 8  # nodes between a value and the constants that it is computed from
COPIES = frozenset("Expand Flatten Identity Reshape Squeeze Transpose Unsqueeze".split())
# Comparisons of numbers that are 0 or more with the only number on the other side.
ALWAYS_TRUE = {"GreaterOrEqual": operator.le, "Greater": operator.lt}


def uniform_value(value: ir.Value | None, depth: int = MAX_DEPTH) -> float | None:
    """Return the number that every element of `value` is, 1 for True, or None if that is not proven."""
    number = values.scalar(value)
    node = None if value is None else value.producer()
    if number is not None or node is None or node.domain or not depth:
        return number
    if node.op_type in COPIES:
        return uniform_value(node.inputs[0], depth - 1)
    if node.op_type == "ConstantOfShape":
        tensor = node.attributes.get_tensor("value")
        return 0.0 if tensor is None else float(tensor.numpy().ravel()[0])
    if node.op_type == "Where":
        condition = uniform_value(node.inputs[0], depth - 1)
        return None if condition is None else uniform_value(node.inputs[1 if condition else 2], depth - 1)
    if node.op_type == "Mul":  # torch.baddbmm with beta=0
        factors = [uniform_value(factor, depth - 1) for factor in node.inputs]
        return 0.0 if 0.0 in factors and all(f is not None and math.isfinite(f) for f in factors) else None
    if node.op_type in ALWAYS_TRUE:
        bound = uniform_value(node.inputs[1], depth - 1)
        proven = bound is not None and ALWAYS_TRUE[node.op_type](bound, 0) and _is_not_negative(node.inputs[0], depth)
        return 1.0 if proven else None
    return None


def _is_not_negative(value: ir.Value | None, depth: int) -> bool:
    """Return whether `value` has copies of a Range that starts at 0 or more and does not fall."""
    node = None if value is None else value.producer()
    if node is None or node.domain or not depth:
        return False
    if node.op_type in COPIES:
        return _is_not_negative(node.inputs[0], depth - 1)
    start, step = (values.scalar(node.inputs[index]) if node.op_type == "Range" else None for index in (0, 2))
    return start is not None and start >= 0 and step is not None and step > 0
