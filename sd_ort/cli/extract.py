"""`sd-ort extract DIR OUT.onnx`: a subgraph for a bug report."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("path", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("output", metavar="OUT.onnx", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--component", required=True, help="Such as unet or vae_decoder.")
@click.option("--from", "start", multiple=True, required=True, metavar="VALUE", help="Becomes an input; repeatable.")
@click.option("--to", "end", multiple=True, required=True, metavar="VALUE", help="Becomes an output; repeatable.")
def command(path: Path, output: Path, component: str, start: tuple[str, ...], end: tuple[str, ...]) -> None:
    """Cut what lies between values of a component's graph into OUT.onnx, weights included.

    `sd-ort explain DIR --json` lists the names of values by module.
    """
    from sd_ort.inspect.extract import extract

    summary = extract(path, component, start, end, output)
    counts = f"{summary['nodes']} nodes, {summary['inputs']} inputs, {summary['weights']} weights"
    click.echo(f"Wrote {output}: {counts}, {summary['bytes'] / 1e6:.1f} MB")
