"""Tests of Krea 2: exported modules beside diffusers and transformers, fusions, images, LoRAs, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import onnx_ir as ir
import pytest
import torch
from diffusers.models.transformers.transformer_krea2 import Krea2RMSNorm
from safetensors.torch import save_file
from transformer_families import (
    built,
    check_eight_bits,
    check_fusions,
    check_lora,
    check_targets,
    check_text_encoder,
    hoisted_counts,
    nmse,
)

from scripts.fixtures.parity_models import Models, preset
from sd_ort import Krea2Pipeline, transformer_pipeline
from sd_ort.checkpoints.checkpoint import build_model
from sd_ort.checkpoints.diffusers_folder import open_folder
from sd_ort.checkpoints.modules import wrap
from sd_ort.checkpoints.open import CheckpointOptions, open_checkpoint
from sd_ort.checkpoints.presets import PRESETS, open_preset
from sd_ort.checkpoints.transformer_layouts import original_modules
from sd_ort.core.errors import InputError
from sd_ort.pipelines.transformer_krea2 import Krea2Embeddings
from sd_ort.pipelines.transformer_pipelines import image_ids

CLASS, KIND, FAMILY = "Krea2Transformer2DModel", "Krea2Pipeline", "krea2"
SIZES = ({"batch": 1, "sequence": 19, "image_sequence": 28}, {"batch": 3, "sequence": 7, "image_sequence": 41})


# --- The modules that are exported ----------------------------------------------------------------------------------


def test_the_transformer_equals_diffusers() -> None:
    """Prompts of several lengths, padded in the middle: calls without masks give diffusers' outputs."""
    model, generator = built(FAMILY, "transformer"), torch.Generator().manual_seed(0)
    widths = model.config["num_text_layers"], model.config["text_hidden_dim"]
    latents = torch.randn(4, 5 * 7, 64, generator=generator)
    texts = torch.randn(4, 9, *widths, generator=generator)
    mask = torch.ones(4, 9, dtype=torch.bool)
    mask[1, 2:6], mask[3, 1:5] = False, False
    positions = torch.from_numpy(np.concatenate([np.zeros((9, 3), np.float32), image_ids(5, 7)]))
    time = torch.full((4,), 0.3)
    with torch.no_grad():
        expected = model(latents, texts, time, positions, mask, return_dict=False)[0]
        unmasked = model(latents, texts, time, positions, None, return_dict=False)[0]
    module, actual = wrap("transformer", built(FAMILY, "transformer"), False, False), torch.empty_like(expected)
    groups = Krea2Embeddings(texts.numpy(), mask.numpy()).groups((5, 7))
    assert [rows for rows, _ in groups] == [[0, 2], [1, 3]], "prompts of one length are one call"
    for rows, inputs in groups:
        tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
        with torch.no_grad():
            actual[rows] = module(hidden_states=latents[rows], timestep=time[:1], **tensors)
    assert nmse(actual, expected) <= 1e-11
    assert nmse(unmasked, expected) >= 1e-6, "the comparison does not see the mask"


def test_the_text_encoder_equals_transformers() -> None:
    """Padding in the middle, at which diffusers counts no position, as padding on the right."""
    model = built(FAMILY, "text_encoder")
    ids = torch.randint(300, (2, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, 4:8] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[None].expand(3, -1, -1)
    with torch.no_grad():
        outputs = model(input_ids=ids, attention_mask=mask.bool(), position_ids=positions, output_hidden_states=True)
        states = torch.stack([outputs.hidden_states[layer] for layer in (2, 5)], dim=2)
        moved, visible = ids.clone(), torch.arange(11)[None] < torch.tensor([[11], [7]])
        moved[1, :7] = ids[1][mask[1] == 1]
        actual = wrap("text_encoder", built(FAMILY, "text_encoder"), False, False)(moved, visible.long())
    assert nmse(actual[visible], states[mask == 1]) <= 1e-12


class Replaced(torch.nn.Module):
    """The modules of diffusers and transformers that sd-ort replaces, as one, which is one export."""

    def __init__(self, norm: Any, embedding: Any, rotary: Any) -> None:
        super().__init__()
        self.norm, self.embedding, self.rotary = norm, embedding, rotary

    def forward(self, hidden: torch.Tensor, timestep: torch.Tensor, positions: torch.Tensor) -> tuple[Any, ...]:
        """Return the output of each."""
        return self.norm(hidden), self.embedding(timestep, torch.float32), *self.rotary(hidden, positions)


@pytest.mark.filterwarnings("ignore")  # of torch's own exporter
def test_diffusers_still_needs_the_modules() -> None:
    """If a line fails, exporters support that class: remove its replacement from krea2_modules.py."""
    model, encoder = built(FAMILY, "transformer"), built(FAMILY, "text_encoder")
    norm = next(module for module in model.modules() if isinstance(module, Krea2RMSNorm))
    embedding, half = model.time_embed, model.time_embed.embed_dim // 2
    rotary = encoder.language_model.rotary_emb
    inputs = torch.randn(2, 5, norm.dim), torch.rand(2), torch.arange(5)[None, None].expand(3, 2, 5)
    with torch.no_grad():
        program = torch.onnx.export(
            Replaced(norm, embedding, rotary), inputs, dynamo=True, opset_version=23, verbose=False
        )
    assert program is not None
    graph = program.model.graph
    assert not has_initializer(graph, norm.weight.detach()), "1 + weight is a constant"
    frequencies = torch.exp(-math.log(1e4) * torch.arange(half, dtype=torch.float32) / half)
    assert has_initializer(graph, embedding.linear_1.bias.detach())
    assert not has_initializer(graph, frequencies), "they have other last bits"
    assert "ScatterND" in {node.op_type for node in graph}, "axes are interleaved by assignment"


def has_initializer(graph: ir.Graph, expected: torch.Tensor) -> bool:
    """Return whether a graph has a constant of these values, of any shape."""
    arrays = [value.const_value.numpy() for value in graph.initializers.values() if value.const_value is not None]
    return any(array.size == expected.numel() and (array.ravel() == expected.numpy().ravel()).all() for array in arrays)


# --- Graphs ---------------------------------------------------------------------------------------------------------

# A block of each kind: of the layers of each token's text, of the text, of all tokens. Heads of keys, two for four of
# queries, are not repeated: Attention has them as they are.
FUSED = {"MultiHeadAttention": 2, "Attention": 1, "RotaryEmbedding": 2, "RMSNormalization": 14}


@pytest.mark.parametrize("opset", [20, 23])
def test_fusions(models: Models, of_opset_23: Path, tmp_path: Path, opset: int) -> None:
    """Attention, rotation and norms are single nodes, scales are part of the norms; equal outputs."""
    folder = Path(models.export(FAMILY)) if opset == 20 else of_opset_23
    graph = check_fusions(folder, FAMILY, SIZES, tmp_path / "out", FUSED)
    (attention,) = (node for node in graph if node.op_type == "Attention")
    assert [attention.attributes[name].as_int() for name in ("q_num_heads", "kv_num_heads")] == [4, 2]
    scales = [node.inputs[1] for node in graph if node.op_type == "RMSNormalization"]
    computed = [scale for scale in scales if scale is not None and not scale.is_initializer()]
    assert len(computed) == 3, "two of the block, one of the last norm"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gpu_target(models: Models, tmp_path: Path, dtype: str) -> None:
    """Norms are AdaptiveNorm with shifts and gated residuals; the text's blocks and the modulation leave the step."""
    counts = hoisted_counts(Path(models.export(FAMILY)), tmp_path / "out", dtype)
    expected = {"MultiHeadAttention": 1, "AdaptiveNorm": 5, "RotaryEmbedding": 2, "SwiGlu": 1, "Sigmoid": 1}
    expected |= dict.fromkeys(("RMSNormalization", "LayerNormalization", "Gelu", "Gemm", "Softmax", "Expand"), 0)
    assert {op: counts["transformer"][op] for op in expected} == expected
    assert counts["transformer_prompt"]["MultiHeadAttention"] == counts["transformer_prompt"]["RotaryQkv"] == 2


def test_every_target_fuses_as_much(models: Models, tmp_path: Path) -> None:
    check_targets(Path(models.export(FAMILY)), tmp_path)


def test_eight_bits(models: Models, tmp_path: Path) -> None:
    check_eight_bits(Path(models.export(FAMILY)), tmp_path)


def test_the_text_encoder_is_fused(hoisted: Krea2Pipeline) -> None:
    check_text_encoder(hoisted.folder, layers=5)


# --- Images ---------------------------------------------------------------------------------------------------------

CALL: dict[str, Any] = {"height": 44, "width": 36, "num_inference_steps": 2, "output_type": "np"}
PROMPTS = ["a", "a red circle on a blue background"]


@pytest.mark.parametrize("layout", ["diffusers", "comfyui"])
def test_images_with_and_without_a_lora(models: Models, hoisted: Krea2Pipeline, tmp_path: Path, layout: str) -> None:
    """A hoisted folder, guided, with prompts of other lengths; diffusers' and the original names of a LoRA."""
    generator, tensors = torch.Generator().manual_seed(3), {}
    for names, inner, out in (
        (("transformer_blocks.0.attn.to_gate", "blocks.0.attn.gate"), 128, 128),
        (("text_fusion.refiner_blocks.0.ff.up", "txtfusion.refiner_blocks.0.mlp.up"), 64, 96),
        (("time_mod_proj", "tproj.1"), 128, 6 * 128),
    ):
        tensors[names] = (
            torch.randn(4, inner, generator=generator) * inner**-0.5, torch.randn(out, 4, generator=generator)
        )  # fmt: skip
    for index, (file, prefix) in enumerate((("diffusers", "transformer."), ("comfyui", "diffusion_model."))):
        stored = {f"{prefix}{names[index]}.lora_{end}.weight": tensor.clone()
                  for names, pair in tensors.items() for end, tensor in zip("AB", pair, strict=True)}  # fmt: skip
        save_file(stored, tmp_path / f"{file}.safetensors")
    files = (tmp_path / f"{file}.safetensors" for file in ("diffusers", layout))
    check_lora(models.theirs(FAMILY, KIND), hoisted, CALL, PROMPTS, *files)


def test_the_schedule_of_distilled_models(models: Models, hoisted: Krea2Pipeline) -> None:
    """Its shift depends on no size."""
    assert hoisted.index["is_distilled"] is False
    latents = [hoisted("a", **{**CALL, "output_type": "latent"}, generator=3).images]
    hoisted.index["is_distilled"] = True
    try:
        latents.append(hoisted("a", **{**CALL, "output_type": "latent"}, generator=3).images)
    finally:
        hoisted.index["is_distilled"] = False
    theirs = models.theirs(FAMILY, KIND)
    theirs.register_to_config(is_distilled=True)
    try:
        with torch.no_grad():
            call = {**CALL, "output_type": "latent", "generator": torch.Generator().manual_seed(3)}
            expected = theirs("a", **call).images
    finally:
        theirs.register_to_config(is_distilled=False)
    torch.testing.assert_close(latents[1], expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(latents[0], latents[1], atol=1e-2)


# --- Refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": None, "prompt_embeds": np.ones((1, 3, 2, 64))}, "goes with prompt_embeds_mask"),
        ({"prompt": None, "prompt_embeds": np.ones((1, 3, 64))}, r"are no \(B, T, \(2, 64\)\)"),
        ({"max_sequence_length": 5000}, "between 1 and 4096"),
        ({"latents": np.zeros((1, 4, 64))}, "latents of shape"),
        ({"negative_prompt": ["a", "b"]}, "2 prompts were given"),
    ],
)
def test_arguments_are_rejected_by_name(hoisted: Krea2Pipeline, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        hoisted(**{"prompt": "a", **CALL, **arguments})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_encoder_select_layers": [1, 2]}, r"reads layers 1, 2 of its text encoder, and sd-ort exports 2, 5"),
        ({"patch_size": 4}, "has patches of 4 x 4 latents"),
    ],
)
def test_other_settings_are_rejected_by_name(
    models: Models, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    models.theirs(FAMILY, KIND).save_pretrained(tmp_path)
    path = tmp_path / "model_index.json"
    index = json.loads(path.read_text())
    assert open_folder("krea2", tmp_path).index["text_encoder"] == ["transformers", "Qwen3VLModel"]
    path.write_text(json.dumps(index | changes))
    with pytest.raises(InputError, match=message):
        open_folder("krea2", tmp_path)


def test_a_transformer_in_one_file(models: Models, tmp_path: Path) -> None:
    """Original names: scales of norms, modulation of a block in one row; other models are those of the folder."""
    models.theirs(FAMILY, KIND).save_pretrained(tmp_path / "folder")
    weights = built(FAMILY, "transformer").state_dict()
    config = preset(FAMILY).models["transformer"]
    names = {
        f"{part.module}.{end}": f"{original}.{'scale' if weights[f'{part.module}.weight'].ndim == 1 else end}"
        for original, (part,) in original_modules(config).items()
        for end in ("weight", "bias") if f"{part.module}.{end}" in weights
    }  # fmt: skip
    names |= {"final_layer.scale_shift_table": "last.modulation.lin"}
    names |= {f"transformer_blocks.{i}.scale_shift_table": f"blocks.{i}.mod.lin" for i in range(config["num_layers"])}
    flat = {name: tensor.flatten() if ".mod." in names[name] else tensor for name, tensor in weights.items()}
    path = tmp_path / "krea2.safetensors"
    save_file({f"model.diffusion_model.{names[name]}": tensor.clone() for name, tensor in flat.items()}, path)
    checkpoint = open_checkpoint(str(path), CheckpointOptions(config=str(tmp_path / "folder")))
    assert "Krea 2" in checkpoint.detection_note
    assert checkpoint.index["text_encoder_select_layers"] == [2, 5]
    loaded = checkpoint.load("transformer").state_dict()
    assert loaded.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0)


def test_tasks_and_diffusers_classes_are_refused(models: Models, hoisted: Krea2Pipeline) -> None:
    from sd_ort.integrations.diffusers import accelerate

    assert transformer_pipeline(KIND, "") == KIND
    for task in ("Img2Img", "Inpaint"):
        with pytest.raises(InputError, match=r"Krea 2 has no .*, nor has diffusers"):
            transformer_pipeline(KIND, task)
        assert not hasattr(diffusers, f"Krea2{task}Pipeline"), "diffusers has it now: add it here"
    with pytest.raises(InputError, match=r"generate with sd_ort\.Krea2Pipeline"):
        accelerate(models.theirs(FAMILY, KIND), hoisted.folder, provider="cpu")


def test_preset_is_the_published_model() -> None:
    """12.8 billion parameters, 12 layers of the text encoder, and the classes of its folder."""
    with torch.device("meta"):
        model = build_model(CLASS, PRESETS["krea2"].models["transformer"])
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 1) == 12.8
    index = open_preset("krea2", 0).index
    assert index["text_encoder_select_layers"] == [2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35]
    assert index["tokenizer"][0] == "transformers"
    assert PRESETS["krea2-turbo"].options["is_distilled"]
