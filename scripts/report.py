"""Reports of benchmarks and checks: their head, Markdown tables, and a page beside the JSON file."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sd_ort.core.metrics import EQUAL_DB


def head(script: str) -> dict[str, Any]:
    """Return the command line, commit, machine and versions of a run of `script`."""
    from sd_ort.runtime import machine

    return {
        "command": shlex.join([script, *sys.argv[1:]]), "commit": machine.commit(),
        "machine": machine.machine(), "versions": machine.versions(),
    }  # fmt: skip


def table(names: Iterable[object], rows: Iterable[Iterable[object]], align: str = "---") -> list[str]:
    """Return the lines of a Markdown table; `align`: the rule below the columns behind the first."""
    first, *others = map(str, names)
    lines = [[first, *others], ["---", *[align] * len(others)], *rows]
    return [f"| {' | '.join(map(str, cells))} |" for cells in lines]


def save(out: Path, report: dict[str, Any], page: str | None = None) -> None:
    """Write a report to the .json file `out`, and its page to the .md file beside."""
    from sd_ort.core import files

    files.write_json(out, report)
    if page is not None:
        files.write_text(out.with_suffix(".md"), page)


def decibels(psnr: float | None) -> str:
    """Return a PSNR as a cell of a table; "equal" if no difference was measured."""
    if psnr is None:
        return ""
    return "equal" if psnr >= EQUAL_DB else f"{psnr:.1f} dB"


def save_findings(title: str, script: str, findings: dict[str, Any], out: Path | None, **about: Any) -> None:
    """Show `findings` with the head of the run. With `out`, a .json, write them there and a page beside it.

    `about`: settings of the run, for its head. `script`: what makes these files.
    """
    beginning = {name: value for name, value in head(script).items() if name != "command"} | about
    print(json.dumps({**beginning, **findings}, indent=1))
    if out is not None:
        tables = (table(("", ""), _rows(values, "")) for values in (beginning, findings))
        page = [f"# {title}", "", f"By `{script}`.", *(line for each in tables for line in ["", *each])]
        save(out, {**beginning, **findings}, "\n".join(page) + "\n")


def _rows(values: dict[str, Any], above: str) -> Iterator[tuple[str, str]]:
    """Yield names, with those of the dictionaries around them, and values as text."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _rows(value, f"{above}{name}: ")
        else:
            shown = ", ".join(map(str, value)) or "none" if isinstance(value, list) else value
            yield f"{above}{name}", str(shown).replace("|", "\\|")
