"""A folder's UNet as the WebUIs call it; knows nothing of either host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sd_ort.core.errors import InputError
from sd_ort.core.folder import MANIFEST
from sd_ort.family.conditions import is_sdxl, time_ids_split
from sd_ort.hosts.models import HostModels
from sd_ort.hosts.unet import HostUNet, refuse_patches, residuals_of

LARGEST = 16_384  # pixels of a side that SDXL can have been told


def folders(root: Path) -> list[str]:
    """Names of the pipeline folders in a WebUI's models/sd_ort."""
    return sorted(path.parent.name for path in root.glob(f"*/{MANIFEST}"))


class WebUNet(torch.nn.Module):
    """`diffusion_model` of the hosts on a pipeline folder; `dtype`: of its graph, which reForge asks for."""

    def __init__(self, folder: Path, provider: str | None = None) -> None:
        """Raises what `HostModels` raises."""
        super().__init__()
        self.models = HostModels(folder, provider)
        self.called, self.dtype = HostUNet(self.models), self.models.dtype("unet")
        self.loras: list[tuple[str, float]] = []

    def use_loras(self, loras: Sequence[tuple[str, float]]) -> None:
        """Draw with these LoRA files, each with its strength, and no others.

        Raises InputError for a file that is no LoRA or one of another family.
        """
        wanted = [(str(path), float(strength)) for path, strength in loras]
        if wanted == self.loras:
            return
        for path, _ in wanted:
            if path not in self.models.get_list_adapters():
                self.models.load_lora_weights(path, path)
        strengths: dict[str, float] = {}
        for path, strength in wanted:
            strengths[path] = strengths.get(path, 0.0) + strength
        self.models.set_adapters(list(strengths), list(strengths.values()))
        self.loras = wanted

    def forward(
        self,
        x: torch.Tensor,
        timesteps: torch.Tensor,
        context: torch.Tensor,
        y: torch.Tensor | None = None,
        control: Mapping[str, Sequence[Any]] | None = None,
        transformer_options: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> torch.Tensor:
        """Scaled latents x (B, C, h, w), timesteps (B,), context (B, S, C), SDXL's y (B, D) -> (B, 4, h, w).

        Raises InputError for what the graph cannot do.
        """
        refuse_patches(transformer_options or {})
        if unknown := [name for name, value in more.items() if value is not None]:
            raise InputError(f"sd-ort's graph takes no {', '.join(unknown)}.")
        told = {"encoder_hidden_states": context}
        if is_sdxl(self.models.unet_config):
            if y is None:
                raise InputError("this is an SDXL folder, and the checkpoint is none: choose another folder.")
            pooled, count = time_ids_split(self.models.unet_config)
            width = self.models.unet_config["addition_time_embed_dim"]
            told |= {"text_embeds": y[:, :pooled], "time_ids": numbers_of(y[:, pooled:].float(), count, width)}
        elif y is not None and y.numel():
            raise InputError("the checkpoint is an SDXL one, and this folder is none: choose another folder.")
        wanted = self.models.unet_config["cross_attention_dim"]
        if context.shape[-1] != wanted:
            raise InputError(f"the checkpoint's prompts have {context.shape[-1]} channels, the folder's {wanted}.")
        residuals, middle = residuals_of(x, control)
        return self.called(x, timesteps, told, residuals, middle)


def numbers_of(embedded: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """SDXL's sizes (B, count) from their embeddings (B, count * width), which the hosts hand over; our graph embeds
    them itself. A number's embedding is its cosines, then its sines, at width / 2 frequencies from 1 down to 1e-4.

    Raises InputError where the numbers found, whole ones, do not have these embeddings.
    """
    each = embedded.reshape(-1, count, width).double().cpu()
    frequencies = 10_000.0 ** (-torch.arange(width // 2, dtype=torch.float64) * 2 / width)
    cosines, sines = each.chunk(2, -1)
    # The slowest turns once in more than LARGEST pixels; half precision leaves it pixels off, which the others mend.
    rough = torch.atan2(sines[..., -1], cosines[..., -1]).remainder(2 * torch.pi) / frequencies[-1]
    near = (rough.round()[..., None] + torch.arange(-32, 33)).clamp(0, LARGEST)
    angles = near[..., None] * frequencies
    off = (torch.cat([angles.cos(), angles.sin()], -1) - each[..., None, :]).abs().amax(-1)
    least, place = off.min(-1)
    if bool((least > 0.02).any()):
        raise InputError("SDXL's sizes could not be read from what the host gives: take the host's own UNet.")
    return near.gather(-1, place[..., None])[..., 0].float().to(embedded.device)
