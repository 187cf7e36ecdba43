"""`sd-ort install-host HOST PATH`: add sd-ort to ComfyUI, a WebUI, or a pipeline folder for diffusers."""

from __future__ import annotations

from pathlib import Path

import click

HOSTS = ("comfyui", "diffusers", "webui")


@click.command()
@click.argument("host", type=click.Choice(HOSTS))
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--overwrite", is_flag=True, help="Replace files that were changed since sd-ort wrote them.")
def command(host: str, path: Path, overwrite: bool) -> None:
    """Put sd-ort into a host: PATH is ComfyUI's or a WebUI's folder, or, for diffusers, a pipeline folder.

    Into ComfyUI and the WebUIs goes one small folder that imports this package; nothing of theirs is changed, and their
    Python must be the one sd-ort is installed in. A pipeline folder's model_index.json names our classes from then on,
    so that DiffusionPipeline.from_pretrained opens it.
    """
    from sd_ort.integrations import application_installers

    click.echo(application_installers.install(host, path, overwrite=overwrite))
