"""How to launch BiasSplitGelu's kernel by hand."""

from __future__ import annotations

from custom_ops.op import Argument, Launch

LAUNCHES = {
    "bias_split_gelu_kernel": Launch(
        computes="with V = x + bias: y = V[:, :half] * gelu(V[:, half:]), a thread kVec neighboring elements of y",
        template=("T", "kVec", "kBlock"),
        arguments=(
            Argument(
                "x",
                "const T*",
                "(rows, 2 * half), contiguous; half = vectors_per_row * kVec",
                "2 * vectors * kVec",
                "kVec * itemsize",
            ),
            Argument("bias", "const T*", "(2 * half)", "2 * vectors_per_row * kVec", "kVec * itemsize"),
            Argument("y", "T*", "(rows, half), contiguous", "vectors * kVec", "kVec * itemsize"),
            Argument("vectors", "uint32", "rows * half / kVec"),
            Argument("vectors_per_row", "uint32", "half / kVec"),
        ),
        block="kBlock",
        grid=("ceil(vectors / kBlock)", "1", "1"),
        requires=("vectors % vectors_per_row == 0",),
    )
}
