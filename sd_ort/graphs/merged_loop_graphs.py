"""Guidance and scheduler graphs of a merged pipeline, for linear schedulers (see `checkpoints.schedule`).

They share the tensor `history` (T + 1, B, C, h, w) float32: the initial latents, then the prediction of each step.
    INIT_HISTORY       latents -> history with zeros for the predictions
    LATENTS            history, index -> the latents before step `index`: a weighted sum over history
    UNET_INPUT         latents, index -> the scaled sample and the timestep
    DUPLICATE_ROWS     sample -> the UNet's batch of 2B with guidance
    APPLY_GUIDANCE     the UNet's prediction of 2B, negative first -> the guided prediction
    APPEND_PREDICTION  the prediction of step `index` -> history with it, and the next index
Sums are Mul and ReduceSum, not MatMul, which GPUs compute in TF32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx

from sd_ort.core.errors import InputError

if TYPE_CHECKING:
    import onnx_ir as ir

OPSET = 18

INIT_HISTORY = """(float[b, c, h, w] latents, float[t] timesteps) => (float[t1, b, c, h, w] history) {
    steps = Shape (timesteps)
    image = Shape (latents)
    shape = Concat <axis = 0> (steps, image)
    later = ConstantOfShape (shape)
    front = Constant <value_ints = [0]> ()
    first = Unsqueeze (latents, front)
    history = Concat <axis = 0> (first, later)
}"""
LATENTS = """(float[t1, b, c, h, w] history, int64[1] index, float[t1, t1] weights) => (float[b, c, h, w] latents) {
    row = Gather <axis = 0> (weights, index)
    column_shape = Constant <value_ints = [-1, 1, 1, 1, 1]> ()
    column = Reshape (row, column_shape)
    parts = Mul (history, column)
    front = Constant <value_ints = [0]> ()
    latents = ReduceSum <keepdims = 0> (parts, front)
}"""
UNET_INPUT = """(float[b, c, h, w] latents, int64[1] index, float[t] scales, float[t] timesteps)
        => (float[b, c, h, w] sample, float[1] timestep) {
    scale = Gather <axis = 0> (scales, index)
    sample = Mul (latents, scale)
    timestep = Gather <axis = 0> (timesteps, index)
}"""
DUPLICATE_ROWS = """(float[b, c, h, w] sample) => (float[rows, c, h, w] rows) {
    rows = Concat <axis = 0> (sample, sample)
}"""
APPLY_GUIDANCE = """(float[rows, c, h, w] noise, float[1] guidance) => (float[b, c, h, w] guided) {
    negative, positive = Split <axis = 0, num_outputs = 2> (noise)
    difference = Sub (positive, negative)
    step = Mul (guidance, difference)
    guided = Add (negative, step)
}"""
# Where inserts the prediction: ONNX Runtime's ScatterND writes it with a single thread, 0.6 ms on an H200.
APPEND_PREDICTION = """(float[b, c, h, w] prediction, float[t1, b, c, h, w] history, int64[1] index)
        => (float[t1, b, c, h, w] history_out, int64[1] index_out) {
    front = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    begin = Constant <value_int = 0> ()
    step = Constant <value_int = 1> ()
    count = Shape <start = 0, end = 1> (history)
    end = Squeeze (count, front)
    positions = Range (begin, end, step)
    update = Unsqueeze (prediction, front)
    index_out = Add (index, one)
    is_position = Equal (positions, index_out)
    column = Constant <value_ints = [-1, 1, 1, 1, 1]> ()
    slot = Reshape (is_position, column)
    history_out = Where (slot, update, history)
}"""


def parse_graph(text: str, opset: int) -> ir.Model:
    """Return one of the graphs above as a model of `opset`. Raises InputError if `opset` is below OPSET."""
    if opset < OPSET:
        raise InputError(f"the graphs have opset {opset}, below {OPSET}: optimize them first, or export them again.")
    import onnx_ir as ir

    return ir.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]>\nstep {text}'))
