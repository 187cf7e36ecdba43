"""README and docs: links lead to files, commands and options exist, the first page is one screen."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import click
import pytest

from scripts import reference_pages
from sd_ort.cli import cli

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGES = [ROOT / name for name in subprocess.check_output(["git", "ls-files", "*.md"], cwd=ROOT, text=True).split()]
COMMAND = re.compile(r"(?:^ {4,}|`)(sd-ort [^`\n]+)", re.MULTILINE)


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_docs_have_few_pages() -> None:
    assert len([page for page in PAGES if page.is_relative_to(ROOT / "docs")]) <= 15


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
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        unknown = [word for word in words if word.startswith("--") and word.split("=")[0] not in options | {"--help"}]
        assert unknown == [], line


def test_results_are_listed() -> None:
    """Each file of results is in its table, and each row of the table has files."""
    rows = [line.split("|")[1] for line in (RESULTS / "README.md").read_text().splitlines() if line.startswith("| `")]
    patterns = [pattern for row in rows for pattern in re.findall(r"`([^`]+)`", row)]
    names = subprocess.check_output(["git", "ls-files"], cwd=RESULTS, text=True).split()
    files = [name for name in names if name != "README.md" and (RESULTS / name).exists()]

    def lists(pattern: str, file: str) -> bool:
        return file.startswith(pattern) if pattern.endswith("/") else fnmatchcase(file, pattern)

    assert [pattern for pattern in patterns if not any(lists(pattern, file) for file in files)] == []
    assert [file for file in files if not any(lists(pattern, file) for pattern in patterns)] == []


def test_results_are_cited() -> None:
    """Another page names each file of results, one of its name with another suffix, or its folder."""
    pages = {page: page.read_text() for page in PAGES if page != RESULTS / "README.md"}
    names = subprocess.check_output(["git", "ls-files"], cwd=RESULTS, text=True).split()

    def cites(file: str) -> bool:
        folder, _, name = file.rpartition("/")
        stem = name.partition(".")[0]
        words = f"results/{folder}" if folder else f"{stem}."
        return any(words in text for page, text in pages.items() if page != (RESULTS / file).with_suffix(".md"))

    assert [name for name in names if name != "README.md" and (RESULTS / name).exists() and not cites(name)] == []


def test_checks_of_operators_have_no_fault() -> None:
    """As results/README.md says of each of them."""
    counts = {
        path.relative_to(RESULTS): re.findall(r"\b(\d+) faults", path.read_text()) for path in RESULTS.rglob("*.txt")
    }
    assert sum(map(len, counts.values())) > 300
    assert [path for path, faults in counts.items() if set(faults) - {"0"}] == []


def test_pages_of_results_begin_with_what_was_found() -> None:
    """A page of results has a heading, and then a sentence."""
    for page in RESULTS.rglob("*.md"):
        heading, blank, first, *_ = page.read_text().splitlines()
        assert (heading[:2], blank) == ("# ", ""), page
        assert first[:1] not in ("|", "-", "#", ""), page


def test_reference_is_what_the_code_says(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "scripts.reference_pages", "--check"], cwd=ROOT, check=True)
    changed = shutil.copytree(reference_pages.FOLDER, tmp_path / "reference")
    (changed / "cli.md").write_text((changed / "cli.md").read_text().replace("## export", "## import"))
    (changed / "extra.md").write_text("")
    (changed / "targets.md").unlink()
    assert {"cli.md", "extra.md", "targets.md"} <= set(reference_pages.stale(changed))
