"""Fusions that turn exporters' subgraphs into the fused operators of ONNX Runtime, in domain `sd_ort`.

`canonicalize` gives every exporter's graph one spelling, `fuse` applies the fusions, in order. Both work in place on an
`onnx_ir.Model` and never read a weight. `lower` has what a target may want besides; which one is not decided here.
"""

from __future__ import annotations

from fusion_passes.canonicalize import CANONICAL, canonicalize, why_not_fused
from fusion_passes.fuse import FUSIONS, fuse
from fusion_passes.operators import OPERATORS
from fusion_passes.operators.record import CONTRIB, DOMAIN

__all__ = ["CANONICAL", "CONTRIB", "DOMAIN", "FUSIONS", "OPERATORS", "canonicalize", "fuse", "why_not_fused"]
