"""Model-local function bodies: what each fused operator means, in standard ONNX.

A fused node of domain `sd_ort` runs on any ONNX runtime because the model carries its body; where a library with a
kernel of the same name is registered, the kernel is taken instead. Bodies read the node's attributes, so one body
serves all nodes of an operator. Where inputs differ (a mask here, none there) or other attributes are given, the
second form becomes an overload of the function; ONNX Runtime before 1.27 takes overloads for one another, so they are
made only where they must be.
The same bodies take a fused operator apart again for a target that has no kernel for it.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import onnx_ir as ir

from fusion_passes.operators.record import DOMAIN


def attach(model: ir.Model, nodes: Iterable[ir.Node]) -> None:
    """Give the model the bodies of `nodes` (fused nodes of it), each form once, and the nodes their overloads."""
    version = model.graph.opset_imports.get("", 21)
    overloads: dict[str, dict[tuple[str, ...], str]] = {}
    for node in nodes:
        form, body = FORMS[node.op_type](node)
        mine = overloads.setdefault(node.op_type, {})
        name = form or "plain"
        while name in mine.values():
            name += "_too"
        node.overload = mine.setdefault((form, *sorted(node.attributes)), name if mine else "")
        key = (DOMAIN, node.op_type, node.overload)
        if key not in model.functions:
            model.functions[key] = _function(node, body, version)
    model.graph.opset_imports.setdefault(DOMAIN, 1)


def _function(node: ir.Node, body: str, version: int) -> ir.Function:
    declared = f"<{', '.join(sorted(node.attributes))}>" if node.attributes else ""
    proto = onnx.parser.parse_function(
        f'<domain: "{DOMAIN}", opset_import: ["" : {version}]>\n{node.op_type} {declared} {body}'
    )
    proto.overload = node.overload
    function = ir.from_proto(proto)
    assert isinstance(function, ir.Function)
    return function


def _has(node: ir.Node, index: int) -> bool:
    return len(node.inputs) > index and node.inputs[index] is not None


def _normalize(source: str) -> str:
    """Statements that make y_nchw from the NCHW tensor `source`: InstanceNormalization over groups, affine, activation.

    gamma and beta are cast, since they stay in float32 where a target's kernel wants them so. ONNX Runtime folds the
    If away, as its condition is constant.
    """
    return f"""
        groups = Constant <value_int: int = @groups> ()
        all = Constant <value_ints = [-1]> ()
        same = Constant <value_ints = [0]> ()
        count = Reshape (groups, all)
        split = Concat <axis = 0> (same, count, all)
        one = ConstantOfShape <value = float[1] {{1.0}}> (count)
        zero = ConstantOfShape <value = float[1] {{0.0}}> (count)
        one_x = CastLike (one, {source})
        zero_x = CastLike (zero, {source})
        column = Constant <value_ints = [-1, 1, 1]> ()
        gamma_column = Reshape (gamma, column)
        beta_column = Reshape (beta, column)
        gamma_x = CastLike (gamma_column, {source})
        beta_x = CastLike (beta_column, {source})
        grouped = Reshape ({source}, split)
        normal = InstanceNormalization <epsilon: float = @epsilon> (grouped, one_x, zero_x)
        whole = Shape ({source})
        restored = Reshape (normal, whole)
        scaled = Mul (restored, gamma_x)
        affine = Add (scaled, beta_x)
        activation = Constant <value_int: int = @activation> ()
        is_silu = Cast <to = 9> (activation)
        y_nchw = If (is_silu) <
            then_branch = silu () => (active) {{ gate = Sigmoid (affine)  active = Mul (affine, gate) }},
            else_branch = none () => (passive) {{ passive = Identity (affine) }}
        >
    """


def _group_norm(node: ir.Node) -> tuple[str, str]:
    last = node.attributes["channels_last"].as_int()
    enter = "x_nchw = Transpose <perm = [0, 3, 1, 2]> (X)" if last else "x_nchw = Identity (X)"
    leave = "Y = Transpose <perm = [0, 2, 3, 1]> (y_nchw)" if last else "Y = Identity (y_nchw)"
    return "nhwc" if last else "nchw", f"(X, gamma, beta) => (Y) {{ {enter} {_normalize('x_nchw')} {leave} }}"


def _skip_group_norm(node: ir.Node) -> tuple[str, str]:
    last = node.attributes["channels_last"].as_int()
    enter = "s_nchw = Transpose <perm = [0, 3, 1, 2]> (S)" if last else "s_nchw = Identity (S)"
    leave = "Y = Transpose <perm = [0, 2, 3, 1]> (y_nchw)" if last else "Y = Identity (y_nchw)"
    bias = _has(node, 4)  # beside channels-last tensors only
    inputs = "X, gamma, beta, skip, bias" if bias else "X, gamma, beta, skip"
    total = "biased = Add (X, bias)  S = Add (biased, skip)" if bias else "S = Add (X, skip)"
    body = f"({inputs}) => (Y, S) {{ {total} {enter} {_normalize('s_nchw')} {leave} }}"
    return ("nhwc" if last else "nchw") + ("_bias" if bias else ""), body


def _bias_split_gelu(node: ir.Node) -> tuple[str, str]:
    return (
        "",
        """(X, bias) => (Y) {
        biased = Add (X, bias)
        left, right = Split <axis = -1, num_outputs = 2> (biased)
        gate = Gelu (right)
        Y = Mul (left, gate)
    }""",
    )


def _nhwc_conv(node: ir.Node) -> tuple[str, str]:
    bias = ", B" if _has(node, 2) else ""
    kinds = {"group": "int", "auto_pad": "string"}
    given = ", ".join(f"{name}: {kinds.get(name, 'ints')} = @{name}" for name in sorted(node.attributes))
    return (
        "bias" if bias else "",
        f"""(X, W{bias}) => (Y) {{
        x_nchw = Transpose <perm = [0, 3, 1, 2]> (X)
        w_nchw = Transpose <perm = [0, 3, 1, 2]> (W)
        y_nchw = Conv <{given}> (x_nchw, w_nchw{bias})
        Y = Transpose <perm = [0, 2, 3, 1]> (y_nchw)
    }}""",
    )


def _bias_add(node: ir.Node) -> tuple[str, str]:
    return "", "(X, bias, skip) => (Y) { biased = Add (X, bias)  Y = Add (biased, skip) }"


def _linear_add(node: ir.Node) -> tuple[str, str]:
    bias, skip = _has(node, 2), _has(node, 3)
    form = "_".join(word for word, there in (("bias", bias), ("skip", skip)) if there)
    inputs = "X, W, bias, skip" if skip else "X, W, bias" if bias else "X, W"
    biased = "biased = Add (product, bias)" if bias else "biased = Identity (product)"
    total = "Y = Add (biased, skip)" if skip else "Y = Identity (biased)"
    return form, f"({inputs}) => (Y) {{ product = MatMul (X, W)  {biased}  {total} }}"


def _quick_gelu(node: ir.Node) -> tuple[str, str]:
    return (
        "",
        """(X) => (Y) {
        alpha = Constant <value_float: float = @alpha> ()
        alpha_x = CastLike (alpha, X)
        scaled = Mul (X, alpha_x)
        gate = Sigmoid (scaled)
        Y = Mul (X, gate)
    }""",
    )


def _skip_layer_normalization(node: ir.Node) -> tuple[str, str]:
    bias = _has(node, 4)
    total = "biased = Add (X, bias)  S = Add (biased, skip)" if bias else "S = Add (X, skip)"
    inputs = "X, skip, gamma, beta, bias" if bias else "X, skip, gamma, beta"
    norm = "Y, mean, inv_std = LayerNormalization <axis = -1, epsilon: float = @epsilon> (S, gamma, beta)"
    return "bias" if bias else "", f"({inputs}) => (Y, mean, inv_std, S) {{ {total} {norm} }}"


def _attend(query: str, key: str, value: str, node: ir.Node, mask: str) -> str:
    """Statements that make `heads` [B,N,S,D] from `query`, `key`, `value` [B,N,.,D]."""
    last = f"masked = Add (scores, {mask})" if mask else "masked = Identity (scores)"
    if _causal(node):
        last = """
            axes = Shape <start = -2> (scores)
            whole = ConstantOfShape <value = float[1] {-3.0e38}> (axes)
            one = Constant <value_int = 1> ()
            above = Trilu <upper = 1> (whole, one)
            finite = CastLike (above, scores)
            """ + (
            f"other = Add (scores, {mask})  masked = Add (other, finite)" if mask else "masked = Add (scores, finite)"
        )
    return f"""
        factor = Constant <value_float: float = @scale> ()
        factor_q = CastLike (factor, {query})
        scaled = Mul ({query}, factor_q)
        keys = Transpose <perm = [0, 1, 3, 2]> ({key})
        scores = MatMul (scaled, keys)
        {last}
        weights = Softmax <axis = -1> (masked)
        heads = MatMul (weights, {value})
    """


def _causal(node: ir.Node) -> bool:
    return bool(node.attributes.get_int("is_causal", 0) or node.attributes.get_int("unidirectional", 0))


def _attention_form(node: ir.Node, mask: bool) -> str:
    return "_".join(word for word, there in (("causal", _causal(node)), ("mask", mask)) if there)


def _sdpa(node: ir.Node) -> tuple[str, str]:
    mask = _has(node, 3)
    inputs = "Q, K, V, mask" if mask else "Q, K, V"
    body = f"({inputs}) => (Y) {{ {_attend('Q', 'K', 'V', node, 'mask' if mask else '')} Y = Identity (heads) }}"
    return _attention_form(node, mask), body


def _multi_head_attention(node: ir.Node) -> tuple[str, str]:
    mask = _has(node, 5)
    packed = "qkv" if len(node.inputs) < 2 or node.inputs[1] is None else "kv" if not _has(node, 2) else ""
    inputs = {"qkv": "query", "kv": "query, key", "": "query, key, value"}[packed]
    if mask:
        inputs = "query, key, value, bias, key_padding_mask, attention_bias"
    split = """
        heads_number = Constant <value_int: int = @num_heads> ()
        rest = Constant <value_ints = [-1]> ()
        kept = Constant <value_ints = [0, 0]> ()
        heads_vector = Reshape (heads_number, rest)
        split = Concat <axis = 0> (kept, heads_vector, rest)"""
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
    return "_".join(word for word in (_attention_form(node, mask), packed) if word), body


def _upsample_nearest(node: ir.Node) -> tuple[str, str]:
    return (
        "",
        """(X) => (Y) {
        height = Constant <value_int: int = @scale_height> ()
        width = Constant <value_int: int = @scale_width> ()
        all = Constant <value_ints = [-1]> ()
        one = Constant <value_ints = [1]> ()
        down = Reshape (height, all)
        across = Reshape (width, all)
        times = Concat <axis = 0> (one, down, across, one)
        scales = Cast <to = 1> (times)
        Y = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor">
            (X, , scales)
    }""",
    )


def _winograd_conv(node: ir.Node) -> tuple[str, str]:
    return "", "(X, W, B) => (Y) { Y = Conv <pads = [1, 1, 1, 1]> (X, W, B) }"


FORMS = {
    "BiasAdd": _bias_add,
    "BiasSplitGelu": _bias_split_gelu,
    "GroupNorm": _group_norm,
    "LinearAdd": _linear_add,
    "MultiHeadAttention": _multi_head_attention,
    "NhwcConv": _nhwc_conv,
    "QuickGelu": _quick_gelu,
    "ScaledDotProductAttention": _sdpa,
    "SkipGroupNorm": _skip_group_norm,
    "SkipLayerNormalization": _skip_layer_normalization,
    "UpsampleNearest": _upsample_nearest,
    "WinogradConv": _winograd_conv,
}
