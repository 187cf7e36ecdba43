"""Attention: a diffusers processor that reads the heads of the projections as strided views, without a transpose."""

from __future__ import annotations

import torch
from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0
from torch import nn

from sd_ort.torch.modules import layer_ops
from sd_ort.torch.modules.concatenated_linears import ConcatenatedLinears, can_concatenate
from sd_ort.torch.operators import attention, stacked_linear

Tensor = torch.Tensor


class FastAttnProcessor:
    """Attention processor that replaces `original`, an AttnProcessor2_0 or AttnProcessor.

    packed: the weights of layers that read one input are packed (weight_packing.py), and the layers run as one.
    prompt_projections: the concatenated key and value layers of all cross-attentions of a model, and the index of this
        attention's group in it; or None.
    """

    def __init__(self, original: object, packed: bool) -> None:
        self.original = original
        self.packed = packed
        self.prompt_projections: tuple[ConcatenatedLinears, int] | None = None

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        *args: object,
        **kwargs: object,
    ) -> Tensor:
        """As in diffusers; hidden_states (N, S, C), or an image (N, C, H, W)."""
        residual, shape = hidden_states, hidden_states.shape
        x = hidden_states
        if len(shape) == 4:
            x = x.flatten(2).transpose(1, 2)
            residual = x
        if attn.group_norm is not None:
            x = layer_ops.norm(attn.group_norm, x.transpose(1, 2)).transpose(1, 2)
        y, bias = self.project(attn, x, encoder_hidden_states, attention_mask)
        if attn.residual_connection:
            y = layer_ops.add(y, bias, residual)
        elif bias is not None:
            y = y + bias
        if len(shape) == 4:
            y = y.transpose(1, 2).reshape(shape) if not y.is_contiguous() else y.transpose(1, 2).unflatten(2, shape[2:])
        return y if attn.rescale_output_factor == 1.0 else y / attn.rescale_output_factor

    def project(
        self, attn: Attention, x: Tensor, context: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention of x (N, S, C) to context (N, L, K), or to x if context is None, after to_out.

        The second result is the bias of to_out that the caller must still add, or None.
        """
        q, k, v = self._heads(attn, x, context)
        if mask is not None:
            mask = attn.prepare_attention_mask(mask, k.shape[1], x.shape[0])
            mask = mask.view(x.shape[0], attn.heads, -1, mask.shape[-1]).expand(-1, -1, x.shape[1], -1)
        y = attention(q, k, v, mask).flatten(2)
        dropout = attn.to_out[1]
        if attn.training and dropout.p > 0:
            return dropout(attn.to_out[0](y)), None
        return layer_ops.linear(attn.to_out[0], y)

    def _heads(self, attn: Attention, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value, each (N, S or L, heads, head size)."""
        layers = (attn.to_q, attn.to_k, attn.to_v)
        unmodified = all(layer_ops.is_unmodified(layer, nn.Linear) and layer.bias is None for layer in layers)
        if not (self.packed and unmodified):
            context = x if context is None else context
            q, k, v = attn.to_q(x), attn.to_k(context), attn.to_v(context)
        elif context is None:
            q, k, v = stacked_linear(x, *(layer.weight for layer in layers)).chunk(3, dim=-1)
        else:
            q = attn.to_q(x)
            kv = None
            if self.prompt_projections is not None:
                projections, group = self.prompt_projections
                kv = projections.output_slice(group, context, attn.to_k, attn.to_v)
            kv = stacked_linear(context, attn.to_k.weight, attn.to_v.weight) if kv is None else kv
            k, v = kv.chunk(2, dim=-1)
        return q.unflatten(-1, (attn.heads, -1)), k.unflatten(-1, (attn.heads, -1)), v.unflatten(-1, (attn.heads, -1))


def project(attn: Attention, x: Tensor, context: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return `attn` of x (N, S, C) and the bias that the caller must still add, or None.

    The bias is None unless FastAttnProcessor runs the attention and the bias is its last operation.
    """
    ends_with_bias = attn.group_norm is None and not attn.residual_connection and attn.rescale_output_factor == 1.0
    if isinstance(attn.processor, FastAttnProcessor) and layer_ops.is_unmodified(attn, Attention) and ends_with_bias:
        return attn.processor.project(attn, x, context, mask)
    return attn(x, encoder_hidden_states=context, attention_mask=mask), None


def concatenate_prompt_projections(model: nn.Module) -> None:
    """Compute the keys and values of the prompt for all cross-attentions of a model at once."""
    attentions = [m for m in model.modules() if isinstance(m, Attention) and isinstance(m.processor, FastAttnProcessor)]
    attentions = [attn for attn in attentions if attn.processor.packed and attn.is_cross_attention]
    groups = [(attn.to_k, attn.to_v) for attn in attentions]
    if len(groups) > 1 and can_concatenate([layer for layers in groups for layer in layers]):
        projections = ConcatenatedLinears(groups)
        for group, attn in enumerate(attentions):
            attn.processor.prompt_projections = projections, group


def unsupported_reason(attn: Attention) -> str | None:
    """Return why the processor of an attention cannot be replaced, or None."""
    if type(attn.processor) not in (AttnProcessor2_0, AttnProcessor):
        return f"its processor is {type(attn.processor).__name__}"
    for name in ("spatial_norm", "norm_q", "norm_k", "norm_cross", "add_k_proj"):
        if getattr(attn, name, None) is not None:
            return f"it has {name}"
    if attn.to_k is None or attn.to_out is None or attn.to_k.out_features != attn.to_q.out_features:
        return "it has no to_k or to_out, or keys of another size than queries"
    if isinstance(attn.processor, AttnProcessor) and (attn.scale_qk is False or attn.upcast_softmax):
        return "its scores are not scaled, or are upcast"
    return None
