"""How to launch SkipLayerNormalization's kernels by hand."""

from __future__ import annotations

from custom_ops.op import Argument, Launch

_COMPUTES = (
    "with V = x + skip + bias: y = (V - mean) / sqrt(variance + epsilon) * gamma + beta over a row, variance over "
    "its elements; sum = V"
)


def _tensors(rows: str, channels: str, alignment: str) -> tuple[Argument, ...]:
    """The pointers of both kernels, the formulas as each kernel's other arguments give them."""

    def tensor(name: str, kind: str, meaning: str, elements: str, optional: bool = False) -> Argument:
        return Argument(name, kind, meaning, elements, alignment, optional)

    whole, one = f"{rows} * {channels}", channels
    return (
        tensor("x", "const T*", "(rows, channels), contiguous", whole),
        tensor("skip", "const T*", "(skip_rows, channels): row r of x takes row r % skip_rows", f"skip_rows * {one}"),
        tensor("gamma", "const T*", "(channels)", one),
        tensor("beta", "const T*", "(channels)", one, optional=True),
        tensor("bias", "const T*", "(channels)", one, optional=True),
        tensor("y", "T*", "as x", whole),
        tensor("sum", "T*", "as x: V rounded to T", whole, optional=True),
    )


_SKIP_ROWS = Argument("skip_rows", "uint32", "rows of skip; rows is a multiple of it")
_EPSILON = Argument("epsilon", "float", "added to the variance")

LAUNCHES = {
    "skip_layer_norm_kernel": Launch(
        computes=f"{_COMPUTES}; kLanes threads per row, each kItems vectors of kVec elements",
        template=("T", "kVec", "kLanes", "kItems"),
        arguments=(
            *_tensors("rows", "(vectors_per_row * kVec)", "kVec * itemsize"),
            Argument("rows", "uint32", "rows of x"),
            _SKIP_ROWS,
            Argument("vectors_per_row", "uint32", "channels / kVec"),
            _EPSILON,
        ),
        block="256",
        grid=("ceil(rows / (256 // kLanes))", "1", "1"),
        requires=("vectors_per_row <= kLanes * kItems", "rows % skip_rows == 0"),
    ),
    "skip_layer_norm_any_kernel": Launch(
        computes=f"{_COMPUTES}; a block per row, read twice",
        template=("T",),
        arguments=(
            *_tensors("rows", "channels", "itemsize"),
            _SKIP_ROWS,
            Argument("channels", "uint32", "elements of a row"),
            _EPSILON,
        ),
        block="256",
        grid=("rows", "1", "1"),
        sizes={"rows": "rows of x"},
        requires=("rows % skip_rows == 0",),
    ),
}
