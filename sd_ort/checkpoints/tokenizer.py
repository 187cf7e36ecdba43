"""CLIP tokenizers. transformers converts a folder's tokenizer once; later processes load the cached result with the
small `tokenizers` library, since importing transformers takes seconds, longer than an image on a GPU.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sd_ort.core.cache import keep, kept
from sd_ort.core.errors import InputError, first_line
from sd_ort.core.files import read_json

FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json",
         "added_tokens.json")  # fmt: skip


class ClipTokenizer:
    """A folder's CLIP tokenizer: text -> token ids with start and end token.

    Other attributes are those of transformers' tokenizer, `hf_tokenizer`. It is loaded at the first use, and used from
    then on, since a caller may modify it.
    """

    def __init__(self, folder: Path) -> None:
        """Raises InputError for a folder without CLIP tokenizer."""
        self.folder = folder
        self._hf_tokenizer: Any = None
        if not ((folder / FILES[0]).is_file() or all((folder / name).is_file() for name in FILES[1:3])):
            # transformers would create an empty tokenizer.
            raise InputError(f"{folder} holds no CLIP tokenizer, {FILES[0]} is missing: export the pipeline again.")
        digest = hashlib.sha256(f"{version('transformers')} {version('tokenizers')}".encode())
        for path in (folder / name for name in FILES):
            if path.is_file():
                digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
        name = f"tokenizers/{digest.hexdigest()[:20]}.json"
        if (cached := kept(name)) is None:
            keep(name, json.dumps(_serializable(self.hf_tokenizer)).encode())
            return
        from tokenizers import Tokenizer

        content = read_json(cached)
        self.model_max_length: int = content["model_max_length"]
        self.pad_token_id: int = content["pad_token_id"]
        self._tokenizer = Tokenizer.from_str(content["rules"])

    @property
    def hf_tokenizer(self) -> Any:
        """The tokenizer of transformers."""
        if self._hf_tokenizer is None:
            self._hf_tokenizer = load_hf_tokenizer(self.folder)
        return self._hf_tokenizer

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the tokenizer of transformers."""
        return self.hf_tokenizer(*arguments, **options)

    def __len__(self) -> int:
        return len(self.hf_tokenizer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.hf_tokenizer, name)

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, not truncated."""
        if self._hf_tokenizer is not None:
            return [list(ids) for ids in self._hf_tokenizer(list(texts), verbose=False).input_ids]
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]


def load_hf_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of transformers in a folder. Raises InputError if there is none."""
    from transformers import CLIPTokenizer

    try:
        return CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers and its Rust library raise various errors
        reason = f"{folder} holds no CLIP tokenizer ({first_line(error)}): export the pipeline again."
        raise InputError(reason) from error


def _serializable(tokenizer: Any) -> dict[str, Any]:
    limits = {"model_max_length": tokenizer.model_max_length, "pad_token_id": tokenizer.pad_token_id}
    return {"rules": tokenizer.backend_tokenizer.to_str(), **limits}
