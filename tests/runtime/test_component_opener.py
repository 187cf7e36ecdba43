"""Components whose sessions cannot be opened: with GPU graphs, or at all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sd_ort.core.errors import InputError
from sd_ort.runtime import component_opener
from sd_ort.runtime.component_opener import ComponentOpener
from sd_ort.runtime.session import ModelOverride
from sd_ort.runtime.session_device import SessionDevice


@pytest.mark.parametrize("only_graphs", [True, False])
def test_a_failed_capture_is_reported_if_the_component_opens_without(
    only_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged tuning file or a rejected model has nothing to do with graphs: its message comes once, as an error."""
    reports: list[Any] = []

    def session(opener: ComponentOpener, name: str, override: ModelOverride, capture: bool = False, **_: Any) -> str:
        if capture or not only_graphs:
            raise InputError(f"{name} is damaged")
        return "session"

    monkeypatch.setattr(ComponentOpener, "session", session)
    monkeypatch.setattr(component_opener, "report_failed_capture", reports.append)
    monkeypatch.setattr(component_opener, "OrtModel", lambda opened, lock: opened)
    target = SimpleNamespace(name="hip", lock=None)
    opener = ComponentOpener(cast(Any, Path()), cast(SessionDevice, target))
    if only_graphs:
        assert cast(Any, opener.open("unet", ModelOverride())) == "session"
        assert [str(report) for report in reports] == ["unet is damaged"]
    else:
        with pytest.raises(InputError, match="unet is damaged"):
            opener.open("unet", ModelOverride())
        assert reports == []
