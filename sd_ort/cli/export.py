"""`sd-ort export`: a checkpoint in, an ONNX pipeline folder out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sd_ort.checkpoints.open import local_path
from sd_ort.checkpoints.presets import PRESETS
from sd_ort.cli.model_options import checkpoint_options, echo_progress
from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import check_replaceable

FULL_PRESETS = ", ".join(name for name in PRESETS if not name.endswith(("-tiny", "-mini")))
PRESET_HELP = (
    f"Instead of MODEL: a public config. One of {FULL_PRESETS}. To try them out: NAME-tiny has narrow layers, and a "
    "U-Net's NAME-mini single ones at two resolutions, which export in less than a minute."
)


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="[MODEL] OUT")
@click.option("--preset", metavar="NAME", help=PRESET_HELP)
@click.option("--random-weights", is_flag=True, help="Fill the preset with random weights.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the random weights.")
@click.option("--opset", type=int, default=20, show_default=True, help="ONNX opset: 18, 20, 21, 23 (dynamo), 17, 20.")
@click.option("--exporter", default="dynamo", show_default=True, help="torch's exporter: dynamo or torchscript.")
@checkpoint_options
@click.option("--component", "components", multiple=True, help="Export only this component; can be repeated.")
@click.option("--overwrite", is_flag=True, help="Replace files in OUT that were changed since sd-ort wrote them.")
def command(paths: tuple[str, ...], preset: str | None, components: tuple[str, ...], **options: Any) -> None:
    """Turn MODEL into an ONNX pipeline folder OUT.

    MODEL is `demo` or `demo-dit` (small models that come with sd-ort), a checkpoint in one .safetensors file, a folder
    saved by diffusers, or a hub id such as stable-diffusion-v1-5/stable-diffusion-v1-5. Each component is exported in
    fp32 with dynamic batch, height, width and sequence length, and compared with torch before the next is loaded. OUT
    is written whole or not at all, and left alone when it already holds the same export. After an interrupt the same
    command goes on behind the last finished component; `.OUT.finished` beside OUT has these.
    """
    if len(paths) != (2 if preset is None else 1):
        arguments = "MODEL and OUT" if preset is None else "only OUT, since --preset names the model"
        raise InputError(f"give {arguments}: see `sd-ort export --help`.")

    out = Path(paths[-1])
    sources = filter(None, map(local_path, paths[:-1]))
    check_replaceable(out, *sources, overwrite=options["overwrite"])  # before a download and the import of torch

    from sd_ort.export.exporter import export

    manifest = export(
        paths[0] if preset is None else None,
        out,
        preset=preset,
        components=components or None,
        **options,
        on_progress=echo_progress,
    )
    click.echo(table(manifest))


def table(manifest: dict) -> str:
    """Return one line per component: nodes, size, error against torch and time."""
    lines = [f"{'component':<16}{'nodes':>7}{'MB':>10}{'max abs error':>15}{'NMSE':>10}{'seconds':>9}"]
    for name, entry in manifest["components"].items():
        error = entry["torch_error"]
        lines.append(
            f"{name:<16}{entry['nodes']:>7}{entry['bytes'] / 1e6:>10.1f}{error['max_abs']:>15.1e}"
            f"{error['nmse']:>10.1e}{entry['seconds']:>9.1f}"
        )
    return "\n".join(lines)
