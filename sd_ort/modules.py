"""Torch modules with exactly the inputs and outputs of the ONNX graphs: what the exporters trace."""

from __future__ import annotations

from typing import Any

import torch


class TextEncoder(torch.nn.Module):
    """input_ids [B, S] -> last_hidden_state, pooler_output; for SDXL the penultimate hidden state [, text_embeds]."""

    def __init__(self, model: torch.nn.Module, sdxl: bool) -> None:
        super().__init__()
        self.model = model
        self.sdxl = sdxl

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output = self.model(input_ids, output_hidden_states=self.sdxl)
        if not self.sdxl:
            return output.last_hidden_state, output.pooler_output
        hidden = output.hidden_states[-2]
        return (hidden, output.text_embeds) if "text_embeds" in output else (hidden,)


class UNet(torch.nn.Module):
    """sample, timestep, encoder_hidden_states [, text_embeds, time_ids] [, ControlNet's residuals] -> out_sample."""

    def __init__(self, model: torch.nn.Module, sdxl: bool, controlnet: bool) -> None:
        super().__init__()
        self.model = model
        self.sdxl = sdxl
        self.controlnet = controlnet

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, *extra: Any) -> torch.Tensor:
        options: dict[str, Any] = {}
        if self.sdxl:
            options["added_cond_kwargs"] = {"text_embeds": extra[0], "time_ids": extra[1]}
            extra = extra[2:]
        if self.controlnet:
            options["down_block_additional_residuals"] = tuple(extra[:-1])
            options["mid_block_additional_residual"] = extra[-1]
        output: torch.Tensor = self.model(sample, timestep, context, return_dict=False, **options)[0]
        return output


class ControlNet(torch.nn.Module):
    """The UNet's inputs, an image and a scale -> one residual a skip connection, and one for the middle block."""

    def __init__(self, model: torch.nn.Module, sdxl: bool) -> None:
        super().__init__()
        self.model = model
        self.sdxl = sdxl

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, *extra: Any) -> Any:
        options: dict[str, Any] = {}
        if self.sdxl:
            options["added_cond_kwargs"] = {"text_embeds": extra[0], "time_ids": extra[1]}
        image, scale = extra[-2:]
        down, middle = self.model(sample, timestep, context, image, scale, return_dict=False, **options)
        return (*down, middle)


class VaeEncoder(torch.nn.Module):
    """image [B, 3, H, W] in -1..1 -> mean and log variance [B, 2C, H/8, W/8], not scaled."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        del model.decoder

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        parameters: torch.Tensor = self.model.encode(sample).latent_dist.parameters  # type: ignore[operator]
        return parameters


class VaeDecoder(torch.nn.Module):
    """latent [B, C, H, W], already divided by the scaling factor -> image [B, 3, 8H, 8W]."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        del model.encoder

    def forward(self, latent_sample: torch.Tensor) -> torch.Tensor:
        image: torch.Tensor = self.model.decode(latent_sample, return_dict=False)[0]  # type: ignore[operator]
        return image


def wrap(component: str, model: torch.nn.Module, sdxl: bool, controlnet: bool) -> torch.nn.Module:
    """The module of `component`, in eval mode."""
    if component.startswith("text_encoder"):
        return TextEncoder(model, sdxl).eval()
    if component == "unet":
        return UNet(model, sdxl, controlnet).eval()
    if component == "controlnet":
        return ControlNet(model, sdxl).eval()
    return (VaeEncoder if component == "vae_encoder" else VaeDecoder)(model).eval()
