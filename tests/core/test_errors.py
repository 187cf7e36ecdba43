"""The first line of an error's message, and what memory that is short is called."""

from __future__ import annotations

import pytest

from sd_ort.core.errors import describe_error, first_line
from sd_ort.runtime.session import run_error


def test_first_line_has_no_color_codes() -> None:
    assert first_line(RuntimeError("\x1b[1;31m\x1b[m\n\x1b[0;93m no kernel \x1b[m\nmore")) == "no kernel"
    assert first_line(RuntimeError("\x1b[m")) == "RuntimeError"


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        ("Deserialize tensor conv.weight failed.out of device memory for a copy", "GPU memory"),
        ("CUDA failure 2: out of memory ; GPU=0", "GPU memory"),
        ("Failed to allocate memory for requested buffer of size 4096", "memory"),
    ],
)
def test_memory_that_is_short_has_advice(text: str, memory: str) -> None:
    """Where a session is opened, and where it runs."""
    advice = f"not enough {memory}: choose a smaller size or batch, --low-memory or --vae-tiling, or "
    assert describe_error(MemoryError(text)) == (describe_error(RuntimeError(text))[0], 1)
    assert describe_error(MemoryError(text))[0].startswith(advice)
    line = str(run_error(RuntimeError(text), {"sample": (2, 4, 8, 8)}))
    assert line.startswith(advice)
    assert line.endswith(f"ONNX Runtime: {text} (on sample [2, 4, 8, 8])")
    assert str(run_error(RuntimeError("wrong shape"), {})) == "ONNX Runtime failed: wrong shape (on )"
