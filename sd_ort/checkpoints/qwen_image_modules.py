"""Qwen-Image's transformer, text encoder and VAE as modules of tensors, for the exporters.

Each class says what of diffusers 0.42.1 or transformers 5 it replaces, and why. `tests/export/test_qwen_image.py`
compares them with diffusers, and fails once diffusers' own transformer exports.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import (
    QwenImageAttentionBlock,
    QwenImageCausalConv3d,
    QwenImageResidualBlock,
    QwenImageRMS_norm,
    QwenImageUpsample,
)
from diffusers.models.embeddings import apply_rotary_emb

from sd_ort.checkpoints.module_parts import ModelWrapper, SinusoidalEmbedding, causal_mask_and_positions

Tables = tuple[torch.Tensor, torch.Tensor]

# --- Transformer ----------------------------------------------------------------------------------------------------


class JointAttention:
    """Attention processor with the rotation in real numbers, after both streams are joined.

    Replaces `QwenDoubleStreamAttnProcessor2_0`: `apply_rotary_emb_qwen` uses `view_as_complex`, which ONNX has not. It
    rotates each stream before they are joined; rotating joined heads once computes the same, as FLUX does it.
    """

    def __call__(
        self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, image_rotary_emb: Tables,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return the attention of the image (B, S, C) and of the text (B, T, C). image_rotary_emb: text first."""
        text, image = encoder_hidden_states, hidden_states
        heads = []
        for project_text, project_image, norm_text, norm_image in (
            (attn.add_q_proj, attn.to_q, attn.norm_added_q, attn.norm_q),
            (attn.add_k_proj, attn.to_k, attn.norm_added_k, attn.norm_k),
        ):
            parts = [
                project_text(text).unflatten(-1, (attn.heads, -1)),
                project_image(image).unflatten(-1, (attn.heads, -1)),
            ]
            joined = torch.cat([norm_text(parts[0]), norm_image(parts[1])], dim=1)
            heads.append(apply_rotary_emb(joined, image_rotary_emb, sequence_dim=1))
        values = [
            attn.add_v_proj(text).unflatten(-1, (attn.heads, -1)),
            attn.to_v(image).unflatten(-1, (attn.heads, -1)),
        ]
        heads.append(torch.cat(values, dim=1))
        output = torch.nn.functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in heads))
        output = output.transpose(1, 2).flatten(2, 3)
        length = text.shape[1]
        return attn.to_out[0](output[:, length:]), attn.to_add_out(output[:, :length])


class RotaryTables(torch.nn.Module):
    """Positions of image [S, 3] and text [T, 3] -> cosines and sines [T + S, head size] of both, text first.

    Replaces `QwenEmbedRope`, which looks up complex numbers by sizes that become constants of the graph. diffusers'
    forward passes `img_shapes` on to this module. Angles are computed in float32, as there.
    """

    def __init__(self, embedder: Any) -> None:
        super().__init__()
        self.theta, self.widths = embedder.theta, embedder.axes_dim

    def forward(self, positions: Tables, max_txt_seq_len: Any = None, device: Any = None) -> Tables:
        """Return the tables. positions: of the image, of the text. The other arguments are not used."""
        ids = torch.cat(positions[::-1])
        angles = []
        for axis, width in enumerate(self.widths):
            exponents = torch.arange(0, width, 2, dtype=torch.float32, device=ids.device) / width
            angles.append(torch.outer(ids[:, axis], 1.0 / self.theta**exponents))
        joined = torch.cat(angles, dim=-1)
        return joined.cos().repeat_interleave(2, -1), joined.sin().repeat_interleave(2, -1)


class QwenImageTransformer(ModelWrapper):
    """The inputs of `diffusion_transformers`' Qwen-Image -> out_hidden_states [B, S, 64], in that order.

    diffusers' forward without a mask: the pipeline calls it with prompts of one length at a time. With one,
    `compute_text_seq_len_from_mask` makes the length a constant.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        model.pos_embed = RotaryTables(model.pos_embed)
        model.time_text_embed.time_proj = SinusoidalEmbedding(model.time_text_embed.time_proj)
        for block in model.transformer_blocks:
            block.attn.set_processor(JointAttention())

    def forward(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, timestep: torch.Tensor,
        img_ids: torch.Tensor, txt_ids: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Return the output for each patch."""
        # A row for each image, as the modulation of other families has, whose fusions expect it.
        timestep = timestep.expand(hidden_states.shape[0])
        if self.model.zero_cond_t:
            return self._forward_of_references(hidden_states, encoder_hidden_states, timestep, img_ids, txt_ids)
        return self.model(
            hidden_states=hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            timestep=timestep,
            img_shapes=(img_ids, txt_ids),
            return_dict=False,
        )[0]

    def _forward_of_references(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, timestep: torch.Tensor,
        img_ids: torch.Tensor, txt_ids: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Return the output for each patch, those of reference images modulated by timestep 0.

        diffusers' forward counts the patches from Python numbers, and its blocks split a batch of both timesteps, whose
        size becomes a constant. The first axis of the positions is the image's number, 0 for the one that is generated.
        """
        model: Any = self.model
        image, text = model.img_in(hidden_states), model.txt_in(model.txt_norm(encoder_hidden_states))
        times, of_references = (model.time_text_embed(each, image) for each in (timestep, timestep * 0))
        tables, is_reference = model.pos_embed((img_ids, txt_ids)), (img_ids[:, 0] > 0)[None, :, None]
        for block in model.transformer_blocks:
            modulation = torch.where(is_reference, block.img_mod(of_references)[:, None], block.img_mod(times)[:, None])
            of_image, of_text = modulation.chunk(6, dim=-1), block.txt_mod(times)[:, None].chunk(6, dim=-1)
            attended = block.attn(
                hidden_states=_modulated(block.img_norm1(image), of_image[:2]),
                encoder_hidden_states=_modulated(block.txt_norm1(text), of_text[:2]),
                image_rotary_emb=tables,
            )
            image, text = image + of_image[2] * attended[0], text + of_text[2] * attended[1]
            image = image + of_image[5] * block.img_mlp(_modulated(block.img_norm2(image), of_image[3:5]))
            text = text + of_text[5] * block.txt_mlp(_modulated(block.txt_norm2(text), of_text[3:5]))
        return model.proj_out(model.norm_out(image, times))


def _modulated(x: torch.Tensor, shift_and_scale: tuple[torch.Tensor, ...]) -> torch.Tensor:
    shift, scale = shift_and_scale
    return x * (1 + scale) + shift


# --- Text encoder ---------------------------------------------------------------------------------------------------


class QwenTextEncoder(ModelWrapper):
    """input_ids, attention_mask [B, S] -> the last hidden states [B, S, C] of Qwen2.5-VL, for texts without images.

    The vision tower and the head are removed. transformers' forward gives text three equal axes of positions, which
    are those of a plain rotary embedding. Padding is on the right, so positions need no mask.
    """

    def __init__(self, model: Any, penultimate: bool = False) -> None:
        super().__init__(model)
        del model.lm_head, model.model.visual

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        model: Any = self.model.model.language_model
        hidden = model.embed_tokens(input_ids)
        mask, positions = causal_mask_and_positions(attention_mask, hidden.dtype)
        return self._states(hidden, mask, positions[..., None].float() * model.rotary_emb.inv_freq)

    def _states(self, hidden: torch.Tensor, mask: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states of token embeddings (B, S, C). angles: rotary angles (B, S, D / 2)."""
        model: Any = self.model.model.language_model
        angles = torch.cat([angles, angles], dim=-1)
        for layer in model.layers:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=(angles.cos(), angles.sin()))
        return model.norm(hidden)


class QwenImageTextEncoder(QwenTextEncoder):
    """input_ids, attention_mask [B, S] and images in the text -> the last hidden states [B, S, C] of Qwen2.5-VL.

    `image_ids` [B, S] are the tokens of `image_embeds` [I, C] that stand in place of tokens of text, -1 for none;
    transformers' masked_scatter takes them in their order, which no batch with several rows of one image has. Positions
    have three axes [B, S, 3], each for a part of the frequencies.
    """

    def forward(  # type: ignore[override]
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor,
        image_ids: torch.Tensor, image_embeds: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        model: Any = self.model.model.language_model
        texts, images = model.embed_tokens(input_ids), image_embeds[image_ids.clamp(min=0)]
        hidden = torch.where((image_ids >= 0)[..., None], images, texts)
        mask, _ = causal_mask_and_positions(attention_mask, hidden.dtype)
        rotary = model.rotary_emb
        parts = zip(position_ids.float().split(1, dim=-1), rotary.inv_freq.split(rotary.mrope_section), strict=True)
        return self._states(hidden, mask, torch.cat([axis * frequencies for axis, frequencies in parts], dim=-1))


# --- VAE ------------------------------------------------------------------------------------------------------------


class FrameConv(torch.nn.Conv2d):
    """A causal 3-D convolution of a single frame, as a 2-D one with the last filter in time: a third of the work.

    Replaces `QwenImageCausalConv3d`, which puts two frames of zeros before the first one. `weight_recipes`: the recipe
    of its weight. name: of the module in the VAE.
    """

    def __init__(self, conv: Any, name: str) -> None:
        filters = conv.weight[:, :, -1]
        padding = (conv._padding[2], conv._padding[0])
        super().__init__(filters.shape[1], filters.shape[0], filters.shape[2:], conv.stride[1:], padding, device="meta")
        self.weight, self.bias = torch.nn.Parameter(filters.detach().contiguous()), conv.bias
        self.weight_recipes = {f"{name}.weight": ["last_frame", None, f"{name}.weight"]}


class ChannelNorm(torch.nn.Module):
    """RMS normalization over the channels of images (B, C, H, W).

    Replaces `QwenImageRMS_norm`, whose gamma has an axis for time. `weight_recipes`: the recipe of its gamma.
    """

    gamma: torch.Tensor

    def __init__(self, norm: Any, name: str) -> None:
        super().__init__()
        self.scale = norm.scale
        self.register_buffer("gamma", norm.gamma.detach().reshape(-1, 1, 1).clone())
        self.weight_recipes = {f"{name}.gamma": ["reshape", [-1, 1, 1], f"{name}.gamma"]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norms = torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp_min(1e-12)  # as torch.nn.functional.normalize
        return x / norms * self.scale * self.gamma


def _use_frames(model: torch.nn.Module) -> None:
    """Replace the modules of a VAE that read time by those of a single frame."""
    for name, module in list(model.named_modules()):
        if hasattr(module, "time_conv"):  # which nothing calls for the first frame
            del module.time_conv
        for child_name, child in list(module.named_children()):
            full = f"{name}.{child_name}".removeprefix(".")
            if isinstance(child, QwenImageCausalConv3d):
                setattr(module, child_name, FrameConv(child, full))
            elif isinstance(child, QwenImageRMS_norm):
                setattr(module, child_name, ChannelNorm(child, full))
            elif isinstance(child, QwenImageUpsample):  # "nearest-exact" by 2 is "nearest", which fusions know
                setattr(module, child_name, torch.nn.Upsample(scale_factor=2.0, mode="nearest"))


def _block(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the output of a residual block, an attention or a resampling of the VAE for one frame (B, C, H, W)."""
    if isinstance(block, QwenImageResidualBlock):
        hidden = block.conv1(block.nonlinearity(block.norm1(x)))
        return block.conv2(block.nonlinearity(block.norm2(hidden))) + block.conv_shortcut(x)
    if isinstance(block, QwenImageAttentionBlock):
        tokens = block.to_qkv(block.norm(x)).flatten(2).transpose(1, 2).unsqueeze(1)
        attended = torch.nn.functional.scaled_dot_product_attention(*tokens.chunk(3, dim=-1))
        output = block.proj(attended.squeeze(1).transpose(1, 2).reshape(x.shape)) + x
        return output
    output = block.resample(x)
    return output


def _middle(block: Any, x: torch.Tensor) -> torch.Tensor:
    x = _block(block.resnets[0], x)
    for attention, residual in zip(block.attentions, block.resnets[1:], strict=True):
        x = _block(residual, _block(attention, x))
    return x


class QwenVaeEncoder(ModelWrapper):
    """image [B, 3, H, W] in -1..1 -> mean and log variance [B, 2C, h, w] of the latents of one frame."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        del model.decoder, model.post_quant_conv
        _use_frames(model)

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        encoder: Any = self.model.encoder
        x = encoder.conv_in(sample)
        for block in encoder.down_blocks:
            x = _block(block, x)
        x = encoder.nonlinearity(encoder.norm_out(_middle(encoder.mid_block, x)))
        return self.model.quant_conv(encoder.conv_out(x))


class QwenVaeDecoder(ModelWrapper):
    """latent [B, C, h, w] of one frame, not normalized -> image [B, 3, H, W] in -1..1."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        del model.encoder, model.quant_conv
        _use_frames(model)

    def forward(self, latent_sample: torch.Tensor) -> torch.Tensor:
        decoder: Any = self.model.decoder
        x = _middle(decoder.mid_block, decoder.conv_in(self.model.post_quant_conv(latent_sample)))
        for block in decoder.up_blocks:
            for residual in block.resnets:
                x = _block(residual, x)
            for resample in block.upsamplers or ():
                x = _block(resample, x)
        image: torch.Tensor = decoder.conv_out(decoder.nonlinearity(decoder.norm_out(x)))
        return image.clamp(-1.0, 1.0)
