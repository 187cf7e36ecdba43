"""`sd-ort export`: complete folders, equal to torch at sizes other than those of tracing."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from small_presets import MINI

from sd_ort.checkpoints import signatures
from sd_ort.checkpoints.checkpoint import component_signature, has_penultimate_states
from sd_ort.checkpoints.modules import wrap
from sd_ort.checkpoints.presets import PRESETS, open_preset
from sd_ort.core import pipeline_folder
from sd_ort.export import exporter
from sd_ort.graphs.external_data_writer import ALIGNMENT

# Of `sd15-mini`: 4 transformers, 8 residual blocks.
SD15_OPERATORS = {"Softmax": 8, "InstanceNormalization": 21, "LayerNormalization": 12, "Conv": 33}


def check_against_torch(path: Path, component: str, preset: str, *all_sizes: dict[str, int], seed: int = 0) -> float:
    """Return the largest NMSE of an exported component against torch at `all_sizes`.

    The torch module is built from the preset, and the session opened, once.
    """
    source = open_preset(preset, seed)
    config = json.loads((path / component / "config.json").read_text())
    signature = component_signature(source, component, config)
    module = wrap(
        component,
        source.load(signatures.MODEL_OF.get(component, component)),
        penultimate=has_penultimate_states(source),
        controlnet="controlnet" in source.configs,
    )
    session = onnxruntime.InferenceSession(str(path / component / "model.onnx"), providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == [t.name for t in signature.inputs]
    assert [o.name for o in session.get_outputs()] == [t.name for t in signature.outputs]
    errors = []
    for sizes in all_sizes:
        inputs = {t.name: exporter.example_input(t, sizes, config, seed=7) for t in signature.inputs}
        with torch.no_grad():
            outputs = module(*inputs.values())
        expected = outputs if isinstance(outputs, tuple) else (outputs,)
        actual = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        for tensor, array in zip(signature.outputs, actual, strict=True):
            assert array.shape == tuple(signatures.size(axis, sizes) for axis in tensor.axes)
        errors.append(exporter.compare_outputs(actual, [e.numpy() for e in expected])["nmse"])
    return float(np.max(errors))  # NaN if one is NaN


def operator_counts(path: Path) -> dict[str, int]:
    graph = onnx.load(path, load_external_data=False).graph
    return {op: sum(n.op_type == op for n in graph.node) for op in {n.op_type for n in graph.node}}


# --- Whole pipelines ------------------------------------------------------------------------------------------------


def test_sd15_folder_is_a_complete_pipeline(default_export):
    assert pipeline_folder.components(default_export) == ["text_encoder", "unet", "vae_encoder", "vae_decoder"]
    for name in pipeline_folder.components(default_export):
        assert sorted(p.name for p in (default_export / name).iterdir()) == [
            "config.json",
            "model.onnx",
            "model.onnx.data",
        ]
        pipeline_folder.check_component(default_export, name)
    index = json.loads((default_export / "model_index.json").read_text())
    assert index["unet"] == ["diffusers", "UNet2DConditionModel"]
    from diffusers import PNDMScheduler
    from transformers import CLIPTokenizer

    assert PNDMScheduler.from_pretrained(default_export, subfolder="scheduler").config.beta_end == 0.012
    tokenizer = CLIPTokenizer.from_pretrained(default_export, subfolder="tokenizer")
    ids = tokenizer("A red circle!", padding="max_length", max_length=77).input_ids
    assert len(ids) == 77
    assert (ids[0], ids[-1], max(ids)) == (512, 513, 513)
    assert tokenizer.decode(ids, skip_special_tokens=True).split() == ["a", "red", "circle", "!"]


def test_sd15_manifest(default_export):
    manifest = pipeline_folder.read_manifest(default_export)
    assert manifest["stage"] == "export"
    assert manifest["source"]["model"] == "sd15-mini"
    assert manifest["source"]["random_weights"] is True
    assert manifest["options"] | {"opset": 20, "exporter": "dynamo", "seed": 0} == manifest["options"]
    assert manifest["versions"]["torch"].startswith("2.")
    assert pipeline_folder.is_intact(default_export, manifest)
    for entry in manifest["components"].values():
        assert 0 < entry["torch_error"]["nmse"] <= exporter.TOLERANCE
        assert 0 < entry["torch_error"]["max_abs"] < 1e-3


@pytest.mark.parametrize("component", ["text_encoder", "unet", "vae_encoder", "vae_decoder"])
def test_sd15_equals_torch_at_another_shape(default_export, component):
    sizes = {"batch": 3, "sequence": 77, "height": 8, "width": 40}
    assert check_against_torch(default_export, component, "sd15-mini", sizes) <= 1e-10


def test_sd15_graph(default_export):
    path = default_export / "unet" / "model.onnx"
    counts = operator_counts(path)
    assert {op: counts[op] for op in SD15_OPERATORS} == SD15_OPERATORS
    model = onnx.load(path, load_external_data=False)
    assert {o.domain: o.version for o in model.opset_import} == {"": 20}
    axes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    assert axes == {
        "sample": ["batch", 4, "height", "width"],
        "timestep": [1],
        "encoder_hidden_states": ["batch", "sequence", 64],
    }
    assert str(sys.prefix).encode() not in path.read_bytes(), "no path of this machine in the graph"
    external = [t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    assert sum(np.prod(t.dims) for t in external) > 0.99 * sum(np.prod(t.dims) for t in model.graph.initializer)
    for tensor in external:
        external_data = {e.key: e.value for e in tensor.external_data}
        assert external_data["location"] == "model.onnx.data"
        assert int(external_data["length"]) <= 1 << 20 or int(external_data["offset"]) % ALIGNMENT == 0


def test_the_command_prints_a_table_and_skips_an_existing_export(sd_ort, tmp_path):
    arguments = ("export", *MINI, "--component", "vae_decoder", "--exporter", "torchscript", tmp_path / "out")
    code, output, progress = sd_ort(*arguments)
    assert code == 0
    assert [line.split()[0] for line in output.splitlines()] == ["component", "vae_decoder"]
    assert [line.split()[0] for line in progress.splitlines()] == ["[1/1]", "[1/1]", "wrote"]
    before = (tmp_path / "out" / "vae_decoder" / "model.onnx").stat()  # whose time of access follows reads
    code, output, progress = sd_ort(*arguments)
    assert code == 0
    assert progress.splitlines() == [f"{tmp_path / 'out'} is up to date."]
    after = (tmp_path / "out" / "vae_decoder" / "model.onnx").stat()
    assert (after.st_ino, after.st_mtime_ns, after.st_nlink) == (before.st_ino, before.st_mtime_ns, 1)


# --- Other exporters, opsets and families ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "opset", "component"),
    [
        ("dynamo", 18, "text_encoder"),
        ("dynamo", 21, "vae_decoder"),
        ("dynamo", 23, "vae_encoder"),
        ("dynamo", 23, "text_encoder"),
        ("torchscript", 17, "text_encoder"),
        ("torchscript", 20, "unet"),
    ],
)
def test_opsets(tmp_path, backend, opset, component):
    options = {"opset": opset, "exporter": backend, "components": [component]}
    exporter.export(None, tmp_path / "out", preset="sd15-mini", random_weights=True, **options)
    sizes = {"batch": 3, "sequence": 3, "height": 8, "width": 2}
    assert check_against_torch(tmp_path / "out", component, "sd15-mini", sizes) <= 1e-10
    model = onnx.load(tmp_path / "out" / component / "model.onnx", load_external_data=False)
    assert {o.domain: o.version for o in model.opset_import} == {"": opset}


@pytest.mark.parametrize(
    ("preset", "backend", "names"),
    [
        ("sdxl-mini", "dynamo", ["text_encoder_2", "unet"]),
        ("sdxl-mini", "torchscript", ["text_encoder", "text_encoder_2"]),
        ("sdxl-refiner-mini", "torchscript", ["text_encoder_2", "unet"]),
        ("sd15-controlnet-mini", "dynamo", ["controlnet"]),
        ("sd15-controlnet-mini", "torchscript", ["unet", "controlnet"]),
        ("sd21-mini", "torchscript", ["unet"]),
    ],
)
def test_families(tmp_path, preset, backend, names):
    options = {"exporter": backend, "seed": 3, "components": names}
    manifest = exporter.export(None, tmp_path / "out", preset=preset, random_weights=True, **options)
    sizes = {"batch": 3, "sequence": 9, "height": 4, "width": 6}
    assert sorted(manifest["components"]) == sorted(names)
    for component in names:
        assert check_against_torch(tmp_path / "out", component, preset, sizes, seed=3) <= 1e-10


def test_full_size_configs_have_the_published_sizes():
    """Parameter counts of the public models: SD 1.5 and its variants, SD 2.1, SDXL base, SD 3.5 medium, FLUX.1."""
    import diffusers
    import transformers

    expected = {
        ("sd15", "unet"): 859_520_964,
        ("sd15", "text_encoder"): 123_060_480,
        ("sd15", "vae"): 83_653_863,
        ("sd15-inpaint", "unet"): 859_535_364,
        ("sd15-controlnet", "controlnet"): 361_279_120,
        ("sd21", "unet"): 865_910_724,
        ("sd21", "text_encoder"): 340_387_840,
        ("sdxl", "unet"): 2_567_463_684,
        ("sdxl", "text_encoder_2"): 694_659_840,
        ("sd35-medium", "text_encoder_3"): 4_762_310_656,
        ("sd35-medium", "transformer"): 2_243_171_520,
        ("sd35-medium", "vae"): 83_819_683,
        ("sd35-large", "transformer"): 8_056_627_520,
        ("flux-schnell", "transformer"): 11_891_178_560,
        ("flux-dev", "transformer"): 11_901_408_320,
    }
    for (preset, name), size in expected.items():
        config = PRESETS[preset].models[name]
        with torch.device("meta"):
            if name.startswith("text_encoder"):
                cls = getattr(transformers, config["architectures"][0])
                model = cls(cls.config_class(**config))
            else:
                model = getattr(diffusers, config["_class_name"]).from_config(config)
        assert sum(p.numel() for p in model.parameters()) == size, (preset, name)


def test_random_weights_are_distinct_and_repeatable():
    first, second, other = (open_preset("sd15-mini", seed).load("unet") for seed in (1, 1, 2))
    vectors = [tuple(p.flatten().tolist()) for p in first.parameters() if p.ndim == 1]
    assert len(set(vectors)) == len(vectors)
    assert all(abs(x) > 0 for v in vectors for x in v)
    state, same, different = first.state_dict(), second.state_dict(), other.state_dict()
    assert all(torch.equal(state[name], same[name]) for name in state)
    assert not any(torch.equal(state[name], different[name]) for name in state)


# --- Diffusers folders ----------------------------------------------------------------------------------------------


def test_float16_folder(checkpoint, tmp_path):
    """A float16 checkpoint is exported in float32, with its weights."""
    from diffusers import UNet2DConditionModel

    manifest = exporter.export(str(checkpoint), tmp_path / "out", exporter="torchscript", components=["unet"])
    assert manifest["source"]["model"] == str(checkpoint)
    assert manifest["source"]["random_weights"] is False
    assert json.loads((tmp_path / "out" / "model_index.json").read_text())["_class_name"] == "StableDiffusionPipeline"
    unet = UNet2DConditionModel.from_pretrained(checkpoint, subfolder="unet", torch_dtype=torch.float16).float().eval()
    inputs = {
        "sample": torch.randn(1, 4, 6, 10),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 7, 64),
    }
    with torch.no_grad():
        expected = unet(*inputs.values(), return_dict=False)[0].numpy()
    actual = exporter.run_onnx(tmp_path / "out" / "unet" / "model.onnx", inputs)
    assert exporter.compare_outputs(actual, [expected])["nmse"] < 1e-10


def test_changed_weights_are_exported_again(checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    copy, lines = tmp_path / "copy", []
    shutil.copytree(checkpoint, copy)
    options = {"exporter": "torchscript", "components": ["vae_decoder"]}
    exporter.export(str(copy), tmp_path / "out", **options, on_progress=lines.append)
    exporter.export(str(copy), tmp_path / "out", **options, progress=lines.append)  # the old name
    assert "up to date" in lines[-1]
    path = copy / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    weights["decoder.conv_in.bias"] += 1
    save_file(weights, path, metadata={"format": "pt"})
    exporter.export(str(copy), tmp_path / "out", **options, on_progress=lines.append)
    assert "up to date" not in lines[-1]


def test_checkpoint_with_a_controlnet(checkpoint, tmp_path):
    open_preset("sd15-controlnet-mini", 6).load("controlnet").save_pretrained(tmp_path / "net")
    out = tmp_path / "out"
    options = {"exporter": "torchscript", "components": ["unet", "controlnet"]}
    exporter.export(str(checkpoint), out, controlnet=str(tmp_path / "net"), **options)
    unet, net = (onnx.load(out / c / "model.onnx", load_external_data=False).graph for c in ("unet", "controlnet"))
    residuals = [i.name for i in unet.input][3:]
    assert residuals[:-1] == [o.name for o in net.output][:-1]
    assert residuals[-1] == "mid_block_additional_residual"
    assert json.loads((out / "model_index.json").read_text())["controlnet"] == ["diffusers", "ControlNetModel"]
