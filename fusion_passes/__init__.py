"""Graph rewrites of exported Stable Diffusion models: exporters' subgraphs become fused operators of domain `sd_ort`.

`canonicalize` rewrites the patterns of different exporters to one canonical form, and `fuse` applies the fusions in
order. Both work in place on an `onnx_ir.Model` and never read a weight. `lower` has the passes of individual targets;
sd_ort/optimize/targets.py selects them. This module imports none of them, so that `weight_recipes` costs no onnx_ir.
"""

from __future__ import annotations

DOMAIN = "sd_ort"
CONTRIB = "com.microsoft"  # domain of ONNX Runtime's kernels, some with the same names and signatures
