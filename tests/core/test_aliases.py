"""Old names of arguments."""

from __future__ import annotations

import pytest

from sd_ort.core.aliases import accept_old_names


@accept_old_names(report="on_progress", keep="path")
def function(*, on_progress: int = 0, path: int = 0) -> tuple[int, int]:
    return on_progress, path


def test_old_and_new_names() -> None:
    assert function() == (0, 0)
    assert function(on_progress=1, path=2) == (1, 2)
    assert function(report=1, keep=2) == (1, 2)  # type: ignore[call-arg]
    assert function(report=1, path=2) == (1, 2)  # type: ignore[call-arg]


def test_both_names_are_an_error() -> None:
    with pytest.raises(TypeError, match=r"^function\(\) got both on_progress and its old name report: pass on_pro"):
        function(on_progress=1, report=2)  # type: ignore[call-arg]
