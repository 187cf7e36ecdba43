"""Blocks of diffusion transformers: a norm, its modulation and the residual sum before it run as one operator."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention import JointTransformerBlock
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock
from diffusers.models.transformers.transformer_flux2 import (
    Flux2Modulation,
    Flux2SingleTransformerBlock,
    Flux2SwiGLU,
    Flux2TransformerBlock,
)
from diffusers.models.transformers.transformer_krea2 import Krea2SwiGLU, Krea2TransformerBlock
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from diffusers.models.transformers.transformer_z_image import FeedForward as ZFeedForward
from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock

from sd_ort.torch.modules.modulated_norms import gated_sum, modulated_norm
from sd_ort.torch.operators import swiglu

Tensor = torch.Tensor
Angles = tuple[Tensor, Tensor]
FLOAT16_MAX = 65504


def _clipped(x: Tensor) -> Tensor:
    """Clip infinities of x if it is float16, as diffusers does after a block."""
    return x.clip(-FLOAT16_MAX, FLOAT16_MAX) if x.dtype == torch.float16 else x


class FastFluxTransformerBlock(FluxTransformerBlock):
    """FluxTransformerBlock with residual sums, norms and modulation as operators."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Angles | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        x, *image = self.norm1(hidden_states, emb=temb)
        y, *text = self.norm1_context(encoder_hidden_states, emb=temb)
        image, text = [each[:, None] for each in image], [each[:, None] for each in text]
        attention, text_attention, *ip_adapter = self.attn(
            hidden_states=x,
            encoder_hidden_states=y,
            image_rotary_emb=image_rotary_emb,
            **(joint_attention_kwargs or {}),
        )
        hidden_states = _feed_forward(self.ff, self.norm2, hidden_states, attention, *image)
        if ip_adapter:
            hidden_states = hidden_states + ip_adapter[0]
        text_states = _feed_forward(self.ff_context, self.norm2_context, encoder_hidden_states, text_attention, *text)
        return _clipped(text_states), hidden_states


def _feed_forward(
    ff: Any, norm: Any, skip: Tensor, attention: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, ff_gate: Tensor
) -> Tensor:
    """Return a stream of a block behind its attention: the gated sums of `skip`, the attention and the feed-forward."""
    x, total = modulated_norm(norm, attention, 1 + scale, shift, gate, skip)
    return gated_sum(ff_gate, ff(x), total)


class FastFluxSingleTransformerBlock(FluxSingleTransformerBlock):
    """FluxSingleTransformerBlock with its residual sum as one operator."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Angles | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        length = encoder_hidden_states.shape[1]
        joined = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        x, gate = self.norm(joined, emb=temb)
        attention = self.attn(hidden_states=x, image_rotary_emb=image_rotary_emb, **(joint_attention_kwargs or {}))
        y = self.proj_out(torch.cat([attention, self.act_mlp(self.proj_mlp(x))], dim=2))
        y = _clipped(gated_sum(gate[:, None], y, joined))
        return y[:, :length], y[:, length:]


class FastFlux2TransformerBlock(Flux2TransformerBlock):
    """Flux2TransformerBlock with residual sums, norms and modulation as operators."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb_mod_img: Tensor,
        temb_mod_txt: Tensor,
        image_rotary_emb: Angles | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        (shift, scale, gate), (ff_shift, ff_scale, ff_gate) = Flux2Modulation.split(temb_mod_img, 2)
        (c_shift, c_scale, c_gate), (c_ff_shift, c_ff_scale, c_ff_gate) = Flux2Modulation.split(temb_mod_txt, 2)
        attention, text_attention = self.attn(
            hidden_states=modulated_norm(self.norm1, hidden_states, 1 + scale, shift)[0],
            encoder_hidden_states=modulated_norm(self.norm1_context, encoder_hidden_states, 1 + c_scale, c_shift)[0],
            image_rotary_emb=image_rotary_emb,
            **(joint_attention_kwargs or {}),
        )
        image = _feed_forward(self.ff, self.norm2, hidden_states, attention, gate, ff_shift, ff_scale, ff_gate)
        text = _feed_forward(
            self.ff_context, self.norm2_context, encoder_hidden_states, text_attention,
            c_gate, c_ff_shift, c_ff_scale, c_ff_gate,
        )  # fmt: skip
        return _clipped(text), image


class FastFlux2SingleTransformerBlock(Flux2SingleTransformerBlock):
    """Flux2SingleTransformerBlock with its norm, modulation and residual sum as operators."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None,
        temb_mod: Tensor,
        image_rotary_emb: Angles | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        split_hidden_states: bool = False,
        text_seq_len: int | None = None,
    ) -> Any:
        if encoder_hidden_states is not None:
            text_seq_len = encoder_hidden_states.shape[1]
            hidden_states = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        shift, scale, gate = Flux2Modulation.split(temb_mod, 1)[0]
        attention = self.attn(
            hidden_states=modulated_norm(self.norm, hidden_states, 1 + scale, shift)[0],
            image_rotary_emb=image_rotary_emb,
            **(joint_attention_kwargs or {}),
        )
        y = _clipped(gated_sum(gate, attention, hidden_states))
        return (y[:, :text_seq_len], y[:, text_seq_len:]) if split_hidden_states else y


class FastFlux2SwiGLU(Flux2SwiGLU):
    """Flux2SwiGLU as one operator."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., 2 C) to (..., C)."""
        return swiglu(x)


class FastJointTransformerBlock(JointTransformerBlock):
    """JointTransformerBlock of Stable Diffusion 3 with residual sums, norms and modulation as operators."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Compute the output of diffusers' forward; a feed-forward layer in chunks runs diffusers' own code."""
        if self._chunk_size is not None:
            return super().forward(hidden_states, encoder_hidden_states, temb, joint_attention_kwargs)
        arguments = joint_attention_kwargs or {}
        x, *image = self.norm1(hidden_states, emb=temb)
        text: list[Tensor] = []
        if self.context_pre_only:
            y = self.norm1_context(encoder_hidden_states, temb)
        else:
            y, *text = self.norm1_context(encoder_hidden_states, emb=temb)
        attention, text_attention = self.attn(hidden_states=x, encoder_hidden_states=y, **arguments)
        gate, shift, scale, ff_gate = (each[:, None] for each in image[:4])
        if self.use_dual_attention:
            x2, gate2 = image[4:]
            hidden_states = gated_sum(gate, attention, hidden_states)
            gate, attention = gate2[:, None], self.attn2(hidden_states=x2, **arguments)
        hidden_states = _feed_forward(self.ff, self.norm2, hidden_states, attention, gate, shift, scale, ff_gate)
        if self.context_pre_only:
            return None, hidden_states
        text = [each[:, None] for each in text]
        text_states = _feed_forward(self.ff_context, self.norm2_context, encoder_hidden_states, text_attention, *text)
        return text_states, hidden_states


class FastQwenImageTransformerBlock(QwenImageTransformerBlock):
    """QwenImageTransformerBlock with residual sums, norms and modulation as operators."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None,
        temb: Tensor,
        image_rotary_emb: Angles | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        modulate_index: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute diffusers' forward; tokens with two modulations (`zero_cond_t`) run diffusers' own code."""
        if modulate_index is not None or self.zero_cond_t:
            return super().forward(
                hidden_states, encoder_hidden_states, encoder_hidden_states_mask, temb, image_rotary_emb,
                joint_attention_kwargs, modulate_index,
            )  # fmt: skip
        shift, scale, gate, ff_shift, ff_scale, ff_gate = self.img_mod(temb)[:, None].chunk(6, dim=-1)
        c_shift, c_scale, c_gate, c_ff_shift, c_ff_scale, c_ff_gate = self.txt_mod(temb)[:, None].chunk(6, dim=-1)
        attention, text_attention = self.attn(
            hidden_states=modulated_norm(self.img_norm1, hidden_states, 1 + scale, shift)[0],
            encoder_hidden_states=modulated_norm(self.txt_norm1, encoder_hidden_states, 1 + c_scale, c_shift)[0],
            encoder_hidden_states_mask=encoder_hidden_states_mask,
            image_rotary_emb=image_rotary_emb,
            **(joint_attention_kwargs or {}),
        )
        image = _feed_forward(self.img_mlp, self.img_norm2, hidden_states, attention, gate, ff_shift, ff_scale, ff_gate)
        text = _feed_forward(
            self.txt_mlp, self.txt_norm2, encoder_hidden_states, text_attention,
            c_gate, c_ff_shift, c_ff_scale, c_ff_gate,
        )  # fmt: skip
        return _clipped(text), _clipped(image)


class FastZImageTransformerBlock(ZImageTransformerBlock):
    """ZImageTransformerBlock with residual sums, norms and modulation as operators."""

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor,
        freqs_cis: Tensor,
        adaln_input: Tensor | None = None,
        noise_mask: Tensor | None = None,
        adaln_noisy: Tensor | None = None,
        adaln_clean: Tensor | None = None,
    ) -> Tensor:
        """Compute the output of diffusers' forward; tokens with two modulations (Omni) run diffusers' own code."""
        if noise_mask is not None:
            return super().forward(x, attn_mask, freqs_cis, adaln_input, noise_mask, adaln_noisy, adaln_clean)
        scale = gate = ff_scale = ff_gate = None
        if self.modulation:
            scale, gate, ff_scale, ff_gate = self.adaLN_modulation(adaln_input)[:, None].chunk(4, dim=2)
            scale, gate, ff_scale, ff_gate = 1.0 + scale, gate.tanh(), 1.0 + ff_scale, ff_gate.tanh()
        y = modulated_norm(self.attention_norm1, x, scale)[0]
        y = self.attention(y, attention_mask=attn_mask, freqs_cis=freqs_cis)
        y = modulated_norm(self.attention_norm2, y, gate)[0]
        y, x = modulated_norm(self.ffn_norm1, y, ff_scale, skip=x)
        return x + modulated_norm(self.ffn_norm2, self.feed_forward(y), ff_gate)[0]


class FastZFeedForward(ZFeedForward):
    """FeedForward of Z-Image with its SwiGLU as one operator."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., C) to the same shape."""
        return self.w2(swiglu(self.w1(x), self.w3(x)))


class FastKrea2TransformerBlock(Krea2TransformerBlock):
    """Krea2TransformerBlock with residual sums, norms and modulation as operators."""

    def forward(
        self, hidden_states: Tensor, temb: Tensor, image_rotary_emb: Angles, attention_mask: Tensor | None = None
    ) -> Tensor:
        modulation = temb.unflatten(-1, (6, -1)) + self.scale_shift_table
        scale, shift, gate, ff_scale, ff_shift, ff_gate = modulation.unbind(-2)
        attention = self.attn(
            modulated_norm(self.norm1, hidden_states, 1.0 + scale, shift)[0],
            attention_mask=attention_mask,
            image_rotary_emb=image_rotary_emb,
        )
        return _feed_forward(self.ff, self.norm2, hidden_states, attention, gate, ff_shift, ff_scale, ff_gate)


class FastKrea2SwiGLU(Krea2SwiGLU):
    """Krea2SwiGLU with its product as one operator."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states (..., C) to the same shape."""
        return self.down(swiglu(self.gate(hidden_states), self.up(hidden_states)))
