"""How to launch BiasAdd's kernel by hand."""

from __future__ import annotations

from custom_ops.op import Argument, Launch

_ROWS = ("vectors * kVec", "kVec * itemsize")

LAUNCHES = {
    "bias_add_kernel": Launch(
        computes="y = x + bias + skip, a thread kVec neighboring elements",
        template=("T", "kVec", "kBlock"),
        arguments=(
            Argument("x", "const T*", "(rows, channels), contiguous; channels = vectors_per_row * kVec", *_ROWS),
            Argument("bias", "const T*", "(channels)", "vectors_per_row * kVec", "kVec * itemsize"),
            Argument("skip", "const T*", "as x", *_ROWS, optional=True),
            Argument("y", "T*", "as x", *_ROWS),
            Argument("vectors", "uint32", "rows * channels / kVec"),
            Argument("vectors_per_row", "uint32", "channels / kVec"),
        ),
        block="kBlock",
        grid=("ceil(vectors / kBlock)", "1", "1"),
        requires=("vectors % vectors_per_row == 0",),
    )
}
