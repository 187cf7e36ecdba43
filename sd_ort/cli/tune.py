"""`sd-ort tune`: measure the kernels that a model will use, ahead of time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("directory", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option("--provider", default="auto", help="cuda, rocm, hip or sdcuda [default: the best that runs here].")
@click.option("--height", "heights", type=int, multiple=True, help="Pixels; may be repeated [default: the model's].")
@click.option("--width", "widths", type=int, multiple=True, help="Pixels; as many as heights.")
@click.option("--batch", "batches", type=click.IntRange(1), multiple=True, default=(1,), show_default=True)
@click.option("--guidance/--no-guidance", default=True, show_default=True, help="The UNet sees each image twice.")
@click.option("--component", "components", multiple=True, help="Only this one; may be repeated [default: all].")
@click.option("--library", type=click.Path(path_type=Path), help="Op library [default: the one build-ops made].")
@click.option("--show", is_flag=True, help="Print a results file, DIR or else every file in results/tuning.")
def command(directory: Path | None, provider: str, components: tuple[str, ...], show: bool, **options: Any) -> None:
    """Measure every kernel candidate at the shapes that pipeline folder DIR meets, and keep the fastest.

    Results go to $SD_ORT_TUNING, or to results/tuning and the cache folder, where every later run on the same kind of
    machine finds them; so does a run with a model folder that has them in `tuning`.
    """
    from sd_ort.cli.model_options import choose_provider, options_on_command_line
    from sd_ort.core.errors import InputError
    from sd_ort.runtime import tuning

    if show:
        if useless := options_on_command_line({"provider", "components", *options}):
            raise InputError(f"--show only prints results: leave out {', '.join(useless)}.")
        paths = [directory] if directory else sorted(tuning.folder().glob("*.json"))
        if not paths:
            raise InputError(f"{tuning.folder()} holds no tuning results: make some with sd-ort tune DIR.")
        for path in paths:
            if path.is_dir():
                raise InputError(f"{path} is a folder: give a results file, or none for all in {tuning.folder()}.")
            click.echo(str(path))
            click.echo("\n".join(tuning.table(tuning.read(path))))
        return
    if directory is None:
        raise InputError("give the pipeline folder to tune for: sd-ort tune DIR.")
    from sd_ort.inspect.tune import tune

    chosen = choose_provider(directory, provider)
    path = tune(directory, chosen, components=components or None, on_progress=click.echo, **options)
    click.echo(str(path))
