"""`sd-ort uninstall-host HOST PATH`: remove what install-host added."""

from __future__ import annotations

from pathlib import Path

import click

from sd_ort.cli.install_host import HOSTS


@click.command()
@click.argument("host", type=click.Choice(HOSTS))
@click.argument("path", type=click.Path(path_type=Path))
def command(host: str, path: Path) -> None:
    """Take out of PATH what `sd-ort install-host HOST PATH` put there, and nothing else."""
    from sd_ort.integrations import application_installers

    click.echo(application_installers.uninstall(host, path))
