"""Graph rewrites of exported Stable Diffusion models: exporters' subgraphs become fused operators of domain `sd_ort`.

`canonicalize` rewrites the patterns of different exporters to one canonical form, and `fuse` applies the fusions in
order. Both work in place on an `onnx_ir.Model` and never read a weight. `lower` has the passes of individual targets;
sd_ort/optimize/targets.py selects them.
"""

from __future__ import annotations

from fusion_passes.canonicalize import CANONICAL, canonicalize, why_not_fused
from fusion_passes.fuse import FUSIONS, fuse
from fusion_passes.operators import OPERATORS
from fusion_passes.operators.definition import CONTRIB, DOMAIN

__all__ = ["CANONICAL", "CONTRIB", "DOMAIN", "FUSIONS", "OPERATORS", "canonicalize", "fuse", "why_not_fused"]
