"""What a check of a host found, as JSON and as a page to read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from sd_ort.core.files import write_text
from sd_ort.runtime import machine


def report(title: str, command: str, found: dict[str, Any], out: Path | None, **about: Any) -> None:
    """Show `found` with machine, versions and commit; with `out`, a .json, write it there and a .md beside it.

    `about`: settings of the run, for its head. `command`: what makes these files.
    """
    head = {"machine": machine.machine(), "versions": machine.versions(), "commit": machine.commit(), **about}
    text = json.dumps({**head, **found}, indent=1)
    click.echo(text)
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, text + "\n")
    lines = [f"# {title}", "", f"By `{command}`.", "", *_table(head), "", *_table(found)]
    write_text(out.with_suffix(".md"), "\n".join(lines) + "\n")


def _table(values: dict[str, Any]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in _rows(values, ""))]


def _rows(values: dict[str, Any], above: str) -> Iterator[tuple[str, str]]:
    """Names, with those they lie in, and values as text."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _rows(value, f"{above}{name}: ")
        else:
            shown = ", ".join(map(str, value)) or "none" if isinstance(value, list) else value
            yield f"{above}{name}", str(shown).replace("|", "\\|")
