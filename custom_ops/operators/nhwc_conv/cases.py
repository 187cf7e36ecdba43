"""Params, NumPy reference, test cases and benchmark shapes (convolutions of Stable Diffusion) of NhwcConv."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from custom_ops.operator_spec import DTYPES, INT32, INT64, POINTER, Array, OperatorCase, Shape, struct_fields
from custom_ops.operators.winograd_filters.cases import reference as winograd_filters

NAME = "NhwcConv"
INPUTS = ("X", "W", "B", "skip", "transformed_filters")
OUTPUTS = ("Y",)


class Params(ctypes.Structure):
    """struct NhwcConvParams of op.h."""

    _fields_ = struct_fields(
        (INT32, "dtype"),
        (POINTER, "x filters bias skip y"),
        (INT64, "batch height width channels filter_count kernel_height kernel_width out_height out_width"),
        (
            INT64,
            "stride_height stride_width dilation_height dilation_width pad_top pad_left pad_bottom pad_right groups",
        ),
        (POINTER, "transformed_filters"),
        (INT32, "relu"),
    )


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> Params:
    """Return the Params of a case."""
    pointers = (address.get(name, 0) for name in ("X", "W", "B", "skip", "Y"))
    stride, dilation, groups = (int(case.attributes.get(name, 1)) for name in ("stride", "dilation", "group"))
    pads = (int(case.attributes.get(f"pad_{side}", 0)) for side in ("top", "left", "bottom", "right"))
    count, height, width, _ = case.inputs["W"]
    out = output_shapes(case)["Y"][1:3]
    steps = (stride, stride, dilation, dilation)
    sizes = (*case.inputs["X"], count, height, width, *out, *steps, *pads, groups)
    relu = int(case.attributes.get("relu", 0))
    return Params(DTYPES[dtype][0], *pointers, *sizes, address.get("transformed_filters", 0), relu)


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """Y is (N, oH, oW, M)."""
    count, *kernel, _ = case.inputs["W"]
    stride, dilation = (int(case.attributes.get(name, 1)) for name in ("stride", "dilation"))
    pads = [
        sum(int(case.attributes.get(f"pad_{side}", 0)) for side in axis)
        for axis in (("top", "bottom"), ("left", "right"))
    ]
    images = zip(case.inputs["X"][1:3], kernel, pads, strict=True)
    rows, columns = ((size + pad - (window - 1) * dilation - 1) // stride + 1 for size, window, pad in images)
    return {"Y": (case.inputs["X"][0], rows, columns, count)}


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (N, H, W, C), W (M, kH, kW, C / group), B (M)?, skip as Y? -> Y (N, oH, oW, M) in float64, or its Relu."""
    x, filters = inputs["X"].astype(np.float64), inputs["W"].astype(np.float64)
    stride, dilation, groups = (int(attributes.get(name, 1)) for name in ("stride", "dilation", "group"))
    top, left, bottom, right = (int(attributes.get(f"pad_{side}", 0)) for side in ("top", "left", "bottom", "right"))
    x = np.pad(x, ((0, 0), (top, bottom), (left, right), (0, 0)))
    count, height, width, channels = filters.shape
    rows = (x.shape[1] - (height - 1) * dilation - 1) // stride + 1
    columns = (x.shape[2] - (width - 1) * dilation - 1) // stride + 1
    y = np.zeros((x.shape[0], rows, columns, count))
    for kh in range(height):
        for kw in range(width):
            row, column = kh * dilation, kw * dilation
            seen = x[:, row : row + stride * rows : stride, column : column + stride * columns : stride]
            for group in range(groups):
                part = slice(group * count // groups, (group + 1) * count // groups)
                y[..., part] += seen[..., group * channels : (group + 1) * channels] @ filters[part, kh, kw].T
    y = y + inputs.get("B", np.zeros(count)).astype(np.float64) + inputs.get("skip", np.zeros(1))
    return {"Y": np.maximum(y, 0.0) if attributes.get("relu", 0) else y}


def generate_special_input(case: OperatorCase, name: str, rng: np.random.Generator) -> Array | None:
    """Generate filters that keep the magnitude of the input; with transformed_filters, always the same."""
    if name not in ("W", "transformed_filters"):
        return None
    shape = case.inputs["W"]
    values = np.random.default_rng(1) if "transformed_filters" in case.inputs else rng
    weight = values.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
    return weight if name == "W" else winograd_filters({"weight": weight}, {})["Y"]


def _case(
    *image: int,
    m: int,
    k: int = 3,
    pads: tuple[int, int, int, int] | None = None,
    bias: bool = True,
    skip: bool = False,
    winograd: bool = False,
    distribution: str = "normal",
    benchmark: bool = False,
    **attributes: int,
) -> OperatorCase:
    """X of (N, H, W, C), `m` filters of k x k; `pads` are top, left, bottom, right (half the kernel each)."""
    sides = pads or (k // 2,) * 4
    padding = {f"pad_{side}": pad for side, pad in zip(("top", "left", "bottom", "right"), sides, strict=True)}
    channels = image[3] // attributes.get("group", 1)
    inputs: dict[str, Shape] = {"X": image, "W": (m, k, k, channels)}
    if bias:
        inputs["B"] = (m,)
    if winograd:
        inputs["transformed_filters"] = (16, m, channels)
    name = "x".join(map(str, image)) + f"-m{m}-k{k}" + "".join(f"-{n}{v}" for n, v in attributes.items())
    name += "" if pads is None else "-p" + "".join(map(str, pads))
    case = OperatorCase(
        f"{name}-b{bias:d}-s{skip:d}{'-winograd' * winograd}-{distribution}",
        inputs,
        {**attributes, **padding},
        distribution=distribution,
        benchmark=benchmark,
        float32_roundoffs=(4 if winograd else 1) * (4 + (k * k * channels) ** 0.5),
    )
    if skip:
        case.inputs["skip"] = output_shapes(case)["Y"]
    return case


# Channels of every latent and image (3, 4, 8, 9, 16), images and filters that no tile divides, one pixel, 1 x 1 and
# 3 x 3, the U-Net's stride and the VAE encoder's uneven pads, sums long enough to split, 2 x 2 of an upsampled image,
# and a small VAE's Relu of a sum with and without skip, in each kernel.
CASES = [
    _case(1, 1, 1, 1, m=1),
    _case(1, 5, 7, 3, m=5, bias=False),
    _case(2, 6, 5, 4, m=20),
    _case(1, 9, 8, 9, m=8, skip=True),
    _case(1, 6, 6, 16, m=24, skip=True),
    _case(2, 8, 8, 8, m=3),
    _case(1, 7, 9, 40, m=72, skip=True),
    _case(2, 8, 8, 64, m=16, k=1, skip=True),
    _case(1, 9, 9, 24, m=70, stride=2),
    _case(1, 8, 8, 16, m=8, pads=(0, 0, 1, 1), stride=2),
    _case(1, 8, 8, 16, m=8, pads=(2, 2, 2, 2), dilation=2),
    _case(1, 4, 4, 16, m=8, group=2),
    _case(1, 4, 4, 136, m=72, skip=True),
    _case(1, 5, 6, 24, m=32, k=2, pads=(1, 1, 1, 1), bias=False),
    *(_case(1, 5, width, 40, m=33, skip=True, winograd=True) for width in (6, 7)),
    _case(1, 5, 7, 3, m=5, relu=1),
    _case(1, 7, 9, 40, m=72, skip=True, relu=1),
    _case(1, 4, 4, 136, m=72, skip=True, relu=1),
    _case(1, 4, 4, 136, m=72, bias=False, relu=1),
    _case(0, 4, 4, 8, m=8),
    *(_case(1, 6, 7, 24, m=16, skip=True, distribution=distribution) for distribution in ("large", "tiny", "constant")),
    _case(2, 64, 64, 320, m=320, skip=True, benchmark=True),
    _case(2, 32, 32, 640, m=640, skip=True, benchmark=True),
    _case(2, 8, 8, 1280, m=1280, skip=True, benchmark=True),
    _case(2, 32, 32, 640, m=640, skip=True, winograd=True, benchmark=True),
    _case(2, 32, 32, 1280, m=1280, skip=True, winograd=True, benchmark=True),
    _case(2, 64, 64, 320, m=320, stride=2, benchmark=True),
    _case(2, 64, 64, 640, m=320, k=1, benchmark=True),
    _case(2, 64, 64, 4, m=320, benchmark=True),
    _case(1, 512, 512, 128, m=128, skip=True, benchmark=True),
    _case(1, 512, 512, 128, m=3, benchmark=True),
    *(_case(1, 256, 256, 64, m=64, skip=skip, relu=1, benchmark=True) for skip in (False, True)),
    _case(2, 16, 16, 1280, m=5120, k=2, pads=(1, 1, 1, 1), bias=False, benchmark=True),
    _case(1, 256, 256, 256, m=1024, k=2, pads=(1, 1, 1, 1), bias=False, benchmark=True),
]
