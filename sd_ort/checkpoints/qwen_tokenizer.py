"""Qwen2 tokenizer of a pipeline folder, by the small `tokenizers` library: importing transformers takes seconds."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sd_ort.checkpoints.tokenizer_file import open_tokenizer
from sd_ort.core.errors import InputError
from sd_ort.core.files import read_json

log = logging.getLogger("sd_ort")

# Qwen3's chat of one message of the user, as diffusers asks for it: Z-Image lets the answer begin with thinking, FLUX.2
# klein without.
THINKING_CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
CHAT = f"{THINKING_CHAT}<think>\n\n</think>\n\n"
PADDING = "<|endoftext|>"


class QwenTokenizer:
    """Prompt -> token ids of a chat with this one message, padded on the right."""

    def __init__(self, folder: Path, chat: str = CHAT, reads_padding: bool = True) -> None:
        """Raises InputError for a folder that holds no tokenizer.json of a Qwen tokenizer.

        chat: what the tokens are of; `{}` stands for the prompt. reads_padding: whether the model reads the padding,
        which then has to be on the right.
        """
        self.chat = chat
        tokens = (PADDING, "<|im_start|>", "<|im_end|>")
        self._rules, (self.pad_token_id, *_) = open_tokenizer(folder, "Qwen", tokens)
        settings = folder / "tokenizer_config.json"
        padding = read_json(settings, root=folder.parent).get("padding_side") if settings.is_file() else None
        if reads_padding and padding not in (None, "right"):
            raise InputError(
                f"{settings} pads on the {padding}: transformers read prompts that are padded on the right."
            )

    def tokens(self, text: str) -> list[int]:
        """Return the token ids of a text, which may have special tokens."""
        ids: list[int] = self._rules.encode(text, add_special_tokens=False).ids
        return ids

    def encode(self, prompts: Sequence[str], length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids and attention mask (B, length), int64; log that the end of a longer prompt is cut."""
        rows = np.full((len(prompts), length), self.pad_token_id, np.int64)
        mask = np.zeros_like(rows)
        encodings = self._rules.encode_batch(
            [self.chat.replace("{}", prompt) for prompt in prompts], add_special_tokens=False
        )
        for row, filled, prompt, encoding in zip(rows, mask, prompts, encodings, strict=True):
            if len(encoding.ids) > length:
                log.warning(
                    "the prompt %r… is cut: with its chat it has %d tokens, and the model takes %d.",
                    prompt[:40], len(encoding.ids), length,
                )  # fmt: skip
            ids = encoding.ids[:length]
            row[: len(ids)] = ids
            filled[: len(ids)] = 1
        return rows, mask
