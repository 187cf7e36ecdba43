"""Params, NumPy reference, test cases and benchmark shapes of MultiHeadAttention."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from math import prod

import numpy as np

from custom_ops.operator_spec import (
    DTYPES,
    FLOAT32,
    INT32,
    INT64,
    POINTER,
    QUANTIZED,
    Array,
    Float8Output,
    OperatorCase,
    Shape,
    float8_output,
    struct_fields,
    with_quantized,
)

NAME = "MultiHeadAttention"
INPUTS = ("query", "key", "value", "bias", "key_padding_mask", "attention_bias")
OUTPUTS = ("output", QUANTIZED)


class HeadsView(ctypes.Structure):
    """struct HeadsView of op.h."""

    _fields_ = struct_fields((POINTER, "data"), (INT64, "batch_stride row_stride head_stride"))


class Params(ctypes.Structure):
    """struct MultiHeadAttentionParams of op.h."""

    _fields_ = struct_fields(
        (INT32, "dtype"),
        (HeadsView, "query key value"),
        (POINTER, "attention_bias output"),
        (INT64, "batch heads kv_heads sequence kv_sequence head_size bias_batch_stride bias_head_stride"),
        (FLOAT32, "scale"),
        (INT32, "causal"),
        (Float8Output, "quantized"),
    )


def _sizes(case: OperatorCase) -> tuple[int, int, int, int, int]:
    """Batch, heads, sequence, kv_sequence and head size of a case."""
    heads = int(case.attributes["num_heads"])
    query = case.inputs["query"]
    if len(query) == 5:
        return query[0], heads, query[1], query[1], query[4]
    return query[0], heads, query[1], case.inputs["key"][1], query[2] // heads


def kv_heads(attributes: Mapping[str, int | float]) -> int:
    """Number of heads of key and value."""
    return int(attributes.get("kv_num_heads", attributes["num_heads"]))


def _view(address: int, shape: Shape, head_size: int, part: int, itemsize: int) -> HeadsView:
    """Part `part` of a tensor (B, S, N * H) or (B, S, N, parts, H) at `address`."""
    parts = shape[3] if len(shape) == 5 else 1
    row = prod(shape[2:])
    return HeadsView(address + part * head_size * itemsize, shape[1] * row, row, parts * head_size)


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> Params:
    """Return the Params of a case."""
    batch, heads, sequence, kv_sequence, head_size = _sizes(case)
    shapes, itemsize = case.inputs, DTYPES[dtype][1].itemsize
    if len(shapes["query"]) == 5:
        sources = [("query", 0), ("query", 1), ("query", 2)]
    elif len(shapes["key"]) == 5:
        sources = [("query", 0), ("key", 0), ("key", 1)]
    else:
        sources = [("query", 0), ("key", 0), ("value", 0)]
    query, key, value = (_view(address[name], shapes[name], head_size, part, itemsize) for name, part in sources)
    bias = shapes.get("attention_bias", (1, 1, sequence, kv_sequence))
    return Params(
        dtype=DTYPES[dtype][0],
        query=query,
        key=key,
        value=value,
        attention_bias=address.get("attention_bias", 0),
        output=address.get("output"),
        batch=batch,
        heads=heads,
        kv_heads=kv_heads(case.attributes),
        sequence=sequence,
        kv_sequence=kv_sequence,
        head_size=head_size,
        bias_batch_stride=bias[1] * sequence * kv_sequence if bias[0] > 1 else 0,
        bias_head_stride=sequence * kv_sequence if bias[1] > 1 else 0,
        scale=case.attributes.get("scale", 0.0) or head_size**-0.5,
        causal=int(case.attributes.get("unidirectional", 0)),
        quantized=float8_output(case, address),
    )


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """Both outputs are (B, S, N * H)."""
    batch, heads, sequence, _, head_size = _sizes(case)
    return dict.fromkeys(case.outputs or ("output",), (batch, sequence, heads * head_size))


def heads_view(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> tuple[Array, Array, Array]:
    """Query (B, S, N, H), key and value (B, L, M, H) out of separate or packed inputs, without copies.

    Packed: query (B, S, N, 3, H) alone, or query (B, S, N * H) with key (B, L, M, 2, H), as com.microsoft takes them.
    """
    heads = int(attributes["num_heads"])
    query = inputs["query"]
    if query.ndim == 5:
        return query[..., 0, :], query[..., 1, :], query[..., 2, :]
    batch, sequence, hidden = query.shape
    split = query.reshape(batch, sequence, heads, hidden // heads)
    key = inputs["key"]
    if key.ndim == 5:
        return split, key[..., 0, :], key[..., 1, :]
    value = inputs["value"]
    shape = (batch, key.shape[1], kv_heads(attributes), hidden // heads)
    return split, key.reshape(shape), value.reshape(shape)


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """Output (B, S, N * H) in float64; a row whose scores are all -infinity is zero."""
    views = heads_view(inputs, attributes)
    query, key, value = (x.transpose(0, 2, 1, 3).astype(np.float64) for x in views)  # products of a BLAS, not einsum's
    batch, heads, sequence, head_size = query.shape
    key, value = (np.repeat(x, heads // x.shape[1], axis=1) for x in (key, value))
    scale = attributes.get("scale", 0.0) or head_size**-0.5
    scores = query @ key.swapaxes(2, 3) * scale
    if "attention_bias" in inputs:
        scores += inputs["attention_bias"].astype(np.float64)
    if attributes.get("unidirectional", 0):
        scores[..., np.arange(scores.shape[-1]) > np.arange(sequence)[:, None]] = -np.inf
    largest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(largest), 0.0, largest))
    total = weights.sum(axis=-1, keepdims=True)
    weights /= np.where(total == 0.0, 1.0, total)
    output = (weights @ value).transpose(0, 2, 1, 3)
    return with_quantized({"output": output.reshape(batch, sequence, heads * head_size)}, attributes)


def generate_special_input(case: OperatorCase, name: str, rng: np.random.Generator) -> Array | None:
    """Masks of the kinds that models make, and scores of every size.

    attention_bias: by `values`, "mask" hides a random half of the keys by the type's own lowest number (the largest
    negative float16, so that it is finite in every type), "hidden_rows" by -infinity and every third row wholly;
    otherwise N(0, 1). "peaked" draws logits of about +-1000, where all weight falls on one key.
    """
    shape = case.inputs[name]
    normal = rng.standard_normal(shape)
    if name == "attention_bias" and case.distribution == "mask":
        return np.where(rng.random(shape) < 0.5, -65504.0, 0.0)
    if name == "attention_bias" and case.distribution == "hidden_rows":
        hidden = np.where(rng.random(shape) < 0.5, -np.inf, 0.0)
        hidden[..., ::3, :] = -np.inf
        return hidden
    if case.distribution == "peaked":
        return normal * (1.0 if name == "value" else 32.0)
    return normal


def attention_case(
    batch: int,
    heads: int,
    sequence: int,
    kv_sequence: int,
    head_size: int,
    *,
    packed: str = "",
    bias: tuple[int, int] | None = None,
    distribution: str = "normal",
    benchmark: bool = False,
    roundoffs: float = 0.0,
    quantized: tuple[str, ...] = (),
    **attributes: int | float,
) -> OperatorCase:
    """Return a case of attention.

    packed: "", "kv" or "qkv". bias: batch and head axes of attention_bias. roundoffs: those of float32, for a kernel
    that computes in a narrower dtype. quantized: names of the outputs; one of them is in float8.
    """
    groups = int(attributes.get("kv_num_heads", heads))
    query, keys = (batch, sequence, heads * head_size), (batch, kv_sequence, groups * head_size)
    inputs: dict[str, Shape] = {"query": query, "key": keys, "value": keys}
    if packed == "qkv":
        inputs = {"query": (batch, sequence, heads, 3, head_size)}
    elif packed == "kv":
        inputs = {"query": query, "key": (batch, kv_sequence, groups, 2, head_size)}
    if bias is not None:
        inputs["attention_bias"] = (*bias, sequence, kv_sequence)
    words = [f"{batch}x{heads}x{sequence}x{kv_sequence}x{head_size}", packed, *attributes]
    valued = ("scale", "kv_num_heads")
    words = [f"{word}{attributes[word]}" if word in valued else word for word in words]
    words += [distribution] if distribution != "normal" else []
    words += [f"bias{bias[0]}{bias[1]}"] if bias else []
    if quantized:
        words += quantized
        attributes["quantized_scale"] = 0.00390625
    name = "-".join(word for word in words if word)
    # Softmax turns a score's absolute error into a weight's relative one, and n-term sums lose about sqrt(n) roundoffs.
    largest_score = abs(attributes.get("scale", 0.0) or head_size**-0.5) * head_size**0.5
    return OperatorCase(
        name,
        inputs,
        {"num_heads": heads, **attributes},
        quantized or None,
        distribution,
        benchmark=benchmark,
        float32_roundoffs=roundoffs or 4 * max(1.0, largest_score) + max(head_size, kv_sequence) ** 0.5,
    )


CASES = [
    # the head sizes of Stable Diffusion, packed as its UNet lowers them
    attention_case(2, 2, 64, 64, 40, packed="qkv"),
    attention_case(2, 2, 64, 77, 40, packed="kv"),
    attention_case(1, 2, 64, 64, 64, packed="qkv"),
    attention_case(1, 2, 48, 77, 80, packed="kv"),
    attention_case(1, 1, 32, 32, 160, packed="qkv"),
    attention_case(1, 1, 32, 77, 160, packed="kv"),
    attention_case(1, 1, 40, 40, 512),
    attention_case(1, 1, 70, 131, 512),
    attention_case(2, 2, 21, 24, 192, packed="kv"),
    attention_case(2, 2, 16, 16, 168, packed="qkv", scale=-0.125),
    # other sizes, lengths that fill no tile, single rows, batches
    attention_case(1, 1, 1, 1, 64),
    attention_case(1, 2, 77, 77, 64),
    attention_case(1, 1, 131, 257, 32),
    attention_case(1, 2, 67, 13, 96),
    attention_case(1, 1, 37, 129, 128),
    attention_case(16, 1, 5, 3, 40, packed="kv"),
    attention_case(1, 1, 200, 190, 64),
    attention_case(2, 1, 70, 192, 64, packed="kv"),
    attention_case(1, 2, 21, 40, 24),
    attention_case(1, 1, 19, 23, 192),
    attention_case(1, 1, 19, 23, 256),
    # head sizes and rows that no 16-byte load takes
    attention_case(1, 3, 29, 31, 37),
    attention_case(2, 1, 17, 18, 4, packed="qkv"),
    attention_case(1, 2, 9, 33, 162),
    # masks
    attention_case(1, 2, 77, 77, 64, unidirectional=1),
    attention_case(2, 1, 150, 150, 40, packed="qkv", unidirectional=1),
    attention_case(1, 1, 30, 60, 80, unidirectional=1),
    attention_case(2, 2, 77, 77, 64, bias=(1, 1), distribution="mask"),
    attention_case(2, 2, 33, 70, 40, bias=(2, 1)),
    attention_case(2, 2, 33, 70, 40, bias=(1, 2)),
    attention_case(2, 2, 33, 70, 40, bias=(2, 2), unidirectional=1),
    attention_case(1, 2, 40, 90, 64, bias=(1, 1), distribution="hidden_rows"),
    attention_case(1, 1, 33, 70, 512, bias=(1, 1), distribution="hidden_rows"),
    attention_case(1, 1, 33, 70, 37, bias=(1, 1), distribution="hidden_rows"),
    # fewer heads of keys and values than of queries
    attention_case(2, 6, 21, 40, 64, kv_num_heads=2),
    attention_case(1, 4, 67, 64, 40, kv_num_heads=1),
    attention_case(2, 6, 33, 70, 40, kv_num_heads=3, bias=(2, 6)),
    attention_case(1, 4, 40, 40, 128, kv_num_heads=2, unidirectional=1),
    attention_case(2, 6, 21, 24, 192, kv_num_heads=2, packed="kv"),
    attention_case(1, 7, 9, 33, 37, kv_num_heads=1),
    attention_case(1, 2, 19, 23, 64, kv_num_heads=2),
    # scores: other scales, all weight on one key, all keys alike
    attention_case(1, 1, 40, 50, 64, scale=1.0),
    attention_case(1, 1, 40, 50, 64, scale=-0.125),
    attention_case(1, 1, 64, 200, 64, distribution="peaked"),
    attention_case(1, 1, 21, 128, 64, distribution="peaked"),  # no row with two keys of nearly the same score
    attention_case(1, 1, 40, 70, 512, distribution="peaked"),
    attention_case(1, 1, 20, 50, 64, scale=1e-6),
    # keys of many tiles, and maxima that move in late ones
    attention_case(1, 1, 200, 700, 40),
    attention_case(1, 1, 70, 500, 24, distribution="peaked"),
    # outputs in float8: of every kernel, and of products of a library by a kernel after them
    attention_case(2, 2, 70, 77, 40, packed="kv", quantized=("output", QUANTIZED)),
    attention_case(1, 2, 131, 192, 64, quantized=(QUANTIZED,)),
    attention_case(2, 2, 33, 70, 40, bias=(2, 1), quantized=(QUANTIZED,)),
    attention_case(1, 2, 29, 31, 37, quantized=("output", QUANTIZED)),
    attention_case(1, 1, 70, 131, 512, quantized=(QUANTIZED,)),
    attention_case(2, 2, 21, 24, 192, packed="kv", quantized=(QUANTIZED,)),
    # SD 1.5 at 512 x 512 and SDXL at 1024 x 1024, with guidance; the VAE
    attention_case(2, 8, 4096, 4096, 40, packed="qkv", benchmark=True),
    attention_case(2, 8, 4096, 77, 40, packed="kv", benchmark=True),
    attention_case(2, 8, 1024, 1024, 80, packed="qkv", benchmark=True),
    attention_case(2, 8, 1024, 77, 80, packed="kv", benchmark=True),
    attention_case(2, 8, 256, 256, 160, packed="qkv", benchmark=True),
    attention_case(2, 8, 64, 64, 160, packed="qkv", benchmark=True),
    attention_case(16, 8, 4096, 4096, 40, packed="qkv", benchmark=True),
    attention_case(2, 8, 9216, 9216, 40, packed="qkv", benchmark=True),
    attention_case(2, 8, 1024, 1024, 40, packed="qkv", benchmark=True),
    attention_case(2, 8, 4096, 4096, 40, packed="qkv", quantized=(QUANTIZED,), benchmark=True),
    attention_case(2, 10, 4096, 4096, 64, packed="qkv", benchmark=True),
    attention_case(2, 10, 4096, 77, 64, packed="kv", benchmark=True),
    attention_case(2, 20, 1024, 1024, 64, packed="qkv", benchmark=True),
    attention_case(2, 20, 1024, 77, 64, packed="kv", benchmark=True),
    *(
        attention_case(2, heads, queries, keys, 64, packed=packed, benchmark=True, quantized=(QUANTIZED,))
        for heads, queries in ((10, 4096), (20, 1024))
        for keys, packed in ((queries, "qkv"), (77, "kv"))
    ),
    attention_case(2, 12, 77, 77, 64, unidirectional=1, benchmark=True),
    attention_case(1, 48, 4608, 4608, 128, kv_num_heads=12, benchmark=True),  # Krea 2 at 1024 x 1024
    attention_case(1, 1, 4096, 4096, 512, benchmark=True),
    attention_case(1, 1, 16384, 16384, 512, benchmark=True),
]
