"""What tests of our execution provider share."""

from __future__ import annotations

import os

import pytest

from sd_ort.runtime import build, provider_table
from sd_ort.runtime.library import PROVIDER_LIBRARIES, library_path


@pytest.fixture(scope="session")
def provider() -> str:
    """The host's build, or the one that scripts/checks/sanitize_provider.py tests."""
    if tested := os.environ.get("SD_ORT_TESTED_PROVIDER"):
        return f"plugin:{tested}"
    build.build(cpu=True, provider=True)
    # The newest of these sources, as `sdcuda` by name takes it: a process registers one library of a name.
    return f"plugin:{library_path(PROVIDER_LIBRARIES['simulated'])}"


@pytest.fixture
def by_name(provider: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """`sdcuda`, whose devices are the host's here."""
    monkeypatch.setitem(provider_table.PROVIDERS, "sdcuda", provider_table.OURS["SdOrtSimulated"])
    return "sdcuda"
