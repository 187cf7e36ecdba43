"""Mask and positions of causal language models with rotary embeddings, for the exporters."""

from __future__ import annotations

import torch


def causal_mask_and_positions(attention_mask: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the additive attention mask [B, 1, S, S] of `dtype`, and the positions [B, S] of tokens.

    Prompts are padded on the right. A token attends to the tokens up to itself that `attention_mask` [B, S] has.
    """
    batch, length = attention_mask.shape
    tokens = torch.arange(length, device=attention_mask.device)
    attends = (tokens[None, :] <= tokens[:, None])[None, None] & attention_mask.bool()[:, None, None, :]
    mask = torch.zeros_like(attends, dtype=dtype).masked_fill(~attends, torch.finfo(dtype).min)
    # A row of positions for each prompt: ONNX Runtime's RotaryEmbedding takes no tables of one row for several.
    return mask, tokens[None].expand(batch, length)
