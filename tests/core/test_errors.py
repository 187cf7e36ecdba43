"""The first line of an error's message."""

from __future__ import annotations

from sd_ort.core.errors import first_line


def test_first_line_has_no_color_codes() -> None:
    assert first_line(RuntimeError("\x1b[1;31m\x1b[m\n\x1b[0;93m no kernel \x1b[m\nmore")) == "no kernel"
    assert first_line(RuntimeError("\x1b[m")) == "RuntimeError"
