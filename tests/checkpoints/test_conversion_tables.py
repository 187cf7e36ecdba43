"""Precomputed conversions of single files, for files without any unknown tensor."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_presets import mini

from scripts.fixtures.make_conversion_tables import families, family_tables
from scripts.fixtures.save_single_file import save
from sd_ort.checkpoints import conversion_tables, single_file
from sd_ort.checkpoints.detection import FAMILIES, HUB_IDS
from sd_ort.checkpoints.presets import PRESETS, open_preset
from sd_ort.checkpoints.single_file import open_single_file
from sd_ort.checkpoints.tensor_readers import RecipeTensorReader

UNET = "model.diffusion_model."


def bundled(family: str) -> list[conversion_tables.ConversionTable]:
    return [table for table in conversion_tables.bundled_tables() if table.family == family]


@pytest.mark.parametrize("models", [each for each in families() if each["unet"]["in_channels"] == 4])
def test_bundled_tables_equal_diffusers_conversion(models: dict) -> None:
    tables = family_tables(models)
    entries = json.loads(json.dumps([conversion_tables.to_json(table) for table in tables]))
    assert bundled(tables[0].family) == conversion_tables.from_json(entries)


def test_inpainting_tables_differ_in_the_first_convolution() -> None:
    pairs = {"v1": "inpainting", "v2": "inpainting_v2", "xl_base": "xl_inpaint"}
    assert {table.family for table in conversion_tables.bundled_tables()} == {
        *pairs,
        *pairs.values(),
        "xl_refiner",
        "demo",
    }
    for base, inpainting in pairs.items():
        for one, other in zip(bundled(base), bundled(inpainting), strict=True):
            assert (one.model, one.recipes) == (other.model, other.recipes)
            different = [name for name in one.shapes | other.shapes if one.shapes.get(name) != other.shapes.get(name)]
            assert different == ([f"{UNET}input_blocks.0.0.weight"] if one.model == "unet" else [])


def test_hub_ids() -> None:
    from diffusers.loaders.single_file_utils import DIFFUSERS_DEFAULT_PIPELINE_PATHS as theirs

    unknown = {"flux2-klein", "qwen-image"}  # to diffusers: it reads no single file of these
    names = {name: name.replace("sd35-", "sd35_").replace("flux2-", "flux-2-") for name in HUB_IDS.keys() - unknown}
    expected = {name: theirs[other]["pretrained_model_name_or_path"] for name, other in names.items()}
    assert {name: HUB_IDS[name] for name in names} == expected
    assert not any(path["pretrained_model_name_or_path"] == HUB_IDS[n] for path in theirs.values() for n in unknown)
    assert HUB_IDS.keys() == FAMILIES.keys() - {"demo"}


@pytest.fixture(scope="module", params=["sd21", "sdxl"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A small single-file checkpoint, the folder of its configs, and its preset with conversion tables."""
    root, name = tmp_path_factory.mktemp("checkpoint"), f"{request.param}-laid"
    PRESETS[name] = mini(PRESETS[f"{request.param}-tiny"])
    if request.param == "sd21":  # by which it is told from 1.5
        PRESETS[name].models["unet"]["cross_attention_dim"] = 1024
        PRESETS[name].models["text_encoder"]["hidden_size"] = 1024
    source = open_preset(name, 3)
    base = root / "base"
    base.mkdir()
    source.write_configs(base)
    for model, config in source.configs.items():
        (base / model).mkdir()
        (base / model / "config.json").write_text(json.dumps(config))
    file = save({model: source.load(model) for model in source.configs}, root / "file.safetensors", torch.float16)
    return file, base, name


def test_read_without_diffusers(
    checkpoint: tuple[Path, Path, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The weights of the long way, bit for bit, and none of it taken; anything unknown in the file takes it."""
    file, base, name = checkpoint
    long = open_single_file(file, base)
    tables = family_tables(PRESETS[name].models)
    monkeypatch.setattr(conversion_tables, "bundled_tables", lambda: tuple(tables))
    tensors = load_file(file)
    unused = {"model_ema.decay": torch.zeros(1).half(), "alphas_cumprod": torch.zeros(9).half()}
    save_file(tensors | unused, tmp_path / "more.safetensors")
    with monkeypatch.context() as patch:
        for function in ("meta_tensors", "detect_family", "trace_conversion"):
            patch.setattr(single_file, function, lambda *_: pytest.fail("the conversion was traced"))
        short = open_single_file(tmp_path / "more.safetensors", base)
    assert short.detection_note.partition(":")[2] == long.detection_note.partition(":")[2]
    assert {m.files for m in long.models.values()} == {(file,)}
    for model in short.models:
        state = long.load(model).state_dict()
        assert isinstance(short.models[model].reader, RecipeTensorReader)
        read, reads = (checkpoint.read_tensors(model, state) for checkpoint in (short, long))
        assert [n for n in state if read(n).tobytes() != reads(n).tobytes() or read(n).shape != state[n].shape] == []
    for other in ({"edm_mean": torch.zeros(4)}, {f"{UNET}input_blocks.0.0.weight": torch.zeros(8, 9, 3, 3)}):
        save_file(tensors | other, tmp_path / "other.safetensors")
        assert conversion_tables.find_tables(conversion_tables.stored_shapes(tmp_path / "other.safetensors")) == []
    other_config = PRESETS[name].models["unet"] | {"block_out_channels": [32, 96]}
    assert conversion_tables.table_readers(file, tables, PRESETS[name].models | {"unet": other_config}) == {}


def test_files_that_are_not_read_so(tmp_path: Path) -> None:
    bad = tmp_path / "file.safetensors"
    save_file({"a": torch.zeros(2, 3)}, bad)
    assert conversion_tables.stored_shapes(bad) == {"a": (2, 3)}
    for entry in (
        {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 24]}, {"dtype": "F32", "data_offsets": [0, 24]},
        {"dtype": "I8", "shape": [24], "data_offsets": [0, 24]}, [], {"dtype": "F32", "shape": 6, "data_offsets": 0},
    ):  # fmt: skip
        header = json.dumps({"a": entry}).encode()
        bad.write_bytes(struct.pack("<Q", len(header)) + header + np.zeros(24, np.uint8).tobytes())
        assert conversion_tables.stored_shapes(bad) == {}
    bad.write_bytes(b"no")
    assert (
        conversion_tables.stored_shapes(bad)
        == conversion_tables.stored_shapes(tmp_path / "a.ckpt")
        == conversion_tables.stored_shapes(tmp_path / "gone")
        == {}
    )
