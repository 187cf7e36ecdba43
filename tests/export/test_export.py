"""`sd-ort export`: equal to torch at sizes not traced at, whole folders, and errors that say what to do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from mini import mini

from sd_ort.core import folder
from sd_ort.core.errors import InputError, OutputError, VerificationError
from sd_ort.export import exporter as stage
from sd_ort.family import signatures
from sd_ort.family.checkpoints import PresetSource, component_signature
from sd_ort.family.modules import wrap
from sd_ort.family.presets import PRESETS, Preset

MINI = ("--preset", "sd15-mini", "--random-weights")
SD15_OPERATORS = {"Softmax": 32, "InstanceNormalization": 61, "LayerNormalization": 48, "Conv": 98}


@pytest.fixture(scope="module", autouse=True)
def mini_presets():
    """`sd15-mini` and the like, beside the real presets."""
    names = [name for name in PRESETS if name.endswith("-tiny")]
    minis = {name.replace("-tiny", "-mini"): mini(PRESETS[name]) for name in names}
    PRESETS.update(minis)
    yield
    for name in minis:
        del PRESETS[name]


def check_against_torch(path: Path, component: str, preset: str, sizes: dict[str, int], seed: int = 0) -> float:
    """NMSE of an exported component against torch at `sizes`, both built here from the preset."""
    source = PresetSource(preset, seed)
    config = json.loads((path / component / "config.json").read_text())
    signature = component_signature(source, component, config)
    module = wrap(
        component,
        source.load(signatures.MODEL_OF.get(component, component)),
        sdxl="XL" in PRESETS[preset].pipeline,
        controlnet="controlnet" in source.configs,
    )
    inputs = {t.name: stage.example(t, sizes, config, seed=7) for t in signature.inputs}
    with torch.no_grad():
        outputs = module(*inputs.values())
    expected = outputs if isinstance(outputs, tuple) else (outputs,)
    session = onnxruntime.InferenceSession(str(path / component / "model.onnx"), providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == [t.name for t in signature.inputs]
    assert [o.name for o in session.get_outputs()] == [t.name for t in signature.outputs]
    actual = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    for tensor, array in zip(signature.outputs, actual, strict=True):
        assert array.shape == tuple(signatures.size(axis, sizes) for axis in tensor.axes)
    return stage.compare(actual, [e.numpy() for e in expected])["nmse"]


def counts(path: Path) -> dict[str, int]:
    graph = onnx.load(path, load_external_data=False).graph
    return {op: sum(n.op_type == op for n in graph.node) for op in {n.op_type for n in graph.node}}


# --- Whole pipelines ------------------------------------------------------------------------------------------------


def test_sd15_folder_is_a_whole_pipeline(tiny_export):
    assert folder.components(tiny_export) == ["text_encoder", "unet", "vae_encoder", "vae_decoder"]
    for name in folder.components(tiny_export):
        assert sorted(p.name for p in (tiny_export / name).iterdir()) == [
            "config.json",
            "model.onnx",
            "model.onnx.data",
        ]
        folder.check_component(tiny_export, name)
    index = json.loads((tiny_export / "model_index.json").read_text())
    assert index["unet"] == ["diffusers", "UNet2DConditionModel"]
    from diffusers import PNDMScheduler
    from transformers import CLIPTokenizer

    assert PNDMScheduler.from_pretrained(tiny_export, subfolder="scheduler").config.beta_end == 0.012
    tokenizer = CLIPTokenizer.from_pretrained(tiny_export, subfolder="tokenizer")
    ids = tokenizer("A red circle!", padding="max_length", max_length=77).input_ids
    assert len(ids) == 77
    assert (ids[0], ids[-1], max(ids)) == (512, 513, 513)
    assert tokenizer.decode(ids, skip_special_tokens=True).split() == ["a", "red", "circle", "!"]


def test_sd15_manifest(tiny_export):
    manifest = folder.read_manifest(tiny_export)
    assert manifest["stage"] == "export"
    assert manifest["source"]["model"] == "sd15-tiny"
    assert manifest["source"]["random_weights"] is True
    assert manifest["options"] | {"opset": 20, "exporter": "dynamo", "seed": 0} == manifest["options"]
    assert manifest["versions"]["torch"].startswith("2.")
    assert folder.is_intact(tiny_export, manifest)
    for entry in manifest["components"].values():
        assert 0 < entry["torch_error"]["nmse"] <= stage.TOLERANCE
        assert 0 < entry["torch_error"]["max_abs"] < 1e-3


@pytest.mark.parametrize("component", ["text_encoder", "unet", "vae_encoder", "vae_decoder"])
def test_sd15_equals_torch_at_another_shape(tiny_export, component):
    sizes = {"batch": 3, "sequence": 77, "height": 8, "width": 40}
    assert check_against_torch(tiny_export, component, "sd15-tiny", sizes) <= 1e-10


def test_sd15_graph(tiny_export):
    path = tiny_export / "unet" / "model.onnx"
    found = counts(path)
    assert {op: found[op] for op in SD15_OPERATORS} == SD15_OPERATORS
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
        where = {e.key: e.value for e in tensor.external_data}
        assert where["location"] == "model.onnx.data"
        assert int(where["length"]) <= 1 << 20 or int(where["offset"]) % stage.ALIGNMENT == 0


def test_command_line_prints_a_table_and_does_nothing_twice(sd_ort, tmp_path):
    arguments = ("export", *MINI, "--component", "vae_decoder", "--exporter", "torchscript", tmp_path / "out")
    code, output, progress = sd_ort(*arguments)
    assert code == 0
    assert [line.split()[0] for line in output.splitlines()] == ["component", "vae_decoder"]
    assert [line.split()[0] for line in progress.splitlines()] == ["[1/1]", "[1/1]", "wrote"]
    before = (tmp_path / "out" / "vae_decoder" / "model.onnx").stat()
    code, output, progress = sd_ort(*arguments)
    assert code == 0
    assert progress.splitlines() == [f"{tmp_path / 'out'} is up to date."]
    assert (tmp_path / "out" / "vae_decoder" / "model.onnx").stat() == before


# --- Other exporters, opsets and families ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exporter", "opset", "component"),
    [
        ("dynamo", 18, "vae_encoder"),
        ("dynamo", 18, "text_encoder"),
        ("dynamo", 21, "vae_decoder"),
        ("dynamo", 23, "unet"),
        ("dynamo", 23, "text_encoder"),
        ("torchscript", 17, "text_encoder"),
        ("torchscript", 20, "unet"),
    ],
)
def test_opsets(tmp_path, exporter, opset, component):
    options = {"opset": opset, "exporter": exporter, "components": [component]}
    stage.export(None, tmp_path / "out", preset="sd15-mini", random_weights=True, **options)
    sizes = {"batch": 3, "sequence": 3, "height": 8, "width": 2}
    assert check_against_torch(tmp_path / "out", component, "sd15-mini", sizes) <= 1e-10
    model = onnx.load(tmp_path / "out" / component / "model.onnx", load_external_data=False)
    assert {o.domain: o.version for o in model.opset_import} == {"": opset}


@pytest.mark.parametrize(
    ("preset", "exporter", "names"),
    [
        ("sdxl-mini", "dynamo", ["text_encoder_2", "unet"]),
        ("sdxl-mini", "torchscript", ["text_encoder", "text_encoder_2"]),
        ("sdxl-refiner-mini", "torchscript", ["text_encoder_2", "unet"]),
        ("sd15-controlnet-mini", "dynamo", ["controlnet"]),
        ("sd15-controlnet-mini", "torchscript", ["unet", "controlnet"]),
        ("sd21-mini", "torchscript", ["unet"]),
    ],
)
def test_families(tmp_path, preset, exporter, names):
    options = {"exporter": exporter, "seed": 3, "components": names}
    manifest = stage.export(None, tmp_path / "out", preset=preset, random_weights=True, **options)
    sizes = {"batch": 3, "sequence": 9, "height": 4, "width": 6}
    assert sorted(manifest["components"]) == sorted(names)
    for component in names:
        assert check_against_torch(tmp_path / "out", component, preset, sizes, seed=3) <= 1e-10


def test_full_size_configs_have_the_published_sizes():
    """Parameters of the public models: SD 1.5 and its variants, SD 2.1, SDXL base."""
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
    first, again, other = (PresetSource("sd15-mini", seed).load("unet") for seed in (1, 1, 2))
    vectors = [tuple(p.flatten().tolist()) for p in first.parameters() if p.ndim == 1]
    assert len(set(vectors)) == len(vectors)
    assert all(abs(x) > 0 for v in vectors for x in v)
    state, same, different = first.state_dict(), again.state_dict(), other.state_dict()
    assert all(torch.equal(state[name], same[name]) for name in state)
    assert not any(torch.equal(state[name], different[name]) for name in state)


# --- Diffusers folders ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder saved by diffusers, in fp16, with random weights."""
    from diffusers import DiffusionPipeline

    root = tmp_path_factory.mktemp("checkpoint")
    source = PresetSource("sd15-mini", 5)
    (root / "configs").mkdir()
    source.write_configs(root / "configs")
    parts = {name: source.load(name).half() for name in source.configs}
    parts |= {"safety_checker": None, "feature_extractor": None}
    DiffusionPipeline.from_pretrained(root / "configs", **parts).save_pretrained(root / "sd")
    return root / "sd"


def test_fp16_folder(checkpoint, tmp_path):
    """An fp16 checkpoint is exported in fp32, with the weights it has."""
    from diffusers import UNet2DConditionModel

    manifest = stage.export(str(checkpoint), tmp_path / "out", exporter="torchscript", components=["unet"])
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
    actual = stage.run_onnx(tmp_path / "out" / "unet" / "model.onnx", inputs)
    assert stage.compare(actual, [expected])["nmse"] < 1e-10


def test_changed_weights_are_exported_again(checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    copy, lines = tmp_path / "copy", []
    shutil.copytree(checkpoint, copy)
    options = {"exporter": "torchscript", "components": ["vae_decoder"], "progress": lines.append}
    stage.export(str(copy), tmp_path / "out", **options)
    stage.export(str(copy), tmp_path / "out", **options)
    assert "up to date" in lines[-1]
    path = copy / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    weights["decoder.conv_in.bias"] += 1
    save_file(weights, path, metadata={"format": "pt"})
    stage.export(str(copy), tmp_path / "out", **options)
    assert "up to date" not in lines[-1]


def test_controlnet_beside_a_checkpoint(checkpoint, tmp_path):
    PresetSource("sd15-controlnet-mini", 6).load("controlnet").save_pretrained(tmp_path / "net")
    out = tmp_path / "out"
    options = {"exporter": "torchscript", "components": ["unet", "controlnet"]}
    stage.export(str(checkpoint), out, controlnet=str(tmp_path / "net"), **options)
    unet, net = (onnx.load(out / c / "model.onnx", load_external_data=False).graph for c in ("unet", "controlnet"))
    residuals = [i.name for i in unet.input][3:]
    assert residuals[:-1] == [o.name for o in net.output][:-1]
    assert residuals[-1] == "mid_block_additional_residual"
    assert json.loads((out / "model_index.json").read_text())["controlnet"] == ["diffusers", "ControlNetModel"]


# --- Bad input ------------------------------------------------------------------------------------------------------


def refused(sd_ort: Callable, tmp_path: Path, *arguments: object, code: int = 2) -> str:
    """The one-line error of an export that must fail and leave nothing in `tmp_path`."""
    before = sorted(tmp_path.iterdir())
    got, _, error = sd_ort("export", *arguments)
    assert got == code
    lines = [line for line in error.splitlines() if not line.startswith("[")]  # without the progress
    assert len(lines) == 1
    assert "Traceback" not in error
    assert sorted(tmp_path.iterdir()) == before, "nothing half-written is left"
    return lines[0]


def test_missing_folder(sd_ort, tmp_path):
    assert "does not exist" in refused(sd_ort, tmp_path, tmp_path / "nowhere", tmp_path / "out")


def test_folder_that_is_no_pipeline(sd_ort, tmp_path):
    (tmp_path / "some").mkdir()
    assert "is no diffusers pipeline" in refused(sd_ort, tmp_path, tmp_path / "some", tmp_path / "out")


def test_broken_index(sd_ort, tmp_path):
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "model_index.json").write_text("{")
    assert "cannot be read" in refused(sd_ort, tmp_path, tmp_path / "some", tmp_path / "out")


def test_pipeline_of_another_family(sd_ort, tmp_path):
    (tmp_path / "flux").mkdir()
    index = {"_class_name": "FluxPipeline", "text_encoder": ["transformers", "T5EncoderModel"]}
    (tmp_path / "flux" / "model_index.json").write_text(json.dumps(index))
    assert "T5EncoderModel" in refused(sd_ort, tmp_path, tmp_path / "flux", tmp_path / "out")


def test_onnx_folder_as_model(sd_ort, tiny_export, tmp_path):
    assert "holds ONNX models already" in refused(sd_ort, tmp_path, tiny_export, tmp_path / "out")


def test_unet_with_inputs_we_do_not_feed(sd_ort, checkpoint, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    config = json.loads((copy / "unet" / "config.json").read_text()) | {"encoder_hid_dim_type": "ip_image_proj"}
    (copy / "unet" / "config.json").write_text(json.dumps(config))
    assert "encoder_hid_dim_type = ip_image_proj" in refused(sd_ort, tmp_path, copy, tmp_path / "out")


@pytest.mark.parametrize("part", ["scheduler", "tokenizer"])
def test_checkpoint_without_a_part_that_drawing_needs(sd_ort, checkpoint, tmp_path, part):
    shutil.copytree(checkpoint, tmp_path / "copy", ignore=shutil.ignore_patterns(part))
    assert f"lacks its {part}" in refused(sd_ort, tmp_path, tmp_path / "copy", tmp_path / "out")


def test_config_that_torch_cannot_run(sd_ort, tmp_path, monkeypatch):
    preset = PRESETS["sd15-mini"]
    unet = preset.models["unet"] | {"dual_cross_attention": True}
    monkeypatch.setitem(PRESETS, "dual", Preset(preset.pipeline, preset.models | {"unet": unet}, preset.scheduler))
    options = ("--preset", "dual", "--random-weights", "--component", "unet")
    assert "torch cannot run this unet" in refused(sd_ort, tmp_path, *options, tmp_path / "out")


def test_weights_that_give_no_numbers(sd_ort, checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, tmp_path / "copy")
    (path,) = (tmp_path / "copy" / "vae").glob("*.safetensors")
    weights = load_file(path)
    weights["decoder.conv_in.bias"][0] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})
    arguments = (tmp_path / "copy", tmp_path / "out", "--component", "vae_decoder")
    assert "NaN" in refused(sd_ort, tmp_path, *arguments)


def test_exporter_that_gives_up(sd_ort, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("no such operator\nand a long story")

    monkeypatch.setitem(stage.EXPORTERS, "torchscript", fail)
    options = ("--exporter", "torchscript", "--component", "vae_decoder")
    error = refused(sd_ort, tmp_path, *MINI, *options, tmp_path / "out")
    assert error.endswith("(no such operator): try --exporter dynamo.")


def test_weights_as_bin_files_alone(sd_ort, checkpoint, tmp_path):
    from safetensors.torch import load_file

    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    (path,) = (copy / "vae").glob("*.safetensors")
    torch.save(load_file(path), path.with_suffix(".bin"))
    path.unlink()
    options = ("--exporter", "torchscript", "--component", "vae_decoder")
    code, _, error = sd_ort("export", copy, tmp_path / "out", *options)
    assert code == 0
    assert "rror" not in error  # diffusers says one where it looks for safetensors first


def test_truncated_checkpoint(sd_ort, checkpoint, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    path = copy / "unet" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    assert "cannot be loaded" in refused(sd_ort, tmp_path, copy, tmp_path / "out", "--component", "unet")


@pytest.mark.parametrize(
    ("model", "weight"), [("vae", "decoder.conv_in.bias"), ("text_encoder", "final_layer_norm.bias")]
)
def test_checkpoint_without_a_weight(sd_ort, checkpoint, tmp_path, model, weight):
    """The libraries would fill in random values and warn; an export of those would pass every later check."""
    from safetensors.torch import load_file, save_file

    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    (path,) = (copy / model).glob("*.safetensors")
    weights = load_file(path)
    (name,) = (key for key in weights if key.endswith(weight))
    del weights[name]
    save_file(weights, path, metadata={"format": "pt"})
    component = "vae_decoder" if model == "vae" else model
    assert weight in refused(sd_ort, tmp_path, copy, tmp_path / "out", "--component", component)


def test_hub_id_without_network(tmp_path):
    offline = "import os; os.environ['HF_HUB_OFFLINE'] = '1'"
    process = start_cli("nobody-here/no-such-model", tmp_path / "out", first=offline)
    error = process.communicate()[1]
    assert process.returncode == 2
    assert "check the name and the network" in error
    assert len(error.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_unknown_preset(sd_ort, tmp_path):
    assert "sd15-tiny" in refused(sd_ort, tmp_path, "--preset", "sd99", "--random-weights", tmp_path / "out")


def test_preset_without_weights(sd_ort, tmp_path):
    assert "--random-weights" in refused(sd_ort, tmp_path, "--preset", "sd15", tmp_path / "out")


def test_random_weights_without_preset(sd_ort, tmp_path):
    assert "--preset" in refused(sd_ort, tmp_path, "demo", "--random-weights", tmp_path / "out")


@pytest.mark.parametrize("arguments", [["out"], [*MINI, "demo", "out"]])
def test_wrong_number_of_arguments(sd_ort, tmp_path, arguments):
    assert "give " in refused(sd_ort, tmp_path, *arguments)


@pytest.mark.parametrize(("exporter", "opset"), [("dynamo", 17), ("torchscript", 23), ("dynamo", 99)])
def test_unsupported_opset(sd_ort, tmp_path, exporter, opset):
    error = refused(sd_ort, tmp_path, *MINI, "--exporter", exporter, "--opset", opset, tmp_path / "out")
    assert "choose one of " + ", ".join(map(str, stage.OPSETS[exporter])) in error


def test_unknown_exporter_and_component(sd_ort, tmp_path):
    assert "torchscript" in refused(sd_ort, tmp_path, *MINI, "--exporter", "jax", tmp_path / "out")
    assert "vae_decoder" in refused(sd_ort, tmp_path, *MINI, "--component", "vae", tmp_path / "out")


def test_output_that_is_not_ours(sd_ort, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("precious")
    assert "was not written by sd-ort" in refused(sd_ort, tmp_path, *MINI, tmp_path / "out", code=5)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "precious"


def test_wrong_numbers_are_refused(sd_ort, tmp_path, monkeypatch):
    """The check after export is a real one: outputs that are off by 0.1 % stop it."""
    run = stage.run_onnx
    monkeypatch.setattr(stage, "run_onnx", lambda *a: [1.001 * array for array in run(*a)])
    options = ("--component", "vae_decoder", "--exporter", "torchscript")
    assert "differs from torch" in refused(sd_ort, tmp_path, *MINI, *options, tmp_path / "out", code=4)


def test_no_room_for_the_weights(sd_ort, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    error = refused(sd_ort, tmp_path, *MINI, "--component", "vae_decoder", tmp_path / "out", code=5)
    assert "no space left" in error


# The command line in a process of its own, with the mini preset; what is filled in runs first.
MAIN = """
{}
from sd_ort.cli import main
from mini import mini
from sd_ort.family.presets import PRESETS
PRESETS["sd15-mini"] = mini(PRESETS["sd15-tiny"])
main()
"""


def start_cli(*arguments: object, first: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MAIN.format(first), "export", *map(str, arguments)]
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # ignored where a script runs the tests as a job
    )


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_full_disk(tmp_path, exporter):
    """The system refuses to write more than 0.1 MB to a file, in the middle of the weights."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    options = ("--component", "text_encoder", "--exporter", exporter)
    process = start_cli(*MINI, *options, tmp_path / "out", first=limit)
    error = process.communicate()[1].splitlines()
    assert process.returncode == 5, error
    assert error[-1].startswith("sd-ort: no space left")
    assert len([line for line in error if not line.startswith("[")]) == 1
    assert list(tmp_path.iterdir()) == []


def test_interrupt(tmp_path):
    process = start_cli("--preset", "sd15-tiny", "--random-weights", "--component", "unet", tmp_path / "out")
    assert process.stderr is not None
    assert "exporting" in process.stderr.readline()
    time.sleep(3)  # into the export
    assert [p.name[:13] for p in tmp_path.iterdir()] == [".out.partial-"]
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 130
    assert [line for line in error if line][-1].startswith("sd-ort: interrupted")
    assert "Traceback" not in "".join(error)
    assert list(tmp_path.iterdir()) == []


def test_python_api_raises_the_same(tmp_path):
    with pytest.raises(InputError, match="unknown preset"):
        stage.export(None, tmp_path / "out", preset="sd99", random_weights=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="was not written by sd-ort"):
        stage.export(None, tmp_path / "file", preset="sd15-mini", random_weights=True)
    assert issubclass(VerificationError, Exception)
