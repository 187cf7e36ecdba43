"""Textual inversion: words that a file teaches the text encoders (Gal et al., 2022).

    formats   {"<word>": (n, C)} as diffusers saves it, {"emb_params": (n, C)} of the WebUIs, whose word is emb_params
              too unless a token is given, as in diffusers, and for SDXL {"clip_l": (n, C), "clip_g": (n, C')};
              .safetensors, or a dict of tensors, {"string_to_param": {"*": (n, C)}, "name": "<word>"} too

A word of n vectors is n tokens: word, word_1, ..., word_n-1, and stands for all of them in a prompt. In the graph,
token ids behind the vocabulary read the new rows (`graphs.text_encoder`); the table on disk stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.core.files import parsing
from sd_ort.core.safetensors_file import read_float32

UNNAMED = ("clip_l", "clip_g")
ENCODER_OF = {"clip_l": "text_encoder", "clip_g": "text_encoder_2"}


@dataclass
class LearnedTokens:
    """Textual inversion tokens of one text encoder.

    first: id of the first new token. counts: number of vectors by word. rows: embeddings (n, C), float32.
    """

    first: int
    counts: dict[str, int] = field(default_factory=dict)
    rows: list[np.ndarray] = field(default_factory=list)

    @property
    def table(self) -> np.ndarray:
        return np.concatenate(self.rows)

    def spelled_out(self, prompt: str) -> str:
        """Return the prompt with each word of several vectors followed by the names of its other vectors."""
        for word, count in self.counts.items():
            if count > 1:
                names = " ".join([word, *(f"{word}_{i}" for i in range(1, count))])
                prompt = names.join(re.split(rf"{re.escape(word)}(?!_\d)", prompt))
        return prompt


def read(
    source: Any, token: str | None, widths: Mapping[str, int], encoder: str | None
) -> dict[str, tuple[str, np.ndarray]]:
    """Return word and rows (n, C) by text encoder of an embedding, a .safetensors file or a dict of tensors.

    `token`: the word; None for the one in the file, or the file's name. `widths`: C of each text encoder. `encoder`:
    its text encoder, None to choose one by name or width. Raises InputError for a file that is no embedding, or that is
    for another model.
    """
    with parsing("the dict" if isinstance(source, Mapping) else source, "an embedding"):
        return _read(source, token, widths, encoder)


def _read(
    source: Any, token: str | None, widths: Mapping[str, int], encoder: str | None
) -> dict[str, tuple[str, np.ndarray]]:
    tensors, described = _tensors(source)
    words: dict[str, tuple[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        rows = np.asarray(tensor, np.float32)
        rows = rows[None] if rows.ndim == 1 else rows
        fitting = [name for name, width in widths.items() if rows.ndim == 2 and rows.shape[1] == width]
        target = encoder or ENCODER_OF.get(name) or (fitting[0] if fitting else None)
        if rows.ndim != 2 or not rows.size or len(tensors) > len(ENCODER_OF):
            raise InputError(f"{described} is no embedding of textual inversion.")
        if target not in fitting:
            raise InputError(
                f"{described} was made for another model: its rows are {rows.shape[1]} wide, and the text encoders "
                f"take {', '.join(map(str, widths.values()))}."
            )
        if not np.isfinite(rows).all():
            raise InputError(f"{described} has numbers that are not finite: get it again.")
        word = token or (name if name not in UNNAMED else Path(described).stem)
        words[str(target)] = (word, rows)
    if not words:
        raise InputError(f"{described} is empty: get it again.")
    return words


def learn(tokenizer: Any, words: LearnedTokens | None, word: str, rows: np.ndarray) -> LearnedTokens:
    """Add a word to `words` and to the tokenizer. Raises InputError if the word exists."""
    words = words or LearnedTokens(len(tokenizer))
    names = [word, *(f"{word}_{i}" for i in range(1, len(rows)))]
    if not isinstance(word, str) or not word.strip() or any(name in tokenizer.get_vocab() for name in names):
        raise InputError(f"{word!r} is a word of this model already: give another token.")
    tokenizer.add_tokens(names)
    words.counts[word] = len(rows)
    words.rows.append(rows)
    return words


def _tensors(source: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    if isinstance(source, Mapping):
        if "string_to_param" in source:  # the WebUIs' pickles, once read
            source = {str(source.get("name", "*")): source["string_to_param"]["*"]}
        return {n: t.detach().float().cpu().numpy() if hasattr(t, "cpu") else t for n, t in source.items()}, "the dict"
    path = Path(source)
    if path.suffix != ".safetensors":
        raise InputError(
            f"{path} is no .safetensors file: embeddings are read from those alone, pickles (.pt, .bin) can run code."
        )
    return dict(read_float32(path)[0]), str(path)


def file_word(path: str | Path) -> str | None:
    """Return the file's name as the word of a WebUI's embedding, which has none; None for one with a word."""
    return Path(path).stem if list(_tensors(path)[0]) == ["emb_params"] else None
