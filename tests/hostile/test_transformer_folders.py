"""`sd-ort optimize` refuses damaged and foreign transformer checkpoints in one line, and writes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_type import Cli, refusal
from gguf_files import write_gguf
from safetensors.numpy import load_file, save_file

from sd_ort.checkpoints.diffusers_folder import open_folder
from sd_ort.core.errors import InputError
from sd_ort.demo import TRANSFORMER_DIR

WHOLE = "diffusion_pytorch_model.safetensors"
INDEX = f"{WHOLE}.index.json"
SHARDS = [f"diffusion_pytorch_model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of demo-dit."""
    return Path(shutil.copytree(TRANSFORMER_DIR, tmp_path / "in"))


@pytest.fixture
def sharded(folder: Path) -> Path:
    """Its transformer's weights in three files and an index."""
    transformer = folder / "transformer"
    weights = load_file(transformer / WHOLE)
    (transformer / WHOLE).unlink()
    names = sorted(weights)
    for i, shard in enumerate(SHARDS):
        save_file({name: weights[name] for name in names[i::3]}, transformer / shard)
    shards = {name: SHARDS[i % 3] for i, name in enumerate(names)}
    (transformer / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": shards}))
    return folder


OPTIMIZE = ("optimize", "--target", "portable")


# --- Shards ---------------------------------------------------------------------------------------------------------


def rename(old: str, new: Any) -> Callable[[Path], None]:
    """Return a function that gives a shard another name in the index."""

    def change(transformer: Path) -> None:
        index = json.loads((transformer / INDEX).read_text())
        index["weight_map"] = {n: new if shard == old else shard for n, shard in index["weight_map"].items()}
        (transformer / INDEX).write_text(json.dumps(index))

    return change


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing shard": (lambda t: (t / SHARDS[1]).unlink(), f"lacks '{SHARDS[1]}'"),
    "no shard": (lambda t: [(t / shard).unlink() for shard in SHARDS], f"lacks '{SHARDS[0]}'"),
    "a file of another folder": (rename(SHARDS[1], f"../../{SHARDS[1]}"), "is no file of its folder"),
    "an absolute path": (rename(SHARDS[1], "/etc/passwd"), "is no file of its folder"),
    "a path of Windows": (rename(SHARDS[1], f"..\\{SHARDS[1]}"), "is no file of its folder"),
    "the parent": (rename(SHARDS[1], ".."), "is no file of its folder"),
    "a number": (rename(SHARDS[1], 7), "'weight_map'"),
    "no name": (rename(SHARDS[1], ""), "is no file of its folder"),
    "no map": (lambda t: (t / INDEX).write_text("{}"), "'weight_map'"),
    "no JSON": (lambda t: (t / INDEX).write_text("{"), "cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_shards(sd_ort: Cli, sharded: Path, name: str) -> None:
    """The shard that another folder has is complete here: the index alone is damaged."""
    damage, message = DAMAGE[name]
    damage(sharded / "transformer")
    line = refusal(sd_ort, sharded.parent, *OPTIMIZE, sharded, sharded.parent / "out", "--component", "transformer")
    assert message in line


def test_configs_need_no_shards(sharded: Path) -> None:
    """A folder whose configs alone were downloaded, for a checkpoint in one file."""
    for shard in SHARDS:
        (sharded / "transformer" / shard).unlink()
    assert open_folder("a", sharded).models["transformer"].files == ()


def test_shards_are_read(sharded: Path) -> None:
    """Also beside an index of other files: of pickles, of another variant, and of a model that is whole."""
    for name in ("diffusion_pytorch_model.bin.index.json", f"{WHOLE}.index.fp16.json"):
        (sharded / "transformer" / name).write_text('{"weight_map": {"a": "b"}}')
    (sharded / "vae" / INDEX).write_text('{"weight_map": {"a": "b"}}')
    expected = load_file(TRANSFORMER_DIR / "transformer" / WHOLE)
    read = open_folder("a", sharded).read_tensors("transformer", list(expected))
    assert all(np.array_equal(read(name), expected[name]) for name in expected)


# --- Configs --------------------------------------------------------------------------------------------------------


def configure(folder: Path, **changes: object) -> None:
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("count", [-1, 0, 10**9, 10**400, "3", [3], 2.5])
def test_counts_of_layers(sd_ort: Cli, folder: Path, count: object) -> None:
    configure(folder, num_single_layers=count)
    assert "damaged at 'num_single_layers'" in refusal(sd_ort, folder.parent, *OPTIMIZE, folder, folder.parent / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 4096}, "4102 layers by its config.json, and 196 tensors"),
        ({"num_layers": 4}, "lacks 32 weights"),
        ({"num_attention_heads": 4096}, r"of \[192, 256\], and \[131072, 256\] by its config.json"),
        ({"attention_head_dim": 10**6}, r"\[6000000, 256\] by its config.json"),
        ({"attention_head_dim": 10**30}, "is of no FluxTransformer2DModel"),
        ({"attention_head_dim": -8}, "is of no FluxTransformer2DModel"),
    ],
)
def test_a_config_of_a_larger_model_takes_no_memory(folder: Path, changes: dict[str, Any], message: str) -> None:
    configure(folder, **changes)
    with pytest.raises(InputError, match=message):
        open_folder("a", folder).load("transformer")


def test_blocks_that_the_config_leaves_out_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    configure(folder, num_layers=1)
    open_folder("a", folder).load("transformer")
    (record,) = caplog.records
    assert "weights that its config.json leaves out, such as transformer_blocks.1." in record.getMessage()


# --- LoRAs and GGUF files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["transformer.transformer_blocks.0.attn.to_q", "diffusion_model.layers.0.x"])
def test_a_lora_is_no_checkpoint(sd_ort: Cli, tmp_path: Path, module: str) -> None:
    path = tmp_path / "lora.safetensors"
    save_file({f"{module}.lora_{end}.weight": np.ones((4, 4), np.float32) for end in "AB"}, path)
    line = refusal(sd_ort, tmp_path, *OPTIMIZE, path, tmp_path / "out", "--config", TRANSFORMER_DIR)
    assert "is a LoRA, which goes on top of a model" in line


def ones(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("architecture", "tensors", "message"),
    [
        ("wan", {"blocks.0.self_attn.q.weight": ones(8, 8)}, "architecture 'wan'"),
        ("hyvid", {"double_blocks.0.img_attn.qkv.weight": ones(8, 8), "individual_token_refiner.a": ones(8)},
         "is a Hunyuan model"),
        ("ltxv", {"transformer_blocks.0.attn2.to_q.weight": ones(8, 8)}, "architecture 'ltxv'"),
        ("qwen_image", {"transformer_blocks.0.attn.to_q.weight": ones(8, 8), "txt_norm.weight": ones(8)},
         "is Qwen-Image, and .* has a FluxTransformer2DModel"),
        ("sdxl", {"input_blocks.0.0.weight": ones(8, 4, 3, 3)}, "has no UNet: give a diffusers folder of"),
    ],
)  # fmt: skip
def test_gguf_files_of_other_architectures(
    sd_ort: Cli, tmp_path: Path, architecture: str, tensors: dict[str, Any], message: str
) -> None:
    """With a folder of FLUX.1 as --config."""
    path = tmp_path / "model.gguf"
    write_gguf(path, tensors, dict.fromkeys(tensors, "F16"), architecture)
    line = refusal(sd_ort, tmp_path, *OPTIMIZE, path, tmp_path / "out", "--config", TRANSFORMER_DIR)
    with pytest.raises(InputError, match=message):
        raise InputError(line)
