"""explain says what is fused and why the rest is not; extract cuts a graph that runs."""

from __future__ import annotations

import json
import lzma
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from click.testing import CliRunner

from scripts.fixtures import graph_fixtures
from sd_ort.cli import explain as explain_command
from sd_ort.cli import extract as extract_command
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import InputError, OutputError
from sd_ort.graphs.scopes import scope
from sd_ort.inspect.explain import explain
from sd_ort.inspect.extract import extract
from sd_ort.optimize.optimizer import optimize_component
from sd_ort.optimize.targets import TARGETS
from sd_ort.stages import optimize

DYNAMO, TORCHSCRIPT = "sd15-tiny-dynamo-20.vae_decoder", "sd15-tiny-torchscript-17.vae_decoder"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = graph_fixtures.make_folder(tmp_path_factory.mktemp("explain") / "source", DYNAMO)
    pipeline_folder.write_manifest(path, {"stage": "export", "source": {"model": "test"}})
    return path


@pytest.fixture(scope="module")
def optimized(source: Path) -> Path:
    optimize(source, source.parent / "optimized", target="rocm")
    return source.parent / "optimized"


@pytest.mark.parametrize("name", [DYNAMO, TORCHSCRIPT])
def test_sites_are_named_by_module_whatever_the_exporter(name: str, tmp_path: Path) -> None:
    entry = explain(graph_fixtures.make_folder(tmp_path, name))["components"]["vae_decoder"]
    assert entry["fused"] == {"GroupNorm": 18, "SkipGroupNorm": 12, "MultiHeadAttention": 1}
    scopes = {site["op"]: site["scope"] for site in entry["sites"]}
    assert scopes["MultiHeadAttention"] == "decoder.mid_block.attentions.0"
    assert all(site["scope"].startswith(("decoder", "post_quant_conv")) for site in entry["sites"] if site["fused"])
    assert set(entry["unfused_ops"]) == {"Transpose", "Shape"}


def test_an_optimized_folder_shows_its_source_and_its_target(source: Path, optimized: Path) -> None:
    before = explain(source)["components"]["vae_decoder"]
    after = explain(optimized)["components"]["vae_decoder"]
    assert after["before"] == before["before"]
    assert after["before"]["InstanceNormalization"] == 30
    assert after["after"]["com.microsoft.NhwcConv"] == 36
    assert after["unfused_ops"]["Transpose"] == after["after"]["Transpose"] == 2
    assert any("even number of channels" in reason for reason in after["kernel_fallbacks"])
    assert before["lowered"] == {}
    assert after["lowered"]["nhwc_layout"] == {"rewrote": {"nhwc_layout": 36}, "unfused": []}
    biases = after["lowered"]["fold_bias"]
    assert {(site["op"], site["reason"]) for site in biases["unfused"]} >= {
        ("NhwcConv", "the consumer NhwcConv adds no bias"),
        ("Add", "the sum has a consumer other than one Reshape to an image"),
    }
    assert biases["rewrote"]["fold_bias"] == 35
    assert all(site["scope"] for site in biases["unfused"])


def test_a_folder_made_from_a_checkpoint_shows_its_template(demo_folder: Path, tmp_path: Path) -> None:
    entry = explain(demo_folder, ["text_encoder"])["components"]["text_encoder"]
    assert entry["before"]["Softmax"] == 4
    assert entry["fused"] == {"LinearAdd": 12, "SkipLayerNormalization": 8, "Attention": 4, "QuickGelu": 4}
    manifest = pipeline_folder.read_manifest(demo_folder)
    folder = Path(shutil.copytree(demo_folder, tmp_path / "copy"))
    for options in ({}, {"templates": {"text_encoder": "../removed.onnx.xz"}}, {"templates": {"text_encoder": None}}):
        pipeline_folder.write_manifest(folder, {**manifest, "options": {"target": "cpu", **options}})
        with pytest.raises(InputError, match="run `sd-ort export demo RAW` and explain RAW"):
            explain(folder)
    pipeline_folder.write_manifest(folder, {**manifest, "source": {"folder": str(tmp_path / "raw")}})
    with pytest.raises(InputError, match="raw, which is gone: restore it"):
        explain(folder)


def test_scopes_survive_optimization(optimized: Path) -> None:
    graph = ir.load(optimized / "vae_decoder" / pipeline_folder.MODEL).graph
    fused = [node for node in graph if node.domain]
    assert len(fused) > 60
    assert [node.op_type for node in fused if not scope(node)] == []


def test_a_refused_site_is_given_its_reason(tmp_path: Path) -> None:
    path = graph_fixtures.make_folder(tmp_path, DYNAMO) / "vae_decoder" / pipeline_folder.MODEL
    model = onnx.load(path)
    softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
    next(a for a in softmax.attribute if a.name == "axis").i = 2
    norm = next(node for node in model.graph.node if node.op_type == "InstanceNormalization")
    scaled = next(t for t in model.graph.initializer if t.name == norm.input[1])
    twos = onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scaled) * 2, "twos")
    model.graph.initializer.append(twos)
    norm.input[1] = "twos"
    onnx.save(model, path)
    unfused = {site["op"]: site for site in explain(path)["components"]["vae_decoder"]["sites"] if not site["fused"]}
    assert unfused["Softmax"]["reason"] == "the Softmax is not over the last axis"
    assert unfused["Softmax"]["scope"] == "decoder.mid_block.attentions.0"
    assert unfused["InstanceNormalization"]["reason"] == "InstanceNormalization has an affine of its own"


def _explain_text(path: Path, header: str, body: str) -> dict[str, list[dict]]:
    """The sites left in a graph in ONNX text, by operator."""
    text = f"""<ir_version: 10, opset_import: ["" : 21, "mine" : 1]> g {header} {{ {body} }}"""
    onnx.save(onnx.parser.parse_model(text), path / "model.onnx")
    sites: dict[str, list[dict]] = {}
    for entry in explain(path / "model.onnx")["components"].values():
        for site in entry["sites"]:
            sites.setdefault(site["op"], []).append(site)
    return sites


def test_a_reason_names_the_value_and_the_node_where_the_proof_ended(tmp_path: Path) -> None:
    """Behind an operator that nobody knows, shapes are unknown up to the one that is named."""
    header = """(float[N,8,H,W] x) => (float y, float z) <int64[3] split = {0, 2, -1}, float[2] ones = {1, 1},
        float[2] zeros = {0, 0}, float[8,1,1] w = {1, 2, 3, 4, 5, 6, 7, 8}, int64[4] back = {2, 8, 4, 4}>"""
    norm = """r = Reshape (b, split)  n = InstanceNormalization (r, ones, zeros)  q = Reshape (n, back)
        m = Mul (q, w)  y = Add (m, w)"""
    attention = "k = Transpose (b)  c = MatMul (b, k)  s = Softmax (c)  z = MatMul (s, b)"
    sites = _explain_text(tmp_path, header, f"a = mine.Secret (x)  b = Relu (a)  {norm}  {attention}")
    for op in ("InstanceNormalization", "Softmax"):
        assert sites[op][0]["reason"].endswith("the shape of a is unknown behind mine.Secret"), sites[op]
    best = sites["InstanceNormalization"][0]["near_misses"][0]
    assert (best["pass"], best["op"]) == ("group_normalization", "Add")
    assert best["unknown_value"] == "the shape of a is unknown behind mine.Secret"


def test_near_misses_are_ranked_and_name_what_is_no_constant(tmp_path: Path) -> None:
    header = "(float[N,8,H,W] x, float[8] g) => (float y) <float[8] b = {1, 2, 3, 4, 5, 6, 7, 8}>"
    sites = _explain_text(tmp_path, header, "y = GroupNormalization <num_groups = 2> (x, g, b)")
    (site,) = sites["GroupNormalization"]
    assert site["reason"].startswith("the affine is not a constant")
    assert site["reason"].endswith("g (8) is an input")
    distances = [entry["distance"] for entry in site["near_misses"]]
    assert distances == sorted(distances)


def test_a_geglu_layer_for_our_provider(tmp_path: Path) -> None:
    """Of two layers one is whole; the product of the other is read by something else too, which is told."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
        unet (float[N,S,6] x) => (float[N,S,4] y, float[N,S,4] z, float[N,S,8] m)
        <float[6,8] w, float[8] b = {1, 2, 3, 4, 5, 6, 7, 8}, int64[2] halves = {4, 4}> {
            m = MatMul (x, w)  a = Add (m, b)  l, r = Split <axis = -1> (a, halves)  g = Gelu (r)  y = Mul (l, g)
            e = Relu (x)
            n = MatMul (e, w)  c = Add (n, b)  s, t = Split <axis = -1> (c, halves)  h = Gelu (t)  z = Mul (s, h)
        }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((6, 8), np.float32), "w"))
    raw, optimized = (tmp_path / stage / "unet" / pipeline_folder.MODEL for stage in ("raw", "made"))
    raw.parent.mkdir(parents=True)
    onnx.save(model, raw)
    optimize_component(raw, optimized, TARGETS["gpu"])
    source = {"folder": str(tmp_path / "raw")}
    for stage, more in (("raw", {}), ("made", {"source": source, "options": {"target": "gpu"}, "stage": "optimize"})):
        (tmp_path / stage / "model_index.json").write_text("{}")
        pipeline_folder.write_manifest(tmp_path / stage, {"stage": "export", "components": {}, **more})
    report = explain(tmp_path / "made")["components"]["unet"]
    assert report["fused"] == {"LinearSplitGelu": 1, "BiasSplitGelu": 1, "LinearAdd": 1}
    lowered = report["lowered"]["linear_split_gelu"]
    assert lowered["rewrote"] == {"linear_split_gelu": 1}
    assert [(site["op"], site["reason"]) for site in lowered["unfused"]] == [
        ("BiasSplitGelu", "its MatMul has other consumers")
    ]


def test_unmatched_sites_are_reported(tmp_path: Path) -> None:
    header = (
        "(float[N,S,8] x, float[N,S,8] k, float[8,8] w) => (float y, float z) <float[8] g = {1, 1, 1, 1, 1, 1, 1, 1}>"
    )
    sites = _explain_text(
        tmp_path, header, "e = Gelu (x)  z = MatMul (e, w)  s = Add (x, k)  y = LayerNormalization (s, g)"
    )
    assert "it is read by MatMul" in sites["Gelu"][0]["reason"]
    assert "no beta" in sites["LayerNormalization"][0]["reason"]


def test_command_prints_text_and_json(source: Path, tmp_path: Path) -> None:
    text = CliRunner().invoke(explain_command.command, [str(source)])
    assert text.exit_code == 0, text.output
    assert "fused: 18 GroupNorm, 12 SkipGroupNorm, 1 MultiHeadAttention" in text.output
    everything = CliRunner().invoke(explain_command.command, [str(source), "--all"])
    assert "MultiHeadAttention          decoder.mid_block.attentions.0" in everything.output
    as_json = CliRunner().invoke(explain_command.command, [str(source), "--json"])
    assert json.loads(as_json.output)["components"]["vae_decoder"]["fused"]["GroupNorm"] == 18


def test_bad_input_is_refused(source: Path, optimized: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file or folder"):
        explain(tmp_path / "nothing")
    with pytest.raises(InputError, match="it has vae_decoder"):
        explain(source, ["unet"])
    broken = tmp_path / "model.onnx"
    broken.write_bytes(lzma.compress(b"no model"))
    with pytest.raises(InputError, match="not an ONNX model"):
        explain(broken)


def test_extracted_subgraph_runs_and_gives_the_same_numbers(optimized: Path, source: Path, tmp_path: Path) -> None:
    """Between two values of the attention, function bodies of the portable target included."""
    portable = tmp_path / "portable"
    optimize(source, portable, target="portable")
    model = onnx.load(portable / "vae_decoder" / pipeline_folder.MODEL)
    attention = next(node for node in model.graph.node if node.op_type == "MultiHeadAttention")
    norm = next(node for node in model.graph.node if node.op_type == "SkipGroupNorm")
    start, end = norm.output[0], attention.output[0]
    report = extract(portable, "vae_decoder", [start], [end], tmp_path / "cut.onnx")
    assert report["inputs"] == 1
    assert 5 < report["nodes"] < 20
    cut = onnx.load(tmp_path / "cut.onnx")
    onnx.checker.check_model(cut)

    complete = onnx.load(portable / "vae_decoder" / pipeline_folder.MODEL)
    for name in (start, end):
        complete.graph.output.append(onnx.ValueInfoProto(name=name))
    latent = np.random.default_rng(0).normal(size=(1, 4, 8, 16)).astype(np.float32)
    session = ort.InferenceSession(complete.SerializeToString(), providers=["CPUExecutionProvider"])
    start_value, expected = session.run([start, end], {"latent_sample": latent})
    actual = ort.InferenceSession(tmp_path / "cut.onnx", providers=["CPUExecutionProvider"]).run(
        None, {start: start_value}
    )[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_extract_refuses_what_is_not_there(source: Path, tmp_path: Path) -> None:
    graph = ir.load(source / "vae_decoder" / pipeline_folder.MODEL).graph
    conv = [node.outputs[0].name or "" for node in graph if node.op_type == "Conv"]
    with pytest.raises(InputError, match=f"did you mean .*{conv[3]}"):
        extract(source, "vae_decoder", [conv[3] + "x"], [conv[5]], tmp_path / "a.onnx")
    with pytest.raises(InputError, match="does not depend on"):
        extract(source, "vae_decoder", [conv[5]], [conv[3]], tmp_path / "a.onnx")
    with pytest.raises(InputError, match="is a weight"):
        extract(source, "vae_decoder", ["decoder.conv_in.weight"], [conv[5]], tmp_path / "a.onnx")
    with pytest.raises(InputError, match="no component unet"):
        extract(source, "unet", [conv[3]], [conv[5]], tmp_path / "a.onnx")
    with pytest.raises(OutputError, match=r"ends in \.onnx"):
        extract(source, "vae_decoder", [conv[3]], [conv[5]], tmp_path / "a.txt")
    assert not (tmp_path / "a.onnx").exists()
    ran = CliRunner().invoke(
        extract_command.command,
        [str(source), str(tmp_path / "a.onnx"), "--component", "vae_decoder", "--from", conv[3], "--to", conv[5]],
    )
    assert ran.exit_code == 0, ran.output
    with pytest.raises(OutputError, match="exists"):
        extract(source, "vae_decoder", [conv[3]], [conv[5]], tmp_path / "a.onnx")


def test_extract_from_an_export_without_types(tmp_path: Path) -> None:
    """The TorchScript exporter describes inputs and outputs only."""
    source = graph_fixtures.make_folder(tmp_path / "source", TORCHSCRIPT)
    conv = [
        node.outputs[0].name or ""
        for node in ir.load(source / "vae_decoder/model.onnx").graph
        if node.op_type == "Conv"
    ]
    extract(source, "vae_decoder", [conv[3]], [conv[5]], tmp_path / "cut.onnx")
    session = ort.InferenceSession(tmp_path / "cut.onnx", providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_outputs()] == [conv[5]]
    assert session.get_inputs()[0].shape[1] == 128
