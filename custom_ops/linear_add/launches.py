"""How to launch LinearAdd's kernel by hand."""

from __future__ import annotations

from custom_ops.op import Argument, Launch

LAUNCHES = {
    "linear_add_kernel": Launch(
        computes="y = x @ weight + bias + skip, summed in float32, a thread an element of y",
        template=("T",),
        arguments=(
            Argument("x", "const T*", "(rows, inner), contiguous; rows = count / columns", "count // columns * inner"),
            Argument("weight", "const T*", "(inner, columns), contiguous", "inner * columns"),
            Argument("bias", "const T*", "(columns)", "columns", optional=True),
            Argument("skip", "const T*", "as y", "count", optional=True),
            Argument("y", "T*", "(rows, columns), contiguous", "count"),
            Argument("count", "int64", "rows * columns"),
            Argument("inner", "int64", "K, the products summed for an element"),
            Argument("columns", "int64", "N"),
        ),
        block="256",
        grid=("ceil(count / 256)", "1", "1"),
        requires=("count % columns == 0",),
    )
}
