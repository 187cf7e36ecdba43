"""JSON files: values of a row are on one line, and reading returns the written value."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sd_ort.core.files import JSON_COLUMNS, json_bytes

ROW = {"name": "a" * 50, "values": [0.5, 1e-7, None], "ready": True}


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        (1, 1), ([], 1), ({}, 1), (ROW, 1), ([ROW] * 10, 12), ({"rows": [ROW] * 10, "count": 10}, 15),
        (list(range(1000)), 2 + -(-sum(len(f"{i}, ") for i in range(1000)) // JSON_COLUMNS)),
        ({1: "x" * 150, 2: "x" * 150, False: None}, 4), ({"é\n": ("y" * 300,), None: [[1] * 90] * 2}, 15),
    ],
)  # fmt: skip
def test_json(value: Any, lines: int) -> None:
    text = json_bytes(value).decode()
    assert json.loads(text) == json.loads(json.dumps(value))
    assert text.count("\n") == lines
    assert all(len(line) <= JSON_COLUMNS for line in text.splitlines() if "y" not in line)
