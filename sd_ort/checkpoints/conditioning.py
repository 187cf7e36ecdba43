"""Helpers for conditioning: token ids, latent scale, guidance embedding."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.checkpoints.configs import component_config
from sd_ort.checkpoints.signatures import has_packed_latents
from sd_ort.checkpoints.tokenizer import ClipTokenizer
from sd_ort.core.errors import InputError

log = logging.getLogger("sd_ort")

# Default normalization of images for CLIP's image encoders.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def latent_scale(vae_config: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return (mean, factor), (1, C or 1, 1, 1) float32: VAE latents = pipeline latents * factor + mean."""
    if has_packed_latents(vae_config):  # its graphs normalize the latents
        return np.zeros((1, 1, 1, 1), np.float32), np.ones((1, 1, 1, 1), np.float32)
    default = 1.0 if vae_config.get("z_dim") else 0.18215  # Qwen-Image's VAE has a mean and a deviation alone
    factor = np.full((1, 1, 1, 1), 1 / (vae_config.get("scaling_factor") or default))
    mean = np.full((1, 1, 1, 1), vae_config.get("shift_factor") or 0.0, np.float32)
    if vae_config.get("latents_mean") and vae_config.get("latents_std"):
        mean = mean + np.asarray(vae_config["latents_mean"], np.float32).reshape(1, -1, 1, 1)
        factor = factor * np.asarray(vae_config["latents_std"], np.float32).reshape(1, -1, 1, 1)
    return mean, factor.astype(np.float32)


def guidance_embedding(scale: float, width: int) -> np.ndarray:
    """Return the embedding (1, width) of a guidance scale for UNets that were distilled with it (LCM).

    It has sines, then cosines, of 1000 (scale - 1) at `width / 2` frequencies from 1 to 1e-4, as the positional
    encoding of transformers (Vaswani et al., 2017).
    """
    half = width // 2
    exponents = np.arange(half, dtype=np.float32) * np.float32(-math.log(1e4) / (half - 1))
    frequencies = np.exp(exponents.astype(np.float64)).astype(np.float32)
    # The UNet learned the sines of large angles with the angles rounded to float32.
    angles = (np.float32(1000 * (scale - 1)) * frequencies).astype(np.float64)
    return np.concatenate([np.sin(angles), np.cos(angles), np.zeros(width % 2)])[None].astype(np.float32)


def text_length(folder: Path, name: str, tokenizer: Any) -> int:
    """Return the number of tokens of the text encoder `name`, usually 77."""
    limit = component_config(folder, name, required=True).get("max_position_embeddings") or 77
    max_length = tokenizer.model_max_length
    length = min(max_length, limit) if isinstance(max_length, int | float) else 0
    if length < 3:
        raise InputError(f"{folder / name} takes {length} tokens, and its prompt needs 3: export the pipeline again.")
    return int(length)


def embedding_output(outputs: Iterable[str], is_sdxl: bool) -> str:
    """Return the output of a text encoder that the UNet reads: the last or, for SDXL, the penultimate hidden state.

    Optimum's SDXL encoders return all hidden states, `hidden_states.0` and on. Raises InputError for an encoder without
    these outputs.
    """
    names = list(outputs)
    states = sum(name.startswith("hidden_states.") for name in names)
    penultimate = f"hidden_states.{states - 2}" if states else "hidden_states"
    output = penultimate if is_sdxl else "last_hidden_state"
    if output not in names:
        raise InputError(f"a text encoder gives {', '.join(names)} but not {output}: export the pipeline with sd-ort.")
    return output


def text_encoders(index: dict[str, Any]) -> list[str]:
    """Return the text encoders in a model_index.json; the refiner of SDXL has only the second."""
    names = ("text_encoder", "text_encoder_2")
    return [name for name in names if (index.get(name) or [None])[0]] or ["text_encoder"]


def token_ids(tokenizer: ClipTokenizer, prompts: Sequence[str], length: int) -> np.ndarray:
    """Return token ids (B, length), int64, padded; log the end of longer prompts, which is cut."""
    rows = np.full((len(prompts), length), tokenizer.pad_token_id, np.int64)
    for row, prompt, ids in zip(rows, prompts, tokenizer.ids(prompts), strict=True):
        if len(ids) > length:  # the end token stays
            rest = tokenizer.decode(ids[length - 1 : -1])
            rest = rest if len(rest) <= 200 else rest[:200] + "…"
            log.warning("the prompt %r… is cut after %d tokens; ignored: %r", prompt[:40], length - 2, rest)
            ids = [*ids[: length - 1], ids[-1]]
        row[: len(ids)] = ids
    return rows
