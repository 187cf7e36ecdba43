"""The CPU kernels of every custom operator, in ONNX Runtime, against NumPy float64."""

from __future__ import annotations

import importlib
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from custom_ops import CPU_OPERATORS
from custom_ops.libraries import CpuLibrary, ParallelFor
from custom_ops.operator_spec import (
    Array,
    CustomOperator,
    OperatorCase,
    generate_inputs,
    load,
    nmse,
    nmse_limit,
    output_dtype,
)
from scripts.fixtures import graph_fixtures
from sd_ort.core.metrics import relative_l2_error
from sd_ort.core.pipeline_folder import MODEL
from sd_ort.optimize.optimizer import optimize_component
from sd_ort.optimize.targets import TARGETS
from sd_ort.runtime import build

OPS = [load(folder) for folder in CPU_OPERATORS]
ONNX_TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
CALLS = [
    pytest.param(operator, case, dtype, id=f"{operator.name}-{case.name}-{dtype}")
    for operator in OPS
    for case in operator.cases
    for dtype in ONNX_TYPES
    if dtype in case.dtypes and not case.benchmark
]


@pytest.fixture(scope="session")
def library() -> Path:
    return build.build(cpu=True, provider=True)  # as test_provider.py does: one build serves both


def one_node_model(operator: CustomOperator, case: OperatorCase, inputs: dict[str, np.ndarray], dtype: str) -> bytes:
    """A model of one custom node; shapes symbolic, so that shape inference has to carry them."""
    outputs = operator.output_shapes(case)
    node = helper.make_node(
        operator.name,
        trimmed([name if name in inputs else "" for name in operator.inputs]),
        trimmed([name if name in outputs else "" for name in operator.outputs]),
        domain="sd_ort",
        **case.attributes,
    )
    graph = helper.make_graph(
        [node],
        "one_node",
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(array.dtype), [f"{name}_{i}" for i in range(array.ndim)]
            )
            for name, array in inputs.items()
        ],
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(output_dtype(name, dtype)), None)
            for name in outputs
        ],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("sd_ort", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def trimmed(names: list[str]) -> list[str]:
    while names and not names[-1]:
        names.pop()
    return names


def session(model: bytes | Path, library: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 3
    options.register_custom_ops_library(str(library))
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(
    operator: CustomOperator, case: OperatorCase, dtype: str, library: Path
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The kernel's outputs and the reference's."""
    inputs = generate_inputs(operator, case, dtype)
    runner = session(one_node_model(operator, case, inputs, dtype), library)
    names = list(operator.output_shapes(case))
    values = runner.run_with_ort_values(names, {name: ort_value(array) for name, array in inputs.items()})
    actual = {name: value.numpy().view(output_dtype(name, dtype)) for name, value in zip(names, values, strict=True)}
    return actual, operator.reference(inputs, case.attributes)


def ort_value(array: np.ndarray) -> ort.OrtValue:
    """NumPy's own types have no float8."""
    if array.dtype != ml_dtypes.float8_e4m3fn:
        return ort.OrtValue.ortvalue_from_numpy(array)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint8), TensorProto.FLOAT8E4M3FN)


@pytest.mark.parametrize(("operator", "case", "dtype"), CALLS)
def test_agrees_with_numpy(operator: CustomOperator, case: OperatorCase, dtype: str, library: Path) -> None:
    actual, expected = run(operator, case, dtype, library)
    for name, shape in operator.output_shapes(case).items():
        assert actual[name].shape == shape
        assert actual[name].dtype == output_dtype(name, dtype)
        assert np.isfinite(expected[name].astype(np.float64)).all()
        assert nmse(actual[name], expected[name]) < nmse_limit(case, dtype, name), name


@pytest.mark.parametrize("operator", OPS, ids=lambda operator: operator.name)
def test_infers_symbolic_shapes(operator: CustomOperator, library: Path, tmp_path: Path) -> None:
    """Downstream shape arithmetic needs the output's symbols: ONNX Runtime's optimized model must carry a rank.

    Shapes of further outputs, which a node may lack, come from the graph.
    """
    case = operator.cases[1]
    model = one_node_model(operator, case, generate_inputs(operator, case, "float32"), "float32")
    runner = session(model, library)
    assert len(runner.get_outputs()[0].shape) == len(next(iter(operator.output_shapes(case).values())))


@pytest.mark.parametrize("overload", ["", "variant"])
def test_kernel_wins_over_function_body(overload: str, library: Path) -> None:
    """A model carries a body for each fused op; with the library its kernel runs, without it the body does."""
    bias_add = helper.make_node("BiasAdd", ["X", "bias", "skip"], ["Y"], domain="sd_ort", overload=overload)
    body = helper.make_function(
        "sd_ort",
        "BiasAdd",
        ["X", "bias", "skip"],
        ["Y"],
        [helper.make_node("Identity", ["X"], ["Y"])],  # wrong on purpose: tells which of the two ran
        [helper.make_opsetid("", 20)],
        overload=overload,
    )
    graph = helper.make_graph(
        [bias_add],
        "body_and_kernel",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("X", "bias", "skip")],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["n"])],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("sd_ort", 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=[body], ir_version=10).SerializeToString()
    feeds = {name: np.full(3, value, np.float32) for name, value in (("X", 1), ("bias", 10), ("skip", 100))}
    assert session(model, library).run(None, feeds)[0].tolist() == [111.0] * 3
    portable = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    assert portable.run(None, feeds)[0].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("name", "case", "message"),
    [
        (
            "GroupNorm",
            OperatorCase("", {"X": (1, 2, 2, 6), "gamma": (6,), "beta": (6,)}, {"groups": 4, "activation": 0}),
            "groups",
        ),
        (
            "GroupNorm",
            OperatorCase("", {"X": (1, 2, 2, 6), "gamma": (5,), "beta": (6,)}, {"groups": 3, "activation": 0}),
            "gamma",
        ),
        ("BiasSplitGelu", OperatorCase("", {"X": (1, 2, 7), "bias": (7,)}), "even"),
        ("BiasAdd", OperatorCase("", {"X": (1, 2, 7), "bias": (7,), "skip": (1, 1, 7)}), "skip"),
        (
            "SubpixelShuffle",
            OperatorCase("", {"X": (1, 3, 3, 8), "bias": (8,)}),
            "bias must have one element a channel of Y",
        ),
        ("WinogradConv", OperatorCase("", {"X": (1, 2, 4, 4), "W": (3, 2, 1, 1), "B": (3,)}), "W must be"),
        ("WinogradConv", OperatorCase("", {"X": (1, 2, 4, 4), "W": (3, 4, 3, 3), "B": (3,)}), "W must be"),
        ("WinogradConv", OperatorCase("", {"X": (1, 2, 4, 4), "W": (3, 2, 3, 3), "B": (4,)}), "B must have"),
        (
            "SkipLayerNormalization",
            OperatorCase("", {"input": (1, 2, 8), "skip": (1, 3, 8), "gamma": (8,)}, {}, ("output",)),
            "skip must have the shape of input",
        ),
    ],
)
def test_refuses_bad_shapes(name: str, case: OperatorCase, message: str, library: Path) -> None:
    operator = next(each for each in OPS if each.name == name)
    inputs = generate_inputs(operator, case, "float32")
    runner = session(one_node_model(operator, case, inputs, "float32"), library)
    with pytest.raises(Exception, match=message):
        runner.run(None, inputs)


@pytest.mark.parametrize("scales", [(0, 2), (2, -1), (2, 2**31)])
def test_refuses_bad_scales(scales: tuple[int, int], library: Path) -> None:
    operator = next(each for each in OPS if each.name == "UpsampleNearest")
    case = OperatorCase("", {"X": (1, 2, 3, 8)}, {"scale_height": scales[0], "scale_width": scales[1]})
    with pytest.raises(Exception, match="a scale must be 1 or more"):
        session(one_node_model(operator, case, generate_inputs(operator, case, "float32"), "float32"), library)


def test_bad_values_stay_visible(library: Path) -> None:
    """NaN and Inf in a group must come out as NaN, and in that group only."""
    operator = next(each for each in OPS if each.name == "GroupNorm")
    case = OperatorCase("", {"X": (1, 4, 4, 16), "gamma": (16,), "beta": (16,)}, {"groups": 2, "activation": 0})
    for bad in (np.nan, np.inf):
        inputs = generate_inputs(operator, case, "float32")
        inputs["X"][0, 2, 1, 3] = bad
        y = session(one_node_model(operator, case, inputs, "float32"), library).run(None, inputs)[0]
        assert np.isnan(y[..., :8]).all()
        assert np.isfinite(y[..., 8:]).all()


def run_directly(
    library: Path, operator: CustomOperator, case: OperatorCase, dtype: str, inputs: dict[str, Array]
) -> dict[str, Array]:
    """The outputs of a call through the C interface; outputs hold a pattern before."""
    shapes = operator.output_shapes(case)
    outputs = {name: np.full(shape, 77, output_dtype(name, dtype)) for name, shape in shapes.items()}
    address = {name: array.ctypes.data for name, array in (inputs | outputs).items()}
    CpuLibrary(library).run(operator.name, operator.params(case, dtype, address))
    return outputs


# NaN by its bits: as arithmetic makes it, and with all bits set, whose low ones could be taken for an exponent's.
NANS = {"float32": (0x7FC00000, 0xFFFFFFFF), "float16": (0x7E00, 0xFFFF)}


@pytest.mark.parametrize("dtype", NANS)
@pytest.mark.parametrize("place", ["query", "key", "value", "attention_bias", "scale"])
@pytest.mark.parametrize("name", ["2x2x33x70x40-bias21", "1x2x40x90x64-hidden_rows-bias11"])
def test_nan_stays_nan_in_attention(name: str, place: str, dtype: str, library: Path) -> None:
    """Where arithmetic makes NaN of one, there and nowhere else; other rows with all keys hidden stay zero."""
    operator = load("multi_head_attention")
    case = next(case for case in operator.cases if case.name == name)
    for bits in NANS[dtype]:
        inputs = generate_inputs(operator, case, dtype)
        if place == "scale":
            case = replace(case, attributes=case.attributes | {"scale": float("nan")})
        else:
            unsigned = inputs[place].reshape(-1).view(f"u{inputs[place].itemsize}")
            unsigned[unsigned.size // 3] = bits
        expected = operator.reference(inputs, case.attributes)["output"]
        actual = run_directly(library, operator, case, dtype, inputs)["output"]
        assert np.isnan(expected).any()
        assert (np.isnan(actual) == np.isnan(expected)).all()
        finite = ~np.isnan(expected)
        assert nmse(actual[finite], expected[finite]) < nmse_limit(case, dtype)


@pytest.mark.parametrize("folder", ["bfloat16_attention", "bfloat16_matmul"])
def test_tensors_of_bfloat16(folder: str, library: Path) -> None:
    """NumPy has no bfloat16 that ONNX Runtime takes: the C interface, whose weights are packed at each call."""
    operator = load(folder)
    for case in operator.cases:
        inputs = generate_inputs(operator, case, "bfloat16")
        actual = run_directly(library, operator, case, "bfloat16", inputs)
        expected = operator.reference(inputs, case.attributes)
        assert all(nmse(actual[name], expected[name]) < nmse_limit(case, "bfloat16") for name in expected), case


def test_nan_stays_nan_in_bfloat16_attention(library: Path) -> None:
    operator = load("bfloat16_attention")
    case = next(case for case in operator.cases if case.name == "2x2x33x77x40-kv")
    for input_name, dtype in (("query", "float32"), ("key", "bfloat16")):
        inputs = generate_inputs(operator, case, dtype)
        inputs[input_name].reshape(-1)[inputs[input_name].size // 3] = np.nan
        expected = operator.reference(inputs, case.attributes)["output"]
        actual = run_directly(library, operator, case, dtype, inputs)["output"]
        assert np.isnan(expected).any()
        assert (np.isnan(actual) == np.isnan(expected)).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    "inputs",
    [
        {"X": (1, 2, 4, 0), "W": (3, 2, 3, 3), "B": (3,)},
        {"X": (1, 2, 0, 4), "W": (3, 2, 3, 3), "B": (3,)},
        {"X": (0, 2, 4, 4), "W": (3, 2, 3, 3), "B": (3,)},
        {"X": (1, 2, 4, 4), "W": (0, 2, 3, 3), "B": (0,)},
        {"X": (1, 0, 5, 4), "W": (3, 0, 3, 3), "B": (3,)},  # no channels: Y is the bias
    ],
)
def test_empty_convolutions(inputs: dict[str, tuple[int, ...]], dtype: str, library: Path) -> None:
    operator = load("winograd_conv")
    case = OperatorCase("", inputs)
    arrays = generate_inputs(operator, case, dtype)
    y = session(one_node_model(operator, case, arrays, dtype), library).run(None, arrays)[0]
    n, _, h, w = inputs["X"]
    assert (y == np.broadcast_to(arrays["B"].reshape(1, -1, 1, 1), (n, inputs["B"][0], h, w))).all()


@pytest.mark.parametrize("folder", ["bfloat16_conv", "bfloat16_matmul", "quantized_conv", "quantized_linear"])
def test_constant_bfloat16_weights_are_packed_once(folder: str, library: Path) -> None:
    """By the first call, and read by calls of several threads; as many bits as float32 weights that are rounded. So are
    int8 weights."""
    operator = load(folder)
    case = next(c for c in operator.cases[4:] if c.distribution in ("int8", "normal"))
    arrays = generate_inputs(operator, case, "float32")
    expected = session(one_node_model(operator, case, arrays, "float32"), library).run(None, arrays)[0]
    proto = onnx.load_from_string(one_node_model(operator, case, arrays, "float32"))
    weight = next(value for value in proto.graph.input if value.name == "W")
    proto.graph.input.remove(weight)
    constant = arrays.pop("W")
    constant = constant if constant.dtype == np.int8 else constant.astype(ml_dtypes.bfloat16)
    proto.graph.initializer.append(numpy_helper.from_array(constant, "W"))
    runner = session(proto.SerializeToString(), library)
    with ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(runner.run, None, arrays) for _ in range(6)]
    assert all((each.result()[0] == expected).all() for each in futures)


HUGE = 2**62
EMPTY = [
    ("LinearAdd", "linear_add", {"rows": HUGE, "inner": 4}),
    ("QuantizedLinear", "quantized_linear", {"rows": HUGE, "inner": 4}),
    ("BiasAdd", "bias_add", {"channels": HUGE}),
    ("BiasSplitGelu", "bias_split_gelu", {"half": HUGE}),
    ("UpsampleNearest", "upsample_nearest", {"rows": HUGE, "width": HUGE, "scale_height": 1, "scale_width": 1}),
    ("SubpixelShuffle", "subpixel_shuffle", {"batch": HUGE, "height": HUGE, "channels": HUGE}),
    ("WinogradConv", "winograd_conv", {"batch": HUGE, "height": HUGE, "channels": HUGE, "filter_count": 3}),
    ("Bfloat16Attention", "bfloat16_attention", {"batch": HUGE, "heads": 8, "kv_sequence": HUGE, "head_size": 8}),
    ("Bfloat16Conv", "bfloat16_conv", {"batch": HUGE, "height": HUGE, "channels": HUGE, "filter_count": 3, "edge": 3}),
    ("QuantizedConv", "bfloat16_conv", {"batch": HUGE, "height": HUGE, "channels": HUGE, "filter_count": 3, "edge": 3}),
    ("Bfloat16MatMul", "bfloat16_matmul", {"rows": HUGE, "inner": HUGE}),
    ("GroupNorm", "group_norm", {"batch": HUGE, "channels": 8, "groups": 8, "channels_last": 1}),
    ("GroupNorm", "group_norm", {"batch": HUGE, "channels": 8, "groups": 8}),
    ("MultiHeadAttention", "multi_head_attention", {"batch": HUGE, "heads": 8, "kv_sequence": HUGE, "head_size": 8}),
]


@pytest.mark.parametrize(("name", "folder", "sizes"), EMPTY)
def test_no_work_for_nothing(name: str, folder: str, sizes: dict[str, int], library: Path) -> None:
    """An empty tensor may have an axis of 2^62: no loop over it, and no product of such."""
    params = importlib.import_module(f"custom_ops.operators.{folder}.cases").Params(**sizes)
    started: list[int] = []

    def parallel_for(pool: object, body: object, count: int, context: object) -> None:
        started.append(count)

    CpuLibrary(library).run(name, params, ParallelFor(parallel_for))
    assert sum(started) == 0


def test_c_interface_refuses_what_it_does_not_know(library: Path) -> None:
    params = load("bias_add").params(load("bias_add").cases[0], "float32", dict.fromkeys(("X", "bias", "skip", "Y"), 0))
    with pytest.raises(LookupError, match="has no BiasSub with 56 bytes"):
        CpuLibrary(library).run("BiasSub", params)
    with pytest.raises(LookupError, match="has no GroupNorm with 56 bytes"):
        CpuLibrary(library).run("GroupNorm", params)


@pytest.mark.parametrize("empty", [(0, 4, 4, 16), (2, 0, 4, 16)])
def test_empty_tensors(empty: tuple[int, ...], library: Path) -> None:
    operator = next(each for each in OPS if each.name == "GroupNorm")
    case = OperatorCase("", {"X": empty, "gamma": (16,), "beta": (16,)}, {"groups": 2, "activation": 1})
    inputs = generate_inputs(operator, case, "float32")
    y = session(one_node_model(operator, case, inputs, "float32"), library).run(None, inputs)[0]
    assert y.shape == empty


def test_unet_for_cpus(library: Path, tmp_path: Path) -> None:
    """Target cpu with its kernels draws what the export draws: Winograd's convolutions cost little precision."""
    graph = graph_fixtures.make_folder(tmp_path / "raw", "sd15-tiny-dynamo-20.unet") / "unet" / MODEL
    counts = optimize_component(graph, tmp_path / MODEL, TARGETS["cpu"])["op_counts"]
    assert counts["WinogradConv"] + counts["Conv"] == 98
    assert counts["WinogradConv"] == 47  # all 3 x 3 ones of stride 1 but the first and the last
    random = np.random.default_rng(0)
    feeds = {
        "sample": random.standard_normal((2, 4, 16, 24)).astype(np.float32),
        "timestep": np.array([501], np.float32),
        "encoder_hidden_states": random.standard_normal((2, 77, 64)).astype(np.float32),
    }
    expected = ort.InferenceSession(graph, providers=["CPUExecutionProvider"]).run(None, feeds)[0]
    actual = session(tmp_path / MODEL, library).run(None, feeds)[0]
    assert relative_l2_error(actual, expected) < 1e-5
    counts = optimize_component(graph, tmp_path / "narrow" / MODEL, TARGETS["cpu"], "bfloat16")["op_counts"]
    assert (counts["Bfloat16Conv"], counts["Conv"]) == (96, 2)  # all but the first and the last
    assert counts["Bfloat16Attention"] == 32
    assert counts["Bfloat16MatMul"] == 112
    weights = onnx.load(tmp_path / "narrow" / MODEL, load_external_data=False).graph.initializer
    assert sum(weight.data_type == TensorProto.BFLOAT16 for weight in weights) > 200
    actual = session(tmp_path / "narrow" / MODEL, library).run(None, feeds)[0]
    assert relative_l2_error(actual, expected) < 0.02


def test_instruction_sets_stay_apart(library: Path) -> None:
    """AVX code must be reachable through its own namespace only: any other symbol could replace one that old CPUs
    run."""
    names = subprocess.run(["nm", "-C", str(library)], capture_output=True, text=True, check=True).stdout
    for isa in ("baseline", "avx2", "avx512"):
        assert f"sd_ort::{isa}::group_norm" in names
    assembly = subprocess.run(
        ["objdump", "-d", "-C", "--no-show-raw-insn", str(library)], capture_output=True, text=True, check=True
    ).stdout
    widest = ("sd_ort::avx512::",)
    allowed = {"%ymm": ("sd_ort::avx2::", *widest), "%zmm": widest, "%tmm": widest}
    function = ""
    wide: dict[str, set[str]] = {register: set() for register in allowed}
    for line in assembly.splitlines():
        if line.endswith(">:"):
            function = line.split("<", 1)[1]
        for register in allowed:
            if register in line:
                wide[register].add(function)
    for register, spaces in allowed.items():
        assert wide[register]
        assert [name for name in wide[register] if not any(space in name for space in spaces)] == []
