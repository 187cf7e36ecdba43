"""Hoisting of a diffusion transformer: modulation runs once a step, text once a prompt, tokens in every step."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from sd_ort.graphs import hoist

GRAPH = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[batch,image,4] hidden_states, float[batch,text,6] encoder_hidden_states, float[batch,3] pooled_projections,
       float[1] timestep, float[text,2] txt_ids) => (float[batch,image,4] out_hidden_states)
    <float[2] frequencies, float[2,12] wt, float[3,12] wp, float[6,4] we, int64[2] row = {1, 1},
     int64[3] view = {0, 1, 4}, int64[1] last = {9223372036854775807}, int64[1] one = {1}> {
        column = Reshape (timestep, row)  angles = Mul (column, frequencies)  time = MatMul (angles, wt)
        pooled = MatMul (pooled_projections, wp)  sum = Add (time, pooled)
        scale, shift, gate = Split <axis = 1, num_outputs = 3> (sum)
        scales = Reshape (scale, view)  shifts = Reshape (shift, view)
        text = MatMul (encoder_hidden_states, we)  scaled_text = Mul (text, scales)
        joint = Concat <axis = 1> (scaled_text, hidden_states)  shifted = Add (joint, shifts)
        mean = ReduceMean <keepdims = 1> (shifted, one)  rest = Sub (shifted, mean)
        length = Shape <start = 0, end = 1> (txt_ids)  image_part = Slice (rest, length, last, one)
        gates = Reshape (gate, view)  out_hidden_states = Mul (image_part, gates)
    }"""


def built() -> onnx.ModelProto:
    """Return the graph with random weights."""
    model = onnx.parser.parse_model(GRAPH)
    random = np.random.default_rng(0)
    for value in [*model.graph.value_info]:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        weight = onnx.numpy_helper.from_array(random.normal(0, 1, shape).astype(np.float32), value.name)
        model.graph.initializer.append(weight)
    return onnx.shape_inference.infer_shapes(model)


@pytest.fixture(scope="module")
def parts() -> dict[str, ir.Model]:
    return hoist.split(ir.from_proto(built()))


def run(model: onnx.ModelProto, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {i.name: values[i.name] for i in session.get_inputs()}), strict=True))


def test_the_parts_compute_what_the_graph_does(parts: dict[str, ir.Model]) -> None:
    random = np.random.default_rng(1)
    shapes = {"hidden_states": (2, 5, 4), "encoder_hidden_states": (2, 3, 6), "pooled_projections": (2, 3)}
    values = {name: random.normal(0, 1, shape).astype(np.float32) for name, shape in shapes.items()}
    values |= {"timestep": np.array([0.7], np.float32), "txt_ids": np.zeros((3, 2), np.float32)}
    expected = run(built(), values)["out_hidden_states"]
    values["timestep"] = np.repeat(values["timestep"], 2)
    for name in ("prompt", "time", "step"):
        values |= run(ir.to_proto(parts[name]), values)
    np.testing.assert_allclose(values["out_hidden_states"], expected, rtol=1e-5, atol=1e-6)


def test_each_part_has_what_it_alone_depends_on(parts: dict[str, ir.Model]) -> None:
    inputs = {name: {value.name for value in part.graph.inputs} for name, part in parts.items()}
    assert inputs["prompt"] == {"encoder_hidden_states", "pooled_projections"}
    assert inputs["time"] == {"timestep", "pooled"}
    # The size of txt_ids is that of the text; scaled text has a row for every token, so it is no output of `time`.
    assert inputs["step"] == {"hidden_states", "text", hoist.TIME_EMBEDDING}
    assert [value.name for value in parts["time"].graph.outputs] == [hoist.TIME_EMBEDDING]
    weights = {name: set(part.graph.initializers) for name, part in parts.items()}
    assert {"wt", "frequencies"} <= weights["time"]
    assert "wp" in weights["prompt"]
    assert not {"wt", "wp", "we"} & weights["step"]


def test_bfloat16_between_the_parts_is_float32() -> None:
    model = built()
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT and value.name != "timestep":
            value.type.tensor_type.elem_type = onnx.TensorProto.BFLOAT16
    graph = ir.from_proto(model)
    for part in hoist.split(graph).values():
        for value in (*part.graph.inputs, *part.graph.outputs):
            assert value.dtype == ir.DataType.FLOAT, value
