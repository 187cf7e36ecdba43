"""`sd-ort cache`: the optimized folders of checkpoints that were used before, and built libraries."""

from __future__ import annotations

import time

import click


@click.command()
@click.option("--list", "listed", is_flag=True, help="List the entries, the least recently used first [default].")
@click.option("--clear", is_flag=True, help="Remove all entries that no process uses.")
@click.option("--builds", is_flag=True, help="With --clear: remove the libraries that `build-ops` made, instead.")
def command(listed: bool, clear: bool, builds: bool) -> None:
    """List or clear the cache of checkpoints that `generate`, `serve` and `from_pretrained` optimized.

    The least recently used entries are removed when the cache exceeds $SD_ORT_CACHE_GB gigabytes (default 40), and
    built libraries when they exceed $SD_ORT_BUILDS_GB (default 4).
    """
    from sd_ort import model_cache
    from sd_ort.core.errors import InputError
    from sd_ort.runtime import library

    if builds and not clear:
        raise InputError("--builds goes with --clear.")
    if builds:
        removed = library.trim_builds(-1)
        click.echo(f"Removed {len(removed)} builds, {sum(build.bytes for build in removed) / 1e9:.2f} GB.")
    elif clear:
        gone = model_cache.trim(-1)
        click.echo(f"Removed {len(gone)} entries, {sum(entry.bytes for entry in gone) / 1e9:.2f} GB.")
    if listed or not clear:
        entries = model_cache.entries()
        for entry in entries:
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_use))
            click.echo(f"{entry.bytes / 1e9:8.2f} GB  {used}  {entry.model}  {entry.folder}")
        click.echo(f"{sum(entry.bytes for entry in entries) / 1e9:8.2f} GB in {len(entries)} entries")
        built = library.builds()
        click.echo(f"{sum(build.bytes for build in built) / 1e9:8.2f} GB in {len(built)} builds of libraries")
