"""How to launch NhwcConv's kernels by hand."""

from __future__ import annotations

from custom_ops.op import Argument, Launch, Struct

_SHAPE = Struct(
    "shape",
    (
        Argument("height", "int32", "rows of x"),
        Argument("width", "int32", "columns of x"),
        Argument("channels", "int32", "of x"),
        Argument("filter_count", "int32", "channels of y"),
        Argument("kernel_height", "int32", "rows of a window"),
        Argument("kernel_width", "int32", "columns of a window"),
        Argument("out_height", "int32", "rows of y"),
        Argument("out_width", "int32", "columns of y"),
        Argument("stride_height", "int32", "rows of x from a row of y to the next, at least 1"),
        Argument("stride_width", "int32", "the same of columns"),
        Argument("dilation_height", "int32", "rows of x from a row of a window to the next, at least 1"),
        Argument("dilation_width", "int32", "the same of columns"),
        Argument("pad_top", "int32", "rows of zeros before x's first"),
        Argument("pad_left", "int32", "columns of zeros before x's first"),
        Argument("groups", "int32", "that channels and filters are divided into"),
    ),
)
_IMAGE = "height * width * channels"
_FILTERS = "filter_count * kernel_height * kernel_width * channels // groups"
_COMPUTES = "y = convolution of x + bias + skip, channels last, summed in float32"


def _tensors(images: str, y: str, alignment: str) -> tuple[Argument, ...]:
    x = "(images, height, width, channels), contiguous"
    filters = "(filter_count, kernel_height, kernel_width, channels / groups), contiguous"
    return (
        Argument("x", "const T*", x, f"{images} * {_IMAGE}", alignment),
        Argument("filters", "const T*", filters, _FILTERS, alignment),
        Argument("bias", "const T*", "(filter_count)", "filter_count", optional=True),
        Argument("skip", "const T*", "as y", y, optional=True),
        Argument("y", "T*", "(images, out_height, out_width, filter_count), contiguous", y),
    )


_PIXELS = "out_height * out_width"

LAUNCHES = {
    "nhwc_conv_kernel": Launch(
        computes=f"{_COMPUTES}, a thread an element",
        template=("T",),
        arguments=(
            *_tensors(f"(elements // ({_PIXELS} * filter_count))", "elements", "itemsize"),
            Argument("elements", "uint32", "of y"),
            _SHAPE,
        ),
        block="256",
        grid=("ceil(elements / 256)", "1", "1"),
        requires=(
            f"elements % ({_PIXELS} * filter_count) == 0",
            "channels % groups == 0",
            "filter_count % groups == 0",
        ),
    ),
    "nhwc_conv_tiles_kernel": Launch(
        computes=f"{_COMPUTES}; a block 128 pixels of 64 filters; with several splits only their sums",
        template=("T", "kVec"),
        arguments=(
            *_tensors(f"(pixels // ({_PIXELS}))", "pixels * filter_count", "kVec * itemsize"),
            Argument(
                "sums",
                "float*",
                "(splits, pixels, filter_count): instead of y; null with one split",
                "splits * pixels * filter_count",
                "4",
                optional=True,
            ),
            Argument("pixels", "int32", "images * out_height * out_width"),
            Argument("split_depth", "int32", "taps times channels that a split sums, a multiple of 32"),
            _SHAPE,
        ),
        block="256",
        grid=("ceil(pixels / 128)", "ceil(filter_count / 64)", "splits"),
        sizes={"splits": "parts of a sum"},
        requires=(
            f"pixels % ({_PIXELS}) == 0",
            "groups == 1",
            "channels % kVec == 0",
            "split_depth * splits >= kernel_height * kernel_width * channels",
        ),
    ),
    "nhwc_conv_sum_kernel": Launch(
        computes="y = sums of the splits + bias + skip, a thread an element",
        template=("T",),
        arguments=(
            Argument("sums", "const float*", "(splits, elements)", "splits * elements", "4"),
            Argument("bias", "const T*", "(filter_count)", "filter_count", optional=True),
            Argument("skip", "const T*", "as y", "elements", optional=True),
            Argument("y", "T*", "(elements)", "elements"),
            Argument("elements", "uint32", "of y"),
            Argument("splits", "int32", "parts of a sum"),
            Argument("filter_count", "int32", "channels of y"),
        ),
        block="256",
        grid=("ceil(elements / 256)", "1", "1"),
        requires=("elements % filter_count == 0",),
    ),
}
