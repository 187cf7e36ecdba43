"""`sd-ort optimize`: what it writes, that the second run does nothing, and every way its input can be wrong."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnx_ir as ir
import onnxruntime as ort
import pytest
from cli_type import Cli, success

from fusion_passes.lower import nhwc_layout, pack_qkv
from fusion_passes.shapes.infer import annotate
from scripts.fixtures import graph_fixtures
from sd_ort.core import pipeline_folder
from sd_ort.core.metrics import relative_l2_error
from sd_ort.graphs.cpu_emulation import loads_on_cpu
from sd_ort.optimize import optimizer as stage
from sd_ort.optimize import precision, targets
from sd_ort.optimize.optimizer import optimize_component
from sd_ort.optimize.targets import TARGETS, Target
from sd_ort.stages import optimize

# Of `sd15-small`: 4 transformers, 33 GroupNorms. Counts of whole families: tests/fusion_passes/test_families.py.
UNET = {
    "MultiHeadAttention": 8, "GroupNorm": 12, "SkipGroupNorm": 21, "BiasSplitGelu": 4, "BiasAdd": 4,
    "SkipLayerNormalization": 8, "LayerNormalization": 4,
}  # fmt: skip
# Every fused operator as a function body, but in the layout and packing of a GPU: what a CPU can check of it.
NHWC = Target("nhwc", (nhwc_layout.PASS, pack_qkv.PASS))


def nodes(path: Path) -> dict[str, int]:
    """Nodes by operator, counted by an independent reader."""
    graph = gs.import_onnx(onnx.load(path, load_external_data=False))
    return {op: sum(node.op == op for node in graph.nodes) for op in {node.op for node in graph.nodes}}


def unet_inputs(batch: int, height: int, width: int, half: bool = False) -> dict[str, np.ndarray]:
    random = np.random.default_rng(batch)
    dtype = np.float16 if half else np.float32
    return {
        "sample": random.standard_normal((batch, 4, height, width)).astype(dtype),
        "timestep": np.array([501], np.float32),
        "encoder_hidden_states": random.standard_normal((batch, 77, 64)).astype(dtype),
    }


def run(path: Path, inputs: dict[str, np.ndarray]) -> np.ndarray:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, inputs)[0], np.float32)


@pytest.fixture(scope="module")
def expected_latents(small_export: Path) -> dict[tuple[int, ...], np.ndarray]:
    """What the exported UNet gives at two shapes (batch, height, width)."""
    source = ort.InferenceSession(small_export / "unet" / pipeline_folder.MODEL, providers=["CPUExecutionProvider"])
    return {shape: source.run(None, unet_inputs(*shape))[0] for shape in ((2, 16, 24), (1, 8, 8))}


@pytest.fixture(scope="module")
def fused_unet(small_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Target, str], Path]:
    """The optimized UNet of a target and type, made once."""
    out = tmp_path_factory.mktemp("fused")

    def make(target: Target, dtype: str) -> Path:
        path = out / f"{target.name}-{dtype}" / pipeline_folder.MODEL
        if not path.is_file():
            optimize_component(small_export / "unet" / pipeline_folder.MODEL, path, target, dtype)
        return path

    return make


def test_counts_and_manifest(small_export: Path, tmp_path: Path) -> None:
    manifest = optimize(small_export, tmp_path / "out", target="portable")
    counts = {name: entry["op_counts"] for name, entry in manifest["components"].items()}
    assert counts["unet"] == UNET | {"Conv": 54, "Transpose": counts["unet"]["Transpose"]}
    assert counts["text_encoder"]["MultiHeadAttention"] == 3
    assert counts["text_encoder"]["SkipLayerNormalization"] == 6
    assert counts["text_encoder"]["QuickGelu"] == 3
    assert counts["vae_decoder"]["MultiHeadAttention"] == counts["vae_encoder"]["MultiHeadAttention"] == 1
    on_disk = nodes(tmp_path / "out/unet/model.onnx")
    assert {op: on_disk[op] for op in UNET} == UNET
    assert json.loads((tmp_path / "out" / pipeline_folder.MANIFEST).read_text()) == manifest
    options = manifest["options"]
    assert (options["target"], options["dtype"], options["components"]) == ("portable", "float32", list(counts))
    assert sorted(p.name for p in (tmp_path / "out/unet").iterdir()) == ["config.json", "model.onnx", "model.onnx.data"]


@pytest.mark.parametrize(("wheels", "target"), [
    ({"onnxruntime": "1.31.1"}, "cpu"), ({"onnxruntime-gpu": "1.31.1"}, "cuda"), ({"onnxruntime-rocm": "1"}, "rocm"),
    ({"onnxruntime-migraphx": "1"}, "migraphx"), ({"onnxruntime-directml": "1"}, "portable"), ({}, "portable"),
])  # fmt: skip
def test_default_target_is_what_the_wheel_drives(
    monkeypatch: pytest.MonkeyPatch, wheels: dict[str, str], target: str
) -> None:
    monkeypatch.setattr(targets, "installed_wheels", lambda: wheels)
    name, why = targets.default_target()
    assert name == target
    assert next(iter(wheels), "no onnxruntime wheel") in why


@pytest.mark.parametrize("target", ["cuda", "rocm", "migraphx"])
def test_nhwc_targets_keep_two_transposes(small_export: Path, tmp_path: Path, target: str) -> None:
    for component in ("unet", "vae_decoder"):
        entry = optimize_component(
            small_export / component / pipeline_folder.MODEL, tmp_path / pipeline_folder.MODEL, TARGETS[target]
        )
        assert entry["op_counts"]["Transpose"] == 2
        assert "Conv" not in entry["op_counts"]


@pytest.mark.parametrize(("target", "dtype", "tolerance"), [
    (TARGETS["portable"], "float32", 1e-5), (TARGETS["cpu"], "float32", 1e-5), (NHWC, "float32", 1e-5),
    (TARGETS["portable"], "float16", 3e-3), (NHWC, "float16", 3e-3),
], ids=lambda x: x.name if isinstance(x, Target) else str(x))  # fmt: skip
def test_unet_generates_the_same_image(
    expected_latents: dict[tuple[int, ...], np.ndarray],
    fused_unet: Callable[[Target, str], Path],
    target: Target,
    dtype: str,
    tolerance: float,
) -> None:
    session = ort.InferenceSession(fused_unet(target, dtype), providers=["CPUExecutionProvider"])
    for shape, expected in expected_latents.items():
        actual = session.run(None, unet_inputs(*shape, half=dtype == "float16"))[0]
        assert relative_l2_error(np.asarray(actual, np.float32), expected) <= tolerance


def test_graphs_record_the_shapes_that_kernels_do_not_infer(fused_unet: Callable[[Target, str], Path]) -> None:
    """Those of the outputs after the first, which a node may lack."""
    graph = onnx.load(fused_unet(TARGETS["hip"], "float16"), load_external_data=False).graph
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in graph.value_info}
    read = {name for node in graph.node for name in node.input}
    further = [output for node in graph.node if node.domain == "sd_ort" for output in node.output[1:] if output in read]
    assert len(further) > 10
    assert min(ranks[output] for output in further) >= 3


def test_half_precision_keeps_the_sinusoids(fused_unet: Callable[[Target, str], Path]) -> None:
    model = ir.load(fused_unet(TARGETS["portable"], "float16"))
    assert {node.inputs[0].dtype for node in model.graph if node.op_type in ("Sin", "Cos")} == {ir.DataType.FLOAT}
    dtypes = {value.name: value.dtype for value in model.graph.inputs}
    assert dtypes["sample"] == ir.DataType.FLOAT16
    assert dtypes["timestep"] == ir.DataType.FLOAT
    weights = [v for v in model.graph.initializers.values() if v.dtype == ir.DataType.FLOAT]
    assert sum(v.const_value.size for v in weights) < 1000


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_operators_without_a_half_type_stay_in_float32(tmp_path: Path, dtype: str) -> None:
    """Range has no half type; the type that a random number is made in is an attribute."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,8] x, float n) => (float[N,8] y) <float zero = {0.0}, float one = {1.0}> {
            r = Range (zero, n, one)  a = Add (x, r)  noise = RandomNormalLike <dtype = 1> (x)
            none = Mul (noise, zero)  y = Add (a, none)
        }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "in.onnx")
    optimize_component(tmp_path / "in.onnx", tmp_path / "out.onnx", TARGETS["portable"], dtype, calibrate=False)
    onnx.checker.check_model(str(tmp_path / "out.onnx"), full_check=True)
    model = ir.load(tmp_path / "out.onnx")
    wide = {n.op_type for n in model.graph for v in n.inputs if v is not None and v.dtype == ir.DataType.FLOAT}
    assert wide == {"Range", "Cast"}
    if dtype == "float16":
        x = np.ones((2, 8), np.float16)
        actual = run(tmp_path / "out.onnx", {"x": x, "n": np.array(8, np.float16)})
        np.testing.assert_array_equal(actual, x + np.arange(8))


def test_bfloat16_stays_within_the_graph(tmp_path: Path) -> None:
    """ONNX Runtime's Python API has no bfloat16: inputs and outputs are float32, what is between is not."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
        g (float[2,8] x, int64[2,8] ids) => (float[2,8] y, float[2,8] z) {
            a = Neg (x)  c = Cast <to = 1> (ids)  z = Mul (a, c)  y = Exp (z)
        }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "in.onnx")
    optimize_component(tmp_path / "in.onnx", tmp_path / "out.onnx", TARGETS["portable"], "bfloat16", calibrate=False)
    onnx.checker.check_model(str(tmp_path / "out.onnx"), full_check=True)
    proto = onnx.shape_inference.infer_shapes(onnx.load(tmp_path / "out.onnx"))
    model = ir.from_proto(proto)
    assert {value.name: value.dtype for value in (*model.graph.inputs, *model.graph.outputs)} == {
        "x": ir.DataType.FLOAT,
        "ids": ir.DataType.INT64,
        "y": ir.DataType.FLOAT,
        "z": ir.DataType.FLOAT,
    }
    computed = {value.dtype for node in model.graph if node.op_type != "Cast" for value in node.outputs}
    assert computed == {ir.DataType.BFLOAT16}
    assert not loads_on_cpu(model)


def test_values_that_share_a_type_are_converted_apart() -> None:
    x = ir.Value(name="x", shape=ir.Shape([2, 3]), type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.node("Transpose", [x])
    y = node.outputs[0]
    y.name, y.shape, y.type = "y", ir.Shape([3, 2]), x.type
    model = ir.Model(ir.Graph([x], [y], nodes=[node], opset_imports={"": 21}, name="g"), ir_version=10)
    precision.convert(model, "bfloat16")
    assert [each.op_type for each in model.graph] == ["Cast", "Transpose", "Cast"]
    assert model.graph.inputs[0].dtype == model.graph.outputs[0].dtype == ir.DataType.FLOAT


ANGLES = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[S,3] ids) => ({dtype}[S,4] y)
    <double[4] frequencies = {{1.0, 0.1, 0.01, 0.001}}, int64[1] first = {{0}}> {{
        i = Gather <axis = 1> (ids, first)  d = Cast <to = 11> (i)  a = Mul (d, frequencies)  {last} }}"""


@pytest.mark.parametrize(
    ("last", "dtype", "stays"),
    [
        ("c = Cos (a)  y = Cast <to = 1> (c)", "float", False),
        ("c = CumSum (a, first)  y = Cast <to = 1> (c)", "float", True),
        ("y = Cos (a)", "double", True),
    ],
)
def test_rotary_angles_are_float32_in_half_precision(last: str, dtype: str, stays: bool) -> None:
    """Their cosines are accurate where the ids are; float64 that computes something else stays."""
    source = onnx.parser.parse_model(ANGLES.format(last=last, dtype=dtype))
    model = ir.from_proto(source)
    annotate(model.graph)
    precision.convert(model, "float16")
    assert (ir.DataType.DOUBLE in {v.dtype for node in model.graph for v in node.outputs}) == stays
    if not stays:
        ids = np.arange(192, dtype=np.float32).reshape(-1, 3)
        expected = np.cos(ids[:, :1] * [1.0, 0.1, 0.01, 0.001])
        session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
        (actual,) = session.run(None, {"ids": ids.astype(np.float16)})
        np.testing.assert_allclose(actual, expected, atol=1e-3)


def test_bfloat16_is_not_hoisted(tmp_path: Path, sd_ort: Cli) -> None:
    code, _, error = sd_ort("optimize", "demo", tmp_path / "out", "--bfloat16", "--target", "hip", "--hoist")
    assert code != 0
    assert "use --float16" in error


def test_second_run_does_nothing(tiny_copy: Path, tmp_path: Path, sd_ort: Cli) -> None:
    out = tmp_path / "out"
    text = success(sd_ort, "optimize", tiny_copy, out)
    assert text.startswith("target cpu: onnxruntime is installed")
    written = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    text = success(sd_ort, "optimize", tiny_copy, out)
    assert "up to date" in text
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()} == written
    (out / "vae_decoder" / pipeline_folder.DATA).write_bytes(b"damaged")
    assert "up to date" not in sd_ort("optimize", tiny_copy, out)[1]
    assert "up to date" not in sd_ort("optimize", tiny_copy, out, "--float16")[1]


def bad(path: Path) -> dict[str, tuple[Callable[[], object], str]]:
    """Name -> (how to break the pipeline folder `path`, a part of the message)."""
    model, data = path / "vae_decoder" / pipeline_folder.MODEL, path / "vae_decoder" / pipeline_folder.DATA

    def point_outside() -> None:
        proto = onnx.load(model, load_external_data=False)
        for tensor in proto.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = "../../secret"
        size = model.stat().st_size
        model.write_bytes(proto.SerializeToString())
        manifest = json.loads((path / pipeline_folder.MANIFEST).read_text())
        manifest["files"]["vae_decoder"][pipeline_folder.MODEL]["bytes"] = model.stat().st_size
        assert size != model.stat().st_size
        (path / pipeline_folder.MANIFEST).write_text(json.dumps(manifest))

    return {
        "missing data": (data.unlink, "is missing"),
        "short data": (lambda: data.write_bytes(b"short"), "truncated"),
        "truncated model": (lambda: model.write_bytes(model.read_bytes()[:1000]), "truncated"),
        "empty model": (lambda: model.write_bytes(b""), "truncated"),
        "data outside": (point_outside, "outside its folder"),
        "no index": ((path / "model_index.json").unlink, "not a pipeline folder"),
        "broken manifest": (lambda: (path / pipeline_folder.MANIFEST).write_text("{"), "cannot be read"),
    }


@pytest.mark.parametrize("name", bad(Path()))
def test_bad_input(name: str, tiny_copy: Path, tmp_path: Path, sd_ort: Cli) -> None:
    break_it, message = bad(tiny_copy)[name]
    break_it()
    check_refused(sd_ort("optimize", tiny_copy, tmp_path / "out"), message, tmp_path)


def check_refused(result: tuple[int, str, str], message: str, parent: Path, beginning: str = "") -> None:
    """beginning: output before the one line, of work that had begun."""
    code, out, err = result
    assert code not in (0, None)
    assert out.startswith(beginning) if beginning else not out
    assert message in err
    assert len(err.strip().splitlines()) == 1, err
    assert not (parent / "out").exists()
    assert not list(parent.glob(".out*"))


def test_missing_folder_and_wrong_options(tiny_copy: Path, tmp_path: Path, sd_ort: Cli) -> None:
    check_refused(sd_ort("optimize", tmp_path / "nowhere", tmp_path / "out"), "no such file or folder", tmp_path)
    check_refused(sd_ort("optimize", tiny_copy, tmp_path / "out", "--target", "tpu"), "unknown target", tmp_path)
    check_refused(sd_ort("optimize", tiny_copy, tmp_path / "out", "--component", "unet"), "no component", tmp_path)


def test_foreign_output_stays(tiny_copy: Path, tmp_path: Path, sd_ort: Cli) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    code, out, err = sd_ort("optimize", tiny_copy, mine)
    assert (code, out) == (5, "")
    assert "not written by sd-ort" in err
    assert (mine / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("error", "message"), [(KeyboardInterrupt(), "interrupted"), (OSError(errno.ENOSPC, "full"), "no space left")]
)
def test_interrupt_and_full_disk(
    tiny_copy: Path, tmp_path: Path, sd_ort: Cli, monkeypatch: pytest.MonkeyPatch, error: BaseException, message: str
) -> None:
    save = stage.save

    def fail_on_the_second(model: ir.Model, path: Path, on_tensor: Callable[[], None], **options: bool) -> str | None:
        if path.parent.name == "vae_decoder":
            raise error
        return save(model, path, on_tensor, **options)

    monkeypatch.setattr(stage, "save", fail_on_the_second)
    check_refused(sd_ort("optimize", tiny_copy, tmp_path / "out"), message, tmp_path, "target cpu")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy"]


@pytest.mark.parametrize("target", ["portable", "nhwc"])
def test_opset_that_cannot_be_raised_stays(tmp_path: Path, target: str) -> None:
    """Opset 19 mended the divisor of such an AveragePool: raising it would change numbers; bodies are of opset 21."""
    text = """<ir_version: 7, opset_import: ["" : 14]>
        g (float[B,4,8] q) => (float[B,4,8] y) <float s = {0.5}, float[8] b> {
            h = AveragePool <kernel_shape = [3], pads = [1, 1], ceil_mode = 1, count_include_pad = 1> (q)
            k = Transpose <perm = [0, 2, 1]> (h)  c = MatMul (h, k)  d = Mul (c, s)
            w = Softmax <axis = -1> (d)  a = MatMul (w, h)  p = Add (a, b)  y = Add (p, q)
        }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.arange(1, 9, dtype=np.float32), "b"))
    source, fused = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(model, source)
    entry = optimize_component(source, fused, NHWC if target == "nhwc" else TARGETS[target])
    assert "opset 14 cannot be raised to 21, since its AveragePool" in entry["not_fused"]
    assert entry["rewrite_counts"] == {}
    inputs = {"q": np.random.default_rng(0).normal(size=(2, 4, 8)).astype(np.float32)}
    np.testing.assert_allclose(run(fused, inputs), run(source, inputs), rtol=1e-6)


OPTIMUM = {"batch": "batch_size", "sequence": "sequence_length", "height": "height_latent", "width": "width_latent"}


def make_foreign_folder(path: Path, weights: str | None) -> Path:
    """A folder as Optimum or diffusers' old script write it: no manifest, no configs, all axes dynamic, a checker."""
    for name in ("text_encoder", "vae_decoder"):
        model = graph_fixtures.load(f"sd15-tiny-eager-14.{name}")
        for value in model.graph.input:
            for axis, dim in enumerate(value.type.tensor_type.shape.dim):
                dim.dim_param = OPTIMUM.get(dim.dim_param, dim.dim_param) if dim.dim_param else f"num_channels_{axis}"
        (path / name).mkdir(parents=True)
        onnx.save(model, path / name / pipeline_folder.MODEL, save_as_external_data=weights is not None,
                  location=weights, size_threshold=0)  # fmt: skip
    (path / "safety_checker").mkdir()
    text = """<ir_version: 7, opset_import: ["" : 14]> checker (float[N,M,L] images) => (float[N,M,L] out) {
        h = AveragePool <kernel_shape = [3], pads = [1, 1], ceil_mode = 1, count_include_pad = 1> (images)
        out = Add (h, images) }"""
    onnx.save(onnx.parser.parse_model(text), path / "safety_checker" / pipeline_folder.MODEL)
    (path / "model_index.json").write_text('{"_class_name": "OnnxStableDiffusionPipeline"}')
    return path


@pytest.mark.parametrize("weights", ["weights.pb", "model.onnx_data", None])
def test_folders_of_other_tools(tmp_path: Path, sd_ort: Cli, weights: str | None) -> None:
    source, out = make_foreign_folder(tmp_path / "old", weights), tmp_path / "out"
    half = [] if weights is None else ["--float16"]
    text = success(sd_ort, "optimize", source, out, *half)
    assert "safety_checker: not fused: opset 14 cannot be raised" in text
    counts = {name: entry["op_counts"] for name, entry in pipeline_folder.read_manifest(out)["components"].items()}
    assert counts["text_encoder"]["Attention"] == 12
    assert counts["vae_decoder"]["SkipGroupNorm"] == 12
    assert sorted(p.name for p in (out / "vae_decoder").iterdir()) == [pipeline_folder.MODEL, pipeline_folder.DATA]
    text = success(sd_ort, "verify", source, out)
    assert text.count("  ok") == 6
    assert "safety_checker: outputs NOT compared" in text
    text = success(sd_ort, "explain", source)
    assert "12 MultiHeadAttention" in text
    assert "up to date" in sd_ort("optimize", source, out, *half)[1]


def test_low_coverage_is_reported() -> None:
    """Less than half of what looks like attention, or like normalization; half is enough."""
    before = {"Softmax": 4, "InstanceNormalization": 2}
    assert stage.low_coverage_message(before, {"Softmax": 3, "InstanceNormalization": 1}) == "1 of 4 attentions"
    assert stage.low_coverage_message(before, {"Softmax": 2}) is None


def test_manifests_with_old_keys_are_read(tmp_path: Path) -> None:
    names = {
        "weights": "weight_recipes", "rules": "rewrite_counts", "counts": "op_counts",
        "not_lowered": "kernel_fallbacks", "few": "low_coverage", "equal_weights": "duplicate_weights",
    }  # fmt: skip
    values = {name: [name] for name in names}
    manifest = {"format": pipeline_folder.FORMAT, "components": {"unet": values}}
    (tmp_path / pipeline_folder.MANIFEST).write_text(json.dumps(manifest))
    assert pipeline_folder.read_manifest(tmp_path)["components"]["unet"] == {new: [old] for old, new in names.items()}


def test_old_names_of_arguments(tiny_copy: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    manifest = optimize(tiny_copy, tmp_path / "out", target="portable", hoisted=False, report=lines.append)
    assert manifest["options"]["hoist"] is False
    assert lines
    with pytest.raises(TypeError, match="both on_progress and its old name report"):
        optimize(tiny_copy, tmp_path / "out", report=print, on_progress=print)
