"""Hosts' pages in a browser: a port for a server of this machine, and a page of Chromium to be photographed."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def free_port() -> str:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@contextmanager
def opened(address: str, width: int, height: int, seconds: float) -> Iterator[Any]:
    """Context manager of Playwright's page at an address; the timeout of all waits is `seconds`.

    Needs `pip install playwright` and a Chromium of this machine.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": height})
        page.set_default_timeout(1000 * seconds)
        page.goto(address)
        yield page
        browser.close()
