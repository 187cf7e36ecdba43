"""Our execution provider on the host vendor where something is wrong or missing: each fault is told, and ends no
process; nodes that it leaves are given their reason, nodes that it runs their time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from provider_sessions import assigned_operators, session_of, single_node_model

from sd_ort.benchmark import profile
from sd_ort.cli import explain as explain_command
from sd_ort.core.errors import ProviderError
from sd_ort.inspect.node_assignment import assign_nodes
from sd_ort.runtime import providers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speed": "1"}, "unknown option 'speed'"),
        ({"graph": "yes"}, "option graph must be a number from 0 to 1, got 'yes'"),
        ({"tuning": ""}, "option tuning must be a number from 0 to 1, got ''"),
        ({"user_compute_stream": "-5"}, "option user_compute_stream must be a number"),
        ({"device_id": "7"}, "option device_id is 7, and there are 1 devices"),
        ({"memory_limit": "-1"}, "option memory_limit must be a number"),
    ],
)
def test_wrong_options(provider: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(Exception, match=message):
        session_of(single_node_model("Sigmoid"), provider, options)


def test_unsupported_node_runs_on_the_cpu(provider: str) -> None:
    """Softmax over another axis than the last has no kernel; the result is right on the CPU."""
    x = np.random.default_rng(0).normal(size=(2, 5)).astype(np.float32)
    for axis, where in ((-1, "SdOrtSimulated"), (0, "CPUExecutionProvider")):
        session = session_of(single_node_model("Softmax", axis=axis), provider)
        assert assigned_operators(session)[where]["Softmax"] == 1
        weights = np.exp(x) / np.exp(x).sum(axis, keepdims=True)
        np.testing.assert_allclose(session.run(None, {"x": x})[0], weights, rtol=1e-6)


UNSUPPORTED_REASONS = {
    "Softmax": "its axis is not the last",
    "Neg": "X is neither float32, float16 nor bfloat16",
    "LpNormalization": "the provider has no kernel of this operator",
    "Gemm": "A is transposed",
    "MatMul": "an input is a vector or has unknown rank",
    "Resize": "its mode is not nearest with asymmetric coordinates and floor",
    "Pad": "its mode is not constant",
    "Max": "it does not have two inputs",
    "Transpose": "a tensor has more than 8 axes",
    "Gather": "it computes a shape, which stays on the CPU",
}


def test_explain_reports_unsupported_nodes(provider: str, tmp_path: Path) -> None:
    """Reports an unsupported operator, dtype, attribute, form and rank, and no supported node."""
    graph = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20]>
        g (float[2,n] x, double[2] d, float[2,3,4] v, float[1,1,1,1,1,1,1,1,2] nine)
            => (float a, double b, float c, float d2, float e, float f, float h, float i, float j, float k, float l)
        <int64[6] pads = {0,1,1,0,1,1}, float[3] scales = {1,2,2}, int64[1] first = {0}, int64[1] minus = {-1}> {
            a = Softmax <axis = 0> (x)
            b = Neg (d)
            c = LpNormalization (x)
            d2 = Gemm <transA = 1> (x, x)
            column = Reshape (x, minus)
            e = MatMul (column, column)
            f = Resize <mode = "linear"> (v, , scales)
            h = Pad <mode = "reflect"> (v, pads)
            i = Max (x, x, x)
            j = Transpose (nine)
            shape = Shape (x)
            rows = Gather (shape, first)
            k = Reshape (x, rows)
            l = Resize <coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"> (v, , scales)
        }""")
    for node in graph.graph.node:
        node.name = f"node_{node.output[0]}"
    onnx.save(graph, tmp_path / "model.onnx")
    ran = CliRunner().invoke(explain_command.command, [str(tmp_path / "model.onnx"), "--provider", provider, "--json"])
    assert ran.exit_code == 0, ran.output
    (entry,) = json.loads(ran.output)["components"].values()
    placement = entry["placement"]
    assert {node["op"]: node["reason"] for node in placement["unassigned_nodes"]} == UNSUPPORTED_REASONS
    assert {node["node"] for node in placement["unassigned_nodes"] if node["op"] == "Resize"} == {"node_f"}
    assert placement["nodes"]["CPUExecutionProvider"] == len(UNSUPPORTED_REASONS)
    text = CliRunner().invoke(explain_command.command, [str(tmp_path / "model.onnx"), "--provider", provider])
    assert "left: 1 Gemm: A is transposed (node_d2)" in text.output


# Nodes and their unsupported reasons; "" if the provider runs the node.
FORMS = {
    "ReduceMean <keepdims = 0> (x, ends)": "its axes are not adjacent",
    "ReduceMax <noop_with_empty_axes = 0> (x, last)": "",
    "ReduceSum (x, axes)": "its axes are not constant",
    "ReduceMin (x)": "",
    "MatMul (p, q)": "",  # both repeat
    "MatMul (p, r)": "",  # one does, and lacks an axis
    "MatMul (r, s)": "",  # one matrix of more axes than the many have
    "MatMul (s, r)": "",
    "Gemm (m, w, bias)": "",
    "Gemm (m, w, number)": "C is a scalar",
    "Gemm (m, w, open)": "C is not a vector of known size",
    "Gemm <transB = 1> (m, row, number)": "",
}


def test_supported_forms_match_the_reasons(provider: str, tmp_path: Path) -> None:
    """Every node has the reason of `FORMS`, so that no node is assigned that would fail when it runs."""
    lines = "\n".join(f"y{index} = {form}" for index, form in enumerate(FORMS))
    outputs = ", ".join(f"float y{index}" for index in range(len(FORMS)))
    graph = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 20]>
        g (float[2,3,4] x, float[2,2,1,3,4] p, float[2,1,5,4,4] q, float[5,4,4] r, float[1,1,1,4,4] s, float[2,4] m,
           float[4,3] w, float[1,4] row, float[3] bias, float[1] number, float[n] open, int64[k] axes) => ({outputs})
        <int64[2] ends = {{0, 2}}, int64[2] last = {{-1, -2}}> {{ {lines} }}""")
    for node in graph.graph.node:
        node.name = node.output[0]
    onnx.save(graph, tmp_path / "model.onnx")
    unassigned = assign_nodes([tmp_path / "model.onnx"], provider)["unassigned_nodes"]
    reasons = dict(zip(FORMS, [""] * len(FORMS), strict=True)) | {
        list(FORMS)[int(node["node"].removeprefix("y"))]: node["reason"] for node in unassigned
    }
    assert reasons == FORMS
    random = np.random.default_rng(0)
    fed = {
        value.name: random.normal(size=[size.dim_value or 3 for size in value.type.tensor_type.shape.dim]).astype("f4")
        for value in graph.graph.input
    } | {"axes": np.array([0, 2])}
    expected = ort.InferenceSession(graph.SerializeToString()).run(None, fed)
    for actual, right in zip(session_of(tmp_path / "model.onnx", provider).run(None, fed), expected, strict=True):
        np.testing.assert_allclose(actual, right, rtol=1e-5, atol=1e-5)


def test_explain_takes_our_providers(provider: str, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(single_node_model("Neg"))
    ran = CliRunner().invoke(explain_command.command, [str(tmp_path / "model.onnx"), "--provider", "cpu"])
    assert (
        str(ran.exception) == "cpu does not say why it leaves a node: give hip, sdcuda, rocm, or plugin:PATH of ours."
    )


def test_time_of_the_device_in_onnxruntimes_profile(provider: str, tmp_path: Path) -> None:
    """An event a node and run, with which `benchmark --profile` replaces the time to launch it."""
    session = session_of(single_node_model("Sigmoid"), provider, profile=tmp_path / "profile")
    for count in (1, 50_000):
        session.run(None, {"x": np.zeros((2, count), np.float32)})
    trace = json.loads(Path(session.end_profiling()).read_text())
    nodes = profile.node_events(trace, 2)
    kernels = [event for event in trace if event.get("cat") == "Kernel"]
    assert [event["name"] for event in kernels] == [node.name for node in nodes]
    assert [int(event["args"]["node_ts"]) for event in kernels] == [node.start for node in nodes]
    events, clock = profile.by_device(nodes, trace)
    assert clock == "device"
    assert [event.duration for event in events] == [float(event["args"]["device_us"]) for event in kernels]
    assert 0 < events[0].duration < events[1].duration
    assert profile.by_device(nodes, []) == (nodes, "nodes")


@pytest.mark.parametrize("graph", ["0", "1"])
def test_a_device_that_disappears(provider: str, graph: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and new sessions say so; what is left of the old ones closes."""
    x = np.ones((2, 3), np.float32)
    session = session_of(single_node_model("Neg"), provider, {"graph": graph})
    session.run(None, {"x": x})
    monkeypatch.setenv("SD_ORT_SIMULATED_LOST", "1")
    for _ in range(2):
        with pytest.raises(Exception, match="the device cannot be used: the device is gone"):
            session.run(None, {"x": x})
    with pytest.raises(Exception, match="the device cannot be used: the device is gone"):
        session_of(single_node_model("Neg"), provider)
    del session
    monkeypatch.delenv("SD_ORT_SIMULATED_LOST")
    np.testing.assert_array_equal(session_of(single_node_model("Neg"), provider).run(None, {"x": x})[0], -x)


def test_missing_libraries_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libsd_ort_ep_hip.so"
    library.write_bytes(b"")
    monkeypatch.setattr(providers, "needed_libraries", lambda path: ["libamdhip64-absent.so.7", "libc.so.6"])
    with pytest.raises(ProviderError, match=r"libsd_ort_ep_hip\.so cannot load libamdhip64-absent\.so\.7: add"):
        providers.plugin_devices(library)


def test_a_missing_blas_library_is_named(
    provider: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The provider runs without it, at a fraction of the speed: that is said, once."""
    providers.warn_of_missing_library(Path(provider.removeprefix("plugin:")))
    assert caplog.messages == []  # the host's products need none
    library = type("Library", (), {"sd_ort_missing_library": staticmethod(lambda: b"libhipblaslt.so.1")})
    monkeypatch.setattr(providers.ctypes, "CDLL", lambda path: library)
    for _ in range(2):
        providers.warn_of_missing_library(Path("libsd_ort_ep_hip.so"))
    assert [message.partition(": ")[0] for message in caplog.messages] == [
        "libsd_ort_ep_hip.so finds no libhipblaslt.so.1"
    ]
