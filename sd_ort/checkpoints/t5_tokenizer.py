"""T5 tokenizer of a pipeline folder, by the small `tokenizers` library: importing transformers takes seconds."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sd_ort.checkpoints.tokenizer_file import open_tokenizer

log = logging.getLogger("sd_ort")


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
