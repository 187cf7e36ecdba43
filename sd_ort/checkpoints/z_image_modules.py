"""Z-Image's transformer as a module of tensors, for the exporters.

diffusers' `ZImageTransformer2DModel.forward` cannot be exported with axes of any size: it takes lists of tensors, pads
them with `len` and `pad_sequence`, which makes batch size and prompt length constants, and rotates heads with complex
numbers, which ONNX has not. The module here calls the same submodules on tensors. The pipeline does the rest: patches,
positions, and padding of both sequences to multiples of `TOKEN_MULTIPLE`.

Each override below says which line of diffusers 0.42.1 it replaces. `tests/export/test_z_image.py` compares the module
with diffusers and fails once diffusers' own forward exports, when this file can go.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb

from sd_ort.checkpoints.module_parts import ModelWrapper, SinusoidalEmbedding

PATCH_KEY = "2-1"  # of patches of 2x2 pixels of one frame, in diffusers' modules of each patch size


class RealAttention:
    """Attention processor with the rotation in real numbers.

    Replaces `ZSingleStreamAttnProcessor`, whose rotation, a function inside of `__call__`, uses `view_as_complex`.
    """

    def __call__(self, attn: Any, hidden_states: torch.Tensor, freqs_cis: Any, **_: Any) -> torch.Tensor:
        """Return the attention of hidden_states (B, S, C). freqs_cis: tables (cos, sin) [S, head size]."""
        query, key, value = (
            project(hidden_states).unflatten(-1, (attn.heads, -1)) for project in (attn.to_q, attn.to_k, attn.to_v)
        )
        rotated = [
            apply_rotary_emb(norm(heads), freqs_cis, sequence_dim=1)
            for norm, heads in ((attn.norm_q, query), (attn.norm_k, key))
        ]
        heads = torch.nn.functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (*rotated, value)))
        return attn.to_out[0](heads.transpose(1, 2).flatten(2, 3))


class ZImageTransformer(ModelWrapper):
    """The inputs of `diffusion_transformers`' Z-Image -> out_hidden_states [B, S, 64], in that order.

    Replaces `forward`, `patchify_and_embed`, `_prepare_sequence`, `_build_unified_sequence` and `unpatchify`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        # `timestep_embedding` computes its frequencies with Exp, which exporters fold with another last bit.
        settings = {"num_channels": model.t_embedder.frequency_embedding_size, "downscale_freq_shift": 0}
        self.sinusoids = SinusoidalEmbedding(SimpleNamespace(**settings, scale=1.0, flip_sin_to_cos=True))
        for block in (*model.noise_refiner, *model.context_refiner, *model.layers):
            block.attention.set_processor(RealAttention())

    def forward(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, timestep: torch.Tensor,
        img_ids: torch.Tensor, txt_ids: torch.Tensor, encoder_hidden_states_mask: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Return the output for each patch, also of padding."""
        model = self.model
        # A row for each image, as the modulation of other families has, whose fusions expect it.
        times = timestep.expand(hidden_states.shape[0]) * model.t_scale
        time = model.t_embedder.mlp(self.sinusoids(times))
        image_tables, text_tables = self._tables(img_ids), self._tables(txt_ids)
        # Only padding is at (0, 0, 0): the first axis of patches begins after the longest text, that of text at 1.
        is_patch = (img_ids[:, 0] > 0.5)[None, :, None]
        image = torch.where(is_patch, model.all_x_embedder[PATCH_KEY](hidden_states), model.x_pad_token)
        text = model.cap_embedder(encoder_hidden_states)
        text = torch.where(encoder_hidden_states_mask[:, :, None] > 0.5, text, model.cap_pad_token)
        for block in model.noise_refiner:
            image = block(image, None, image_tables, time)
        for block in model.context_refiner:
            text = block(text, None, text_tables)
        tokens = torch.cat([image, text], dim=1)
        tables = tuple(torch.cat(pair) for pair in zip(image_tables, text_tables, strict=True))
        for block in model.layers:
            tokens = block(tokens, None, tables, time)
        return model.all_final_layer[PATCH_KEY](tokens, c=time)[:, : hidden_states.shape[1]]

    def _tables(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [S, head size] of positions [S, 3]; both elements of a pair have the same.

        Replaces `RopeEmbedder`, which looks up complex numbers. Angles are computed in float64 and rounded, as there.
        """
        embedder, angles = self.model.rope_embedder, []
        for axis, width in enumerate(embedder.axes_dims):
            exponents = torch.arange(0, width, 2, dtype=torch.float64, device=ids.device) / width
            angles.append(torch.outer(ids[:, axis].double(), 1.0 / embedder.theta**exponents).float())
        joined = torch.cat(angles, dim=-1)
        return joined.cos().repeat_interleave(2, -1), joined.sin().repeat_interleave(2, -1)
