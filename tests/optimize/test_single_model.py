"""ONNX files by themselves, of models that nobody told us about: optimize, explain and verify from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from cli_type import Cli, success
from onnx import TensorProto, helper, numpy_helper

from scripts.fixtures import other_architectures
from sd_ort.checkpoints.synthetic_inputs import SIZES, random_inputs
from sd_ort.core.errors import InputError


# Token ids; sigmas, whose logarithm is taken; times and a text's mask.
@pytest.mark.parametrize("name", ["bert-dynamo-20", "unet-ncsn-dynamo-20", "unet-text-mask-torchscript-17"])
def test_a_foreign_file(sd_ort: Cli, tmp_path: Path, name: str) -> None:
    source, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(other_architectures.load(name), source)
    text = success(sd_ort, "optimize", source, out, "--target", "portable")
    assert "MultiHeadAttention" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.onnx", "out.onnx"]
    text = success(sd_ort, "verify", source, out, "--json")
    rows = json.loads(text)["rows"]
    assert len(rows) == 2
    assert all(row["relative_error"] < 1e-5 for row in rows)


def toy(path: Path, gain: float = 1.0, *, external: bool = False) -> Path:
    """y = (x W) (x V) / 1000, with x of any width in rows, and W times `gain`."""
    shape = ["rows", 4]
    nodes = [helper.make_node("MatMul", ["x", w], [f"x{w}"]) for w in "WV"]
    nodes += [helper.make_node("Mul", ["xW", "xV"], ["product"]), helper.make_node("Mul", ["product", "small"], ["y"])]
    weights = [numpy_helper.from_array(np.float32(1e-3), "small")]
    weights += [
        numpy_helper.from_array(np.full((4, 4), number, np.float32), name) for name, number in (("W", gain), ("V", 1.5))
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
    graph = helper.make_graph(nodes, "toy", values[:1], values[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, path, save_as_external_data=external, location="weights", size_threshold=0)
    return path


def test_float16_is_calibrated_on_the_recorded_runs(sd_ort: Cli, tmp_path: Path) -> None:
    source = toy(tmp_path / "in.onnx")
    np.savez(tmp_path / "small.npz", x=np.full((2, 4), 0.1, np.float32))
    np.savez(tmp_path / "large.npz", **{f"x/{i}": np.full((i + 1, 4), 100.0, np.float32) for i in range(2)})
    text = success(sd_ort, "optimize", source, tmp_path / "a.onnx", "--float16", "--target", "portable", "--inputs",
                           tmp_path / "small.npz")  # fmt: skip
    assert "in: 0 of 4 values exceed 16376 on 1 recorded inputs" in text
    text = success(sd_ort, "optimize", source, tmp_path / "b.onnx", "--float16", "--target", "portable", "--inputs",
                           tmp_path / "large.npz")  # fmt: skip
    assert "in: 1 of 4 values exceed 16376 on 2 recorded inputs; they stay in float32" in text
    assert sd_ort("verify", source, tmp_path / "b.onnx", "--inputs", tmp_path / "large.npz")[0] == 0
    assert sd_ort("verify", source, tmp_path / "a.onnx", "--inputs", tmp_path / "large.npz")[0] == 4


def test_weights_stay_where_they_were(sd_ort: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "any"
    folder.mkdir()
    toy(folder / "any.onnx", external=True)
    assert sd_ort("optimize", folder, tmp_path / "out.onnx")[0] == 0  # a folder that holds one
    assert sorted(path.name for path in tmp_path.iterdir()) == ["any", "out.onnx", "out.onnx.data"]
    assert sd_ort("verify", folder, tmp_path / "out.onnx")[0] == 0
    text = success(sd_ort, "explain", folder)
    assert text.startswith("any\n")


@pytest.mark.parametrize(("command", "words"), [
    (["optimize", "nowhere.onnx", "out.onnx"], "nowhere.onnx is missing"),
    (["verify", "in.onnx", "nowhere.onnx"], "nowhere.onnx is missing"),
    (["optimize", "in.onnx", "in.onnx"], "one folder"),
    (["optimize", "in.onnx", "taken.onnx"], "exists"),
    (["optimize", "in.onnx", "out"], "ends in .onnx"),
    (["optimize", "in.onnx", "folder.onnx"], "ends in .onnx"),
    (["optimize", "in.onnx", "out.onnx", "--hoist"], "one ONNX file"),
    (["optimize", "in.onnx", "out.onnx", "--component", "unet"], "one ONNX file"),
    (["optimize", "in.onnx", "out.onnx", "--config", "x"], "go with a checkpoint"),
    (["optimize", "in.onnx", "out.onnx", "--target", "cuda", "--float16", "--inputs", "other.npz"], "no runs of in"),
    (["verify", "in.onnx", "taken.onnx", "--inputs", "other.npz"], "no runs of in"),
    (["verify", "in.onnx", "folder.onnx"], "give two"),
    (["optimize", "broken.onnx", "out.onnx"], "not an ONNX model"),
    (["optimize", "several", "out.onnx"], "name one .onnx file"),
])  # fmt: skip
def test_what_cannot_be_done(sd_ort: Cli, tmp_path: Path, command: list[str], words: str) -> None:
    toy(tmp_path / "in.onnx")
    toy(tmp_path / "taken.onnx")
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "several").mkdir()
    for name in "ab":
        toy(tmp_path / "several" / f"{name}.onnx")
    (tmp_path / "broken.onnx").write_bytes(b"\xff" * 30)
    np.savez(tmp_path / "other.npz", z=np.ones(3))
    before = sorted(path.name for path in tmp_path.iterdir())
    placed = [str(tmp_path / arg) if not arg.startswith("-") and i and arg not in ("unet", "cuda", "x") else arg
              for i, arg in enumerate(command)]  # fmt: skip
    code, _, err = sd_ort(*placed)
    assert code in (2, 5)
    assert words in err.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_synthetic_inputs_respect_the_graph() -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]>
    g (float[n] sigma, int64[n, s] ids, float[n] t, bool[n] flags, float[n, c] features, int64[n, s] text_mask)
        => (float[n] a, float[n, s, 3] b, float[n] d, bool[n] e, float[n, c] f, int64[n, s] h)
    <float[5, 3] table> {
        a = Log (sigma)    b = Gather (table, ids)   u = Mul (t, t)   d = Sin (u)
        e = Not (flags)    f = Sin (features)        h = Neg (text_mask)
    }"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((5, 3), np.float32), "table"))
    model = ir.from_proto(proto)
    for size in SIZES:
        inputs = random_inputs("any", list(model.graph.inputs), {}, size)
        assert (inputs["sigma"] > 0).all()
        assert set(np.unique(inputs["ids"])) <= set(range(5))
        assert ((inputs["t"] >= 1) & (inputs["t"] < 1000) & (inputs["t"] % 1 == 0)).all()
        assert inputs["flags"].dtype == np.bool_
        assert inputs["features"].min() < 0
        assert set(np.unique(inputs["text_mask"])) <= {0, 1}
        assert inputs["text_mask"].any(axis=1).all()
    lost = ir.Value(name="codes", shape=ir.Shape(["n"]), type=ir.TensorType(ir.DataType.INT64))
    with pytest.raises(InputError, match=r"codes \(INT64\): use --inputs"):
        random_inputs("any", [lost], {}, SIZES[0])


MIXED = '<domain: "my", opset_import: ["" : 20]> Mix (x, w) => (y) { h = Cast <to = 10> (x)  m = MatMul (h, w)' + (
    "  f = Cast <to = 1> (m)  y = Add (f, x) }"
)
BRANCHES = """<ir_version: 8, opset_import: ["" : 16]> g (float[2,4] x, bool c) => (float[2,4] y)
<float[4,4] w = {1,2,3,4,5,6,7,8,1,2,3,4,5,6,7,8}, float[4,4] v = {1,0,3,4,5,6,7,8,1,2,3,4,5,0,7,8}> {
    a = MatMul (x, w)
    b = Sigmoid (a)
    y = If (c) <then_branch = t () => (float[2,4] o) { o = MatMul (b, v) },
                else_branch = e () => (float[2,4] p) { q = Relu (b)  p = MatMul (q, w) }>
}"""


def quantized_lstm() -> onnx.ModelProto:
    """DynamicQuantizeLSTM, which ONNX Runtime has in float32 alone."""
    random, width = np.random.default_rng(0), 4
    weights = {
        "w": random.integers(-99, 99, (1, width, 4 * width)).astype(np.int8),
        "r": random.integers(-99, 99, (1, width, 4 * width)).astype(np.int8),
        "s": np.full(1, 0.01, np.float32), "z": np.zeros(1, np.int8), "axis": np.array([1]),
    }  # fmt: skip
    inputs = ["a", "w", "r", *[""] * 5, "s", "z", "s", "z"]
    nodes = [
        helper.make_node("Mul", ["x", "s"], ["a"]),
        helper.make_node("DynamicQuantizeLSTM", inputs, ["b", "h", "c"], domain="com.microsoft", hidden_size=width),
        helper.make_node("Squeeze", ["b", "axis"], ["y"]),
    ]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", [5, 1, width]), ("y", [5, 1, width]))
    ]
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "lstm", values[:1], values[1:], tensors)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def mixed_function() -> onnx.ModelProto:
    """A function that multiplies in float16 and adds in float32."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in "xy"]
    weight = numpy_helper.from_array(np.eye(4, k=1, dtype=np.float16), "w")
    graph = helper.make_graph([helper.make_node("Mix", ["x", "w"], ["y"], domain="my")], "g", values[:1], values[1:],
                              [weight])  # fmt: skip
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("my", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    model.functions.append(onnx.parser.parse_function(MIXED))
    return model


@pytest.mark.parametrize("options", [(), ("--float16-io",)])
@pytest.mark.parametrize("name", ["branches", "lstm", "function"])
def test_float16_of_graphs_that_are_partly_float32(
    sd_ort: Cli, tmp_path: Path, name: str, options: tuple[str, ...]
) -> None:
    model = {"branches": lambda: onnx.parser.parse_model(BRANCHES), "lstm": quantized_lstm, "function": mixed_function}
    source, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(model[name](), source)
    shape = (5, 1, 4) if name == "lstm" else (2, 4)
    feeds = {"x": np.random.default_rng(1).normal(size=shape).astype(np.float32)}
    np.savez(tmp_path / "in.npz", **feeds, **({"c": np.array(True)} if name == "branches" else {}))
    text = success(sd_ort, "optimize", source, out, "--target", "portable", "--float16", *options)
    assert ("inputs and outputs stay float32" in text) == (not options)
    dtypes = {value.type.tensor_type.elem_type for value in onnx.load(out).graph.output}
    assert dtypes == {TensorProto.FLOAT16 if options else TensorProto.FLOAT}
    success(sd_ort, "verify", source, out, "--inputs", tmp_path / "in.npz", "--tolerance", 2e-3)


def test_float16_io_goes_with_float16_of_one_file(sd_ort: Cli, tmp_path: Path) -> None:
    source = toy(tmp_path / "in.onnx")
    for arguments in (
        (source, "--target", "portable"),
        (source, "--target", "cpu", "--float16"),
        ("demo", "--float16"),
    ):
        code, _, err = sd_ort("optimize", arguments[0], tmp_path / "out.onnx", *arguments[1:], "--float16-io")
        assert code == 2
        assert "--float16-io goes with" in err.splitlines()[-1]


@pytest.mark.parametrize(("target", "options"), [("cpu", []), ("portable", ["--float16"]), ("cuda", ["--float16"])])
def test_a_declared_size_of_minus_one_is_unknown(sd_ort: Cli, tmp_path: Path, target: str, options: list[str]) -> None:
    """As Paddle writes it, in a file of opset 11 whose pool means something else in the opset of fusions."""
    model = onnx.parser.parse_model("""<ir_version: 6, opset_import: ["" : 11]>
        g (float[N,2,H,W] x) => (float[N,2,P,Q] y) {
        a = AveragePool <kernel_shape = [2, 2], strides = [2, 2], pads = [1, 1, 0, 0], ceil_mode = 1,
                         count_include_pad = 1> (x)
        b = Relu (a)  y = Add (a, b) }""")
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = -1
    source, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(model, source)
    np.savez(tmp_path / "in.npz", x=np.random.default_rng(0).normal(size=(2, 2, 5, 7)).astype(np.float32))
    success(sd_ort, "optimize", source, out, "--target", target, *options)
    assert {entry.domain: entry.version for entry in onnx.load(out).opset_import}[""] == 13
    success(sd_ort, "verify", source, out, "--inputs", tmp_path / "in.npz")


POOLS = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,24,9,9] x) => (float[1,24,5,5] y) {
    p = AveragePool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (x)  y = Relu (p)
}"""


@pytest.mark.parametrize(
    ("target", "opset", "activation", "expected"),
    [
        ("cpu", 9, "Relu", 18),
        ("cpu", 17, "Relu", 18),
        ("cpu", 20, "Relu", 21),  # had the slow kernel before
        ("cpu", 20, "Gelu", 21),
        ("portable", 17, "Relu", 21),
    ],
)
def test_average_pools_keep_their_fast_kernel(
    sd_ort: Cli, tmp_path: Path, target: str, opset: int, activation: str, expected: int
) -> None:
    source, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(onnx.parser.parse_model(POOLS.replace("17", str(opset)).replace("Relu", activation)), source)
    success(sd_ort, "optimize", source, out, "--target", target)
    assert {entry.domain: entry.version for entry in onnx.load(out).opset_import}[""] == expected
    success(sd_ort, "verify", source, out)


SPECTRUM = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,1,512] x) => (float[1,8,505] y) {
    s = Conv (x, dft)  t = Mul (s, s)  u = Conv (t, mel)  v = Add (u, tiny)
    l = Log (v)  r = Sigmoid (l)  y = Conv (r, w)
}"""


def test_float16_computes_spectra_in_float32(sd_ort: Cli, tmp_path: Path) -> None:
    """The filters' outputs cancel: their squares have other magnitudes in float16, 1e-10 is 0, and Log amplifies it."""
    model, random = onnx.parser.parse_model(SPECTRUM), np.random.default_rng(0)
    dft = random.normal(size=(8, 1, 8))
    weights = {"dft": dft - dft.mean(-1, keepdims=True), "mel": np.abs(random.normal(size=(8, 8, 1))),
               "w": random.normal(size=(8, 8, 1)), "tiny": np.array(1e-10)}  # fmt: skip
    model.graph.initializer.extend(numpy_helper.from_array(w.astype(np.float32), n) for n, w in weights.items())
    source, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(model, source)
    np.savez(tmp_path / "in.npz", x=(1 + 1e-3 * random.normal(size=(1, 1, 512))).astype(np.float32))
    success(sd_ort, "optimize", source, out, "--target", "portable", "--float16", "--no-calibrate")
    dtypes = {node.op_type: node.inputs[0].dtype for node in ir.load(out).graph}
    assert (dtypes["Log"], dtypes["Sigmoid"]) == (ir.DataType.FLOAT, ir.DataType.FLOAT16)
    success(sd_ort, "verify", source, out, "--inputs", tmp_path / "in.npz")


# mean(x^2) - mean(x)^2 as Flax writes it, or not: another reduction is squared, or no square is averaged.
VARIANCE = """<ir_version: 8, opset_import: ["" : 17]> g (float[2,64] x) => (float[2,64] y) <float[1] e = {1e-6}> {
    SQUARE  s = ReduceMean <axes = [1]> (q)  m = ReduceMean <axes = [1]> (x)  n = REDUCED  v = Sub (s, n)
    b = Add (v, e)  r = Sqrt (b)  c = Sub (x, m)  y = Div (c, r)
}"""


@pytest.mark.parametrize(
    ("square", "reduced", "float32"),
    [
        ("q = Mul (x, x)", "Mul (m, m)", True),
        ("two = Constant <value_float = 2.0> ()  q = Pow (x, two)", "Mul (m, m)", True),
        ("q = Abs (x)", "Mul (m, m)", False),
        ("q = Mul (x, x)", "Abs (m)", False),
    ],
)
def test_float16_computes_variances_of_squares_in_float32(
    sd_ort: Cli, tmp_path: Path, square: str, reduced: str, float32: bool
) -> None:
    model = onnx.parser.parse_model(VARIANCE.replace("SQUARE", square).replace("REDUCED", reduced))
    source, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(model, source)
    x = 10 + np.random.default_rng(0).normal(size=(2, 64))
    np.savez(tmp_path / "in.npz", x=x.astype(np.float16).astype(np.float32))
    success(sd_ort, "optimize", source, out, "--target", "portable", "--float16", "--no-calibrate")
    dtypes = {node.op_type: node.inputs[0].dtype for node in ir.load(out).graph}
    assert dtypes["Sqrt"] == (ir.DataType.FLOAT if float32 else ir.DataType.FLOAT16)
    assert dtypes["Div"] == ir.DataType.FLOAT16
    if float32:
        success(sd_ort, "verify", source, out, "--inputs", tmp_path / "in.npz")


INTEGERS = """<ir_version: 8, opset_import: ["" : 17]> g (float[2,600] x) => (float[2,4] y)
    <float[1] ws = {0.01}, float[4] bias = {-900, 1, 2, 900}, uint8 zero = {128}> {
    q, s, z = DynamicQuantizeLinear (x)  p = MatMulInteger (q, w, z, zero)  t = Mul (s, ws)
    b = Div (bias, t)  f = Floor (b)  i = Cast <to = 6> (f)  sum = Add (p, i)  c = Cast <to = 1> (sum)
    y = Mul (c, t)
}"""


def test_float16_scales_integer_sums_in_float32(sd_ort: Cli, tmp_path: Path) -> None:
    """Sums of 600 products of bytes, and a bias divided by their scale, exceed 65504."""
    model, random = onnx.parser.parse_model(INTEGERS), np.random.default_rng(0)
    weights = random.integers(128, 256, (600, 4)).astype(np.uint8)
    model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    source, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(model, source)
    np.savez(tmp_path / "in.npz", x=np.abs(random.normal(size=(2, 600))).astype(np.float16).astype(np.float32))
    success(sd_ort, "optimize", source, out, "--target", "portable", "--float16", "--no-calibrate")
    assert {v.dtype for node in ir.load(out).graph if node.op_type in ("Div", "Floor") for v in node.inputs} == {
        ir.DataType.FLOAT
    }
    success(sd_ort, "verify", source, out, "--inputs", tmp_path / "in.npz")


def test_float16_keeps_a_large_variance(sd_ort: Cli, tmp_path: Path) -> None:
    """A variance of 1e7 was clamped to 65504, which made the output twelve times larger."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,2,4] x) => (float[1,2,4] y) <float[2] one = {1, 1},
        float[2] mean = {0, 3}, float[2] variance = {1e7, 4e7}> {
        s = Mul (x, t)  n = BatchNormalization (s, one, mean, mean, variance)  y = Mul (n, t)  }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.float32(100), "t"))
    source, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(model, source)
    np.savez(tmp_path / "in.npz", x=np.arange(8, dtype=np.float32).reshape(1, 2, 4))
    success(sd_ort, "optimize", source, out, "--target", "portable", "--float16", "--no-calibrate")
    success(sd_ort, "verify", source, out, "--inputs", tmp_path / "in.npz")


@pytest.mark.parametrize(("ir_version", "is_told"), [(3, False), (8, True)])
@pytest.mark.parametrize("options", [("portable",), ("portable", "--float16"), ("cpu", "--float16")])
def test_weights_that_are_inputs_become_constants(
    sd_ort: Cli, tmp_path: Path, ir_version: int, is_told: bool, options: tuple[str, ...]
) -> None:
    """Below IR version 4 every weight is an input. In float16 such a file needed its weights from the caller."""
    source, out = toy(tmp_path / "in.onnx"), tmp_path / "out.onnx"
    model = onnx.load(source)
    model.ir_version = ir_version
    model.graph.input.extend(
        helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in model.graph.initializer
    )
    onnx.save(model, source)
    np.savez(tmp_path / "in.npz", x=np.full((2, 4), 0.5, np.float32))
    text = success(sd_ort, "optimize", source, out, "--target", *options)
    assert ("3 inputs that have default values become constants" in text) == is_told
    assert [value.name for value in onnx.load(out).graph.input] == ["x"]
    success(sd_ort, "verify", source, out, "--inputs", tmp_path / "in.npz")


def test_a_graph_without_standard_operators(sd_ort: Cli, tmp_path: Path) -> None:
    """It declares no opset of ONNX itself."""
    text = """<ir_version: 8, opset_import: ["ai.onnx.ml" : 3]> g (float[2,3] x) => (float[2,3] y) {
        y = ai.onnx.ml.Scaler <offset = [1.0], scale = [2.0]> (x) }"""
    source, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(onnx.parser.parse_model(text), source)
    success(sd_ort, "optimize", source, out, "--target", "portable")
    np.savez(tmp_path / "in.npz", x=np.ones((2, 3), np.float32) * 3)
    success(sd_ort, "verify", source, out, "--inputs", tmp_path / "in.npz")


MEASURED = """import sys
from pathlib import Path
from sd_ort.stages import optimize
optimize(Path(sys.argv[1]), Path(sys.argv[2]), target="portable", dtype=sys.argv[3], calibrate=False)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_memory_of_optimize(tmp_path: Path, dtype: str) -> None:
    """At most 1.5 times the file and 300 MB, with the weights in the file itself."""
    width, count = 2048, 12
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", width]) for name in "xy"]
    names = ["x", *(f"h{i}" for i in range(count - 1)), "y"]
    nodes = [helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]]) for i in range(count)]
    weights = [numpy_helper.from_array(np.full((width, width), i + 1, np.float32), f"w{i}") for i in range(count)]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    source, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), source)
    command = [sys.executable, "-c", MEASURED, str(source), str(out), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 <= 1.5 * source.stat().st_size + 300e6
    stored = onnx.load(out).graph.initializer
    assert len(stored) == count
    assert all((numpy_helper.to_array(t) == i + 1).all() for i, t in enumerate(stored))
    assert not out.with_name("out.onnx.data").exists()


def test_benchmark_times_files_in_turn(sd_ort: Cli, tmp_path: Path) -> None:
    source, other = toy(tmp_path / "in.onnx"), toy(tmp_path / "other.onnx", 1.5)
    np.savez(tmp_path / "in.npz", x=np.full((2, 4), 0.5, np.float32))
    arguments = ("--provider", "cpu", "--inputs", tmp_path / "in.npz", "--runs", 2)
    text = success(sd_ort, "benchmark", source, other, *arguments)
    rows = [line.split() for line in text.splitlines() if line.endswith(".onnx")]
    assert [row[-1] for row in rows] == [str(source), str(other)]
    assert float(rows[0][1]) == 1.0
    assert [float(row[2]) for row in rows] == [0.0, 0.5]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("in.onnx", "--steps", "3"), "--steps goes with pipeline folders"),
        (("in.onnx", "folder"), "is no .onnx file"),
        (("folder", "--inputs", "in.npz"), "--inputs goes with .onnx files"),
        (("in.onnx", "wide.onnx"), "has other inputs than"),
    ],
)
def test_benchmark_refuses(
    sd_ort: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    toy(tmp_path / "in.onnx")
    model = onnx.load(tmp_path / "in.onnx")
    model.graph.input[0].name = "wide"
    for node in model.graph.node:
        node.input[:] = ["wide" if name == "x" else name for name in node.input]
    onnx.save(model, tmp_path / "wide.onnx")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    code, _, err = sd_ort("benchmark", *arguments)
    assert code == 2
    assert words in err.splitlines()[-1]


def test_optimize_says_why_an_attention_is_not_fused(sd_ort: Cli, tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
        g (float[2,3,5,4] q, float[1,3,5,4] k, float[2,3,5,4] v) => (float[2,3,5,4] y) {
            t = Transpose <perm = [0, 1, 3, 2]> (k)  s = MatMul (q, t)  p = Softmax (s)  y = MatMul (p, v) }"""
    source = tmp_path / "in.onnx"
    onnx.save(onnx.parser.parse_model(text), source)
    code, _, err = sd_ort("optimize", source, tmp_path / "out.onnx", "--target", "portable")
    assert code == 0, err
    assert "only 0 of 1 attentions (1 times " in err
