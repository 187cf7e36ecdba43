"""Damaged and foreign GGUF files: one line that names what is wrong, nothing written, at once."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cli_type import Cli
from gguf_files import write_gguf

from sd_ort.checkpoints import weight_file
from sd_ort.core.errors import InputError

KEY = b"general.architecture"
HUGE = struct.pack("<Q", 1 << 62)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    tensors = {"double_blocks.0.img_attn.qkv.weight": np.ones((3, 32), np.float32), "img_in.weight": np.ones((2, 64))}
    write_gguf(path, {n: t.astype(np.float32) for n, t in tensors.items()}, dict.fromkeys(tensors, "Q8_0"))
    return path.read_bytes()


def put(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def type_at(data: bytes) -> int:
    """Return the place of the type number of the last tensor."""
    return data.index(b"img_in.weight") + len(b"img_in.weight") + 4 + 2 * 8


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "another format": (lambda d: put(d, 0, b"GGML"), "does not begin with GGUF"),
    "empty": (lambda d: b"", "truncated"),
    "version 1": (lambda d: put(d, 4, struct.pack("<I", 1)), "version 1"),
    "big-endian": (lambda d: put(d, 4, struct.pack(">I", 3)), "little-endian"),
    "many tensors": (lambda d: put(d, 8, HUGE), "a count of"),
    "many values": (lambda d: put(d, 16, HUGE), "a count of"),
    "a long key": (lambda d: put(d, 24, HUGE), "a string of"),
    "an unknown type of metadata": (lambda d: put(d, 32 + len(KEY), struct.pack("<I", 77)), "unknown type 77"),
    "a large array": (lambda d: put(d, 32 + len(KEY), struct.pack("<IIQ", 9, 4, 1 << 50)), "an array of"),
    "nested arrays": (lambda d: put(d, 32 + len(KEY), struct.pack("<IIQ", 9, 9, 1)), "an array of arrays"),
    "an unknown tensor type": (lambda d: put(d, type_at(d), struct.pack("<I", 99)), "is of the type 99"),
    "a type that is not read": (lambda d: put(d, type_at(d), struct.pack("<I", 16)), "is of the type 16"),
    "rows of half a block": (lambda d: put(d, type_at(d) - 16, struct.pack("<Q", 48)), "no multiple of 32"),
    "a huge shape": (lambda d: put(d, type_at(d) - 8, struct.pack("<Q", 1 << 50)), "damaged shape"),
    "data beyond the end": (lambda d: put(d, type_at(d) + 4, HUGE), "truncated"),
    "the end is missing": (lambda d: d[:-40], "truncated"),
    "a language model": (
        lambda d: d.replace(b"flux", b"bert").replace(b"double_blocks.0", b"double_block_.0"), "architecture 'bert'"
    ),
    "another transformer": (lambda d: d.replace(b"img_in.weight", b"llm_adapter.w"), "Anima or Cosmos"),
    "fill": (lambda d: d, "64 input channels|cannot be fetched|give a diffusers folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_is_refused(sd_ort: Cli, tmp_path: Path, good: bytes, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    damage, message = DAMAGE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(damage(good))
    start = time.process_time()
    code, _, err = sd_ort("optimize", path, tmp_path / "out", "--target", "portable")
    assert time.process_time() - start < 20
    lines = [line for line in err.splitlines() if line.startswith("sd-ort: ")]
    assert code == 2
    assert len(lines) == 1, err
    assert any(part in lines[0] for part in message.split("|")), lines[0]
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == [path]


def test_every_prefix_is_refused(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "model.gguf"
    for length in range(0, len(good) - 32, 3):  # the last tensor is padded
        path.write_bytes(good[:length])
        with pytest.raises(InputError, match="GGUF"):
            weight_file.read_entries(path)


def test_special_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.gguf")
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "zero.gguf").symlink_to("/dev/zero")
    for path in tmp_path.iterdir():
        with pytest.raises(InputError, match=r"regular file|is a folder"):
            weight_file.read_entries(path)


def test_an_original_shape_of_other_size(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "a.gguf", "sd1")
    writer.add_array("comfy.gguf.orig_shape.a", [4, 4])
    writer.add_tensor("a", np.ones((2, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InputError, match="8 elements and an original shape of 16"):
        weight_file.read_entries(tmp_path / "a.gguf")
