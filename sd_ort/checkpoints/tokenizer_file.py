"""The reader of tokenizer.json, by the small `tokenizers` library: importing transformers takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sd_ort.core.errors import InputError, first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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
