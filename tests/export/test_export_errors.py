"""`sd-ort export` refuses with one line that says what to do, and leaves nothing half-written."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from minis import MINI

from sd_ort.core.errors import InputError, OutputError, VerificationError
from sd_ort.export import exporter as stage
from sd_ort.family.presets import PRESETS, Preset


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


def test_onnx_folder_as_model(sd_ort, small_export, tmp_path):
    assert "holds ONNX models already" in refused(sd_ort, tmp_path, small_export, tmp_path / "out")


@pytest.mark.parametrize(("key", "value"), [("encoder_hid_dim_type", "ip_image_proj"), ("attention_type", "gated")])
def test_unet_with_inputs_we_do_not_feed(sd_ort, checkpoint, tmp_path, key, value):
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    config = json.loads((copy / "unet" / "config.json").read_text()) | {key: value}
    (copy / "unet" / "config.json").write_text(json.dumps(config))
    assert f"{key} = {value}" in refused(sd_ort, tmp_path, copy, tmp_path / "out")


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


def test_hub_id_without_network(sd_ort, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    error = refused(sd_ort, tmp_path, "nobody-here/no-such-model", tmp_path / "out")
    assert "check the name and the network" in error
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


# The command line in a process of its own, with the mini preset.
MAIN = """
from minis import PRESETS, minis
from sd_ort.cli import main
PRESETS.update(minis())
main()
"""


def start_cli(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MAIN, "export", *map(str, arguments)]
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'tests' / 'support'}"}
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
def test_full_disk(sd_ort, tmp_path, exporter):
    """The system refuses to write more than 0.1 MB to a file, in the middle of the weights."""
    options = ("--component", "text_encoder", "--exporter", exporter)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        code, _, said = sd_ort("export", *MINI, *options, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    error = said.splitlines()
    assert code == 5, error
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
