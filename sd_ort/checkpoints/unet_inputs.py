"""What a denoiser (UNet, ControlNet) may be told beside noisy latents, timestep and prompt: one record per input.

Signatures, the torch modules that are traced, and made-up numbers read these records, in the order of the graphs'
inputs; what a pipeline feeds an input is told in `sd_ort.pipelines`. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Axis = int | str
Config = Mapping[str, Any]
Kind = tuple[tuple[Axis, ...], str]  # axes, and "float32" or "int64"


def _normal(random: np.random.Generator, shape: list[int], _: Config) -> np.ndarray:
    return random.standard_normal(shape)


@dataclass(frozen=True)
class Condition:
    """One input, by the name that ONNX graphs and diffusers give it.

    `kind`: its axes and element type in a UNet of that config, or None where it has no such input.
    `made_up`: numbers of a shape such as it meets in use. `added`: torch takes it in `added_cond_kwargs`; `pictured`:
    the layers of an IP-Adapter read it (`ip_adapter_layers`).
    """

    name: str
    kind: Callable[[Config], Kind | None]
    made_up: Callable[[np.random.Generator, list[int], Config], np.ndarray] = _normal
    added: bool = False
    pictured: bool = False


def time_ids_split(unet: Config) -> tuple[int, int]:
    """(width of text_embeds, number of time_ids) of an SDXL UNet, from its embedding widths.

    `projection_class_embeddings_input_dim = pooled + ids * addition_time_embed_dim`; base SDXL takes 6 ids (original
    size, crop, target size), the refiner 5 (original size, crop, aesthetic score).
    """
    total, each = unet["projection_class_embeddings_input_dim"], unet["addition_time_embed_dim"]
    ids = 5 if (total - 5 * each) == unet["cross_attention_dim"] else 6
    return total - ids * each, ids


def _sdxl(part: int) -> Callable[[Config], Kind | None]:
    def kind(unet: Config) -> Kind | None:
        return (("batch", time_ids_split(unet)[part]), "float32") if is_sdxl(unet) else None

    return kind


def is_sdxl(unet: Config) -> bool:
    """Whether a UNet takes a pooled prompt and sizes: SDXL and its refiner."""
    return unet.get("addition_embed_type") == "text_time"


def _guidance(unet: Config) -> Kind | None:
    return (("batch", unet["time_cond_proj_dim"]), "float32") if unet.get("time_cond_proj_dim") else None


def _class_labels(unet: Config) -> Kind | None:
    kind = unet.get("class_embed_type")
    if kind in ("projection", "simple_projection"):
        return ("batch", unet["projection_class_embeddings_input_dim"]), "float32"
    if kind == "timestep":
        return ("batch",), "float32"
    return (("batch",), "int64") if unet.get("num_class_embeds") else None


def _labels(random: np.random.Generator, shape: list[int], unet: Config) -> np.ndarray:
    classes = unet.get("num_class_embeds")
    return random.integers(0, classes, shape) if classes else random.standard_normal(shape)


def _sizes(random: np.random.Generator, shape: list[int], _: Config) -> np.ndarray:
    return random.integers(0, 1025, shape)


def _pictures(unet: Config) -> Kind | None:
    """What an image encoder makes of pictures: an embedding each or, for IP-Adapter Plus, rows of a hidden state."""
    if not (adapter := unet.get("ip_adapter")):
        return None
    sequence = (adapter["hidden_state_length"],) if adapter.get("hidden_state_length") else ()
    return ("batch", "images", *sequence, adapter["width"]), "float32"


def _picture_scales(unet: Config) -> Kind | None:
    return (("batch", len(unet["ip_adapter"]["layers"])), "float32") if unet.get("ip_adapter") else None


def _shares(random: np.random.Generator, shape: list[int], _: Config) -> np.ndarray:
    return random.uniform(0.4, 1.0, shape)


# Settings of a diffusers UNet that ask for conditions, and their values that are known. Others would be left out of the
# graph without a word, or ask for an input that no pipeline gives: GLIGEN's boxes and phrases, an image to attend to.
KNOWN_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "encoder_hid_dim_type": (),
    "encoder_hid_dim": (),
    "addition_embed_type": ("text_time",),
    "class_embed_type": ("timestep", "projection", "simple_projection"),
    "attention_type": ("default",),
    "ip_adapter": (),  # ours, of a UNet that was exported with one: no checkpoint has it
}


def unsupported_setting(unet: Config) -> str | None:
    """The first setting of a UNet that asks for a condition without a record here, or None."""
    return next((key for key, known in KNOWN_SETTINGS.items() if unet.get(key) and unet[key] not in known), None)


CONDITIONS = (
    Condition("text_embeds", _sdxl(0), added=True),
    Condition("time_ids", _sdxl(1), _sizes, added=True),
    Condition("timestep_cond", _guidance),  # the guidance scale, told to a distilled model: LCM
    # Beside the timestep: a noise level (x4 upscaler), an image embedding and its noise level (unCLIP), a class.
    Condition("class_labels", _class_labels, _labels),
    # An IP-Adapter's: pictures, and how much each layer that attends to them makes of them.
    Condition("image_embeds", _pictures, pictured=True),
    Condition("ip_adapter_scale", _picture_scales, _shares, pictured=True),
)
CONDITIONS_BY_NAME: Mapping[str, Condition] = {condition.name: condition for condition in CONDITIONS}
