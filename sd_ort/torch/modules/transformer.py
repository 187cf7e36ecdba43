"""Transformer2DModel and what it is made of: LayerNorm of residuals, GEGLU, products for pixels without a transpose."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.activations import GEGLU
from diffusers.models.attention import BasicTransformerBlock, FeedForward
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import nn

from sd_ort.torch.modules import parts
from sd_ort.torch.modules.attention import project
from sd_ort.torch.operators import bias_split_gelu, linear_split_gelu, skip_layer_norm
from sd_ort.torch.operators.group_norm import is_channels_last
from sd_ort.torch.operators.linear_add import is_read_by_columns

Tensor = torch.Tensor


class FastGEGLU(GEGLU):
    """Product, bias, halves and gelu as one operator, or all but the product."""

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Any:
        """hidden_states (..., C) -> (..., 4 C)."""
        if not parts.is_plain(self.proj, nn.Linear) or self.proj.bias is None:
            return super().forward(hidden_states, *args, **kwargs)
        weight, bias = self.proj.weight, self.proj.bias
        if is_read_by_columns(weight):
            return linear_split_gelu(hidden_states, weight.t(), bias)
        return bias_split_gelu(F.linear(hidden_states, weight), bias)


class FastBasicTransformerBlock(BasicTransformerBlock):
    """Residual, bias and LayerNorm as one operator."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        timestep: Tensor | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        class_labels: Tensor | None = None,
        added_cond_kwargs: dict[str, Tensor] | None = None,
    ) -> Any:
        """As in diffusers; with `cross_attention_kwargs`, diffusers' own."""
        if cross_attention_kwargs:
            return super().forward(
                hidden_states, attention_mask, encoder_hidden_states, encoder_attention_mask, timestep,
                cross_attention_kwargs, class_labels, added_cond_kwargs,
            )  # fmt: skip
        masks = attention_mask, encoder_attention_mask
        return parts.add(*self.branch(self.norm1(hidden_states), hidden_states, encoder_hidden_states, *masks))

    def branch(
        self,
        x: Tensor,
        h: Tensor,
        context: Tensor | None,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The block of h, whose first norm is x; the last sum's three parts, which are still to be added."""
        y, bias = project(self.attn1, x, context if self.only_cross_attention else None, mask)
        if self.attn2 is not None:
            x, h = _norm_of_sum(self.norm2, y, bias, h)
            y, bias = project(self.attn2, x, context, context_mask)
        x, h = _norm_of_sum(self.norm3, y, bias, h)
        return *self._feed_forward(x), h

    def _feed_forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The feed-forward layer, and its last bias where that is still to be added."""
        net = self.ff.net
        if self._chunk_size is not None:
            if x.shape[self._chunk_dim] % self._chunk_size:
                raise ValueError(f"{self._chunk_size} does not divide the {x.shape[self._chunk_dim]} rows to chunk.")
            chunks = x.chunk(x.shape[self._chunk_dim] // self._chunk_size, dim=self._chunk_dim)
            return torch.cat([self.ff(chunk) for chunk in chunks], dim=self._chunk_dim), None
        if len(net) != 3 or not parts.is_plain(self.ff, FeedForward):
            return self.ff(x), None
        return parts.linear(net[2], net[1](net[0](x)))


def _norm_of_sum(layer: nn.Module, x: Tensor, bias: Tensor | None, skip: Tensor) -> tuple[Tensor, Tensor]:
    """LayerNorm of x + bias + skip, and that sum."""
    if parts.is_plain(layer, nn.LayerNorm):
        return skip_layer_norm(x, skip, bias, layer.weight, layer.bias, layer.eps)  # type: ignore[arg-type]
    total = parts.add(x, bias, skip)
    return layer(total), total


class FastTransformer2DModel(Transformer2DModel):
    """Images stay where they are in memory, channels last is already (N, H * W, C); a block's last sum is part of the
    next one's first norm.
    """

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As in diffusers. With masks and other arguments, or checkpointing, its blocks are called one by one."""
        blocks = self.transformer_blocks
        masked = any(kwargs.get(name) is not None for name in ("attention_mask", "encoder_attention_mask"))
        by_blocks = args or masked or kwargs.get("cross_attention_kwargs")
        by_blocks = by_blocks or (self.gradient_checkpointing and torch.is_grad_enabled())
        if by_blocks or not all(parts.is_plain(block, FastBasicTransformerBlock) for block in blocks):
            return super().forward(hidden_states, encoder_hidden_states, *args, **kwargs)
        batch, _, height, width = hidden_states.shape
        y, bias = self._project_in(hidden_states)
        inner = y.shape[-1]
        x, h = _first_norm(blocks[0].norm1, y, bias)
        y, bias, h = blocks[0].branch(x, h, encoder_hidden_states)
        for block in blocks[1:]:
            x, h = _norm_of_sum(block.norm1, y, bias, h)
            y, bias, h = block.branch(x, h, encoder_hidden_states)
        h = parts.add(y, bias, h)
        y = self._get_output_for_continuous_inputs(h, hidden_states, batch, height, width, inner)
        return Transformer2DModelOutput(sample=y) if kwargs.get("return_dict", True) else (y,)

    def _project_in(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """What goes into the blocks (N, H * W, C), and its bias where that is still to be added."""
        x = parts.norm(self.norm, hidden_states)
        if not self.use_linear_projection and not (is_channels_last(x) and parts.is_pointwise(self.proj_in)):
            return self.proj_in(x).permute(0, 2, 3, 1).flatten(1, 2), None
        x = x.permute(0, 2, 3, 1).flatten(1, 2)
        if self.use_linear_projection:
            return parts.linear(self.proj_in, x)
        return nn.functional.linear(x, self.proj_in.weight.flatten(1)), self.proj_in.bias

    def _operate_on_continuous_inputs(self, hidden_states: Tensor) -> tuple[Tensor, int]:
        y, bias = self._project_in(hidden_states)
        return y if bias is None else y + bias, y.shape[-1]

    def _get_output_for_continuous_inputs(
        self, hidden_states: Tensor, residual: Tensor, batch_size: int, height: int, width: int, inner_dim: int
    ) -> Tensor:
        if self.use_linear_projection:
            y, bias = parts.linear(self.proj_out, hidden_states)
        elif parts.is_pointwise(self.proj_out):
            y, bias = nn.functional.linear(hidden_states, self.proj_out.weight.flatten(1)), self.proj_out.bias
        else:
            image = hidden_states.unflatten(1, (height, width)).permute(0, 3, 1, 2)
            return self.proj_out(image) + residual
        return parts.add(y.unflatten(1, (height, width)).permute(0, 3, 1, 2), bias, residual)


def _first_norm(layer: nn.Module, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """LayerNorm of x + bias, and that sum."""
    if bias is not None and parts.is_plain(layer, nn.LayerNorm):
        return skip_layer_norm(x, bias, None, layer.weight, layer.bias, layer.eps)  # type: ignore[arg-type]
    total = x if bias is None else x + bias
    return layer(total), total


def refuse_block(block: BasicTransformerBlock) -> str | None:
    """Why a block stays as it is."""
    if block.norm_type != "layer_norm":
        return f"its norms are {block.norm_type}"
    if block.pos_embed is not None or hasattr(block, "fuser"):
        return "it has position embeddings or a fuser"
    norms = [block.norm1, block.norm3, *([block.norm2] if block.attn2 is not None else [])]
    return None if all(layer.weight is not None for layer in norms) else "its norms have no weights"


def refuse_transformer(transformer: Transformer2DModel) -> str | None:
    """Why a transformer stays as it is."""
    return None if transformer.is_input_continuous else "its input is not an image"
