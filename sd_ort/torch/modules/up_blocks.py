"""Up blocks of a UNet: channels-last hidden states and skips are concatenated as rows of channels."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.unets.unet_2d_blocks import CrossAttnUpBlock2D, UpBlock2D

from sd_ort.torch.operators.group_norm import is_channels_last

Tensor = torch.Tensor


class FastUpBlock2D(UpBlock2D):
    """UpBlock2D; with FreeU or gradient checkpointing, diffusers' own code."""

    def forward(
        self,
        hidden_states: Tensor,
        res_hidden_states_tuple: tuple[Tensor, ...],
        temb: Tensor | None = None,
        upsample_size: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if args or kwargs or _is_unsupported(self):
            return super().forward(hidden_states, res_hidden_states_tuple, temb, upsample_size, *args, **kwargs)
        x = hidden_states
        for resnet, skip in zip(self.resnets, reversed(res_hidden_states_tuple), strict=True):
            x = resnet(concatenate(x, skip), temb)
        for upsampler in self.upsamplers or ():
            x = upsampler(x, upsample_size)
        return x


class FastCrossAttnUpBlock2D(CrossAttnUpBlock2D):
    """CrossAttnUpBlock2D; with FreeU, gradient checkpointing or `cross_attention_kwargs`, diffusers' own code."""

    def forward(
        self,
        hidden_states: Tensor,
        res_hidden_states_tuple: tuple[Tensor, ...],
        temb: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        upsample_size: int | None = None,
        attention_mask: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
    ) -> Any:
        if cross_attention_kwargs is not None or _is_unsupported(self):
            return super().forward(
                hidden_states, res_hidden_states_tuple, temb, encoder_hidden_states, cross_attention_kwargs,
                upsample_size, attention_mask, encoder_attention_mask,
            )  # fmt: skip
        x = hidden_states
        for resnet, attn, skip in zip(self.resnets, self.attentions, reversed(res_hidden_states_tuple), strict=True):
            x = attn(
                resnet(concatenate(x, skip), temb),
                encoder_hidden_states=encoder_hidden_states,
                attention_mask=attention_mask,
                encoder_attention_mask=encoder_attention_mask,
                return_dict=False,
            )[0]
        for upsampler in self.upsamplers or ():
            x = upsampler(x, upsample_size)
        return x


def concatenate(x: Tensor, skip: Tensor) -> Tensor:
    """Concatenate images (N, C, H, W) and (N, D, H, W) to (N, C + D, H, W), channels last if both are.

    torch's concatenation of channels-last images copies 8 bytes at a time, its concatenation of rows 16.
    """
    if is_channels_last(x) and is_channels_last(skip):
        return torch.cat([x.permute(0, 2, 3, 1), skip.permute(0, 2, 3, 1)], dim=-1).permute(0, 3, 1, 2)
    return torch.cat([x, skip], dim=1)


def _is_unsupported(block: Any) -> bool:
    """Return whether FreeU scales the hidden states, or gradient checkpointing is active."""
    freeu = any(getattr(block, name, None) for name in ("s1", "s2", "b1", "b2"))
    return freeu or (block.gradient_checkpointing and torch.is_grad_enabled())
