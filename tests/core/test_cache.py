"""The cache folder, where it cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from sd_ort.core import cache
from sd_ort.core.errors import InputError
from sd_ort.export import templates
from sd_ort.runtime import library


def test_a_cache_that_cannot_be_reached_is_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that no file system takes stands for a folder that may not be entered: root, who may, runs tests too."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/" + "x" * 300)
    with pytest.raises(OSError, match="too long"):
        cache.cache_folder().is_file()
    cache.write_cached("kind/key", b"kept")
    assert cache.cached_file("kind/key") is None
    assert cache.list_files(cache.cache_folder(), "*") == []
    assert templates.find_template("0123456789abcdef") is None
    library.library_path()


def test_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(InputError, match="set HOME"):
        cache.cache_folder()
