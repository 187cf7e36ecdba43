"""The IP-Adapters that h94/IP-Adapter publishes are recognized by their tensors' names and shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sd_ort.checkpoints.configs import read_config
from sd_ort.checkpoints.ip_adapter import add_ip_adapter, encoder_config, read_ip_adapter
from sd_ort.checkpoints.presets import open_preset
from sd_ort.core.errors import InputError

# What h94/IP-Adapter publishes: names and shapes of ip-adapter_sd15, ip-adapter-plus_sd15, ip-adapter_sdxl, which reads
# ViT-bigG, and ip-adapter-plus_sdxl_vit-h. Widths of layers on the way down, on the way up, and in the middle.
SD15 = [320] * 2 + [640] * 2 + [1280] * 5 + [640] * 3 + [320] * 3 + [1280]
SDXL = [640] * 4 + [1280] * 20 + [1280] * 30 + [640] * 6 + [1280] * 10
VIT_H = {"hidden_size": 1280, "projection_dim": 1024, "image_size": 224, "patch_size": 14}
VIT_G = {**VIT_H, "hidden_size": 1664, "projection_dim": 1280}


def published(layers: list[int], context: int, inner: int | None, width: int = 1024) -> dict[str, list[int]]:
    """Names and shapes of a file; `inner`: of Plus, the width of its resampler; `width`: of plain, the encoder's."""
    shapes: dict[str, list[int]] = {}

    def add(name: str, *shape: int, bias: bool = True) -> None:
        shapes[f"image_proj.{name}.weight"] = list(shape)
        if bias:
            shapes[f"image_proj.{name}.bias"] = [shape[0]]

    if inner is None:
        add("proj", 4 * context, width)
        add("norm", context)
    else:
        shapes["image_proj.latents"] = [1, 16, inner]
        add("proj_in", inner, 1280)
        add("proj_out", context, inner)
        add("norm_out", context)
        for i in range(4):
            add(f"layers.{i}.0.norm1", inner)
            add(f"layers.{i}.0.norm2", inner)
            add(f"layers.{i}.0.to_q", inner, inner, bias=False)
            add(f"layers.{i}.0.to_kv", 2 * inner, inner, bias=False)
            add(f"layers.{i}.0.to_out", inner, inner, bias=False)
            add(f"layers.{i}.1.0", inner)
            add(f"layers.{i}.1.1", 4 * inner, inner, bias=False)
            add(f"layers.{i}.1.3", inner, 4 * inner, bias=False)
    for i, wide in enumerate(layers):
        shapes |= {f"ip_adapter.{2 * i + 1}.to_{part}_ip.weight": [wide, context] for part in "kv"}
    return shapes


def without_numbers(path: Path, shapes: dict[str, list[int]]) -> Path:
    """A safetensors file of float16 that takes no room on the disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [begin, end]}
    content = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        file.truncate(8 + len(content) + end)
    return path


@pytest.mark.parametrize(
    ("preset", "shapes", "encoder", "note"),
    [
        ("sd15", published(SD15, 768, None), VIT_H, "IP-Adapter, 4 tokens per image, 16 layers"),
        ("sd15", published(SD15, 768, 768), VIT_H, "IP-Adapter Plus, 16 tokens per image, 16 layers"),
        ("sdxl", published(SDXL, 2048, None, 1280), VIT_G, "IP-Adapter, 4 tokens per image, 70 layers"),
        ("sdxl", published(SDXL, 2048, 1280), VIT_H, "IP-Adapter Plus, 16 tokens per image, 70 layers"),
    ],
    ids=["ip-adapter_sd15", "ip-adapter-plus_sd15", "ip-adapter_sdxl", "ip-adapter-plus_sdxl_vit-h"],
)
def test_published_files(tmp_path: Path, preset: str, shapes: Any, encoder: dict[str, int], note: str) -> None:
    (tmp_path / "image_encoder").mkdir()
    (tmp_path / "image_encoder" / "model.safetensors").touch()
    config = {**encoder, "architectures": ["CLIPVisionModelWithProjection"]}
    (tmp_path / "image_encoder" / "config.json").write_text(json.dumps(config))
    file = without_numbers(tmp_path / "adapter.safetensors", shapes)
    checkpoint, folder = open_preset(preset, 0), tmp_path / "image_encoder"
    assert add_ip_adapter(checkpoint, file, None).detection_note.endswith(note)
    adapter = read_ip_adapter(file, checkpoint.configs["unet"], folder, encoder_config(folder))
    assert set(adapter.names.values()) == shapes.keys()
    other = "sdxl" if preset == "sd15" else "sd15"
    with pytest.raises(InputError, match=r"is for UNets that attend to tokens of"):
        add_ip_adapter(open_preset(other, 0), file, None)


def test_old_key_of_the_hidden_state_length(tmp_path: Path) -> None:
    adapter = {"width": 8, "layers": ["mid_block.attentions.0.transformer_blocks.0"]}
    (tmp_path / "config.json").write_text(json.dumps({"ip_adapter": {**adapter, "rows": 257}}))
    assert read_config(tmp_path / "config.json") == {"ip_adapter": {**adapter, "hidden_state_length": 257}}
