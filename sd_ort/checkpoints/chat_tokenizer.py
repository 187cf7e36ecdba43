"""Tokenizers of chats, by the small `tokenizers` library: importing transformers takes seconds."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sd_ort.checkpoints.tokenizer_file import open_tokenizer
from sd_ort.core.files import read_json

log = logging.getLogger("sd_ort")


class ChatTokenizer:
    """Prompt -> token ids of a chat with this one message, padded on one side.

    Attributes:
        MODEL: Name of the models whose tokenizer it is, for messages.
        TOKENS: Special tokens that the tokenizer must have. The first one is the padding.
        pads_left: Whether the padding precedes the chat, as the folder's settings say.
    """

    MODEL = ""
    TOKENS: tuple[str, ...] = ()
    pads_left = False

    def __init__(self, folder: Path, chat: str) -> None:
        """Raises InputError for a folder that holds no tokenizer.json of such a tokenizer.

        chat: what the tokens are of; `{}` stands for the prompt.
        """
        self.chat = chat
        self._rules, (self.pad_token_id, *_) = open_tokenizer(folder, self.MODEL, self.TOKENS)
        settings = folder / "tokenizer_config.json"
        self.padding_side = read_json(settings, root=folder.parent).get("padding_side") if settings.is_file() else None

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
            places = slice(length - len(ids), None) if self.pads_left else slice(len(ids))
            row[places] = ids
            filled[places] = 1
        return rows, mask
