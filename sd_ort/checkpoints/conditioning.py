"""What a UNet is conditioned on: tokens, the scale of latents, embedded guidance."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.checkpoints.configs import component_config
from sd_ort.checkpoints.tokenizer import ClipTokenizer
from sd_ort.core.errors import InputError

log = logging.getLogger("sd_ort")

# Of the pixels that CLIP's image encoders see, where a folder's feature extractor says nothing else.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def latent_scale(vae_config: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """(mean, factor), (1, C or 1, 1, 1) float32: the VAE's own latents are the pipeline's times factor, plus mean."""
    factor = np.full((1, 1, 1, 1), 1 / vae_config.get("scaling_factor", 0.18215))
    mean = np.full((1, 1, 1, 1), vae_config.get("shift_factor") or 0.0, np.float32)
    if vae_config.get("latents_mean") and vae_config.get("latents_std"):
        mean = mean + np.asarray(vae_config["latents_mean"], np.float32).reshape(1, -1, 1, 1)
        factor = factor * np.asarray(vae_config["latents_std"], np.float32).reshape(1, -1, 1, 1)
    return mean, factor.astype(np.float32)


def guidance_embedding(scale: float, width: int) -> np.ndarray:
    """A guidance scale as UNets distilled with it (LCM) take it, (1, width): sines, then cosines, of
    1000 (scale - 1) at `width / 2` frequencies from 1 to 1e-4, as transformers encode positions (Vaswani et al., 2017).
    """
    import torch  # the UNet learned its sines of large angles in float32, roundings included

    half = width // 2
    angles = 1000 * (scale - 1) * torch.exp(torch.arange(half) * (-math.log(1e4) / (half - 1)))
    made: np.ndarray = torch.cat([angles.sin(), angles.cos(), torch.zeros(width % 2)])[None].numpy()
    return made


def text_length(folder: Path, name: str, tokenizer: Any) -> int:
    """Tokens the text encoder `name` takes, usually 77."""
    limit = component_config(folder, name, required=True).get("max_position_embeddings", 77)
    longest = tokenizer.model_max_length
    length = min(longest, limit) if isinstance(longest, int | float) else 0
    if length < 3:
        raise InputError(f"{folder / name} takes {length} tokens, and its prompt needs 3: export the pipeline again.")
    return int(length)


def embedding_output(outputs: Iterable[str], is_xl: bool) -> str:
    """Which output of a text encoder the UNet reads: the last hidden state or, for SDXL, that of the penultimate layer.

    Optimum's encoders of SDXL give the embeddings and all layers, `hidden_states.0` and on. Raises InputError for an
    encoder that gives none of these.
    """
    names = list(outputs)
    every = sum(name.startswith("hidden_states.") for name in names)
    penultimate = f"hidden_states.{every - 2}" if every else "hidden_states"
    wanted = penultimate if is_xl else "last_hidden_state"
    if wanted not in names:
        raise InputError(f"a text encoder gives {', '.join(names)} but not {wanted}: export the pipeline with sd-ort.")
    return wanted


def text_encoders(index: dict[str, Any]) -> list[str]:
    """The text encoders that a model_index.json names; the refiner of SDXL has the second alone."""
    names = ("text_encoder", "text_encoder_2")
    return [name for name in names if (index.get(name) or [None])[0]] or ["text_encoder"]


def token_ids(tokenizer: ClipTokenizer, prompts: Sequence[str], length: int) -> np.ndarray:
    """Token ids (B, length), int64, padded; says on the log what a longer prompt loses."""
    rows = np.full((len(prompts), length), tokenizer.pad_token_id, np.int64)
    for row, prompt, ids in zip(rows, prompts, tokenizer.ids(prompts), strict=True):
        if len(ids) > length:  # the last kept token is the end mark
            lost = tokenizer.decode(ids[length - 1 : -1])
            shown = lost if len(lost) <= 200 else lost[:200] + "…"
            log.warning("the prompt %r… is cut after %d tokens; not drawn: %r", prompt[:40], length - 2, shown)
            ids = [*ids[: length - 1], ids[-1]]
        row[: len(ids)] = ids
    return rows
