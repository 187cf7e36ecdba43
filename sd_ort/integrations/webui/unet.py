"""A folder's UNet with the call signature of the WebUIs, independent of the WebUI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sd_ort.checkpoints.unet_inputs import is_sdxl, time_ids_split
from sd_ort.core.errors import InputError
from sd_ort.core.ownership import Stamp, file_stamp
from sd_ort.core.pipeline_folder import MANIFEST
from sd_ort.integrations.models import TorchComponentSessions
from sd_ort.integrations.unet import UNetRunner, parse_residuals, reject_patches

MAX_SIZE = 16_384  # maximum of SDXL's size conditioning, in pixels


def folders(root: Path) -> list[str]:
    """Return the names of the pipeline folders in a WebUI's models/sd_ort."""
    return sorted(path.parent.name for path in root.glob(f"*/{MANIFEST}"))


def _stamp(path: Path) -> Stamp | None:
    """Return the stamp of a file, None if it is gone."""
    try:
        return file_stamp(path.stat())
    except OSError:
        return None


class WebUNet(torch.nn.Module):
    """A WebUI's `diffusion_model` that runs a pipeline folder's UNet. reForge reads `dtype`, the graph's dtype."""

    def __init__(self, folder: Path, provider: str | None = None) -> None:
        """Open the folder. Raises the exceptions of `TorchComponentSessions`."""
        super().__init__()
        self.models = TorchComponentSessions(folder, provider)
        self.runner, self.dtype = UNetRunner(self.models), self.models.dtype("unet")
        self.loras: list[tuple[str, float, Stamp | None]] | None = []  # None after an error: whatever of it is in use
        self.stamps: dict[str, Stamp | None] = {}  # of the loaded LoRA files

    def use_loras(self, loras: Sequence[tuple[str, float]]) -> None:
        """Activate exactly these LoRA files with their adapter scales. A file that was replaced is loaded again.

        Raises:
            InputError: if a file is not a LoRA, or one of another model family.
        """
        requested = [(str(path), float(scale), _stamp(Path(path))) for path, scale in loras]
        if requested == self.loras:
            return
        self.loras = None
        for path, _, stamp in requested:
            loaded = path in self.models.lora_state.scales
            if loaded and stamp not in (None, self.stamps[path]):
                self.models.delete_adapters(path)
                loaded = False
            if not loaded:
                self.models.load_lora_weights(path, path)
                self.stamps[path] = stamp
                assert self.models.loras is not None
                for modules in self.models.loras.adapters[path].modules.values():
                    for module in modules.values():
                        module.scales_dora_norm = False
        scales: dict[str, float] = {}
        for path, scale, _ in requested:
            scales[path] = scales.get(path, 0.0) + scale
        self.models.set_adapters(list(scales), list(scales.values()))
        self.loras = requested

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
        """Predict (B, 4, h, w) from scaled latents x (B, C, h, w), timesteps (B,), context (B, S, C), SDXL's y (B, D).

        Raises InputError for arguments that the graph does not support.
        """
        reject_patches(transformer_options or {})
        if unknown := [name for name, value in more.items() if value is not None]:
            raise InputError(f"sd-ort's graph has no input {', '.join(unknown)}.")
        conditioning = {"encoder_hidden_states": context}
        if is_sdxl(self.models.unet_config):
            if y is None:
                raise InputError("this is an SDXL folder, and the checkpoint is none: choose another folder.")
            pooled, count = time_ids_split(self.models.unet_config)
            width = self.models.unet_config["addition_time_embed_dim"]
            conditioning |= {
                "text_embeds": y[:, :pooled],
                "time_ids": decode_sinusoidal_embedding(y[:, pooled:].float(), count, width),
            }
        elif y is not None and y.numel():
            raise InputError("the checkpoint is an SDXL one, and this folder is none: choose another folder.")
        if x.shape[1] != (channels := self.models.unet_config["in_channels"]):
            raise InputError(f"the checkpoint's UNet reads {x.shape[1]} channels, the folder's {channels}.")
        channels = self.models.unet_config["cross_attention_dim"]
        if context.shape[-1] != channels:
            raise InputError(f"the checkpoint's prompts have {context.shape[-1]} channels, the folder's {channels}.")
        residuals, middle = parse_residuals(x, control)
        return self.runner(x, timesteps, conditioning, residuals, middle)


def decode_sinusoidal_embedding(embedded: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """Return SDXL's sizes (B, count) for their sinusoidal embeddings (B, count * width), which WebUIs pass.

    sd-ort's graph embeds the sizes itself. An embedding has the cosines, then the sines, at width / 2 frequencies from
    1 down to 1e-4.

    Raises:
        InputError: if no integer sizes have these embeddings.
    """
    embeddings = embedded.reshape(-1, count, width).double().cpu()
    frequencies = 10_000.0 ** (-torch.arange(width // 2, dtype=torch.float64) * 2 / width)
    cosines, sines = embeddings.chunk(2, -1)
    # The lowest frequency has a period above MAX_SIZE. In half precision its estimate is off by pixels, so the
    # neighboring integers are compared at all frequencies.
    estimate = torch.atan2(sines[..., -1], cosines[..., -1]).remainder(2 * torch.pi) / frequencies[-1]
    candidates = (estimate.round()[..., None] + torch.arange(-32, 33)).clamp(0, MAX_SIZE)
    angles = candidates[..., None] * frequencies
    errors = (torch.cat([angles.cos(), angles.sin()], -1) - embeddings[..., None, :]).abs().amax(-1)
    smallest, index = errors.min(-1)
    if bool((smallest > 0.02).any()):
        raise InputError("SDXL's sizes cannot be decoded from their embedding: use the application's own UNet.")
    return candidates.gather(-1, index[..., None])[..., 0].float().to(embedded.device)
