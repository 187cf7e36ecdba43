"""Prompts with weights, in the syntax of the WebUIs.

    (word)       counts 1.1 times           [word]       1 / 1.1 times
    (word:1.3)   counts 1.3 times           \\(  \\[       the characters themselves
    BREAK        begins a new chunk of tokens

Prompts longer than an encoder's 75 tokens are cut into chunks of 75, which are encoded one by one and concatenated. A
weight multiplies its tokens' embeddings; the chunk is then scaled to its former mean. A prompt without weights that
fits into one chunk has the embeddings that it has without this syntax, to the byte.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ROUND, SQUARE = 1.1, 1 / 1.1
BREAK = re.compile(r"\s*\bBREAK\b\s*")
TOKEN = re.compile(
    r"\\(?P<escaped>[\\()\[\]])|(?P<open>[(\[])|:\s*(?P<weight>[+-]?(?:\d+\.?\d*|\.\d+))\s*\)|(?P<close>[)\]])"
    r"|(?P<text>[^\\()\[\]:]+|.)",
    re.DOTALL,
)


@dataclass
class Chunk:
    """Input of a run of a text encoder: token ids and weights, both (length,); start, end and padding have weight 1."""

    ids: np.ndarray
    weights: np.ndarray


def parse(prompt: str) -> list[tuple[str, float]]:
    """Return the fragments of a prompt with their weights, neighbors of equal weight joined.

    A bracket that is never closed ends with the prompt. A closing bracket without an opening one is a character.
    """
    parts: list[tuple[str, float]] = []
    opened: list[tuple[str, int]] = []

    def weigh(begin: int, weight: float) -> None:
        parts[begin:] = [(text, before * weight) for text, before in parts[begin:]]

    for match in TOKEN.finditer(prompt):
        kind, text = str(match.lastgroup), match[0]
        if kind == "open":
            opened.append((text, len(parts)))
        elif kind == "weight" and opened and opened[-1][0] == "(":
            weigh(opened.pop()[1], float(match["weight"]))
        elif kind == "close" and opened and opened[-1][0] == {")": "(", "]": "["}[text]:
            weigh(opened.pop()[1], ROUND if text == ")" else SQUARE)
        else:
            parts.append((match["escaped"] or text, 1.0))
    for bracket, begin in opened:
        weigh(begin, ROUND if bracket == "(" else SQUARE)
    joined: list[tuple[str, float]] = []
    for text, weight in parts:
        if joined and joined[-1][1] == weight:
            joined[-1] = joined[-1][0] + text, weight
        else:
            joined.append((text, weight))
    return joined


def chunks(tokenizer: Any, prompt: str, length: int) -> list[Chunk]:
    """Return a prompt as one or more runs of an encoder of `length` tokens, marks included."""
    sections: list[list[tuple[int, float]]] = [[]]
    for text, weight in parse(prompt):
        first, *later = BREAK.split(text)
        for part in (first, *(part for section in later for part in (None, section))):
            if part is None:
                sections.append([])
            else:
                ids = tokenizer.ids([part], special=False)[0] if part else []
                sections[-1] += [(token, weight) for token in ids]
    room = length - 2
    return [
        chunk(tokenizer, section[start : start + room], length)
        for section in sections
        for start in range(0, max(1, len(section)), room)
    ]


def chunk(tokenizer: Any, tokens: Sequence[tuple[int, float]], length: int) -> Chunk:
    """Return at most `length` - 2 tokens between the marks, padded as the tokenizer pads."""
    padding = length - 2 - len(tokens)
    ids = [tokenizer.bos_token_id, *(token for token, _ in tokens), tokenizer.eos_token_id]
    weights = [1.0, *(weight for _, weight in tokens), 1.0]
    return Chunk(
        np.array(ids + [tokenizer.pad_token_id] * padding, np.int64), np.array(weights + [1.0] * padding, np.float32)
    )


def apply_token_weights(hidden: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return embeddings (N, S, C) of N chunks, float32, times the weights (N, S) of their tokens.

    Each chunk is scaled to its former mean. Chunks without weights are unchanged.
    """
    weighted = hidden.copy()
    for row in np.flatnonzero((weights != 1).any(1)):
        weighted[row] *= weights[row][:, None]
        weighted[row] *= hidden[row].mean() / weighted[row].mean()
    return weighted
