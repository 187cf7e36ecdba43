"""`sd-ort merge DIR OUT`: a pipeline folder as one ONNX model."""

from __future__ import annotations

from pathlib import Path

import click

from sd_ort.cli.numbers import GUIDANCE


@click.command()
@click.argument("source", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("output", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--steps", type=click.IntRange(1, 5000), help="Default denoising steps of the model [default: DIR's].")
@click.option("--guidance", type=GUIDANCE, help="Default guidance scale of the model [default: DIR's].")
@click.option("--scheduler", help="A diffusers scheduler: euler, ddim, dpmsolver, ... [default: the pipeline's].")
@click.option("--overwrite", is_flag=True, help="Replace files in OUT that were changed since sd-ort wrote them.")
def command(
    source: Path, output: Path, steps: int | None, guidance: float | None, scheduler: str | None, overwrite: bool
) -> None:
    """Write the pipeline folder DIR to OUT as one ONNX model: token ids and noise in, image out.

    The steps are a loop inside the model, with guidance and the scheduler. `sd-ort generate --model OUT` runs it, and
    so does any program with one ONNX Runtime session and a tokenizer.
    """
    from sd_ort.core.pipeline_folder import check_not_merged, components

    check_not_merged(source, components(source))
    from sd_ort.optimize.merge import merge

    merge(
        source, output, steps=steps, guidance=guidance, scheduler=scheduler, overwrite=overwrite, on_progress=click.echo
    )
