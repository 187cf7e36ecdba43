"""verify and calibrated float16: what must pass passes, what must fail fails, and overflowing sites stay in float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from click.testing import CliRunner

from scripts.fixtures import graph_fixtures
from sd_ort.checkpoints import synthetic_inputs
from sd_ort.cli.verify import command
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import InputError, VerificationError
from sd_ort.core.metrics import array_errors
from sd_ort.graphs import cpu_emulation
from sd_ort.graphs.load import load, serialize_over_data
from sd_ort.inspect.folder_verification import check_finite, verify_folder
from sd_ort.inspect.verify import check, compare_output, rounding_tolerance, verify
from sd_ort.inspect.weight_verification import check_weights, compare_weights, compare_with_file, verify_weights
from sd_ort.optimize import calibration, precision, weight_storage
from sd_ort.optimize.optimizer import optimize_component
from sd_ort.optimize.targets import TARGETS
from sd_ort.optimize.weight_storage import WeightStorage
from sd_ort.stages import optimize

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
# A decoder in small: conv, residual + GroupNorm + SiLU, conv. `GAIN` scales what the first convolution makes.
GRAPH = """<ir_version: 10, opset_import: ["" : 20]>
decoder (float[batch,4,height,width] latent_sample) => (float[batch,3,height,width] sample)
<int64[3] split = {{0, 4, -1}}, float[4] ones = {{1,1,1,1}}, float[4] zeros = {{0,0,0,0}}> {{
    h = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (latent_sample, conv_in_w, conv_in_b)
    k = Conv <kernel_shape = [1, 1]> (h, skip_w, skip_b)
    s = Add (h, k)
    r = Reshape (s, split)
    n = InstanceNormalization <epsilon = 0.00001> (r, ones, zeros)
    whole = Shape (s)
    q = Reshape (n, whole)
    m = Mul (q, gamma)
    a = Add (m, beta)
    g = Sigmoid (a)
    y = Mul (a, g)
    sample = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (y, conv_out_w, conv_out_b)
}}"""
SHAPES = {
    "conv_in_w": (8, 4, 3, 3), "conv_in_b": (8,), "skip_w": (8, 8, 1, 1), "skip_b": (8,),
    "gamma": (8, 1, 1), "beta": (8, 1, 1), "conv_out_w": (3, 8, 3, 3), "conv_out_b": (3,),
}  # fmt: skip


def make_pipeline(path: Path, gain: float = 1.0) -> Path:
    """A pipeline folder whose only component is the graph above."""
    model = onnx.parser.parse_model(GRAPH.format())
    random = np.random.default_rng(7)
    for name, shape in SHAPES.items():
        scale = gain if name == "conv_in_w" else 1.0
        numbers = (random.normal(0.1, 0.4, shape) * scale).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(numbers, name))
    (path / "vae_decoder").mkdir(parents=True)
    onnx.save(model, path / "vae_decoder" / pipeline_folder.MODEL)
    (path / "vae_decoder" / "config.json").write_text("{}")
    (path / "model_index.json").write_text("{}")
    pipeline_folder.write_manifest(path, {"stage": "export", "source": {"model": "test"}})
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pipeline(tmp_path_factory.mktemp("pipeline") / "source")


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_agrees_with_its_source(source: Path, tmp_path: Path, target: str) -> None:
    optimize(source, tmp_path / "out", target=target)
    result = verify(source, tmp_path / "out", library=False)
    assert [row["shape"] for row in result["rows"]] == [[1, 3, 24, 16], [2, 3, 16, 32]]
    assert all(row["finite"] and row["relative_error"] < 1e-5 and row["tolerance"] == 1e-5 for row in result["rows"])
    check(result)
    stood_in = [note for note in result["notes"] if "no CPU kernels" in note]
    assert len(stood_in) == (target in ("cuda", "rocm", "migraphx"))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["model_index.json", "sd_ort.json", "vae_decoder"]


def test_a_changed_weight_is_found(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    optimize(source, out)
    model = ir.load(out / "vae_decoder" / pipeline_folder.MODEL)
    bias = next(v for v in model.graph.initializers.values() if list(v.shape or []) == [3])
    assert bias.const_value is not None
    bias.const_value = ir.tensor(bias.const_value.numpy() + np.float32(1e-3), name=bias.name)
    ir.save(model, out / "vae_decoder" / pipeline_folder.MODEL)
    (out / pipeline_folder.MANIFEST).unlink()
    result = verify(source, out, library=False)
    assert not result["passed"]
    with pytest.raises(VerificationError, match=r"1 of 8 weights of vae_decoder are not those .* conv_out_b"):
        check(result)
    loose = verify(source, out, library=False, tolerance=0.1)
    assert all(row["passed"] for row in loose["rows"])
    assert not loose["passed"]  # a tolerance is one of outputs

    ran = CliRunner().invoke(command, [str(source), str(out), "--portable", "--json"])
    assert isinstance(ran.exception, VerificationError)
    assert ran.exception.exit_code == 4
    assert json.loads(ran.stdout)["passed"] is False


def test_nan_and_wrong_shapes_never_pass() -> None:
    good = np.ones((2, 2), np.float32)
    assert array_errors(good, good)["relative_error"] == 0
    assert array_errors(np.array([[1, np.nan], [1, 1]]), good)["relative_error"] == np.inf
    assert array_errors(np.ones((2, 1)), good)["relative_error"] == np.inf
    assert array_errors(good * 1.01, good)["relative_error"] == pytest.approx(0.01)
    assert array_errors(good * 1.01, good)["nmse"] == pytest.approx(1e-4, rel=1e-3)


def test_recorded_inputs(source: Path, tmp_path: Path) -> None:
    optimize(source, tmp_path / "out")
    latent = np.random.default_rng(0).normal(size=(1, 4, 5, 7)).astype(np.float32)
    np.savez(
        tmp_path / "runs.npz", **{"vae_decoder/latent_sample/0": latent, "vae_decoder/latent_sample/1": latent[..., :3]}
    )
    result = verify(source, tmp_path / "out", inputs=tmp_path / "runs.npz", library=False)
    assert [row["shape"][2:] for row in result["rows"]] == [[5, 7], [5, 3]]  # synthetic runs are left out
    assert result["passed"]
    with pytest.raises(InputError, match=r"numpy\.savez"):
        verify(source, tmp_path / "out", inputs=tmp_path / "none.npz")


@pytest.mark.parametrize(("arrays", "match"), [
    ({"unet/sample": np.ones(3)}, "has no runs of vae_decoder"),
    ({"vae_decoder/latent": np.ones((1, 4, 5, 7))}, "differ in their inputs: latent, latent_sample"),
    ({"vae_decoder/latent_sample": np.ones((1, 5, 5, 7))}, "model takes"),
    ({"vae_decoder/latent_sample": np.array(["a"])}, "has the shape"),
    ({"vae_decoder/latent_sample": np.ones((1, 4, 5, 7), complex)}, "complex128"),
])  # fmt: skip
def test_recorded_inputs_that_do_not_fit(
    source: Path, tmp_path: Path, arrays: dict[str, np.ndarray], match: str
) -> None:
    np.savez(tmp_path / "runs.npz", **arrays)
    with pytest.raises(InputError, match=match):
        verify(source, source, inputs=tmp_path / "runs.npz")
    with pytest.raises(InputError, match=match):
        optimize(source, tmp_path / "out", target="portable", dtype="float16", inputs=tmp_path / "runs.npz")


def test_a_source_that_makes_nan_is_blamed_itself(tmp_path: Path) -> None:
    source = make_pipeline(tmp_path / "source", gain=float("nan"))
    optimize(source, tmp_path / "out", target="portable")
    result = verify(source, tmp_path / "out", library=False)
    assert not any(row["source_finite"] or row["passed"] for row in result["rows"])
    with pytest.raises(VerificationError, match=r"NaN or infinite in the source itself .* give inputs"):
        check(result)


def test_comparing_nothing_is_no_success(source: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_pipeline(tmp_path / name)
        (tmp_path / name / "vae_decoder").rename(tmp_path / name / "safety_checker")
    with pytest.raises(InputError, match="nothing was compared: safety_checker: outputs NOT compared"):
        verify(tmp_path / "a", tmp_path / "b")
    latent = np.ones((1, 4, 5, 7), np.float32)
    np.savez(tmp_path / "runs.npz", **{"safety_checker/latent_sample": latent})
    assert verify(tmp_path / "a", tmp_path / "b", inputs=tmp_path / "runs.npz")["passed"]


def test_bfloat16_is_valid_and_right(source: Path, tmp_path: Path) -> None:
    optimize(source, tmp_path / "out", dtype="bfloat16", target="portable")
    onnx.checker.check_model(str(tmp_path / "out" / "vae_decoder" / pipeline_folder.MODEL), full_check=True)
    result = verify(source, tmp_path / "out", library=False)
    assert any("rounded to bfloat16" in note for note in result["notes"])
    assert all(1e-4 < row["relative_error"] < 2.4e-2 for row in result["rows"])


@pytest.mark.parametrize(("target", "dtype"), [("cpu", "float32"), ("gpu", "float16")])
def test_weights_in_8_bits_are_exact_and_the_rest_is_compared_without_them(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, dtype: str
) -> None:
    """Rounded weights alone would be an error of 1e-2; a changed one still fails."""
    monkeypatch.setattr(weight_storage, "MIN_ELEMENTS", 100)
    out = tmp_path / "out"
    optimize(source, out, target=target, dtype=dtype, weights=WeightStorage("int8", vae=True), calibrate=False)
    path = out / "vae_decoder" / pipeline_folder.MODEL
    assert sum(v.dtype == ir.DataType.INT8 for v in ir.load(path).graph.initializers.values()) == 2
    result = verify(source, out, library=False)
    check(result)
    assert any("its 2 weights in fewer bits are exact" in note for note in result["notes"])
    limit = 1e-5 if dtype == "float32" else 4e-3
    assert all(row["tolerance"] <= limit for row in result["rows"])
    graph = onnx.load(path, load_external_data=False).graph
    elements = next(each for each in graph.initializer if each.data_type == onnx.TensorProto.INT8)
    offset = next(int(entry.value) for entry in elements.external_data if entry.key == "offset")
    data = bytearray(path.with_name(pipeline_folder.DATA).read_bytes())
    data[offset] ^= 8
    path.with_name(pipeline_folder.DATA).write_bytes(data)
    with pytest.raises(VerificationError, match="vae_decoder"):
        check(verify(source, out, library=False))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_target_cpu_stores_halves_and_computes_in_float32(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Its weights are compared bit for bit, and its arithmetic with the tolerance of float32."""
    monkeypatch.setattr(precision, "MIN_STORED_ELEMENTS", 100)
    optimize(source, tmp_path / "out", dtype=dtype, target="cpu")
    path = tmp_path / "out" / "vae_decoder" / pipeline_folder.MODEL
    onnx.checker.check_model(str(path), full_check=True)
    model = ir.load(path)
    stored = {v.name for v in model.graph.initializers.values() if v.dtype == precision.HALF[dtype]}
    assert len(stored) == 2  # the weights of the 3 x 3 convolutions
    assert {n.inputs[0].name for n in model.graph if n.op_type == "Cast" and n.inputs[0] is not None} == stored
    assert {v.dtype for v in (*model.graph.inputs, *model.graph.outputs)} == {ir.DataType.FLOAT}
    result = verify(source, tmp_path / "out", library=False)
    check(result)
    assert not any("rounded" in note for note in result["notes"])
    assert any("its 2 weights in fewer bits are exact" in note for note in result["notes"])
    assert all(row["tolerance"] == 1e-5 and row["relative_error"] < 1e-6 for row in result["rows"])
    assert sorted(p.name for p in (tmp_path / "out" / "vae_decoder").iterdir()) == sorted(
        p.name for p in (tmp_path / "out" / "vae_decoder").glob("[!.]*")
    )


def test_what_a_target_cannot_do_in_half_precision_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="target cuda has kernels without bfloat16"):
        optimize(source, tmp_path / "out", dtype="bfloat16", target="cuda")
    with pytest.raises(InputError, match=r"target cpu computes in float32.*leave out --calibrate"):
        optimize(source, tmp_path / "out", dtype="float16", target="cpu", calibrate=True)
    assert not (tmp_path / "out").exists()


def test_folders_without_a_common_component_are_refused(source: Path, tmp_path: Path) -> None:
    other = make_pipeline(tmp_path / "other")
    (other / "vae_decoder").rename(other / "unet")
    with pytest.raises(InputError, match="no component in common"):
        verify(source, other)
    with pytest.raises(InputError, match="other has no component vae_decoder: it has unet"):
        verify_weights("demo", other, components=["unet", "vae_decoder"])


def test_arguments_in_the_other_order_are_refused(source: Path, tmp_path: Path) -> None:
    optimize(source, tmp_path / "out", target="portable")
    with pytest.raises(InputError, match=f"out is optimized, and {source} is an export: give the export first"):
        verify(tmp_path / "out", source)


@pytest.mark.parametrize("target", ["portable", "cuda", "migraphx"])
def test_overflowing_site_stays_in_float32(tmp_path: Path, target: str) -> None:
    """As in SDXL's VAE decoder: activations above 65504 between float32-sized weights."""
    source = make_pipeline(tmp_path / "source", gain=30000.0)
    optimize(source, tmp_path / "without", target=target, dtype="float16", calibrate=False)
    broken = verify(source, tmp_path / "without", library=False)
    assert not any(row["finite"] for row in broken["rows"])

    manifest = optimize(source, tmp_path / "with", target=target, dtype="float16")
    entry = manifest["components"]["vae_decoder"]
    assert entry["float32_sites"]
    assert all(site["max_abs"] > 65504 / calibration.MARGIN for site in entry["float32_sites"])
    result = verify(source, tmp_path / "with", library=False)
    assert result["rows"][0]["tolerance"] == pytest.approx(6 * 2**-11)
    check(result)
    half = ir.load(tmp_path / "with" / "vae_decoder" / pipeline_folder.MODEL)
    assert half.graph.outputs[0].dtype == ir.DataType.FLOAT16
    last = half.graph.outputs[0]
    while last.producer() is not None and last.producer().op_type not in ("Conv", "NhwcConv"):
        last = last.producer().inputs[0]
    assert last.dtype == ir.DataType.FLOAT16, "the last convolution is far from overflowing and must be in float16"


def test_no_float32_nodes_without_overflow(source: Path, tmp_path: Path) -> None:
    manifest = optimize(source, tmp_path / "out", target="portable", dtype="float16")
    entry = manifest["components"]["vae_decoder"]
    assert entry["float32_sites"] == []
    assert "0 of" in entry["calibration"]
    check(verify(source, tmp_path / "out", library=False))
    assert [p.name for p in (tmp_path / "out" / "vae_decoder").glob(".*")] == []


def test_calibration_switched_off_or_too_large_says_so(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = source / "vae_decoder" / pipeline_folder.MODEL
    monkeypatch.setattr(calibration, "SIZE_LIMIT", 10)
    entry = optimize_component(
        path, tmp_path / "a" / "vae_decoder" / pipeline_folder.MODEL, TARGETS["portable"], "float16"
    )
    assert "are above" in entry["calibration"]
    forced = optimize_component(
        path, tmp_path / "b" / "vae_decoder" / pipeline_folder.MODEL, TARGETS["portable"], "float16", calibrate=True
    )
    assert "of" in forced["calibration"]
    assert "exceed" in forced["calibration"]
    with pytest.raises(InputError, match="calibration is for --float16"):
        optimize(source, tmp_path / "out", target="portable", calibrate=True)


def test_synthetic_prompts_start_and_end() -> None:
    value = ir.Value(name="input_ids", shape=ir.Shape(["batch", "sequence"]), type=ir.TensorType(ir.DataType.INT64))
    ids = synthetic_inputs.random_inputs("text_encoder", [value], {"vocab_size": 514}, synthetic_inputs.SIZES[1])[
        "input_ids"
    ]
    assert ids.shape == (2, 13)
    assert (ids[:, 0] == 512).all()
    assert (ids[:, -1] == 513).all()
    assert ids.min() >= 0


def test_an_axis_that_nobody_knows_is_refused() -> None:
    value = ir.Value(
        name="sample", shape=ir.Shape(["batch", "mystery", "height", "width"]), type=ir.TensorType(ir.DataType.FLOAT)
    )
    with pytest.raises(InputError, match=r"config\.json"):
        synthetic_inputs.random_inputs("unet", [value], {}, synthetic_inputs.SIZES[0])


@pytest.mark.parametrize(("half", "dtype"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)])
def test_rounding_by_arithmetic_is_that_of_the_type(tmp_path: Path, half: str, dtype: type) -> None:
    graph = """<ir_version: 10, opset_import: ["" : 21]> g (float[N] x) => (float[N] y) { y = Neg (x) }"""
    model = ir.from_proto(onnx.parser.parse_model(graph))
    assert isinstance(model, ir.Model)
    for value in [*model.graph.inputs, *model.graph.outputs]:
        value.dtype = ir.DataType[half.upper()]
    cpu_emulation.round_to_half(model, ir.DataType[half.upper()])
    random = np.random.default_rng(0)
    x = (random.normal(size=5000) * 10.0 ** random.uniform(-9, 6, 5000)).astype(np.float32)
    x = np.concatenate([x, np.array([0, 65504, 65519, 65520, -65520, np.inf, -np.inf, 6e-8, 1e-9], np.float32)])
    proto = ir.to_proto(model)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    actual = session.run(None, {"x": x})[0]
    with np.errstate(over="ignore"):
        expected = -x.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(actual, expected)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ONNX file with 80 distinct weights."""
    path = tmp_path_factory.mktemp("encoder") / "text_encoder.onnx"
    onnx.save(graph_fixtures.load("sd15-tiny-dynamo-20.text_encoder"), path)
    return path


@pytest.mark.parametrize(
    ("target", "dtype"), [(t.name, d) for t in TARGETS.values() for d in t.dtypes if t.name != "gpu"]
)
def test_one_tensor_changed_by_one_percent_is_found(encoder: Path, tmp_path: Path, target: str, dtype: str) -> None:
    out = tmp_path / "out.onnx"
    optimize(
        encoder, out, target=target, dtype=dtype, calibrate=False if dtype == "float16" and target != "cpu" else None
    )
    comparison, rebuilt = compare_with_file(encoder, {"out": load(out)})
    assert comparison.exact
    assert comparison.weights == len(load(out).graph.initializers) > 50
    names = sorted(n for n, v in load(out).graph.initializers.items() if v.dtype in FLOATS)[::3][:15]
    different = []
    for name in names:
        model = load(out)
        tensor = model.graph.initializers[name].const_value
        assert tensor is not None
        changed = (tensor.numpy().astype(np.float32) * np.float32(1.01)).astype(tensor.dtype.numpy())
        model.graph.initializers[name].const_value = ir.Tensor(changed, dtype=tensor.dtype, name=name)
        different += compare_weights({"out": model}, rebuilt).different
    assert len(names) == 15
    assert len(set(different)) >= 14  # 1 % of zero is zero, and of a bfloat16 half a unit in the last place


@pytest.mark.parametrize("target", ["portable", "hip"])
def test_one_tensor_changed_by_one_percent_is_found_in_outputs(source: Path, tmp_path: Path, target: str) -> None:
    """Of a graph that says nothing of how it was made, in float32."""
    optimize(source, tmp_path / "out", target=target)
    path = tmp_path / "out" / "vae_decoder" / pipeline_folder.MODEL
    complete = ir.load(path)
    names = [name for name, value in complete.graph.initializers.items() if value.dtype == ir.DataType.FLOAT]
    missed = []
    for name in names:
        model = ir.load(path)
        model.metadata_props.clear()
        tensor = model.graph.initializers[name].const_value
        model.graph.initializers[name].const_value = ir.tensor(tensor.numpy() * np.float32(1.01), name=name)
        changed = tmp_path / "changed" / "vae_decoder" / pipeline_folder.MODEL
        shutil.copytree(tmp_path / "out", tmp_path / "changed")
        ir.save(model, changed)
        (tmp_path / "changed" / pipeline_folder.MANIFEST).unlink()
        result = verify(source, tmp_path / "changed", library=False)
        assert any("weights were compared through outputs alone" in note for note in result["notes"])
        missed += [name] if result["passed"] else []
        shutil.rmtree(tmp_path / "changed")
    assert len(names) >= 7
    assert not missed


def test_a_row_passes_only_if_it_proves_something() -> None:
    ones, zeros = np.ones((2, 2), np.float32), np.zeros((2, 2), np.float32)
    assert compare_output(ones, ones, 1e-5)["passed"]
    assert "all zeros in the source" in compare_output(zeros, zeros, 1e-5)["reason"]
    assert compare_output(zeros.astype(np.int64), zeros.astype(np.int64), 1e-5)["passed"]
    assert compare_output(ones[:1], ones, 1e-5)["reason"] == "has shape [1, 2], its source [2, 2]"
    assert "NaN or infinite numbers" in compare_output(ones * np.float32(np.inf), ones, 1e-5)["reason"]
    assert "near miss" in compare_output(ones * np.float32(1.0015), ones, 1e-3)["reason"]
    assert "near miss" not in compare_output(ones * np.float32(1.01), ones, 1e-3)["reason"]


def test_bounds_of_half_precision_follow_the_depth() -> None:
    def chain(length: int, dtype: ir.DataType) -> ir.Model:
        x = ir.Value(name="x", shape=ir.Shape([1]), type=ir.TensorType(dtype))
        nodes, last = [], x
        for _ in range(length):
            nodes += [ir.node("Sin", [last]), ir.node("Reshape", [last, x])]
            last = nodes[-2].outputs[0]
        return ir.Model(ir.Graph([x], [last], nodes=nodes, opset_imports={"": 20}), ir_version=10)

    assert rounding_tolerance(chain(400, ir.DataType.FLOAT)) == 1e-5
    assert rounding_tolerance(chain(625, ir.DataType.FLOAT16)) == pytest.approx(7.5 * 2**-11)
    assert rounding_tolerance(chain(625, ir.DataType.BFLOAT16)) == pytest.approx(7.5 * 2**-8)
    assert rounding_tolerance(chain(1, ir.DataType.FLOAT16)) == pytest.approx(6 * 2**-11)


def cancelling_product(remainder: float, model_path: Path, inputs: Path) -> None:
    """Write a product whose two halves are opposite but for `remainder` of one, and inputs of it."""
    random = np.random.default_rng(0)
    weights = random.normal(size=(1024, 4)).astype(np.float32)
    weights[512:] = remainder * weights[512:] - weights[:512]
    half = np.abs(random.normal(size=(2, 512))).astype(np.float16).astype(np.float32)
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[2,1024] x) => (float[2,4] y) { y = MatMul (x, w) }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    onnx.save(model, model_path)
    np.savez(inputs, x=np.concatenate([half, half], axis=1))


def test_what_rounded_weights_lose_is_allowed_if_every_weight_is_exact(tmp_path: Path) -> None:
    """A product of 1024 terms that nearly cancel: weights in float16 alone give an error above the bound by depth.

    Terms that cancel to a thirtieth of that leave a third of the output wrong, which is not allowed.
    """
    source, out, inputs = (tmp_path / name for name in ("in.onnx", "out.onnx", "in.npz"))
    cancelling_product(1e-3, source, inputs)
    optimize(source, out, target="portable", dtype="float16")
    with pytest.raises(VerificationError, match=r"allowed is 1\.0e-01"):
        check(verify(source, out, inputs=inputs, library=False))
    cancelling_product(3e-2, source, inputs)
    out.unlink()
    optimize(source, out, target="portable", dtype="float16")
    result = verify(source, out, inputs=inputs, library=False)
    check(result)
    (row,) = result["rows"]
    assert 3e-3 < row["relative_error"] < row["tolerance"] < 0.1
    assert any("its source with weights in float16 differs by" in note for note in result["notes"])
    with pytest.raises(VerificationError, match="relative error"):
        check(verify(source, out, inputs=inputs, library=False, tolerance=3e-3))
    unknown = ir.load(out)
    unknown.metadata_props.clear()  # its weights cannot be compared
    ir.save(unknown, out)
    with pytest.raises(VerificationError, match=r"allowed is 2\.9e-03"):
        check(verify(source, out, inputs=inputs, library=False))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_folder_by_itself(source: Path, tmp_path: Path) -> None:
    """`sd-ort verify OUT`: structure, hashes, finite outputs, and the record of how it was verified."""
    out = tmp_path / "out"
    optimize(source, out, target="portable")
    fresh = verify_folder(out, library=False)
    assert fresh["passed"]
    assert len(fresh["rows"]) == 2
    assert any("not verified against its source yet" in note for note in fresh["notes"])
    ran = CliRunner().invoke(command, [str(source), str(out), "--portable", "--provider", "cpu"])
    assert ran.exit_code == 0
    assert "vae_decoder: 8 of 8 weights are those" in ran.stdout
    ran = CliRunner().invoke(command, [str(out), "--portable"])
    assert ran.exit_code == 0
    assert f"8 of 8 weights were equal to those that {source} gives; outputs differed by" in ran.stdout
    assert optimize(source, out, target="portable")["components"]["vae_decoder"]["verified"]["weights"] == 8

    path = out / "vae_decoder" / pipeline_folder.MODEL
    model = ir.load(path)
    weight = model.graph.initializers["conv_out_b"]
    assert weight.const_value is not None
    weight.const_value = ir.tensor(weight.const_value.numpy() * np.float32("nan"), name=weight.name)
    content = path.read_bytes()
    ir.save(model, path)
    with pytest.raises(VerificationError, match="was changed since it was written"):
        verify_folder(out)
    ran = CliRunner().invoke(command, [str(source), str(out), "--portable", "--provider", "cpu"])
    assert isinstance(ran.exception, VerificationError)
    assert "verified" not in pipeline_folder.read_manifest(out)["components"]["vae_decoder"]
    (out / pipeline_folder.MANIFEST).unlink()
    without = verify_folder(out, library=False)
    assert any("no hashes were compared" in note for note in without["notes"])
    with pytest.raises(VerificationError, match="sample has NaN or infinite numbers"):
        check_finite(without)
    path.write_bytes(content[:-100])
    with pytest.raises(InputError):
        verify_folder(out)


@pytest.mark.parametrize("change", ["manifest", "recipe"])
def test_nobody_talks_verify_out_of_comparing_weights(tmp_path: Path, change: str) -> None:
    """Against a checkpoint: neither without recipes in the manifest, nor without that of one weight that is zeroed."""
    out = tmp_path / "out"
    optimize("demo", out, target="cpu", components=["vae_decoder"])
    manifest = pipeline_folder.read_manifest(out)
    recipes = manifest["components"]["vae_decoder"]["weight_recipes"]
    path = out / "vae_decoder" / pipeline_folder.MODEL
    model = load(path)
    name = next(n for n, v in model.graph.initializers.items() if n in recipes and v.const_value.size > 100)
    count = len(model.graph.initializers)
    if change == "recipe":
        del recipes[name]
        tensor = model.graph.initializers[name].const_value
        model.graph.initializers[name].const_value = ir.tensor(np.zeros_like(tensor.numpy()), name=name)
        ir.save(model, path.with_name("new.onnx"), external_data="new.data")
        path.with_name("new.onnx").rename(path)
    else:
        manifest["components"]["vae_decoder"]["weight_recipes"] = {}
    (out / pipeline_folder.MANIFEST).write_text(json.dumps(manifest | {"files": {}}))
    result = verify_weights("demo", out)
    (row,) = result["rows"]
    assert row["weights"] == count  # of the graph, not of the manifest
    assert row["different"] == ([name] if change == "recipe" else [])
    assert row["not_rebuilt"] == []

    model = load(path)  # a graph that does not say how it was made: its weights are named
    model.metadata_props.clear()
    path.write_bytes(serialize_over_data(model, path.parent))
    result = verify_weights("demo", out)
    assert name in result["rows"][0]["not_rebuilt"]
    with pytest.raises(VerificationError, match="cannot be rebuilt from demo"):
        check_weights(result, "demo", out)
