"""RotaryQkv(qkv, other?, q_scale?, k_scale?, other_q_scale?, other_k_scale?, cos?, sin?; epsilon, interleaved).

Packed QKV [B,S+T,N,3,D] of a joint attention: the tokens of qkv [B,S,N,3,D], then those of other [B,T,N,3,D]. Queries
and keys are RMS-normalized over D with the scales [D] of their stream, then turned by the angles of the token, a row
of cos and sin [S+T,D/2]. A pair is two neighbors if `interleaved`, else elements i and i + D/2.
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.body_snippets import has
from fusion_passes.operators.definition import FusedOperator, never
from fusion_passes.shapes.shape_info import Shape, ShapeInfo, input_shape

INPUTS = ("qkv", "other", "q_scale", "k_scale", "other_q_scale", "other_k_scale", "cos", "sin")


def body(node: ir.Node) -> tuple[str, str]:
    rotary = has(node, 6)
    streams = [("qkv", "", 2)] + ([("other", "other_", 4)] if has(node, 1) else [])
    statements = ["three = Constant <value_ints = [3]> ()"]
    for name, prefix, scale in streams:
        statements.append(f"{prefix}q5, {prefix}k5, {prefix}v5 = Split <axis = 3, num_outputs = 3> ({name})")
        statements.append(f"{prefix}v = Squeeze ({prefix}v5, three)")
        for part in "qk":
            heads = f"{prefix}{part}4" if has(node, scale) else f"{prefix}{part}"
            statements.append(f"{heads} = Squeeze ({prefix}{part}5, three)")
            if has(node, scale):
                norm = f"RMSNormalization <axis = -1, epsilon: float = @epsilon> ({heads}, {prefix}{part}_scale)"
                statements.append(f"{prefix}{part} = {norm}")
    for part in "qkv":
        joined = f"Concat <axis = 1> ({part}, other_{part})" if len(streams) == 2 else f"Identity ({part})"
        statements.append(f"joint_{part} = {joined}")
    if rotary:
        statements.append("""
            batch = Shape <start = 0, end = 1> (qkv)
            ones = Constant <value_ints = [1, 1]> ()
            images = Concat <axis = 0> (batch, ones)
            all_cos = Expand (cos, images)
            all_sin = Expand (sin, images)""")
        for part in "qk":
            statements.append(f"""
                heads_{part} = Transpose <perm = [0, 2, 1, 3]> (joint_{part})
                turned_{part} = RotaryEmbedding <interleaved: int = @interleaved> (heads_{part}, all_cos, all_sin)
                final_{part} = Transpose <perm = [0, 2, 1, 3]> (turned_{part})""")
    q, k = ("final_q", "final_k") if rotary else ("joint_q", "joint_k")
    statements.append(f"""
        q_part = Unsqueeze ({q}, three)  k_part = Unsqueeze ({k}, three)  v_part = Unsqueeze (joint_v, three)
        Y = Concat <axis = 3> (q_part, k_part, v_part)""")
    words = (("joint", 1), ("norm", 2), ("other_norm", 4), ("rotary", 6))
    overload = "_".join(word for word, index in words if has(node, index))
    return overload, f"({', '.join(INPUTS[: len(node.inputs)])}) => (Y) {{ {'  '.join(statements)} }}"


def shape(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    qkv = input_shape(node, 0, info)
    if not has(node, 1):
        return [qkv]
    other = info.shapes.get(node.inputs[1])  # type: ignore[arg-type]
    return None if other is None else [(qkv[0], qkv[1] + other[1], *qkv[2:])]


OPERATOR = FusedOperator("RotaryQkv", shape, body, ("epsilon", "interleaved"), has_cpu_kernel=never)
