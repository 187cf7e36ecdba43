"""Transformer2DModel, its blocks and GEGLU: residual sum and LayerNorm fused, no transposes around projections."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.activations import GEGLU
from diffusers.models.attention import BasicTransformerBlock, FeedForward
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import nn

from sd_ort.torch.modules import layer_ops
from sd_ort.torch.modules.attention import project
from sd_ort.torch.operators import bias_split_gelu, linear_split_gelu, skip_layer_norm
from sd_ort.torch.operators.group_norm import is_channels_last
from sd_ort.torch.operators.linear_add import can_use_linear_add

Tensor = torch.Tensor


class FastGEGLU(GEGLU):
    """GEGLU as one operator with a column-major weight; else as a MatMul and one operator."""

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Any:
        """hidden_states (..., C) to (..., 4 C)."""
        if not layer_ops.is_unmodified(self.proj, nn.Linear) or self.proj.bias is None:
            return super().forward(hidden_states, *args, **kwargs)
        weight, bias = self.proj.weight, self.proj.bias
        if can_use_linear_add(weight):
            return linear_split_gelu(hidden_states, weight.t(), bias)
        return bias_split_gelu(F.linear(hidden_states, weight), bias)


class FastBasicTransformerBlock(BasicTransformerBlock):
    """BasicTransformerBlock with residual sum, bias and LayerNorm as one operator."""

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
        """As in diffusers; with `cross_attention_kwargs`, diffusers' own code."""
        if cross_attention_kwargs:
            return super().forward(
                hidden_states, attention_mask, encoder_hidden_states, encoder_attention_mask, timestep,
                cross_attention_kwargs, class_labels, added_cond_kwargs,
            )  # fmt: skip
        masks = attention_mask, encoder_attention_mask
        return layer_ops.add(*self.branch(self.norm1(hidden_states), hidden_states, encoder_hidden_states, *masks))

    def branch(
        self,
        x: Tensor,
        h: Tensor,
        context: Tensor | None,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return three tensors whose sum is the block's output: feed-forward output, its bias or None, residual.

        h: the block's input. x: its first norm of h.
        """
        y, bias = project(self.attn1, x, context if self.only_cross_attention else None, mask)
        if self.attn2 is not None:
            x, h = _norm_of_sum(self.norm2, y, bias, h)
            y, bias = project(self.attn2, x, context, context_mask)
        x, h = _norm_of_sum(self.norm3, y, bias, h)
        return *self._feed_forward(x), h

    def _feed_forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output of the feed-forward layer and the bias that the caller must still add, or None."""
        net = self.ff.net
        if self._chunk_size is not None:
            if x.shape[self._chunk_dim] % self._chunk_size:
                size = x.shape[self._chunk_dim]
                raise ValueError(f"The chunk size {self._chunk_size} does not divide {size}: choose a divisor.")
            chunks = x.chunk(x.shape[self._chunk_dim] // self._chunk_size, dim=self._chunk_dim)
            return torch.cat([self.ff(chunk) for chunk in chunks], dim=self._chunk_dim), None
        if len(net) != 3 or not layer_ops.is_unmodified(self.ff, FeedForward):
            return self.ff(x), None
        return layer_ops.linear(net[2], net[1](net[0](x)))


def _norm_of_sum(layer: nn.Module, x: Tensor, bias: Tensor | None, skip: Tensor) -> tuple[Tensor, Tensor]:
    """Return LayerNorm of x + bias + skip, and that sum."""
    if layer_ops.is_unmodified(layer, nn.LayerNorm):
        return skip_layer_norm(x, skip, bias, layer.weight, layer.bias, layer.eps)  # type: ignore[arg-type]
    total = layer_ops.add(x, bias, skip)
    return layer(total), total


class FastTransformer2DModel(Transformer2DModel):
    """Transformer2DModel on views of channels-last images, which are (N, H * W, C) without a copy.

    The last sum of a block is part of the first norm of the next block.
    """

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As in diffusers; with masks, other arguments or checkpointing, diffusers' code calls the blocks."""
        blocks = self.transformer_blocks
        masked = any(kwargs.get(name) is not None for name in ("attention_mask", "encoder_attention_mask"))
        checkpointing = self.gradient_checkpointing and torch.is_grad_enabled()
        unsupported = args or masked or kwargs.get("cross_attention_kwargs") or checkpointing
        if unsupported or not all(layer_ops.is_unmodified(block, FastBasicTransformerBlock) for block in blocks):
            return super().forward(hidden_states, encoder_hidden_states, *args, **kwargs)
        batch, _, height, width = hidden_states.shape
        y, bias = self._project_in(hidden_states)
        inner = y.shape[-1]
        x, h = _first_norm(blocks[0].norm1, y, bias)
        y, bias, h = blocks[0].branch(x, h, encoder_hidden_states)
        for block in blocks[1:]:
            x, h = _norm_of_sum(block.norm1, y, bias, h)
            y, bias, h = block.branch(x, h, encoder_hidden_states)
        h = layer_ops.add(y, bias, h)
        y = self._get_output_for_continuous_inputs(h, hidden_states, batch, height, width, inner)
        return Transformer2DModelOutput(sample=y) if kwargs.get("return_dict", True) else (y,)

    def _project_in(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the input (N, H * W, C) of the blocks and the bias that the caller must still add, or None."""
        x = layer_ops.norm(self.norm, hidden_states)
        if not self.use_linear_projection and not (is_channels_last(x) and layer_ops.is_conv1x1(self.proj_in)):
            return self.proj_in(x).permute(0, 2, 3, 1).flatten(1, 2), None
        x = x.permute(0, 2, 3, 1).flatten(1, 2)
        if self.use_linear_projection:
            return layer_ops.linear(self.proj_in, x)
        return nn.functional.linear(x, self.proj_in.weight.flatten(1)), self.proj_in.bias

    def _operate_on_continuous_inputs(self, hidden_states: Tensor) -> tuple[Tensor, int]:
        y, bias = self._project_in(hidden_states)
        return y if bias is None else y + bias, y.shape[-1]

    def _get_output_for_continuous_inputs(
        self, hidden_states: Tensor, residual: Tensor, batch_size: int, height: int, width: int, inner_dim: int
    ) -> Tensor:
        if self.use_linear_projection:
            y, bias = layer_ops.linear(self.proj_out, hidden_states)
        elif layer_ops.is_conv1x1(self.proj_out):
            y, bias = nn.functional.linear(hidden_states, self.proj_out.weight.flatten(1)), self.proj_out.bias
        else:
            image = hidden_states.unflatten(1, (height, width)).permute(0, 3, 1, 2)
            return self.proj_out(image) + residual
        return layer_ops.add(y.unflatten(1, (height, width)).permute(0, 3, 1, 2), bias, residual)


def _first_norm(layer: nn.Module, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return LayerNorm of x + bias, and that sum."""
    if bias is not None and layer_ops.is_unmodified(layer, nn.LayerNorm):
        return skip_layer_norm(x, bias, None, layer.weight, layer.bias, layer.eps)  # type: ignore[arg-type]
    total = x if bias is None else x + bias
    return layer(total), total


def unsupported_block_reason(block: BasicTransformerBlock) -> str | None:
    """Return why a block cannot be replaced, or None."""
    if block.norm_type != "layer_norm":
        return f"its norms are {block.norm_type}"
    if block.pos_embed is not None or hasattr(block, "fuser"):
        return "it has position embeddings or a fuser"
    norms = [block.norm1, block.norm3, *([block.norm2] if block.attn2 is not None else [])]
    return None if all(layer.weight is not None for layer in norms) else "its norms have no weights"


def unsupported_transformer_reason(transformer: Transformer2DModel) -> str | None:
    """Return why a transformer cannot be replaced, or None."""
    return None if transformer.is_input_continuous else "its input is not an image"
