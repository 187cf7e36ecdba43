"""What each model family is made of: presets, components, and the inputs and outputs of every component.

All of it is data; nothing here imports torch. A *component* is one ONNX graph of a pipeline folder; its I/O names are
those Optimum uses, so that folders of either tool run in the other. An *axis* is a fixed size (int) or a symbolic
name; `"height/4"` and `"height*8"` are axes tied to the symbol `height`.

The preset configs are the published ones of the models (diffusers / transformers `config.json`); a `-tiny` preset has
the same topology, so the same operators in the same places, with narrower layers and a byte-level vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Axis = int | str
Config = dict[str, Any]


@dataclass(frozen=True)
class Tensor:
    """An input or output of a component: its ONNX name, axes and element type ("float32" or "int64")."""

    name: str
    axes: tuple[Axis, ...]
    dtype: str = "float32"

    @property
    def dynamic_axes(self) -> dict[int, str]:
        """Position -> symbol of the axes that vary, as torch.onnx wants them."""
        return {i: axis for i, axis in enumerate(self.axes) if isinstance(axis, str)}


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of one component, in graph order.

    `multiples`: what a size must be a multiple of, 1 if not named. `limits`: the largest size, if there is one.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    multiples: dict[str, int] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)


def split_axis(axis: str) -> tuple[str, int, int]:
    """`height*8` -> (height, 8, 1); `height/4` -> (height, 1, 4)."""
    name, times, divisor = re.fullmatch(r"(\w+)(?:\*(\d+))?(?:/(\d+))?", axis).groups()  # type: ignore[union-attr]
    return name, int(times or 1), int(divisor or 1)


def join_axis(name: str, times: int, divisor: int) -> str:
    """The inverse of `split_axis`, reduced."""
    common = math.gcd(times, divisor)
    times, divisor = times // common, divisor // common
    return name + (f"*{times}" if times > 1 else "") + (f"/{divisor}" if divisor > 1 else "")


def size(axis: Axis, sizes: Mapping[str, int]) -> int:
    """The number an axis stands for: `size("height/4", {"height": 16})` is 4. ValueError when there is a remainder."""
    if isinstance(axis, int):
        return axis
    name, times, divisor = split_axis(axis)
    whole, rest = divmod(sizes[name] * times, divisor)
    if rest:
        raise ValueError(f"{name}={sizes[name]} is not a multiple of {divisor}")
    return whole


# --- Signatures -----------------------------------------------------------------------------------------------------


def levels(unet: Mapping[str, Any]) -> int:
    """Resolutions of a UNet or VAE: it halves height and width `levels - 1` times."""
    return len(unet["block_out_channels"])


def latent_multiple(unet: Mapping[str, Any]) -> int:
    """Latent height and width must be multiples of this, or the skip connections of the UNet do not line up."""
    return int(2 ** (levels(unet) - 1))


def default_latents(unet: Mapping[str, Any]) -> int:
    """Latent height and width of the images that a UNet was trained on."""
    size = unet.get("sample_size") or 64
    return int(size if isinstance(size, int) else size[0])


def residual_axes(unet: Mapping[str, Any]) -> list[tuple[Axis, ...]]:
    """Axes [B, C, H/2^k, W/2^k] of each skip connection of a UNet's encoder, outermost first (SD 1.5: 12 of them)."""
    channels = unet["block_out_channels"]
    layers = unet["layers_per_block"]
    depths = [layers] * len(channels) if isinstance(layers, int) else layers

    def at(channel: int, level: int) -> tuple[Axis, ...]:
        return ("batch", channel, *(f"{axis}/{2**level}" if level else axis for axis in ("height", "width")))

    axes = [at(channels[0], 0)]
    for level, channel in enumerate(channels):
        axes += [at(channel, level)] * depths[level]
        if level < len(channels) - 1:
            axes.append(at(channel, level + 1))
    return axes


def mid_axes(unet: Mapping[str, Any]) -> tuple[Axis, ...]:
    """Axes of the UNet's middle block."""
    return residual_axes(unet)[-1]


def _text_encoder(config: Mapping[str, Any], hidden_states: bool) -> Signature:
    inputs = (Tensor("input_ids", ("batch", "sequence"), "int64"),)
    hidden = ("batch", "sequence", config["hidden_size"])
    if not hidden_states:
        outputs = [Tensor("last_hidden_state", hidden), Tensor("pooler_output", ("batch", config["hidden_size"]))]
    else:
        outputs = [Tensor("hidden_states", hidden)]
        if "CLIPTextModelWithProjection" in config.get("architectures", ()):
            outputs.append(Tensor("text_embeds", ("batch", config["projection_dim"])))
    return Signature(inputs, tuple(outputs), limits={"sequence": config["max_position_embeddings"]})


def _denoiser_inputs(unet: Mapping[str, Any]) -> list[Tensor]:
    """Inputs a UNet and its ControlNet share."""
    inputs = [
        Tensor("sample", ("batch", unet["in_channels"], "height", "width")),
        Tensor("timestep", (1,)),
        Tensor("encoder_hidden_states", ("batch", "sequence", unet["cross_attention_dim"])),
    ]
    if unet.get("addition_embed_type") == "text_time":
        pooled, ids = time_ids_split(unet)
        inputs += [Tensor("text_embeds", ("batch", pooled)), Tensor("time_ids", ("batch", ids))]
    if unet.get("time_cond_proj_dim"):  # the guidance scale, told to a distilled model: LCM
        inputs.append(Tensor("timestep_cond", ("batch", unet["time_cond_proj_dim"])))
    return inputs + _class_labels(unet)


def _class_labels(unet: Mapping[str, Any]) -> list[Tensor]:
    """The input beside the timestep: a noise level (x4 upscaler), an image embedding and its noise level (unCLIP)."""
    kind = unet.get("class_embed_type")
    if kind in ("projection", "simple_projection"):
        return [Tensor("class_labels", ("batch", unet["projection_class_embeddings_input_dim"]))]
    if kind == "timestep":
        return [Tensor("class_labels", ("batch",))]
    return [Tensor("class_labels", ("batch",), "int64")] if unet.get("num_class_embeds") else []


def time_ids_split(unet: Mapping[str, Any]) -> tuple[int, int]:
    """(width of text_embeds, number of time_ids) of an SDXL UNet, from its embedding widths.

    `projection_class_embeddings_input_dim = pooled + ids * addition_time_embed_dim`; base SDXL takes 6 ids (original
    size, crop, target size), the refiner 5 (original size, crop, aesthetic score).
    """
    total, each = unet["projection_class_embeddings_input_dim"], unet["addition_time_embed_dim"]
    ids = 5 if (total - 5 * each) == unet["cross_attention_dim"] else 6
    return total - ids * each, ids


def _unet(config: Mapping[str, Any], controlnet: bool) -> Signature:
    inputs = _denoiser_inputs(config)
    if controlnet:
        inputs += [Tensor(f"down_block_res_sample_{i}", axes) for i, axes in enumerate(residual_axes(config))]
        inputs.append(Tensor("mid_block_additional_residual", mid_axes(config)))
    output = Tensor("out_sample", ("batch", config["out_channels"], "height", "width"))
    return Signature(tuple(inputs), (output,), _multiples(config))


def _multiples(unet: Mapping[str, Any]) -> dict[str, int]:
    return dict.fromkeys(("height", "width"), latent_multiple(unet))


def _controlnet(config: Mapping[str, Any]) -> Signature:
    inputs = _denoiser_inputs(config)
    image = Tensor("controlnet_cond", ("batch", config.get("conditioning_channels", 3), "height*8", "width*8"))
    inputs += [image, Tensor("conditioning_scale", (1,))]
    outputs = [Tensor(f"down_block_res_sample_{i}", axes) for i, axes in enumerate(residual_axes(config))]
    outputs.append(Tensor("mid_block_res_sample", mid_axes(config)))
    return Signature(tuple(inputs), tuple(outputs), _multiples(config))


def _vae_encoder(config: Mapping[str, Any]) -> Signature:
    factor = 2 ** (levels(config) - 1)
    image = Tensor("sample", ("batch", config["in_channels"], f"height*{factor}", f"width*{factor}"))
    if config.get("_class_name") == "AutoencoderTiny":  # its latents themselves, where others have a distribution
        return Signature((image,), (Tensor("latent_sample", ("batch", config["latent_channels"], "height", "width")),))
    moments = 2 * config["latent_channels"]
    return Signature((image,), (Tensor("latent_parameters", ("batch", moments, "height", "width")),))


def _vae_decoder(config: Mapping[str, Any]) -> Signature:
    factor = 2 ** (levels(config) - 1)
    latent = Tensor("latent_sample", ("batch", config["latent_channels"], "height", "width"))
    image = Tensor("sample", ("batch", config["out_channels"], f"height*{factor}", f"width*{factor}"))
    return Signature((latent,), (image,))


def signature(component: str, config: Mapping[str, Any], *, sdxl: bool = False, controlnet: bool = False) -> Signature:
    """Inputs and outputs of a component, from the diffusers or transformers config of its model.

    `sdxl` picks the penultimate hidden state of the text encoders; `controlnet` adds the residual inputs to the UNet.
    Raises KeyError for a component this module does not know.
    """
    if component in ("text_encoder", "text_encoder_2"):
        return _text_encoder(config, sdxl)
    if component == "unet":
        return _unet(config, controlnet)
    return {"controlnet": _controlnet, "vae_encoder": _vae_encoder, "vae_decoder": _vae_decoder}[component](config)


# --- Presets --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preset:
    """A model without weights: the diffusers pipeline class, the config of each model and of the scheduler."""

    pipeline: str
    models: dict[str, Config]
    scheduler: Config
    options: Config = field(default_factory=dict)


# The model a component is cut from, when their names differ.
MODEL_OF = {"vae_encoder": "vae", "vae_decoder": "vae"}

SD_CHANNELS = [320, 640, 1280, 1280]
TINY_CHANNELS = [32, 64, 128, 128]
VOCABULARY = 49408  # CLIP's
BYTE_VOCABULARY = 514  # 256 bytes, 256 bytes that end a word, start and end of text

_CROSS_DOWN = ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"]
_CROSS_UP = ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3


def _clip(hidden: int, layers: int, heads: int, activation: str, projection: int, **extra: Any) -> Config:
    return {
        "architectures": ["CLIPTextModel"],
        "model_type": "clip_text_model",
        "vocab_size": VOCABULARY,
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


def _unet_sd(**changes: Any) -> Config:
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


def _vae(**changes: Any) -> Config:
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
_EULER = _scheduler("EulerDiscreteScheduler", timestep_spacing="leading", prediction_type="epsilon")

_CLIP_L = _clip(768, 12, 12, "quick_gelu", 768)
_CLIP_H = _clip(1024, 23, 16, "gelu", 512)
_CLIP_G = _clip(1280, 32, 20, "gelu", 1280, architectures=["CLIPTextModelWithProjection"])

_SD15 = Preset("StableDiffusionPipeline", {"text_encoder": _CLIP_L, "unet": _unet_sd(), "vae": _vae()}, _PNDM)

_SD21 = Preset(
    "StableDiffusionPipeline",
    {
        "text_encoder": _CLIP_H,
        "unet": _unet_sd(
            sample_size=96,
            attention_head_dim=[5, 10, 20, 20],
            cross_attention_dim=1024,
            use_linear_projection=True,
            upcast_attention=True,
        ),
        "vae": _vae(sample_size=768),
    },
    _DDIM_V,
)

_SDXL_VAE = _vae(sample_size=1024, scaling_factor=0.13025, force_upcast=True)

_SDXL = Preset(
    "StableDiffusionXLPipeline",
    {
        "text_encoder": _CLIP_L,
        "text_encoder_2": _CLIP_G,
        "unet": _unet_sd(
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
    _EULER,
    {"force_zeros_for_empty_prompt": True},
)

_REFINER = Preset(
    "StableDiffusionXLImg2ImgPipeline",
    {
        "text_encoder_2": _CLIP_G,
        "unet": _unet_sd(
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
    _EULER,
    {"force_zeros_for_empty_prompt": False, "requires_aesthetics_score": True},
)

_INPAINT = Preset(
    "StableDiffusionInpaintPipeline",
    {"text_encoder": _CLIP_L, "unet": _unet_sd(in_channels=9), "vae": _vae()},
    _PNDM,
)

_CONTROLNET = Preset(
    "StableDiffusionControlNetPipeline",
    {
        "text_encoder": _CLIP_L,
        "unet": _unet_sd(),
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
        "vae": _vae(),
    },
    _PNDM,
)

_TINY_HIDDEN = 64


def _tiny_model(name: str, config: Config, context: int) -> Config:
    """The same topology, narrower. `context` is the width of the text embedding the UNet attends to."""
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
    return Preset(preset.pipeline, models, preset.scheduler, preset.options)


_FULL = {
    "sd15": _SD15,
    "sd21": _SD21,
    "sdxl": _SDXL,
    "sdxl-refiner": _REFINER,
    "sd15-inpaint": _INPAINT,
    "sd15-controlnet": _CONTROLNET,
}
PRESETS: dict[str, Preset] = _FULL | {f"{name}-tiny": _tiny(preset) for name, preset in _FULL.items()}
