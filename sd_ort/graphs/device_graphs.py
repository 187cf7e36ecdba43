"""The small graphs that run on the device between components, so that nothing goes through the host.

    conditioning  what the text encoders give -> rows of an input of the UNet
    spread        rows of one prompt -> rows of all steps, for the time graph of a hoisted UNet
    between       between two UNet calls: guidance, the scheduler (a table, see `family.schedule`), the next input
    finish        the last latents -> what the VAE decoder takes
    picture       what the VAE decoder gives -> bytes

`between` may write `latents`, `history` and `index` over those it reads: each is read by one node alone, `history`
element by element. It is as few kernels as can be, for on a GPU the gaps between them take longer than they do. Sums
are elementwise products and a ReduceSum, not a MatMul, which GPUs compute in TF32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

OPSET = 18
SIDES = ("negative", "positive")  # of classifier-free guidance, in the order of their rows
TYPES = {"float32": "float", "float16": "float16", "int64": "int64", "int32": "int32"}


def _type(dtype: np.dtype | type) -> str:
    return TYPES[np.dtype(dtype).name]


def _cast(dtype: np.dtype | type) -> str:
    return f"Cast <to = {onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))}>"


def _model(inputs: list[str], outputs: list[str], lines: list[str]) -> bytes:
    head = f'<ir_version: 10, opset_import: ["" : {OPSET}]>\n'
    text = f"{head}device ({', '.join(inputs)}) => ({', '.join(outputs)}) {{\n" + "\n".join(lines) + "\n}"
    made: bytes = onnx.parser.parse_model(text).SerializeToString()
    return made


def identifier(name: str) -> str:
    """What `spread` and `between` call an input `name` of the UNet: exporters' names may hold any character."""
    return "v_" + "".join(c if c.isalnum() else f"_{ord(c)}_" for c in name)


def conditioning(what: tuple[np.dtype, int, tuple[np.dtype, ...]]) -> bytes:
    """Dtype and rank of the rows, and the dtypes of the parts -> the graph that lays the parts side by side.

    Inputs: part_0, part_1, ... (texts, ..., C of each); row (N,) int64, the text of each row; zeroed (N,) bool, which
    rows are zeros. Outputs: conditioning (N, ..., C of all); for each part check_<i>, a scalar: 0, or NaN when one of
    its numbers is not finite."""
    dtype, rank, parts = what
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
        "kept = Where (zeroed_column, zero, rows)",
        f"conditioning = {_cast(dtype)} (kept)",
    ]
    inputs = [f"{_type(part)}[] part_{i}" for i, part in enumerate(parts)]
    outputs = [f"{_type(dtype)}[] conditioning", *(f"float check_{i}" for i in range(len(parts)))]
    return _model([*inputs, "int64[n] row", "bool[n] zeroed"], outputs, lines)


def spread(dtypes: tuple[tuple[str, np.dtype], ...]) -> bytes:
    """Inputs: each name (rows, ...), and `row` (N,) int64. Outputs: every_<name> (N, ...), the rows as `row` says."""
    named = [(identifier(name), _type(dtype)) for name, dtype in dtypes]
    lines = [f"every_{name} = Gather <axis = 0> ({name}, row)" for name, _ in named]
    inputs = ["int64[n] row", *(f"{dtype}[] {name}" for name, dtype in named)]
    return _model(inputs, [f"{dtype}[] every_{name}" for name, dtype in named], lines)


def total(what: tuple[int, tuple[tuple[str, np.dtype], ...]]) -> bytes:
    """Count and named dtypes -> the graph of each <name> = <name>_0 + <name>_1 + ..., in float32 sums."""
    count, named = what
    inputs, outputs, lines = [], [], []
    for name, dtype in named:
        inputs += [f"{_type(dtype)}[] {name}_{i}" for i in range(count)]
        outputs.append(f"{_type(dtype)}[] {name}")
        lines += [f"wide_{name}_{i} = Cast <to = 1> ({name}_{i})" for i in range(count)]
        lines.append(f"sum_{name} = Sum ({', '.join(f'wide_{name}_{i}' for i in range(count))})")
        lines.append(f"{name} = {_cast(dtype)} (sum_{name})")
    return _model(inputs, outputs, lines)


@dataclass(frozen=True)
class Between:
    """What `between` does, beside the schedule.

    `sample`: dtype of the UNet's input and output. `timestep`: dtype of its input of that name, None where a hoisted
    UNet has none; `scalar`: it has no axis. `by_step`: dtypes of other inputs that change with the step. `first`:
    before the first step, with nothing predicted yet. `window`: steps whose latents and predictions are read. `scaled`:
    whether a step's input is scaled. `guided`: classifier-free guidance of 2B rows. `rescaled`: it keeps some of the
    positive prediction's deviation (Lin et al., 2023, section 3.4). `draws`: random numbers of a step. `channels`:
    whether constant channels go behind the latents'. `kept`: whether a mask keeps a picture. `controls`: of each
    ControlNet the dtype of its scale. `split`: the two sides of guidance are predicted apart.
    """

    sample: np.dtype
    timestep: np.dtype | None
    scalar: bool = False
    by_step: tuple[tuple[str, np.dtype], ...] = ()
    first: bool = False
    window: int = 1
    scaled: bool = True
    guided: bool = True
    rescaled: bool = False
    draws: int = 0
    channels: bool = False
    kept: bool = False
    controls: tuple[np.dtype, ...] = ()
    split: bool = False

    @property
    def kinds(self) -> int:
        """K, of what a step sums up: its latents, and its prediction, or the negative and the positive one, whose
        factors hold the guidance."""
        return 3 if self.guided and not self.rescaled else 2


def between(what: Between) -> bytes:
    """The graph between two UNet calls.

    Inputs, B images of (C, h, w) latents, T steps, K kinds, W steps of a window, D draws of a step and S of all of
    them, float32 where no other type is named:
        index (1,) int64: steps made;  scales, timesteps (T + 1,);  place (T + 1, rows) int64, every_<name> (.., ...)
        with W > 1: history (W, K, B, C, h, w): of step i at place i modulo W
        before the first step: start (B, C, h, w); else
        last_latents (B, C, h, w), noise (rows, C, h, w) in the UNet's type (with `split` negative_noise and
        positive_noise of B rows each);  weights (T + 1, W K), all factors of the latents after so many steps, and
        with W > 1 slots (T + 1, W) bool, the place of that step;  with D > 0 draws (S, B, C, h, w), drawn (T + 1, D)
        int64 and drawn_weights (T + 1, D), which with W = 1 are the last columns of `weights`
        with `rescaled` guidance, rescale (1,);  with `kept` picture, picture_noise (B, C, h, w), mask (B, 1, h, w),
        kept_picture and kept_noise (T + 1,): outside the mask the latents of step i are
        kept_picture[i] picture + kept_noise[i] noise
        with `channels`: channels (B, C', h, w); for each of `controls` scales_<i> (T + 1,)
    Outputs: index_out, latents (B, C, h, w), sample (rows, C + C', h, w), timestep (1,) or (), each <name>,
        conditioning_scale_<i> (1,), with W > 1 history_out.
    """
    inputs, outputs = ["int64[1] index"], ["int64[1] index_out", "float[b,c,h,w] latents"]
    lines = ["front = Constant <value_ints = [0]> ()", "one = Constant <value_ints = [1]> ()"]
    if what.window > 1:
        inputs.append("float[window,kinds,b,c,h,w] history")
        outputs.append("float[window,kinds,b,c,h,w] history_out")
    lines += _start(what, inputs) if what.first else _step(what, inputs)
    rows = "latents"
    if what.scaled:
        inputs.append("float[t1] scales")
        lines += ["scale = Gather <axis = 0> (scales, index_out)", "scaled = Mul (latents, scale)"]
        rows = "scaled"
    if what.channels:
        inputs.append("float[b,k,h,w] channels")
        lines.append(f"wide = Concat <axis = 1> ({rows}, channels)")
        rows = "wide"
    twice = what.guided and not what.split
    outputs.append(f"{_type(what.sample)}[] sample")
    lines.append(f"{'half' if twice else 'sample'} = {_cast(what.sample)} ({rows})")
    lines += ["sample = Concat <axis = 0> (half, half)"] if twice else []
    _time(what, inputs, outputs, lines)
    return _model(inputs, outputs, lines)


def _time(what: Between, inputs: list[str], outputs: list[str], lines: list[str]) -> None:
    """What else the next step reads: the timestep, rows of time embeddings, scales of ControlNets."""
    if what.timestep is not None:
        inputs.append("float[t1] timesteps")
        outputs.append(f"{_type(what.timestep)}[] timestep")
        lines += ["time = Gather <axis = 0> (timesteps, index_out)"]
        lines += ["only_time = Squeeze (time, front)"] if what.scalar else []
        lines += [f"timestep = {_cast(what.timestep)} ({'only_time' if what.scalar else 'time'})"]
    if what.by_step:
        inputs.append("int64[t1,rows] place")
        lines += ["scalar = Squeeze (index_out, front)", "places = Gather <axis = 0> (place, scalar)"]
    for number, dtype in enumerate(what.controls):
        inputs.append(f"float[t1] scales_{number}")
        outputs.append(f"{_type(dtype)}[] conditioning_scale_{number}")
        lines.append(f"factor_{number} = Gather <axis = 0> (scales_{number}, index_out)")
        lines.append(f"conditioning_scale_{number} = {_cast(dtype)} (factor_{number})")
    for name, dtype in what.by_step:
        inputs.append(f"{_type(dtype)}[] every_{identifier(name)}")
        outputs.append(f"{_type(dtype)}[] {identifier(name)}")
        lines.append(f"{identifier(name)} = Gather <axis = 0> (every_{identifier(name)}, places)")


def _start(what: Between, inputs: list[str]) -> list[str]:
    """latents, index_out and history_out, zeros, before the first step."""
    inputs.append("float[b,c,h,w] start")
    lines = ["latents = Identity (start)", "index_out = Sub (index, index)"]
    if what.window > 1:
        lines += ["shape = Shape (history)", "history_out = ConstantOfShape (shape)"]
    return lines


def _step(what: Between, inputs: list[str]) -> list[str]:
    """latents, index_out and history_out after a step: what was read and predicted takes its place, and all that the
    scheduler knows is summed up."""
    inputs += ["float[b,c,h,w] last_latents", "float[t1,n] weights"]
    lines = [
        "index_out = Add (index, one)",
        "before = Unsqueeze (last_latents, front)",
        *_prediction(what, inputs),
        "row = Gather <axis = 0> (weights, index_out)",
        "each = Constant <value_ints = [-1, 1, 1, 1, 1]> ()",
    ]
    if what.draws:
        inputs += ["float[s,b,c,h,w] draws", "int64[t1,d] drawn"]
        lines += [
            "which = Gather <axis = 0> (drawn, index_out)",
            "only_which = Squeeze (which, front)",
            "random = Gather <axis = 0> (draws, only_which)",
        ]
    now = ["before", "prediction", *(["random"] if what.draws and what.window == 1 else [])]
    lines.append(f"now = Concat <axis = 0> ({', '.join(now)})")
    summed = "summed" if what.kept else "latents"
    if what.window == 1:
        lines += [
            "weights_column = Reshape (row, each)",
            "parts = Mul (now, weights_column)",
            f"{summed} = ReduceSum <keepdims = 0> (parts, front)",
        ]
    else:
        lines += _window(what, inputs, summed)
    return [*lines, *(_kept(inputs) if what.kept else [])]


def _window(what: Between, inputs: list[str], summed: str) -> list[str]:
    """history_out, and the sum over the steps of the window and the draws."""
    inputs.append("bool[t1,window] slots")
    known = "known" if what.draws else summed
    lines = [
        "slot = Gather <axis = 0> (slots, index_out)",
        "slot_shape = Constant <value_ints = [-1, 1, 1, 1, 1, 1]> ()",
        "its_slot = Reshape (slot, slot_shape)",
        "history_out = Where (its_slot, now, history)",
        f"table_shape = Constant <value_ints = [{what.window}, {what.kinds}, 1, 1, 1, 1]> ()",
        "table = Reshape (row, table_shape)",
        "parts = Mul (history_out, table)",
        "steps_and_kinds = Constant <value_ints = [0, 1]> ()",
        f"{known} = ReduceSum <keepdims = 0> (parts, steps_and_kinds)",
    ]
    if what.draws:
        inputs.append("float[t1,d] drawn_weights")
        lines += [
            "drawn_row = Gather <axis = 0> (drawn_weights, index_out)",
            "drawn_column = Reshape (drawn_row, each)",
            "drawn_parts = Mul (random, drawn_column)",
            "drawn_sum = ReduceSum <keepdims = 0> (drawn_parts, front)",
            f"{summed} = Add (known, drawn_sum)",
        ]
    return lines


def _prediction(what: Between, inputs: list[str]) -> list[str]:
    """prediction (K - 1, B, C, h, w), float32."""
    noise = [f"{side}_noise" for side in SIDES] if what.split else ["noise"]
    inputs += [f"{_type(what.sample)}[rows,c,h,w] {name}" for name in noise]
    if what.split:
        lines = [f"{side}_side = Cast <to = 1> ({name})" for side, name in zip(SIDES, noise, strict=True)]
        lines += [f"{side} = Unsqueeze ({side}_side, front)" for side in SIDES]
        lines += ["prediction = Concat <axis = 0> (negative, positive)"] if not what.rescaled else []
    else:
        lines = ["wide_noise = Cast <to = 1> (noise)"]
        lines.append(f"{'rows' if what.guided else 'prediction'} = Unsqueeze (wide_noise, front)")
        if what.guided:
            sides = "sides" if what.rescaled else "prediction"
            lines += ["apart = Constant <value_ints = [2, -1, 0, 0, 0]> ()", f"{sides} = Reshape (rows, apart)"]
            lines += ["negative, positive = Split <axis = 0, num_outputs = 2> (sides)"] if what.rescaled else []
    if what.rescaled:
        inputs += ["float[1] guidance", "float[1] rescale"]
        lines += [
            "difference = Sub (positive, negative)",
            "push = Mul (guidance, difference)",
            "guided = Add (negative, push)",
            *_rescale(),
        ]
    return lines


def _kept(inputs: list[str]) -> list[str]:
    """latents: those summed up inside the mask, the noisy picture outside."""
    inputs += ["float[b,c,h,w] picture", "float[b,c,h,w] picture_noise", "float[b,1,h,w] mask"]
    inputs += ["float[t1] kept_picture", "float[t1] kept_noise"]
    return [
        "picture_factor = Gather <axis = 0> (kept_picture, index_out)",
        "noise_factor = Gather <axis = 0> (kept_noise, index_out)",
        "picture_part = Mul (picture, picture_factor)",
        "noise_part = Mul (picture_noise, noise_factor)",
        "kept = Add (picture_part, noise_part)",
        "whole = Constant <value = float[1] {1.0}> ()",
        "outside = Sub (whole, mask)",
        "kept_part = Mul (outside, kept)",
        "summed_part = Mul (mask, summed)",
        "latents = Add (kept_part, summed_part)",
    ]


def _rescale() -> list[str]:
    """prediction: `guided` (1, B, C, h, w) with some of the deviation of `positive`, image by image."""
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


def finish(dtype: np.dtype) -> bytes:
    """latents (B, C, h, w), factor and mean (1, C or 1, 1, 1), float32 -> latent_sample in `dtype`, and latents_check,
    a scalar: 0, or NaN when a latent is not finite."""
    lines = [
        "scaled = Mul (latents, factor)",
        "shifted = Add (scaled, mean)",
        f"latent_sample = {_cast(dtype)} (shifted)",
        "rest = Sub (latents, latents)",
        "latents_check = ReduceSum <keepdims = 0> (rest)",
    ]
    inputs = ["float[b,c,h,w] latents", "float[one,k,one,one] factor", "float[one,k,one,one] mean"]
    return _model(inputs, [f"{_type(dtype)}[] latent_sample", "float latents_check"], lines)


def picture(dtype: np.dtype) -> bytes:
    """sample (B, 3, H, W) in `dtype`, about -1..1 -> image (B, H, W, 3) uint8, rounded as diffusers rounds, and
    image_check, a scalar: 0, or NaN when a pixel is not finite."""
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
        f"bytes = Cast <to = {onnx.TensorProto.UINT8}> (rounded)",
        "image = Transpose <perm = [0, 2, 3, 1]> (bytes)",
    ]
    return _model([f"{_type(dtype)}[b,c,h,w] sample"], ["uint8[] image", "float image_check"], lines)
