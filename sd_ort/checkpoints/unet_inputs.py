"""Conditioning inputs of a denoiser (UNet, ControlNet): its inputs besides sample, timestep and encoder_hidden_states.

Signatures, the torch modules that are exported, and synthetic inputs read this table, in the order of the graphs'
inputs. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Axis = int | str
Config = Mapping[str, Any]
AxesAndDtype = tuple[tuple[Axis, ...], str]  # dtype is "float32" or "int64"


def _normal(random: np.random.Generator, shape: list[int], _: Config) -> np.ndarray:
    return random.standard_normal(shape)


@dataclass(frozen=True)
class ConditioningInputSpec:
    """One conditioning input, by its name in ONNX graphs and diffusers.

    Attributes:
        spec: Returns axes and dtype for the config of a UNet, or None if the UNet does not have the input.
        synthesize: Returns values of a shape with the distribution of the pipeline.
        in_added_cond_kwargs: Whether diffusers takes it in `added_cond_kwargs`.
        is_ip_adapter_input: Whether the layers of an IP-Adapter read it (`ip_adapter_modules`).
    """

    name: str
    spec: Callable[[Config], AxesAndDtype | None]
    synthesize: Callable[[np.random.Generator, list[int], Config], np.ndarray] = _normal
    in_added_cond_kwargs: bool = False
    is_ip_adapter_input: bool = False


def time_ids_split(unet: Config) -> tuple[int, int]:
    """Return (width of text_embeds, number of time_ids) of an SDXL UNet, from its embedding widths.

    `projection_class_embeddings_input_dim = pooled + ids * addition_time_embed_dim`; base SDXL has 6 ids (original
    size, crop, target size), the refiner 5 (original size, crop, aesthetic score). With 5, the pooled prompt has the
    width of the prompt's embeddings, or half of it with two text encoders of equal width.
    """
    total, width = unet["projection_class_embeddings_input_dim"], unet["addition_time_embed_dim"]
    pooled, context = total - 5 * width, unet["cross_attention_dim"]
    ids = 5 if context in (pooled, 2 * pooled) else 6
    return total - ids * width, ids


def is_sdxl(unet: Config) -> bool:
    """Return whether a UNet has a pooled prompt and sizes as inputs: SDXL and its refiner."""
    return unet.get("addition_embed_type") == "text_time"


def _sdxl(index: int) -> Callable[[Config], AxesAndDtype | None]:
    return lambda unet: (("batch", time_ids_split(unet)[index]), "float32") if is_sdxl(unet) else None


def _guidance(unet: Config) -> AxesAndDtype | None:
    return (("batch", unet["time_cond_proj_dim"]), "float32") if unet.get("time_cond_proj_dim") else None


def _class_labels(unet: Config) -> AxesAndDtype | None:
    embedding = unet.get("class_embed_type")
    if embedding in ("projection", "simple_projection"):
        return ("batch", unet["projection_class_embeddings_input_dim"]), "float32"
    if embedding == "timestep":
        return ("batch",), "float32"
    return (("batch",), "int64") if unet.get("num_class_embeds") else None


def _labels(random: np.random.Generator, shape: list[int], unet: Config) -> np.ndarray:
    classes = unet.get("num_class_embeds")
    return random.integers(0, classes, shape) if classes else random.standard_normal(shape)


def _sizes(random: np.random.Generator, shape: list[int], _: Config) -> np.ndarray:
    return random.integers(0, 1025, shape)


def _image_embeds(unet: Config) -> AxesAndDtype | None:
    """Outputs of the image encoder: an embedding for each image or, for IP-Adapter Plus, its hidden state."""
    if not (adapter := unet.get("ip_adapter")):
        return None
    sequence = (adapter["hidden_state_length"],) if adapter.get("hidden_state_length") else ()
    return ("batch", "images", *sequence, adapter["width"]), "float32"


def _adapter_scales(unet: Config) -> AxesAndDtype | None:
    return (("batch", len(unet["ip_adapter"]["layers"])), "float32") if unet.get("ip_adapter") else None


def _scales(random: np.random.Generator, shape: list[int], _: Config) -> np.ndarray:
    return random.uniform(0.4, 1.0, shape)


# Settings of a diffusers UNet that add inputs, and their supported values. Other values would be ignored by the graph,
# or need inputs that no pipeline has: GLIGEN's boxes and phrases, an image to attend to.
SUPPORTED_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "encoder_hid_dim_type": (),
    "encoder_hid_dim": (),
    "addition_embed_type": ("text_time",),
    "class_embed_type": ("timestep", "projection", "simple_projection"),
    "attention_type": ("default",),
    "ip_adapter": (),  # of exported UNets, not of checkpoints
}


def unsupported_setting(unet: Config) -> str | None:
    """Return the first setting of a UNet that needs an unsupported input, or None."""
    return next((key for key, values in SUPPORTED_SETTINGS.items() if unet.get(key) and unet[key] not in values), None)


CONDITIONING_INPUTS = (
    ConditioningInputSpec("text_embeds", _sdxl(0), in_added_cond_kwargs=True),
    ConditioningInputSpec("time_ids", _sdxl(1), _sizes, in_added_cond_kwargs=True),
    ConditioningInputSpec("timestep_cond", _guidance),  # the guidance scale, of a distilled model: LCM
    # A noise level (x4 upscaler), an image embedding and its noise level (unCLIP), or a class.
    ConditioningInputSpec("class_labels", _class_labels, _labels),
    # Of an IP-Adapter: image prompts, and the scale of each of its layers.
    ConditioningInputSpec("image_embeds", _image_embeds, is_ip_adapter_input=True),
    ConditioningInputSpec("ip_adapter_scale", _adapter_scales, _scales, is_ip_adapter_input=True),
)
CONDITIONING_INPUTS_BY_NAME: Mapping[str, ConditioningInputSpec] = {spec.name: spec for spec in CONDITIONING_INPUTS}
