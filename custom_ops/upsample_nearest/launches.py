"""How to launch UpsampleNearest's kernel by hand."""

from __future__ import annotations

from custom_ops.op import Argument, Launch

LAUNCHES = {
    "upsample_nearest_kernel": Launch(
        computes="y[r, i, w, j] = x[r, w] for all i and j, a thread kVec neighboring elements of x",
        template=("T", "kVec", "kBlock"),
        arguments=(
            Argument(
                "x",
                "const T*",
                "(rows, width, channels), contiguous; channels = vectors_per_pixel * kVec",
                "vectors * kVec",
                "kVec * itemsize",
            ),
            Argument(
                "y",
                "T*",
                "(rows, scale_height, width, scale_width, channels), contiguous",
                "vectors * kVec * scale_height * scale_width",
                "kVec * itemsize",
            ),
            Argument("vectors", "uint32", "rows * width * channels / kVec"),
            Argument("vectors_per_row", "uint32", "width * channels / kVec"),
            Argument("vectors_per_pixel", "uint32", "channels / kVec"),
            Argument("scale_height", "uint32", "rows of y for each of x"),
            Argument("scale_width", "uint32", "pixels of a row of y for each of x"),
        ),
        block="kBlock",
        grid=("ceil(vectors / kBlock)", "1", "1"),
        requires=("vectors % vectors_per_row == 0", "vectors_per_row % vectors_per_pixel == 0"),
    )
}
