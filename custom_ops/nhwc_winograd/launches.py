"""How to launch NhwcWinograd's kernels by hand."""

from __future__ import annotations

from custom_ops.op import Argument, Launch, Struct

_SHAPE = Struct(
    "shape",
    (
        Argument("height", "int32", "rows of an image of x"),
        Argument("width", "int32", "columns of an image of x"),
        Argument("first_tile", "int32", "number of the first tile: tiles go through images, rows and columns"),
    ),
)
_CHANNELS = "vectors_per_tile * kVec"
_TILES_OF_IMAGE = "(ceil(height / (kSide - 2)) * ceil(width / (kSide - 2)))"
# Those that the launch reads or writes, from the first on.
_IMAGES = (
    f"ceil((first_tile + vectors // vectors_per_tile) / {_TILES_OF_IMAGE}) * height * width * vectors_per_tile * kVec"
)
_TIMES = "(4 if kSide == 3 else 1) * "
_MATRICES = "kSide * kSide * vectors * kVec"
_TILES = "tiles (of 2 x 2 pixels of y) times channels, divided by kVec"
_REQUIRES = ("vectors % vectors_per_tile == 0",)

LAUNCHES = {
    "winograd_input_kernel": Launch(
        computes="v[kSide i + j] = (B^T d B)[i, j] of the 4 x 4 pixels d around each tile, zeros outside of the image; "
        "B^T = [1 0 -1 0; 0 1 1 0; 0 -1 1 0; 0 1 0 -1]. Where kSide is 3, the image is first doubled down and across, "
        "and B^T has no third row",
        template=("T", "kVec", "kSide"),
        arguments=(
            Argument("x", "const T*", "(images, height, width, channels), contiguous", _IMAGES, "kVec * itemsize"),
            Argument("v", "T*", "(kSide * kSide, tiles, channels), contiguous", _MATRICES, "kVec * itemsize"),
            Argument("vectors", "uint32", _TILES),
            Argument("vectors_per_tile", "uint32", "channels / kVec"),
            _SHAPE,
        ),
        block="256",
        grid=("ceil(vectors / 256)", "1", "1"),
        requires=_REQUIRES,
    ),
    "winograd_output_kernel": Launch(
        computes="y = A^T m A + bias + skip of the kSide * kSide products m of each tile; A^T = [1 1 1 0; 0 1 -1 -1], "
        "without its third column where kSide is 3",
        template=("T", "kVec", "kSide"),
        arguments=(
            Argument("products", "const T*", "(kSide * kSide, tiles, filters)", _MATRICES, "kVec * itemsize"),
            Argument("bias", "const T*", "(filters)", _CHANNELS, "kVec * itemsize", optional=True),
            Argument("skip", "const T*", "as y", _TIMES + _IMAGES, "kVec * itemsize", optional=True),
            Argument(
                "y",
                "T*",
                "(images, height, width, filters), contiguous; kSide 3: of twice the height and width",
                _TIMES + _IMAGES,
                "kVec * itemsize",
            ),
            Argument("vectors", "uint32", _TILES),
            Argument("vectors_per_tile", "uint32", "filters / kVec"),
            _SHAPE,
        ),
        block="256",
        grid=("ceil(vectors / 256)", "1", "1"),
        requires=_REQUIRES,
    ),
}
