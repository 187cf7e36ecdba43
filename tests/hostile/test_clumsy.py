"""Paths, links, numbers, signals and leftovers: what people and other programs do to a command that means well."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import malformed_models
import numpy as np
import onnxruntime
import pytest
import tiny_pipeline
from cli_type import success
from PIL import Image
from test_hostile import COMMANDS, Cli, arguments, check, optimized, pristine, source

from sd_ort.core import pipeline_folder
from sd_ort.core.errors import InputError
from sd_ort.stages import optimize

__all__ = ["optimized", "pristine", "source"]  # fixtures

NAME = "x" * 240
CUDA_ALONE = ("build-ops", "--no-cpu", "--no-provider", "--cuda", "sm_90")  # which needs no headers: none are fetched


# --- Outputs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["optimize", "merge"])
@pytest.mark.parametrize("out", ["in", "in/unet", "in/new", ".", "in/../in", "link", "link/new", NAME, f"{NAME}/x" * 20,
                                 "secret", "secret/out", "loop"])  # fmt: skip
def test_outputs_that_would_destroy(sd_ort: Cli, source: Path, command: str, out: str) -> None:
    here = source.parent
    (here / "link").symlink_to("in")
    (here / "loop").symlink_to("loop")
    before, names = pipeline_folder.tree_hash(source), {path.name for path in here.iterdir()}
    check(sd_ort(command, source, here / out), here, names)
    assert pipeline_folder.tree_hash(source) == before


@pytest.mark.parametrize("out", ["in", "in/results", "in/unet"])
def test_benchmark_into_a_pipeline(sd_ort: Cli, source: Path, out: str) -> None:
    before = pipeline_folder.tree_hash(source)
    result = sd_ort("benchmark", source, "--engines", "raw", "--out", source.parent / out)
    assert "lies in the pipeline folder" in check(result, source.parent, {"in", "secret"})
    assert pipeline_folder.tree_hash(source) == before


def test_export_into_its_source(sd_ort: Cli, source: Path) -> None:
    for name in tiny_pipeline.CONFIGS:
        (source / name / "model.onnx").unlink()
    (source / "vae").mkdir()
    tiny_pipeline.dump(source / "vae" / "config.json", tiny_pipeline.VAE)
    before, names = pipeline_folder.tree_hash(source), {path.name for path in source.parent.iterdir()}
    for out in (source, source.parent, source / "onnx"):
        assert "lies in the other" in check(sd_ort("export", source, out), source.parent, names)
    assert pipeline_folder.tree_hash(source) == before


@pytest.mark.parametrize("out", ["out", "nowhere/../out", "a/b/out", "link", "dangling"])
def test_outputs_that_are_fine(sd_ort: Cli, source: Path, out: str) -> None:
    here = source.parent
    optimize(source, here / "earlier", components=["vae_decoder"])
    (here / "link").symlink_to("earlier")
    (here / "dangling").symlink_to("later")
    success(sd_ort, "optimize", source, here / out)
    target = Path(os.path.realpath(here / out))
    assert pipeline_folder.components(target) == ["text_encoder", "unet", "vae_decoder"]
    assert (here / "link").is_symlink()
    assert (here / "dangling").is_symlink()
    assert not list(here.glob(".*"))


def test_leftovers_of_a_killed_run_are_removed(sd_ort: Cli, source: Path) -> None:
    dead, alive = (source.parent / f".out.partial-{name}" for name in ("dead", "alive"))
    for path in (dead, alive):
        (path / "unet").mkdir(parents=True)
    lock = os.open(alive, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        assert sd_ort("optimize", source, source.parent / "out")[0] == 0
    finally:
        os.close(lock)
    assert not dead.exists()
    assert alive.exists()


# --- Links ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokenizer/vocab.json", "scheduler", "unet", "unet/model.onnx", "unet/config.json",
                                  "unet/model.onnx.data", "model_index.json"])  # fmt: skip
def test_links_out_of_the_folder_are_not_followed(sd_ort: Cli, source: Path, name: str) -> None:
    elsewhere = source.parent / "elsewhere"
    shutil.move(source / name, elsewhere)
    (source / name).symlink_to(elsewhere)
    line = check(sd_ort("optimize", source, source.parent / "out"), source.parent, {"in", "secret", "elsewhere"})
    assert "outside its folder" in line


def test_only_what_a_pipeline_needs_is_copied(sd_ort: Cli, source: Path) -> None:
    (source / "tokenizer" / "x.json").symlink_to("/etc/passwd")
    (source / "tokenizer" / "etc").symlink_to("/etc")
    os.mkfifo(source / "scheduler" / "pipe.json")
    assert sd_ort("optimize", source, source.parent / "out")[0] == 0
    copied = {path.name for path in (source.parent / "out" / "tokenizer").iterdir()}
    assert "vocab.json" in copied
    assert not copied & {"x.json", "etc"}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_hub_cache_is_read(sd_ort: Cli, source: Path, optimized: Path, command: str) -> None:
    cache = source.parent / "models--owner--name"
    snapshot = cache / "snapshots" / "0123456789abcdef"
    (cache / "blobs").mkdir(parents=True)
    for index, path in enumerate(sorted(path for path in source.rglob("*") if path.is_file())):
        link = snapshot / path.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        path.rename(cache / "blobs" / str(index))
        link.symlink_to(os.path.relpath(cache / "blobs" / str(index), link.parent))
    success(sd_ort, *arguments(command, snapshot, source.parent / "out", optimized))


@pytest.mark.parametrize("command", COMMANDS)
def test_hard_links_are_read(sd_ort: Cli, source: Path, optimized: Path, command: str) -> None:
    shutil.copytree(source, source.with_name("again"), copy_function=os.link)
    success(sd_ort, *arguments(command, source, source.parent / "out", optimized))


def test_two_at_once_of_one_folder(source: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        outs = [source.with_name(f"out{index}") for index in range(2)]
        for _ in pool.map(lambda out: optimize(source, out, target="portable", dtype="float16", calibrate=True), outs):
            pass
    assert pipeline_folder.sha256(outs[0] / "unet" / pipeline_folder.DATA) == pipeline_folder.sha256(
        outs[1] / "unet" / pipeline_folder.DATA
    )
    assert all(path.stat().st_nlink == 1 for path in source.rglob("*") if path.is_file())


# --- The cache ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", ["", "{", "[]", '{"sources": 3}', None])
def test_a_damaged_cache_is_no_fault(
    sd_ort: Cli, source: Path, optimized: Path, monkeypatch: pytest.MonkeyPatch, record: str | None
) -> None:
    cache = source.parent / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    build = cache / "sd-ort" / "ops" / "0123" / "build.json"
    build.parent.mkdir(parents=True)
    build.write_text(record) if record is not None else build.mkdir()
    assert sd_ort("verify", source, optimized)[0] == 0


def test_a_cache_that_cannot_be_written(
    sd_ort: Cli, source: Path, optimized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(source.parent / "secret"))
    assert sd_ort("verify", source, optimized)[0] == 0
    fake_compilers(source.parent / "bin", "true", monkeypatch)
    line = check_build(sd_ort(*CUDA_ALONE))
    assert "secret" in line


def fake_compilers(bin: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put cmake, nvcc and a C++ compiler on PATH that answer --version, and else run `script`."""
    bin.mkdir()
    for name in ("cmake", "nvcc", "g++"):
        (bin / name).write_text(f'#!/bin/sh\n[ "$1" = --version ] && {{ echo 1; exit; }}\n{script}\n')
        (bin / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin}:/usr/bin:/bin")
    monkeypatch.delenv("CXX", raising=False)


def check_build(result: tuple[int, str, str]) -> str:
    code, _, err = result
    lines = [line for line in err.splitlines() if line]
    assert code == 5, err
    assert len(lines) == 1, err
    return lines[0]


def test_a_full_disk_while_building(sd_ort: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    script = "for i in 1 2 3 4 5; do echo line $i; done; echo 'fatal error: No space left on device' >&2; exit 1"
    fake_compilers(tmp_path / "bin", script, monkeypatch)
    assert "no space left" in check_build(sd_ort(*CUDA_ALONE))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_compilers_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Each compiler holds the writing end of a pipe open: it reads empty once the last of them is gone."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    fake_compilers(tmp_path / "bin", f"exec 9>{pipe}; echo started >&9; (sleep 600) & sleep 600", monkeypatch)
    process = subprocess.Popen(
        [sys.executable, "-c", "from sd_ort.cli import main; main()", *CUDA_ALONE],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    with pipe.open() as reader:
        assert reader.readline() == "started\n"
        process.send_signal(number)
        assert reader.read() == ""
    assert process.wait() == 130
    assert not list((tmp_path / "cache" / "sd-ort" / "ops").iterdir())


# --- Numbers and texts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    ["--seed", 2**64], ["--seed", 2**64 - 1, "--num-images", 2], ["--height", 640_000], ["--width", -8],
    ["--height", 0], ["--width", 20], ["--guidance", "nan"], ["--guidance", "inf"], ["--guidance", "-inf"],
    ["--steps", 10**9], ["--steps", 10**30], ["--num-images", 10**9], ["--negative", "\udcff"],
    ["--scheduler", "nothing"], ["--scheduler", ""], ["--provider", "tpu"], ["--image", "nowhere.png"],
    ["--out", "/dev/null/x.png"], ["--threads", 0], ["--batch", 0],
])  # fmt: skip
def test_numbers_out_of_range(sd_ort: Cli, source: Path, options: list[object]) -> None:
    names = {path.name for path in source.parent.iterdir()}
    out = source.parent / "out.png"
    check(sd_ort("generate", "a cat", "--model", source, "--out", out, "--steps", 2, *options), source.parent, names)


def test_a_folder_without_its_tokenizer_is_refused(sd_ort: Cli, source: Path) -> None:
    """Of an empty folder transformers makes a tokenizer that knows no word."""
    for path in (source / "tokenizer").iterdir():
        path.unlink()
    names = {path.name for path in source.parent.iterdir()}
    out = source.parent / "out.png"
    line = check(sd_ort("generate", "a cat", "--model", source, "--out", out, "--steps", 1), source.parent, names)
    assert "no CLIP tokenizer" in line


@pytest.mark.parametrize("options", [
    ["--out", "/dev/null/x.png"], ["--provider", "rocm"], ["--lora", "nowhere.safetensors"], ["--prompts", "x.txt"],
])  # fmt: skip
def test_errors_come_before_a_checkpoint_is_optimized(sd_ort: Cli, options: list[object]) -> None:
    code, _, err = sd_ort("generate", "a cat", "--model", "demo", *options)
    assert code in (2, 3, 5), err
    assert len([line for line in err.splitlines() if not line.startswith("provider ")]) == 1, err


@pytest.mark.parametrize("prompt", ["\udcff", "a \ud800 cat"])
def test_a_prompt_that_is_no_text(sd_ort: Cli, source: Path, prompt: str) -> None:
    result = sd_ort("generate", prompt, "--model", source, "--out", source.parent / "out.png")
    assert "UTF-8" in check(result, source.parent, {"in", "secret"})


def test_a_long_prompt_is_not_echoed(sd_ort: Cli, source: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = source.parent / "out.png"
    code, text, err = sd_ort("generate", "cat " * 25_000, "--model", source, "--out", out, "--steps", 2)
    assert code == 0
    assert len(text) + len(err) + len(caplog.text) < 5000


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_the_same_through_python(pristine: Path, seed: int, scale: float) -> None:
    from sd_ort import StableDiffusionPipeline

    pipeline = StableDiffusionPipeline.from_pretrained(pristine)
    with pytest.raises(InputError, match="seed"):
        pipeline("a cat", num_inference_steps=2, generator=seed, progress=False)
    with pytest.raises(InputError, match="guidance_scale"):
        pipeline("a cat", num_inference_steps=2, guidance_scale=scale, progress=False)
    with pytest.raises(InputError, match="a prompt is a text"):
        pipeline([3], num_inference_steps=2, progress=False)


# --- Signals --------------------------------------------------------------------------------------------------------

STUCK = """
import time
import sd_ort.optimize.optimizer as stage
from sd_ort.cli import main
def stuck(model):
    print("rewriting", flush=True)
    time.sleep(600)  # as a library that cannot be interrupted
stage.canonicalize = stuck
main()
"""


# As a library that keeps the interpreter's lock: no handler of Python's can run.
LOCKED = STUCK.replace("time.sleep(600)", "__import__('re').match('(a+)+$', 'a' * 99 + 'b')")


@pytest.mark.parametrize(("number", "script", "code"), [
    (signal.SIGTERM, STUCK, 130), (signal.SIGINT, STUCK, 130), (signal.SIGTERM, LOCKED, -signal.SIGKILL),
])  # fmt: skip
def test_a_signal_does_not_wait_for_the_threads(source: Path, number: signal.Signals, script: str, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", script, "optimize", str(source), str(source.parent / "out"), "--target", "portable"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert "rewriting" in process.stdout.readline()
    process.send_signal(number)
    _, err = process.communicate(timeout=300)  # half of what waiting for the threads would take
    assert process.returncode == code
    assert err.strip() == "sd-ort: interrupted; no half-written output is left."
    assert {path.name for path in source.parent.iterdir()} == {"in", "secret"}


@pytest.mark.parametrize("text", ["std::bad_alloc", "pthread_create failed, error code: 12 error msg: " + "x" * 300
                                  + " Cannot allocate memory"])  # fmt: skip
def test_too_little_memory(source: Path, sd_ort: Cli, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """What ONNX Runtime says under `ulimit -v`. Below some 250 MB glibc and OpenBLAS end the process themselves."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(f"[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : {text}")

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    monkeypatch.chdir(source.parent)
    result = sd_ort("generate", "a cat", "--model", source, "--provider", "cpu", "--out", "out.png")
    assert "not enough memory" in check(result, source.parent, {"in", "secret"})


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="other processors divide integers by 0 without a signal")
@pytest.mark.parametrize(("command", "division"), [
    ("verify", ("Div", -(1 << 63), -1)), ("generate", ("Div", -(1 << 63), -1)), ("verify", ("Mod", 7, 0)),
    ("verify", ("Div", 7, 0)),
])  # fmt: skip
def test_a_division_without_a_result(
    source: Path, optimized: Path, command: str, division: tuple[str, int, int]
) -> None:
    """ONNX Runtime gets a SIGFPE, or says what it is."""
    malformed_models.damage(source / "unet", malformed_models.divide_at_run_time(*division))
    process = subprocess.run(
        [sys.executable, "-m", "sd_ort", *map(str, arguments(command, source, source.parent / "out", optimized))],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    result = process.returncode, process.stdout, process.stderr
    line = check(result, source.parent, {"in", "secret"})
    assert "divides integers by 0" in line or "by zero" in line


def test_image_of_any_mode(pristine: Path) -> None:
    """L and RGBA images are converted to RGB; the toy has no VAE encoder, so only the preprocessing is seen."""
    from sd_ort import StableDiffusionPipeline

    processor = StableDiffusionPipeline.from_pretrained(pristine).image_processor
    for mode in ("L", "RGBA", "P", "1"):
        image = Image.fromarray(np.zeros((64, 64, 3), np.uint8)).convert(mode)
        assert processor.preprocess(image).shape == (1, 3, 64, 64)
