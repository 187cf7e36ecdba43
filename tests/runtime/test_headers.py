"""Sources of ONNX Runtime's headers on a machine without them."""

from __future__ import annotations

import hashlib
import io
import urllib.error
from collections.abc import Callable
from pathlib import Path

import pytest

from sd_ort.runtime import headers
from sd_ort.runtime.library import BuildError

CONTENT = b"#define ORT_API_VERSION 29\n"


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], list[str]]:
    """Return a function that lets GitHub serve a content, on a machine with nothing else, and returns the addresses."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ORT_INCLUDE_DIR", raising=False)
    monkeypatch.setattr(headers, "SYSTEM_FOLDERS", ())
    monkeypatch.setattr(headers.shutil, "which", lambda name: None)
    monkeypatch.setattr(headers, "RELEASE", dict.fromkeys(headers.RELEASE, hashlib.sha256(CONTENT).hexdigest()))
    addresses: list[str] = []

    def serving(content: bytes) -> list[str]:
        def urlopen(address: str, timeout: float) -> io.BytesIO:
            addresses.append(address)
            return io.BytesIO(content)

        monkeypatch.setattr(headers.urllib.request, "urlopen", urlopen)
        return addresses

    return serving


def test_a_machine_without_npm_takes_the_release(serve: Callable[[bytes], list[str]]) -> None:
    """Those of the plugin API, once."""
    addresses = serve(CONTENT)
    folder = headers.find_headers(api=29)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == dict.fromkeys(headers.RELEASE, CONTENT)
    assert [address.rpartition("/")[2] for address in addresses] == list(headers.RELEASE)
    assert all(
        address.startswith("https://raw.githubusercontent.com/microsoft/onnxruntime/v1.29.0/") for address in addresses
    )
    assert headers.find_headers(api=29) == folder
    assert len(addresses) == 3


def test_other_files_are_refused(serve: Callable[[bytes], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    serve(b"another header")
    with pytest.raises(BuildError, match=r"GitHub: onnxruntime_c_api.h is not the file .*; npm: npm is not here"):
        headers.find_headers(api=29)

    def unreachable(address: str, timeout: float) -> io.BytesIO:
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(headers.urllib.request, "urlopen", unreachable)
    with pytest.raises(BuildError, match=r"GitHub: no network; npm: npm is not here.*give --headers"):
        headers.find_headers(api=29)
