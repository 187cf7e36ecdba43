"""Quantization of a lowered graph to 8 bits: ranges from recorded runs, then QDQ, then the target's operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common

from fusion_passes.eight_bits.layers import CONVOLUTIONS, LINEARS, find_layers
from fusion_passes.eight_bits.qdq import insert_qdq
from fusion_passes.graph_pass import Pass
from fusion_passes.lower import (
    bfloat16_layout,
    float8_output,
    fused_conv,
    linear_add,
    quantized_conv,
    quantized_linear,
    quantized_nhwc_conv,
    winograd_conv,
)
from fusion_passes.quantized_weights import FORMATS
from sd_ort.checkpoints.recorded_inputs import load_recorded_inputs
from sd_ort.core.errors import InputError
from sd_ort.optimize.activation_ranges import PERCENTILES, measure_ranges
from sd_ort.optimize.calibration import CannotRun

# Components in 8 bits, and one on request; the others keep their precision.
EIGHT_BIT_COMPONENTS = frozenset({"unet", "transformer"})
VAE_DECODER = "vae_decoder"
# Operators that a target runs in 8 bits, and the formats. Targets of QDQ leave the kernels to the provider; the others
# have QuantizedLinear for linears, which on GPUs has fast kernels for float8 alone. The CPU has fast kernels for int8,
# and one for convolutions, QuantizedConv. The convolutions of `CONVOLUTION_TARGETS` are an option.
TARGET_LAYERS: Mapping[str, Collection[str]] = {
    **dict.fromkeys(("portable", "migraphx"), CONVOLUTIONS | LINEARS),
    **dict.fromkeys(("cpu", "cuda", "hip", "gpu"), frozenset(quantized_linear.LINEARS)),
}
TARGET_FORMATS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("portable", "migraphx", "cpu"), ("float8", "int8")),
    **dict.fromkeys(("cuda", "hip", "gpu"), ("float8",)),
}
QDQ_TARGETS = frozenset({"portable", "migraphx"})
# Targets of our provider alone, whose kernels write activations in float8. ONNX Runtime's CUDA provider has kernels of
# its own for two of these operators, and would write the outputs that nothing reads.
FLOAT8_OUTPUT_TARGETS = frozenset({"hip", "gpu"})
# Targets with QuantizedNhwcConv, whose kernel is fast on Hopper alone.
CONVOLUTION_TARGETS = FLOAT8_OUTPUT_TARGETS

# find_ranges(model, names) returns the largest magnitude of each value of a lowered graph.
FindRanges = Callable[[ir.Model, Sequence[str]], Mapping[str, float]]


@dataclass(frozen=True)
class EightBits:
    """Quantization of a component to 8 bits: the name of the format, and a function that returns activation ranges.

    Without a function the graph computes the scales of its activations in each run: dynamic scales. convolutions: those
    of 3x3 too, for `CONVOLUTION_TARGETS`; the other targets' layers are in `TARGET_LAYERS`.
    """

    format: str
    find_ranges: FindRanges | None
    convolutions: bool = False


@dataclass
class Quantization:
    """Result of `quantize`.

    ranges: largest magnitude of each activation that was quantized; empty with dynamic scales. layers: number of
    quantized layers by operator. not_quantized: number of other linears and convolutions by reason.
    written_by_producers: number of activations that the operator before writes in 8 bits, of those in `ranges`.
    """

    format: str
    dynamic_scales: bool = False
    convolutions: bool = False
    ranges: dict[str, float] = field(default_factory=dict)
    layers: Counter[str] = field(default_factory=Counter)
    not_quantized: Counter[str] = field(default_factory=Counter)
    written_by_producers: int = 0

    def options(self) -> dict[str, Any]:
        """Return what the metadata of the graph records, from which `recorded_eight_bits` finds the ranges again."""
        scales: dict[str, Any] = {"dynamic_scales": True} if self.dynamic_scales else {"ranges": self.ranges}
        return {"format": self.format, **({"convolutions": True} if self.convolutions else {}), **scales}

    def manifest_entry(self) -> dict[str, Any]:
        """Return the entry of the component in the manifest."""
        return {
            "format": self.format,
            **({"dynamic_scales": True} if self.dynamic_scales else {}),
            "layers": dict(self.layers),
            "not_quantized": dict(self.not_quantized.most_common()),
            "written_by_producers": self.written_by_producers,
            "ranges": self.ranges,
        }


def uses_int8_tiles(target: str, format_: str) -> bool:
    """Return whether a target has the CPU's kernels for linears and convolutions in int8."""
    return target == "cpu" and format_ == "int8"


def passes_around(
    passes: tuple[Pass, ...], target: str, dtype: str, format_: str
) -> tuple[tuple[Pass, ...], tuple[Pass, ...]]:
    """Return a target's lowering passes in two parts: those before quantization, and those after it.

    Layers that stay in float32 or bfloat16 get the CPU's kernels for them at last.
    """
    if not uses_int8_tiles(target, format_):
        return passes, ()
    if dtype == "bfloat16":
        return (linear_add.CPU,), passes
    late = (winograd_conv.PASS, fused_conv.PASS)
    return tuple(each for each in passes if each not in late), tuple(each for each in passes if each in late)


def quantize(
    model: ir.Model, target: str, eight_bits: EightBits, float32_nodes: Collection[ir.Node] = ()
) -> Quantization:
    """Insert QuantizeLinear and DequantizeLinear around the layers of a lowered float32 graph, in place.

    Raises InputError if no layer can be quantized, or a range is too large.
    """
    common.NameFixPass()(model)
    int8_tiles = uses_int8_tiles(target, eight_bits.format)
    operators, kernel_reject_reason = TARGET_LAYERS[target], None
    if int8_tiles:
        operators, kernel_reject_reason = {*operators, "Conv"}, quantized_conv.kernel_reject_reason
    elif eight_bits.convolutions:
        operators, kernel_reject_reason = {*operators, "NhwcConv"}, quantized_nhwc_conv.kernel_reject_reason
    # A CPU that computes the text's keys and values in every step takes 4 % of it for them in float32.
    layers = find_layers(model.graph, operators, float32_nodes, kernel_reject_reason, text_layers=int8_tiles)
    assert eight_bits.find_ranges is not None or target in QDQ_TARGETS
    result = Quantization(eight_bits.format, eight_bits.find_ranges is None, eight_bits.convolutions)
    result.layers.update(layer.node.op_type for layer in layers.accepted)
    result.not_quantized.update(rejection.reason for rejection in layers.rejections)
    if not layers.accepted:
        reasons = "; ".join(f"{count} times {reason}" for reason, count in result.not_quantized.most_common(3))
        raise InputError(f"no layer of this graph can be computed in 8 bits ({reasons or 'it has none'}).")
    if eight_bits.find_ranges is not None:
        names = list(dict.fromkeys(str(layer.x.name) for layer in layers.accepted))
        result.ranges = {name: float(value) for name, value in eight_bits.find_ranges(model, names).items()}
    ranges = None if result.dynamic_scales else result.ranges
    # BLAS libraries take one scale of a float8 matrix; its exponents hold small channels beside large ones.
    per_channel = target in QDQ_TARGETS or eight_bits.format == "int8"
    try:
        insert_qdq(model.graph, layers.accepted, FORMATS[eight_bits.format], ranges, per_channel)
    except ValueError as error:
        raise InputError(
            f"{error}: leave out the calibration prompt that gives it, or --{eight_bits.format}."
        ) from error
    if target not in QDQ_TARGETS:
        lowered = quantized_linear.quantized_linear(model)
        lowered += quantized_conv.quantized_conv(model)
        lowered += quantized_nhwc_conv.quantized_nhwc_conv(model)
        assert lowered.counts.total() == len(layers.accepted), lowered.reason_counts()
    if int8_tiles:
        bfloat16_layout.bfloat16_layout(model)
    if target in FLOAT8_OUTPUT_TARGETS:
        result.written_by_producers = float8_output.float8_outputs(model).counts["float8_output"]
    return result


def calibrated_ranges(component: str, format_: str, recorded: Path, scratch: Path) -> FindRanges:
    """Return a function that measures ranges on the runs of a component in the .npz `recorded`.

    It raises InputError if the file has no runs of the component, or the graph cannot be run.
    """

    def find(model: ir.Model, names: Sequence[str]) -> Mapping[str, float]:
        feeds = load_recorded_inputs(recorded, component, list(model.graph.inputs), required=True)
        try:
            return measure_ranges(model, names, feeds, scratch, PERCENTILES[format_])
        except CannotRun as error:
            raise InputError(f"{component} cannot be run on the recorded inputs of {recorded}: {error}") from error

    return find


def recorded_eight_bits(options: Mapping[str, Any]) -> EightBits:
    """Return the quantization that the metadata of a graph records (`Quantization.options`).

    Its function raises KeyError for a value that was not quantized then.
    """
    if options.get("dynamic_scales"):
        return EightBits(options["format"], None)
    ranges, convolutions = options["ranges"], options.get("convolutions", False)
    return EightBits(options["format"], lambda model, names: {name: ranges[name] for name in names}, convolutions)
