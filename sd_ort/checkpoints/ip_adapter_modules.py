"""An IP-Adapter's torch modules: pictures as tokens, and layers of a UNet that attend to them beside the text's.

    image_embeds -> tokens;  layer: out(attention(q, text) + attention(q, tokens, values * scale))

Scale weighs the values, which is to weigh the attention: they depend on the picture alone, so a hoisted UNet computes
them once a prompt, and its step has no more than a second attention and a sum. Parameters have the names of published
files (h94/IP-Adapter). Method: Ye et al., 2023, arXiv:2308.06721; Plus: Flamingo's resampler, Alayrac et al., 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

HEAD = 64  # numbers of a head in the resampler, in all published files
Told = tuple[torch.Tensor, torch.Tensor]  # tokens [B, L, C] and the scale of each layer [B, layers]


class Pictures(torch.nn.Module):
    """What the layers of a UNet are told, as diffusers hands it on to them."""

    def tokens(self, image_embeds: torch.Tensor) -> torch.Tensor:
        """[B, L, C], of all pictures of an image."""
        raise NotImplementedError

    def forward(self, image_embeds: torch.Tensor, scales: torch.Tensor) -> dict[str, Told]:
        return {"ip_hidden_states": (self.tokens(image_embeds), scales)}


class Projection(Pictures):
    """IP-Adapter: embeddings [B, N, D] -> `count` tokens a picture [B, count N, C]."""

    def __init__(self, width: int, count: int, context: int) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(width, count * context)
        self.norm = torch.nn.LayerNorm(context)

    def tokens(self, image_embeds: torch.Tensor) -> torch.Tensor:
        rows = self.proj(image_embeds)
        made: torch.Tensor = self.norm(rows.reshape(rows.shape[0], -1, *self.norm.weight.shape))
        return made


class Resampler(Pictures):
    """IP-Adapter Plus: rows of a hidden state [B, N, S, D] -> `count` tokens a picture [B, count N, C]: learned queries
    that attend to the rows, and to each other, in `depth` blocks of a width of their own."""

    def __init__(self, width: int, count: int, context: int, inner: int, depth: int, heads: int) -> None:
        super().__init__()
        self.latents = torch.nn.Parameter(torch.empty(1, count, inner))
        self.proj_in = torch.nn.Linear(width, inner)
        self.proj_out = torch.nn.Linear(inner, context)
        self.norm_out = torch.nn.LayerNorm(context)
        blocks = [torch.nn.ModuleList([Perceiver(inner, heads), feed_forward(inner)]) for _ in range(depth)]
        self.layers = torch.nn.ModuleList(blocks)

    def tokens(self, image_embeds: torch.Tensor) -> torch.Tensor:
        rows = self.proj_in(image_embeds.flatten(0, 1))
        made = self.latents.expand(rows.shape[0], -1, -1)
        for block in self.layers:
            made = block[0](rows, made) + made  # type: ignore[index]
            made = block[1](made) + made  # type: ignore[index]
        tokens: torch.Tensor = self.norm_out(self.proj_out(made))
        return tokens.reshape(image_embeds.shape[0], -1, tokens.shape[-1])  # `len` would be a constant in the graph


class Perceiver(torch.nn.Module):
    """Attention of the queries [B, L, C] to rows [B, S, C] and to themselves."""

    def __init__(self, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(inner), torch.nn.LayerNorm(inner)
        self.to_q = torch.nn.Linear(inner, heads * HEAD, bias=False)
        self.to_kv = torch.nn.Linear(inner, 2 * heads * HEAD, bias=False)
        self.to_out = torch.nn.Linear(heads * HEAD, inner, bias=False)

    def forward(self, rows: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        rows, queries = self.norm1(rows), self.norm2(queries)
        key, value = self.to_kv(torch.cat([rows, queries], 1)).chunk(2, -1)
        made: torch.Tensor = self.to_out(attention(self.to_q(queries), key, value, self.heads))
        return made


def feed_forward(inner: int) -> torch.nn.Sequential:
    widen, narrow = torch.nn.Linear(inner, 4 * inner, bias=False), torch.nn.Linear(4 * inner, inner, bias=False)
    return torch.nn.Sequential(torch.nn.LayerNorm(inner), widen, torch.nn.GELU(), narrow)


class ImageAttention(torch.nn.Module):
    """diffusers' processor of a layer that attends to text and to pictures; the `place`-th of its UNet."""

    def __init__(self, place: int, width: int, context: int) -> None:
        super().__init__()
        self.place = place
        self.to_k_ip = torch.nn.Linear(context, width, bias=False)
        self.to_v_ip = torch.nn.Linear(context, width, bias=False)

    def __call__(  # diffusers reads which arguments it takes off its signature
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        ip_hidden_states: Told | None = None,
    ) -> torch.Tensor:
        assert ip_hidden_states is not None
        assert attention_mask is None
        tokens, scales = ip_hidden_states
        query = attn.to_q(hidden_states)
        text = attention(query, attn.to_k(encoder_hidden_states), attn.to_v(encoder_hidden_states), attn.heads)
        values = self.to_v_ip(tokens) * scales[:, self.place, None, None]
        pictures = attention(query, self.to_k_ip(tokens), values, attn.heads)
        made: torch.Tensor = attn.to_out[0](text + pictures)
        return made


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int) -> torch.Tensor:
    """Of heads that lie side by side: [B, S, heads D], [B, L, heads D] twice -> [B, S, heads D]."""

    def apart(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    return scaled_dot_product_attention(apart(query), apart(key), apart(value)).transpose(1, 2).flatten(2)


def cross_attentions(unet: Any) -> list[str]:
    """The layers of a UNet that attend to its prompt, in the order in which files number them."""
    suffix = ".attn2.processor"
    return [name.removesuffix(suffix) for name in unet.attn_processors if name.endswith(suffix)]


def attach(unet: Any, pictures: Pictures, layers: Sequence[str], context: int) -> None:
    """Give a diffusers UNet `pictures`, and their layers, all without weights (on torch's meta device)."""
    unet.pictures = pictures
    for place, name in enumerate(layers):
        attn = unet.get_submodule(f"{name}.attn2")
        with torch.device("meta"):
            attn.set_processor(ImageAttention(place, attn.to_q.out_features, context))
