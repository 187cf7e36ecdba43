"""A folder's ControlNet as ComfyUI's CONTROL_NET, for stock Apply ControlNet nodes."""

from __future__ import annotations

from typing import Any

import comfy.controlnet
import comfy.model_management
import torch

from sd_ort.checkpoints.signatures import levels
from sd_ort.checkpoints.unet_inputs import time_ids_split
from sd_ort.integrations.models import TorchComponentSessions


def open_controlnet(models: TorchComponentSessions) -> comfy.controlnet.ControlNet:
    """Return the folder's ControlNet as a CONTROL_NET. Raises InputError if the folder has none."""
    models.models.require("controlnet")
    device = torch.device("cpu") if models.device.type == "cpu" else comfy.model_management.get_torch_device()
    vae = models.config("vae_decoder") if "vae_decoder" in models else {"block_out_channels": [0] * 4}
    return comfy.controlnet.ControlNet(
        control_model=ControlModel(models),
        compression_ratio=2 ** (levels(vae) - 1),
        load_device=device,
        manual_cast_dtype=None,
    )


class ControlModel(torch.nn.Module):
    """ComfyUI's control model on a folder's `controlnet`. `dtype` is the graph's dtype."""

    def __init__(self, models: TorchComponentSessions) -> None:
        super().__init__()
        self.models, self.dtype = models, models.dtype("controlnet")

    def forward(
        self,
        x: torch.Tensor,
        hint: torch.Tensor,
        timesteps: torch.Tensor,
        context: torch.Tensor,
        y: torch.Tensor | None = None,
        **_: Any,
    ) -> dict[str, list[torch.Tensor]]:
        """Compute the residuals at conditioning scale 1, as lists "output" (outermost first) and "middle".

        Inputs: latents x (B, C, h, w), image hint (B, 3, H, W) in 0..1, timesteps (B,), context (B, S, C).
        """
        names = self.models.inputs("controlnet")
        rank = len(self.models.models["controlnet"].inputs["timestep"].shape)
        feed = {
            "sample": x,
            "timestep": timesteps.float()[:1].reshape((1,) * rank),
            "encoder_hidden_states": context,
            "controlnet_cond": hint.expand(len(x), -1, -1, -1) if len(hint) == 1 else hint,
            "conditioning_scale": torch.ones(1),
        }
        if y is not None and "text_embeds" in names:
            pooled = time_ids_split(self.models.config("controlnet"))[0]
            feed |= {"text_embeds": y[:, :pooled], "time_ids": y[:, pooled:]}
        *down, middle = (value.to(x) for value in self.models.run("controlnet", **feed).values())
        return {"output": down, "middle": [middle]}
