"""Helper graphs of the device sampling loop, which keep all data on the device between the components.

    conditioning_graph     outputs of the text encoders -> an input of the UNet
    repeat_rows_graph      rows of one prompt -> rows of all steps, for the time graph of a hoisted UNet
    sum_residuals_graph    residuals of several ControlNets -> their sums
    band_graph             sample -> its rows of one band (patch parallelism)
    extrapolate_graph      values of two steps -> those of the next one
    join_bands_graph       predictions of bands -> the image's
    scheduler_step_graph   between two UNet calls: guidance, scheduler (a table, see `checkpoints.schedule`), next input
    unscale_latents_graph  final latents -> input of the VAE decoder
    to_uint8_graph         output of the VAE decoder -> uint8 image

scheduler_step_graph may write `latents`, `history` and `index` over its inputs: each has one consumer, and that of
`history` is elementwise. The graph has as few kernels as possible, because on a GPU the gaps between these kernels
are longer than the kernels. Sums are Mul and ReduceSum, not MatMul, which GPUs compute in TF32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sd_ort.core.onnx_file import serialize

OPSET = 18
GUIDANCE_HALVES = ("negative", "positive")  # of classifier-free guidance, in batch order
TYPES = {"float32": "float", "float16": "float16", "int64": "int64", "int32": "int32"}
NUMBERS = {"float32": 1, "uint8": 2, "int32": 6, "int64": 7, "float16": 10}  # onnx.TensorProto.DataType


def _type(dtype: np.dtype | type) -> str:
    return TYPES[np.dtype(dtype).name]


def _cast(dtype: np.dtype | type) -> str:
    return f"Cast <to = {NUMBERS[np.dtype(dtype).name]}>"


def _model(inputs: list[str], outputs: list[str], lines: list[str]) -> bytes:
    head = f'<ir_version: 10, opset_import: ["" : {OPSET}]>\n'
    return serialize(f"{head}device ({', '.join(inputs)}) => ({', '.join(outputs)}) {{\n" + "\n".join(lines) + "\n}")


def identifier(name: str) -> str:
    """Return the name of a UNet input `name` in these graphs: exporters' names may have any characters."""
    return "v_" + "".join(c if c.isalnum() else f"_{ord(c)}_" for c in name)


def conditioning_graph(spec: tuple[np.dtype, int, tuple[np.dtype, ...]]) -> bytes:
    """Build the graph that concatenates encoder outputs for `spec`: (output dtype, output rank, input dtypes).

    Inputs: part_0, part_1, ... (texts, ..., C_i); row (N,) int64, the text index of each batch row; zeroed (N,) bool,
    the batch rows that are replaced by zeros. Outputs: conditioning (N, ..., sum of C_i); for each input check_<i>, a
    scalar: 0, or NaN if the input has a value that is not finite.
    """
    dtype, rank, parts = spec
    column = ", ".join(["-1", *["1"] * (rank - 1)])
    lines = []
    for i in range(len(parts)):
        lines += [f"wide_{i} = Cast <to = 1> (part_{i})", f"rest_{i} = Sub (wide_{i}, wide_{i})"]
        lines.append(f"check_{i} = ReduceSum <keepdims = 0> (rest_{i})")
    lines += [
        f"side_by_side = Concat <axis = -1> ({', '.join(f'wide_{i}' for i in range(len(parts)))})",
        "rows = Gather <axis = 0> (side_by_side, row)",
        f"column = Constant <value_ints = [{column}]> ()",
        "zeroed_column = Reshape (zeroed, column)",
        "zero = Constant <value = float {0.0}> ()",
        "conditioned = Where (zeroed_column, zero, rows)",
        f"conditioning = {_cast(dtype)} (conditioned)",
    ]
    inputs = [f"{_type(part)}[] part_{i}" for i, part in enumerate(parts)]
    outputs = [f"{_type(dtype)}[] conditioning", *(f"float check_{i}" for i in range(len(parts)))]
    return _model([*inputs, "int64[n] row", "bool[n] zeroed"], outputs, lines)


def repeat_rows_graph(dtypes: tuple[tuple[str, np.dtype], ...]) -> bytes:
    """Build a graph that gathers rows: each name (rows, ...) and row (N,) int64 -> every_<name> (N, ...)."""
    named = [(identifier(name), _type(dtype)) for name, dtype in dtypes]
    lines = [f"every_{name} = Gather <axis = 0> ({name}, row)" for name, _ in named]
    inputs = ["int64[n] row", *(f"{dtype}[] {name}" for name, dtype in named)]
    return _model(inputs, [f"{dtype}[] every_{name}" for name, dtype in named], lines)


def sum_residuals_graph(spec: tuple[int, tuple[tuple[str, np.dtype], ...]]) -> bytes:
    """Build the graph of <name> = <name>_0 + <name>_1 + ... in float32, for `spec`: (count, ((name, dtype), ...))."""
    count, named = spec
    inputs, outputs, lines = [], [], []
    for name, dtype in named:
        inputs += [f"{_type(dtype)}[] {name}_{i}" for i in range(count)]
        outputs.append(f"{_type(dtype)}[] {name}")
        lines += [f"wide_{name}_{i} = Cast <to = 1> ({name}_{i})" for i in range(count)]
        lines.append(f"sum_{name} = Sum ({', '.join(f'wide_{name}_{i}' for i in range(count))})")
        lines.append(f"{name} = {_cast(dtype)} (sum_{name})")
    return _model(inputs, outputs, lines)


def band_graph(spec: tuple[np.dtype, int, int]) -> bytes:
    """Build the graph sample (B, C, h, w) -> band, its rows of a band, for `spec`: (dtype, index, count)."""
    dtype, index, count = spec
    parts = ", ".join("band" if i == index else f"rest_{i}" for i in range(count))
    line = f"{parts} = Split <axis = 2, num_outputs = {count}> (sample)"
    return _model([f"{_type(dtype)}[b,c,h,w] sample"], [f"{_type(dtype)}[b,c,k,w] band"], [line])


def join_bands_graph(spec: tuple[np.dtype, int]) -> bytes:
    """Build the graph band_0, band_1, ... -> joined (B, C, h, w), for `spec`: (dtype, count)."""
    dtype, count = spec
    names = [f"band_{i}" for i in range(count)]
    line = f"joined = Concat <axis = 2> ({', '.join(names)})"
    return _model([f"{_type(dtype)}[b,c,k,w] {n}" for n in names], [f"{_type(dtype)}[b,c,h,w] joined"], [line])


def extrapolate_graph(dtype: np.dtype) -> bytes:
    """Build the graph latest (N,), before (N,) -> next = 2 latest - before."""
    kind = f"{_type(dtype)}[n]"
    lines = ["change = Sub (latest, before)", "next = Add (latest, change)"]
    return _model([f"{kind} latest", f"{kind} before"], [f"{kind} next"], lines)


@dataclass(frozen=True)
class SchedulerStepSpec:
    """Options of scheduler_step_graph.

    Args:
        sample: dtype of the UNet's sample and output.
        timestep: dtype of the UNet's timestep, or None if it has none (a hoisted UNet).
        scalar_timestep: the timestep has shape [].
        step_inputs: names and dtypes of other inputs that change in every step.
        initial: the graph before the first step, when there is no prediction.
        window: number of steps whose latents and predictions the scheduler uses.
        scales_input: the scheduler scales the UNet's input.
        guidance: classifier-free guidance, with a batch of 2B.
        rescales_guidance: guidance rescale (Lin et al., 2023, section 3.4).
        noise_count: noise samples of one step.
        extra_channels: constant channels follow the latents' channels.
        inpaints: outside of a mask the latents are those of an image with noise.
        control_scales: dtype of the conditioning scale of each ControlNet.
        split_guidance: the two halves of guidance are predicted on different devices.
    """

    sample: np.dtype
    timestep: np.dtype | None
    scalar_timestep: bool = False
    step_inputs: tuple[tuple[str, np.dtype], ...] = ()
    initial: bool = False
    window: int = 1
    scales_input: bool = True
    guidance: bool = True
    rescales_guidance: bool = False
    noise_count: int = 0
    extra_channels: bool = False
    inpaints: bool = False
    control_scales: tuple[np.dtype, ...] = ()
    split_guidance: bool = False

    @property
    def term_count(self) -> int:
        """Terms K of one step in the scheduler's sum: the latents, and one prediction or the two of guidance.

        The coefficients of the two predictions include the guidance scale.
        """
        return 3 if self.guidance and not self.rescales_guidance else 2


def scheduler_step_graph(spec: SchedulerStepSpec) -> bytes:
    """Build the graph between two UNet calls.

    B images with latents (C, h, w), T steps, K terms, a window of W steps, D noise samples of a step, S in total.
    Inputs, float32 unless stated otherwise:
        index (1,) int64: number of finished steps; scales, timesteps (T + 1,)
        with step_inputs: place (T + 1, rows) int64, every_<name> (.., ...): the rows of each step, and the values
        with W > 1: history (W, K, B, C, h, w): step i is in slot i modulo W
        initial: start (B, C, h, w)
        otherwise: last_latents (B, C, h, w); noise (rows, C, h, w) in the UNet's dtype, or with split_guidance
        negative_noise and positive_noise of B rows each; weights (T + 1, W K), the coefficients of all terms after
        each number of steps; with W > 1 slots (T + 1, W) bool, the slot of each step
        with D > 0: draws (S, B, C, h, w), drawn (T + 1, D) int64 and drawn_weights (T + 1, D); with W = 1 the
        latter are the last columns of `weights`
        with rescales_guidance: guidance, rescale (1,)
        with inpaints: picture, picture_noise (B, C, h, w), mask (B, 1, h, w), kept_picture and kept_noise (T + 1,):
        outside of the mask the latents of step i are kept_picture[i] picture + kept_noise[i] picture_noise
        with extra_channels: channels (B, C', h, w); for each of control_scales: scales_<i> (T + 1,)
    Outputs: index_out, latents (B, C, h, w), sample (rows, C + C', h, w), timestep (1,) or (), each <name>,
        conditioning_scale_<i> (1,), with W > 1 history_out.
    """
    inputs, outputs = ["int64[1] index"], ["int64[1] index_out", "float[b,c,h,w] latents"]
    lines = ["front = Constant <value_ints = [0]> ()", "one = Constant <value_ints = [1]> ()"]
    if spec.window > 1:
        inputs.append("float[window,kinds,b,c,h,w] history")
        outputs.append("float[window,kinds,b,c,h,w] history_out")
    lines += _initial_lines(spec, inputs) if spec.initial else _scheduler_lines(spec, inputs)
    rows = "latents"
    if spec.scales_input:
        inputs.append("float[t1] scales")
        lines += ["scale = Gather <axis = 0> (scales, index_out)", "scaled = Mul (latents, scale)"]
        rows = "scaled"
    if spec.extra_channels:
        inputs.append("float[b,k,h,w] channels")
        lines.append(f"wide = Concat <axis = 1> ({rows}, channels)")
        rows = "wide"
    twice = spec.guidance and not spec.split_guidance
    outputs.append(f"{_type(spec.sample)}[] sample")
    lines.append(f"{'half' if twice else 'sample'} = {_cast(spec.sample)} ({rows})")
    lines += ["sample = Concat <axis = 0> (half, half)"] if twice else []
    _other_step_inputs(spec, inputs, outputs, lines)
    return _model(inputs, outputs, lines)


def _other_step_inputs(spec: SchedulerStepSpec, inputs: list[str], outputs: list[str], lines: list[str]) -> None:
    """Append the other inputs of the next step: timestep, rows of time embeddings, scales of ControlNets."""
    if spec.timestep is not None:
        inputs.append("float[t1] timesteps")
        outputs.append(f"{_type(spec.timestep)}[] timestep")
        lines += ["time = Gather <axis = 0> (timesteps, index_out)"]
        lines += ["only_time = Squeeze (time, front)"] if spec.scalar_timestep else []
        lines += [f"timestep = {_cast(spec.timestep)} ({'only_time' if spec.scalar_timestep else 'time'})"]
    if spec.step_inputs:
        inputs.append("int64[t1,rows] place")
        lines += ["scalar = Squeeze (index_out, front)", "places = Gather <axis = 0> (place, scalar)"]
    for index, dtype in enumerate(spec.control_scales):
        inputs.append(f"float[t1] scales_{index}")
        outputs.append(f"{_type(dtype)}[] conditioning_scale_{index}")
        lines.append(f"factor_{index} = Gather <axis = 0> (scales_{index}, index_out)")
        lines.append(f"conditioning_scale_{index} = {_cast(dtype)} (factor_{index})")
    for name, dtype in spec.step_inputs:
        inputs.append(f"{_type(dtype)}[] every_{identifier(name)}")
        outputs.append(f"{_type(dtype)}[] {identifier(name)}")
        lines.append(f"{identifier(name)} = Gather <axis = 0> (every_{identifier(name)}, places)")


def _initial_lines(spec: SchedulerStepSpec, inputs: list[str]) -> list[str]:
    """Return statements for latents, index_out and history_out (zeros) before the first step."""
    inputs.append("float[b,c,h,w] start")
    lines = ["latents = Identity (start)", "index_out = Sub (index, index)"]
    if spec.window > 1:
        lines += ["shape = Shape (history)", "history_out = ConstantOfShape (shape)"]
    return lines


def _scheduler_lines(spec: SchedulerStepSpec, inputs: list[str]) -> list[str]:
    """Return statements for latents, index_out and history_out after a step: the scheduler's weighted sum."""
    inputs += ["float[b,c,h,w] last_latents", "float[t1,n] weights"]
    lines = [
        "index_out = Add (index, one)",
        "before = Unsqueeze (last_latents, front)",
        *_prediction_lines(spec, inputs),
        "row = Gather <axis = 0> (weights, index_out)",
        "each = Constant <value_ints = [-1, 1, 1, 1, 1]> ()",
    ]
    if spec.noise_count:
        inputs += ["float[s,b,c,h,w] draws", "int64[t1,d] drawn"]
        lines += [
            "which = Gather <axis = 0> (drawn, index_out)",
            "only_which = Squeeze (which, front)",
            "random = Gather <axis = 0> (draws, only_which)",
        ]
    now = ["before", "prediction", *(["random"] if spec.noise_count and spec.window == 1 else [])]
    lines.append(f"now = Concat <axis = 0> ({', '.join(now)})")
    summed = "summed" if spec.inpaints else "latents"
    if spec.window == 1:
        lines += [
            "weights_column = Reshape (row, each)",
            "parts = Mul (now, weights_column)",
            f"{summed} = ReduceSum <keepdims = 0> (parts, front)",
        ]
    else:
        lines += _windowed_sum_lines(spec, inputs, summed)
    return [*lines, *(_inpaint_lines(inputs) if spec.inpaints else [])]


def _windowed_sum_lines(spec: SchedulerStepSpec, inputs: list[str], summed: str) -> list[str]:
    """Return statements for history_out and the weighted sum over the window's steps and the noise samples."""
    inputs.append("bool[t1,window] slots")
    partial_sum = "known" if spec.noise_count else summed
    lines = [
        "slot = Gather <axis = 0> (slots, index_out)",
        "slot_shape = Constant <value_ints = [-1, 1, 1, 1, 1, 1]> ()",
        "its_slot = Reshape (slot, slot_shape)",
        "history_out = Where (its_slot, now, history)",
        f"table_shape = Constant <value_ints = [{spec.window}, {spec.term_count}, 1, 1, 1, 1]> ()",
        "table = Reshape (row, table_shape)",
        "parts = Mul (history_out, table)",
        "steps_and_kinds = Constant <value_ints = [0, 1]> ()",
        f"{partial_sum} = ReduceSum <keepdims = 0> (parts, steps_and_kinds)",
    ]
    if spec.noise_count:
        inputs.append("float[t1,d] drawn_weights")
        lines += [
            "drawn_row = Gather <axis = 0> (drawn_weights, index_out)",
            "drawn_column = Reshape (drawn_row, each)",
            "drawn_parts = Mul (random, drawn_column)",
            "drawn_sum = ReduceSum <keepdims = 0> (drawn_parts, front)",
            f"{summed} = Add (known, drawn_sum)",
        ]
    return lines


def _prediction_lines(spec: SchedulerStepSpec, inputs: list[str]) -> list[str]:
    """Return statements for prediction (K - 1, B, C, h, w), float32."""
    noise = [f"{side}_noise" for side in GUIDANCE_HALVES] if spec.split_guidance else ["noise"]
    inputs += [f"{_type(spec.sample)}[rows,c,h,w] {name}" for name in noise]
    if spec.split_guidance:
        lines = [f"{side}_side = Cast <to = 1> ({name})" for side, name in zip(GUIDANCE_HALVES, noise, strict=True)]
        lines += [f"{side} = Unsqueeze ({side}_side, front)" for side in GUIDANCE_HALVES]
        lines += ["prediction = Concat <axis = 0> (negative, positive)"] if not spec.rescales_guidance else []
    else:
        lines = ["wide_noise = Cast <to = 1> (noise)"]
        lines.append(f"{'rows' if spec.guidance else 'prediction'} = Unsqueeze (wide_noise, front)")
        if spec.guidance:
            sides = "sides" if spec.rescales_guidance else "prediction"
            lines += ["apart = Constant <value_ints = [2, -1, 0, 0, 0]> ()", f"{sides} = Reshape (rows, apart)"]
            lines += (
                ["negative, positive = Split <axis = 0, num_outputs = 2> (sides)"] if spec.rescales_guidance else []
            )
    if spec.rescales_guidance:
        inputs += ["float[1] guidance", "float[1] rescale"]
        lines += [
            "difference = Sub (positive, negative)",
            "push = Mul (guidance, difference)",
            "guided = Add (negative, push)",
            *_rescale_lines(),
        ]
    return lines


def _inpaint_lines(inputs: list[str]) -> list[str]:
    """Return statements for latents: the scheduler's sum inside of the mask, the image with noise outside."""
    inputs += ["float[b,c,h,w] picture", "float[b,c,h,w] picture_noise", "float[b,1,h,w] mask"]
    inputs += ["float[t1] kept_picture", "float[t1] kept_noise"]
    return [
        "picture_factor = Gather <axis = 0> (kept_picture, index_out)",
        "noise_factor = Gather <axis = 0> (kept_noise, index_out)",
        "picture_part = Mul (picture, picture_factor)",
        "noise_part = Mul (picture_noise, noise_factor)",
        "noised_picture = Add (picture_part, noise_part)",
        "unit = Constant <value = float[1] {1.0}> ()",
        "outside = Sub (unit, mask)",
        "outer_part = Mul (outside, noised_picture)",
        "summed_part = Mul (mask, summed)",
        "latents = Add (outer_part, summed_part)",
    ]


def _rescale_lines() -> list[str]:
    """Return statements for prediction: `guided` (1, B, C, h, w) rescaled to the deviation of `positive`, by image."""
    lines = ["axes = Constant <value_ints = [2, 3, 4]> ()"]
    for name in ("positive", "guided"):
        lines += [
            f"{name}_mean = ReduceMean ({name}, axes)",
            f"{name}_rest = Sub ({name}, {name}_mean)",
            f"{name}_squares = Mul ({name}_rest, {name}_rest)",
            f"{name}_sum = ReduceSum ({name}_squares, axes)",
        ]
    return [
        *lines,
        "squared_ratio = Div (positive_sum, guided_sum)",
        "ratio = Sqrt (squared_ratio)",
        "rescaled = Mul (guided, ratio)",
        "rescaled_part = Mul (rescale, rescaled)",
        "all = Constant <value = float[1] {1.0}> ()",
        "rest_share = Sub (all, rescale)",
        "guided_part = Mul (rest_share, guided)",
        "prediction = Add (rescaled_part, guided_part)",
    ]


def unscale_latents_graph(dtype: np.dtype) -> bytes:
    """Build the graph latent_sample = latents * factor + mean in `dtype`.

    Inputs, float32: latents (B, C, h, w), factor and mean (1, C or 1, 1, 1). Second output: latents_check, a scalar: 0,
    or NaN if a latent is not finite.
    """
    lines = [
        "scaled = Mul (latents, factor)",
        "shifted = Add (scaled, mean)",
        f"latent_sample = {_cast(dtype)} (shifted)",
        "rest = Sub (latents, latents)",
        "latents_check = ReduceSum <keepdims = 0> (rest)",
    ]
    inputs = ["float[b,c,h,w] latents", "float[one,k,one,one] factor", "float[one,k,one,one] mean"]
    return _model(inputs, [f"{_type(dtype)}[] latent_sample", "float latents_check"], lines)


def to_uint8_graph(dtype: np.dtype) -> bytes:
    """Build the graph from sample (B, 3, H, W) in `dtype`, about -1..1, to image (B, H, W, 3) uint8.

    Rounds like diffusers. Second output: image_check, a scalar: 0, or NaN if a pixel is not finite.
    """
    lines = [
        "half = Constant <value = float {0.5}> ()",
        "zero = Constant <value = float {0.0}> ()",
        "one = Constant <value = float {1.0}> ()",
        "white = Constant <value = float {255.0}> ()",
        "wide = Cast <to = 1> (sample)",
        "rest = Sub (wide, wide)",
        "image_check = ReduceSum <keepdims = 0> (rest)",
        "halved = Mul (wide, half)",
        "shifted = Add (halved, half)",
        "clipped = Clip (shifted, zero, one)",
        "bright = Mul (clipped, white)",
        "rounded = Round (bright)",
        f"bytes = {_cast(np.uint8)} (rounded)",
        "image = Transpose <perm = [0, 2, 3, 1]> (bytes)",
    ]
    return _model([f"{_type(dtype)}[b,c,h,w] sample"], ["uint8[] image", "float image_check"], lines)
