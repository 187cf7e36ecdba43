"""Providers in a shared library of their own: what is none is refused; one that ONNX Runtime drops is an error."""

from __future__ import annotations

import ctypes.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

from sd_ort.core.errors import ProviderError
from sd_ort.core.pipeline_folder import MODEL
from sd_ort.runtime import providers, session


def test_missing_library(tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match="does not exist"):
        providers.check_provider(f"plugin:{tmp_path / 'libnone.so'}")


def test_library_that_is_no_provider() -> None:
    libm = next(Path("/").glob(f"lib/*/{ctypes.util.find_library('m')}"))
    with pytest.raises(ProviderError, match=r"is no plugin provider: .*CreateEpFactories"):
        providers.check_provider(f"plugin:{libm}")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that ONNX Runtime is made to believe is a provider called FakeEP."""
    path = tmp_path / "libfake.so"
    path.write_bytes(b"")
    devices: list[Any] = []
    monkeypatch.setattr(
        onnxruntime,
        "register_execution_provider_library",
        lambda name, file: devices.append(SimpleNamespace(ep_name="FakeEP")),
    )
    monkeypatch.setattr(onnxruntime, "get_ep_devices", lambda: list(devices))
    return path


def test_plugin_is_named_by_its_devices(library: Path) -> None:
    assert providers.provider_named(f"plugin:{library}").ep == "FakeEP"
    providers.check_provider(f"plugin:{library}")


def test_a_build_that_finishes_meanwhile_is_for_new_processes(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime refuses a second library of one name."""
    ours = library.with_name(providers.PROVIDER_LIBRARIES["hip"])
    library.rename(ours)
    newer = library.parent / "newer" / ours.name
    newer.parent.mkdir()
    newer.write_bytes(b"")
    monkeypatch.setattr(providers, "_registered", {})
    monkeypatch.setattr(providers, "library_path", lambda name: ours)
    providers.check_provider("hip")
    monkeypatch.setattr(providers, "library_path", lambda name: newer)
    assert providers.plugin_library("hip") == ours
    monkeypatch.setattr(providers, "_registered", {})
    assert providers.plugin_library("hip") == newer


def test_dropped_plugin_is_an_error(library: Path, small_export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "SessionOptions", _Options)
    with pytest.raises(ProviderError, match=r"dropped the plugin:.*provider and would run on the CPU"):
        session.create_session(small_export / "vae_decoder" / MODEL, f"plugin:{library}")


def test_plugin_without_a_device(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is registered again at the next check."""
    monkeypatch.setattr(onnxruntime, "get_ep_devices", lambda: [])
    unregistered: list[str] = []
    monkeypatch.setattr(onnxruntime, "unregister_execution_provider_library", unregistered.append)
    for count in (1, 2):
        with pytest.raises(ProviderError, match="finds no device"):
            providers.check_provider(f"plugin:{library}")
        assert unregistered == [library.name] * count


class _Options(onnxruntime.SessionOptions):
    """Options that forget the plugin, as ONNX Runtime does with a provider that takes no node."""

    def add_provider_for_devices(self, devices: list[Any], options: dict[str, str]) -> None:
        assert [device.ep_name for device in devices] == ["FakeEP"]
