"""How to launch WinogradFilters' kernel by hand."""

from __future__ import annotations

from custom_ops.op import Argument, Launch

LAUNCHES = {
    "winograd_filters_kernel": Launch(
        computes="y[kSide i + j] = (G w G^T)[i, j] of each filter and channel; "
        "G = [1 0 0; .5 .5 .5; .5 -.5 .5; 0 0 1], without the third row of G where kSide is 3",
        template=("T", "kVec", "kSide"),
        arguments=(
            Argument(
                "weight", "const T*", "(filters, 3, 3, channels), contiguous", "9 * vectors * kVec", "kVec * itemsize"
            ),
            Argument(
                "y",
                "T*",
                "(kSide * kSide, filters, channels), contiguous",
                "kSide * kSide * vectors * kVec",
                "kVec * itemsize",
            ),
            Argument("vectors", "uint32", "filters * channels / kVec"),
            Argument("vectors_per_filter", "uint32", "channels / kVec"),
        ),
        block="256",
        grid=("ceil(vectors / 256)", "1", "1"),
        requires=("vectors % vectors_per_filter == 0",),
    )
}
