"""Templates: a second checkpoint of an architecture is filled in, bit for bit what export + optimize would write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from minis import mini
from safetensors.torch import load_file, save_file

from sd_ort.core import folder
from sd_ort.core.errors import InputError
from sd_ort.export.exporter import export
from sd_ort.family.checkpoints import PresetSource
from sd_ort.family.presets import PRESETS
from sd_ort.from_checkpoint import optimize_checkpoint
from sd_ort.graphs import hoist
from sd_ort.optimize import templates
from sd_ort.optimize.optimizer import optimize

OPTIONS = {"target": "cuda", "dtype": "float16", "hoisted": True, "exporter": "torchscript"}
COMPONENTS = ["text_encoder", "unet", "vae_decoder"]
STEP = [*hoist.PARTS.values(), "text_encoder", "vae_decoder"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Path]]:
    """Seed -> a diffusers folder with random weights, of one architecture."""
    PRESETS["sd15-filled"] = mini(PRESETS["sd15-tiny"])

    def make(seed: int) -> Path:
        root = tmp_path_factory.mktemp("checkpoint")
        source = PresetSource("sd15-filled", seed)
        source.write_configs(root)
        for name in source.configs:
            source.load(name).half().save_pretrained(root / name)
        return root

    yield make
    del PRESETS["sd15-filled"]


@pytest.fixture(scope="module")
def kept(checkpoint: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache with the template of the first checkpoint."""
    root = tmp_path_factory.mktemp("templates")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SD_ORT_TEMPLATES", str(root / "cache"))
        lines: list[str] = []
        optimize_checkpoint(str(checkpoint(1)), root / "first", components=COMPONENTS, **OPTIONS, report=lines.append)
        assert "was kept" in lines[-1]
        assert len(list(templates.cache().glob("*.zip"))) == 1
        assert not list(root.glob(".first*"))
        yield root


def test_fills_what_export_and_optimize_write(kept: Path, checkpoint: Callable[[int], Path], tmp_path: Path) -> None:
    lines: list[str] = []
    second = checkpoint(2)
    manifest = optimize_checkpoint(
        str(second), tmp_path / "filled", components=COMPONENTS, **OPTIONS, report=lines.append
    )
    assert "nothing was traced" in lines[-1]
    export(str(second), tmp_path / "raw", exporter="torchscript", components=COMPONENTS)
    options = {name: value for name, value in OPTIONS.items() if name != "exporter"}
    optimize(tmp_path / "raw", tmp_path / "slow", **options)
    for part in STEP:
        for name in (folder.MODEL, folder.DATA):
            assert (tmp_path / "filled" / part / name).read_bytes() == (tmp_path / "slow" / part / name).read_bytes()
    assert folder.is_intact(tmp_path / "filled", manifest)
    for name in ("tokenizer", "scheduler"):
        assert folder.tree_hash(tmp_path / "filled" / name) == folder.tree_hash(second / name)


def test_files_that_do_not_fit(kept: Path, checkpoint: Callable[[int], Path], tmp_path: Path) -> None:
    third = checkpoint(3)
    path = third / "unet" / "diffusion_pytorch_model.safetensors"
    whole, name = load_file(path), "conv_in.bias"

    def refused(tensors: dict[str, torch.Tensor]) -> str:
        save_file(tensors, path, metadata={"format": "pt"})
        with pytest.raises(InputError) as error:
            optimize_checkpoint(str(third), tmp_path / "out", components=COMPONENTS, **OPTIONS)
        assert not list(tmp_path.iterdir())
        return str(error.value)

    assert "NaN" in refused(whole | {name: whole[name] * torch.nan})
    assert "do not fit" in refused(whole | {name: whole[name][1:].clone()})
    assert "lacks 1 weights" in refused({key: tensor for key, tensor in whole.items() if key != name})
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(InputError, match="truncated"):
        optimize_checkpoint(str(third), tmp_path / "out", components=COMPONENTS, **OPTIONS)


def test_key_tells_configs_and_options_apart() -> None:
    configs, index = {"unet": {"layers": 2, "_name_or_path": "a"}}, {"unet": ["diffusers", "X"]}
    name = templates.key(configs, index, {"target": "cuda"})
    assert name == templates.key({"unet": {"layers": 2, "_name_or_path": "b"}}, index, {"target": "cuda"})
    assert name != templates.key({"unet": {"layers": 3}}, index, {"target": "cuda"})
    assert name != templates.key(configs, index, {"target": "rocm"})


def test_broken_template_is_made_again(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SD_ORT_TEMPLATES", str(tmp_path))
    (tmp_path / "x.zip").write_bytes(b"half")
    assert templates.find("x") is None
    assert templates.find("y") is None
