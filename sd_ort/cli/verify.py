"""`sd-ort verify [IN] OUT`: the optimized weights and outputs against the source's, or OUT by itself."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sd_ort.cli.model_options import options_on_command_line
from sd_ort.cli.numbers import Number
from sd_ort.core.errors import InputError, ProviderError

if TYPE_CHECKING:
    from sd_ort.checkpoints.open import CheckpointOptions

# Options of how OUT is run.
OF_RUNS = frozenset({"tolerance", "inputs", "provider", "portable", "seed"})
# Options of what a checkpoint is.
OF_WEIGHTS = frozenset({"config", "ip_adapter", "image_encoder"})


@click.command()
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("optimized", metavar="OUT", type=click.Path(path_type=Path), required=False)
@click.option(
    "--tolerance",
    type=Number(min=0, min_open=True),
    help="Largest relative L2 error of outputs [default: 1e-5; in half precision by the depth of the graph, or by what "
    "rounding its weights loses].",
)
@click.option("--component", "components", multiple=True, help="Only this component; may be given several times.")
@click.option(
    "--inputs",
    type=click.Path(path_type=Path),
    help="Recorded runs in place of synthetic ones: an .npz of component/input[/run], or input[/run] of one file.",
)
@click.option("--provider", default="auto", help="Provider that runs OUT [default: its target's, if it runs here].")
@click.option("--portable", is_flag=True, help="Run OUT without the custom-op library.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the synthetic inputs.")
@click.option("--config", metavar="MODEL", help="With IN in one file: a folder or hub id of its family.")
@click.option("--ip-adapter", type=click.Path(path_type=Path), help="With a checkpoint: the IP-Adapter that OUT has.")
@click.option("--image-encoder", type=click.Path(path_type=Path), help="Its encoder [default: the one beside it].")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    source: Path,
    optimized: Path | None,
    tolerance: float | None,
    components: tuple[str, ...],
    inputs: Path | None,
    provider: str,
    portable: bool,
    seed: int,
    config: str | None,
    ip_adapter: Path | None,
    image_encoder: Path | None,
    as_json: bool,
) -> None:
    """Compare the weights of OUT, and the outputs of all its components, with those of IN, from which it was made.

    IN and OUT are pipeline folders, or .onnx files of any model. Every weight of OUT is made again from IN and compared
    bit for bit. Then both run on the same synthetic inputs at two shapes (batch 1 and 2, not square). IN may
    also be a checkpoint, as `optimize` takes it: then weights are compared and nothing is run: of the options
    --component, --config, --ip-adapter, --image-encoder and --json are for that.

    OUT alone is checked by itself: valid graphs, the hashes of its files, finite outputs. A folder's sd_ort.json
    records how it was verified.

    Exits with 4 when a weight differs, or an output is not finite or differs by more than the tolerance.
    """
    from sd_ort.checkpoints import is_checkpoint

    runs: dict[str, Any] = {
        "components": components or None, "inputs": inputs, "provider": provider, "library": not portable, "seed": seed,
    }  # fmt: skip
    if optimized is None:
        reject_options(OF_WEIGHTS | {"tolerance"}, source)
        verify_alone(source, runs, as_json)
        return
    of_weights = is_checkpoint(source)
    reject_options(OF_RUNS if of_weights else OF_WEIGHTS, source)
    if of_weights:
        from sd_ort.checkpoints.open import CheckpointOptions

        files = CheckpointOptions(config, ip_adapter=ip_adapter, image_encoder=image_encoder)
        verify_checkpoint(source, optimized, components, files, as_json)
        return

    from sd_ort.inspect.folder_verification import record_verification
    from sd_ort.inspect.verify import check, verify

    if provider == "auto":
        runs["provider"] = own_provider(optimized)
    heads = [f"{'component':16}{'output':20}{'shape':22}{'rel. error':>12}{'NMSE':>10}{'max abs':>10}"]

    def print_row(row: dict[str, Any]) -> None:
        if not as_json:
            click.echo("\n".join([*heads, line(row)]))
        heads.clear()

    result = verify(source, optimized, tolerance=tolerance, on_row=print_row, **runs)
    record_verification(optimized, str(source), result, runs["provider"])
    if as_json:
        click.echo(json.dumps(result, indent=1))
    else:
        for row in result["weights"]:
            exact = row["weights"] - len(row["different"]) - len(row["not_rebuilt"])
            click.echo(f"{row['component']}: {exact} of {row['weights']} weights are those that {source} gives")
        for note in result["notes"]:
            click.echo(note)
    check(result)


def reject_options(names: Collection[str], source: Path) -> None:
    """Raise InputError for options of this command line that say nothing of such an IN."""
    if options := options_on_command_line(names):
        what = "no checkpoint" if names is OF_WEIGHTS else "checked by itself"
        if names is OF_RUNS:
            what = "a checkpoint, whose weights are compared: nothing is run"
        raise InputError(f"{source} is {what}; leave out {', '.join(options)}.")


def own_provider(optimized: Path) -> str:
    """Return the GPU provider of a folder's target if it runs here, else cpu, which emulates GPU operators.

    The choice is printed on stderr.
    """
    from sd_ort.core.pipeline_folder import read_manifest
    from sd_ort.runtime.provider_choice import ORT_PROVIDERS, ProviderChoice, choose_provider, providers_of

    target = read_manifest(optimized).get("options", {}).get("target")
    candidates = providers_of(target)
    choice = ProviderChoice("cpu", "it runs every graph")
    if candidates not in (ORT_PROVIDERS, ("cpu",)):
        try:
            choice = choose_provider(candidates)
        except ProviderError as error:
            choice = ProviderChoice("cpu", f"{target} runs with equivalent operators, since here {error}".rstrip("."))
    click.echo(choice.line, err=True)
    return choice.provider


def verify_alone(optimized: Path, runs: dict[str, Any], as_json: bool) -> None:
    """Check OUT by itself. `runs`: arguments of `verify_folder`."""
    from sd_ort.inspect.folder_verification import check_finite, verify_folder

    def print_row(row: dict[str, Any]) -> None:
        if not as_json:
            shape = "x".join(map(str, row["shape"]))
            click.echo(f"{row['component']:15} {row['output']:19} {shape:22}{'finite' if row['finite'] else 'FAILED'}")

    if runs["provider"] == "auto":
        runs["provider"] = own_provider(optimized)
    result = verify_folder(optimized, on_row=print_row, **runs)
    if as_json:
        click.echo(json.dumps(result, indent=1))
    else:
        for note in result["notes"]:
            click.echo(note)
    check_finite(result)


def verify_checkpoint(
    source: Path, optimized: Path, components: tuple[str, ...], files: CheckpointOptions, as_json: bool
) -> None:
    """The weights of OUT against those of a checkpoint."""
    from sd_ort.inspect.folder_verification import record_verification
    from sd_ort.inspect.weight_verification import check_weights, verify_weights

    def print_row(row: dict[str, Any]) -> None:
        if row["passed"] and not as_json:
            click.echo(f"{row['component']}: all {row['weights']} weights are those that {source} gives, bit for bit")

    result = verify_weights(str(source), optimized, components=components or None, files=files, on_row=print_row)
    record_verification(optimized, str(source), result, None)
    if as_json:
        click.echo(json.dumps(result, indent=1))
    check_weights(result, str(source), optimized)


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    shape = "x".join(map(str, row["shape"]))
    numbers = f"{row['relative_error']:>12.1e}{row['nmse']:>10.1e}{row['max_abs']:>10.1e}"
    return f"{row['component']:15} {row['output']:19} {shape:22}{numbers}  {'ok' if row['passed'] else 'FAILED'}"
