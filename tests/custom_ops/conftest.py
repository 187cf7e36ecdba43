"""What tests of our execution provider share."""

from __future__ import annotations

import os

import pytest

from sd_ort.runtime import build
from sd_ort.runtime.library import PROVIDER_LIBRARIES


@pytest.fixture(scope="session")
def provider() -> str:
    """The host's build, or the one that scripts/checks/sanitize_provider.py tests."""
    if tested := os.environ.get("SD_ORT_TESTED_PROVIDER"):
        return f"plugin:{tested}"
    library = build.build(cpu=True, provider=True)
    return f"plugin:{library.with_name(PROVIDER_LIBRARIES['host'])}"
