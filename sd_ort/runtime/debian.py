"""Debian packages from any suite, downloaded and unpacked into a folder: the system's own packages do not change."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path


class DownloadError(Exception):
    """A package cannot be downloaded; the message says why."""


def unpack_packages(packages: Sequence[str], suites: Sequence[str], folder: Path) -> dict[str, str]:
    """Download packages and unpack them into `folder`; return the version of each.

    Apt gets its own sources list, made from the mirror and key of the machine's Debian entry.

    Args:
        packages: names of binary packages.
        suites: suites to look in. The first one wins if several have a package.
        folder: gets the files, e.g. `folder/usr/include/...`.

    Raises:
        DownloadError: apt is missing, the machine names no Debian mirror, or a package is in none of the suites.
    """
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise DownloadError("apt-get is not here")
    with tempfile.TemporaryDirectory() as work_:
        work = Path(work_)
        work.chmod(0o755)  # apt downloads as a user of its own
        for path in ("lists/partial", "cache", "sources"):
            (work / path).mkdir(parents=True)
        (work / "sources/debian.sources").write_text(_sources_entry(suites))
        apt = ["apt-get", "-q", f"-oDir::Etc::SourceParts={work}/sources", "-oDir::Etc::SourceList=/dev/null"]
        apt += [f"-oDir::State::Lists={work}/lists", f"-oDir::Cache={work}/cache", "-oAcquire::Languages=none"]
        apt += [f"-oAPT::Default-Release={suites[0]}"]
        for command in ([*apt, "update"], [*apt, "download", *packages]):
            run = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
            if run.returncode != 0:
                reason = next((line for line in run.stderr.splitlines() if line.startswith("E:")), "E: no reason given")
                raise DownloadError(f"apt-get {command[len(apt)]} failed: {reason[2:].strip()}")
        versions = {}
        for package in sorted(work.glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True)
            name, version, _ = package.stem.split("_")
            versions[name] = version.replace("%3a", ":")
        return versions


def _sources_entry(suites: Sequence[str]) -> str:
    """An apt sources entry for `suites`, with the mirror and key of the machine's own Debian entry."""
    mirror, key = _mirror_and_key()
    return f"Types: deb\nURIs: {mirror}\nSuites: {' '.join(suites)}\nComponents: main\nSigned-By: {key}\n"


def _mirror_and_key() -> tuple[str, str]:
    default_key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    for path in sorted(Path("/etc/apt/sources.list.d").glob("*.sources")):
        for entry in path.read_text().split("\n\n"):
            fields = dict(line.split(":", 1) for line in entry.splitlines() if ":" in line and not line.startswith("#"))
            mirror = fields.get("URIs", "").strip()
            if mirror.rstrip("/").endswith("debian"):
                return mirror, fields.get("Signed-By", default_key).strip()
    sources = Path("/etc/apt/sources.list")
    for line in sources.read_text().splitlines() if sources.is_file() else []:
        words = line.split()
        if words[:1] == ["deb"] and words[1].rstrip("/").endswith("debian"):
            return words[1], default_key
    raise DownloadError("the machine's apt sources name no Debian mirror")
