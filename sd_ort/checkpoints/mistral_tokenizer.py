"""Mistral tokenizer of a FLUX.2 dev folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sd_ort.checkpoints.chat_tokenizer import ChatTokenizer

IMAGE_TOKEN = "[IMG]"
# The chat that the transformer was trained with, as diffusers asks for it.
SYSTEM_MESSAGE = (
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object "
    "relationships, object\nattribution and actions without speculation."
)
CHAT = f"<s>[SYSTEM_PROMPT]{SYSTEM_MESSAGE}[/SYSTEM_PROMPT][INST]{{}}[/INST]"


class MistralTokenizer(ChatTokenizer):
    """Prompt -> token ids of a chat with this one message, padded on the side that the folder names."""

    MODEL = "Mistral"
    TOKENS = ("<pad>", "<s>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]")

    def __init__(self, folder: Path) -> None:
        """Raises InputError for a folder that holds no tokenizer.json of a Mistral tokenizer."""
        super().__init__(folder, CHAT)
        self.pads_left = self.padding_side == "left"

    def encode(self, prompts: Sequence[str], length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids and attention mask (B, length), int64, like diffusers; image tokens are not supported."""
        return super().encode([prompt.replace(IMAGE_TOKEN, "") for prompt in prompts], length)
