"""FIFOs, devices, links and folders in place of files: refused at once, and nothing outside a folder is read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import tiny_pipeline
from onnx import TensorProto, helper, numpy_helper
from test_hostile import COMMANDS, Cli, arguments, check, optimized, pristine, source

from sd_ort.core import onnx_file
from sd_ort.core.errors import InputError, SdOrtError
from sd_ort.core.files import check_regular, open_regular, read_json, read_regular
from sd_ort.core.image_file import read_image
from sd_ort.core.npz_file import read_npz
from sd_ort.core.safetensors_file import read_entries, read_float32

__all__ = ["optimized", "pristine", "source"]  # fixtures

READERS: list[Callable[[Path], object]] = [
    open_regular, read_regular, check_regular, read_json, read_image, read_entries, read_float32, onnx_file.read,
    lambda path: read_npz(path, lambda name: True),
]  # fmt: skip
SPECIAL: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo, "folder": os.mkdir, "zero": lambda path: path.symlink_to("/dev/zero"),
    "link to a fifo": lambda path: (os.mkfifo(f"{path}.fifo"), path.symlink_to(f"{path}.fifo")),
    "loop": lambda path: path.symlink_to(path.name), "nowhere": lambda path: path.symlink_to("nowhere"),
}  # fmt: skip
FILES = sorted(
    ["model_index.json", "sd_ort.json", "scheduler/scheduler_config.json", "tokenizer/vocab.json", "unet/config.json",
     "tokenizer/merges.txt", "unet/model.onnx", "unet/model.onnx.data", "vae_decoder/config.json"]
)  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", SPECIAL)
def test_readers_open_regular_files_alone(tmp_path: Path, reader: Callable[[Path], object], kind: str) -> None:
    path = tmp_path / "file"
    SPECIAL[kind](path)
    with pytest.raises((InputError, OSError)):
        reader(path)


def test_a_file_larger_than_its_limit_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(9))
    assert read_regular(tmp_path / "file", limit=9) == bytes(9)
    with pytest.raises(InputError, match="9 bytes, more than 8"):
        read_regular(tmp_path / "file", limit=8)


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", FILES)
def test_special_files_in_a_folder(sd_ort: Cli, source: Path, optimized: Path, name: str, kind: str) -> None:
    """Every command ends, with one line where it needs the file."""
    (source / name).unlink(missing_ok=True)
    SPECIAL[kind](source / name)
    names = {path.name for path in source.parent.iterdir()}
    for command in COMMANDS:
        result = sd_ort(*arguments(command, source, source.parent / "out", optimized))
        if result[0]:
            check(result, source.parent, names)
        for output in ("out", "out.onnx", "out.png"):
            path = source.parent / output
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


@pytest.mark.parametrize("name", [name for name in FILES if name != "sd_ort.json"])
def test_generate_reads_nothing_outside_of_its_folder(sd_ort: Cli, source: Path, name: str) -> None:
    elsewhere = source.parent / "elsewhere"
    shutil.move(source / name, elsewhere)
    (source / name).symlink_to(elsewhere)
    result = sd_ort("generate", "a cat", "--model", source, "--out", source.parent / "out.png", "--steps", 1)
    assert "outside its folder" in check(result, source.parent, {"in", "secret", "elsewhere"})


def test_a_manifest_outside_of_its_folder_is_not_read(optimized: Path, tmp_path: Path) -> None:
    from sd_ort import StableDiffusionPipeline

    folder = shutil.copytree(optimized, tmp_path / "folder")
    shutil.move(folder / "sd_ort.json", tmp_path / "elsewhere")
    (folder / "sd_ort.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="outside its folder"):
        StableDiffusionPipeline.from_pretrained(folder, "cpu")


def test_save_pretrained_copies_nothing_from_outside(optimized: Path, tmp_path: Path) -> None:
    from sd_ort import StableDiffusionPipeline

    folder = Path(shutil.copytree(optimized, tmp_path / "folder"))
    pipeline = StableDiffusionPipeline.from_pretrained(folder, "cpu")
    (folder / "notes.txt").symlink_to("/etc/passwd")
    with pytest.raises(InputError, match="outside its folder"):
        pipeline.save_pretrained(tmp_path / "copy")
    assert {path.name for path in tmp_path.iterdir()} == {"folder"}


@pytest.mark.parametrize("command", ["explain", "optimize"])
def test_merged_folders_are_named(sd_ort: Cli, source: Path, command: str) -> None:
    assert sd_ort("merge", source, source.parent / "merged")[0] == 0
    out = [source.parent / "out"] if command == "optimize" else []
    result = sd_ort(command, source.parent / "merged", *out)
    assert "merged" in check(result, source.parent, {"in", "secret", "merged"})


@pytest.mark.parametrize("option", [("--guidance", "nan"), ("--guidance", "inf"), ("--steps", "99999999")])
def test_merge_checks_its_numbers(sd_ort: Cli, source: Path, option: tuple[str, str]) -> None:
    code, _, err = sd_ort("merge", source, source.parent / "out", *option)
    assert (code, option[0] in err) == (2, True)
    assert not (source.parent / "out").exists()


@pytest.mark.parametrize(
    "options", [("--component", "nothing"), ("--height", 30), ("--guidance", "nan"), ("--width", 0)]
)
def test_benchmark_checks_its_numbers_before_any_work(
    sd_ort: Cli, source: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, object]
) -> None:
    monkeypatch.setattr("sd_ort.benchmark.engine_selection.find_engines", lambda *_: pytest.fail("work was done"))
    code, _, err = sd_ort("benchmark", source, "--out", source.parent / "out", *options)
    assert (code, str(options[1]) in err or str(options[0]) in err) == (2, True)


@pytest.mark.parametrize(("dividend", "divisor"), [(-(1 << 63), -1), (7, 0), (0, 0)])
@pytest.mark.parametrize("op", ["Div", "Mod"])
def test_integer_divisions_that_end_a_process_are_refused(tmp_path: Path, op: str, dividend: int, divisor: int) -> None:
    constants = [numpy_helper.from_array(np.array([value]), name) for name, value in (("a", dividend), ("b", divisor))]
    output = helper.make_tensor_value_info("c", TensorProto.INT64, [1])
    graph = helper.make_graph([helper.make_node(op, ["a", "b"], ["c"])], "g", [], [output], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "model.onnx")
    with pytest.raises(SdOrtError, match="without a result"):
        onnx_file.read(tmp_path / "model.onnx")


def test_the_toy_has_the_files(tmp_path: Path) -> None:
    folder = tiny_pipeline.write(tmp_path / "toy")
    assert [name for name in FILES if not (folder / name).is_file()] in ([], ["sd_ort.json"])
