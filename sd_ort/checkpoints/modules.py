"""PyTorch modules with the inputs and outputs of the ONNX graphs, for the exporters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from sd_ort.checkpoints.signatures import signature
from sd_ort.checkpoints.unet_inputs import CONDITIONING_INPUTS


class TextEncoder(torch.nn.Module):
    """input_ids [B, S] -> last_hidden_state, pooler_output; or the penultimate hidden state [, text_embeds]."""

    def __init__(self, model: torch.nn.Module, penultimate: bool) -> None:
        super().__init__()
        self.model = model
        self.penultimate = penultimate

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output = self.model(input_ids, output_hidden_states=self.penultimate)
        if not self.penultimate:
            return output.last_hidden_state, output.pooler_output
        hidden = output.hidden_states[-2]
        return (hidden, output.text_embeds) if "text_embeds" in output else (hidden,)


class T5TextEncoder(torch.nn.Module):
    """input_ids [B, S] -> last_hidden_state [B, S, C]. All tokens are attended to, padding too, as in diffusers."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model(input_ids).last_hidden_state
        return hidden


class DiffusionTransformer(torch.nn.Module):
    """The inputs `names` -> out_hidden_states."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        from diffusers.models.embeddings import Timesteps

        super().__init__()
        self.model = model
        self.names = names
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, Timesteps):
                    setattr(module, name, SinusoidalEmbedding(child))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        named = dict(zip(self.names, inputs, strict=True))
        output: torch.Tensor = self.model(**named, return_dict=False)[0]
        return output


class SinusoidalEmbedding(torch.nn.Module):
    """diffusers' `Timesteps` with the frequencies as a buffer.

    Exporters fold the frequencies with NumPy's Exp, whose last bit differs from torch's. FLUX.1 multiplies them by
    guidance * 1000, so outputs differed by an NMSE of 4e-10 instead of 2e-13.
    """

    frequencies: torch.Tensor

    def __init__(self, timesteps: Any) -> None:
        super().__init__()
        half = timesteps.num_channels // 2
        exponents = -math.log(10000) * torch.arange(half, dtype=torch.float32) / (half - timesteps.downscale_freq_shift)
        self.register_buffer("frequencies", torch.exp(exponents) * timesteps.scale, persistent=False)
        self.flip_sin_to_cos = timesteps.flip_sin_to_cos

    def forward(self, timesteps: torch.Tensor) -> torch.Tensor:
        angles = timesteps[:, None].float() * self.frequencies
        halves = (torch.sin(angles), torch.cos(angles))
        return torch.cat(halves[::-1] if self.flip_sin_to_cos else halves, dim=-1)


class UNet(torch.nn.Module):
    """sample, timestep, encoder_hidden_states and the inputs `names` -> out_sample."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, *extra: Any) -> torch.Tensor:
        named = dict(zip(self.names, extra, strict=True))
        options = _denoiser_options(named)
        adapter = [c.name for c in CONDITIONING_INPUTS if c.is_ip_adapter_input and c.name in named]
        if adapter:
            images, scales = (named[name] for name in adapter)
            options["cross_attention_kwargs"] = self.model.pictures(images, scales)  # type: ignore[operator]
        if residuals := [value for name, value in named.items() if name.startswith("down_block")]:
            options["down_block_additional_residuals"] = tuple(residuals)
            options["mid_block_additional_residual"] = named["mid_block_additional_residual"]
        output: torch.Tensor = self.model(sample, timestep, context, return_dict=False, **options)[0]
        return output


class ControlNet(torch.nn.Module):
    """The UNet's inputs, an image and a scale -> a residual for each skip connection and for the middle block."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, *extra: Any) -> Any:
        options = _denoiser_options(dict(zip(self.names, extra, strict=True)))
        image, scale = extra[-2:]
        down, middle = self.model(sample, timestep, context, image, scale, return_dict=False, **options)
        return (*down, middle)


def _denoiser_options(named: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the keyword arguments of diffusers' UNet and ControlNet for the conditioning inputs among `named`."""
    specs = [spec for spec in CONDITIONING_INPUTS if spec.name in named and not spec.is_ip_adapter_input]
    options: dict[str, Any] = {spec.name: named[spec.name] for spec in specs if not spec.in_added_cond_kwargs}
    if added := {spec.name: named[spec.name] for spec in specs if spec.in_added_cond_kwargs}:
        options["added_cond_kwargs"] = added
    return options


class ImageEncoder(torch.nn.Module):
    """pixel_values [B, 3, H, W] -> the penultimate hidden state [B, 1 + patches, C], image_embeds [B, D]."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output = self.model(pixel_values, output_hidden_states=True)
        return output.hidden_states[-2], output.image_embeds


class VaeEncoder(torch.nn.Module):
    """image [B, 3, H, W] in -1..1 -> mean and log variance [B, 2C, H/8, W/8], or latents [B, C, ..]; not scaled."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        del model.decoder

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        encoded = self.model.encode(sample)  # type: ignore[operator]
        output: torch.Tensor = encoded.latents if "latents" in encoded else encoded.latent_dist.parameters
        return output


class VaeDecoder(torch.nn.Module):
    """latent [B, C, H, W], already divided by the scaling factor -> image [B, 3, 8H, 8W]."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        del model.encoder

    def forward(self, latent_sample: torch.Tensor) -> torch.Tensor:
        image: torch.Tensor = self.model.decode(latent_sample, return_dict=False)[0]  # type: ignore[operator]
        return image


def wrap(component: str, model: torch.nn.Module, penultimate: bool, controlnet: bool) -> torch.nn.Module:
    """Return the module of `component`, in eval mode. VAE modules lose their unused half."""
    config: Any = model.config
    if component.startswith("text_encoder"):
        is_t5 = config.model_type == "t5"
        return T5TextEncoder(model).eval() if is_t5 else TextEncoder(model, penultimate).eval()
    if component == "transformer":
        return DiffusionTransformer(model, [tensor.name for tensor in signature(component, config).inputs]).eval()
    if component == "image_encoder":
        return ImageEncoder(model).eval()
    if component in ("unet", "controlnet"):
        names = [tensor.name for tensor in signature(component, config, controlnet=controlnet).inputs[3:]]
        return (UNet if component == "unet" else ControlNet)(model, names).eval()
    return (VaeEncoder if component == "vae_encoder" else VaeDecoder)(model).eval()
