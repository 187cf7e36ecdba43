"""Diffusion transformers by the class of their diffusers model: the inputs and the output of the graph of each family.

Signatures, presets, synthetic inputs and pipelines read this table. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Axis = int | str
Config = Mapping[str, Any]
Axes = Mapping[str, tuple[Axis, ...]]


@dataclass(frozen=True)
class TransformerFamily:
    """A family of diffusion transformers.

    Attributes:
        inputs: Returns the axes of each input for a config. Inputs are float32 and have the names of diffusers'
            `forward`, which are those of Optimum too.
        output: Returns the axes of the output `out_hidden_states`.
        max_timestep: Largest value of `timestep`.
        penultimate_states: Whether CLIP encoders return the penultimate hidden state and `text_embeds`, and Qwen3 the
            penultimate hidden state; otherwise CLIP's are `last_hidden_state` and `pooler_output`.
        steps, guidance: Default number of denoising steps and guidance scale of diffusers' pipeline.
        unguided: Largest guidance scale that disables guidance.
        text_encoders: Classes that each text encoder may have. Those in `optional_encoders` may be missing.
        unsupported: Settings of the config that name another model if they are set.
        max_patches: Returns the largest number of patches along height and width, None without a limit.
    """

    inputs: Callable[[Config], Axes]
    output: Callable[[Config], tuple[Axis, ...]]
    steps: int
    guidance: float
    text_encoders: Mapping[str, tuple[str, ...]]
    optional_encoders: tuple[str, ...] = ()
    max_timestep: float = 1
    penultimate_states: bool = False
    max_patches: Callable[[Config], int | None] = lambda config: None
    unsupported: tuple[str, ...] = ()
    unguided: float = 1.0


def _text_inputs(config: Config, pooled: bool = True) -> dict[str, tuple[Axis, ...]]:
    """Return the inputs that do not depend on the image: the prompt, its pooled embedding, and the timestep."""
    inputs: dict[str, tuple[Axis, ...]] = {
        "encoder_hidden_states": ("batch", "sequence", config["joint_attention_dim"])
    }
    if pooled:
        inputs["pooled_projections"] = ("batch", config["pooled_projection_dim"])
    return inputs | {"timestep": (1,)}


def _sd3_inputs(config: Config) -> Axes:
    return {"hidden_states": ("batch", config["in_channels"], "height", "width"), **_text_inputs(config)}


def _flux_inputs(config: Config, axes: int = 3, pooled: bool = True) -> Axes:
    """Return the inputs of FLUX: latents in patches of 2x2, and the positions of patches and text tokens.

    FLUX.1 has 3 axes: (0, y, x) of patches, zeros for text. FLUX.2 has 4: (image, y, x, 0) and (0, 0, 0, token). It
    reads no pooled embedding.
    """
    texts = _text_inputs(config, pooled)
    inputs = {"hidden_states": ("batch", "image_sequence", config["in_channels"]), **texts}
    inputs |= {"img_ids": ("image_sequence", axes), "txt_ids": ("sequence", axes)}
    return inputs | ({"guidance": ("batch",)} if config.get("guidance_embeds") else {})


def _flux2_inputs(config: Config) -> Axes:
    return _flux_inputs(config, axes=4, pooled=False)


def _z_image_inputs(config: Config) -> Axes:
    """Return the inputs of Z-Image: latents in patches of 2x2, the prompt, the positions of both, a mask of the prompt.

    Both sequences are padded to multiples of `TOKEN_MULTIPLE`. Positions of patches are (text tokens + 1, y, x), of
    text (1 + token, 0, 0), and (0, 0, 0) of padding of the image. The mask is 1 for tokens, and 0 for padding.
    """
    return {
        "hidden_states": ("batch", "image_sequence", 4 * config["in_channels"]),
        "encoder_hidden_states": ("batch", "sequence", config["cap_feat_dim"]),
        "timestep": (1,),
        "img_ids": ("image_sequence", 3),
        "txt_ids": ("sequence", 3),
        "encoder_hidden_states_mask": ("batch", "sequence"),
    }


def _qwen_image_inputs(config: Config) -> Axes:
    """Return the inputs of Qwen-Image: those of FLUX.1 without a pooled embedding.

    Positions of patches are (0, y, x) around the image's middle, those of text (p, p, p) from half the larger side on.
    """
    return _flux_inputs({**config, "guidance_embeds": False}, axes=3, pooled=False)


def _krea2_inputs(config: Config) -> Axes:
    """Return the inputs of Krea 2: those of FLUX.1, with the hidden states of several layers for each token of text."""
    inputs = dict(_flux_inputs({**config, "joint_attention_dim": 0, "guidance_embeds": False}, axes=3, pooled=False))
    return inputs | {
        "encoder_hidden_states": ("batch", "sequence", config["num_text_layers"], config["text_hidden_dim"])
    }


QWEN_VL = "Qwen2_5_VLForConditionalGeneration"
QWEN3_VL = "Qwen3VLModel"
QWEN3 = ("Qwen3ForCausalLM", "Qwen3Model")  # with its head, which nothing reads, and without
QWENS = (*QWEN3, QWEN_VL, QWEN3_VL)
MISTRAL = "Mistral3ForConditionalGeneration"
LANGUAGE_MODELS = (*QWENS, MISTRAL)
# Inputs of vision-language models: lowest value, and end of those that are valid for windows of 16 places or more and
# images of 4 patches or more.
VISION_INDICES = {"position_ids": (0, 64), "image_ids": (-1, 4), "patch_ids": (0, 16), "window_ids": (-1, 4)}
TOKEN_MULTIPLE = 32  # Z-Image pads image and text to multiples of it

FAMILIES: Mapping[str, TransformerFamily] = {
    "SD3Transformer2DModel": TransformerFamily(
        inputs=_sd3_inputs,
        output=lambda config: ("batch", config["out_channels"], "height", "width"),
        max_timestep=1000,
        penultimate_states=True,
        steps=28,
        guidance=7.0,
        text_encoders={
            **dict.fromkeys(("text_encoder", "text_encoder_2"), ("CLIPTextModelWithProjection",)),
            "text_encoder_3": ("T5EncoderModel",),
        },
        optional_encoders=("text_encoder_3",),
        max_patches=lambda config: config["pos_embed_max_size"],
    ),
    "FluxTransformer2DModel": TransformerFamily(
        inputs=_flux_inputs,
        output=lambda config: ("batch", "image_sequence", config.get("out_channels") or config["in_channels"]),
        steps=28,
        guidance=3.5,
        text_encoders={"text_encoder": ("CLIPTextModel",), "text_encoder_2": ("T5EncoderModel",)},
    ),
    "Flux2Transformer2DModel": TransformerFamily(
        inputs=_flux2_inputs,
        output=lambda config: ("batch", "image_sequence", config.get("out_channels") or config["in_channels"]),
        steps=50,
        guidance=4.0,
        text_encoders={"text_encoder": (QWEN3[0], MISTRAL)},  # of klein, of dev
    ),
    "ZImageTransformer2DModel": TransformerFamily(
        inputs=_z_image_inputs,
        output=lambda config: ("batch", "image_sequence", 4 * config["in_channels"]),
        penultimate_states=True,
        steps=50,
        guidance=5.0,
        text_encoders={"text_encoder": QWEN3},
        max_patches=lambda config: min(config["axes_lens"][1:]),
        unsupported=("siglip_feat_dim",),
        unguided=0.0,
    ),
    "QwenImageTransformer2DModel": TransformerFamily(
        inputs=_qwen_image_inputs,
        output=lambda config: (
            "batch", "image_sequence", config["patch_size"] ** 2 * (config.get("out_channels") or config["in_channels"])
        ),
        steps=50,
        guidance=4.0,
        text_encoders={"text_encoder": (QWEN_VL,)},
        unsupported=("use_additional_t_cond", "use_layer3d_rope", "guidance_embeds"),
    ),
    "Krea2Transformer2DModel": TransformerFamily(
        inputs=_krea2_inputs,
        output=lambda config: ("batch", "image_sequence", config["in_channels"]),
        steps=28,
        guidance=4.5,
        text_encoders={"text_encoder": (QWEN3_VL,)},
        unguided=0.0,
    ),
}  # fmt: skip


def encoder_mismatch(index: Config) -> str | None:
    """Return a phrase on the first text encoder of a model_index.json that its transformer cannot use, or None."""
    family = FAMILIES[index["transformer"][1]]
    for name, expected in family.text_encoders.items():
        class_name = (index.get(name) or (None, None))[1]
        if class_name not in expected and not (class_name is None and name in family.optional_encoders):
            what = f"a {name} of class {class_name}" if class_name else f"no {name}"
            return f"has {what}, but its {index['transformer'][1]} needs a {expected[0]}"
    return None


def unsupported_setting(config: Config) -> str | None:
    """Return a setting of a transformer's config that names a model without a pipeline here, or None."""
    family = FAMILIES[str(config["_class_name"])]
    return next((name for name in family.unsupported if config.get(name)), None)


def synthetic_values(config: Config, name: str, random: np.random.Generator, shape: list[int]) -> np.ndarray | None:
    """Return values of an input that are not normal noise, with the distribution of the pipeline; else None.

    None also for the config of another model, apart from indices of vision-language models. Text ids are random as
    well, since those of the pipelines are zeros, for which rotary embeddings have no effect.
    """
    if "vision_config" in config:
        lowest_and_size = VISION_INDICES.get(name)
        return None if lowest_and_size is None else random.integers(*lowest_and_size, shape).astype(np.float64)
    family = FAMILIES.get(str(config.get("_class_name")))
    if family is None:
        return None
    if name == "timestep":
        return random.uniform(0, family.max_timestep, shape)
    if name == "guidance":
        return random.uniform(1, 5, shape)
    if name == "encoder_hidden_states_mask":
        return (np.arange(shape[1]) < random.integers(1, shape[1] + 1, (shape[0], 1))).astype(np.float64)
    return random.integers(0, 64, shape).astype(np.float64) if name in ("img_ids", "txt_ids") else None
