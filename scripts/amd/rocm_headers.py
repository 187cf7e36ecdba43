"""Headers of AMD's ROCm libraries from Debian, kept in ~/.cache/sd-ort/rocm-headers/VERSION/include.

    python scripts/amd/rocm_headers.py            # download what is missing; print one folder a line
    python scripts/amd/rocm_headers.py --update   # download again, for suites that moved on

VERSION is HIP's version: 6.4.3 in sid and 7.2.4 in experimental in November 2026. The other libraries of a folder have
the versions of their suite: sid has hipBLASLt 7.1.1 beside HIP 6.4.3. The file `packages` in a folder lists them.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
from pathlib import Path

from sd_ort.core.cache import cache_folder
from sd_ort.core.files import write_text
from sd_ort.runtime.debian import DownloadError, unpack_packages

SUITES = ("sid", "experimental")
PACKAGES = (
    "libamdhip64-dev",
    "libamd-smi-dev",
    "libdrm-dev",  # rocm_smi.h includes a header of it
    "libhipblas-common-dev",
    "libhipblas-dev",
    "libhipblaslt-dev",
    "libhipfft-dev",
    "libhsa-runtime-dev",
    "libmiopen-dev",
    "librocblas-dev",
    "librocm-core-dev",
    "librocm-smi-dev",
    "libroctx-dev",
)


def rocm_headers(*, update: bool = False) -> list[Path]:
    """Return the include folders, one a version of HIP, oldest first. Download what is missing.

    Args:
        update: ask Debian again although every suite was downloaded before.

    Raises:
        DownloadError: a suite that is not in the cache cannot be downloaded.
    """
    root = cache_folder() / "rocm-headers"
    folders = {
        _download(suite, root) if update or not _is_complete(root / suite) else (root / suite).resolve()
        for suite in SUITES
    }
    return [folder / "include" for folder in sorted(folders, key=lambda folder: [*map(int, folder.name.split("."))])]


def _is_complete(folder: Path) -> bool:
    """Whether a folder has the headers of all packages."""
    try:
        lines = (folder / "packages").read_text().splitlines()
    except OSError:
        return False
    return {line.split()[0] for line in lines} == set(PACKAGES)


def _download(suite: str, root: Path) -> Path:
    """Download one suite's headers into root/VERSION and point root/SUITE there; whole or not at all."""
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".work-") as work_:
        work = Path(work_)
        versions = unpack_packages(PACKAGES, [suite, *(other for other in SUITES if other != suite)], work)
        version = versions["libamdhip64-dev"].split(":")[-1].split("-")[0].split("+")[0]
        new = work / "new"
        new.mkdir()
        (work / "usr/include").rename(new / "include")
        write_text(new / "packages", "".join(f"{name} {number}\n" for name, number in sorted(versions.items())))
        folder = root / version
        if folder.exists() and (folder / "packages").read_text() != (new / "packages").read_text():
            shutil.move(folder, work / "old")
        with contextlib.suppress(OSError):  # the folder is there: another process made it, or nothing moved on
            new.rename(folder)
        (work / "link").symlink_to(version)
        (work / "link").rename(root / suite)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--update", action="store_true", help="download again what is there")
    try:
        for folder in rocm_headers(update=parser.parse_args().update):
            print(folder)
    except DownloadError as error:
        sys.exit(f"ROCm's headers cannot be downloaded: {error}. A Debian or Ubuntu with network access is needed.")


if __name__ == "__main__":
    main()
