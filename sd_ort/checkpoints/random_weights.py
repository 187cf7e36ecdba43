"""Random weights and tokenizers without learned vocabulary, for presets, which have no checkpoint files."""

from __future__ import annotations

import json
from pathlib import Path

import torch


def fill_random(model: torch.nn.Module, seed: int) -> None:
    """Fill all parameters with random values, in place, on their device.

    Matrices and convolutions have variance 1/fan_in, so activations keep their scale; norm weights vary around 1 and
    biases around 0. All parameters differ, since exporters merge equal tensors, and no bias is zero, since tests would
    not detect that a rule omits it.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed % 2**63)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5, generator=generator)
            else:
                parameter.normal_(float(name.endswith("weight")), 0.1, generator=generator)
        for name, buffer in model.named_buffers():  # statistics of a BatchNorm
            if name.endswith(("running_mean", "running_var")):
                buffer.uniform_(0.5, 1.5, generator=generator)


def write_byte_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a CLIP tokenizer without merges: each byte is a token, with another id at the end of a word.

    Ids 0-255 are bytes, 256-511 bytes that end a word, and the last two of the vocabulary are start and end of text, as
    in CLIP.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    characters = sorted(ByteLevel.alphabet())
    tokens = [*characters, *(c + "</w>" for c in characters)]
    ids = {token: i for i, token in enumerate(tokens)}
    ids |= {"<|startoftext|>": vocabulary - 2, "<|endoftext|>": vocabulary - 1}
    CLIPTokenizer(vocab=ids, merges=[], model_max_length=77).save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps(ids, ensure_ascii=False))
    (folder / "merges.txt").write_text("#version: 0.2\n")


def write_character_tokenizer(folder: Path) -> None:
    """Write a T5 tokenizer whose tokens are the printable ASCII characters; other characters are unknown.

    Ids 0-2 are padding, end of text and unknown, as in T5; 3 starts a word.
    """
    from transformers import T5Tokenizer

    pieces = ["<pad>", "</s>", "<unk>", "\u2581", *map(chr, range(33, 127))]
    tokenizer = T5Tokenizer(vocab=[(piece, 0.0 if i < 3 else -1.0) for i, piece in enumerate(pieces)], extra_ids=0)
    tokenizer.save_pretrained(folder)


# As Qwen3's, for one message of the user. The answer of the assistant begins without thinking.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def write_chat_tokenizer(folder: Path) -> None:
    """Write a Qwen2 tokenizer without merges: each byte is a token; then the special tokens of chats and images."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    special = [f"<|{name}|>" for name in "endoftext im_start im_end vision_start vision_end image_pad".split()]
    ids = {token: i for i, token in enumerate([*sorted(ByteLevel.alphabet()), *special])}
    tokenizer = Qwen2Tokenizer(
        vocab=ids, merges=[], unk_token=special[0], pad_token=special[0], eos_token=special[2],
        additional_special_tokens=special[1:], model_max_length=131072,
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


# As Mistral Small's, for a message of the system and one of the user, each of one text.
MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set name = 'SYSTEM_PROMPT' if message.role == 'system' else 'INST' %}"
    "[{{ name }}]{{ message.content[0].text }}[/{{ name }}]{% endfor %}"
)


def write_mistral_tokenizer(folder: Path) -> None:
    """Write a Mistral tokenizer without merges, padding on the left: each byte is a token; then special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]", "[IMG]"]
    ids = {token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *special])}
    rules = Tokenizer(models.BPE(vocab=ids, merges=[]))
    rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rules.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=rules, pad_token=special[0], bos_token=special[1], eos_token=special[2],
        unk_token=special[3], additional_special_tokens=special[4:], padding_side="left", model_max_length=131072,
    )  # fmt: skip
    tokenizer.chat_template = MISTRAL_TEMPLATE
    tokenizer.save_pretrained(folder)
