"""Layouts of single files: diffusers' mapping, done beforehand, for files that are known to their last tensor."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_presets import mini

from scripts.fixtures.make_conversion_tables import families, of
from scripts.fixtures.save_single_file import save
from sd_ort.checkpoints import conversion_tables, single_file
from sd_ort.checkpoints.checkpoint import PresetSource
from sd_ort.checkpoints.detection import FAMILIES, HUB
from sd_ort.checkpoints.presets import PRESETS
from sd_ort.checkpoints.single_file import open_file
from sd_ort.checkpoints.tensor_readers import LaidOut
from sd_ort.checkpoints.tensors import reader

UNET = "model.diffusion_model."


def shipped(family: str) -> list[conversion_tables.Layout]:
    return [layout for layout in conversion_tables.layouts() if layout.family == family]


@pytest.mark.parametrize("models", [each for each in families() if each["unet"]["in_channels"] == 4])
def test_shipped(models: dict) -> None:
    """What the package has is what diffusers' mapping does today."""
    family = of(models)
    assert shipped(family[0].family) == conversion_tables.read(
        json.loads(json.dumps([conversion_tables.stored(each) for each in family]))
    )


def test_inpainting_differs_by_what_its_unet_takes() -> None:
    pairs = {"v1": "inpainting", "v2": "inpainting_v2", "xl_base": "xl_inpaint"}
    assert {layout.family for layout in conversion_tables.layouts()} == {*pairs, *pairs.values(), "xl_refiner", "demo"}
    for plain, inpainting in pairs.items():
        for one, other in zip(shipped(plain), shipped(inpainting), strict=True):
            assert (one.model, one.made) == (other.model, other.made)
            changed = [name for name in one.shapes | other.shapes if one.shapes.get(name) != other.shapes.get(name)]
            assert changed == ([f"{UNET}input_blocks.0.0.weight"] if one.model == "unet" else [])


def test_the_hub_s_names() -> None:
    from diffusers.loaders.single_file_utils import DIFFUSERS_DEFAULT_PIPELINE_PATHS as theirs

    assert {name: theirs[name]["pretrained_model_name_or_path"] for name in HUB} == HUB
    assert HUB.keys() == FAMILIES.keys() - {"demo"}


@pytest.fixture(scope="module", params=["sd21", "sdxl"])
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A small checkpoint in one file, its configs' folder and its preset, whose layout is known while a test runs."""
    root, name = tmp_path_factory.mktemp("known"), f"{request.param}-laid"
    PRESETS[name] = mini(PRESETS[f"{request.param}-tiny"])
    if request.param == "sd21":  # by which it is told from 1.5
        PRESETS[name].models["unet"]["cross_attention_dim"] = 1024
        PRESETS[name].models["text_encoder"]["hidden_size"] = 1024
    source = PresetSource(name, 3)
    base = root / "base"
    base.mkdir()
    source.write_configs(base)
    for model, config in source.configs.items():
        (base / model).mkdir()
        (base / model / "config.json").write_text(json.dumps(config))
    file = save({model: source.load(model) for model in source.configs}, root / "file.safetensors", torch.float16)
    return file, base, name


def test_read_without_diffusers(known: tuple[Path, Path, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The weights of the long way, bit for bit, and none of it taken; anything unknown in the file takes it."""
    file, base, name = known
    long = open_file(file, base)
    layout = of(PRESETS[name].models)
    monkeypatch.setattr(conversion_tables, "layouts", lambda: tuple(layout))
    tensors = load_file(file)
    beside = {"model_ema.decay": torch.zeros(1).half(), "alphas_cumprod": torch.zeros(9).half()}
    save_file(tensors | beside, tmp_path / "more.safetensors")
    with monkeypatch.context() as patch:
        for long_way in ("shapes", "recognize", "map_file"):
            patch.setattr(single_file, long_way, lambda *_: pytest.fail("the long way"))
        short = open_file(tmp_path / "more.safetensors", base)
    assert short.about.partition(":")[2] == long.about.partition(":")[2]
    assert short.held.keys() == long.held.keys() == short.configs.keys()
    for model in short.held:
        wanted = long.load(model).state_dict()
        assert isinstance(short.held[model], LaidOut)
        read, reads = (reader(source, model, wanted) for source in (short, long))
        assert [n for n in wanted if read(n).tobytes() != reads(n).tobytes() or read(n).shape != wanted[n].shape] == []
    for other in ({"edm_mean": torch.zeros(4)}, {f"{UNET}input_blocks.0.0.weight": torch.zeros(8, 9, 3, 3)}):
        save_file(tensors | other, tmp_path / "other.safetensors")
        assert conversion_tables.find(conversion_tables.shapes(tmp_path / "other.safetensors")) == []
    other_config = PRESETS[name].models["unet"] | {"block_out_channels": [32, 96]}
    assert conversion_tables.held(file, layout, PRESETS[name].models | {"unet": other_config}) == {}


def test_files_that_are_not_read_so(tmp_path: Path) -> None:
    bad = tmp_path / "file.safetensors"
    save_file({"a": torch.zeros(2, 3)}, bad)
    assert conversion_tables.shapes(bad) == {"a": (2, 3)}
    for entry in (
        {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 24]}, {"dtype": "F32", "data_offsets": [0, 24]},
        {"dtype": "I8", "shape": [24], "data_offsets": [0, 24]}, [], {"dtype": "F32", "shape": 6, "data_offsets": 0},
    ):  # fmt: skip
        header = json.dumps({"a": entry}).encode()
        bad.write_bytes(struct.pack("<Q", len(header)) + header + np.zeros(24, np.uint8).tobytes())
        assert conversion_tables.shapes(bad) == {}
    bad.write_bytes(b"no")
    assert (
        conversion_tables.shapes(bad)
        == conversion_tables.shapes(tmp_path / "a.ckpt")
        == conversion_tables.shapes(tmp_path / "gone")
        == {}
    )
