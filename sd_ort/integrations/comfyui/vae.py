"""A folder's VAE as ComfyUI's VAE. Tiling, batching and memory management are ComfyUI's."""

from __future__ import annotations

from typing import Any

import comfy.model_management
import comfy.sd
import torch
from comfy.model_patcher import ModelPatcher

from sd_ort.checkpoints.signatures import levels
from sd_ort.core.errors import InputError
from sd_ort.core.quiet import quiet
from sd_ort.integrations.models import TorchComponentSessions


def open_vae(models: TorchComponentSessions) -> comfy.sd.VAE:
    """Return the folder's VAE as a ComfyUI VAE. Raises InputError if the folder has no decoder."""
    models.models.require("vae_decoder")
    config = models.config("vae_decoder")
    with quiet("root"):  # ComfyUI warns about missing weights
        vae = comfy.sd.VAE(sd={})
    vae.first_stage_model = Autoencoder(models)
    vae.device = comfy.model_management.vae_device() if models.device.type != "cpu" else torch.device("cpu")
    vae.vae_dtype, vae.output_device = torch.float32, comfy.model_management.intermediate_device()
    vae.upscale_ratio = vae.downscale_ratio = 2 ** (levels(config) - 1)
    vae.latent_channels = config.get("latent_channels", 4)
    vae.size = 1
    vae.patcher = ModelPatcher(vae.first_stage_model, load_device=vae.device, offload_device=vae.device, size=1)
    return vae


class Autoencoder(torch.nn.Module):
    """Encodes images (B, 3, H, W) in -1..1 to unscaled latents (B, C, h, w), and decodes these."""

    def __init__(self, models: TorchComponentSessions) -> None:
        super().__init__()
        self.models = models

    def encode(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return the mean of the latent distribution, like ComfyUI's own autoencoder."""
        if "vae_encoder" not in self.models:
            raise InputError(f"{self.models.folder} has no vae_encoder: optimize it with all components.")
        (encoded,) = self.models.run("vae_encoder", sample=x).values()
        tiny = self.models.models["vae_encoder"].outputs == ["latent_sample"]
        return (encoded if tiny else encoded.chunk(2, 1)[0]).to(x)

    def decode(self, z: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return the decoded image, which ComfyUI then clips to 0..1."""
        return self.models.run("vae_decoder", latent_sample=z)["sample"].to(z)
