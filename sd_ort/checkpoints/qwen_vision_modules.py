"""Vision tower of Qwen2.5-VL as a module of tensors, for the exporters.

transformers' forward loops over windows whose sizes it reads from tensors, which no exporter traces. Here the windows
are a batch: all have the same number of places, and those of windows at the edge may be empty.
`tests/export/test_qwen_image_edit.py` compares the module with transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import rotate_half

from sd_ort.checkpoints.module_parts import ModelWrapper

Tables = tuple[torch.Tensor, torch.Tensor]


class PatchEmbedding(torch.nn.Linear):
    """Patch embedding (a convolution with stride equal to its kernel size) as a MatMul of patches (..., pixels).

    Replaces `Qwen2_5_VisionPatchEmbed`. `weight_recipes`: the recipe of its weight.
    """

    def __init__(self, embed: Any, name: str) -> None:
        filters = embed.proj.weight.flatten(1)
        super().__init__(filters.shape[1], filters.shape[0], bias=False, device="meta")
        self.weight = torch.nn.Parameter(filters.detach())
        self.weight_recipes = {f"{name}.weight": ["reshape", list(filters.shape), f"{name}.proj.weight"]}


class QwenVisionEncoder(ModelWrapper):
    """The inputs of `signatures`' vision_encoder -> image_embeds [W * L / 4, C]: a token for each 4 places.

    The image is W windows of L places for patches. `window_ids` [W, L] are the patches in the places, -1 for none;
    `patch_ids` [P] the places of the patches. The language model is removed.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        del model.lm_head, model.model.language_model
        visual = model.model.visual
        visual.patch_embed = PatchEmbedding(visual.patch_embed, "model.visual.patch_embed")

    def forward(
        self, pixel_values: torch.Tensor, position_ids: torch.Tensor, patch_ids: torch.Tensor, window_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return the tokens. pixel_values: [W, L, pixels of a patch]. position_ids: [W, L, 2], row and column."""
        visual: Any = self.model.model.visual
        hidden = visual.patch_embed(pixel_values)
        angles = (position_ids[..., None].float() * visual.rotary_pos_emb.inv_freq).flatten(2)
        angles = torch.cat([angles, angles], dim=-1)[:, :, None]
        windows = angles.cos(), angles.sin()
        image = _image(windows[0], patch_ids), _image(windows[1], patch_ids)
        is_empty = (window_ids < 0)[:, None, None, :].expand(-1, 1, window_ids.shape[1], -1)
        mask = torch.zeros_like(is_empty, dtype=hidden.dtype).masked_fill(is_empty, torch.finfo(hidden.dtype).min)
        for number, block in enumerate(visual.blocks):
            normalized = block.norm1(hidden)
            if number in visual.fullatt_block_indexes:
                attended = _attention(block.attn, _image(normalized, patch_ids), image, None)
                attended = attended[0][window_ids.clamp(min=0)]
            else:
                attended = _attention(block.attn, normalized, windows, mask)
            hidden = hidden + attended
            hidden = hidden + block.mlp(block.norm2(hidden))
        return visual.merger(hidden)


def _image(windows: torch.Tensor, patch_ids: torch.Tensor) -> torch.Tensor:
    """Return values of places (W, L, ...) as those of patches (1, P, ...)."""
    return windows.flatten(0, 1)[patch_ids][None]


def _attention(attn: Any, x: torch.Tensor, rotary: Tables, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the attention among the tokens of each row of x (B, S, C). rotary: cosines and sines (B, S, 1, D)."""
    query, key, value = (each.unflatten(-1, (attn.num_heads, -1)) for each in attn.qkv(x).chunk(3, dim=-1))
    cos, sin = rotary
    heads = [each * cos + rotate_half(each) * sin for each in (query, key)]
    query, key, value = (each.transpose(1, 2) for each in (*heads, value))
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return attn.proj(output.transpose(1, 2).flatten(2))
