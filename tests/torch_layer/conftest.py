"""Fixture of the tests that run the CPU kernels of sd_ort.torch."""

import pytest

from sd_ort.runtime import build
from sd_ort.torch import kernels


@pytest.fixture(scope="module")
def library() -> None:
    """Build the operator library, and load it anew at the next call."""
    build.build()
    kernels.reset_libraries()
