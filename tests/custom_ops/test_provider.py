"""Our execution provider on the host vendor: whole components, captured runs, threads, faults."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from provider_sessions import assigned_operators, session_of, single_node_model

from fusion_passes.operators import function_bodies
from scripts.fixtures import graph_fixtures
from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import MODEL
from sd_ort.optimize.optimizer import optimize_component
from sd_ort.optimize.targets import TARGETS
from sd_ort.runtime.bound_run import GpuGraphModel
from sd_ort.runtime.providers import provider_named
from sd_ort.runtime.session import OrtModel, SessionOptions, create_session

VENDOR = 0x1D05  # of the host vendor's memory
SIZES = {"batch": 2, "height": 16, "width": 16, "sequence": 77, "height*8": 64, "width*8": 64}
BOUND = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 6e-2}  # largest difference over the largest number
COMPONENTS = [
    "sd15-tiny-dynamo-20.unet",
    "sd15-tiny-dynamo-20.vae_decoder",
    "sd15-tiny-dynamo-20.vae_encoder",
    "sd15-tiny-dynamo-20.text_encoder",
]
# What ONNX Runtime keeps on the CPU: arithmetic on shapes, and the text encoder's on token ids and positions.
SHAPES = {"Concat", "Gather", "Unsqueeze", "Squeeze", "Slice", "Range", "Add", "Mul"}
TOKENS = {"ArgMax", "LessOrEqual", "Expand", "Cast", "Trilu", "Equal"}


def random_arrays(session: ort.InferenceSession, sizes: Mapping[str, int] = SIZES) -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    arrays = {}
    for value in session.get_inputs():
        shape = [size if isinstance(size, int) else sizes[size] for size in value.shape]
        if value.type == "tensor(int64)":
            arrays[value.name] = np.arange(np.prod(shape)).reshape(shape) % 500 + 1
        else:
            arrays[value.name] = random.normal(size=shape).astype(np.float32)
    return arrays


def as_declared(session: ort.InferenceSession, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    model = OrtModel(session)
    return {name: array.astype(model.dtype(name)) for name, array in arrays.items()}


def max_relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(actual.astype(np.float64) - expected).max() / np.abs(expected).max())


@cache
def lowered(folder: Path, name: str, dtype: str) -> Path:
    """The component, fused and lowered for our provider."""
    component = name.rsplit(".", 1)[1]
    raw = folder / name / "raw"
    if not raw.is_dir():
        graph_fixtures.make_folder(raw, name)
    path = folder / name / dtype / component / MODEL
    optimize_component(raw / component / MODEL, path, TARGETS["gpu"], dtype, calibrate=False)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("provider")


def float32_outside(path: Path) -> None:
    """Put Casts around a bfloat16 graph, in place: NumPy has no such type."""
    model = onnx.load(path, load_external_data=False)
    nodes = model.graph.node
    for values, are_inputs in ((model.graph.input, True), (model.graph.output, False)):
        for value in values:
            if value.type.tensor_type.elem_type != TensorProto.BFLOAT16:
                continue
            inner, outer = value.name, f"{value.name}.float32"
            ends, to = ((outer, inner), TensorProto.BFLOAT16) if are_inputs else ((inner, outer), TensorProto.FLOAT)
            nodes.insert(0 if are_inputs else len(nodes), helper.make_node("Cast", ends[:1], ends[1:], to=to))
            value.name, value.type.tensor_type.elem_type = outer, TensorProto.FLOAT
    onnx.save(model, path)


def test_bfloat16(provider: str, folder: Path) -> None:
    name = COMPONENTS[0]
    model = lowered(folder, name, "bfloat16")
    float32_outside(model)
    raw = ort.InferenceSession(str(folder / name / "raw" / "unet" / MODEL))
    session = session_of(model, provider)
    arrays = random_arrays(raw)
    fed = {value.name: arrays[value.name.removesuffix(".float32")] for value in session.get_inputs()}
    assert max_relative_error(session.run(None, fed)[0], raw.run(None, arrays)[0]) < BOUND["bfloat16"]
    assert assigned_operators(session).get("CPUExecutionProvider", Counter()).keys() <= SHAPES


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in COMPONENTS[:2] for dtype in ("float32", "float16")),
        (COMPONENTS[2], "float16"),
        (COMPONENTS[3], "float32"),
    ],
)
def test_complete_component(provider: str, folder: Path, name: str, dtype: str) -> None:
    model = lowered(folder, name, dtype)
    raw = ort.InferenceSession(str(folder / name / "raw" / model.parent.name / MODEL))
    session = session_of(model, provider)
    arrays = random_arrays(raw)
    expected = raw.run(None, arrays)
    for actual, right in zip(session.run(None, as_declared(session, arrays)), expected, strict=True):
        assert max_relative_error(actual, right) < BOUND[dtype]
    elsewhere = set(assigned_operators(session).get("CPUExecutionProvider", ()))
    assert elsewhere <= SHAPES | (TOKENS if "text_encoder" in name else set())
    if "text_encoder" not in name:
        assert not [op for op in assigned_operators(session)["SdOrtSimulated"] if op.startswith("Memcpy")]


@pytest.mark.parametrize("batch", [1, 3])
def test_operators_of_transformers(provider: str, batch: int) -> None:
    """A gated residual, its norm and the rotary embedding behind it run on the device, with the bodies' results."""
    model = ir.from_onnx_text("""<ir_version: 10, opset_import: ["" : 23, "sd_ort" : 1]>
        g (float[B,S,24] x, float[B,S,24] r, float[B,1,24] scale, float[B,1,24] gate, float[S,4] c, float[S,4] s)
            => (float[B,S,24] y, float[B,S,24] total) <int64[1] first = {0}> {
            n, total = sd_ort.AdaptiveNorm <epsilon = 0.01, rms = 1> (x, scale, , gate, r)
            y = sd_ort.RotaryEmbedding <num_heads = 3, interleaved = 1> (n, first, c, s)
        }""")
    function_bodies.attach(model, list(model.graph))
    proto = ir.to_proto(model).SerializeToString()
    session, bodies = session_of(proto, provider), ort.InferenceSession(proto, providers=["CPUExecutionProvider"])
    arrays = random_arrays(bodies, {"B": batch, "S": 7})
    for actual, expected in zip(session.run(None, arrays), bodies.run(None, arrays), strict=True):
        assert max_relative_error(actual, expected) < BOUND["float32"]
    assert assigned_operators(session) == {"SdOrtSimulated": Counter(AdaptiveNorm=1, RotaryEmbedding=1)}


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_patches_become_pixels(provider: str, mode: str, dtype: str) -> None:
    """As FLUX.2's decoder begins. A mask of float tokens, as Z-Image's, is compared on the device too."""
    proto = ir.to_proto(
        ir.from_onnx_text(f"""<ir_version: 10, opset_import: ["" : 20]>
        g ({dtype}[B,12,H,W] x, {dtype}[1] bound) => ({dtype}[B,3,a,b] y, bool[B,12,H,W] above) {{
            y = DepthToSpace <blocksize = 2, mode = "{mode}"> (x)
            above = Greater (x, bound)
        }}""")
    ).SerializeToString()
    session, cpu = session_of(proto, provider), ort.InferenceSession(proto, providers=["CPUExecutionProvider"])
    arrays = as_declared(session, random_arrays(cpu, {"B": 2, "H": 3, "W": 5}))
    for actual, expected in zip(session.run(None, arrays), cpu.run(None, arrays), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert assigned_operators(session) == {"SdOrtSimulated": Counter(DepthToSpace=1, Greater=1)}


@pytest.mark.parametrize("text", [0, 3])
def test_heads_of_transformers(provider: str, text: int) -> None:
    """Heads of one stream are written over their input, those of two to a tensor of both."""
    other = ("float[B,T,2,3,8] other,", "other, w, w, w, w, c, s") if text else ("", ", w, w, , , c, s")
    model = ir.from_onnx_text(f"""<ir_version: 10, opset_import: ["" : 23, "sd_ort" : 1]>
        g (float[B,S,2,3,8] x, {other[0]} float[8] w, float[L,4] c, float[L,4] s) => (float[B,L,2,3,8] y) {{
            q = Tanh (x)
            y = sd_ort.RotaryQkv <epsilon = 0.01, interleaved = 1> (q, {other[1]})
        }}""")
    function_bodies.attach(model, [node for node in model.graph if node.op_type == "RotaryQkv"])
    proto = ir.to_proto(model).SerializeToString()
    session, bodies = session_of(proto, provider), ort.InferenceSession(proto, providers=["CPUExecutionProvider"])
    arrays = random_arrays(bodies, {"B": 2, "S": 5, "T": text, "L": 5 + text})
    for _ in range(2):
        (actual,), (expected,) = session.run(None, arrays), bodies.run(None, arrays)
        assert max_relative_error(actual, expected) < BOUND["float32"]
    assert assigned_operators(session) == {"SdOrtSimulated": Counter(Tanh=1, RotaryQkv=1)}


def test_changing_shapes(provider: str, folder: Path) -> None:
    name = COMPONENTS[0]
    session = session_of(lowered(folder, name, "float32"), provider)
    raw = ort.InferenceSession(str(folder / name / "raw" / "unet" / MODEL))
    for size, batch in ((8, 1), (16, 2), (8, 3), (16, 1)):
        arrays = random_arrays(raw, {**SIZES, "height": size, "width": 2 * size, "batch": batch})
        assert max_relative_error(session.run(None, arrays)[0], raw.run(None, arrays)[0]) < BOUND["float32"]


class Bound:
    """Inputs and an output of a session at fixed addresses."""

    def __init__(self, session: ort.InferenceSession, arrays: Mapping[str, np.ndarray], number: int) -> None:
        self.session, self.number = session, number
        make = ort.OrtValue.ortvalue_from_numpy
        self.inputs = {name: make(array, "gpu", 0, VENDOR) for name, array in arrays.items()}
        self.output = make(np.zeros_like(arrays["sample"]), "gpu", 0, VENDOR)
        self.binding = session.io_binding()
        for name, value in self.inputs.items():
            self.binding.bind_ortvalue_input(name, value)
        self.binding.bind_ortvalue_output(session.get_outputs()[0].name, self.output)

    def run(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        for name, array in arrays.items():
            self.inputs[name].update_inplace(array)
        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(self.number))
        self.session.run_with_iobinding(self.binding, options)
        return np.array(self.output.numpy())


def test_foreign_memory_is_read_in_place(provider: str) -> None:
    """Bound by its address, as what a wheel with a CUDA provider of its own made is: each run sees what is in it then,
    not what was when it was bound."""
    session = session_of(single_node_model("Neg"), provider)
    make = ort.OrtValue.ortvalue_from_numpy
    x, y = (make(np.zeros((2, 3), np.float32), "gpu", 0, VENDOR) for _ in range(2))
    binding = session.io_binding()
    memory = ort.OrtDevice.make("gpu", 0, VENDOR)._get_c_device()
    for name, value, bind in (("x", x, binding._iobinding.bind_input), ("y", y, binding._iobinding.bind_output)):
        bind(name, memory, np.float32, [2, 3], value.data_ptr())
    for number in (1, 2):
        x.update_inplace(np.full((2, 3), number, np.float32))
        session.run_with_iobinding(binding)
        np.testing.assert_array_equal(y.numpy(), -number)


def test_captured_runs(provider: str, folder: Path, tmp_path: Path) -> None:
    """Two shapes, each captured and replayed on new numbers: ONNX Runtime runs a kernel twice a shape, not more."""
    model = lowered(folder, COMPONENTS[0], "float16")
    plain = session_of(model, provider)
    session = session_of(model, provider, {"graph": "1"}, tmp_path / "profile")
    for number, size in enumerate((16, 8)):
        sizes = {**SIZES, "height": size, "width": size}
        arrays = as_declared(plain, random_arrays(plain, sizes))
        bound = Bound(session, arrays, number)
        for scale in (1, 2, -1):
            arrays["sample"] = (arrays["sample"] * scale).astype(np.float16)
            np.testing.assert_array_equal(bound.run(arrays), plain.run(None, arrays)[0])
    events = json.loads(Path(session.end_profiling()).read_text())
    kernels = [e for e in events if e.get("cat") == "Kernel"]
    assert (
        len(kernels) == 2 * assigned_operators(session)["SdOrtSimulated"].total()
    )  # the device's time, of runs that were not captured
    norms = [e for e in events if e.get("cat") == "Node" and e.get("args", {}).get("op_name") == "GroupNorm"]
    assert len(norms) == 2 * 2 * assigned_operators(session)["SdOrtSimulated"]["GroupNorm"]


def test_two_sessions_two_threads(provider: str, folder: Path) -> None:
    model = lowered(folder, COMPONENTS[0], "float32")
    sessions = [session_of(model, provider) for _ in range(2)]
    arrays = [random_arrays(sessions[0], {**SIZES, "batch": batch}) for batch in (1, 2)]
    expected = [sessions[0].run(None, each)[0] for each in arrays]
    wrong: list[str] = []

    def work(thread: int) -> None:
        for turn in range(4):
            which, session = (thread + turn) % 2, sessions[turn % 2]
            if not np.array_equal(session.run(None, arrays[which])[0], expected[which]):
                wrong.append(f"thread {thread}, turn {turn}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_no_more_memory(provider: str, folder: Path) -> None:
    """A limit that the weights fit in, and a large image does not; the session goes on with a small one."""
    session = session_of(
        lowered(folder, "sd15-tiny-dynamo-20.vae_decoder", "float32"), provider, {"memory_limit": "20000000"}
    )
    small_image, large = ({**SIZES, "batch": 1, "height": size, "width": size} for size in (4, 64))
    expected = session.run(None, random_arrays(session, small_image))[0]
    with pytest.raises(Exception, match=r"[Aa]lloc|memory"):
        session.run(None, random_arrays(session, large))
    np.testing.assert_array_equal(session.run(None, random_arrays(session, small_image))[0], expected)


def test_parts_of_any_width_are_concatenated_and_split(provider: str) -> None:
    """Split into more parts than one launch takes, and Concat of them turned around, in elements of 2 and 8 bytes."""
    widths = [*range(1, 38), 8, 16, 24]
    ends = np.cumsum(widths)
    names = [f"p{i}" for i in range(len(widths))]
    for dtype in ("float16", "int64"):
        graph = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 20]>
            g ({dtype}[3, {ends[-1]}, k] x) => ({dtype}[3, {ends[-1]}, k] y)
            <int64[{len(widths)}] widths = {{{", ".join(map(str, widths))}}}> {{
                {", ".join(names)} = Split <axis = 1> (x, widths)
                y = Concat <axis = 1> ({", ".join(reversed(names))})
            }}""")
        session = session_of(graph.SerializeToString(), provider)
        assert assigned_operators(session)["SdOrtSimulated"] == Counter(Split=1, Concat=1)
        for k in (1, 8):
            x = np.arange(3 * ends[-1] * k).reshape(3, -1, k).astype(dtype)
            expected = np.concatenate(np.split(x, ends[:-1], axis=1)[::-1], axis=1)
            np.testing.assert_array_equal(session.run(None, {"x": x})[0], expected)


def test_large_weights_are_complete(provider: str, tmp_path: Path) -> None:
    """In pieces by several threads, the last piece a smaller one; from a file, as those of a folder."""
    weight = np.random.default_rng(0).normal(size=1_700_001).astype(np.float32)
    graph = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20]>
        g (float[1] x) => (float[n] y) { y = Add (x, weight) }""")
    graph.graph.initializer.append(onnx.numpy_helper.from_array(weight, "weight"))
    onnx.save(graph, tmp_path / MODEL, save_as_external_data=True, location="data")
    for _ in range(2):  # the second time its threads and memory are there
        session = session_of(tmp_path / MODEL, provider)
        np.testing.assert_array_equal(session.run(None, {"x": np.zeros(1, np.float32)})[0], weight)


def test_unread_sum_is_not_computed(provider: str) -> None:
    """11 MiB hold an image and its normalization, 4 each, and with the sum they do not."""
    graph = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20, "sd_ort": 1]>
        g (float[1, 1024, 32, 32] x) => (float[1, 1024, 32, 32] y)
        <float[32] gamma, float[32] beta, float[1, 1, 1, 32] skip> {
            y, sum = sd_ort.SkipGroupNorm <groups = 4, activation = 0, channels_last = 1> (x, gamma, beta, skip)
        }
        <opset_import: ["": 20], domain: "sd_ort">
        SkipGroupNorm <groups, activation, channels_last> (x, gamma, beta, skip) => (y, sum) {
            sum = Add (x, skip)
            y = Identity (sum)
        }""")
    for name, value in (("gamma", np.ones(32)), ("beta", np.zeros(32)), ("skip", np.zeros((1, 1, 1, 32)))):
        graph.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    session = session_of(graph.SerializeToString(), provider, {"memory_limit": str(11 << 20)})
    x = np.random.default_rng(0).normal(size=(1, 1024, 32, 32)).astype(np.float32)
    groups = x.reshape(1, -1, 4, 8)
    expected = (groups - groups.mean((1, 3), keepdims=True)) / groups.std((1, 3), keepdims=True)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected.reshape(x.shape), atol=1e-4)
    graph.graph.output.append(helper.make_tensor_value_info("sum", TensorProto.FLOAT, [1, 1024, 32, 32]))
    session = session_of(graph.SerializeToString(), provider, {"memory_limit": str(11 << 20)})
    with pytest.raises(Exception, match=r"[Aa]lloc|memory"):
        session.run(None, {"x": x})


@pytest.mark.parametrize("tuning", ["0", "1"])
def test_a_norm_is_written_over_what_nobody_else_reads(provider: str, tuning: str) -> None:
    """11 MiB hold an image of 8, its normalization in the same place, and 1 that it was made of; the tuner, which runs
    a kernel again and again, gives the image back."""
    graph = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20, "sd_ort": 1]>
        g (float[1, 1024, 32, 8] x) => (float[1, 1, 1, 64] y)
        <float[64] gamma, float[64] beta, int64[2] axes = {1, 2}> {
            n = Concat <axis = 3> (x, x, x, x, x, x, x, x)
            z = sd_ort.GroupNorm <groups = 4, activation = 0, channels_last = 1> (n, gamma, beta)
            y = ReduceMax (z, axes)
        }
        <opset_import: ["": 20], domain: "sd_ort">
        GroupNorm <groups, activation, channels_last> (x, gamma, beta) => (y) { y = Identity (x) }""")
    for name, value in (("gamma", np.ones(64)), ("beta", np.zeros(64))):
        graph.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    session = session_of(graph.SerializeToString(), provider, {"memory_limit": str(11 << 20), "tuning": tuning})
    x = np.random.default_rng(0).normal(size=(1, 1024, 32, 8)).astype(np.float32)
    groups = np.concatenate([x] * 8, 3).reshape(1, -1, 4, 16)
    expected = (groups - groups.mean((1, 3), keepdims=True)) / groups.std((1, 3), keepdims=True)
    for _ in range(2):
        actual = session.run(None, {"x": x})[0]
        np.testing.assert_allclose(actual.ravel(), expected.reshape(-1, 64).max(0), atol=1e-4)


@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_a_layer_with_its_gate_is_the_two_operators(provider: str, dtype: str) -> None:
    """LinearSplitGelu beside the product and the gate that it stands for, of several shapes; wrong ones are told."""
    graph = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 20, "sd_ort": 1]>
        g ({dtype}[N, S, K] x, {dtype}[K, D] w, {dtype}[D] b) => ({dtype}[N, S, H] y, {dtype}[N, S, H] apart) {{
            y = sd_ort.LinearSplitGelu (x, w, b)
            m = sd_ort.LinearAdd (x, w)
            apart = sd_ort.BiasSplitGelu (m, b)
        }}
        <opset_import: ["": 20], domain: "sd_ort"> LinearAdd (x, w) => (y) {{ y = MatMul (x, w) }}
        <opset_import: ["": 20], domain: "sd_ort"> LinearSplitGelu (x, w, b) => (y) {{ y = MatMul (x, w) }}
        <opset_import: ["": 20], domain: "sd_ort"> BiasSplitGelu (x, b) => (y) {{ y = Add (x, b) }}""")
    session = session_of(graph.SerializeToString(), provider)
    assert assigned_operators(session)["SdOrtSimulated"] == Counter(LinearSplitGelu=1, LinearAdd=1, BiasSplitGelu=1)
    random = np.random.default_rng(0)
    kind = np.float16 if dtype == "float16" else np.float32

    def feed(*shape: int, columns: int, bias: int) -> dict[str, np.ndarray]:
        shapes = {"x": shape, "w": (shape[-1], columns), "b": (bias,)}
        return {name: random.normal(size=shape).astype(kind) for name, shape in shapes.items()}

    for shape, columns in (((2, 5, 24), 32), ((1, 3, 7), 6), ((2, 1, 0), 4), ((0, 3, 8), 4)):
        y, apart = session.run(None, feed(*shape, columns=columns, bias=columns))
        assert y.shape == (*shape[:-1], columns // 2)
        np.testing.assert_array_equal(y, apart)
    del graph.graph.node[1:], graph.graph.output[1]
    session = session_of(graph.SerializeToString(), provider)
    for columns, bias, message in ((6, 4, "one element a column"), (5, 5, "even number of columns")):
        with pytest.raises(Exception, match=f"LinearSplitGelu: .*{message}"):
            session.run(None, feed(1, 3, 7, columns=columns, bias=bias))


def test_session_of_the_package(
    provider: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`plugin:PATH` names the provider in the package's own sessions, which miss no op library beside it."""
    monkeypatch.setattr("sd_ort.runtime.op_library.library_path", lambda: None)
    model = lowered(folder, COMPONENTS[0], "float32")
    (model.parent.parent / "model_index.json").write_text("{}")
    session = create_session(model, provider)
    assert session.get_providers()[0] == "SdOrtSimulated"
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []
    with pytest.raises(InputError, match="unknown option 'speed'"):
        create_session(model, provider, SessionOptions(provider_options={"speed": "1"}))


def test_captured_by_the_package(provider: str, folder: Path) -> None:
    """`GpuGraphModel` on our provider's memory: tuned, two shapes, the same numbers as uncaptured."""
    model = lowered(folder, COMPONENTS[0], "float16")
    (model.parent.parent / "model_index.json").write_text("{}")
    plain = OrtModel(create_session(model, provider, SessionOptions(library=False)))
    session = create_session(
        model, provider, SessionOptions(library=False, capture=True, provider_options={"tuning": "1"})
    )
    graph = GpuGraphModel(session, provider_named(provider).device)
    for size in (16, 8, 16):
        arrays = random_arrays(plain.session, {**SIZES, "height": size, "width": size})
        for name, array in graph(**arrays).items():
            np.testing.assert_array_equal(array, plain(**arrays)[name])
