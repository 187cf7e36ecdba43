"""PyTorch modules with the inputs and outputs of the ONNX graphs, for the exporters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusion_passes.weight_recipes import position_axis
from sd_ort.checkpoints.krea2_modules import Krea2Transformer, TextRotary
from sd_ort.checkpoints.module_parts import ModelWrapper, SinusoidalEmbedding, causal_mask_and_positions
from sd_ort.checkpoints.qwen_image_modules import (
    QwenImageTextEncoder,
    QwenImageTransformer,
    QwenTextEncoder,
    QwenVaeDecoder,
    QwenVaeEncoder,
)
from sd_ort.checkpoints.qwen_vision_modules import QwenVisionEncoder
from sd_ort.checkpoints.signatures import READS_IMAGES, has_packed_latents, signature, tapped_layers
from sd_ort.checkpoints.unet_inputs import CONDITIONING_INPUTS
from sd_ort.checkpoints.z_image_modules import ZImageTransformer


class TextEncoder(ModelWrapper):
    """input_ids [B, S] -> last_hidden_state, pooler_output; or the penultimate hidden state [, text_embeds]."""

    def __init__(self, model: torch.nn.Module, penultimate: bool) -> None:
        super().__init__(model)
        self.penultimate = penultimate

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output = self.model(input_ids, output_hidden_states=self.penultimate)
        if not self.penultimate:
            return output.last_hidden_state, output.pooler_output
        hidden = output.hidden_states[-2]
        return (hidden, output.text_embeds) if "text_embeds" in output else (hidden,)


class T5TextEncoder(ModelWrapper):
    """input_ids [B, S] -> last_hidden_state [B, S, C]. All tokens are attended to, padding too, as in diffusers."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.weight_recipes = {"encoder.embed_tokens.weight": "shared.weight"}  # one parameter of two modules

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids).last_hidden_state


class Qwen3TextEncoder(ModelWrapper):
    """input_ids, attention_mask [B, S] -> the hidden states of `tapped_layers`, side by side [B, S, taps * C].

    Those of Qwen3-VL, for texts without images, are [B, S, taps, C]; its vision tower is removed.

    Layers after the last of these are removed. A token attends to the tokens up to itself that the mask has. Padding is
    on the right, so each token attends to the first one.
    """

    def __init__(self, model: Any, penultimate: bool) -> None:
        super().__init__(model)
        self.taps = tapped_layers(model.config.to_dict(), penultimate)
        stack = self._stack()
        layers = stack.layers
        self.ends_with_norm = self.taps[-1] == len(layers)  # transformers' last hidden state is normalized
        stack.layers = layers[: self.taps[-1]]
        if not self.ends_with_norm:
            del stack.norm
        self.has_vision = hasattr(model, "visual")
        if self.has_vision:
            del model.visual
            stack.rotary_emb = TextRotary(stack.rotary_emb)
        elif stack is not model:
            del model.lm_head

    def _stack(self) -> Any:
        """Return the language model without its head: the model or, as in `Qwen3ForCausalLM`, a submodule."""
        model: Any = self.model
        return getattr(model, "language_model", None) or getattr(model, "model", model)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        model = self._stack()
        hidden = model.embed_tokens(input_ids)
        mask, positions = causal_mask_and_positions(attention_mask, hidden.dtype)
        rotary = model.rotary_emb(hidden, positions)
        states = {}
        for number, layer in enumerate(model.layers, 1):
            hidden = states[number] = layer(hidden, attention_mask=mask, position_embeddings=rotary)
        if self.ends_with_norm:
            states[self.taps[-1]] = model.norm(hidden)
        tapped = [states[number] for number in self.taps]
        return torch.stack(tapped, dim=2) if self.has_vision else torch.cat(tapped, dim=-1)


class MistralTextEncoder(Qwen3TextEncoder):
    """input_ids, attention_mask [B, S] -> the hidden states of `tapped_layers`, side by side [B, S, taps * C].

    The vision tower is removed. Padding may be on the left, whose tokens attend to none: PyTorch's attention is zero
    for these, an added mask alone would give them the mean of all values. The transformer reads them.
    """

    def __init__(self, model: Any, penultimate: bool) -> None:
        super().__init__(model, penultimate)
        del model.model.vision_tower, model.model.multi_modal_projector
        for layer in self._stack().layers:
            layer.self_attn.register_forward_hook(_zero_rows_without_keys, with_kwargs=True)

    def _stack(self) -> Any:
        model: Any = self.model
        return model.model.language_model


def _zero_rows_without_keys(
    module: torch.nn.Module, args: Any, inputs: dict[str, Any], outputs: tuple[torch.Tensor, Any]
) -> tuple[torch.Tensor, Any]:
    """Forward hook of an attention: zero the output (B, S, C) of tokens whose row of the additive mask has no 0."""
    attends = inputs["attention_mask"][:, 0].amax(-1, keepdim=True) == 0
    return outputs[0] * attends.to(outputs[0].dtype), outputs[1]


class SeparablePositions(torch.nn.Module):
    """SD3's patch embedding, with the table of positions as one row for each column and one for each line of patches.

    diffusers' table (1, max * max, D) is 0.9 GB for SD 3.5 medium. Its first half depends on the column alone, its
    second half on the line. `weight_recipes`: recipes of the two tables.
    """

    columns: torch.Tensor
    lines: torch.Tensor

    def __init__(self, embed: Any) -> None:
        super().__init__()
        self.proj, self.size = embed.proj, int(embed.pos_embed_max_size)
        source = "pos_embed.pos_embed"
        self.weight_recipes = {}
        for axis, name in ((1, "columns"), (0, "lines")):
            self.weight_recipes[f"pos_embed.{name}"] = ["position_axis", [self.size, axis], source]
            self.register_buffer(name, position_axis([self.size, axis], embed.pos_embed))

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        patches = self.proj(latent)
        height, width = patches.shape[-2:]
        top, left = (self.size - height) // 2, (self.size - width) // 2
        columns = self.columns[left : left + width].unsqueeze(0).expand(height, width, -1)
        lines = self.lines[top : top + height].unsqueeze(1).expand(height, width, -1)
        positions = torch.cat([columns, lines], dim=-1).reshape(1, height * width, -1)
        return patches.flatten(2).transpose(1, 2) + positions


class _Denoiser(ModelWrapper):
    """A model with the conditioning inputs `names`."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        super().__init__(model)
        self.names = names


class DiffusionTransformer(_Denoiser):
    """The inputs `names` -> out_hidden_states."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        from diffusers.models.embeddings import Timesteps

        super().__init__(model, names)
        if getattr(getattr(model, "pos_embed", None), "pos_embed_max_size", None):
            model.pos_embed = SeparablePositions(model.pos_embed)
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, Timesteps):
                    setattr(module, name, SinusoidalEmbedding(child))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        named = dict(zip(self.names, inputs, strict=True))
        return self.model(**named, return_dict=False)[0]


class UNet(_Denoiser):
    """sample, timestep, encoder_hidden_states and the inputs `names` -> out_sample."""

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, *extra: Any) -> torch.Tensor:
        named = dict(zip(self.names, extra, strict=True))
        options = _denoiser_options(named)
        adapter = [c.name for c in CONDITIONING_INPUTS if c.is_ip_adapter_input and c.name in named]
        if adapter:
            images, scales = (named[name] for name in adapter)
            options["cross_attention_kwargs"] = self.model.pictures(images, scales)
        if residuals := [value for name, value in named.items() if name.startswith("down_block")]:
            options["down_block_additional_residuals"] = tuple(residuals)
            options["mid_block_additional_residual"] = named["mid_block_additional_residual"]
        return self.model(sample, timestep, context, return_dict=False, **options)[0]


class ControlNet(_Denoiser):
    """The UNet's inputs, an image and a scale -> a residual for each skip connection and for the middle block."""

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, *extra: Any) -> Any:
        options = _denoiser_options(dict(zip(self.names, extra, strict=True)))
        image, scale = extra[-2:]
        down, middle = self.model(sample, timestep, context, image, scale, return_dict=False, **options)
        return (*down, middle)


def _denoiser_options(named: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the keyword arguments of diffusers' UNet and ControlNet for the conditioning inputs among `named`."""
    specs = [spec for spec in CONDITIONING_INPUTS if spec.name in named and not spec.is_ip_adapter_input]
    options: dict[str, Any] = {spec.name: named[spec.name] for spec in specs if not spec.in_added_cond_kwargs}
    if added := {spec.name: named[spec.name] for spec in specs if spec.in_added_cond_kwargs}:
        options["added_cond_kwargs"] = added
    return options


class ImageEncoder(ModelWrapper):
    """pixel_values [B, 3, H, W] -> the penultimate hidden state [B, 1 + patches, C], image_embeds [B, D]."""

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output = self.model(pixel_values, output_hidden_states=True)
        return output.hidden_states[-2], output.image_embeds


class VaeEncoder(ModelWrapper):
    """image [B, 3, H, W] in -1..1 -> mean and log variance [B, 2C, H/8, W/8], or latents [B, C, ..]; not scaled."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        del model.decoder

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        encoded = self.model.encode(sample)
        return encoded.latents if "latents" in encoded else encoded.latent_dist.parameters


class VaeDecoder(ModelWrapper):
    """latent [B, C, H, W], already divided by the scaling factor -> image [B, 3, 8H, 8W]."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        del model.encoder

    def forward(self, latent_sample: torch.Tensor) -> torch.Tensor:
        return self.model.decode(latent_sample, return_dict=False)[0]


class LatentStatistics(torch.nn.Module):
    """Mean and standard deviation (1, 4C, 1, 1) of FLUX.2's latents in patches, in place of the VAE's BatchNorm.

    `weight_recipes`: their recipes. The exporter would fold the square root of the variance to a constant of the graph.
    """

    mean: torch.Tensor
    deviation: torch.Tensor

    def __init__(self, norm: Any) -> None:
        super().__init__()
        shape = [1, -1, 1, 1]
        self.register_buffer("mean", norm.running_mean.reshape(shape).clone())
        self.register_buffer("deviation", torch.sqrt(norm.running_var + norm.eps).reshape(shape))
        self.weight_recipes = {
            "bn.mean": ["reshape", shape, "bn.running_mean"],
            "bn.deviation": ["reshape", shape, ["deviation", norm.eps, "bn.running_var"]],
        }


class PackedVaeEncoder(ModelWrapper):
    """image [B, 3, H, W] in -1..1 -> the mean latents of FLUX.2 in patches of 2x2, normalized [B, 4C, H/16, W/16]."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        model.bn = LatentStatistics(model.bn)
        del model.decoder

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        model: Any = self.model
        patches = torch.nn.functional.pixel_unshuffle(model.encode(sample).latent_dist.mean, 2)
        return (patches - model.bn.mean) / model.bn.deviation


class PackedVaeDecoder(ModelWrapper):
    """Normalized latents of FLUX.2 in patches of 2x2 [B, 4C, h, w] -> image [B, 3, 16h, 16w]."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        model.bn = LatentStatistics(model.bn)
        del model.encoder

    def forward(self, latent_sample: torch.Tensor) -> torch.Tensor:
        model: Any = self.model
        latents = torch.nn.functional.pixel_shuffle(latent_sample * model.bn.deviation + model.bn.mean, 2)
        return model.decode(latents, return_dict=False)[0]


def wrap(component: str, model: torch.nn.Module, penultimate: bool, controlnet: bool) -> torch.nn.Module:
    """Return the module of `component`, in eval mode. VAE modules lose their unused half."""
    config: Any = model.config
    if component.startswith("text_encoder"):
        if getattr(config, READS_IMAGES, False):
            return QwenImageTextEncoder(model).eval()
        if config.model_type in ENCODERS:
            return ENCODERS[config.model_type](model, penultimate).eval()
        return TextEncoder(model, penultimate).eval()
    if component == "transformer":
        if config["_class_name"] in TRANSFORMERS:
            return TRANSFORMERS[config["_class_name"]](model).eval()
        return DiffusionTransformer(model, [tensor.name for tensor in signature(component, config).inputs]).eval()
    if component == "image_encoder":
        return ImageEncoder(model).eval()
    if component == "vision_encoder":
        return QwenVisionEncoder(model).eval()
    if component in ("unet", "controlnet"):
        names = [tensor.name for tensor in signature(component, config, controlnet=controlnet).inputs[3:]]
        return (UNet if component == "unet" else ControlNet)(model, names).eval()
    if config["_class_name"] == "AutoencoderKLQwenImage":
        return (QwenVaeEncoder if component == "vae_encoder" else QwenVaeDecoder)(model).eval()
    if has_packed_latents(config):
        return (PackedVaeEncoder if component == "vae_encoder" else PackedVaeDecoder)(model).eval()
    return (VaeEncoder if component == "vae_encoder" else VaeDecoder)(model).eval()


def derived_weights(module: torch.nn.Module) -> dict[str, Any]:
    """Return name -> recipe of the tensors of a wrapped module that are computed from a checkpoint tensor."""
    recipes: dict[str, Any] = {}
    for part in module.modules():
        recipes |= getattr(part, "weight_recipes", {})
    return recipes


# Text encoders other than CLIP's, by the model_type of the config.
ENCODERS: dict[str, Callable[[torch.nn.Module, bool], torch.nn.Module]] = {
    "t5": lambda model, penultimate: T5TextEncoder(model),
    "qwen3": Qwen3TextEncoder,
    "qwen3_vl": Qwen3TextEncoder,
    "qwen2_5_vl": QwenTextEncoder,
    "mistral3": MistralTextEncoder,
}
# Transformers that diffusers' own forward does not export, by class.
TRANSFORMERS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "ZImageTransformer2DModel": ZImageTransformer,
    "QwenImageTransformer2DModel": QwenImageTransformer,
    "Krea2Transformer2DModel": Krea2Transformer,
}
