"""Model-local function bodies: what each fused operator means, in standard ONNX.

A fused node of domain `sd_ort` runs on any ONNX runtime because the model carries its body; where a library with a
kernel of the same name is registered, the kernel is taken instead. Bodies cannot branch on an attribute, so each
variant in use (activation, layout, a missing bias, ...) is a function overload of its own with its numbers written in.
The same bodies take a fused operator apart again for a target that has no kernel for it.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import onnx_ir as ir

from fusion_passes._rule import DOMAIN


def attach(model: ir.Model, nodes: Iterable[ir.Node]) -> None:
    """Give `nodes` (fused nodes of `model`) the overload of their variant and the model its body, each once."""
    version = model.graph.opset_imports.get("", 21)
    for node in nodes:
        node.overload, body = _variant(node)
        key = (DOMAIN, node.op_type, node.overload)
        if key not in model.functions:
            names = " ".join(sorted(node.attributes))
            model.functions[key] = _function(node.op_type, node.overload, names.split(), body, version)
    model.graph.opset_imports.setdefault(DOMAIN, 1)


def _function(op_type: str, overload: str, attributes: list[str], body: str, version: int) -> ir.Function:
    declared = f"<{', '.join(attributes)}>" if attributes else ""
    text = f'<domain: "{DOMAIN}", overload: "{overload}", opset_import: ["" : {version}]>\n{op_type} {declared} {body}'
    proto = onnx.parser.parse_function(text)
    proto.overload = overload
    return ir.from_proto(proto)


def _variant(node: ir.Node) -> tuple[str, str]:
    """(overload, body) of a node: the overload names all that the body depends on."""
    return VARIANTS[node.op_type](node)


def _float(value: float) -> str:
    return f"{value:.9g}" if "." in f"{value:.9g}" or "e" in f"{value:.9g}" else f"{value:.9g}.0"


def _has(node: ir.Node, index: int) -> bool:
    return len(node.inputs) > index and node.inputs[index] is not None


def _outputs(node: ir.Node, names: str) -> tuple[str, str]:
    """The outputs that `node` has of all `names`, and what tells their overload from the one that has all."""
    kept = names.split(", ")[: len(node.outputs)]
    return ", ".join(kept), "" if len(node.outputs) == len(names.split(", ")) else f"_first{len(kept)}"


def _normalize(node: ir.Node, source: str) -> str:
    """Statements that make Y from the NCHW tensor `source`: InstanceNormalization over groups, affine, activation."""
    groups = node.attributes["groups"].as_int()
    epsilon = node.attributes["epsilon"].as_float()
    silu = node.attributes["activation"].as_int()
    dtype = node.inputs[0].dtype if node.inputs[0] is not None else None
    affine = "" if dtype is None or dtype == (node.inputs[1].dtype if node.inputs[1] else None) else "cast"
    name = {ir.DataType.FLOAT16: 10, ir.DataType.BFLOAT16: 16}.get(dtype, 1) if dtype else 1
    w, b = ("gamma_cast", "beta_cast") if affine else ("gamma", "beta")
    casts = (
        f"gamma_cast = Cast <to = {name}> (gamma)  beta_cast = Cast <to = {name}> (beta)" if affine else ""
    )  # gamma and beta stay in fp32 where the target's kernel wants them so
    last = "n_affine" if silu else "y_nchw"
    return f"""
        split = Constant <value_ints = [0, {groups}, -1]> ()
        count = Constant <value_ints = [{groups}]> ()
        one = ConstantOfShape <value = float[1] {{1.0}}> (count)
        zero = ConstantOfShape <value = float[1] {{0.0}}> (count)
        one_x = CastLike (one, {source})
        zero_x = CastLike (zero, {source})
        column = Constant <value_ints = [-1, 1, 1]> ()
        {casts}
        w_column = Reshape ({w}, column)
        b_column = Reshape ({b}, column)
        grouped = Reshape ({source}, split)
        normal = InstanceNormalization <epsilon = {_float(epsilon)}> (grouped, one_x, zero_x)
        whole = Shape ({source})
        restored = Reshape (normal, whole)
        scaled = Mul (restored, w_column)
        {last} = Add (scaled, b_column)
        {"gate = Sigmoid (n_affine)  y_nchw = Mul (n_affine, gate)" if silu else ""}
    """


def _norm_name(node: ir.Node) -> str:
    a = node.attributes
    layout = "nhwc" if a["channels_last"].as_int() else "nchw"
    mixed = "_mixed" if node.inputs[0] and node.inputs[1] and node.inputs[0].dtype != node.inputs[1].dtype else ""
    kind = node.inputs[0].dtype.name.lower() if mixed and node.inputs[0] and node.inputs[0].dtype else ""
    return f"{layout}_g{a['groups'].as_int()}_e{a['epsilon'].as_float():.3g}_a{a['activation'].as_int()}{mixed}{kind}"


def _group_norm(node: ir.Node) -> tuple[str, str]:
    last = node.attributes["channels_last"].as_int()
    enter = "x_nchw = Transpose <perm = [0, 3, 1, 2]> (X)" if last else "x_nchw = Identity (X)"
    leave = "Y = Transpose <perm = [0, 2, 3, 1]> (y_nchw)" if last else "Y = Identity (y_nchw)"
    return _norm_name(node), f"(X, gamma, beta) => (Y) {{ {enter} {_normalize(node, 'x_nchw')} {leave} }}"


def _skip_group_norm(node: ir.Node) -> tuple[str, str]:
    last, bias = node.attributes["channels_last"].as_int(), _has(node, 4)
    inputs = "X, gamma, beta, skip, bias" if bias else "X, gamma, beta, skip"
    enter = "s_nchw = Transpose <perm = [0, 3, 1, 2]> (S)" if last else "s_nchw = Identity (S)"
    leave = "Y = Transpose <perm = [0, 2, 3, 1]> (y_nchw)" if last else "Y = Identity (y_nchw)"
    flat = bias and not last
    shape = "c11 = Constant <value_ints = [-1, 1, 1]> ()  bias_c = Reshape (bias, c11)" if flat else ""
    total = f"biased = Add (X, {'bias_c' if flat else 'bias'})  S = Add (biased, skip)" if bias else "S = Add (X, skip)"
    outputs, suffix = _outputs(node, "Y, S")
    body = f"({inputs}) => ({outputs}) {{ {shape} {total} {enter} {_normalize(node, 's_nchw')} {leave} }}"
    return _norm_name(node) + ("_bias" if bias else "") + suffix, body


def _bias_split_gelu(node: ir.Node) -> tuple[str, str]:
    return "", """(X, bias) => (Y) {
        biased = Add (X, bias)
        left, right = Split <axis = -1, num_outputs = 2> (biased)
        gate = Gelu (right)
        Y = Mul (left, gate)
    }"""


def _nhwc_conv(node: ir.Node) -> tuple[str, str]:
    bias = ", B" if _has(node, 2) else ""
    numbers = {name: a.value for name, a in sorted(node.attributes.items()) if name != "auto_pad"}
    given = ", ".join(f"{k} = {list(v) if isinstance(v, (list, tuple)) else v}" for k, v in numbers.items())
    name = "_".join(f"{k[0]}{'x'.join(map(str, v)) if isinstance(v, (list, tuple)) else v}" for k, v in numbers.items())
    return name + ("_bias" if bias else ""), f"""(X, W{bias}) => (Y) {{
        x_nchw = Transpose <perm = [0, 3, 1, 2]> (X)
        w_nchw = Transpose <perm = [0, 3, 1, 2]> (W)
        y_nchw = Conv <{given}> (x_nchw, w_nchw{bias})
        Y = Transpose <perm = [0, 2, 3, 1]> (y_nchw)
    }}"""


def _bias_add(node: ir.Node) -> tuple[str, str]:
    return "", "(X, bias, skip) => (Y) { biased = Add (X, bias)  Y = Add (biased, skip) }"


def _quick_gelu(node: ir.Node) -> tuple[str, str]:
    alpha = _float(node.attributes["alpha"].as_float())
    return f"a{alpha}", f"""(X) => (Y) {{
        alpha = Constant <value_float = {alpha}> ()
        alpha_x = CastLike (alpha, X)
        scaled = Mul (X, alpha_x)
        gate = Sigmoid (scaled)
        Y = Mul (X, gate)
    }}"""


def _skip_layer_normalization(node: ir.Node) -> tuple[str, str]:
    bias, epsilon = _has(node, 4), node.attributes["epsilon"].as_float()
    total = "biased = Add (X, bias)  S = Add (biased, skip)" if bias else "S = Add (X, skip)"
    inputs = "X, skip, gamma, beta, bias" if bias else "X, skip, gamma, beta"
    norm = f"Y, mean, inv_std = LayerNormalization <axis = -1, epsilon = {_float(epsilon)}> (S, gamma, beta)"
    outputs, suffix = _outputs(node, "Y, mean, inv_std, S")
    return f"e{epsilon:.3g}{'_bias' if bias else ''}{suffix}", f"({inputs}) => ({outputs}) {{ {total} {norm} }}"


def _attend(query: str, key: str, value: str, node: ir.Node, mask: str) -> str:
    """Statements that make `heads` [B,N,S,D] from `query`, `key`, `value` [B,N,.,D]."""
    scale = node.attributes["scale"].as_float()
    causal = node.attributes.get_int("is_causal", 0) or node.attributes.get_int("unidirectional", 0)
    last = f"masked = Add (scores, {mask})" if mask else "masked = Identity (scores)"
    if causal:
        last = """
            axes = Shape <start = -2> (scores)
            whole = ConstantOfShape <value = float[1] {-3.0e38}> (axes)
            one = Constant <value_int = 1> ()
            above = Trilu <upper = 1> (whole, one)
            finite = CastLike (above, scores)
            """ + (f"other = Add (scores, {mask})  masked = Add (other, finite)" if mask else "masked = Add (scores, finite)")
    return f"""
        factor = Constant <value_float = {_float(scale)}> ()
        factor_q = CastLike (factor, {query})
        scaled = Mul ({query}, factor_q)
        keys = Transpose <perm = [0, 1, 3, 2]> ({key})
        scores = MatMul (scaled, keys)
        {last}
        weights = Softmax <axis = -1> (masked)
        heads = MatMul (weights, {value})
    """


def _attention_name(node: ir.Node, mask: bool) -> str:
    causal = node.attributes.get_int("is_causal", 0) or node.attributes.get_int("unidirectional", 0)
    scale = f"{node.attributes['scale'].as_float():.9g}"
    return f"s{scale}{'_causal' if causal else ''}{'_mask' if mask else ''}"


def _sdpa(node: ir.Node) -> tuple[str, str]:
    mask = _has(node, 3)
    inputs = "Q, K, V, mask" if mask else "Q, K, V"
    body = f"({inputs}) => (Y) {{ {_attend('Q', 'K', 'V', node, 'mask' if mask else '')} Y = Identity (heads) }}"
    return _attention_name(node, mask), body


def _multi_head_attention(node: ir.Node) -> tuple[str, str]:
    heads, mask = node.attributes["num_heads"].as_int(), _has(node, 5)
    packed = "qkv" if len(node.inputs) < 2 or node.inputs[1] is None else "kv" if not _has(node, 2) else ""
    inputs = {"qkv": "query", "kv": "query, key", "": "query, key, value"}[packed]
    if mask:
        inputs = "query, key, value, bias, key_padding_mask, attention_bias"
    split = f"split = Constant <value_ints = [0, 0, {heads}, -1]> ()"
    if packed == "qkv":  # [B,S,N,3,D]
        parts = """
            q5, k5, v5 = Split <axis = 3, num_outputs = 3> (query)
            three = Constant <value_ints = [3]> ()
            q4 = Squeeze (q5, three)  k4 = Squeeze (k5, three)  v4 = Squeeze (v5, three)"""
    elif packed == "kv":  # [B,L,N,2,D]
        parts = """
            k5, v5 = Split <axis = 3, num_outputs = 2> (key)
            three = Constant <value_ints = [3]> ()
            q4 = Reshape (query, split)  k4 = Squeeze (k5, three)  v4 = Squeeze (v5, three)"""
    else:
        parts = "q4 = Reshape (query, split)  k4 = Reshape (key, split)  v4 = Reshape (value, split)"
    body = f"""({inputs}) => (output) {{
        {split}
        {parts}
        qh = Transpose <perm = [0, 2, 1, 3]> (q4)
        kh = Transpose <perm = [0, 2, 1, 3]> (k4)
        vh = Transpose <perm = [0, 2, 1, 3]> (v4)
        {_attend("qh", "kh", "vh", node, "attention_bias" if mask else "")}
        merged = Transpose <perm = [0, 2, 1, 3]> (heads)
        flat = Constant <value_ints = [0, 0, -1]> ()
        output = Reshape (merged, flat)
    }}"""
    return f"n{heads}_{_attention_name(node, mask)}{'_' + packed if packed else ''}", body


VARIANTS = {
    "BiasAdd": _bias_add,
    "BiasSplitGelu": _bias_split_gelu,
    "GroupNorm": _group_norm,
    "MultiHeadAttention": _multi_head_attention,
    "NhwcConv": _nhwc_conv,
    "QuickGelu": _quick_gelu,
    "ScaledDotProductAttention": _sdpa,
    "SkipGroupNorm": _skip_group_norm,
    "SkipLayerNormalization": _skip_layer_normalization,
}
