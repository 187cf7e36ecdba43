"""GGUF files of U-Nets and transformers: their dtypes, streaming, optimization and inference."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_type import Cli, success
from gguf_files import write_gguf
from PIL import Image
from test_transformer_file import FLUX, SD3, original_tensors

from scripts.fixtures.save_single_file import single_file
from sd_ort import demo
from sd_ort.checkpoints.checkpoint import Checkpoint, build_model, class_name
from sd_ort.checkpoints.diffusers_folder import open_folder
from sd_ort.checkpoints.open import CheckpointOptions, open_checkpoint
from sd_ort.checkpoints.presets import open_preset
from sd_ort.checkpoints.weight_file import read_entries, read_tensor
from sd_ort.core.errors import InputError
from sd_ort.core.metrics import psnr

DTYPES = ("Q8_0", "Q4_0", "Q5_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "F32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_those_of_the_format(tmp_path: Path, dtype: str) -> None:
    """A matrix, and filters whose rows are no whole block of 256 elements."""
    random = np.random.default_rng(1)
    tensors = {"a": random.normal(size=(4, 512)).astype(np.float32),
               "b": random.normal(size=(32, 2, 2, 32)).astype(np.float32)}  # fmt: skip
    expected = write_gguf(tmp_path / "a.gguf", tensors, dict.fromkeys(tensors, dtype))
    entries = read_entries(tmp_path / "a.gguf")
    assert {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()} == {
        name: (dtype, values.shape) for name, values in tensors.items()
    }
    for name, entry in entries.items():
        values = read_tensor(tmp_path / "a.gguf", entry)
        np.testing.assert_allclose(values.astype(np.float32), expected[name], rtol=1e-6, atol=1e-7)


def saved(preset: str, root: Path) -> Path:
    """Return a diffusers folder of a preset."""
    source = open_preset(preset, 3)
    root.mkdir()
    source.write_configs(root)
    for name in source.configs:
        model = source.load(name)
        model.save_pretrained(root / name)  # type: ignore[operator]
    return root


@pytest.mark.parametrize(("preset", "prefix"), [(FLUX, ""), (SD3, "model.diffusion_model.")])
def test_a_transformer_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str, prefix: str) -> None:
    """Weights are those of the file, a matrix of query, key and value is dequantized once, the model is not loaded."""
    folder = saved(preset, tmp_path / "folder")
    config = json.loads((folder / "transformer" / "config.json").read_text())
    weights = build_model(class_name(config), config).state_dict()
    tensors = {f"{prefix}{n}": t.numpy() for n, t in original_tensors(config, weights).items()}
    dtypes = {n: "Q8_0" for n, t in tensors.items() if t.ndim == 2 and t.shape[-1] % 32 == 0}
    values = write_gguf(tmp_path / "model.gguf", tensors, dtypes)
    checkpoint = open_checkpoint(str(tmp_path / "model.gguf"), CheckpointOptions(config=str(folder)))
    assert "Q8_0" in checkpoint.detection_note
    assert checkpoint.models["vae"].files[0].is_relative_to(folder)
    loaded = checkpoint.load("transformer").state_dict()
    dequantized = []
    original = read_tensor

    def count(path: Path, entry: dict) -> np.ndarray:
        dequantized.append(tuple(entry["data_offsets"]))
        return original(path, entry)

    monkeypatch.setattr("sd_ort.checkpoints.tensor_readers.read_tensor", count)
    monkeypatch.setattr(Checkpoint, "load", lambda *_: pytest.fail("it was loaded whole"))
    read = checkpoint.read_tensors("transformer", loaded)
    assert [n for n, w in loaded.items() if not np.array_equal(read(n).astype(np.float32), w.numpy())] == []
    assert len(set(dequantized)) == len(tensors)
    quantized = {tuple(read_entries(tmp_path / "model.gguf")[n]["data_offsets"]) for n in dtypes}
    matrices = [offset for offset in dequantized if offset in quantized]
    swapped = 1  # the last norm's matrix is read for each half of its rows
    assert len(matrices) <= len(quantized) + swapped
    qkv = f"{prefix}{'double_blocks.0.img_attn' if preset == FLUX else 'joint_blocks.0.x_block.attn'}.qkv.weight"
    width = len(values[qkv]) // 3
    np.testing.assert_allclose(
        loaded["transformer_blocks.0.attn.to_k.weight"].numpy(), values[qkv][width : 2 * width], rtol=1e-6
    )


@pytest.fixture(scope="module")
def unet_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """Return a GGUF file of the demo's U-Net, as ComfyUI-GGUF writes one, and its values."""
    path = tmp_path_factory.mktemp("gguf") / "unet.gguf"
    source = open_folder("demo", demo.MODEL_DIR)
    with torch.no_grad():
        tensors = single_file({"unet": source.load("unet")})
    stripped = {n.removeprefix("model.diffusion_model."): t.numpy() for n, t in tensors.items()}
    large = {n for n, t in stripped.items() if t.ndim > 1 and t.shape[-1] % 32 == 0}
    return path, write_gguf(path, stripped, dict.fromkeys(large, "Q8_0"), "sd1")


def test_a_unet_is_optimized_and_drawn_with(
    sd_ort: Cli, tmp_path: Path, unet_file: tuple[Path, dict[str, np.ndarray]]
) -> None:
    """The file's U-Net with the demo's other models: the demo's image up to eight bits of the matrices."""
    path, _ = unet_file
    text = success(sd_ort, "optimize", path, tmp_path / "out", "--config", "demo", "--target", "cpu")
    assert "Q8_0" in text
    success(sd_ort, "verify", path, tmp_path / "out", "--config", "demo")
    draw = ("generate", "a red circle", "--seed", 3, "--steps", 6, "--out")
    images = []
    for name, model in (("ours", tmp_path / "out"), ("plain", "demo")):
        success(sd_ort, *draw, tmp_path / f"{name}.png", "--model", model)
        images.append(np.asarray(Image.open(tmp_path / f"{name}.png"), np.float32))
    assert 25 < psnr(*images, 20.0) < 100


def test_other_models_must_be_given(tmp_path: Path, unet_file: tuple[Path, dict[str, np.ndarray]]) -> None:
    """A folder of configs alone lacks what the file lacks: the error names the option."""
    path, _ = unet_file
    configs = tmp_path / "configs"
    configs.mkdir()
    source = open_folder("demo", demo.MODEL_DIR)
    source.write_configs(configs)
    for name, model in source.models.items():
        (configs / name).mkdir()
        (configs / name / "config.json").write_text(json.dumps(model.config))
    with pytest.raises(InputError, match=r"has no text encoder: give a whole diffusers folder .* as --config"):
        open_checkpoint(str(path), CheckpointOptions(config=str(configs)))


def test_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unet_file: tuple[Path, dict[str, np.ndarray]]
) -> None:
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    with pytest.raises(InputError, match=r"pip install 'sd-ort\[gguf\]'"):
        open_checkpoint(str(unet_file[0]), CheckpointOptions(config="demo"))
    write_gguf(tmp_path / "plain.gguf", {"a": np.ones((2, 3), np.float32)}, {"a": "F16"})
    assert list(read_entries(tmp_path / "plain.gguf")) == ["a"]  # no package is needed for float16
