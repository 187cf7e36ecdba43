"""Snippets of function bodies and shape rules that several operator definitions share."""

from __future__ import annotations

import onnx_ir as ir

from fusion_passes.shapes.shape_info import Shape, ShapeInfo, input_shape


def has(node: ir.Node, index: int) -> bool:
    """Return whether a node has an input `index`."""
    return len(node.inputs) > index and node.inputs[index] is not None


def normalize(source: str) -> str:
    """Return statements that compute y_nchw from the NCHW tensor `source`: GroupNorm by InstanceNormalization.

    gamma and beta are cast to the dtype of `source`, because some targets keep them in float32. ONNX Runtime folds the
    If, whose condition is constant.
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


def attend(query: str, key: str, value: str, node: ir.Node, mask: str) -> str:
    """Return statements that compute `heads` [B,N,S,D] from `query`, `key` and `value` [B,N,.,D]."""
    cap = ""
    if node.attributes.get_float("softcap", 0.0):
        cap = f"""
            cap = Constant <value_float: float = @softcap> ()
            cap_q = CastLike (cap, {query})
            part = Div (products, cap_q)
            bounded = Tanh (part)
            scores = Mul (bounded, cap_q)
            """
    last = f"masked = Add (scores, {mask})" if mask else "masked = Identity (scores)"
    if causal(node):
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
        {"products" if cap else "scores"} = MatMul (scaled, keys)
        {cap}
        {last}
        weights = Softmax <axis = -1> (masked)
        heads = MatMul (weights, {value})
    """


def causal(node: ir.Node) -> bool:
    """Return whether an attention has a causal mask."""
    return bool(node.attributes.get_int("is_causal", 0) or node.attributes.get_int("unidirectional", 0))


def attention_overload(node: ir.Node, mask: bool) -> str:
    """Return the overload name of an attention's body."""
    capped = bool(node.attributes.get_float("softcap", 0.0))
    return "_".join(word for word, used in (("causal", causal(node)), ("mask", mask), ("capped", capped)) if used)


def same_as_first_input(node: ir.Node, info: ShapeInfo) -> list[Shape]:
    return [input_shape(node, 0, info)]


def skip_normalization_shapes(node: ir.Node, info: ShapeInfo) -> list[Shape | None]:
    """Return the output shapes of SkipGroupNorm and SkipLayerNormalization: normalized tensor first, sum last."""
    x = input_shape(node, 0, info)
    return [x, *[None] * (len(node.outputs) - 2), x]
