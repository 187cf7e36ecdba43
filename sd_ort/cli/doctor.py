"""`sd-ort doctor`: what is installed, what loads and what is missing."""

from __future__ import annotations

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def command(as_json: bool) -> None:
    """Say what this machine can run. Exits with 3 when no provider at all can be used."""
    import json

    from sd_ort.inspect import doctor

    findings = doctor.examine()
    click.echo(json.dumps(findings, indent=1) if as_json else doctor.to_text(findings))
    if not any(provider["ok"] for provider in findings["providers"].values()):
        raise click.exceptions.Exit(3)
