"""Diffusion transformers and their T5 encoder: exports equal to torch at three sizes and batches 1 to 3."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from test_export import check_against_torch

from sd_ort.checkpoints.diffusers_folder import open_folder
from sd_ort.checkpoints.presets import open_preset
from sd_ort.core.errors import InputError
from sd_ort.export import exporter, templates
from sd_ort.graphs.load import load
from sd_ort.inspect.verify import verify
from sd_ort.stages import optimize

SIZES = (
    {"batch": 1, "sequence": 19, "height": 24, "width": 16, "image_sequence": 28},
    {"batch": 2, "sequence": 33, "height": 16, "width": 20, "image_sequence": 41},
    {"batch": 3, "sequence": 7, "height": 10, "width": 48, "image_sequence": 15},
)
EXPORTS = {
    ("sd35-medium-mini", 20): ["transformer"],
    ("sd35-medium-mini", 23): ["transformer"],
    ("flux-dev-mini", 20): ["transformer"],
    ("flux-dev-mini", 23): ["transformer", "text_encoder_2"],
    ("flux-schnell-mini", 21): ["transformer"],
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory, mini_presets):
    """Return a function that exports the components of `EXPORTS` once and returns the folder."""

    @cache
    def export(preset: str, opset: int) -> Path:
        out = tmp_path_factory.mktemp(preset) / "out"
        options = {"opset": opset, "components": EXPORTS[preset, opset]}
        exporter.export(None, out, preset=preset, random_weights=True, **options)
        return out

    return export


@pytest.mark.parametrize(("preset", "opset"), EXPORTS)
def test_equals_torch(exported, preset, opset):
    folder = exported(preset, opset)
    for component in EXPORTS[preset, opset]:
        for sizes in SIZES:
            assert check_against_torch(folder, component, preset, sizes) <= 1e-10, (component, sizes)


def test_the_check_sees_positions_and_guidance(exported):
    """Another order of the image ids, another guidance scale and another timestep each change the output."""
    folder = exported("flux-dev-mini", 20)
    config = json.loads((folder / "transformer" / "config.json").read_text())
    signature = exporter.component_signature(open_preset("flux-dev-mini", 0), "transformer", config)
    inputs = {t.name: exporter.example_input(t, SIZES[1], config, seed=7) for t in signature.inputs}
    path = folder / "transformer" / "model.onnx"
    (output,) = exporter.run_onnx(path, inputs)
    for name in ("img_ids", "txt_ids", "guidance", "timestep"):
        changed = inputs | {name: torch.flip(inputs[name], [0]) if "ids" in name else inputs[name] * 0.5}
        (other,) = exporter.run_onnx(path, changed)
        assert np.square(other - output).sum() > 1e-7 * np.square(output).sum(), name


# Nodes of the fused transformers: SD 3 has joint attention in each block and a second one of the image in the first;
# FLUX.1 has one double block and two single blocks.
FUSED = {
    "sd35-medium-mini": {"MultiHeadAttention": 3, "RMSNormalization": 10, "LayerNormalization": 9, "Transpose": 1},
    "flux-dev-mini": {"MultiHeadAttention": 3, "RMSNormalization": 8, "LayerNormalization": 7, "Transpose": 0},
    "flux-schnell-mini": {"MultiHeadAttention": 3, "RMSNormalization": 8, "LayerNormalization": 7, "Transpose": 0},
}


@pytest.mark.parametrize("target", ["cpu", "portable"])
@pytest.mark.parametrize(("preset", "opset"), EXPORTS)
def test_fusions(exported, tmp_path, preset, opset, target):
    """The same nodes from every opset, equal outputs; no attention is taken apart, no modulation stays."""
    folder = exported(preset, opset)
    optimize(folder, tmp_path / "out", target=target)
    graph = load(tmp_path / "out" / "transformer" / "model.onnx").graph
    counts = Counter(node.op_type for node in graph)
    expected = FUSED[preset] | dict.fromkeys(("ScaledDotProductAttention", "Softmax", "Attention", "ReduceMean"), 0)
    assert {op: counts[op] for op in expected} == expected
    norms = [node for node in graph if node.op_type == "LayerNormalization"]
    assert all(not node.inputs[1].is_initializer() for node in norms), "scale and shift are computed"
    result = verify(folder, tmp_path / "out")
    assert result["passed"], result["rows"]
    assert {row["component"] for row in result["rows"]} == set(EXPORTS[preset, opset])


def test_templates_tell_the_encoders_apart(mini_presets):
    """CLIP-L of SD3 returns the penultimate hidden state, that of FLUX.1 the pooled output. Both have the same T5."""

    def key(preset: str, component: str) -> str:
        return templates.component_key(open_preset(preset, 0), component, 20, "dynamo")

    assert key("sd35-medium-mini", "text_encoder") != key("flux-dev-mini", "text_encoder")
    assert key("sd35-medium-mini", "text_encoder_3") != key("flux-dev-mini", "text_encoder")


# --- Folders --------------------------------------------------------------------------------------------------------


def write_folder(folder: Path, **changes) -> Path:
    """Write the configs of `flux-schnell-mini` as a diffusers folder without weights; `changes` of its index."""
    source = open_preset("flux-schnell-mini", 0)
    source.write_configs(folder)
    for name, config in source.configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "model_index.json").write_text(json.dumps({**source.index, **changes}))
    return folder


def test_diffusers_folder(mini_presets, tmp_path):
    checkpoint = open_folder("flux", write_folder(tmp_path))
    assert list(checkpoint.models) == ["text_encoder", "text_encoder_2", "transformer", "vae"]
    assert exporter.select_components(checkpoint, None)[1:3] == ["text_encoder_2", "transformer"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transformer": ["diffusers", "QwenImageTransformer2DModel"]}, "transformer of class QwenImageTransformer2D"),
        ({"transformer": [None, None]}, "neither a UNet nor a transformer"),
        ({"text_encoder_2": ["transformers", "Qwen3ForCausalLM"]}, "text_encoder_2 of class Qwen3ForCausalLM"),
        ({"tokenizer_3": ["transformers", "T5TokenizerFast"]}, "lacks its tokenizer_3"),
    ],
)
def test_unsupported_folders_are_rejected_by_name(mini_presets, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        open_folder("flux", write_folder(tmp_path, **changes))
