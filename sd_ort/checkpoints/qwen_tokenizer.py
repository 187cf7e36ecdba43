"""Qwen2 tokenizer of a pipeline folder."""

from __future__ import annotations

from pathlib import Path

from sd_ort.checkpoints.chat_tokenizer import ChatTokenizer
from sd_ort.core.errors import InputError

# Qwen3's chat of one message of the user, as diffusers asks for it: Z-Image lets the answer begin with thinking, FLUX.2
# klein without.
THINKING_CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
CHAT = f"{THINKING_CHAT}<think>\n\n</think>\n\n"


class QwenTokenizer(ChatTokenizer):
    """Prompt -> token ids of a chat with this one message, padded on the right."""

    MODEL = "Qwen"
    TOKENS: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

    def __init__(self, folder: Path, chat: str = CHAT, reads_padding: bool = True) -> None:
        """Raises InputError for a folder that holds no tokenizer.json of a Qwen tokenizer.

        reads_padding: whether the model reads the padding, which then has to be on the right.
        """
        super().__init__(folder, chat)
        if reads_padding and self.padding_side not in (None, "right"):
            raise InputError(
                f"{folder / 'tokenizer_config.json'} pads on the {self.padding_side}: transformers read prompts that "
                "are padded on the right."
            )
