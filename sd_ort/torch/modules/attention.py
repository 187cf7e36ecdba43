"""Attention: a processor that reads heads where the products wrote them, without a transpose."""

from __future__ import annotations

import torch
from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0
from torch import nn

from sd_ort.torch.modules import parts
from sd_ort.torch.modules.together import Together, alike
from sd_ort.torch.operators import attention, stacked_linear

Tensor = torch.Tensor


class FastAttnProcessor:
    """In the place of AttnProcessor2_0 or AttnProcessor, which `replaced` keeps.

    `stacked`: the products of one input run as one (their weights lie side by side, see packing.py). `shared`: what
    makes key and value of the prompt for all of a model's attentions, and the place in it.
    """

    def __init__(self, replaced: object, stacked: bool) -> None:
        self.replaced = replaced
        self.stacked = stacked
        self.shared: tuple[Together, int] | None = None

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
        """As in diffusers: hidden_states (N, S, C), or an image (N, C, H, W)."""
        residual, shape = hidden_states, hidden_states.shape
        x = hidden_states
        if len(shape) == 4:
            x = x.flatten(2).transpose(1, 2)
            residual = x
        if attn.group_norm is not None:
            x = parts.norm(attn.group_norm, x.transpose(1, 2)).transpose(1, 2)
        y, bias = self.project(attn, x, encoder_hidden_states, attention_mask)
        if attn.residual_connection:
            y = parts.add(y, bias, residual)
        elif bias is not None:
            y = y + bias
        if len(shape) == 4:
            y = y.transpose(1, 2).reshape(shape) if not y.is_contiguous() else y.transpose(1, 2).unflatten(2, shape[2:])
        return y if attn.rescale_output_factor == 1.0 else y / attn.rescale_output_factor

    def project(
        self, attn: Attention, x: Tensor, context: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of x (N, S, C) to context (N, L, K) or itself, projected; its bias where that is to be added."""
        q, k, v = self._heads(attn, x, context)
        if mask is not None:
            mask = attn.prepare_attention_mask(mask, k.shape[1], x.shape[0])
            mask = mask.view(x.shape[0], attn.heads, -1, mask.shape[-1]).expand(-1, -1, x.shape[1], -1)
        y = attention(q, k, v, mask).flatten(2)
        dropout = attn.to_out[1]
        if attn.training and dropout.p > 0:
            return dropout(attn.to_out[0](y)), None
        return parts.linear(attn.to_out[0], y)

    def _heads(self, attn: Attention, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, (N, S or L, heads, size) each."""
        layers = (attn.to_q, attn.to_k, attn.to_v)
        stacked = self.stacked and all(parts.is_plain(layer, nn.Linear) and layer.bias is None for layer in layers)
        if not stacked:
            context = x if context is None else context
            q, k, v = attn.to_q(x), attn.to_k(context), attn.to_v(context)
        elif context is None:
            q, k, v = stacked_linear(x, *(layer.weight for layer in layers)).chunk(3, dim=-1)
        else:
            q = attn.to_q(x)
            both = None
            if self.shared is not None:
                both = self.shared[0].part(self.shared[1], context, attn.to_k, attn.to_v)
            both = stacked_linear(context, attn.to_k.weight, attn.to_v.weight) if both is None else both
            k, v = both.chunk(2, dim=-1)
        return q.unflatten(-1, (attn.heads, -1)), k.unflatten(-1, (attn.heads, -1)), v.unflatten(-1, (attn.heads, -1))


def project(attn: Attention, x: Tensor, context: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """`attn` of x, its last bias left to the caller where our processor runs it and nothing else does."""
    ends_with_bias = attn.group_norm is None and not attn.residual_connection and attn.rescale_output_factor == 1.0
    if isinstance(attn.processor, FastAttnProcessor) and parts.is_plain(attn, Attention) and ends_with_bias:
        return attn.processor.project(attn, x, context, mask)
    return attn(x, encoder_hidden_states=context, attention_mask=mask), None


def share_prompt(model: nn.Module) -> None:
    """Lets the cross-attentions of a model make keys and values of the prompt together."""
    found = [m for m in model.modules() if isinstance(m, Attention) and isinstance(m.processor, FastAttnProcessor)]
    found = [attn for attn in found if attn.processor.stacked and attn.is_cross_attention]
    places = [(attn.to_k, attn.to_v) for attn in found]
    if len(places) > 1 and alike([layer for layers in places for layer in layers]):
        shared = Together(places)
        for place, attn in enumerate(found):
            attn.processor.shared = shared, place


def refuse(attn: Attention) -> str | None:
    """Why an attention keeps its processor."""
    if type(attn.processor) not in (AttnProcessor2_0, AttnProcessor):
        return f"its processor is {type(attn.processor).__name__}"
    unknown = ("spatial_norm", "norm_q", "norm_k", "norm_cross", "add_k_proj")
    for name in unknown:
        if getattr(attn, name, None) is not None:
            return f"it has {name}"
    if attn.to_k is None or attn.to_out is None or attn.to_k.out_features != attn.to_q.out_features:
        return "its products are of another kind"
    if isinstance(attn.processor, AttnProcessor) and (attn.scale_qk is False or attn.upcast_softmax):
        return "its scores are computed otherwise"
    return None
