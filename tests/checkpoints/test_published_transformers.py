"""Published files of diffusion transformers: float8 and int8 with scales, GGUF, in ComfyUI's and diffusers' names."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.loaders import single_file_utils
from gguf_files import write_gguf
from safetensors.torch import save_file
from test_gguf import saved
from test_transformer_file import CONVERTERS, FLUX, KLEIN, KREA2, SD3, Z_IMAGE, original_tensors

from sd_ort.checkpoints.checkpoint import build_model, class_name
from sd_ort.checkpoints.open import CheckpointOptions, open_checkpoint
from sd_ort.checkpoints.presets import PRESETS
from sd_ort.core.errors import InputError

QWEN, COMFYUI = "qwen-image-tiny", "model.diffusion_model."
Tensors = dict[str, torch.Tensor]
GGUF_DTYPES = ("Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "BF16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the diffusers folder of a preset."""
    root = tmp_path_factory.mktemp("folders")
    return cache(lambda preset: saved(preset, root / preset))


def random_tensors(preset: str, is_diffusers: bool) -> Tensors:
    """Return the tensors of a transformer, of random values, by their diffusers names or their original ones."""
    config = PRESETS[preset].models["transformer"]
    weights = build_model(class_name(config), config).state_dict()
    torch.manual_seed(0)
    if is_diffusers or preset == QWEN:
        return {name: torch.randn(tensor.shape) for name, tensor in weights.items()}
    return original_tensors(config, weights)


def is_matrix(name: str, tensor: torch.Tensor) -> bool:
    return name.endswith(".weight") and tensor.ndim == 2


def mark(**settings: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(settings).encode()), dtype=torch.uint8)


def float8_one_scale(name: str, tensor: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """ComfyUI's older layout: the file is marked, and a layer has scales of its weight and its input."""
    scale = tensor.abs().max() / 448
    values = (tensor / scale).to(torch.float8_e4m3fn)
    layer = name.removesuffix(".weight")
    more = {f"{layer}.scale_weight": scale.reshape(1), f"{layer}.scale_input": torch.ones(1)}
    return {name: values, **more}, values.float() * scale


def float8_marked(name: str, tensor: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """ComfyUI's newer layout: each layer is marked."""
    scale = tensor.abs().max() / 57344
    values = (tensor / scale).to(torch.float8_e5m2)
    layer = name.removesuffix(".weight")
    more = {f"{layer}.weight_scale": scale, f"{layer}.comfy_quant": mark(format="float8_e5m2")}
    return {name: values, **more}, values.float() * scale


def int8_of_rows(name: str, tensor: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = tensor.abs().amax(1, keepdim=True) / 127
    values = (tensor / scale).round().to(torch.int8)
    more = {f"{name}_scale": scale, name.replace(".weight", ".comfy_quant"): mark(format="int8_tensorwise")}
    return {name: values, **more}, values.float() * scale


def rotated_int8(name: str, tensor: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Groups of 16 columns are multiplied by a Hadamard matrix before they are rounded; layers of others are not."""
    if tensor.shape[1] % 16:
        return int8_of_rows(name, tensor)
    seed = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]) / 2
    rotation = torch.kron(seed, seed)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(16))
    rotated = (tensor.unflatten(1, (-1, 16)) @ rotation.T).flatten(1)
    scale = rotated.abs().amax(1, keepdim=True) / 127
    values = (rotated / scale).round().to(torch.int8)
    settings = mark(format="int8_tensorwise", convrot=True, convrot_groupsize=16)
    more = {f"{name}_scale": scale, name.replace(".weight", ".comfy_quant"): settings}
    return {name: values, **more}, ((values.float() * scale).unflatten(1, (-1, 16)) @ rotation).flatten(1)


def write(path: Path, tensors: Tensors, quantize: Callable[..., tuple[Tensors, torch.Tensor]] | None) -> Tensors:
    """Write tensors to safetensors with quantized matrices, or to GGUF; return the values that a reader must return."""
    if quantize is None:
        kinds = itertools.cycle(GGUF_DTYPES)
        dtypes = {name: next(kinds) for name, tensor in tensors.items() if is_matrix(name, tensor)
                  and tensor.shape[1] % 32 == 0 and tensor.numel() % 256 == 0}  # fmt: skip
        assert set(dtypes.values()) == set(GGUF_DTYPES)
        values = write_gguf(path, {name: tensor.numpy() for name, tensor in tensors.items()}, dtypes)
        return {name: torch.from_numpy(np.array(array)) for name, array in values.items()}
    stored: Tensors = {}
    expected: Tensors = {}
    for name, tensor in tensors.items():
        if is_matrix(name, tensor):
            more, expected[name] = quantize(name, tensor)
            stored |= more
        else:
            stored[name] = tensor.bfloat16()
            expected[name] = stored[name].float()
    if quantize is float8_one_scale:
        stored["scaled_fp8"] = torch.zeros(2).to(torch.float8_e4m3fn)
    save_file(stored, path)
    return expected


@pytest.mark.parametrize(("preset", "prefix", "is_diffusers", "quantize"), [
    (QWEN, COMFYUI, True, float8_one_scale),
    (QWEN, "", True, rotated_int8),
    (QWEN, "", True, None),
    (Z_IMAGE, COMFYUI, False, float8_marked),
    (Z_IMAGE, "", False, rotated_int8),
    (Z_IMAGE, "", False, None),
    (Z_IMAGE, "transformer.", True, float8_one_scale),
    (Z_IMAGE, "", True, None),
    (KREA2, COMFYUI, False, float8_one_scale),
    (KREA2, "", False, rotated_int8),
    (KREA2, COMFYUI, False, None),
    (KREA2, "", True, float8_marked),
    (KREA2, "", True, None),
    *((preset, "", True, int8_of_rows) for preset in (FLUX, SD3, KLEIN)),
], ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", None))  # fmt: skip
def test_weights_are_those_of_the_file(
    folder: Callable[[str], Path], tmp_path: Path, preset: str, prefix: str, is_diffusers: bool, quantize: Any
) -> None:
    config = PRESETS[preset].models["transformer"]
    tensors = random_tensors(preset, is_diffusers)
    path = tmp_path / ("model.gguf" if quantize is None else "model.safetensors")
    values = write(path, {f"{prefix}{name}": tensor for name, tensor in tensors.items()}, quantize)
    expected = {name.removeprefix(prefix): tensor for name, tensor in values.items()}
    if not is_diffusers:
        expected = getattr(single_file_utils, CONVERTERS[class_name(config)])(expected, config=config)
    checkpoint = open_checkpoint(str(path), CheckpointOptions(config=str(folder(preset))))
    loaded = checkpoint.load("transformer").state_dict()
    read = checkpoint.read_tensors("transformer", expected)
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        # Products of rounded numbers by the scale; sums of 16 of them where groups are rotated.
        torch.testing.assert_close(loaded[name], tensor, rtol=1e-6, atol=1e-6, msg=name)
        assert np.array_equal(read(name).astype(np.float32), loaded[name].numpy()), name


@pytest.mark.parametrize(("settings", "message"), [
    ({"format": "nvfp4"}, r"has layers in nvfp4, such as img_in: sd-ort reads float8_e4m3fn, .*"),
    ({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 128}, "rotates groups of 128 columns"),
    ({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}, "rotates groups of 256 columns"),
    ({"format": "int8_tensorwise", "convrot": True}, "rotates groups of None columns"),
    ({}, "img_in.comfy_quant is no description of a layer"),
])  # fmt: skip
def test_other_formats_are_rejected_by_name(
    folder: Callable[[str], Path], tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    stored, _ = int8_of_rows("img_in.weight", torch.randn(96, 64))
    rest = {name: tensor for name, tensor in random_tensors(QWEN, True).items() if name != "img_in.weight"}
    save_file({**rest, **stored, "img_in.comfy_quant": mark(**settings)}, tmp_path / "model.safetensors")
    options = CheckpointOptions(config=str(folder(QWEN)))
    with pytest.raises(InputError, match=message):
        open_checkpoint(str(tmp_path / "model.safetensors"), options)


def test_relatives_with_diffusers_names_are_rejected_by_name(folder: Callable[[str], Path], tmp_path: Path) -> None:
    path, options = tmp_path / "model.safetensors", CheckpointOptions(config=str(folder(FLUX)))
    of_flux = {"transformer_blocks.0.attn.to_q.weight": torch.zeros(2, 2)}
    for change, message in (
        ({"x_embedder.weight": torch.zeros(4, 384)}, "384 input channels"),
        ({"x_embedder.weight": torch.zeros(4, 64), "controlnet_blocks.0.weight": torch.zeros(2, 2)}, "is a ControlNet"),
        ({"txt_norm.weight": torch.zeros(4)}, "is Qwen-Image, and .* has a FluxTransformer2DModel"),
        ({}, "without img_in.weight"),
    ):
        save_file({**of_flux, **change}, path)
        with pytest.raises(InputError, match=message):
            open_checkpoint(str(path), options)


@pytest.mark.parametrize(("names", "family"), [
    (["down_blocks.0.motion_modules.0.temporal_transformer.transformer_blocks.0.attention_blocks.0.pos_encoder.pe",
      "mid_block.motion_modules.0.temporal_transformer.norm.bias"], "animatediff"),
    (["head.modulation", "patch_embedding.weight", "blocks.0.self_attn.norm_q.weight"], "wan"),
    (["txt_in.individual_token_refiner.blocks.0.adaLN_modulation.1.bias", "double_blocks.0.img_attn.proj.weight"],
     "Hunyuan"),
    (["model.diffusion_model.transformer_blocks.27.scale_shift_table", "patchify_proj.weight"], "ltx-video"),
])  # fmt: skip
def test_video_models_are_rejected_by_name(tmp_path: Path, names: list[str], family: str) -> None:
    save_file({name: torch.zeros(4, 4, 1, 2, 2) for name in names}, tmp_path / "video.safetensors")
    with pytest.raises(InputError, match=rf"is a {family}.* model: sd-ort runs Stable Diffusion 1\.x"):
        open_checkpoint(str(tmp_path / "video.safetensors"))
