"""How to launch MultiHeadAttention's kernels by hand."""

from __future__ import annotations

from custom_ops.op import Argument, Launch, Struct

_COMPUTES = (
    "for each batch and head: output = softmax(scale * query @ key^T + attention_bias) @ value, -infinity where causal "
    "and key > query; a row whose scores are all -infinity gives zeros"
)


def _view(name: str, rows: str, alignment: str) -> Argument:
    strides = f"(batch - 1) * {name}_batch_stride + ({rows} - 1) * {name}_row_stride + (heads - 1) * {name}_head_stride"
    meaning = (
        f"element i of (b, row, head) lies at b * {name}_batch_stride + row * {name}_row_stride + "
        f"head * {name}_head_stride + i, counted in elements; rows 0 to {rows} - 1"
    )
    return Argument(name, "const T*", meaning, f"{strides} + head_size", alignment)


_SHAPE = Struct(
    "shape",
    (
        Argument("heads", "int32", "heads: blocks along y"),
        Argument("sequence", "int32", "queries"),
        Argument("kv_sequence", "int32", "keys and values, at least 1"),
        Argument("head_size", "int32", "elements of a head's row"),
        Argument("scale", "float", "of the scores, as 1 / sqrt(head_size)"),
        Argument("causal", "int32", "1: query q sees keys 0 to q; 0: all"),
        *(
            Argument(f"{tensor}_{axis}_stride", "int64", f"elements from one {axis} of {tensor} to the next")
            for tensor in ("query", "key", "value")
            for axis in ("batch", "row", "head")
        ),
        Argument("bias_batch_stride", "int64", "of attention_bias; 0 where all batches share it"),
        Argument("bias_head_stride", "int64", "of attention_bias; 0 where all heads share it"),
    ),
)


def _arguments(alignment: str) -> tuple[Argument | Struct, ...]:
    return (
        _view("query", "sequence", alignment),
        _view("key", "kv_sequence", alignment),
        _view("value", "kv_sequence", alignment),
        Argument(
            "attention_bias",
            "const T*",
            "added to score (query, key) of (b, head): element b * bias_batch_stride + head * bias_head_stride + "
            "query * kv_sequence + key",
            "(batch - 1) * bias_batch_stride + (heads - 1) * bias_head_stride + sequence * kv_sequence",
            optional=True,
        ),
        Argument(
            "output",
            "T*",
            "(batch, sequence, heads * head_size), contiguous",
            "batch * sequence * heads * head_size",
            alignment,
        ),
        _SHAPE,
    )


_SIZES = {"batch": "samples"}
# A lane reads 8 elements at once and addresses a head's rows by 32-bit offsets.
_WIDE = (
    "head_size % 8 == 0",
    "head_size <= kHead",
    *(f"{tensor}_{axis}_stride % 8 == 0" for tensor in ("query", "key", "value") for axis in ("batch", "row", "head")),
    *(
        f"{rows} * {tensor}_row_stride < 2**31"
        for tensor, rows in (("query", "sequence"), ("key", "kv_sequence"), ("value", "kv_sequence"))
    ),
)

LAUNCHES = {
    "flash_attention_kernel": Launch(
        computes=f"{_COMPUTES}; a block kQueries queries of a head, keys in tiles of kKeys",
        template=("T", "kHead", "kQueries", "kKeys", "kThreads"),
        arguments=_arguments("16"),
        block="kThreads",
        grid=("ceil(sequence / kQueries)", "heads", "batch"),
        sizes=_SIZES,
        requires=_WIDE,
    ),
    "wide_attention_kernel": Launch(
        computes=f"{_COMPUTES}; a block 64 queries of a head, keys in tiles of 64",
        template=("T", "kHead", "kStage", "kThreads"),
        arguments=_arguments("16"),
        block="kThreads",
        grid=("ceil(sequence / 64)", "heads", "batch"),
        sizes=_SIZES,
        requires=_WIDE,
    ),
    "plain_attention_kernel": Launch(
        computes=f"{_COMPUTES}; a block 64 queries and 64 * kColumnTiles columns of a head's output",
        template=("T", "kColumnTiles"),
        arguments=_arguments("itemsize"),
        block="256",
        grid=("ceil(sequence / 64) * ceil(head_size / (64 * kColumnTiles))", "heads", "batch"),
        sizes=_SIZES,
    ),
}
