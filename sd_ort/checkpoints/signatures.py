"""Signatures: inputs and outputs of the ONNX graph of each component.

Their names are those of Optimum, so that folders of either tool run in the other. An axis is a fixed size (int) or a
symbol; `"height/4"` and `"height*8"` are multiples of the symbol `height`. Nothing here imports torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sd_ort.checkpoints import diffusion_transformers
from sd_ort.checkpoints.unet_inputs import CONDITIONING_INPUTS, Axis
from sd_ort.core.errors import InputError

Config = dict[str, Any]

# Key in the config of a vision-language model whose pipeline gives it images beside the prompt.
READS_IMAGES = "reads_images"


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a component: its ONNX name, axes and dtype ("float32" or "int64")."""

    name: str
    axes: tuple[Axis, ...]
    dtype: str = "float32"

    @property
    def dynamic_axes(self) -> dict[int, str]:
        """Index -> symbol of the dynamic axes, as for torch.onnx."""
        return {i: axis for i, axis in enumerate(self.axes) if isinstance(axis, str)}


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of one component, in graph order.

    multiples: symbol -> its sizes are multiples of this number, by default 1. limits: symbol -> its largest size.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    multiples: dict[str, int] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)


def split_axis(axis: str) -> tuple[str, int, int]:
    """Return (symbol, factor, divisor): `height*8` -> (height, 8, 1); `height/4` -> (height, 1, 4)."""
    name, times, divisor = re.fullmatch(r"(\w+)(?:\*(\d+))?(?:/(\d+))?", axis).groups()  # type: ignore[union-attr]
    return name, int(times or 1), int(divisor or 1)


def join_axis(name: str, times: int, divisor: int) -> str:
    """Return the inverse of `split_axis`, as a reduced fraction."""
    common = math.gcd(times, divisor)
    times, divisor = times // common, divisor // common
    return name + (f"*{times}" if times > 1 else "") + (f"/{divisor}" if divisor > 1 else "")


def size(axis: Axis, sizes: Mapping[str, int], round_up: bool = False) -> int:
    """Return the size of an axis: `size("height/4", {"height": 16})` is 4.

    A remainder raises ValueError, or rounds up, as the levels of a UNet do: 3 for a height of 9.
    """
    if isinstance(axis, int):
        return axis
    name, times, divisor = split_axis(axis)
    size, remainder = divmod(sizes[name] * times, divisor)
    if remainder and not round_up:
        raise ValueError(f"{name}={sizes[name]} is not a multiple of {divisor}")
    return size + bool(remainder)


def levels(unet: Mapping[str, Any]) -> int:
    """Return the number of resolutions of a UNet or VAE, which halves height and width `levels - 1` times."""
    if unet.get("dim_mult"):  # of Qwen-Image's VAE
        return len(unet["dim_mult"])
    if not unet.get("block_out_channels"):
        raise InputError("a config.json lacks 'block_out_channels': copy it from the original model.")
    return len(unet["block_out_channels"])


def latent_multiple(unet: Mapping[str, Any]) -> int:
    """Return the number that latent height and width must be multiples of, for the skip connections of the UNet."""
    return int(2 ** (levels(unet) - 1))


def default_latents(unet: Mapping[str, Any]) -> int:
    """Return latent height and width of the images that a UNet was trained on."""
    size = unet.get("sample_size") or 64
    return int(size if isinstance(size, int) else size[0])


def residual_axes(unet: Mapping[str, Any]) -> list[tuple[Axis, ...]]:
    """Return the axes (B, C, H/2^k, W/2^k) of each skip connection of a UNet, outermost first (SD 1.5 has 12)."""
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
    """Return the axes of the UNet's middle block."""
    return residual_axes(unet)[-1]


def _text_encoder(config: Mapping[str, Any], hidden_states: bool) -> Signature:
    inputs = (TensorSpec("input_ids", ("batch", "sequence"), "int64"),)
    hidden = ("batch", "sequence", config["hidden_size"])
    if not hidden_states:
        outputs = [
            TensorSpec("last_hidden_state", hidden),
            TensorSpec("pooler_output", ("batch", config["hidden_size"])),
        ]
    else:
        outputs = [TensorSpec("hidden_states", hidden)]
        if "CLIPTextModelWithProjection" in (config.get("architectures") or ()):
            outputs.append(TensorSpec("text_embeds", ("batch", config["projection_dim"])))
    return Signature(inputs, tuple(outputs), limits={"sequence": config["max_position_embeddings"]})


def _t5_encoder(config: Mapping[str, Any]) -> Signature:
    inputs = (TensorSpec("input_ids", ("batch", "sequence"), "int64"),)
    return Signature(inputs, (TensorSpec("last_hidden_state", ("batch", "sequence", config["d_model"])),))


def tapped_layers(config: Mapping[str, Any], penultimate: bool = False) -> tuple[int, ...]:
    """Return the indices of the text encoder layers (Qwen3, Qwen3-VL or Mistral) whose outputs a transformer reads.

    `penultimate`: the last but one, which Z-Image reads. FLUX.2 klein reads 9, 18 and 27 of 36 layers, dev 10, 20 and
    30 of 40, as in diffusers; quarters of the layers of a smaller model, such as a tiny one. Krea 2 reads each third
    layer of Qwen3-VL from the second on.
    """
    layers = int(text_config(config)["num_hidden_layers"])
    if config.get("model_type") == "mistral3":
        taps = (10, 20, 30)
        return taps if layers >= taps[-1] else quarters(layers)
    if "text_config" in config:
        return tuple(range(2, layers, 3))
    if penultimate:
        return (max(layers - 1, 1),)
    return (9, 18, 27) if layers >= 27 else quarters(layers)


def quarters(layers: int) -> tuple[int, int, int]:
    """Return the layers at a quarter, a half and three quarters of a text encoder, from 1."""
    return max(layers // 4, 1), max(layers // 2, 1), max(3 * layers // 4, 1)


def _qwen3_encoder(config: Mapping[str, Any], penultimate: bool) -> Signature:
    names = ("input_ids", "attention_mask")
    width = len(tapped_layers(config, penultimate)) * text_config(config)["hidden_size"]
    output = TensorSpec("hidden_states", ("batch", "sequence", width))
    return Signature(tuple(TensorSpec(name, ("batch", "sequence"), "int64") for name in names), (output,))


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a text encoder, with the keys of `text_config` if it is a vision-language model's."""
    return {**config, **(config.get("text_config") or {})}


_VISION_DEFAULTS: Config = {
    "depth": 32, "hidden_size": 3584, "hidden_act": "silu", "intermediate_size": 3420, "num_heads": 16,
    "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
    "out_hidden_size": 3584, "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip


def vision_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the vision tower of Qwen2.5-VL, with transformers' defaults."""
    return {name: config["vision_config"].get(name, default) for name, default in _VISION_DEFAULTS.items()}


def _qwen_vl_encoder(config: Mapping[str, Any], taps: Sequence[int] = ()) -> Signature:
    names = ("input_ids", "attention_mask")
    layers = (len(taps),) if taps else ()
    width = text_config(config)["hidden_size"]
    output = TensorSpec("hidden_states", ("batch", "sequence", *layers, width))
    inputs = [TensorSpec(name, ("batch", "sequence"), "int64") for name in names]
    if config.get(READS_IMAGES):
        inputs.append(TensorSpec("position_ids", ("batch", "sequence", 3), "int64"))
        inputs.append(TensorSpec("image_ids", ("batch", "sequence"), "int64"))
        inputs.append(TensorSpec("image_embeds", ("image_sequence", width)))
    return Signature(tuple(inputs), (output,))


def _vision_encoder(config: Mapping[str, Any]) -> Signature:
    """Patches of an image in windows, their positions, the places of the patches, and the patches in the places.

    See `qwen_vision_modules`. A place without a patch has -1 in `window_ids`.
    """
    vision = vision_config(config)
    places = (vision["window_size"] // vision["patch_size"]) ** 2
    pixels = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    inputs = (
        TensorSpec("pixel_values", ("windows", places, pixels)),
        TensorSpec("position_ids", ("windows", places, 2), "int64"),
        TensorSpec("patch_ids", ("patches",), "int64"),
        TensorSpec("window_ids", ("windows", places), "int64"),
    )
    tokens = f"windows*{places // vision['spatial_merge_size'] ** 2}"
    return Signature(inputs, (TensorSpec("image_embeds", (tokens, vision["out_hidden_size"])),))


def _image_encoder(config: Mapping[str, Any]) -> Signature:
    """Hidden states of the penultimate layer, for each patch and the class token, and the embedding of the image.

    An IP-Adapter reads one of them.
    """
    side = config["image_size"]
    image = TensorSpec("pixel_values", ("batch", config.get("num_channels", 3), side, side))
    rows = (side // config["patch_size"]) ** 2 + 1
    hidden = TensorSpec("hidden_states", ("batch", rows, config["hidden_size"]))
    return Signature((image,), (hidden, TensorSpec("image_embeds", ("batch", config["projection_dim"]))))


def _denoiser_inputs(unet: Mapping[str, Any]) -> list[TensorSpec]:
    """Return the inputs that UNet and ControlNet have in common."""
    inputs = [
        TensorSpec("sample", ("batch", unet["in_channels"], "height", "width")),
        TensorSpec("timestep", (1,)),
        TensorSpec("encoder_hidden_states", ("batch", "sequence", unet["cross_attention_dim"])),
    ]
    specs = [(spec.name, spec.spec(unet)) for spec in CONDITIONING_INPUTS]
    return inputs + [TensorSpec(name, *spec) for name, spec in specs if spec is not None]


def _unet(config: Mapping[str, Any], controlnet: bool) -> Signature:
    inputs = _denoiser_inputs(config)
    if controlnet:
        inputs += [TensorSpec(f"down_block_res_sample_{i}", axes) for i, axes in enumerate(residual_axes(config))]
        inputs.append(TensorSpec("mid_block_additional_residual", mid_axes(config)))
    output = TensorSpec("out_sample", ("batch", config["out_channels"], "height", "width"))
    return Signature(tuple(inputs), (output,), _multiples(config))


def _transformer(config: Mapping[str, Any]) -> Signature:
    family = diffusion_transformers.FAMILIES[config["_class_name"]]
    inputs = tuple(TensorSpec(name, axes) for name, axes in family.inputs(config).items())
    patch, patches = config.get("patch_size") or 1, family.max_patches(config)
    return Signature(
        inputs,
        (TensorSpec("out_hidden_states", family.output(config)),),
        multiples=dict.fromkeys(("height", "width"), patch),
        limits={} if patches is None else dict.fromkeys(("height", "width"), patches * patch),
    )


def _multiples(unet: Mapping[str, Any]) -> dict[str, int]:
    return dict.fromkeys(("height", "width"), latent_multiple(unet))


def controlnet_scale(config: Mapping[str, Any]) -> int:
    """Return the pixels of a ControlNet's image per latent."""
    return int(2 ** (len(config.get("conditioning_embedding_out_channels") or [16, 32, 96, 256]) - 1))


def _controlnet(config: Mapping[str, Any]) -> Signature:
    inputs = _denoiser_inputs(config)
    scale = controlnet_scale(config)
    image_axes = ("batch", config.get("conditioning_channels", 3), f"height*{scale}", f"width*{scale}")
    image = TensorSpec("controlnet_cond", image_axes)
    inputs += [image, TensorSpec("conditioning_scale", (1,))]
    outputs = [TensorSpec(f"down_block_res_sample_{i}", axes) for i, axes in enumerate(residual_axes(config))]
    outputs.append(TensorSpec("mid_block_res_sample", mid_axes(config)))
    return Signature(tuple(inputs), tuple(outputs), _multiples(config))


def has_packed_latents(vae: Mapping[str, Any]) -> bool:
    """Return whether the graphs of a VAE have normalized latents in patches of 2x2: those of FLUX.2."""
    return vae.get("_class_name") == "AutoencoderKLFlux2"


def latent_channels(vae: Mapping[str, Any]) -> int:
    """Return the channels of the latents in the graphs of a VAE."""
    return int(vae.get("z_dim") or vae["latent_channels"]) * (4 if has_packed_latents(vae) else 1)


def image_channels(vae: Mapping[str, Any]) -> int:
    return int(vae.get("input_channels") or vae["in_channels"])


def pixels_per_latent(vae: Mapping[str, Any]) -> int:
    """Return the height and width in pixels of one latent in the graphs of a VAE."""
    return int(2 ** (levels(vae) - 1)) * (2 if has_packed_latents(vae) else 1)


def _vae_encoder(config: Mapping[str, Any]) -> Signature:
    factor = pixels_per_latent(config)
    image = TensorSpec("sample", ("batch", image_channels(config), f"height*{factor}", f"width*{factor}"))
    if config.get("_class_name") == "AutoencoderTiny" or has_packed_latents(config):  # latents, not a distribution
        return Signature(
            (image,), (TensorSpec("latent_sample", ("batch", latent_channels(config), "height", "width")),)
        )
    moments = 2 * latent_channels(config)
    return Signature((image,), (TensorSpec("latent_parameters", ("batch", moments, "height", "width")),))


def _vae_decoder(config: Mapping[str, Any]) -> Signature:
    factor = pixels_per_latent(config)
    latent = TensorSpec("latent_sample", ("batch", latent_channels(config), "height", "width"))
    image = TensorSpec(
        "sample", ("batch", config.get("out_channels") or image_channels(config), f"height*{factor}", f"width*{factor}")
    )
    return Signature((latent,), (image,))


def signature(
    component: str, config: Mapping[str, Any], *, penultimate: bool = False, controlnet: bool = False
) -> Signature:
    """Return inputs and outputs of a component, from the diffusers or transformers config of its model.

    penultimate: CLIP and Qwen3 text encoders return the penultimate hidden state. controlnet: the UNet has inputs for
    residuals. Raises KeyError for an unknown component.
    """
    if component.startswith("text_encoder"):
        names = config.get("architectures") or ()
        if "T5EncoderModel" in names:
            return _t5_encoder(config)
        if any(name in names for name in (*diffusion_transformers.QWEN3, diffusion_transformers.MISTRAL)):
            return _qwen3_encoder(config, penultimate)
        if diffusion_transformers.QWEN3_VL in names:
            return _qwen_vl_encoder(config, tapped_layers(config))
        if diffusion_transformers.QWEN_VL in names:
            return _qwen_vl_encoder(config)
        return _text_encoder(config, penultimate)
    if component == "unet":
        return _unet(config, controlnet)
    others = {
        "image_encoder": _image_encoder, "vision_encoder": _vision_encoder, "controlnet": _controlnet,
        "transformer": _transformer,
        "vae_encoder": _vae_encoder, "vae_decoder": _vae_decoder,
    }  # fmt: skip
    return others[component](config)


# Component -> model that it is a part of, if their names differ.
MODEL_OF = {"vae_encoder": "vae", "vae_decoder": "vae", "vision_encoder": "text_encoder"}
