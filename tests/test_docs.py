"""README and docs: links lead to files, commands and options exist, the first page is one screen."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest

from sd_ort.cli import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in subprocess.check_output(["git", "ls-files", "*.md"], cwd=ROOT, text=True).split()]
COMMAND = re.compile(r"(?:^ {4,}|`)(sd-ort [^`\n]+)", re.MULTILINE)


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#|mailto:)([^)\s#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands(page: Path) -> None:
    """Each `sd-ort COMMAND --options` of a page is one that the CLI has."""
    for line in COMMAND.findall(page.read_text()):
        name, *words = shlex.split(line.split(" #")[0].rstrip(" \\").removeprefix("sd-ort "), comments=True)
        if name.startswith("-") or not name.islower():
            continue
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, line
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        unknown = [word for word in words if word.startswith("--") and word.split("=")[0] not in known | {"--help"}]
        assert unknown == [], line
