"""Hostile and clumsy inputs through every command that takes a folder.

Whatever is given: an exit code, one line that says what to do, no traceback, nothing written, the input unchanged.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import malformed_json
import malformed_models
import onnx
import pytest
import tiny_pipeline
from cli_type import Cli, success

from sd_ort.core import pipeline_folder

BUG = 70


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pipeline.write(tmp_path_factory.mktemp("toy") / "pipeline")


@pytest.fixture(scope="session")
def optimized(pristine: Path) -> Path:
    from sd_ort.stages import optimize

    out = pristine.with_name("optimized")
    optimize(pristine, out, target="portable")
    return out


@pytest.fixture
def source(pristine: Path, tmp_path: Path) -> Path:
    """A copy of the toy to damage, with a secret beside it."""
    (tmp_path / "secret").write_text("a secret of 21 bytes.")
    return Path(shutil.copytree(pristine, tmp_path / "in"))


def arguments(command: str, source: Path, out: Path, optimized: Path) -> list[object]:
    return {
        "optimize": ["optimize", source, out],
        "explain": ["explain", source],
        "verify": ["verify", source, optimized],
        "extract": [
            "extract",
            source,
            out.with_suffix(".onnx"),
            *"--component unet --from features --to moved".split(),
        ],
        "merge": ["merge", source, out],
        "generate": ["generate", "a cat", "--model", source, "--out", out.with_suffix(".png"), "--steps", 2],
    }[command]


COMMANDS = ("optimize", "explain", "verify", "extract", "merge", "generate")


def check(result: tuple[int, str, str], parent: Path, before: set[str]) -> str:
    """Refused as it should be; returns the one line."""
    code, _, err = result
    assert "Traceback" not in err
    messages = [line for line in err.splitlines() if line.startswith(("sd-ort: ", "Error: "))]
    assert len(messages) == 1, err[-2000:]
    assert code in (1, 2, 3, 4, 5), messages[0]
    assert len(messages[0]) < 1000
    assert {path.name for path in parent.iterdir()} == before
    return messages[0]


def run_hostile(sd_ort: Cli, command: str, source: Path, optimized: Path, must_refuse: bool) -> None:
    before, names = pipeline_folder.tree_hash(source), {path.name for path in source.parent.iterdir()}
    result = sd_ort(*arguments(command, source, source.parent / "out", optimized))
    if must_refuse or result[0]:
        check(result, source.parent, names)
    assert pipeline_folder.tree_hash(source) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_the_toy_itself_is_accepted(sd_ort: Cli, source: Path, optimized: Path, command: str) -> None:
    success(sd_ort, *arguments(command, source, source.parent / "out", optimized))


def test_a_timestep_without_an_axis(sd_ort: Cli, source: Path) -> None:
    """As Optimum exports it: a whole number of shape []."""

    def change(proto: onnx.ModelProto) -> None:
        proto.graph.input[1].CopyFrom(onnx.helper.make_tensor_value_info("timestep", onnx.TensorProto.INT64, []))

    malformed_models.damage(source / "unet", change)
    out = source.parent / "out"
    for folder, *options in ((out, "--target", "portable"), (out.with_name("half"), "--float16", "--target", "cuda")):
        text = success(sd_ort, "optimize", source, folder, *options)
        assert ("not hoisted" in text) == (folder != out)
        assert sd_ort("verify", source, folder)[0] == 0
    for folder_ in (source, out):
        png = source.parent / f"{folder_.name}.png"
        success(sd_ort, "generate", "a cat", "--model", folder_, "--out", png, "--steps", 2)
    code, _, err = sd_ort("optimize", source, out.with_name("x"), "--float16", "--target", "cuda", "--hoist")
    assert code == 2
    assert "leave out --hoist" in err


def test_the_component_that_makes_nan_is_named(sd_ort: Cli, source: Path) -> None:
    nan = malformed_models.inline_weight(data_type=1, dims=[1], float_data=[float("nan")])
    malformed_models.damage(source / "unet", nan)
    names = {path.name for path in source.parent.iterdir()}
    result = sd_ort("generate", "a cat", "--model", source, "--out", source.parent / "out.png", "--steps", 1)
    assert "unet" in check(result, source.parent, names)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", malformed_models.REFUSED)
def test_graph(sd_ort: Cli, source: Path, optimized: Path, name: str, command: str) -> None:
    malformed_models.damage(source / "unet", malformed_models.REFUSED[name])
    run_hostile(sd_ort, command, source, optimized, must_refuse=True)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", malformed_models.WRONG)
def test_graph_that_onnxruntime_refuses(sd_ort: Cli, source: Path, optimized: Path, name: str, command: str) -> None:
    malformed_models.damage(source / "unet", malformed_models.WRONG[name])
    refusing = ("generate",) if name in malformed_models.ONLY_RUN else ("generate", "optimize")
    run_hostile(sd_ort, command, source, optimized, must_refuse=command in refusing)


JSON = [
    pytest.param(file, content, command, id=f"{name} {command}")
    for name, file, content in malformed_json.cases()
    for command in malformed_json.READERS[file]
]


@pytest.mark.parametrize(("file", "content", "command"), JSON)
def test_json(sd_ort: Cli, source: Path, optimized: Path, file: str, content: Any, command: str) -> None:
    malformed_json.damage(source, file, content)
    is_unread = file == "tokenizer/tokenizer.json"  # vocab.json and merges.txt lie beside it
    is_tolerated = file.startswith("tokenizer") and content != malformed_json.BROKEN["cut"]
    broken = isinstance(content, bytes) and (command == "optimize" or not (is_unread or is_tolerated))
    run_hostile(sd_ort, command, source, optimized, must_refuse=broken)
