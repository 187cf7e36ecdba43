"""Files of the demo model for hosts: its checkpoint in one file, and two LoRAs with random weights."""

from __future__ import annotations

from pathlib import Path

import diffusers
import torch
from safetensors.torch import save_file

from scripts.fixtures.save_single_file import save
from sd_ort import demo
from sd_ort.checkpoints.diffusers_folder import open_folder

MODEL = Path(demo.__file__).parent / "model"
BLOCK = "down_blocks.1.attentions.0.transformer_blocks.0"
MODULES = (f"{BLOCK}.attn1.to_q", f"{BLOCK}.attn2.to_v", f"{BLOCK}.ff.net.0.proj", "down_blocks.0.resnets.0.conv1")


def save_checkpoint(path: Path) -> None:
    """Write the demo model as one file, under the names that checkpoints are published with."""
    source = open_folder(str(MODEL), MODEL)
    path.parent.mkdir(parents=True, exist_ok=True)
    save({name: source.load(name) for name in source.configs}, path)


def save_loras(folder: Path) -> None:
    """Write two LoRAs as `folder`/one.safetensors and two.safetensors under Kohya's names.

    They change linear layers and a convolution of the UNet, and one layer of the text encoder: rank 4, alpha 2, enough
    to change an image visibly.
    """
    generator = torch.Generator().manual_seed(0)
    weights = diffusers.UNet2DConditionModel.from_pretrained(MODEL / "unet").state_dict()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("one", "two"):
        lora = {}
        for module in MODULES:
            out, *into = weights[f"{module}.weight"].shape
            key = f"lora_unet_{module.replace('.', '_')}"
            lora[f"{key}.lora_down.weight"] = torch.randn(4, *into, generator=generator) * 0.2
            lora[f"{key}.lora_up.weight"] = torch.randn(out, 4, *([1] * (len(into) - 1)), generator=generator) * 0.2
            lora[f"{key}.alpha"] = torch.tensor(2.0)
        key = "lora_te_text_model_encoder_layers_0_self_attn_q_proj"
        lora[f"{key}.lora_down.weight"] = torch.randn(4, 128, generator=generator) * 0.1
        lora[f"{key}.lora_up.weight"] = torch.randn(128, 4, generator=generator) * 0.1
        save_file(lora, folder / f"{name}.safetensors")
