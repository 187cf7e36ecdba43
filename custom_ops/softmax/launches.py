"""How to launch Softmax's kernel by hand."""

from __future__ import annotations

from custom_ops.op import Argument, Launch

LAUNCHES = {
    "softmax_kernel": Launch(
        computes="weights = exp(scores - largest of the row) / sum of the row's, a block a row",
        template=("T", "kVec"),
        arguments=(
            Argument("scores", "const float*", "(rows, columns), contiguous", "rows * columns", "kVec * 4"),
            Argument("weights", "T*", "as scores", "rows * columns", "kVec * itemsize"),
            Argument("columns", "int32", "numbers of a row, at least 1"),
        ),
        block="256",
        grid=("rows", "1", "1"),
        sizes={"rows": "rows of scores"},
        requires=("columns % kVec == 0",),
    ),
}
