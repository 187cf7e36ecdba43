#!/usr/bin/env python3
"""The page of `sd-ort serve` in Chromium, used by keyboard alone, with a screenshot.

    python scripts/checks/serve_page.py FOLDER [--lora FILE ...] [--compare NAME=FOLDER ...] [--out docs/serve_page.png]

Needs `pip install 'sd-ort[cpu,ray]' playwright` and a Chromium of this machine. The prompt is typed and sent with
Ctrl+Enter. The second image is made by Tab, Enter and the arrow keys alone: the seed of the first one, a LoRA at
another scale. The exit code is 1 if an image is missing, the page asks another host for anything, or it logs an error.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts.checks.browser import free_port, opened

TABS = 40  # more than the page has elements to focus


def focus(page: Any, selector: str) -> None:
    """Press Tab until the element has the focus."""
    for _ in range(TABS):
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"{selector} cannot be reached by keyboard")


def use(page: Any, out: Path, pipelines: int) -> None:
    """Make two images with each pipeline without a mouse, and take the screenshot."""
    page.wait_for_function("document.forms[0].steps.value !== ''")
    focus(page, "[name=prompt]")
    page.keyboard.type("a red circle on a blue background")
    focus(page, "[name=steps]")
    page.keyboard.press("Control+A")
    page.keyboard.type("8")
    focus(page, "[name=seed]")
    page.keyboard.type("1")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"#images li:nth-child({pipelines}) img", timeout=120_000)
    page.wait_for_function("!document.getElementById('generate').hasAttribute('aria-disabled')")
    focus(page, "#images button")
    page.keyboard.press("Enter")  # keeps the seed
    if page.query_selector("#loras input"):
        focus(page, "#loras input")
        page.keyboard.press("Control+A")
        page.keyboard.type("0")
    focus(page, "[name=prompt]")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(f"#images li:nth-child({2 * pipelines}) img", timeout=120_000)
    page.wait_for_function("!document.getElementById('generate').hasAttribute('aria-disabled')")
    page.screenshot(path=str(out), full_page=True)


def watch(page: Any, address: str, problems: list[str]) -> None:
    """Record errors of a page, and requests to others than `address`."""

    def request(sent: Any) -> None:
        if not sent.url.startswith((address, "data:")):
            problems.append(sent.url)

    def console(message: Any) -> None:
        if message.type == "error":
            problems.append(message.text)

    page.on("request", request)
    page.on("console", console)
    page.on("pageerror", lambda error: problems.append(str(error)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--lora", nargs="*", default=[])
    parser.add_argument("--compare", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=Path("docs/serve_page.png"))
    options = parser.parse_args()
    port, loras = free_port(), [word for file in options.lora for word in ("--lora", file)]
    variants = [word for variant in options.compare for word in ("--compare", variant)]
    command = [sys.executable, "-m", "sd_ort", "serve", options.folder, "--port", port, "--provider", "cpu"]
    command += [*loras, *variants]
    problems: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[-1]
            with opened("about:blank", 1000, 900, 600) as page:
                watch(page, address, problems)
                page.goto(address)
                use(page, options.out, 1 + len(options.compare))
        finally:
            server.terminate()
    print("\n".join(problems) or f"{options.out}: two images of each pipeline by keyboard, no other host, no error")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
