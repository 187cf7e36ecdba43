"""ResnetBlock2D: GroupNorm and SiLU as one operator; biases and the time embedding are added by the next operator.

At level "performance", convolutions that run by Winograd's algorithm add their bias and the residual themselves.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers.models.resnet import ResnetBlock2D
from torch import nn

from sd_ort.torch.modules import layer_ops, winograd
from sd_ort.torch.modules.concatenated_linears import ConcatenatedLinears, can_concatenate

# Attribute of a block: the concatenated time projections of its model, and the index of its group in them.
TIME_PROJECTIONS = "_sd_ort_time_projections"


class FastResnetBlock2D(winograd.WinogradFilterMixin, ResnetBlock2D):
    """ResnetBlock2D with SiLU and a time embedding that is added, or none."""

    def forward(self, input_tensor: torch.Tensor, temb: torch.Tensor | None, *args: object, **kwargs: object) -> object:
        """input_tensor (N, C, H, W) and temb (N, T) or None, as in diffusers."""
        if temb is not None and self.time_emb_proj is None:
            return super().forward(input_tensor, temb, *args, **kwargs)
        x = input_tensor
        h = layer_ops.norm(self.norm1, x, silu=True)
        resample = self.upsample or self.downsample
        if resample is not None:
            x, h = resample(x), resample(h)
        y = winograd.conv(self.conv1, h)
        h, bias = layer_ops.conv(self.conv1, h) if y is None else (y, None)
        if temb is not None:
            temb = self._project_time(temb)
        h = layer_ops.norm_of_sum(self.norm2, h, bias, temb)
        h = self.dropout(h)
        if self.conv_shortcut is not None:
            x = layer_ops.conv1x1(self.conv_shortcut, x)
        y = winograd.conv(self.conv2, h, x)
        if y is None:
            h, bias = layer_ops.conv(self.conv2, h)
            y = layer_ops.add(h, bias, x)
        return y if self.output_scale_factor == 1.0 else y / self.output_scale_factor

    def _project_time(self, temb: torch.Tensor) -> torch.Tensor:
        """Return the projection (N, C) of the time embedding (N, T) that this block adds."""
        if TIME_PROJECTIONS in self.__dict__:
            projections, group = self.__dict__[TIME_PROJECTIONS]
            output: torch.Tensor | None = projections.output_slice(group, temb, self.time_emb_proj)
            if output is not None:
                return output
        return self.time_emb_proj(temb if self.skip_time_act else F.silu(temb))


def concatenate_time_projections(model: nn.Module) -> None:
    """Compute the projections of the time embedding for all blocks of a model at once."""
    blocks = [m for m in model.modules() if isinstance(m, FastResnetBlock2D) and m.time_emb_proj is not None]
    blocks = [block for block in blocks if not block.skip_time_act]
    if len(blocks) > 1 and can_concatenate([block.time_emb_proj for block in blocks]):
        groups = [(block.time_emb_proj,) for block in blocks]
        projections = ConcatenatedLinears(groups, activation=F.silu, contiguous=True)
        for group, block in enumerate(blocks):
            block.__dict__[TIME_PROJECTIONS] = projections, group


def separate_time_projections(block: nn.Module) -> None:
    """Undo `concatenate_time_projections` for a block. The first block separates the parameters of all."""
    projections, group = block.__dict__.pop(TIME_PROJECTIONS, (None, None))
    if group == 0:
        projections.separate_parameters()


def unsupported_reason(block: ResnetBlock2D) -> str | None:
    """Return why a block cannot be replaced, or None."""
    # "group" is that of the VAE, which has no time embedding.
    if block.time_embedding_norm not in ("default", "group") or (
        block.time_embedding_norm == "group" and block.time_emb_proj is not None
    ):
        return f"its time embedding is used as {block.time_embedding_norm}"
    return None if isinstance(block.nonlinearity, nn.SiLU) else "its activation is not SiLU"
