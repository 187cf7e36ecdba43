"""Krea 2's transformer and text encoder as modules of tensors, for the exporters.

diffusers' own forward of the transformer is called, without a mask: the pipeline drops the tokens that a mask leaves
out. Three modules are replaced: they export, but not to graphs that take weights by their names or that fusions know.
Each class says why. diffusers' attention is exported as it is. `tests/export/test_krea2.py` compares both models with
diffusers 0.42.1 and transformers 5, and fails once one of the three needs no replacement.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models.transformers.transformer_krea2 import Krea2RMSNorm

from sd_ort.checkpoints.module_parts import ModelWrapper, SinusoidalEmbedding

Tables = tuple[torch.Tensor, torch.Tensor]


class ScaledNorm(torch.nn.Module):
    """RMS normalization with the scale 1 + weight. weight_recipes: the recipe of this scale.

    Replaces `Krea2RMSNorm`: exporters fold its sum to a constant of the graph.
    """

    scale: torch.Tensor

    def __init__(self, norm: Any, name: str) -> None:
        super().__init__()
        self.epsilon = norm.eps
        self.register_buffer("scale", norm.weight.detach() + 1.0)
        self.weight_recipes = {f"{name}.scale": ["plus", 1.0, f"{name}.weight"]}

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(hidden_states, self.scale.shape, self.scale, self.epsilon)


class TimeEmbedding(torch.nn.Module):
    """Timesteps (B,) in 0..1 -> embedding (B, 1, C).

    Replaces `Krea2TimestepEmbedding`, whose frequencies exporters fold with another last bit.
    """

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        settings = {"num_channels": embedding.embed_dim, "downscale_freq_shift": 0, "scale": 1.0}
        self.sinusoids = SinusoidalEmbedding(SimpleNamespace(**settings, flip_sin_to_cos=True))
        self.linear_1, self.linear_2 = embedding.linear_1, embedding.linear_2

    def forward(self, timestep: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        hidden = self.linear_1(self.sinusoids(timestep * 1e3)[:, None])
        return self.linear_2(torch.nn.functional.gelu(hidden, approximate="tanh"))


class Krea2Transformer(ModelWrapper):
    """The inputs of `diffusion_transformers`' Krea 2 -> out_hidden_states [B, S, 64], in that order."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        model.time_embed = TimeEmbedding(model.time_embed)
        for name, module in list(model.named_modules()):
            for child_name, child in list(module.named_children()):
                if isinstance(child, Krea2RMSNorm):
                    setattr(module, child_name, ScaledNorm(child, f"{name}.{child_name}"))

    def forward(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, timestep: torch.Tensor,
        img_ids: torch.Tensor, txt_ids: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Return the output for each patch."""
        return self.model(
            hidden_states=hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            # A row for each image, as the modulation of other families has, whose fusions expect it.
            timestep=timestep.expand(hidden_states.shape[0]),
            position_ids=torch.cat([txt_ids, img_ids]),
            return_dict=False,
        )[0]


class TextRotary(torch.nn.Module):
    """Rotary embedding of text: positions [B, S] -> cosines and sines [B, S, head size].

    Replaces `Qwen3VLTextRotaryEmbedding`: text has equal positions on its three axes, whose interleaving then changes
    nothing, and which exporters write with ScatterND.
    """

    inv_freq: torch.Tensor

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.register_buffer("inv_freq", embedding.inv_freq, persistent=False)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> Tables:
        """Return the tables. hidden: not read."""
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()
