"""Z-Image: the module of tensors equals diffusers, which still needs it; fusions; images; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from export_limits import assert_not_exportable
from safetensors.torch import save_file
from transformer_families import (
    built,
    check_eight_bits,
    check_fusions,
    check_targets,
    check_text_encoder,
    hoisted_counts,
)

from scripts.fixtures.parity_models import Models, preset
from sd_ort import ZImagePipeline, transformer_pipeline
from sd_ort.checkpoints.checkpoint import build_model
from sd_ort.checkpoints.diffusers_folder import open_folder
from sd_ort.checkpoints.modules import wrap
from sd_ort.checkpoints.presets import PRESETS, open_preset
from sd_ort.checkpoints.prompt_tokenizers import THINKING_CHAT, QwenTokenizer
from sd_ort.core.errors import InputError
from sd_ort.core.metrics import array_errors, psnr
from sd_ort.pipelines.transformer_z_image import latents_of, pad_tokens, patches, token_groups

CLASS, KIND, FAMILY = "ZImageTransformer2DModel", "ZImagePipeline", "z_image"
SIZES = ({"batch": 1, "sequence": 64, "image_sequence": 96}, {"batch": 3, "sequence": 32, "image_sequence": 128})


# --- The module that is exported ------------------------------------------------------------------------------------


def test_the_module_equals_diffusers() -> None:
    """Images of several sizes and batches, prompts of several lengths, padding of both: the outputs are diffusers'."""
    model = built(FAMILY, "transformer")
    generator, width = torch.Generator().manual_seed(0), model.config["cap_feat_dim"]
    for lengths, (height, columns) in (([5, 40, 33], (10, 14)), ([32], (8, 8))):
        latents = torch.randn(len(lengths), 16, height, columns, generator=generator)
        texts = [torch.randn(length, width, generator=generator) for length in lengths]
        time = torch.full((len(lengths),), 0.3)
        with torch.no_grad():
            theirs = model(list(latents.unsqueeze(2)), time, texts, return_dict=False)[0]
        expected = torch.stack(theirs).squeeze(2).numpy()
        module, actual = wrap("transformer", built(FAMILY, "transformer"), False, False), np.empty_like(expected)
        tokens = pad_tokens(patches(latents.numpy()))
        for rows, inputs in token_groups([text.numpy() for text in texts], height // 2, columns // 2):
            named = {"hidden_states": tokens[rows], "timestep": time[:1].numpy(), **inputs}
            with torch.no_grad():
                output = module(**{name: torch.from_numpy(array) for name, array in named.items()}).numpy()
            actual[rows] = latents_of(output, (len(rows), *latents.shape[1:]))
        assert array_errors(actual, expected)["nmse"] <= 1e-12


class Direct(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = built(FAMILY, "transformer")

    def forward(self, latents: torch.Tensor, time: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        output = self.model(list(latents.unsqueeze(2).unbind(0)), time, list(texts.unbind(0)), return_dict=False)[0]
        return torch.stack(output)


def test_diffusers_still_needs_the_module() -> None:
    """If this fails, diffusers' forward exports as it is: remove z_image_modules.py, and export that."""
    arguments = (
        torch.randn(2, 16, 8, 12),
        torch.rand(2),
        torch.randn(2, 12, built(FAMILY, "transformer").config["cap_feat_dim"]),
    )
    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", max=1024)
    shapes = ({0: batch}, {0: batch}, {0: batch, 1: length})
    assert_not_exportable(Direct, arguments, shapes)


# --- Graphs ---------------------------------------------------------------------------------------------------------


FUSED = {"MultiHeadAttention": 3, "RotaryEmbedding": 6, "RMSNormalization": 19, "LayerNormalization": 1, "Attention": 0}


@pytest.mark.parametrize("opset", [20, 23])
def test_fusions(models: Models, of_opset_23: Path, tmp_path: Path, opset: int) -> None:
    """Attention, rotation and norms are single nodes; scales and gates are part of the norms; equal outputs."""
    folder = Path(models.export(FAMILY)) if opset == 20 else of_opset_23
    graph = check_fusions(folder, FAMILY, SIZES, tmp_path / "out", FUSED)
    scales = [n.inputs[1] for n in graph if n.op_type == "RMSNormalization" and not n.inputs[1].is_initializer()]
    assert len(scales) == 2 * 4, "two scales and two gates in each block with a modulation"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gpu_target(models: Models, tmp_path: Path, dtype: str) -> None:
    """Norms are AdaptiveNorm, heads RotaryQkv; the prompt's blocks and the modulation leave the step."""
    counts = hoisted_counts(Path(models.export(FAMILY)), tmp_path / "out", dtype)
    for part, attentions, norms in (("transformer", 2, 9), ("transformer_prompt", 1, 5)):
        expected = {"MultiHeadAttention": attentions, "RotaryQkv": attentions, "AdaptiveNorm": norms}
        expected |= dict.fromkeys(("RotaryEmbedding", "RMSNormalization", "LayerNormalization", "Tanh", "Gemm"), 0)
        assert {op: counts[part][op] for op in expected} == expected, part


def test_every_target_fuses_as_much(models: Models, tmp_path: Path) -> None:
    check_targets(Path(models.export(FAMILY)), tmp_path)


def test_eight_bits(models: Models, tmp_path: Path) -> None:
    check_eight_bits(Path(models.export(FAMILY)), tmp_path)


def test_the_text_encoder_is_fused(hoisted: ZImagePipeline) -> None:
    check_text_encoder(hoisted.folder, layers=3)


# --- Images ---------------------------------------------------------------------------------------------------------

CALL: dict[str, Any] = {"height": 44, "width": 36, "num_inference_steps": 2, "output_type": "np"}
PROMPTS = ["a", "a red circle on a blue background"]


def theirs(models: Models, **call: Any) -> np.ndarray:
    with torch.no_grad():
        images: np.ndarray = models.theirs(FAMILY, KIND)(
            **{**CALL, "prompt": [*PROMPTS], **call}, generator=torch.Generator().manual_seed(5)
        ).images
    return images


def test_the_image_of_diffusers(models: Models, hoisted: ZImagePipeline) -> None:
    """A hoisted folder, two prompts of other padded lengths, guidance that ends. `parity_pairs` has the other calls."""
    more = {"cfg_truncation": 0.5, "cfg_normalization": 0.9}
    expected, actual = theirs(models, **more), hoisted(**CALL, **more, prompt=PROMPTS, generator=5).images
    assert psnr(actual, expected, 0.01, peak=1.0) >= 60
    assert psnr(hoisted(**CALL, **more, prompt=PROMPTS, generator=6).images, expected, 0.01, peak=1.0) < 40
    assert psnr(hoisted(**CALL, **more, prompt=PROMPTS[::-1], generator=5).images, expected, 0.01, peak=1.0) < 40


@pytest.mark.parametrize("layout", ["diffusers", "comfyui"])
def test_loras(models: Models, hoisted: ZImagePipeline, tmp_path: Path, layout: str) -> None:
    """The image with a LoRA of a block, of the prompt's block and of the modulation is that of diffusers with PEFT."""
    generator, width = torch.Generator().manual_seed(3), preset(FAMILY).models["transformer"]["dim"]
    qkv = torch.randn(3, width, 4, generator=generator)
    down = torch.randn(4, width, generator=generator) * width**-0.5
    split = {f"transformer.layers.0.attention.to_{name}": (qkv[i], down) for i, name in enumerate("qkv")}
    joined = {"diffusion_model.layers.0.attention.qkv": (qkv.reshape(-1, 4), down)}
    for name, out in (("context_refiner.0.feed_forward.w2", width), ("layers.0.adaLN_modulation.0", 4 * width)):
        inner = 256 if width > 256 and "adaLN" in name else int(width / 3 * 8) if "w2" in name else width
        pair = torch.randn(out, 4, generator=generator), torch.randn(4, inner, generator=generator) * inner**-0.5
        split[f"transformer.{name}"] = joined[f"diffusion_model.{name}"] = pair
    for file, pairs in (("split", split), ("joined", joined)):
        tensors = {f"{n}.lora_{end}.weight": t for n, pair in pairs.items() for end, t in zip("BA", pair, strict=True)}
        stored = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        save_file(stored, tmp_path / f"{file}.safetensors")
    pipeline = models.theirs(FAMILY, KIND)
    pipeline.load_lora_weights(str(tmp_path / "split.safetensors"))
    try:
        expected = theirs(models)
    finally:
        pipeline.unload_lora_weights()
    call = {**CALL, "prompt": PROMPTS, "generator": 5}
    before = hoisted(**call).images
    hoisted.load_lora_weights(tmp_path / ("split.safetensors" if layout == "diffusers" else "joined.safetensors"))
    actual = hoisted(**call).images
    hoisted.unload_lora_weights()
    assert psnr(actual, expected, 0.01, peak=1.0) >= 60
    assert psnr(before, expected, 0.01, peak=1.0) < 40, "the LoRA changes nothing"
    assert np.array_equal(hoisted(**call).images, before)


def test_chats_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    open_preset("z-image-turbo-tiny", 0).write_configs(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    texts = ["a red square", "", "Ünknown {} and   spaces "]
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        for text in texts
    ]
    expected = tokenizer(chats, padding="max_length", max_length=40, truncation=True, return_tensors="np")
    ids, mask = QwenTokenizer(tmp_path / "tokenizer", THINKING_CHAT).encode(texts, 40)
    np.testing.assert_array_equal(mask, expected.attention_mask)
    np.testing.assert_array_equal(ids[mask == 1], expected.input_ids[mask == 1])


# --- Refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"height": 45}, "multiples of 4"),
        ({"prompt_embeds": [np.ones((3, 8))]}, r"an array \(tokens, 64\) for each prompt"),
        ({"prompt": None, "prompt_embeds": [np.ones((3, 64))]}, "negative_prompt_embeds goes with prompt_embeds"),
        ({"negative_prompt_embeds": [np.ones((3, 64))] * 2}, "2 negative_prompt_embeds were given for 1 prompts"),
        ({"negative_prompt": ["a", "b"]}, "2 prompts were given"),
        ({"cfg_truncation": float("nan")}, "cfg_truncation must be a number"),
        ({"latents": np.zeros((1, 16, 4, 4))}, "latents of shape"),
    ],
)
def test_arguments_are_rejected_by_name(hoisted: ZImagePipeline, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        hoisted(**{"prompt": "a", **CALL, **arguments})


def test_tasks_and_diffusers_classes_are_refused(models: Models, hoisted: ZImagePipeline) -> None:
    from sd_ort.integrations.diffusers import accelerate

    assert transformer_pipeline(KIND, "") == KIND
    for task in ("Img2Img", "Inpaint"):
        with pytest.raises(InputError, match="Z-Image has no"):
            transformer_pipeline(KIND, task)
    with pytest.raises(InputError, match=r"generate with sd_ort\.ZImagePipeline"):
        accelerate(models.theirs(FAMILY, KIND), hoisted.folder, provider="cpu")


@pytest.mark.parametrize("cls", ["Qwen3Model", "Qwen3ForCausalLM"])
def test_text_encoders_of_both_classes(models: Models, tmp_path: Path, cls: str) -> None:
    """Folders name Qwen3 with its head or without; names of stored tensors may begin with `model.` or not."""
    pipeline: Any = models.theirs(FAMILY, KIND)
    encoder = pipeline.text_encoder
    pipeline.save_pretrained(tmp_path)
    if cls == "Qwen3ForCausalLM":
        with_head = diffusers.DiffusionPipeline, build_model(cls, {**encoder.config.to_dict(), "architectures": [cls]})
        with_head[1].model.load_state_dict(encoder.state_dict())
        with_head[1].save_pretrained(tmp_path / "text_encoder")
    index = json.loads((tmp_path / "model_index.json").read_text())
    for named in (cls, "Qwen3Model"):
        index["text_encoder"][1] = named
        (tmp_path / "model_index.json").write_text(json.dumps(index))
        checkpoint = open_folder("z-image", tmp_path)
        prefix = "model." if named == "Qwen3ForCausalLM" else ""
        name = f"{prefix}layers.0.mlp.up_proj.weight"
        read = checkpoint.read_tensors("text_encoder", [name])
        expected = encoder.state_dict()["layers.0.mlp.up_proj.weight"].numpy()
        np.testing.assert_array_equal(read(name), expected)
        assert checkpoint.models["text_encoder"].reader is not None


def test_preset_is_the_published_model() -> None:
    """6.15 billion parameters, the shift 3 of Turbo, and the classes of its folder."""
    source = PRESETS["z-image-turbo"]
    with torch.device("meta"):
        model = build_model(CLASS, source.models["transformer"])
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 2) == 6.15
    assert source.scheduler["shift"] == 3.0
    index = open_preset("z-image-turbo", 0).index
    assert index["text_encoder"] == ["transformers", "Qwen3Model"]
    assert "feature_extractor" not in index
