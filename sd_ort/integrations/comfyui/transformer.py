"""Diffusion transformers as ComfyUI's models. Its own nets make tokens and positions, and sd-ort's graph computes them.

Reference images are tokens with positions too, so those of FLUX.1 Kontext and FLUX.2 need nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.ldm.common_dit
import comfy.ldm.flux.model
import comfy.ldm.krea2.model
import comfy.ldm.lumina.model
import comfy.ldm.modules.diffusionmodules.mmdit
import comfy.ldm.qwen_image.model
import comfy.model_base
import comfy.ops
import comfy.supported_models
import torch
from torch.nn.functional import pad

from sd_ort.checkpoints.configs import scheduler_config
from sd_ort.checkpoints.diffusion_transformers import FAMILIES, TOKEN_MULTIPLE
from sd_ort.checkpoints.transformer_layouts import row_slices
from sd_ort.core.errors import InputError
from sd_ort.integrations.comfyui.net import GraphNet, PromptsOnSamplerDevice, prompt_key
from sd_ort.integrations.denoiser import DenoiserRunner
from sd_ort.integrations.models import TorchComponentSessions
from sd_ort.integrations.unet import reject_patches

Config = Mapping[str, Any]


class TransformerNet(GraphNet):
    """ComfyUI's `diffusion_model` on a folder's transformer."""

    def __init__(self, models: TorchComponentSessions, own: torch.nn.Module) -> None:
        """Open the transformer. `own`: ComfyUI's net of the same config, on torch's meta device."""
        self.config = models.config("transformer")
        weights = own.state_dict()
        super().__init__(models, DenoiserRunner(models, "transformer"), row_slices(self.config, weights), weights)
        for name in ("patch_size", "patch", "params"):  # which ComfyUI's methods read
            if hasattr(own, name):
                setattr(self, name, getattr(own, name))

    def predict(
        self,
        hidden_states: torch.Tensor,
        timesteps: torch.Tensor,
        conditioning: Mapping[str, torch.Tensor | None],
        size: Sequence[int],
        options: Mapping[str, Any] | None,
        **unsupported: Any,
    ) -> torch.Tensor:
        """Return the graph's prediction for latents or their tokens.

        Args:
            conditioning: inputs of the graph by name, those without a value left out.
            size: height and width of the latents, on which positions depend.
            options: ComfyUI's transformer_options.
            unsupported: further arguments of ComfyUI.

        Raises:
            InputError: if an unsupported argument has a value, layers are patched, or the image is too large.
        """
        reject_patches(options or {})
        for name, value in unsupported.items():
            if value is not None and (torch.is_tensor(value) or value):
                raise InputError(
                    f"{name.replace('_', ' ')} is not in sd-ort's graph of the transformer: leave it out, or use "
                    "ComfyUI's own loader."
                )
        patches = FAMILIES[str(self.config["_class_name"])].max_patches(self.config)
        if patches is not None and max(size) > 2 * patches:
            raise InputError(f"the image is too large for this model: at most {16 * patches} pixels a side.")
        tensors = {name: tensor for name, tensor in conditioning.items() if tensor is not None}
        key = prompt_key(options or {}, *size)
        return self.runner.predict({"hidden_states": hidden_states}, timesteps, tensors, key)


class Sd3Net(TransformerNet):
    """Stable Diffusion 3 and 3.5. The graph takes latents."""

    def forward(
        self,
        x: torch.Tensor,
        timesteps: torch.Tensor,
        context: torch.Tensor,
        y: torch.Tensor | None = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Predict (B, C, h, w) from latents x, timesteps (B,) of 0 to 1000, context (B, T, C), pooled y (B, P)."""
        height, width = x.shape[2:]
        conditioning = {"encoder_hidden_states": context, "pooled_projections": y}
        padded = comfy.ldm.common_dit.pad_to_patch_size(x, (self.patch_size, self.patch_size))
        out = self.predict(padded, timesteps, conditioning, (height, width), transformer_options, a_ControlNet=control)
        return out[:, :, :height, :width]


class FluxNet(TransformerNet, comfy.ldm.flux.model.Flux):
    """FLUX.1 and FLUX.2."""

    size: Sequence[int] = ()

    def _forward(self, x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        self.size = x.shape[2:]
        return super()._forward(x, *arguments, **options)

    def forward_orig(
        self,
        img: torch.Tensor,
        img_ids: torch.Tensor,
        txt: torch.Tensor,
        txt_ids: torch.Tensor,
        timesteps: torch.Tensor,
        y: torch.Tensor | None,
        guidance: torch.Tensor | None = None,
        control: Any = None,
        timestep_zero_index: Any = None,
        transformer_options: dict[str, Any] | None = None,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Predict tokens (B, S, C) from those of the latents, timesteps (B,) of 0 to 1, text, and pooled text y."""
        pooled = self.config.get("pooled_projection_dim")
        if pooled:
            y = img.new_zeros(len(img), pooled) if y is None else y[:, :pooled]
        conditioning = {
            "encoder_hidden_states": txt, "img_ids": img_ids[0], "txt_ids": txt_ids[0],
            "pooled_projections": y if pooled else None, "guidance": guidance,
        }  # fmt: skip
        return self.predict(
            img, timesteps, conditioning, self.size, transformer_options, a_ControlNet=control,
            an_attention_mask=attn_mask, timestep_0_of_reference_images=timestep_zero_index,
        )  # fmt: skip


class QwenImageNet(TransformerNet, comfy.ldm.qwen_image.model.QwenImageTransformer2DModel):
    """Qwen-Image. Latents are (B, C, 1, h, w)."""

    process_img: Any  # ComfyUI's

    def _forward(
        self,
        x: torch.Tensor,
        timesteps: torch.Tensor,
        context: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        ref_latents: Any = None,
        additional_t_cond: Any = None,
        transformer_options: dict[str, Any] | None = None,
        control: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """Predict (B, C, 1, h, w) from latents x, timesteps (B,) of 0 to 1, and context (B, T, C).

        Tokens that the mask leaves out are dropped.
        """
        tokens, img_ids, (batch, channels, frames, height, width) = self.process_img(x)
        first = max(height // 2 // 2, width // 2 // 2)
        txt_ids = torch.arange(first, first + context.shape[1], device=x.device).reshape(-1, 1).expand(-1, 3)
        if attention_mask is not None:
            visible = attention_mask != 0
            if attention_mask.is_floating_point() or not bool((visible == visible[:1]).all()):
                raise InputError("prompts of a batch have other tokens left out: sample them one by one.")
            context, txt_ids = context[:, visible[0]], txt_ids[visible[0]]
        conditioning = {"encoder_hidden_states": context, "img_ids": img_ids[0], "txt_ids": txt_ids}
        out = self.predict(
            tokens, timesteps, conditioning, (height, width), transformer_options, a_ControlNet=control,
            a_reference_image=ref_latents, an_additional_condition=additional_t_cond,
        )  # fmt: skip
        out = out.reshape(batch, frames, height // 2, width // 2, channels, 2, 2).permute(0, 4, 1, 2, 5, 3, 6)
        return out.reshape(batch, channels, frames, height, width)[..., : x.shape[-2], : x.shape[-1]]


class ZImageNet(TransformerNet, comfy.ldm.lumina.model.NextDiT):
    """Z-Image. The graph takes tokens, padded to multiples of `TOKEN_MULTIPLE`."""

    def _forward(
        self,
        x: torch.Tensor,
        timesteps: torch.Tensor,
        context: torch.Tensor,
        num_tokens: int,
        attention_mask: Any = None,
        ref_latents: Any = None,
        ref_contexts: Any = None,
        siglip_feats: Any = None,
        transformer_options: dict[str, Any] | None = None,
        control: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """Predict (B, C, h, w) from latents x, timesteps (B,) of 0 to 1, and context (B, T, C).

        ComfyUI's own net ignores the mask too.
        """
        latents = comfy.ldm.common_dit.pad_to_patch_size(x, (2, 2))
        batch, channels, height, width = latents.shape
        rows, columns = height // 2, width // 2
        tokens = (
            latents.reshape(batch, channels, rows, 2, columns, 2).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        )
        image_padding, text_padding = (-each.shape[1] % TOKEN_MULTIPLE for each in (tokens, context))
        length = context.shape[1] + text_padding
        txt_ids = pad(torch.arange(1.0, length + 1, device=x.device)[:, None], (0, 2))
        img_ids = comfy.ldm.lumina.model.pos_ids_x(
            length + 1, rows, columns, 1, x.device, transformer_options=transformer_options or {}
        )[0]
        conditioning = {
            "encoder_hidden_states": pad(context, (0, 0, 0, text_padding)),
            "encoder_hidden_states_mask": pad(context.new_ones(context.shape[:2]), (0, text_padding)),
            "img_ids": pad(img_ids, (0, 0, 0, image_padding)),
            "txt_ids": txt_ids,
        }
        out = self.predict(
            pad(tokens, (0, 0, 0, image_padding)), 1 - timesteps, conditioning, latents.shape[2:], transformer_options,
            a_ControlNet=control, a_reference_image=ref_latents, text_for_reference_images=ref_contexts,
            an_image_embedding=siglip_feats,
        )  # fmt: skip
        out = out[:, : rows * columns].reshape(batch, rows, columns, 2, 2, channels).permute(0, 5, 1, 3, 2, 4)
        return -out.reshape(latents.shape)[:, :, : x.shape[2], : x.shape[3]]


class Krea2Net(TransformerNet, comfy.ldm.krea2.model.SingleStreamDiT):
    """Krea 2. Latents are (B, C, h, w) or (B, C, 1, h, w)."""

    process_img: Any  # ComfyUI's

    def _forward(
        self,
        x: torch.Tensor,
        timesteps: torch.Tensor,
        context: torch.Tensor,
        attention_mask: Any = None,
        ref_latents: Any = None,
        transformer_options: dict[str, Any] | None = None,
        control: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """Predict as x from latents x, timesteps (B,) of 0 to 1, and context (B, T, layers * C).

        ComfyUI's own net ignores the mask too.
        """
        latents = x.movedim(2, 1).flatten(0, 1) if x.ndim == 5 else x
        tokens, img_ids, rows, columns = self.process_img(latents)
        conditioning = {
            "encoder_hidden_states": context.unflatten(-1, (-1, self.config["text_hidden_dim"])),
            "img_ids": img_ids[0],
            "txt_ids": img_ids.new_zeros(context.shape[1], 3),
        }
        out = self.predict(
            tokens, timesteps, conditioning, (2 * rows, 2 * columns), transformer_options, a_ControlNet=control,
            a_reference_image=ref_latents,
        )  # fmt: skip
        out = out.unflatten(-1, (-1, 2, 2)).unflatten(1, (rows, columns)).permute(0, 3, 1, 4, 2, 5)
        out = out.flatten(2, 3).flatten(3, 4)[..., : x.shape[-2], : x.shape[-1]]
        return out.reshape(x.shape) if x.ndim == 4 else out.unflatten(0, (len(x), -1)).movedim(1, 2)


class _Sd3(PromptsOnSamplerDevice, comfy.model_base.SD3):
    """SD 3 and 3.5."""


class _Flux(PromptsOnSamplerDevice, comfy.model_base.Flux):
    """FLUX.1."""


class _Flux2(PromptsOnSamplerDevice, comfy.model_base.Flux2):
    """FLUX.2."""


class _QwenImage(PromptsOnSamplerDevice, comfy.model_base.QwenImage):
    """Qwen-Image."""


class _ZImage(PromptsOnSamplerDevice, comfy.model_base.Lumina2):
    """Z-Image."""


class _Krea2(PromptsOnSamplerDevice, comfy.model_base.Krea2):
    """Krea 2."""


def _sd3_config(config: Config) -> dict[str, Any]:
    heads, width = config["num_attention_heads"], config["caption_projection_dim"]
    if config["attention_head_dim"] != 64:
        raise InputError(f"ComfyUI's SD 3 has 64 channels a head, this one {config['attention_head_dim']}.")
    return {
        "in_channels": config["in_channels"],
        "out_channels": config["out_channels"],
        "patch_size": config["patch_size"],
        "depth": heads,
        "num_blocks": config["num_layers"],
        "input_size": None,
        "adm_in_channels": config["pooled_projection_dim"],
        "context_embedder_config": {
            "target": "torch.nn.Linear",
            "params": {"in_features": config["joint_attention_dim"], "out_features": width},
        },
        "num_patches": config["pos_embed_max_size"] ** 2,
        "pos_embed_max_size": config["pos_embed_max_size"],
        "qk_norm": "rms" if config.get("qk_norm") else None,
        "pos_embed_scaling_factor": None,
        "x_block_self_attn_layers": list(config.get("dual_attention_layers", ())),
    }


def _flux_config(config: Config) -> dict[str, Any]:
    is_flux2 = config["_class_name"] == "Flux2Transformer2DModel"
    patch = 1 if is_flux2 else 2
    channels = config["in_channels"] // patch**2
    comfy_config = {
        "image_model": "flux2" if is_flux2 else "flux",
        "in_channels": channels,
        "out_channels": (config.get("out_channels") or config["in_channels"]) // patch**2,
        "patch_size": patch,
        "vec_in_dim": None if is_flux2 else config["pooled_projection_dim"],
        "context_in_dim": config["joint_attention_dim"],
        "hidden_size": config["num_attention_heads"] * config["attention_head_dim"],
        "mlp_ratio": config.get("mlp_ratio", 3.0) if is_flux2 else 4.0,
        "num_heads": config["num_attention_heads"],
        "depth": config["num_layers"],
        "depth_single_blocks": config["num_single_layers"],
        "axes_dim": list(config["axes_dims_rope"]),
        "theta": 2000 if is_flux2 else 10000,
        "qkv_bias": not is_flux2,
        "guidance_embed": bool(config.get("guidance_embeds")),
        "txt_ids_dims": [3] if is_flux2 else [],
    }
    if is_flux2:
        comfy_config |= {"global_modulation": True, "mlp_silu_act": True, "ops_bias": False}
        comfy_config |= {"default_ref_method": "index", "ref_index_scale": 10.0}
    return comfy_config


def _qwen_image_config(config: Config) -> dict[str, Any]:
    names = ("in_channels", "out_channels", "num_layers", "attention_head_dim", "num_attention_heads",
             "joint_attention_dim", "axes_dims_rope")  # fmt: skip
    return {"image_model": "qwen_image", **{name: config[name] for name in names}}


def _z_image_config(config: Config) -> dict[str, Any]:
    names = ("in_channels", "dim", "n_layers", "n_refiner_layers", "n_heads", "n_kv_heads", "norm_eps", "qk_norm",
             "cap_feat_dim", "axes_dims", "axes_lens", "rope_theta")  # fmt: skip
    return {
        "image_model": "lumina2",
        "patch_size": 2,
        "ffn_dim_multiplier": 8 / 3,
        "z_image_modulation": True,
        "time_scale": config["t_scale"],
        "pad_tokens_multiple": TOKEN_MULTIPLE,
        **{name: config[name] for name in names},
    }


def _krea2_config(config: Config) -> dict[str, Any]:
    """Raises InputError for a model that ComfyUI's net, which derives some sizes from others, cannot be."""
    heads, size, text = config["num_attention_heads"], config["attention_head_dim"], config["text_hidden_dim"]

    def mlp(width: int, multiplier: int) -> int:
        return -(-(2 * width // 3) * multiplier // 128) * 128

    sizes = config["intermediate_size"], config["text_intermediate_size"]
    multiplier = next((n for n in range(1, 17) if (mlp(heads * size, n), mlp(text, n)) == sizes), None)
    axis = 6 * (size // 16)
    own = {
        "axes_dims_rope": [size - 2 * axis, axis, axis], "num_layerwise_text_blocks": 2, "num_refiner_text_blocks": 2,
        "norm_eps": 1e-5, "intermediate_size": sizes[0] if multiplier else mlp(heads * size, 4),
    }  # fmt: skip
    if wrong := next((name for name, value in own.items() if config[name] != value), None):
        raise InputError(f"ComfyUI's Krea 2 has {wrong} = {own[wrong]}, this one {config[wrong]}.")
    if multiplier is None:
        raise InputError(f"ComfyUI's Krea 2 has text_intermediate_size = {mlp(text, 4)}, this one {sizes[1]}.")
    channels = config["in_channels"] // 4
    return {
        "image_model": "krea2", "in_channels": channels, "channels": channels, "features": heads * size,
        "multiplier": multiplier, "tdim": config["timestep_embed_dim"], "txtdim": text, "heads": heads,
        "kvheads": config["num_key_value_heads"], "layers": config["num_layers"], "theta": config["rope_theta"],
        "txtlayers": config["num_text_layers"], "txtheads": config["text_num_attention_heads"],
        "txtkvheads": config["text_num_key_value_heads"],
    }  # fmt: skip


@dataclass(frozen=True)
class _Host:
    """ComfyUI's classes of a family.

    Attributes:
        net: The `diffusion_model`, and `own`, ComfyUI's.
        model: The BaseModel.
        description: Name of the class in `comfy.supported_models`.
        config: Converts a diffusers config to the arguments of ComfyUI's net.
    """

    net: type[TransformerNet]
    own: Any
    model: Any
    description: str
    config: Callable[[Config], dict[str, Any]]


_HOSTS = {
    "SD3Transformer2DModel": _Host(
        Sd3Net, comfy.ldm.modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper, _Sd3, "SD3", _sd3_config
    ),
    "FluxTransformer2DModel": _Host(FluxNet, comfy.ldm.flux.model.Flux, _Flux, "Flux", _flux_config),
    "Flux2Transformer2DModel": _Host(FluxNet, comfy.ldm.flux.model.Flux, _Flux2, "Flux2", _flux_config),
    "QwenImageTransformer2DModel": _Host(
        QwenImageNet, comfy.ldm.qwen_image.model.QwenImageTransformer2DModel, _QwenImage, "QwenImage",
        _qwen_image_config,
    ),
    "ZImageTransformer2DModel": _Host(
        ZImageNet, comfy.ldm.lumina.model.NextDiT, _ZImage, "ZImage", _z_image_config
    ),
    "Krea2Transformer2DModel": _Host(
        Krea2Net, comfy.ldm.krea2.model.SingleStreamDiT, _Krea2, "Krea2", _krea2_config
    ),
}  # fmt: skip


def transformer_model(models: TorchComponentSessions) -> Any:
    """Return ComfyUI's model of a folder's transformer. Raises InputError for a family that is not supported here."""
    config = models.config("transformer")
    host = _HOSTS.get(str(config["_class_name"]))
    if host is None:
        raise InputError(f"sd-ort's nodes do not run {config['_class_name']} ({models.folder}): use sd-ort generate.")
    comfy_config = host.config(config)
    own = host.own(**comfy_config, dtype=torch.float32, device="meta", operations=comfy.ops.disable_weight_init)
    kind: dict[str, Any] = {}
    name = host.description
    if name == "Flux" and not config.get("guidance_embeds"):
        name, kind = "FluxSchnell", {"model_type": comfy.model_base.ModelType.FLOW}
    description = getattr(comfy.supported_models, name)(comfy_config)
    description.unet_config |= {"disable_unet_model_creation": True, "dtype": models.dtype("transformer")}
    description.manual_cast_dtype = None
    _set_latents(description, models, comfy_config)
    model = host.model(description, **kind)
    model.diffusion_model = host.net(models, own)
    return model


def _set_latents(description: Any, models: TorchComponentSessions, comfy_config: Config) -> None:
    """Set the schedule's shift of SD 3, and the scale of the latents that the folder's VAE has."""
    latents = description.latent_format
    if "vae_decoder" in models:
        vae = models.config("vae_decoder")
        latents.scale_factor = vae.get("scaling_factor", latents.scale_factor)
        if vae.get("shift_factor") is not None:
            latents.shift_factor = vae["shift_factor"]
    channels = comfy_config["out_channels"] if "out_channels" in comfy_config else comfy_config["in_channels"]
    if channels != latents.latent_channels:  # of a model that is none of the published ones
        latents.latent_channels, latents.latent_rgb_factors = channels, None
    if isinstance(description, comfy.supported_models.SD3):
        description.sampling_settings["shift"] = scheduler_config(models.folder).get("shift", 3.0)
