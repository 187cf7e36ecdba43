"""Presets: the published configs of models (diffusers / transformers `config.json`), without weights.

A `-tiny` preset has the same topology, so the same operators in the same places, with narrower layers and a byte-level
vocabulary; diffusion transformers and T5 encoders have fewer blocks too, one or two of each kind. A `-mini` preset of a
U-Net has single layers at two resolutions, and exports in less than a minute. `open_preset` makes a checkpoint with
random weights of one. torch is imported only to load these.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sd_ort.checkpoints.checkpoint import LIBRARIES, Checkpoint, CheckpointModel, as_json, build_model, class_name
from sd_ort.checkpoints.conditioning import CLIP_MEAN, CLIP_STD
from sd_ort.checkpoints.diffusion_transformers import MISTRAL, QWEN3, QWEN3_VL, QWEN_VL, QWENS
from sd_ort.checkpoints.signatures import READS_IMAGES, Config, levels, tapped_layers, text_config
from sd_ort.checkpoints.unet_inputs import time_ids_split
from sd_ort.core.package_version import package_version

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Preset:
    """A pipeline without weights: its diffusers class, and the configs of its models and scheduler."""

    pipeline: str
    models: dict[str, Config]
    scheduler: Config
    options: Config = field(default_factory=dict)


SD_CHANNELS = [320, 640, 1280, 1280]
TINY_CHANNELS = [32, 64, 128, 128]
CLIP_VOCABULARY = 49408
BYTE_VOCABULARY = 514  # 256 bytes, 256 bytes that end a word, start and end of text
_CROSS_DOWN = ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"]
_CROSS_UP = ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3


def clip_config(hidden: int, layers: int, heads: int, activation: str, projection: int, **extra: Any) -> Config:
    return {
        "architectures": ["CLIPTextModel"],
        "model_type": "clip_text_model",
        "vocab_size": CLIP_VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 77,
        "hidden_act": activation,
        "layer_norm_eps": 1e-5,
        "projection_dim": projection,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
        **extra,
    }


def unet_config(**changes: Any) -> Config:
    return {
        "_class_name": "UNet2DConditionModel",
        "sample_size": 64,
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": _CROSS_DOWN,
        "up_block_types": _CROSS_UP,
        "block_out_channels": SD_CHANNELS,
        "layers_per_block": 2,
        "attention_head_dim": 8,  # the number of heads: diffusers keeps this name for old configs
        "cross_attention_dim": 768,
        "norm_num_groups": 32,
        "act_fn": "silu",
        **changes,
    }


def vae_config(**changes: Any) -> Config:
    return {
        "_class_name": "AutoencoderKL",
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "block_out_channels": [128, 256, 512, 512],
        "layers_per_block": 2,
        "latent_channels": 4,
        "norm_num_groups": 32,
        "act_fn": "silu",
        "sample_size": 512,
        "scaling_factor": 0.18215,
        **changes,
    }


def _scheduler(name: str, **changes: Any) -> Config:
    return {
        "_class_name": name,
        "num_train_timesteps": 1000,
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "steps_offset": 1,
        **changes,
    }


_PNDM = _scheduler("PNDMScheduler", skip_prk_steps=True, set_alpha_to_one=False, prediction_type="epsilon")
_DDIM_V = _scheduler("DDIMScheduler", set_alpha_to_one=False, clip_sample=False, prediction_type="v_prediction")
EULER = _scheduler("EulerDiscreteScheduler", timestep_spacing="leading", prediction_type="epsilon")
_CLIP_L = clip_config(768, 12, 12, "quick_gelu", 768)
_CLIP_H = clip_config(1024, 23, 16, "gelu", 512)
_CLIP_G = clip_config(1280, 32, 20, "gelu", 1280, architectures=["CLIPTextModelWithProjection"])
_SD15 = Preset("StableDiffusionPipeline", {"text_encoder": _CLIP_L, "unet": unet_config(), "vae": vae_config()}, _PNDM)
_SD21 = Preset(
    "StableDiffusionPipeline",
    {
        "text_encoder": _CLIP_H,
        "unet": unet_config(
            sample_size=96,
            attention_head_dim=[5, 10, 20, 20],
            cross_attention_dim=1024,
            use_linear_projection=True,
            upcast_attention=True,
        ),
        "vae": vae_config(sample_size=768),
    },
    _DDIM_V,
)
_SDXL_VAE = vae_config(sample_size=1024, scaling_factor=0.13025, force_upcast=True)
_SDXL = Preset(
    "StableDiffusionXLPipeline",
    {
        "text_encoder": _CLIP_L,
        "text_encoder_2": _CLIP_G,
        "unet": unet_config(
            sample_size=128,
            down_block_types=["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            up_block_types=["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
            block_out_channels=[320, 640, 1280],
            attention_head_dim=[5, 10, 20],
            transformer_layers_per_block=[1, 2, 10],
            cross_attention_dim=2048,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        ),
        "vae": _SDXL_VAE,
    },
    EULER,
    {"force_zeros_for_empty_prompt": True},
)
_REFINER = Preset(
    "StableDiffusionXLImg2ImgPipeline",
    {
        "text_encoder_2": _CLIP_G,
        "unet": unet_config(
            sample_size=128,
            down_block_types=["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
            up_block_types=["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
            block_out_channels=[384, 768, 1536, 1536],
            attention_head_dim=[6, 12, 24, 24],
            transformer_layers_per_block=4,
            cross_attention_dim=1280,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2560,
        ),
        "vae": _SDXL_VAE,
    },
    EULER,
    {"force_zeros_for_empty_prompt": False, "requires_aesthetics_score": True},
)
_INPAINT = Preset(
    "StableDiffusionInpaintPipeline",
    {"text_encoder": _CLIP_L, "unet": unet_config(in_channels=9), "vae": vae_config()},
    _PNDM,
)
_CONTROLNET = Preset(
    "StableDiffusionControlNetPipeline",
    {
        "text_encoder": _CLIP_L,
        "unet": unet_config(),
        "controlnet": {
            "_class_name": "ControlNetModel",
            "in_channels": 4,
            "conditioning_channels": 3,
            "down_block_types": _CROSS_DOWN,
            "block_out_channels": SD_CHANNELS,
            "layers_per_block": 2,
            "attention_head_dim": 8,
            "cross_attention_dim": 768,
            "norm_num_groups": 32,
            "act_fn": "silu",
            "conditioning_embedding_out_channels": [16, 32, 96, 256],
        },
        "vae": vae_config(),
    },
    _PNDM,
)
_CLIP_L_PROJECTION = _CLIP_L | {"architectures": ["CLIPTextModelWithProjection"]}
_T5_XXL = {
    "architectures": ["T5EncoderModel"],
    "model_type": "t5",
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}


def _vae16(scaling_factor: float, shift_factor: float) -> Config:
    """Return the config of a VAE with 16 channels."""
    factors = {"scaling_factor": scaling_factor, "shift_factor": shift_factor}
    return vae_config(latent_channels=16, sample_size=1024, use_quant_conv=False, use_post_quant_conv=False, **factors)


def _flow_match(**changes: Any) -> Config:
    return {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, **changes}


def _sd35(blocks: int, dual_blocks: int, heads: int, positions: int) -> Preset:
    """Return a preset of Stable Diffusion 3.5. dual_blocks: with a second attention of the image; positions: a side."""
    transformer = {
        "_class_name": "SD3Transformer2DModel",
        "sample_size": 128,
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": blocks,
        "attention_head_dim": 64,
        "num_attention_heads": heads,
        "joint_attention_dim": 4096,
        "caption_projection_dim": 64 * heads,
        "pooled_projection_dim": 2048,
        "pos_embed_max_size": positions,
        "dual_attention_layers": list(range(dual_blocks)),
        "qk_norm": "rms_norm",
    }
    encoders = {"text_encoder": _CLIP_L_PROJECTION, "text_encoder_2": _CLIP_G, "text_encoder_3": _T5_XXL}
    models = {**encoders, "transformer": transformer, "vae": _vae16(1.5305, 0.0609)}
    return Preset("StableDiffusion3Pipeline", models, _flow_match(shift=3.0))


_SD35_MEDIUM = _sd35(24, 13, heads=24, positions=384)
_SD35_LARGE = _sd35(38, 0, heads=38, positions=192)


def _flux(guidance: bool, scheduler: Config) -> Preset:
    """Return a preset of FLUX.1. guidance: whether the guidance scale is an input (dev), or constant (schnell)."""
    transformer = {
        "_class_name": "FluxTransformer2DModel",
        "patch_size": 1,
        "in_channels": 64,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": guidance,
        "axes_dims_rope": [16, 56, 56],
    }
    models = {"text_encoder": _CLIP_L, "text_encoder_2": _T5_XXL, "transformer": transformer}
    return Preset("FluxPipeline", models | {"vae": _vae16(0.3611, 0.1159)}, scheduler)


_FLUX_SHIFT = {"base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256, "max_image_seq_len": 4096}
_FLUX_SCHNELL = _flux(False, _flow_match(shift=1.0, use_dynamic_shifting=False, **_FLUX_SHIFT))
_FLUX_DEV = _flux(True, _flow_match(shift=3.0, use_dynamic_shifting=True, **_FLUX_SHIFT))

_QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": True,
}


_FLUX2_SHIFT = _flow_match(shift=3.0, use_dynamic_shifting=True, **_FLUX_SHIFT)


def _flux2(blocks: int, single_blocks: int, heads: int, encoder: Config, guidance: bool) -> dict[str, Config]:
    """Return the models of a FLUX.2. guidance: whether the guidance scale is an input of the transformer."""
    transformer = {
        "_class_name": "Flux2Transformer2DModel",
        "patch_size": 1,
        "in_channels": 128,
        "num_layers": blocks,
        "num_single_layers": single_blocks,
        "attention_head_dim": 128,
        "num_attention_heads": heads,
        "joint_attention_dim": 3 * text_config(encoder)["hidden_size"],
        "guidance_embeds": guidance,
        "axes_dims_rope": [32, 32, 32, 32],
    }
    vae = vae_config(_class_name="AutoencoderKLFlux2", latent_channels=32, sample_size=1024, batch_norm_eps=1e-4)
    del vae["scaling_factor"]
    return {"text_encoder": encoder, "transformer": transformer, "vae": vae}


def _klein(is_distilled: bool) -> Preset:
    """Return a preset of FLUX.2 klein 4B. is_distilled: for 4 steps without guidance; otherwise the base model."""
    models = _flux2(5, 20, 24, _QWEN3_4B, guidance=False)
    return Preset("Flux2KleinPipeline", models, _FLUX2_SHIFT, {"is_distilled": is_distilled})


_MISTRAL_SMALL = {
    "architectures": [MISTRAL],
    "model_type": "mistral3",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "mistral",
        "vocab_size": 131072,
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000000.0},
        "tie_word_embeddings": False,
    },
    "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                      "num_attention_heads": 16, "head_dim": 64, "image_size": 1540, "patch_size": 14},
}  # fmt: skip
_FLUX2_DEV = Preset("Flux2Pipeline", _flux2(8, 48, 48, _MISTRAL_SMALL, guidance=True), _FLUX2_SHIFT)

# As Tongyi-MAI/Z-Image-Turbo has it, whose VAE is FLUX.1's.
_Z_IMAGE_TURBO = Preset(
    "ZImagePipeline",
    {
        "text_encoder": _QWEN3_4B | {"architectures": ["Qwen3Model"]},
        "transformer": {
            "_class_name": "ZImageTransformer2DModel",
            "all_patch_size": [2],
            "all_f_patch_size": [1],
            "in_channels": 16,
            "dim": 3840,
            "n_layers": 30,
            "n_refiner_layers": 2,
            "n_heads": 30,
            "n_kv_heads": 30,
            "norm_eps": 1e-5,
            "qk_norm": True,
            "cap_feat_dim": 2560,
            "rope_theta": 256.0,
            "t_scale": 1000.0,
            "axes_dims": [32, 48, 48],
            "axes_lens": [1536, 512, 512],
        },
        "vae": _vae16(0.3611, 0.1159),
    },
    _flow_match(shift=3.0, use_dynamic_shifting=False),
)

# As Qwen/Qwen-Image has it.
_QWEN_VL_7B = {
    "architectures": [QWEN_VL],
    "model_type": "qwen2_5_vl",
    "tie_word_embeddings": False,
    "text_config": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
                      "out_hidden_size": 3584},
}  # fmt: skip
_QWEN_IMAGE = Preset(
    "QwenImagePipeline",
    {
        "text_encoder": _QWEN_VL_7B,
        "transformer": {
            "_class_name": "QwenImageTransformer2DModel",
            "patch_size": 2,
            "in_channels": 64,
            "out_channels": 16,
            "num_layers": 60,
            "attention_head_dim": 128,
            "num_attention_heads": 24,
            "joint_attention_dim": 3584,
            "guidance_embeds": False,
            "axes_dims_rope": [16, 56, 56],
        },
        "vae": {
            "_class_name": "AutoencoderKLQwenImage",
            "base_dim": 96,
            "z_dim": 16,
            "dim_mult": [1, 2, 4, 4],
            "num_res_blocks": 2,
            "attn_scales": [],
            "temperal_downsample": [False, True, True],
            "latents_mean": [-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715,
                             0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921],
            "latents_std": [2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652,
                            1.5579, 1.6382, 1.1253, 2.8251, 1.9160],
        },
    },
    _flow_match(
        shift=1.0, use_dynamic_shifting=True, shift_terminal=0.02, base_shift=0.5, max_shift=0.9,
        base_image_seq_len=256, max_image_seq_len=8192,
    ),
)  # fmt: skip


# Of the processor of Qwen/Qwen-Image-Edit.
QWEN_PREPROCESSOR: Config = {
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor", "min_pixels": 56 * 56,
    "max_pixels": 3584 * 3584, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": list(CLIP_MEAN), "image_std": list(CLIP_STD),
}  # fmt: skip


def _qwen_image_edit(pipeline: str, modulates_references: bool) -> Preset:
    """Return a preset of Qwen-Image-Edit. modulates_references: reference images have timestep 0, as in Edit-2511."""
    models = dict(_QWEN_IMAGE.models)
    models["text_encoder"] = _QWEN_VL_7B | {READS_IMAGES: True}
    models["transformer"] = models["transformer"] | {"zero_cond_t": modulates_references}
    return Preset(pipeline, models, _QWEN_IMAGE.scheduler, {"processor": ["transformers", "Qwen2VLProcessor"]})


def _krea2(is_distilled: bool) -> Preset:
    """Return a preset of Krea 2. is_distilled: for 8 steps without guidance; otherwise the base model."""
    text = {
        "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0, "mrope_section": [24, 20, 20],
                            "mrope_interleaved": True},
    }  # fmt: skip
    vision = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2560,
              "deepstack_visual_indexes": [5, 11, 17]}  # fmt: skip
    encoder = {"architectures": [QWEN3_VL], "model_type": "qwen3_vl", "tie_word_embeddings": True, "text_config": text,
               "vision_config": vision}  # fmt: skip
    transformer = {
        "_class_name": "Krea2Transformer2DModel",
        "in_channels": 64,
        "num_layers": 28,
        "attention_head_dim": 128,
        "num_attention_heads": 48,
        "num_key_value_heads": 12,
        "intermediate_size": 16384,
        "timestep_embed_dim": 256,
        "text_hidden_dim": 2560,
        "num_text_layers": 12,
        "text_num_attention_heads": 20,
        "text_num_key_value_heads": 20,
        "text_intermediate_size": 6912,
        "num_layerwise_text_blocks": 2,
        "num_refiner_text_blocks": 2,
        "axes_dims_rope": [32, 48, 48],
        "rope_theta": 1000.0,
        "norm_eps": 1e-5,
    }
    scheduler = _flow_match(
        shift=1.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256,
        max_image_seq_len=6400,
    )  # fmt: skip
    models = {"text_encoder": encoder, "transformer": transformer, "vae": _QWEN_IMAGE.models["vae"]}
    options = {
        "text_encoder_select_layers": list(tapped_layers(encoder)),
        "is_distilled": is_distilled,
        "patch_size": 2,
    }
    return Preset("Krea2Pipeline", models, scheduler, options)


_TINY_HIDDEN = 64
_TINY_QWEN3 = {
    "vocab_size": 512, "hidden_size": _TINY_HIDDEN, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
_TINY_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": _TINY_HIDDEN}
_TINY_QWEN_VL = {
    "text_config": {
        **{name: value for name, value in _TINY_QWEN3.items() if name != "head_dim"}, "num_hidden_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [2, 3, 3]},
    },
    "vision_config": {**_TINY_VISION, "depth": 2, "fullatt_block_indexes": [1]},
}  # fmt: skip
_TINY_IMAGE_TOKEN = 261  # of the tokenizer that `write_chat_tokenizer` writes
_TINY_QWEN3_VL = {
    "text_config": {
        **_TINY_QWEN3, "num_hidden_layers": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0, "mrope_section": [2, 3, 3],
                            "mrope_interleaved": True},
    },
    "vision_config": {**_TINY_VISION, "deepstack_visual_indexes": [0]},
}  # fmt: skip
_TINY_MISTRAL = {
    "text_config": _TINY_QWEN3,
    "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                      "head_dim": 16, "image_size": 28},
}  # fmt: skip
_TINY_LANGUAGE_MODELS: dict[str, Config] = {QWEN_VL: _TINY_QWEN_VL, QWEN3_VL: _TINY_QWEN3_VL, MISTRAL: _TINY_MISTRAL}
_TINY_T5 = {"vocab_size": 128, "d_model": 160, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
_TINY_TRANSFORMER = {"attention_head_dim": 32, "num_attention_heads": 3, "joint_attention_dim": _TINY_T5["d_model"]}
# Of each transformer: its blocks, where the last of SD3 differs, and widths that follow from those above.
_TINY_TRANSFORMERS = {
    "SD3Transformer2DModel": {
        "sample_size": 16,
        "num_layers": 3,
        "dual_attention_layers": [0],
        "caption_projection_dim": 96,
        "pooled_projection_dim": 2 * _TINY_HIDDEN,
        "pos_embed_max_size": 24,
    },
    "FluxTransformer2DModel": {
        "num_layers": 2,
        "num_single_layers": 2,
        "pooled_projection_dim": _TINY_HIDDEN,
        "axes_dims_rope": [8, 12, 12],
    },
    "Flux2Transformer2DModel": {
        "num_layers": 2,
        "num_single_layers": 2,
        "joint_attention_dim": 3 * _TINY_HIDDEN,
        "axes_dims_rope": [8, 8, 8, 8],
    },
    "ZImageTransformer2DModel": {
        "dim": 96,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 3,
        "n_kv_heads": 3,
        "cap_feat_dim": _TINY_HIDDEN,
        "axes_dims": [8, 12, 12],
    },
    "QwenImageTransformer2DModel": {
        "num_layers": 2,
        "joint_attention_dim": _TINY_HIDDEN,
        "axes_dims_rope": [8, 12, 12],
    },
    "Krea2Transformer2DModel": {  # two queries for each key in place of four
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "timestep_embed_dim": 32,
        "text_hidden_dim": _TINY_HIDDEN,
        "num_text_layers": 2,
        "text_num_attention_heads": 2,
        "text_num_key_value_heads": 2,
        "text_intermediate_size": 96,
        "num_layerwise_text_blocks": 1,
        "num_refiner_text_blocks": 1,
        "axes_dims_rope": [8, 12, 12],
    },
}


def _tiny_model(name: str, config: Config, context: int) -> Config:
    """Return a config of the same topology with narrower layers. `context`: cross_attention_dim of a UNet."""
    if class_name(config) == "T5EncoderModel":
        return config | _TINY_T5
    if class_name(config) in QWEN3:
        return config | _TINY_QWEN3
    if parts := _TINY_LANGUAGE_MODELS.get(class_name(config)):
        token = {"image_token_id": _TINY_IMAGE_TOKEN} if READS_IMAGES in config else {}
        return config | {name: config[name] | tiny for name, tiny in parts.items()} | token
    if class_name(config) == "AutoencoderKLQwenImage":
        return config | {"base_dim": 16}
    if name == "transformer":
        shared = {name: value for name, value in _TINY_TRANSFORMER.items() if name in config}
        tiny = config | shared | _TINY_TRANSFORMERS[class_name(config)]
        return tiny if config.get("dual_attention_layers", True) else tiny | {"dual_attention_layers": []}
    if name.startswith("text_encoder"):
        narrow = {"hidden_size": _TINY_HIDDEN, "intermediate_size": 4 * _TINY_HIDDEN, "num_attention_heads": 4}
        return config | narrow | {"vocab_size": BYTE_VOCABULARY, "projection_dim": _TINY_HIDDEN}
    channels = TINY_CHANNELS[: levels(config)]
    tiny = config | {"block_out_channels": channels, "sample_size": 16}
    if name == "vae":
        return tiny | {"sample_size": 128}
    tiny["cross_attention_dim"] = context
    heads = config["attention_head_dim"]
    tiny["attention_head_dim"] = 4 if isinstance(heads, int) else [2, 4, 8, 8][: len(heads)]
    if "addition_time_embed_dim" in config:
        ids = time_ids_split(config)[1]
        tiny |= {"addition_time_embed_dim": 32, "projection_class_embeddings_input_dim": _TINY_HIDDEN + ids * 32}
    return tiny


def _tiny(preset: Preset) -> Preset:
    encoders = sum(name.startswith("text_encoder") for name in preset.models)
    models = {name: _tiny_model(name, c, encoders * _TINY_HIDDEN) for name, c in preset.models.items()}
    options = preset.options
    if "text_encoder_select_layers" in options:
        options = options | {"text_encoder_select_layers": list(tapped_layers(models["text_encoder"]))}
    return Preset(preset.pipeline, models, preset.scheduler, options)


def mini_model(name: str, config: Config) -> Config:
    """Return the config of a model around a U-Net, cut to two resolutions and single layers of every kind."""
    if name.startswith("text_encoder"):
        return config | {"num_hidden_layers": 2}
    small = config | {"block_out_channels": [32, 64], "layers_per_block": 1}
    if name == "vae":
        return small | {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    small["down_block_types"] = ["CrossAttnDownBlock2D", "DownBlock2D"]
    small["up_block_types"] = ["UpBlock2D", "CrossAttnUpBlock2D"]
    heads = config["attention_head_dim"]
    small["attention_head_dim"] = heads if isinstance(heads, int) else heads[:2]
    if isinstance(config.get("transformer_layers_per_block"), list):
        small["transformer_layers_per_block"] = [1, 2]
    if name == "controlnet":
        small["conditioning_embedding_out_channels"] = [8, 8, 8, 8]
        small.pop("up_block_types")
    return small


_FULL = {
    "sd15": _SD15,
    "sd21": _SD21,
    "sdxl": _SDXL,
    "sdxl-refiner": _REFINER,
    "sd15-inpaint": _INPAINT,
    "sd15-controlnet": _CONTROLNET,
    "sd35-medium": _SD35_MEDIUM,
    "sd35-large": _SD35_LARGE,
    "sd35-large-turbo": _SD35_LARGE,
    "flux-schnell": _FLUX_SCHNELL,
    "flux-dev": _FLUX_DEV,
    "flux2-klein-4b": _klein(is_distilled=True),
    "flux2-klein-base-4b": _klein(is_distilled=False),
    "flux2-dev": _FLUX2_DEV,
    "z-image-turbo": _Z_IMAGE_TURBO,
    "qwen-image": _QWEN_IMAGE,
    "qwen-image-edit": _qwen_image_edit("QwenImageEditPipeline", modulates_references=False),
    "qwen-image-edit-2511": _qwen_image_edit("QwenImageEditPlusPipeline", modulates_references=True),
    "krea2": _krea2(is_distilled=False),
    "krea2-turbo": _krea2(is_distilled=True),
}
_TINY = {name: _tiny(preset) for name, preset in _FULL.items()}
PRESETS: dict[str, Preset] = {
    **_FULL,
    **{f"{name}-tiny": preset for name, preset in _TINY.items()},
    **{
        f"{name}-mini": replace(preset, models={part: mini_model(part, preset.models[part]) for part in preset.models})
        for name, preset in _TINY.items()
        if "unet" in preset.models
    },
}


def open_preset(name: str, seed: int) -> Checkpoint:
    """Return the checkpoint of a preset with random weights, which are the same for the same seed."""
    return preset_checkpoint(name, PRESETS[name], seed)


def preset_checkpoint(name: str, preset: Preset, seed: int) -> Checkpoint:
    """Return a checkpoint with the configs of `preset` and random weights."""
    models = {
        model: CheckpointModel(config, partial(_load_random, config, seed + zlib.crc32(model.encode())))
        for model, config in preset.models.items()
    }
    encoders = {m.replace("text_encoder", "tokenizer"): c for m, c in preset.models.items() if "text_encoder" in m}
    files = {"scheduler/scheduler_config.json": preset.scheduler | {"_diffusers_version": package_version("diffusers")}}
    if "processor" in preset.options:
        encoders["processor"] = preset.models["text_encoder"]
        files["processor/preprocessor_config.json"] = QWEN_PREPROCESSOR
    return Checkpoint(
        name,
        _index(preset),
        models,
        generated_files={name: as_json(content) for name, content in files.items()},
        byte_tokenizers=encoders,
        seed=seed,
    )


TOKENIZERS = {"T5EncoderModel": "T5TokenizerFast", **dict.fromkeys(QWENS, "Qwen2TokenizerFast"),
              MISTRAL: "PreTrainedTokenizerFast"}  # fmt: skip


def _index(preset: Preset) -> Config:
    """Return the model_index.json of a preset."""
    index: Config = {"_class_name": preset.pipeline, "_diffusers_version": package_version("diffusers")}
    for model, config in preset.models.items():
        cls = class_name(config)
        index[model] = [LIBRARIES[cls], cls]
        if model.startswith("text_encoder"):
            tokenizer = TOKENIZERS.get(cls, "CLIPTokenizer")
            index[model.replace("text_encoder", "tokenizer")] = ["transformers", tokenizer]
    index["scheduler"] = ["diffusers", preset.scheduler["_class_name"]]
    absent = {"StableDiffusionXLImg2ImgPipeline": ["text_encoder", "tokenizer"]}
    if "transformer" in preset.models:
        if preset.pipeline in ("StableDiffusion3Pipeline", "FluxPipeline"):
            absent[preset.pipeline] = ["image_encoder", "feature_extractor"]
    elif "XL" not in preset.pipeline:
        absent[preset.pipeline] = ["safety_checker", "feature_extractor"]
        index["requires_safety_checker"] = False
    index |= {name: [None, None] for name in absent.get(preset.pipeline, [])}
    return index | preset.options


def _load_random(config: Config, seed: int) -> torch.nn.Module:
    from sd_ort.checkpoints.random_weights import fill_random  # imports torch

    model: torch.nn.Module = build_model(class_name(config), config)
    fill_random(model, seed)
    return model.eval()
