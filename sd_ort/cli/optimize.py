"""`sd-ort optimize IN OUT`: fuse a pipeline, a checkpoint or an ONNX file for a target."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sd_ort.cli.model_options import checkpoint_options
from sd_ort.core.pipeline_folder import standalone_model

if TYPE_CHECKING:
    from sd_ort.checkpoints.open import CheckpointOptions
    from sd_ort.optimize.weight_storage import WeightStorage

DEMO_PROMPTS = 64  # for the calibration of the demo


@click.command()
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("output", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--target",
    help="cpu, cuda, rocm, migraphx, hip, gpu (what our provider sdcuda runs) or portable "
    "[default: what the installed onnxruntime wheel drives].",
)
@click.option("--float16", is_flag=True, help="Weights and tensors in float16.")
@click.option(
    "--float16-io", is_flag=True, help="With --float16 of one .onnx file: its inputs and outputs in float16 too."
)
@click.option("--bfloat16", is_flag=True, help="Weights and tensors in bfloat16; for target cpu, weights and products.")
@click.option(
    "--weights",
    type=click.Choice(["int8", "int4", "float8"]),
    help="Store weights of linears and convolutions in fewer bits (the VAE's with --vae-weights), for target cpu, gpu, "
    "hip or portable.",
)
@click.option(
    "--weight-group",
    type=click.Choice(["32", "64", "128"]),
    help="With --weights int8 or int4: elements of a linear's row that share a scale [default: 64].",
)
@click.option("--asymmetric", is_flag=True, help="With --weights int8 or int4: with zero points.")
@click.option(
    "--vae-weights",
    is_flag=True,
    help="With --weights: the VAE's too, in 8 bits. Decoding then takes twice as long on a CPU.",
)
@click.option(
    "--float8",
    is_flag=True,
    help="Linears of the UNet or transformer in float8 (e4m3); for portable and migraphx convolutions too.",
)
@click.option("--int8", is_flag=True, help="The same in int8, for portable, migraphx and cpu.")
@click.option(
    "--dynamic-scales",
    is_flag=True,
    help="With --float8 or --int8, for portable and migraphx: compute the scales of activations in the graph, without "
    "prompts.",
)
@click.option(
    "--vae-decoder",
    is_flag=True,
    help="With --float8 or --int8, for portable and migraphx, and int8 for cpu: the VAE decoder's layers too. For hip "
    "and gpu with --convolutions.",
)
@click.option(
    "--convolutions",
    is_flag=True,
    help="With --float8 for hip and gpu: 3x3 convolutions too. Measured on Hopper; GPUs without float8 use 16 bits.",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --float8 or --int8: prompts to calibrate on, one a line; 64 are plenty [default: those of the demo].",
)
@click.option(
    "--calibrate/--no-calibrate",
    default=None,
    help="With --float16: find what must stay in float32 by running it [default: components below 1 GiB].",
)
@click.option(
    "--inputs", type=click.Path(path_type=Path), help="Calibrate on recorded runs: an .npz of component/input[/run]."
)
@click.option(
    "--hoist/--no-hoist",
    default=None,
    help="Run the prompt's and the schedule's part of the UNet or transformer once [default: on cuda, rocm, hip and "
    "gpu with --float16, a transformer also with --bfloat16].",
)
@click.option("--component", "components", multiple=True, help="Only this component; may be given several times.")
@checkpoint_options
@click.option("--overwrite", is_flag=True, help="Replace files in OUT that were changed since sd-ort wrote them.")
def command(
    source: Path,
    output: Path,
    float16: bool,
    bfloat16: bool,
    float8: bool,
    int8: bool,
    weights: str | None,
    weight_group: str | None,
    asymmetric: bool,
    vae_weights: bool,
    prompts: Path | None,
    inputs: Path | None,
    components: tuple[str, ...],
    overwrite: bool,
    **options: Any,
) -> None:
    """Fuse the pipeline folder IN for a target and write it to OUT.

    IN is a folder that `sd-ort export` wrote, or a checkpoint as `export` takes it (a diffusers folder, a .safetensors
    file, a hub id, `demo`). A checkpoint of a published architecture, or of one that was optimized before, fills a
    template in seconds and without tracing; others are exported on the way, and a template is kept.

    IN may also be one .onnx file of any model (or a folder that holds one), and OUT is then one too.

    The default target is what the installed ONNX Runtime wheel drives. `portable` runs on any ONNX runtime: each fused
    operator carries its meaning as a model-local function, and a registered operator library takes over where it has a
    kernel.
    """
    from sd_ort.checkpoints.open import CheckpointOptions
    from sd_ort.optimize.options import OptimizeOptions
    from sd_ort.stages import check_request, optimize

    names = [field.name for field in fields(CheckpointOptions) if field.name in options]
    checkpoint = CheckpointOptions(**{name: options.pop(name) for name in names})
    options |= {
        "dtype": _one_of(float16=float16, bfloat16=bfloat16) or "float32",
        "eight_bits": _one_of(float8=float8, int8=int8),
        "components": list(components) or None,
        "weights": _weight_storage(weights, weight_group, asymmetric, vae_weights),
    }
    eight_bits = {name: options[name] for name in ("eight_bits", "dynamic_scales", "vae_decoder")}
    if options["eight_bits"]:
        # Refused before the calibration takes its time. It writes the inputs, so that any path stands for them.
        runs = inputs if options["dynamic_scales"] else inputs or output
        check_request(source, output, checkpoint, OptimizeOptions(inputs=runs, **options), overwrite)
    with _recorded_inputs(source, output, checkpoint, **eight_bits, prompts=prompts, inputs=inputs) as recorded:
        manifest = optimize(
            source,
            output,
            checkpoint=checkpoint,
            overwrite=overwrite,
            on_progress=click.echo,
            inputs=recorded,
            **options,
        )
    show(manifest["components"], source if standalone_model(source) is not None else output)
    click.echo(f"Wrote {output}")


def _one_of(**flags: bool) -> str | None:
    """Return the name of the flag that is set, or None. Raises InputError if more than one is set."""
    from sd_ort.core.errors import InputError

    names = [name for name, is_set in flags.items() if is_set]
    if len(names) > 1:
        raise InputError(f"{' and '.join(f'--{name}' for name in names)} exclude each other: leave one out.")
    return names[0] if names else None


def _weight_storage(dtype: str | None, group: str | None, asymmetric: bool, vae: bool) -> WeightStorage | None:
    """Return the storage that the options ask for. Raises InputError for options that do not go together."""
    from sd_ort.core.errors import InputError
    from sd_ort.optimize.weight_storage import WeightStorage

    if dtype in (None, "float8") and group is not None:
        raise InputError("--weight-group goes with --weights int8 or int4: leave it out.")
    if dtype is None:
        if asymmetric:
            raise InputError("--asymmetric goes with --weights int8 or int4: leave it out.")
        if vae:
            raise InputError("--vae-weights goes with --weights: leave it out.")
        return None
    return WeightStorage(dtype, int(group or 64), not asymmetric, vae)


@contextlib.contextmanager
def _recorded_inputs(
    source: Path,
    output: Path,
    checkpoint: CheckpointOptions,
    eight_bits: str | None,
    dynamic_scales: bool,
    vae_decoder: bool,
    prompts: Path | None,
    inputs: Path | None,
) -> Iterator[Path | None]:
    """Yield the .npz of recorded runs: `inputs`, or for 8 bits one recorded on `prompts`, removed at the end.

    The pipeline that is run is `source`, optimized for the CPU in float32 next to `output`. Dynamic scales take no run.

    Raises InputError for prompts without 8 bits, with dynamic scales, or beside `inputs`.
    """
    from sd_ort.core.errors import InputError

    if prompts is not None and (eight_bits is None or inputs is not None or dynamic_scales):
        raise InputError("--prompts goes with --float8 or --int8, and without --inputs or --dynamic-scales.")
    is_calibrated = eight_bits is not None and inputs is None and not dynamic_scales
    if prompts is None and not (is_calibrated and str(source) == "demo"):
        yield inputs
        return
    from sd_ort.core.pipeline_folder import report_full_disk
    from sd_ort.core.staging import scratch_folder
    from sd_ort.demo.scenes import training_prompts
    from sd_ort.pipelines.calibration_runs import record_runs
    from sd_ort.serving.prompt_lists import read_prompts
    from sd_ort.stages import optimize

    texts = training_prompts(DEMO_PROMPTS) if prompts is None else read_prompts(prompts)
    with scratch_folder(output.absolute().parent, f"{output.name}.calibration") as work:
        click.echo(f"calibration: {len(texts)} prompt{'s' * (len(texts) != 1)} on the CPU in float32.")
        optimize(source, work / "float32", checkpoint=checkpoint, target="cpu", dtype="float32")
        recorded = work / "runs.npz"
        with report_full_disk(output):
            record_runs(work / "float32", texts, recorded, vae_decoder=vae_decoder)
        yield recorded


def show(entries: dict[str, dict[str, Any]], explained: Path) -> None:
    """Print the fused nodes of each component. `explained`: the argument of `sd-ort explain` for more."""
    from sd_ort.optimize.optimizer import COUNTED

    rows = [op for op in COUNTED if any(op in entry["op_counts"] for entry in entries.values())]
    widths = {name: max(16, len(name) + 2) for name in entries}
    click.echo(f"{'':26}" + "".join(f"{name:>{width}}" for name, width in widths.items()))
    for row in rows:
        click.echo(
            f"{row:26}"
            + "".join(f"{entries[name]['op_counts'].get(row, 0):>{width}}" for name, width in widths.items())
        )
    for name, entry in entries.items():
        if "not_fused" in entry:
            click.echo(f"{name}: not fused: {entry['not_fused']}.")
        if "low_coverage" in entry:
            click.echo(f"{name}: only {entry['low_coverage']} fused; `sd-ort explain {explained}` says why.", err=True)
        for reason in entry["kernel_fallbacks"]:
            click.echo(f"{name}: {reason}; they run as sd_ort operators.")
        if "eight_bits" in entry:
            show_eight_bits(name, entry["eight_bits"])
        if "hoisted" in entry:
            click.echo("; ".join(f"{part}: {nodes} nodes" for part, nodes in entry["hoisted"].items()))
        if "calibration" in entry:
            click.echo(f"{name}: {entry['calibration']}{'; they stay in float32:' if entry['float32_sites'] else ''}")
        for site in entry.get("float32_sites", ()):
            click.echo(f"    {site['max_abs']:>12.0f}  {site['op']:24}{site['value']}")


def show_eight_bits(name: str, entry: dict[str, Any]) -> None:
    """Print the layers of a component in 8 bits, and why others are not."""
    layers = ", ".join(f"{count} {op}" for op, count in entry["layers"].items())
    scales = ", dynamic scales" if entry.get("dynamic_scales") else ""
    click.echo(f"{name}: {entry['format']}{scales}: {layers}; others:")
    for reason, count in entry["not_quantized"].items():
        click.echo(f"    {count:>12}  {reason}")
