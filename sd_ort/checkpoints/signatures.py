"""What each component takes and gives: the inputs and outputs of every ONNX graph of a pipeline folder.

All of it is data; nothing here imports torch. A *component* is one ONNX graph of a pipeline folder; its I/O names are
those Optimum uses, so that folders of either tool run in the other. An *axis* is a fixed size (int) or a symbolic
name; `"height/4"` and `"height*8"` are axes tied to the symbol `height`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sd_ort.checkpoints.unet_inputs import CONDITIONS, Axis

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


def _image_encoder(config: Mapping[str, Any]) -> Signature:
    """Of an IP-Adapter, which reads one of both: the penultimate layer's rows, one a patch and one of all, or the
    picture's embedding."""
    side = config["image_size"]
    image = Tensor("pixel_values", ("batch", config.get("num_channels", 3), side, side))
    rows = (side // config["patch_size"]) ** 2 + 1
    hidden = Tensor("hidden_states", ("batch", rows, config["hidden_size"]))
    return Signature((image,), (hidden, Tensor("image_embeds", ("batch", config["projection_dim"]))))


def _denoiser_inputs(unet: Mapping[str, Any]) -> list[Tensor]:
    """Inputs a UNet and its ControlNet share."""
    inputs = [
        Tensor("sample", ("batch", unet["in_channels"], "height", "width")),
        Tensor("timestep", (1,)),
        Tensor("encoder_hidden_states", ("batch", "sequence", unet["cross_attention_dim"])),
    ]
    kinds = [(condition.name, condition.kind(unet)) for condition in CONDITIONS]
    return inputs + [Tensor(name, *kind) for name, kind in kinds if kind is not None]


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
    others = {
        "image_encoder": _image_encoder, "controlnet": _controlnet,
        "vae_encoder": _vae_encoder, "vae_decoder": _vae_decoder,
    }  # fmt: skip
    return others[component](config)


# The model a component is cut from, when their names differ.
MODEL_OF = {"vae_encoder": "vae", "vae_decoder": "vae"}
