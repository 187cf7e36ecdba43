"""The cache of ROCm's headers, with packages that are made here in place of Debian's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.amd import rocm_headers
from sd_ort.core.cache import cache_folder
from sd_ort.runtime.debian import DownloadError


@pytest.fixture
def debian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions of HIP by suite, which a test may change; "downloads" counts."""
    served = {"sid": "6.4.3-5", "experimental": "7.2.4-1~exp2", "downloads": ""}

    def unpack(packages: Sequence[str], suites: Sequence[str], folder: Path) -> dict[str, str]:
        if suites[0] not in served:
            raise DownloadError("apt-get update failed")
        (folder / "usr/include/hip").mkdir(parents=True)
        served["downloads"] += suites[0][0]
        return dict.fromkeys(packages, served[suites[0]])

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(rocm_headers, "unpack_packages", unpack)
    return served


def versions() -> list[str]:
    folders = rocm_headers.rocm_headers()
    assert all((folder / "hip").is_dir() for folder in folders)
    return [folder.parent.name for folder in folders]


def test_downloads_once(debian: dict[str, str]) -> None:
    assert versions() == versions() == ["6.4.3", "7.2.4"]
    assert debian["downloads"] == "se"


def test_suites_move_on(debian: dict[str, str]) -> None:
    """With --update the new versions are taken, and two suites may have one version."""
    assert versions() == ["6.4.3", "7.2.4"]
    debian |= {"sid": "7.2.4-1", "experimental": "10.1.0-1"}
    assert versions() == ["6.4.3", "7.2.4"]
    rocm_headers.rocm_headers(update=True)
    assert versions() == ["7.2.4", "10.1.0"]
    debian["experimental"] = "7.2.4-1"
    rocm_headers.rocm_headers(update=True)
    assert versions() == ["7.2.4"]


def test_a_folder_without_a_package_is_replaced(debian: dict[str, str]) -> None:
    versions()
    (cache_folder() / "rocm-headers/7.2.4/packages").write_text("libamdhip64-dev 7.2.4-1~exp2\n")
    assert versions() == ["6.4.3", "7.2.4"]
    assert debian["downloads"] == "see"


def test_failed_download_leaves_nothing(debian: dict[str, str]) -> None:
    del debian["experimental"]
    with pytest.raises(DownloadError):
        versions()
    assert {path.name for path in (cache_folder() / "rocm-headers").iterdir()} == {"6.4.3", "sid"}
