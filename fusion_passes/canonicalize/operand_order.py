"""Constants come second: Add(c, x) => Add(x, c) and Mul(c, x) => Mul(x, c), so that a rule states one order."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes import checks as c


def order_operands(model: ir.Model) -> None:
    """Swap the operands of commutative nodes whose first operand alone is constant."""
    for node in model.graph:
        if node.domain or node.op_type not in ("Add", "Mul"):
            continue
        a, b = node.inputs
        if c.is_constant(a) and not c.is_constant(b):
            node.replace_input_with(0, b)
            node.replace_input_with(1, a)
