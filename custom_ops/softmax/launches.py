"""How to launch Softmax's kernel by hand."""

from __future__ import annotations

from custom_ops.op import Argument, Launch

_ARGUMENTS = (
    Argument("scores", "const float*", "(rows, columns), contiguous", "rows * columns", "kVec * 4"),
    Argument("weights", "T*", "as scores", "rows * columns", "kVec * itemsize"),
    Argument("columns", "int32", "numbers of a row, at least 1"),
)
_COMPUTES = "weights = exp(scores - largest of the row) / sum of the row's, a block per row"

LAUNCHES = {
    "softmax_kernel": Launch(
        computes=_COMPUTES,
        template=("T", "kVec", "kItems"),
        arguments=_ARGUMENTS,
        block="512",
        grid=("rows", "1", "1"),
        sizes={"rows": "rows of scores"},
        requires=("columns % kVec == 0", "columns <= 512 * kVec * kItems"),
    ),
    "long_softmax_kernel": Launch(
        computes=_COMPUTES,
        template=("T", "kVec"),
        arguments=_ARGUMENTS,
        block="512",
        grid=("rows", "1", "1"),
        sizes={"rows": "rows of scores"},
        requires=("columns % kVec == 0",),
    ),
}
