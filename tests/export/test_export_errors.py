"""Errors of `sd-ort export`: one line that says what to do, and no partial output."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_presets import MINI

from sd_ort.checkpoints.presets import PRESETS, Preset
from sd_ort.core.errors import InputError, OutputError, VerificationError
from sd_ort.export import exporter


@pytest.fixture(autouse=True)
def new_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the copying of earlier exports."""
    monkeypatch.setattr(exporter, "export_component", inspect.unwrap(exporter.export_component))


def export_error(sd_ort: Callable, tmp_path: Path, *arguments: object, code: int = 2) -> str:
    """Return the one-line error of an export that must fail and write nothing to `tmp_path`."""
    before = sorted(tmp_path.iterdir())
    exit_code, _, error = sd_ort("export", *arguments)
    assert exit_code == code
    lines = [line for line in error.splitlines() if not line.startswith("[")]  # without progress lines
    assert len(lines) == 1
    assert "Traceback" not in error
    assert sorted(tmp_path.iterdir()) == before, "no partial output"
    return lines[0]


def test_missing_folder(sd_ort, tmp_path):
    assert "does not exist" in export_error(sd_ort, tmp_path, tmp_path / "nowhere", tmp_path / "out")


def test_folder_without_a_pipeline(sd_ort, tmp_path):
    (tmp_path / "some").mkdir()
    assert "is no diffusers pipeline" in export_error(sd_ort, tmp_path, tmp_path / "some", tmp_path / "out")


def test_broken_index(sd_ort, tmp_path):
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "model_index.json").write_text("{")
    assert "cannot be read" in export_error(sd_ort, tmp_path, tmp_path / "some", tmp_path / "out")


def test_pipeline_of_another_family(sd_ort, tmp_path):
    (tmp_path / "flux").mkdir()
    index = {"_class_name": "PixArtAlphaPipeline", "text_encoder": ["transformers", "T5EncoderModel"]}
    (tmp_path / "flux" / "model_index.json").write_text(json.dumps(index))
    assert "lacks its text_encoder" in export_error(sd_ort, tmp_path, tmp_path / "flux", tmp_path / "out")


def test_onnx_folder_as_model(sd_ort, small_export, tmp_path):
    assert "holds ONNX models already" in export_error(sd_ort, tmp_path, small_export, tmp_path / "out")


@pytest.mark.parametrize(("key", "value"), [("encoder_hid_dim_type", "ip_image_proj"), ("attention_type", "gated")])
def test_unet_with_unsupported_inputs(sd_ort, checkpoint, tmp_path, key, value):
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    config = json.loads((copy / "unet" / "config.json").read_text()) | {key: value}
    (copy / "unet" / "config.json").write_text(json.dumps(config))
    assert f"{key} = {value}" in export_error(sd_ort, tmp_path, copy, tmp_path / "out")


@pytest.mark.parametrize("folder", ["scheduler", "tokenizer"])
def test_checkpoint_without_a_required_folder(sd_ort, checkpoint, tmp_path, folder):
    shutil.copytree(checkpoint, tmp_path / "copy", ignore=shutil.ignore_patterns(folder))
    assert f"lacks its {folder}" in export_error(sd_ort, tmp_path, tmp_path / "copy", tmp_path / "out")


def test_config_that_torch_cannot_run(sd_ort, tmp_path, monkeypatch):
    preset = PRESETS["sd15-mini"]
    unet = preset.models["unet"] | {"dual_cross_attention": True}
    monkeypatch.setitem(PRESETS, "dual", Preset(preset.pipeline, preset.models | {"unet": unet}, preset.scheduler))
    options = ("--preset", "dual", "--random-weights", "--component", "unet")
    assert "PyTorch cannot run this unet" in export_error(sd_ort, tmp_path, *options, tmp_path / "out")


def test_weights_that_give_nan(sd_ort, checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, tmp_path / "copy")
    (path,) = (tmp_path / "copy" / "vae").glob("*.safetensors")
    weights = load_file(path)
    weights["decoder.conv_in.bias"][0] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})
    arguments = (tmp_path / "copy", tmp_path / "out", "--component", "vae_decoder")
    assert "NaN" in export_error(sd_ort, tmp_path, *arguments)


def test_exporter_that_fails(sd_ort, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("no such operator\nand a long story")

    monkeypatch.setitem(exporter.EXPORTERS, "torchscript", fail)
    options = ("--exporter", "torchscript", "--component", "vae_decoder")
    error = export_error(sd_ort, tmp_path, *MINI, *options, tmp_path / "out")
    assert error.endswith("(no such operator): try --exporter dynamo.")


def test_weights_only_as_bin_files(sd_ort, checkpoint, tmp_path):
    from safetensors.torch import load_file

    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    (path,) = (copy / "vae").glob("*.safetensors")
    torch.save(load_file(path), path.with_suffix(".bin"))
    path.unlink()
    options = ("--exporter", "torchscript", "--component", "vae_decoder")
    code, _, error = sd_ort("export", copy, tmp_path / "out", *options)
    assert code == 0
    assert "rror" not in error  # diffusers logs one when it finds no safetensors


def test_truncated_checkpoint(sd_ort, checkpoint, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    path = copy / "unet" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    assert "(truncated)" in export_error(sd_ort, tmp_path, copy, tmp_path / "out", "--component", "unet")
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "(a Git LFS pointer: run `git lfs pull`)" in export_error(sd_ort, tmp_path, copy, tmp_path / "out")
    path.unlink()
    code, output, error = sd_ort("export", copy, tmp_path / "out")
    assert (code, output) == (2, ""), "before another component is exported"
    assert "has no file of weights" in error


@pytest.mark.parametrize(
    ("model", "weight"), [("vae", "decoder.conv_in.bias"), ("text_encoder", "final_layer_norm.bias")]
)
def test_checkpoint_without_a_weight(sd_ort, checkpoint, tmp_path, model, weight):
    """The libraries would insert random values and warn; such an export would pass every later check."""
    from safetensors.torch import load_file, save_file

    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    (path,) = (copy / model).glob("*.safetensors")
    weights = load_file(path)
    (name,) = (key for key in weights if key.endswith(weight))
    del weights[name]
    save_file(weights, path, metadata={"format": "pt"})
    component = "vae_decoder" if model == "vae" else model
    assert weight in export_error(sd_ort, tmp_path, copy, tmp_path / "out", "--component", component)


def test_hub_id_without_network(sd_ort, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    error = export_error(sd_ort, tmp_path, "nobody-here/no-such-model", tmp_path / "out")
    assert "check the name and the network" in error
    assert list(tmp_path.iterdir()) == []


def test_unknown_preset(sd_ort, tmp_path):
    assert "sd15-tiny" in export_error(sd_ort, tmp_path, "--preset", "sd99", "--random-weights", tmp_path / "out")


def test_preset_without_weights(sd_ort, tmp_path):
    assert "--random-weights" in export_error(sd_ort, tmp_path, "--preset", "sd15", tmp_path / "out")


def test_random_weights_without_preset(sd_ort, tmp_path):
    assert "--preset" in export_error(sd_ort, tmp_path, "demo", "--random-weights", tmp_path / "out")


@pytest.mark.parametrize("arguments", [["out"], [*MINI, "demo", "out"]])
def test_wrong_number_of_arguments(sd_ort, tmp_path, arguments):
    assert "give " in export_error(sd_ort, tmp_path, *arguments)


@pytest.mark.parametrize(("backend", "opset"), [("dynamo", 17), ("torchscript", 23), ("dynamo", 99)])
def test_unsupported_opset(sd_ort, tmp_path, backend, opset):
    error = export_error(sd_ort, tmp_path, *MINI, "--exporter", backend, "--opset", opset, tmp_path / "out")
    assert "choose one of " + ", ".join(map(str, exporter.OPSETS[backend])) in error


def test_unknown_exporter_and_component(sd_ort, tmp_path):
    assert "torchscript" in export_error(sd_ort, tmp_path, *MINI, "--exporter", "jax", tmp_path / "out")
    assert "vae_decoder" in export_error(sd_ort, tmp_path, *MINI, "--component", "vae", tmp_path / "out")


@pytest.mark.parametrize("command", [("export", *MINI), ("export", "owner/name"), ("optimize", "owner/name")])
def test_output_that_sd_ort_did_not_write(sd_ort, tmp_path, command):
    """It is rejected before a model is downloaded, and stays."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("precious")
    code, _, error = sd_ort(*command, tmp_path / "out")
    assert code == 5
    assert "was not written by sd-ort" in error
    assert (tmp_path / "out" / "thesis.txt").read_text() == "precious"


def test_wrong_outputs_are_rejected(sd_ort, tmp_path, monkeypatch):
    """Outputs that differ by 0.1 % fail the comparison with torch."""
    run = exporter.run_onnx
    monkeypatch.setattr(exporter, "run_onnx", lambda *a: [1.001 * array for array in run(*a)])
    options = ("--component", "vae_decoder", "--exporter", "torchscript")
    assert "differs from torch" in export_error(sd_ort, tmp_path, *MINI, *options, tmp_path / "out", code=4)


def test_no_disk_space_for_the_weights(sd_ort, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    error = export_error(sd_ort, tmp_path, *MINI, "--component", "vae_decoder", tmp_path / "out", code=5)
    assert "No space left" in error


# The command in another process, with the small presets.
MAIN = """
from sd_ort.checkpoints.presets import PRESETS
from small_presets import minis
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
        # SIGINT is ignored if a script runs the tests as a background job.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize("backend", ["dynamo", "torchscript"])
def test_full_disk(sd_ort, tmp_path, monkeypatch, backend):
    """A file size limit of 0.1 MB fails a write in the middle of the weights."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of modules imported here: Python stores what was cut off
    options = ("--component", "text_encoder", "--exporter", backend)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        code, _, stderr = sd_ort("export", *MINI, *options, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    error = stderr.splitlines()
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


def test_an_interrupt_keeps_finished_components(tmp_path, monkeypatch):
    """The same export takes them and leaves nothing beside its folder; one with other options exports all of them."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    failures: dict[str, BaseException] = {}
    interrupted = threading.Event()
    exported: list[str] = []

    def export_component(_, name, folder, options):
        failure = failures.pop(name, None)
        if isinstance(failure, KeyboardInterrupt):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # a real one ends its wait
            interrupted.wait(60)
        if failure:
            raise failure
        exported.append(name)
        folder.mkdir()
        (folder / "model.onnx").write_text(f"{name} {options.opset}")
        return {"seconds": 0.1}

    def run(opset):
        exported.clear()
        interrupted.clear()
        lines: list[str] = []
        options = {"preset": "sd15-mini", "random_weights": True, "exporter": "torchscript", "opset": opset}
        manifest = exporter.export(None, tmp_path / "out", **options, on_progress=lines.append)
        return lines, list(manifest["components"])

    def interrupt(opset, name):
        failures[name] = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            run(opset)
        interrupted.set()

    monkeypatch.setattr(exporter, "export_component", export_component)
    # It would end this process if the folder was not removed within 1.5 s of the interrupt.
    monkeypatch.setattr("sd_ort.core.staging.with_watchdog", contextlib.nullcontext)
    try:
        interrupt(17, "unet")
        assert [path.name for path in tmp_path.iterdir()] == [".out.finished"]
        interrupt(20, "unet")
        assert exported == ["text_encoder"]
        interrupt(20, "vae_decoder")
        assert exported == ["unet", "vae_encoder"]
    finally:
        signal.signal(signal.SIGINT, handler)
    lines, components = run(20)
    assert exported == ["vae_decoder"]
    assert components == ["text_encoder", "unet", "vae_encoder", "vae_decoder"]
    assert lines[2] == "[3/4] vae_encoder: taken from the export that was interrupted"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    for name in components:
        assert (tmp_path / "out" / name / "model.onnx").read_text() == f"{name} 20"

    failures["unet"] = OutputError("No space left.")
    with pytest.raises(OutputError):
        run(17)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_python_api_raises_the_same_errors(tmp_path):
    with pytest.raises(InputError, match="unknown preset"):
        exporter.export(None, tmp_path / "out", preset="sd99", random_weights=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="was not written by sd-ort"):
        exporter.export(None, tmp_path / "file", preset="sd15-mini", random_weights=True)
    assert issubclass(VerificationError, Exception)
