"""Params, NumPy reference, test cases and benchmark shapes of AdaptiveNorm."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from math import prod

import numpy as np

from custom_ops.operator_spec import (
    DTYPES,
    FLOAT32,
    INT32,
    INT64,
    POINTER,
    QUANTIZED,
    Array,
    Float8Output,
    OperatorCase,
    Shape,
    float8_output,
    struct_fields,
    with_quantized,
)

NAME = "AdaptiveNorm"
INPUTS = ("X", "scale", "shift", "gate", "skip")
OUTPUTS = ("Y", "sum", QUANTIZED)


class Params(ctypes.Structure):
    """struct AdaptiveNormParams of op.h."""

    _fields_ = struct_fields(
        (INT32, "dtype"),
        (POINTER, "x scale shift gate skip y sum"),
        (INT64, "rows channels scale_rows gate_rows"),
        (FLOAT32, "epsilon"),
        (INT32, "rms"),
        (Float8Output, "quantized"),
    )


def params(case: OperatorCase, dtype: str, address: Mapping[str, int]) -> Params:
    """Return the Params of a case."""
    shape, scale = case.inputs["X"], case.inputs["scale"]
    rows, gate = prod(shape[:-1]), case.inputs.get("gate")
    return Params(
        dtype=DTYPES[dtype][0],
        x=address["X"],
        scale=address["scale"],
        shift=address.get("shift"),
        gate=address.get("gate"),
        skip=address.get("skip"),
        y=address.get("Y"),
        sum=address.get("sum"),
        rows=rows,
        channels=shape[-1],
        scale_rows=max(rows, 1) // prod(scale[:-1]),
        gate_rows=max(rows, 1) // prod(gate[:-1]) if gate else 1,
        epsilon=case.attributes["epsilon"],
        rms=case.attributes["rms"],
        quantized=float8_output(case, address),
    )


def output_shapes(case: OperatorCase) -> dict[str, Shape]:
    """All outputs have the shape of X."""
    return dict.fromkeys(case.outputs or OUTPUTS[:2], case.inputs["X"])


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, int | float]) -> dict[str, Array]:
    """X (B, ..., C), scale, shift?, gate? (C) or (B, 1, ..., C), skip? as X -> Y and sum, as X."""
    arrays = {name: array.astype(np.float64) for name, array in inputs.items()}
    total = arrays["X"] * arrays.get("gate", 1.0) + arrays.get("skip", 0.0)
    centered = total if attributes.get("rms", 0) else total - total.mean(axis=-1, keepdims=True)
    variance = np.square(centered).mean(axis=-1, keepdims=True)
    normal = centered / np.sqrt(variance + attributes.get("epsilon", 1e-5))
    return with_quantized({"Y": normal * arrays["scale"] + arrays.get("shift", 0.0), "sum": total}, attributes)


def _case(
    shape: Shape, parts: str = "", rms: bool = False, image: bool = True, total: bool = False,
    distribution: str = "normal", benchmark: bool = False, quantized: tuple[str, ...] = (),
) -> OperatorCase:  # fmt: skip
    """parts: optional inputs. image: scale, shift and gate have a row for each image. quantized:
    the outputs beside the sum, one of them in float8."""
    vector = (shape[0], *[1] * (len(shape) - 2), shape[-1]) if image else shape[-1:]
    inputs = {"X": shape, "scale": vector}
    inputs |= {name: shape if name == "skip" else vector for name in INPUTS[2:] if name in parts.split()}
    name = "-".join(("x".join(map(str, shape)), *parts.split(), *("rms",) * rms, *("image",) * image, distribution))
    outputs = (*(quantized or ("Y",)), *(("sum",) if total else ()))
    attributes: dict[str, int | float] = {"epsilon": 1e-5, "rms": int(rms)}
    if quantized:
        attributes["quantized_scale"] = 0.03125
        name += "-" + "-".join(quantized)
    return OperatorCase(name, inputs, attributes, outputs, distribution, benchmark)


CASES = [
    _case((1, 1, 1)),
    _case((2, 7, 32), "shift"),
    _case((2, 5, 96), "shift gate skip", total=True),
    _case((3, 13, 97), "shift gate skip", total=True),
    _case((2, 9, 40), "shift skip", image=False, total=True),
    _case((2, 9, 40), "gate"),
    _case((2, 3, 2056), "shift gate skip"),
    _case((2, 3, 1536), "shift gate skip", total=True),
    *(_case((1, 3, channels), "shift skip") for channels in (1024, 2048)),
    _case((1, 3, 1032), "shift", distribution="offset"),
    _case((1, 2, 3072), "skip", rms=True),
    _case((1, 2, 5200), "shift"),
    _case((1, 5, 3, 128), rms=True, image=False),
    _case((2, 33, 3, 64), rms=True, image=False),
    _case((2, 9, 160), "skip", rms=True, image=False, total=True),
    _case((2, 9, 20), "shift", rms=True),
    *(_case((2, 16, 64), "shift gate skip", distribution=each) for each in ("large", "tiny", "offset", "constant")),
    *(_case((2, 16, 64), "shift", rms=True, image=False, distribution=each) for each in ("large", "tiny", "offset")),
    _case((2, 5, 96), "shift gate skip", total=True, quantized=(QUANTIZED,)),
    _case((3, 13, 97), "shift", quantized=("Y", QUANTIZED)),
    _case((1, 3, 2048), "shift skip", quantized=(QUANTIZED,)),
    _case((1, 4608, 24, 128), rms=True, image=False, benchmark=True),
    _case((2, 4429, 24, 64), rms=True, image=False, benchmark=True),
    _case((1, 4608, 3072), "shift", benchmark=True),
    _case((1, 4096, 3072), "shift gate skip", total=True, benchmark=True),
    _case((2, 4096, 1536), "shift gate skip", total=True, benchmark=True),
    _case((1, 512, 4096), "skip", rms=True, image=False, total=True, benchmark=True),
]
