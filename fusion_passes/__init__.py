"""Fusions that turn exporters' subgraphs into the fused operators of ONNX Runtime, in domain `sd_ort`.

`canonicalize` gives every exporter's graph one spelling, `fuse` applies the fusions, in order. Both work in place on an
`onnx_ir.Model` and never read a weight. `lower` has what a target may want besides; which one is not decided here.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.canonicalize import CANONICAL, canonicalize, fold, why_not_fused
from fusion_passes.fuse import FUSIONS, fuse
from fusion_passes.operators.record import DOMAIN

__all__ = ["CANONICAL", "DOMAIN", "FUSIONS", "canonicalize", "canonicalize_shapes", "fuse", "why_not_fused"]


def canonicalize_shapes(model: ir.Model) -> None:
    """Fold shape arithmetic again, in place: after function bodies have been inlined they bring their own."""
    fold(model)
