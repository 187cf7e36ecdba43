"""ResnetBlock2D: GroupNorm with SiLU as one operator, biases and the time embedding added inside the next one.

At level "performance" convolutions that Winograd's way makes faster add their bias and the residual themselves.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers.models.resnet import ResnetBlock2D
from torch import nn

from sd_ort.torch.modules import parts, winograd
from sd_ort.torch.modules.together import Together, alike

TOGETHER = "_sd_ort_together"  # a block's attribute: what makes its product, and its place in it


class FastResnetBlock2D(winograd.KeepsFilters, ResnetBlock2D):
    """As ResnetBlock2D with SiLU and a time embedding that is added."""

    def forward(self, input_tensor: torch.Tensor, temb: torch.Tensor | None, *args: object, **kwargs: object) -> object:
        """input_tensor (N, C, H, W) and temb (N, T) or None, as in diffusers."""
        if temb is not None and self.time_emb_proj is None:
            return super().forward(input_tensor, temb, *args, **kwargs)
        x = input_tensor
        h = parts.norm(self.norm1, x, silu=True)
        resample = self.upsample or self.downsample
        if resample is not None:
            x, h = resample(x), resample(h)
        y = winograd.conv(self.conv1, h)
        h, bias = parts.conv(self.conv1, h) if y is None else (y, None)
        if temb is not None:
            temb = self._time(temb)
        h = parts.norm_of_sum(self.norm2, h, bias, temb)
        h = self.dropout(h)
        if self.conv_shortcut is not None:
            x = parts.pointwise(self.conv_shortcut, x)
        y = winograd.conv(self.conv2, h, x)
        if y is None:
            h, bias = parts.conv(self.conv2, h)
            y = parts.add(h, bias, x)
        return y if self.output_scale_factor == 1.0 else y / self.output_scale_factor

    def _time(self, temb: torch.Tensor) -> torch.Tensor:
        """The time embedding (N, T) as this block adds it, (N, C)."""
        if TOGETHER in self.__dict__:
            shared, place = self.__dict__[TOGETHER]
            made: torch.Tensor | None = shared.part(place, temb, self.time_emb_proj)
            if made is not None:
                return made
        return self.time_emb_proj(temb if self.skip_time_act else F.silu(temb))


def share_time(model: nn.Module) -> None:
    """Lets the blocks of a model make their products of the time embedding together."""
    blocks = [m for m in model.modules() if isinstance(m, FastResnetBlock2D) and m.time_emb_proj is not None]
    blocks = [block for block in blocks if not block.skip_time_act]
    if len(blocks) > 1 and alike([block.time_emb_proj for block in blocks]):
        shared = Together([(block.time_emb_proj,) for block in blocks], before=F.silu, dense=True)
        for place, block in enumerate(blocks):
            block.__dict__[TOGETHER] = shared, place


def own_time(block: nn.Module) -> None:
    """The reverse, for a block: the first takes all apart."""
    shared, place = block.__dict__.pop(TOGETHER, (None, None))
    if place == 0:
        shared.take_apart()


def refuse(block: ResnetBlock2D) -> str | None:
    """Why a block stays as it is."""
    # "group", the VAE's, has no time embedding
    if block.time_embedding_norm not in ("default", "group") or (
        block.time_embedding_norm == "group" and block.time_emb_proj is not None
    ):
        return f"its time embedding is used as {block.time_embedding_norm}"
    return None if isinstance(block.nonlinearity, nn.SiLU) else "its activation is not SiLU"
