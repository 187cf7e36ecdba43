"""MultiHeadAttention(query, key, value, bias?, -, mask?; num_heads, kv_num_heads?, scale): attention on [B,S,N*D].

bias [3*N*D] is added to query, key and value, which then have one width; only ONNX Runtime's own kernels take it.
query without key and value is packed QKV [B,S,N,3,D]; key without value is packed KV [B,L,N,2,D].
With kv_num_heads M < N, key and value have M heads, each for N / M adjacent heads of query (grouped-query attention).
"""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.operators.body_snippets import attend, attention_overload, has
from fusion_passes.operators.definition import FusedOperator
from fusion_passes.shapes.shape_info import Shape, ShapeInfo, input_shape


def body(node: ir.Node) -> tuple[str, str]:
    overload, inputs, statements = body_parts(node)
    return overload, f"({inputs}) => (output) {{ {statements} }}"


def body_parts(node: ir.Node, suffix: str = "") -> tuple[str, str, str]:
    """Return the overload name, the inputs, and statements that compute `output` from the inputs' names + `suffix`."""
    mask = has(node, 5)
    packed = "qkv" if len(node.inputs) < 2 or node.inputs[1] is None else "kv" if not has(node, 2) else ""
    inputs = {"qkv": "query", "kv": "query, key", "": "query, key, value"}[packed]
    bias = has(node, 3)
    if bias:
        inputs += ", bias"
    if mask:
        inputs = "query, key, value, bias, key_padding_mask, attention_bias"
    grouped = is_grouped(node)
    split = """
        heads_number = Constant <value_int: int = @num_heads> ()
        rest = Constant <value_ints = [-1]> ()
        kept = Constant <value_ints = [0, 0]> ()
        heads_vector = Reshape (heads_number, rest)
        split = Concat <axis = 0> (kept, heads_vector, rest)"""
    key_split = "split"
    if grouped:
        key_split = "kv_split"
        split += """
        kv_heads_number = Constant <value_int: int = @kv_num_heads> ()
        kv_heads_vector = Reshape (kv_heads_number, rest)
        kv_split = Concat <axis = 0> (kept, kv_heads_vector, rest)
        group = Div (heads_vector, kv_heads_vector)
        ones = Constant <value_ints = [1, 1, 1]> ()
        single = Constant <value_ints = [1]> ()
        repeats = Concat <axis = 0> (ones, group, single)
        after_heads = Constant <value_ints = [3]> ()"""
    if packed == "qkv":  # [B,S,N,3,D]
        parts = f"""
            q5, k5, v5 = Split <axis = 3, num_outputs = 3> (query{suffix})
            three = Constant <value_ints = [3]> ()
            q4 = Squeeze (q5, three)  k4 = Squeeze (k5, three)  v4 = Squeeze (v5, three)"""
    elif packed == "kv":  # [B,L,N,2,D]
        parts = f"""
            k5, v5 = Split <axis = 3, num_outputs = 2> (key{suffix})
            three = Constant <value_ints = [3]> ()
            q4 = Reshape (query{suffix}, split)  k4 = Squeeze (k5, three)  v4 = Squeeze (v5, three)"""
    else:
        parts = "bq, bk, bv = Split <axis = 0, num_outputs = 3> (bias)" if bias else ""
        for name in ("query", "key", "value"):
            biased = f"{name[0]}b" if bias else f"{name}{suffix}"
            parts += f"  {biased} = Add ({name}{suffix}, b{name[0]})" if bias else ""
            parts += f"  {name[0]}4 = Reshape ({biased}, {'split' if name == 'query' else key_split})"
    statements = f"""
        {split}
        {parts}
        {repeat("k4", "k4n") + repeat("v4", "v4n") if grouped else ""}
        qh = Transpose <perm = [0, 2, 1, 3]> (q4)
        kh = Transpose <perm = [0, 2, 1, 3]> ({"k4n" if grouped else "k4"})
        vh = Transpose <perm = [0, 2, 1, 3]> ({"v4n" if grouped else "v4"})
        {attend("qh", "kh", "vh", node, "attention_bias" if mask else "")}
        merged = Transpose <perm = [0, 2, 1, 3]> (heads)
        flat = Constant <value_ints = [0, 0, -1]> ()
        output = Reshape (merged, flat)
    """
    words = (attention_overload(node, mask), packed, "bias" if bias else "", "grouped" if grouped else "")
    return "_".join(filter(None, words)), inputs, statements


def repeat(heads: str, repeated: str) -> str:
    """Return statements that repeat each of the heads [B,L,M,D] for the query heads of its group: [B,L,N,D]."""
    return f"""
        {heads}_one = Unsqueeze ({heads}, after_heads)
        {heads}_group = Expand ({heads}_one, repeats)
        {repeated} = Reshape ({heads}_group, split)"""


def is_grouped(node: ir.Node) -> bool:
    """Return whether key and value have fewer heads than query."""
    heads = node.attributes["num_heads"].as_int()
    return node.attributes.get_int("kv_num_heads", heads) != heads


def shape(node: ir.Node, info: ShapeInfo) -> list[Shape] | None:
    q = input_shape(node, 0, info)
    value = node.inputs[2] if len(node.inputs) > 2 else None
    v = info.shapes.get(value) if value is not None else None
    if len(q) == 5:  # packed [B,S,N,3,D]
        return [(q[0], q[1], q[2] * q[4])]
    if is_grouped(node):
        return [q]
    return [q if v is None else (q[0], q[1], v[2])]


def has_cpu_kernel(node: ir.Node) -> bool:
    """Return whether ONNX Runtime's CPU kernel supports the inputs: value is separate, with the heads of query."""
    return has(node, 2) and not is_grouped(node)


OPERATOR = FusedOperator(
    "MultiHeadAttention",
    shape,
    body,
    ("num_heads", "kv_num_heads", "scale", "unidirectional"),
    has_cpu_kernel=has_cpu_kernel,
    float8_output=1,
)
