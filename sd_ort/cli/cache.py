"""`sd-ort cache`: the optimized folders of checkpoints that were used before."""

from __future__ import annotations

import time

import click


@click.command()
@click.option("--list", "listed", is_flag=True, help="List the entries, the least recently used first [default].")
@click.option("--clear", is_flag=True, help="Remove all entries that no process uses.")
def command(listed: bool, clear: bool) -> None:
    """List or clear the cache of checkpoints that `generate`, `serve` and `from_pretrained` optimized.

    The least recently used entries are removed when the cache exceeds $SD_ORT_CACHE_GB gigabytes (default 40).
    """
    from sd_ort import model_cache

    if clear:
        gone = model_cache.trim(-1)
        click.echo(f"Removed {len(gone)} entries, {sum(entry.bytes for entry in gone) / 1e9:.2f} GB.")
    if listed or not clear:
        entries = model_cache.entries()
        for entry in entries:
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_use))
            click.echo(f"{entry.bytes / 1e9:8.2f} GB  {used}  {entry.model}  {entry.folder}")
        click.echo(f"{sum(entry.bytes for entry in entries) / 1e9:8.2f} GB in {len(entries)} entries")
