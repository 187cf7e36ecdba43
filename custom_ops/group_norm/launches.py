"""How to launch the kernels of GroupNorm and SkipGroupNorm by hand."""

from __future__ import annotations

from dataclasses import replace

from custom_ops.op import Argument, Launch

_COMPUTES = (
    "with V = x + skip + skip_channels + bias (those not null), which may be rounded to T first: y = activation((V - "
    "mean) / sqrt(variance + epsilon) * gamma + beta), mean and variance over all pixels and channels of a group of a "
    "sample, variance over their number; sum = V"
)
_LAST = "(batch, spatial, channels), contiguous"
_FIRST = "(batch, channels, spatial), contiguous"
_EITHER = "(batch, spatial, channels) or, channels_last = 0, (batch, channels, spatial), contiguous"
_WHOLE = "batch * spatial * channels"
_VECTOR = "kVec * itemsize"
_ELEMENT = "itemsize"
_AFFINE = ("channels", "4 if affine_is_float else itemsize")


def _inputs(layout: str) -> tuple[Argument, ...]:
    return (
        Argument("x", "const T*", layout, _WHOLE, _VECTOR),
        Argument("skip", "const T*", "as x; null also where skip_channels is given", _WHOLE, _VECTOR, optional=True),
        Argument(
            "skip_channels", "const T*", "(batch, channels): a skip for all pixels", "batch * channels", optional=True
        ),
        Argument("bias", "const T*", "(channels)", "channels", optional=True),
    )


_GAMMA_BETA = (
    Argument("gamma", "const void*", "(channels), float when affine_is_float, else T", *_AFFINE),
    Argument("beta", "const void*", "as gamma", *_AFFINE),
)
_Y = Argument("y", "T*", "as x", _WHOLE, _VECTOR)
_SUM = Argument("sum", "T*", "as x: V", _WHOLE, _VECTOR, optional=True)
_IS_FLOAT = Argument("affine_is_float", "int32", "1: gamma and beta hold float; 0: T")
_SIZES = (
    Argument("spatial", "int32", "pixels of a sample: H * W"),
    Argument("channels", "int32", "channels of a pixel"),
    Argument("channels_per_group", "int32", "channels / groups"),
)
_GROUPS_PER_BLOCK = Argument(
    "groups_per_block", "int32", "neighboring groups that a block takes; divides the number of groups"
)
_PIXELS_PER_CHUNK = Argument("pixels_per_chunk", "int32", "pixels that a block takes; any number from 1 to spatial")
_CHUNKS = Argument("chunks", "int32", "blocks along x: ceil(spatial / pixels_per_chunk)")
_ACTIVATION = Argument("activation", "int32", "0 none, 1 SiLU")
_EPSILON = Argument("epsilon", "float", "added to the variance")
_MOMENTS = ("3 * batch * chunks * (channels // channels_per_group)", "4")
_BATCH = {"batch": "samples"}
_WHOLE_GROUPS = ("channels % (channels_per_group * groups_per_block) == 0",)
_SLICES = "channels_per_group * groups_per_block"
_TWO_READS = (
    *_WHOLE_GROUPS,
    f"{_SLICES} % kVec == 0",
    "kVec <= channels_per_group",
    f"{_SLICES} // kVec <= 256",
    "groups_per_block <= 64",
    "chunks == ceil(spatial / pixels_per_chunk)",
)


def _of_two_reads(computes: str, arguments: tuple[Argument, ...]) -> Launch:
    """A kernel whose blocks take `groups_per_block` groups of `pixels_per_chunk` pixels of a sample each."""
    return Launch(
        computes=computes,
        template=("T", "kVec", "kSkip"),
        arguments=arguments,
        block="256",
        grid=("chunks", "channels // channels_per_group // groups_per_block", "batch"),
        sizes=_BATCH,
        requires=(*_TWO_READS, "kSkip == (skip is not None)"),
    )


LAUNCHES = {
    "group_norm_one_read_kernel": Launch(
        computes=f"{_COMPUTES}; a thread holds at most kItems vectors of kVec elements",
        template=("T", "kVec", "kItems", "kBlock"),
        arguments=(
            *_inputs(_LAST),
            *_GAMMA_BETA,
            _Y,
            _SUM,
            _IS_FLOAT,
            *_SIZES,
            _GROUPS_PER_BLOCK,
            _ACTIVATION,
            _EPSILON,
        ),
        block="kBlock",
        grid=("channels // channels_per_group // groups_per_block", "batch", "1"),
        sizes=_BATCH,
        requires=(
            *_WHOLE_GROUPS,
            f"{_SLICES} % kVec == 0",
            "kVec <= channels_per_group",
            f"spatial <= kItems * (kBlock // ({_SLICES} // kVec))",
            "spatial * channels < 2**31",
        ),
    ),
    "group_norm_statistics_kernel": _of_two_reads(
        "the first of two: sum = V = x + skip + skip_channels + bias (those not null), and V's moments",
        (
            *_inputs(_LAST),
            _SUM,
            Argument(
                "moments",
                "float*",
                "(batch, chunks, groups, 3): number of elements, their mean, the sum of their squared distances from "
                "it; scratch for group_norm_apply_kernel, any contents before",
                *_MOMENTS,
            ),
            *_SIZES,
            _GROUPS_PER_BLOCK,
            _PIXELS_PER_CHUNK,
            _CHUNKS,
        ),
    ),
    "group_norm_apply_kernel": _of_two_reads(
        "the second of two: y from V and the moments of its chunks; V = x + skip + skip_channels + bias again, or, "
        "where the first kernel stored sum, x = that sum and no others",
        (
            *_inputs(_LAST),
            *_GAMMA_BETA,
            Argument("moments", "const float*", "what group_norm_statistics_kernel wrote", *_MOMENTS),
            _Y,
            _IS_FLOAT,
            *_SIZES,
            _GROUPS_PER_BLOCK,
            _PIXELS_PER_CHUNK,
            _CHUNKS,
            _ACTIVATION,
            _EPSILON,
        ),
    ),
    "group_norm_plain_kernel": Launch(
        computes=f"{_COMPUTES}; of either layout, an element at a time, a block per group",
        template=("T",),
        arguments=(
            *(replace(argument, alignment=_ELEMENT) for argument in _inputs(_EITHER)[:2]),
            *_inputs(_EITHER)[2:],
            *_GAMMA_BETA,
            replace(_Y, alignment=_ELEMENT),
            replace(_SUM, alignment=_ELEMENT),
            _IS_FLOAT,
            *_SIZES,
            Argument("channels_last", "int32", "1: x is (batch, spatial, channels); 0: (batch, channels, spatial)"),
            _ACTIVATION,
            _EPSILON,
        ),
        block="256",
        grid=("channels // channels_per_group", "batch", "1"),
        sizes=_BATCH,
        requires=("channels % channels_per_group == 0",),
    ),
    "group_norm_channels_first_kernel": Launch(
        computes=f"{_COMPUTES}; channels first, a block per group",
        template=("T", "kVec"),
        arguments=(
            *_inputs(_FIRST),
            *_GAMMA_BETA,
            _Y,
            _SUM,
            _IS_FLOAT,
            *_SIZES,
            _ACTIVATION,
            _EPSILON,
        ),
        block="512",
        grid=("channels // channels_per_group", "batch", "1"),
        sizes=_BATCH,
        requires=("channels % channels_per_group == 0", "spatial % kVec == 0"),
    ),
}
