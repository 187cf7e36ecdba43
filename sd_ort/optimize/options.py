"""Options of `optimize`, and their defaults for a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sd_ort.core.errors import InputError
from sd_ort.core.ownership import sha256
from sd_ort.core.pipeline_folder import HOISTED
from sd_ort.optimize.eight_bits import (
    CONVOLUTION_TARGETS,
    EIGHT_BIT_COMPONENTS,
    QDQ_TARGETS,
    TARGET_FORMATS,
    VAE_DECODER,
    uses_int8_tiles,
)
from sd_ort.optimize.targets import TARGETS, default_target
from sd_ort.optimize.weight_storage import WeightStorage
from sd_ort.runtime.provider_table import PROVIDERS

# Targets of providers that gain from hoisting; MIGraphX does not pass results of one graph to another on the device.
HOIST_TARGETS = ("cuda", "rocm", "hip", "gpu")


@dataclass(frozen=True)
class OptimizeOptions:
    """Options of `optimize`.

    Attributes:
        target: A name in `TARGETS`; None is the target of the installed ONNX Runtime wheel.
        dtype: "float32", "float16" or "bfloat16", one that the target has.
        components: Optimize only these; None is all.
        calibrate: Whether float16 conversion runs each component to find the nodes that must stay in float32; None
            runs components with less than `calibration.SIZE_LIMIT` bytes of weights.
        inputs: An .npz of recorded inputs for calibration (see `checkpoints.recorded_inputs`), instead of synthetic
            inputs.
        hoist: Whether the UNet or the transformer is split into graphs that run once for each prompt, schedule and
            step (see `graphs.hoist`); None hoists for `HOIST_TARGETS` in float16, transformers also in bfloat16.
        float16_io: Whether float16 conversion of one ONNX file also converts the graph's inputs and outputs. Those of a
            pipeline folder are always converted.
        weights: Storage of weights in fewer bits; None stores these in `dtype`.
        eight_bits: "float8" or "int8" for the linears and convolutions of the UNet or transformer (see
            `optimize.eight_bits`), calibrated on its recorded runs in `inputs`; None keeps them in `dtype`.
        dynamic_scales: Whether the graph computes the scales of activations in `eight_bits` in each run, without
            recorded runs, for targets whose graphs keep QuantizeLinear.
        vae_decoder: Whether the layers of the VAE decoder are computed in `eight_bits` too, for targets that have
            convolutions in 8 bits.
        convolutions: Whether 3x3 convolutions are computed in float8 too, for targets where this is an option.
    """

    target: str | None = None
    dtype: str = "float32"
    components: Sequence[str] | None = None
    calibrate: bool | None = None
    inputs: Path | None = None
    hoist: bool | None = None
    float16_io: bool = False
    weights: WeightStorage | None = None
    eight_bits: str | None = None
    dynamic_scales: bool = False
    vae_decoder: bool = False
    convolutions: bool = False

    @property
    def eight_bit_components(self) -> frozenset[str]:
        """Names of the components with layers in 8 bits."""
        if self.eight_bits is None:
            return frozenset()
        return EIGHT_BIT_COMPONENTS | {VAE_DECODER} if self.vae_decoder else EIGHT_BIT_COMPONENTS

    def with_target(self) -> tuple[OptimizeOptions, str]:
        """Return the options with a target, and a line on the default target for the user, else "".

        Raises InputError for an unknown target, one without the dtype, and calibration that would have no effect.
        """
        target, note = self.target, ""
        if target is None:
            target, reason = default_target()
            note = f"target {target}: {reason}."
        if target not in TARGETS:
            if target in PROVIDERS and (counterpart := PROVIDERS[target].target):
                raise InputError(f"{target} is a provider, not a target: its target is {counterpart}.")
            raise InputError(f"unknown target {target!r}: choose one of {', '.join(TARGETS)}.")
        if self.dtype not in TARGETS[target].dtypes:
            others = ", ".join(name for name, other in TARGETS.items() if self.dtype in other.dtypes)
            raise InputError(
                f"target {target} has kernels without {self.dtype}: use --float16, or a target of {others}."
            )
        if self.float16_io and (self.dtype != "float16" or TARGETS[target].half_storage_only):
            raise InputError(f"--float16-io goes with --float16 for a target that computes in it, not {target}.")
        if self.weights is not None:
            if self.eight_bits is not None:
                raise InputError(f"--weights and --{self.eight_bits} exclude each other: leave one out.")
            self.weights.check(target, self.dtype)
        if self.eight_bits is None:
            for option, is_set in (
                ("--vae-decoder", self.vae_decoder),
                ("--dynamic-scales", self.dynamic_scales),
                ("--convolutions", self.convolutions),
            ):
                if is_set:
                    raise InputError(f"{option} goes with --float8 or --int8: leave it out.")
        if self.eight_bits is not None:
            self._check_eight_bits(target)
        elif self.calibrate or self.inputs:
            if TARGETS[target].half_storage_only:
                raise InputError(
                    f"target {target} computes in float32, where nothing overflows: leave out --calibrate and --inputs."
                )
            if self.dtype != "float16":
                raise InputError(
                    f"calibration is for --float16: {self.dtype} has the range of float32: leave out --calibrate and "
                    "--inputs."
                )
        return replace(self, target=target), note

    def _check_eight_bits(self, target: str) -> None:
        """Raise InputError for a target or dtype that 8 bits do not go with, and for scales without their runs."""
        option = f"--{self.eight_bits}"
        if self.eight_bits not in TARGET_FORMATS.get(target, ()):
            others = ", ".join(name for name, formats in TARGET_FORMATS.items() if self.eight_bits in formats)
            stored = ""
            if self.eight_bits == "int8" and target in ("hip", "gpu"):
                stored = " --weights int8 saves the memory (docs/howto/measure.md, Int8 on GPUs)."
            raise InputError(f"target {target} has no kernels for {option}: use a target of {others}.{stored}")
        if self.convolutions and target not in CONVOLUTION_TARGETS:
            raise InputError(
                f"--convolutions is an option of targets {', '.join(sorted(CONVOLUTION_TARGETS))} alone: leave it out."
            )
        has_convolutions = target in QDQ_TARGETS or uses_int8_tiles(target, self.eight_bits) or self.convolutions
        if self.vae_decoder and not has_convolutions and target in CONVOLUTION_TARGETS:
            raise InputError("a VAE decoder is made of convolutions: give --convolutions, or leave out --vae-decoder.")
        if self.vae_decoder and not has_convolutions:
            raise InputError(
                f"target {target} has no convolutions for {option}, of which a VAE decoder is made: leave out "
                f"--vae-decoder, or use a target of {', '.join(sorted(QDQ_TARGETS))}; cpu has those for --int8."
            )
        if self.dtype == "bfloat16" and not uses_int8_tiles(target, self.eight_bits):
            raise InputError(
                f"{option} goes with float32 or --float16, whose numbers its scales are; --int8 with --bfloat16 for "
                f"target cpu, not {target}."
            )
        if self.dynamic_scales:
            if target not in QDQ_TARGETS:
                raise InputError(
                    f"target {target} has only constant scales, which its operators for 8 bits multiply with the "
                    f"weights': leave out --dynamic-scales, or use a target of {', '.join(sorted(QDQ_TARGETS))}."
                )
            if self.inputs is not None and self.dtype != "float16":
                raise InputError("--dynamic-scales needs no recorded runs in float32: leave out --inputs.")
        elif self.inputs is None:
            dynamic = ", or --dynamic-scales" if target in QDQ_TARGETS else ""
            raise InputError(
                f"{option} needs the ranges of activations: give --prompts, or --inputs of recorded runs{dynamic}."
            )

    def with_components(self, names: Sequence[str]) -> OptimizeOptions:
        """Return options that have a target with these components and `hoist` as a bool.

        Raises InputError if neither a UNet nor a transformer is to be hoisted, or a UNet in bfloat16.
        """
        assert self.target is not None
        if self.eight_bits and self.eight_bit_components.isdisjoint(names):
            raise InputError(f"--{self.eight_bits} is for the UNet or transformer: take it into --component.")
        if self.vae_decoder and VAE_DECODER not in names:
            raise InputError(f"--vae-decoder is for {VAE_DECODER}: take it into --component, or leave it out.")
        denoisers, hoisted = [name for name in HOISTED if name in names], self.hoist
        dtypes = ("float16", "bfloat16") if denoisers == ["transformer"] else ("float16",)
        if hoisted is None:
            hoisted = self.dtype in dtypes and self.target in HOIST_TARGETS and bool(denoisers)
        if hoisted and not denoisers:
            raise InputError("--hoist splits the UNet or transformer: take it into --component, or leave out --hoist.")
        if hoisted and "unet" in denoisers and self.dtype == "bfloat16" and not TARGETS[self.target].half_storage_only:
            raise InputError(
                "--hoist of a UNet passes tensors between graphs, which ONNX Runtime cannot in bfloat16: use --float16."
            )
        return replace(self, components=list(names), hoist=hoisted)

    def manifest_entry(self) -> dict[str, Any]:
        """Return the options for the manifest, with a hash of the recorded inputs."""
        options = {**vars(self), "inputs": sha256(self.inputs) if self.inputs else None}
        del options["float16_io"]  # of one ONNX file, which has no manifest
        if options.pop("weights") is not None:
            options["weights"] = self.weights.entry() if self.weights else None
        if self.eight_bits is None:
            del options["eight_bits"]
        for name in ("dynamic_scales", "vae_decoder", "convolutions"):
            if not options[name]:
                del options[name]
        return options
