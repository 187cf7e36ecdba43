"""Transformers in one file: read as diffusers converts them, from original and ComfyUI's names, with scaled float8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fusion_passes.weight_recipes import evaluate
from sd_ort.checkpoints.checkpoint import build_model, class_name
from sd_ort.checkpoints.open import CheckpointOptions, open_checkpoint
from sd_ort.checkpoints.presets import PRESETS, open_preset
from sd_ort.checkpoints.transformer_layouts import original_modules, original_recipes
from sd_ort.core.errors import InputError
from sd_ort.weights.lora_files import read_adapter

FLUX, SD3, KLEIN = "flux-schnell-tiny", "sd35-medium-tiny", "flux2-klein-4b-tiny"
Z_IMAGE, KREA2 = "z-image-turbo-tiny", "krea2-tiny"
# Ends of original names of norms, whose weight is their `scale`.
NORMS = ("query_norm", "key_norm", "qnorm", "knorm", "prenorm", "postnorm", "txtmlp.0", "last.norm")
CONVERTERS = {
    "FluxTransformer2DModel": "convert_flux_transformer_checkpoint_to_diffusers",
    "SD3Transformer2DModel": "convert_sd3_transformer_checkpoint_to_diffusers",
    "Flux2Transformer2DModel": "convert_flux2_transformer_checkpoint_to_diffusers",
    "Krea2Transformer2DModel": "convert_krea2_transformer_checkpoint_to_diffusers",
    "ZImageTransformer2DModel": "convert_z_image_transformer_checkpoint_to_diffusers",
}


def original_tensors(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of the shapes of a transformer's weights under their original names, joined; random values."""
    tensors = {}
    for original, parts in original_modules(config).items():
        for end in ("weight", "bias"):
            names = [f"{part.module}.{end}" for part in parts]
            if set(names) <= weights.keys():
                shape = [sum(len(weights[name]) for name in names), *weights[names[0]].shape[1:]]
                tensors[f"{original}.{'scale' if original.endswith(NORMS) else end}"] = torch.randn(shape)
    parameters = {"pos_embed.pos_embed": "pos_embed", "x_pad_token": "x_pad_token", "cap_pad_token": "cap_pad_token"}
    parameters["final_layer.scale_shift_table"] = "last.modulation.lin"
    tables = {name: name.split(".") for name in weights if name.endswith("scale_shift_table")}
    tensors |= {f"blocks.{parts[1]}.mod.lin": torch.randn(weights[name].numel())
                for name, parts in tables.items() if parts[0] == "transformer_blocks"}  # fmt: skip
    tensors |= {original: weights[name].clone() for name, original in parameters.items() if name in weights}
    return tensors


@pytest.mark.parametrize(
    "preset", [FLUX, "flux-dev-tiny", SD3, "sd35-large-tiny", KLEIN, "flux2-dev-tiny", Z_IMAGE, KREA2]
)
def test_names_are_those_of_diffusers(preset: str) -> None:
    """Each tensor of the model has a recipe, whose result is that of diffusers' conversion."""
    from diffusers.loaders import single_file_utils

    config = PRESETS[preset].models["transformer"]
    if class_name(config) == "FluxTransformer2DModel":  # whose conversion knows one width
        config = config | {"num_attention_heads": 24, "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56]}
        with torch.device("meta"):
            weights = build_model(class_name(config), config).state_dict()
        weights = {
            name: torch.empty(len(t), *([1] * (t.ndim - 1))) for name, t in weights.items()
        }  # a column is enough
    else:
        weights = build_model(class_name(config), config).state_dict()
    tensors = original_tensors(config, weights)
    recipes = original_recipes(config, {name: tuple(t.shape) for name, t in tensors.items()}, "")
    expected = getattr(single_file_utils, CONVERTERS[class_name(config)])(dict(tensors), config=config)
    assert recipes.keys() == expected.keys() == weights.keys()
    for name, recipe in recipes.items():
        values = evaluate(recipe, lambda stored: tensors[stored].numpy())
        assert np.array_equal(values, expected[name].numpy()), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a diffusers folder of a small FLUX.1 schnell in float32."""
    root = tmp_path_factory.mktemp("flux")
    source = open_preset(FLUX, 3)
    source.write_configs(root)
    for name in source.configs:
        model: Any = source.load(name)
        model.save_pretrained(root / name)
    return root


def write_file(folder: Path, path: Path, prefix: str = "", dtype: str = "bfloat16") -> dict[str, torch.Tensor]:
    """Write a transformer in the original layout to `path`, and return its tensors in float32."""
    config = json.loads((folder / "transformer" / "config.json").read_text())
    weights = build_model(class_name(config), config).state_dict()
    tensors = {f"{prefix}{name}": tensor for name, tensor in original_tensors(config, weights).items()}
    stored = {}
    for name, tensor in tensors.items():
        if dtype == "float8" and name.endswith(".weight"):
            scale = tensor.abs().max() / 448
            stored[name] = (tensor / scale).to(torch.float8_e4m3fn)
            stored[f"{name.removesuffix('.weight')}.scale_weight"] = scale.reshape(1)
            tensors[name] = stored[name].float() * scale
        else:
            stored[name] = tensor.to(torch.bfloat16 if dtype == "float8" else getattr(torch, dtype))
            tensors[name] = stored[name].float()
    save_file(stored, path)
    return tensors


@pytest.mark.parametrize(("prefix", "dtype"), [("", "bfloat16"), ("model.diffusion_model.", "float16"), ("", "float8")])
def test_a_file_is_read(folder: Path, tmp_path: Path, prefix: str, dtype: str) -> None:
    """Weights are those of the file, scales of float8 applied; other models are those of the folder."""
    path = tmp_path / "model.safetensors"
    tensors = write_file(folder, path, prefix, dtype)
    checkpoint = open_checkpoint(str(path), CheckpointOptions(config=str(folder)))
    assert "FLUX.1 schnell" in checkpoint.detection_note
    read = checkpoint.read_tensors("transformer", ["transformer_blocks.0.attn.to_k.weight", "norm_out.linear.weight"])
    qkv = tensors[f"{prefix}double_blocks.0.img_attn.qkv.weight"].numpy()
    width = len(qkv) // 3
    np.testing.assert_array_equal(
        read("transformer_blocks.0.attn.to_k.weight").astype(np.float32), qkv[width : 2 * width]
    )
    loaded = checkpoint.load("transformer").state_dict()
    swapped = tensors[f"{prefix}final_layer.adaLN_modulation.1.weight"].chunk(2)[::-1]
    torch.testing.assert_close(loaded["norm_out.linear.weight"], torch.cat(swapped), rtol=0, atol=0)
    assert checkpoint.models["vae"].files[0].is_relative_to(folder)


def test_files_are_rejected_by_name(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match="GGUF file"):
        open_checkpoint(str(tmp_path / "model.gguf"))
    path, options = tmp_path / "model.safetensors", CheckpointOptions(config=str(folder))
    write_file(folder, path)
    tensors = {"double_blocks.0.img_attn.qkv.weight": torch.zeros(2, 2), "img_in.weight": torch.zeros(4, 384)}
    for change, message in (
        ({"img_in.weight": torch.zeros(4, 384)}, "384 input channels"),
        ({"img_in.weight": torch.zeros(4, 64), "txt_in.weight": torch.zeros(4, 4, dtype=torch.int8)}, "I8 weights"),
        ({"img_in.weight": torch.zeros(4, 64), "guidance_in.in_layer.weight": torch.zeros(2)}, "is the other FLUX"),
        ({"individual_token_refiner.x": torch.zeros(2)}, "Hunyuan"),
    ):
        save_file({**tensors, **change}, path)
        with pytest.raises(InputError, match=message):
            open_checkpoint(str(path), options)


def test_joined_matrices_of_a_lora_are_split() -> None:
    """Kohya's and ComfyUI's joined query, key and value become three modules with their rows of `up`."""
    config = PRESETS[FLUX].models["transformer"]
    width, random = 96, np.random.default_rng(0)
    up, down = random.normal(size=(3 * width, 4)), random.normal(size=(4, width))
    kohya = {"lora_up.weight": up, "lora_down.weight": down, "alpha": np.array(2.0)}
    comfy = {"lora_B.weight": up, "lora_A.weight": down, "alpha": np.array(2.0)}
    for adapter in (
        read_adapter({f"lora_unet_double_blocks_0_img_attn_qkv.{k}": v for k, v in kohya.items()}, config),
        read_adapter({f"diffusion_model.double_blocks.0.img_attn.qkv.{k}": v for k, v in comfy.items()}, config),
    ):
        modules = adapter.modules["transformer"]
        assert list(modules) == [f"transformer_blocks_0_attn_to_{name}" for name in "qkv"]
        for i, module in enumerate(modules.values()):
            expected = 0.5 * up[i * width : (i + 1) * width] @ down
            delta = module.delta()
            assert delta is not None
            np.testing.assert_allclose(delta.dense(), expected, rtol=1e-5, atol=1e-5)
    single = read_adapter({"lora_unet_single_blocks_1_linear1.lora_up.weight": random.normal(size=(7 * width, 2)),
                           "lora_unet_single_blocks_1_linear1.lora_down.weight": down[:2]}, config)  # fmt: skip
    sizes = {name: len(module.tensors["up"]) for name, module in single.modules["transformer"].items()}
    assert sizes == {
        **{f"single_transformer_blocks_1_attn_to_{name}": width for name in "qkv"},
        "single_transformer_blocks_1_proj_mlp": 4 * width,
    }
    last = {"lora_unet_final_layer_adaLN_modulation_1.lora_up.weight": up[: 2 * width],
            "lora_unet_final_layer_adaLN_modulation_1.lora_down.weight": down}  # fmt: skip
    (module,) = read_adapter(last, config).modules["transformer"].values()
    np.testing.assert_allclose(module.tensors["up"], np.roll(up[: 2 * width], width, 0), rtol=1e-6)
