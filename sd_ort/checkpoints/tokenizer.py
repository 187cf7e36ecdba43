"""A folder's CLIP tokenizer. transformers makes its rules, once; they are kept, and later processes need the small
`tokenizers` library alone: importing transformers takes seconds, longer than a picture on a GPU.
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
    """Text -> token ids with the start and the end mark. Every other attribute is that of transformers' tokenizer,
    `whole`, which is loaded when it is first asked for and from then on does all the work: a caller may change it."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError for a folder that holds no CLIP tokenizer."""
        self.folder = folder
        self._whole: Any = None
        if not ((folder / FILES[0]).is_file() or all((folder / name).is_file() for name in FILES[1:3])):
            # Without files transformers makes one that knows no word.
            raise InputError(f"{folder} holds no CLIP tokenizer, {FILES[0]} is missing: export the pipeline again.")
        digest = hashlib.sha256(f"{version('transformers')} {version('tokenizers')}".encode())
        for path in (folder / name for name in FILES):
            if path.is_file():
                digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
        name = f"tokenizers/{digest.hexdigest()[:20]}.json"
        if (known := kept(name)) is None:
            keep(name, json.dumps(_described(self.whole)).encode())
            return
        from tokenizers import Tokenizer

        described = read_json(known)
        self.model_max_length: int = described["model_max_length"]
        self.pad_token_id: int = described["pad_token_id"]
        self._rules = Tokenizer.from_str(described["rules"])

    @property
    def whole(self) -> Any:
        """transformers' tokenizer of the folder."""
        if self._whole is None:
            self._whole = whole_tokenizer(self.folder)
        return self._whole

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """As transformers' tokenizer."""
        return self.whole(*arguments, **options)

    def __len__(self) -> int:
        return len(self.whole)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.whole, name)

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, as many as it takes."""
        if self._whole is not None:
            return [list(ids) for ids in self._whole(list(texts), verbose=False).input_ids]
        return [encoding.ids for encoding in self._rules.encode_batch(list(texts))]


def whole_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of a folder. Raises InputError when it holds none."""
    from transformers import CLIPTokenizer

    try:
        return CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers and its Rust half each fail in their own ways
        reason = f"{folder} holds no CLIP tokenizer ({first_line(error)}): export the pipeline again."
        raise InputError(reason) from error


def _described(tokenizer: Any) -> dict[str, Any]:
    """What `ids` needs of transformers' tokenizer."""
    limits = {"model_max_length": tokenizer.model_max_length, "pad_token_id": tokenizer.pad_token_id}
    return {"rules": tokenizer.backend_tokenizer.to_str(), **limits}
