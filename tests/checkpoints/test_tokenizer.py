"""The CLIP tokenizer by `tokenizers` alone is transformers', for every kind of folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import CLIPTokenizer

from sd_ort.checkpoints.conditioning import token_ids
from sd_ort.checkpoints.tokenizer import ClipTokenizer
from sd_ort.core.errors import InputError
from sd_ort.demo import MODEL_DIR

PROMPTS = ["", "a red circle", "A  Red\tCIRCLE's — naïve ß 東京 🙂 <|endoftext|> x", "word " * 100, "é é it's 2³ !x!"]
FLAGS = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
START, END = "<|startoftext|>", "<|endoftext|>"
# Of folders of Stable Diffusion 1.5, 2 and XL, and one with added tokens.
FOLDERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"tokenizer_config.json": {"pad_token": "!"}},
    "declared": {
        "tokenizer_config.json": {
            "pad_token": "!",
            "bos_token": {"__type": "AddedToken", "content": START, **FLAGS},
            "added_tokens_decoder": {
                "0": {"content": "!", **FLAGS, "normalized": False, "special": True},
                "619": {"content": START, **FLAGS, "special": True},
            },
        }
    },
    "1.5": {
        "special_tokens_map.json": {
            "bos_token": {"content": START, **FLAGS},
            "eos_token": {"content": END, **FLAGS},
            "pad_token": END,
            "unk_token": {"content": END, **FLAGS},
        }
    },
    "map": {
        "special_tokens_map.json": {"bos_token": {"content": START, **FLAGS}, "unk_token": {"content": END, **FLAGS}},
        "added_tokens.json": {"<foo>": 1050},
    },
}


@pytest.fixture(params=FOLDERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    copy = tmp_path / "tokenizer"
    shutil.copytree(MODEL_DIR / "tokenizer", copy)
    for name, entries in FOLDERS[request.param].items():
        path = copy / name
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**before, **entries}))
    return copy


@pytest.mark.parametrize("saved", [False, True], ids=["vocab.json", "tokenizer.json"])
def test_as_transformers(folder: Path, saved: bool) -> None:
    if saved:
        CLIPTokenizer.from_pretrained(folder).save_pretrained(folder.parent / "saved")
        folder = folder.parent / "saved"
    ours, theirs = ClipTokenizer(folder), CLIPTokenizer.from_pretrained(folder)
    assert json.loads(ours._rules.to_str()) == json.loads(theirs.backend_tokenizer.to_str())
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "model_max_length"):
        assert getattr(ours, name) == getattr(theirs, name)
    expected = theirs(PROMPTS, padding="max_length", max_length=77, truncation=True, return_tensors="np").input_ids
    np.testing.assert_array_equal(token_ids(ours, PROMPTS, 77), expected)
    assert ours.ids(PROMPTS, special=False) == theirs(PROMPTS, add_special_tokens=False, verbose=False).input_ids
    for ids in ours.ids(PROMPTS):
        assert ours.decode(ids) == theirs.decode(ids)


def test_added_tokens_are_those_of_transformers_too(folder: Path) -> None:
    ours, theirs = ClipTokenizer(folder), CLIPTokenizer.from_pretrained(folder)
    assert ours.add_tokens(["<cat>", "<cat>_1"]) == theirs.add_tokens(["<cat>", "<cat>_1"]) == 2
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    text = ["a <cat><cat>_1 on a mat"]
    assert ours.ids(text) == theirs(text).input_ids
    assert ours.tokenize(text[0]) == theirs.tokenize(text[0])  # of transformers' tokenizer, which takes over
    ours.add_tokens(["<dog>"])
    assert ours.ids(["<dog>"])[0][1] == len(ours) - 1


@pytest.mark.parametrize("damage", ["{", "[]", '{"a": "b"}'])
def test_damaged_files(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(MODEL_DIR / "tokenizer", folder)
    (folder / "vocab.json").write_text(damage)
    with pytest.raises(InputError):
        ClipTokenizer(folder)
    (folder / "vocab.json").unlink()
    with pytest.raises(InputError, match="holds no CLIP tokenizer"):
        ClipTokenizer(folder)
