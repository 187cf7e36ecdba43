"""How to launch SubpixelShuffle's kernel by hand."""

from __future__ import annotations

from custom_ops.op import Argument, Launch

LAUNCHES = {
    "subpixel_shuffle_kernel": Launch(
        computes="y[n, 2 i + p, 2 j + q] = x[n, i + p, j + q, 2 p + q] + bias, a thread kVec neighboring elements of y",
        template=("T", "kVec"),
        arguments=(
            Argument(
                "x",
                "const T*",
                "(batch, height / 2 + 1, width / 2 + 1, 4, channels), contiguous; channels = vectors_per_pixel * kVec",
                "vectors // (height * width * vectors_per_pixel) * (height // 2 + 1) * (width // 2 + 1) * 4"
                " * vectors_per_pixel * kVec",
                "kVec * itemsize",
            ),
            Argument("bias", "const T*", "(channels)", "vectors_per_pixel * kVec", "kVec * itemsize", optional=True),
            Argument("y", "T*", "(batch, height, width, channels), contiguous", "vectors * kVec", "kVec * itemsize"),
            Argument("vectors", "uint32", "batch * height * width * channels / kVec"),
            Argument("height", "uint32", "of y, even"),
            Argument("width", "uint32", "of y, even"),
            Argument("vectors_per_pixel", "uint32", "channels / kVec"),
        ),
        block="256",
        grid=("ceil(vectors / 256)", "1", "1"),
        requires=("height % 2 == 0", "width % 2 == 0", "vectors % (height * width * vectors_per_pixel) == 0"),
    )
}
