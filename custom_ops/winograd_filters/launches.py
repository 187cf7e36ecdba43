"""How to launch WinogradFilters' kernel by hand."""

from __future__ import annotations

from custom_ops.op import Argument, Launch

LAUNCHES = {
    "winograd_filters_kernel": Launch(
        computes="y[4 i + j] = (G w G^T)[i, j] of each filter and channel, G = [1 0 0; .5 .5 .5; .5 -.5 .5; 0 0 1]",
        template=("T", "kVec"),
        arguments=(
            Argument(
                "weight", "const T*", "(filters, 3, 3, channels), contiguous", "9 * vectors * kVec", "kVec * itemsize"
            ),
            Argument("y", "T*", "(16, filters, channels), contiguous", "16 * vectors * kVec", "kVec * itemsize"),
            Argument("vectors", "uint32", "filters * channels / kVec"),
            Argument("vectors_per_filter", "uint32", "channels / kVec"),
        ),
        block="256",
        grid=("ceil(vectors / 256)", "1", "1"),
        requires=("vectors % vectors_per_filter == 0",),
    )
}
