"""PyTorch modules of an IP-Adapter: projections of image embeddings to tokens, and image cross-attention.

    image_embeds -> tokens;  layer: out(attention(q, text) + attention(q, tokens, values * scale))

The scale multiplies the values, which equals scaling the attention. These values depend only on the image, so a hoisted
UNet computes them once for each prompt, and each step adds one attention and a sum. Parameters have the names of
published files (h94/IP-Adapter). Method: Ye et al., 2023, arXiv:2308.06721; Plus: Flamingo's resampler, Alayrac et al.,
2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

HEAD_SIZE = 64  # of the resampler, in all published files
IPHiddenStates = tuple[torch.Tensor, torch.Tensor]  # image tokens [B, L, C], and a scale for each layer [B, layers]


class BaseImageProjection(torch.nn.Module):
    """Projects image embeddings to tokens; returns diffusers' `cross_attention_kwargs` for the layers of a UNet."""

    def tokens(self, image_embeds: torch.Tensor) -> torch.Tensor:
        """Return the tokens [B, L, C] of all image prompts of one image."""
        raise NotImplementedError

    def forward(self, image_embeds: torch.Tensor, scales: torch.Tensor) -> dict[str, IPHiddenStates]:
        return {"ip_hidden_states": (self.tokens(image_embeds), scales)}


class ImageProjection(BaseImageProjection):
    """Linear image projection of IP-Adapter: embeddings [B, N, D] -> `count` tokens for each image [B, count N, C]."""

    def __init__(self, width: int, count: int, context: int) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(width, count * context)
        self.norm = torch.nn.LayerNorm(context)

    def tokens(self, image_embeds: torch.Tensor) -> torch.Tensor:
        projected = self.proj(image_embeds)
        return self.norm(projected.reshape(projected.shape[0], -1, *self.norm.weight.shape))


class Resampler(BaseImageProjection):
    """Image projection of IP-Adapter Plus: hidden states [B, N, S, D] -> `count` tokens for each image [B, count N, C].

    Learned queries attend to the hidden states and to each other in `depth` blocks of width `inner`.
    """

    def __init__(self, width: int, count: int, context: int, inner: int, depth: int, heads: int) -> None:
        super().__init__()
        self.latents = torch.nn.Parameter(torch.empty(1, count, inner))
        self.proj_in = torch.nn.Linear(width, inner)
        self.proj_out = torch.nn.Linear(inner, context)
        self.norm_out = torch.nn.LayerNorm(context)
        blocks = [torch.nn.ModuleList([PerceiverAttention(inner, heads), feed_forward(inner)]) for _ in range(depth)]
        self.layers = torch.nn.ModuleList(blocks)

    def tokens(self, image_embeds: torch.Tensor) -> torch.Tensor:
        states = self.proj_in(image_embeds.flatten(0, 1))
        queries = self.latents.expand(states.shape[0], -1, -1)
        for block in self.layers:
            queries = block[0](states, queries) + queries  # type: ignore[index]
            queries = block[1](queries) + queries  # type: ignore[index]
        tokens: torch.Tensor = self.norm_out(self.proj_out(queries))
        return tokens.reshape(image_embeds.shape[0], -1, tokens.shape[-1])  # `len` would be a constant in the graph


class PerceiverAttention(torch.nn.Module):
    """Attention of the queries [B, L, C] to hidden states [B, S, C] and to themselves."""

    def __init__(self, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(inner), torch.nn.LayerNorm(inner)
        self.to_q = torch.nn.Linear(inner, heads * HEAD_SIZE, bias=False)
        self.to_kv = torch.nn.Linear(inner, 2 * heads * HEAD_SIZE, bias=False)
        self.to_out = torch.nn.Linear(heads * HEAD_SIZE, inner, bias=False)

    def forward(self, states: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        states, queries = self.norm1(states), self.norm2(queries)
        key, value = self.to_kv(torch.cat([states, queries], 1)).chunk(2, -1)
        return self.to_out(attention(self.to_q(queries), key, value, self.heads))


def feed_forward(inner: int) -> torch.nn.Sequential:
    widen, narrow = torch.nn.Linear(inner, 4 * inner, bias=False), torch.nn.Linear(4 * inner, inner, bias=False)
    return torch.nn.Sequential(torch.nn.LayerNorm(inner), widen, torch.nn.GELU(), narrow)


class IPAdapterAttnProcessor(torch.nn.Module):
    """diffusers attention processor that adds image cross-attention to layer `layer_index` of a UNet."""

    def __init__(self, layer_index: int, width: int, context: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.to_k_ip = torch.nn.Linear(context, width, bias=False)
        self.to_v_ip = torch.nn.Linear(context, width, bias=False)

    def __call__(  # diffusers reads which arguments it takes off its signature
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        ip_hidden_states: IPHiddenStates | None = None,
    ) -> torch.Tensor:
        assert ip_hidden_states is not None
        assert attention_mask is None
        tokens, scales = ip_hidden_states
        query = attn.to_q(hidden_states)
        text = attention(query, attn.to_k(encoder_hidden_states), attn.to_v(encoder_hidden_states), attn.heads)
        values = self.to_v_ip(tokens) * scales[:, self.layer_index, None, None]
        image = attention(query, self.to_k_ip(tokens), values, attn.heads)
        return attn.to_out[0](text + image)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int) -> torch.Tensor:
    """Return attention of packed heads: [B, S, heads D], [B, L, heads D] twice -> [B, S, heads D]."""

    def split_heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    return (
        scaled_dot_product_attention(split_heads(query), split_heads(key), split_heads(value))
        .transpose(1, 2)
        .flatten(2)
    )


def cross_attention_layers(unet: Any) -> list[str]:
    """Return the layers of a UNet with text cross-attention, in the order in which files number them."""
    suffix = ".attn2.processor"
    return [name.removesuffix(suffix) for name in unet.attn_processors if name.endswith(suffix)]


def attach_adapter(unet: Any, projection: BaseImageProjection, layers: Sequence[str], context: int) -> None:
    """Add the projection and attention processors to a diffusers UNet, without weights (on torch's meta device)."""
    unet.pictures = projection  # this name is part of the weight recipes in manifests
    for layer_index, name in enumerate(layers):
        attn = unet.get_submodule(f"{name}.attn2")
        with torch.device("meta"):
            attn.set_processor(IPAdapterAttnProcessor(layer_index, attn.to_q.out_features, context))
