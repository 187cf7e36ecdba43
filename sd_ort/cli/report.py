"""`sd-ort report`: an HTML page from benchmark results, and the comparison of two runs."""

from __future__ import annotations

from pathlib import Path

import click

from sd_ort.cli.numbers import Number
from sd_ort.core.errors import InputError, VerificationError


@click.command()
@click.argument("folders", metavar="DIR...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--compare", nargs=2, metavar="OLD NEW", type=click.Path(path_type=Path), help="Two results folders.")
@click.option("--tolerance", type=Number(0), default=0.05, show_default=True, help="Growth that is allowed.")
@click.option("--ratios", is_flag=True, help="Compare speed-ups over each run's own baseline: for two machines.")
@click.option("--overwrite", is_flag=True, help="Replace a report.html that sd-ort did not write.")
def command(
    folders: tuple[Path, ...], compare: tuple[Path, Path] | None, tolerance: float, ratios: bool, overwrite: bool
) -> None:
    """Write DIR/report.html for each results folder: plots and images inline, one file.

    DIR is what `benchmark --out` wrote, or a folder of scripts/bench: results/transformers, results/gpu_step.

    With --compare, say what got slower, bigger or less exact from OLD to NEW; the exit code is 4 when anything did.
    """
    from sd_ort.benchmark import report

    if bool(folders) == bool(compare):
        raise InputError("give results folders, or --compare OLD NEW.")
    for folder in folders:
        click.echo(report.write(folder, overwrite))
    if not compare:
        return
    old, new = (report.read(folder) for folder in compare)
    kinds = [kind for kind in ("benchmark", "ablation") if kind in old and kind in new]
    if not kinds:
        raise InputError("the two folders have no benchmark.json or ablation.json in common.")
    worse = 0
    for kind in kinds:
        rows, notes = report.compare(old[kind], new[kind], tolerance, ratios=ratios)
        click.echo(report.comparison_table(rows, notes))
        worse += sum(row["worse"] for row in rows)
    if worse:
        raise VerificationError(f"{worse} measurements are worse than in {compare[0]}.")
