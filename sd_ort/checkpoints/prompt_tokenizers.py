"""Tokenizers of T5, Qwen and Mistral, by the small `tokenizers` library: importing transformers takes seconds.

Qwen and Mistral read a chat of one message, the prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sd_ort.core.errors import InputError, first_line
from sd_ort.core.files import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger("sd_ort")

# Qwen3's chat of one message of the user, as diffusers asks for it: Z-Image lets the answer begin with thinking, FLUX.2
# klein without.
THINKING_CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
QWEN_CHAT = f"{THINKING_CHAT}<think>\n\n</think>\n\n"
IMAGE_TOKEN = "[IMG]"
# The chat that FLUX.2 dev was trained with, as diffusers asks for it.
SYSTEM_MESSAGE = (
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object "
    "relationships, object\nattribution and actions without speculation."
)
MISTRAL_CHAT = f"<s>[SYSTEM_PROMPT]{SYSTEM_MESSAGE}[/SYSTEM_PROMPT][INST]{{}}[/INST]"


def open_tokenizer(folder: Path, model: str, tokens: Sequence[str]) -> tuple[Tokenizer, list[int]]:
    """Return the tokenizer of a folder, which neither cuts nor pads, and the ids of `tokens`.

    Raises InputError without a tokenizer.json, and for one that lacks a token, so that it is not of `model`.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"{folder} holds no tokenizer.json: save its {model} tokenizer with transformers again.")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exceptions
        raise InputError(f"{path} is damaged ({first_line(error)}): get it again.") from error
    ids = {token: tokenizer.token_to_id(token) for token in tokens}
    if missing := [token for token, number in ids.items() if number is None]:
        raise InputError(f"{path} is of no {model} tokenizer: it lacks the token {missing[0]}.")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, [number for number in ids.values() if number is not None]


class T5Tokenizer:
    """Text -> token ids with an end token, padded."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError for a folder that holds no tokenizer.json of a T5 tokenizer."""
        self._rules, (self.pad_token_id, self.eos_token_id) = open_tokenizer(folder, "T5", ("<pad>", "</s>"))

    def token_ids(self, prompts: Sequence[str], length: int) -> np.ndarray:
        """Return token ids (B, length), int64; log that the end of a longer prompt is cut."""
        rows = np.full((len(prompts), length), self.pad_token_id, np.int64)
        encodings = self._rules.encode_batch(list(prompts), add_special_tokens=False)
        for row, prompt, encoding in zip(rows, prompts, encodings, strict=True):
            ids = encoding.ids
            if len(ids) >= length:
                log.warning("the prompt %r… is cut after %d of %d T5 tokens.", prompt[:40], length - 1, len(ids))
            ids = [*ids[: length - 1], self.eos_token_id]
            row[: len(ids)] = ids
        return rows


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
        return self._rules.encode(text, add_special_tokens=False).ids

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


class QwenTokenizer(ChatTokenizer):
    """Prompt -> token ids of a chat with this one message, padded on the right."""

    MODEL = "Qwen"
    TOKENS: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

    def __init__(self, folder: Path, chat: str = QWEN_CHAT, reads_padding: bool = True) -> None:
        """Raises InputError for a folder that holds no tokenizer.json of a Qwen tokenizer.

        reads_padding: whether the model reads the padding, which then has to be on the right.
        """
        super().__init__(folder, chat)
        if reads_padding and self.padding_side not in (None, "right"):
            raise InputError(
                f"{folder / 'tokenizer_config.json'} pads on the {self.padding_side}: transformers read prompts that "
                "are padded on the right."
            )


class MistralTokenizer(ChatTokenizer):
    """Prompt -> token ids of a chat with this one message, padded on the side that the folder names."""

    MODEL = "Mistral"
    TOKENS = ("<pad>", "<s>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]")

    def __init__(self, folder: Path) -> None:
        """Raises InputError for a folder that holds no tokenizer.json of a Mistral tokenizer."""
        super().__init__(folder, MISTRAL_CHAT)
        self.pads_left = self.padding_side == "left"

    def encode(self, prompts: Sequence[str], length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids and attention mask (B, length), int64, like diffusers; image tokens are not supported."""
        return super().encode([prompt.replace(IMAGE_TOKEN, "") for prompt in prompts], length)
