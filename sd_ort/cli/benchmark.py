"""`sd-ort benchmark`: latency, memory, energy and image error of several engines, side by side."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sd_ort.cli.numbers import GUIDANCE, PIXELS, REPLICAS, THREADS, Number
from sd_ort.core.errors import InputError, OutputError
from sd_ort.core.paths import check_writable, real
from sd_ort.runtime.provider_table import PROVIDERS

if TYPE_CHECKING:
    from sd_ort.benchmark.quality import AccuracyWeights

# Options of --mlperf alone: `benchmark.mlperf.Options`, and those of its weights.
MLPERF = ("queries", "server_load", "official", "accuracy", "captions", "gpus", "replicas")
WEIGHTS = ("clip", "inception", "fid_stats")


def _sizes(ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        sizes = tuple(sorted({int(part) for part in value.split(",")}))
    except ValueError:
        sizes = ()
    if not sizes or sizes[0] < 1:
        raise click.BadParameter("give numbers of 1 or more, such as 1,4,8.", ctx, parameter)
    return sizes


def _check_out(out: Path, folders: tuple[Path, ...]) -> None:
    """Raise OutputError where results cannot be written, or would lie in a pipeline folder."""
    check_writable(out / "benchmark.json")
    for folder in folders:
        if real(folder) in (real(out), *real(out).parents):
            raise OutputError(f"--out {out} lies in the pipeline folder {folder}: choose another folder.")


def _check_settings(folder: Path, component: str | None, *sides: int | None) -> None:
    """Raise InputError for what the pipeline in `folder` cannot be measured with, before any work."""
    from sd_ort.checkpoints.synthetic_inputs import pixels_per_latent
    from sd_ort.core.pipeline_folder import check_not_merged, components, select_components

    check_not_merged(folder, components(folder))
    select_components(folder, None if component is None else [component])
    multiple = pixels_per_latent(folder)
    if any(side is not None and side % multiple for side in sides):
        raise InputError(f"--height and --width must be multiples of {multiple} pixels for {folder}.")


@click.command()
@click.argument("folders", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--provider", default="auto", help=f"One of {', '.join(PROVIDERS)} [default: the best that runs the first DIR]."
)
@click.option("--engines", "names", default="", help="Instead of raw and torch: raw,ours,ort,torch-compile,... or all.")
@click.option("--ablation", is_flag=True, help="Rows from the raw export on, one fusion switched on after another.")
@click.option("--component", help="Time calls of one component on synthetic inputs: unet, vae_decoder, vae_encoder.")
@click.option("--unet-only", "component", flag_value="unet", help="The same as --component unet.")
@click.option("--mlperf", is_flag=True, help="MLPerf's scenarios: SingleStream, Offline, Server; latency percentiles.")
@click.option("--profile", is_flag=True, help="Where the time goes in one component of each folder.")
@click.option("--steps", type=click.IntRange(1), default=20, show_default=True, help="Denoising steps, or calls a run.")
@click.option("--batch", "batches", default="1", show_default=True, callback=_sizes, help="Images at once: 1,4,8.")
@click.option("--height", type=PIXELS, help="Pixels [default: the model's].")
@click.option("--width", type=PIXELS, help="Pixels [default: the model's].")
@click.option("--guidance", type=GUIDANCE, help="Guidance scale; 1 or less is none [default: 7.5, demo model 3].")
@click.option("--prompt", default="a red circle on a blue background", show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--warmup", type=click.IntRange(0), default=1, show_default=True, help="Batches generated before timing.")
@click.option("--inputs", type=click.Path(path_type=Path), help="With .onnx files: .npz of recorded inputs.")
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True, help="Batches timed.")
@click.option(
    "--calls",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Batches of one run, one after another, on host and device at once; with --mlperf: of Offline.",
)
@click.option("--queries", type=click.IntRange(1), default=32, show_default=True, help="With --mlperf: per scenario.")
@click.option(
    "--server-load",
    "--load",
    "server_load",
    type=Number(0.01, 2),
    default=0.8,
    show_default=True,
    help="With --mlperf: arrival rate of Server as a share of Offline's.",
)
@click.option("--official", is_flag=True, help="With --mlperf: its counts, durations and settings (SDXL, hours).")
@click.option("--accuracy", is_flag=True, help="With --mlperf: an accuracy run too, which logs every image.")
@click.option(
    "--captions", type=click.Path(path_type=Path), help="With --mlperf: COCO's captions, or a file of prompts."
)
@click.option(
    "--accuracy-weights",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="With --mlperf: a folder with clip/ (a CLIP model) for CLIP score, and with inception.pth (Inception's "
    "weights) and val2014.npz (the photographs' mu, sigma) for FID.",
)
@click.option(
    "--clip", type=click.Path(path_type=Path), help="With --mlperf: a folder with a CLIP model, for its score."
)
@click.option("--inception", type=click.Path(path_type=Path), help="With --mlperf: Inception's weights, for FID.")
@click.option(
    "--fid-stats", type=click.Path(path_type=Path), help="With --mlperf: an .npz of the photographs' mu, sigma."
)
@click.option("--gpus", type=REPLICAS, help="With --mlperf: a replica on each of so many GPUs (Ray).")
@click.option("--replicas", type=REPLICAS, help="With --mlperf: so many on the CPU, or on one GPU (Ray).")
@click.option("--torch", "torch_model", help="What torch runs: a diffusers folder, demo, none [default: source].")
@click.option("--threads", type=THREADS, help="CPU threads [default: one a core].")
@click.option("--tuning", is_flag=True, help="Let the provider search for its fastest kernels.")
@click.option("--sequential", is_flag=True, help="One engine in memory at a time; ratios then are not of one moment.")
@click.option("--allow-fallback", is_flag=True, help="Warn instead of failing when the provider is not really used.")
@click.option("--note", "remarks", multiple=True, help="A line for the report; may be given several times.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Folders made at once.")
@click.option(
    "--work", type=click.Path(path_type=Path), help="Where they are kept [default: ~/.cache/sd-ort/benchmark]."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("results/benchmark"),
    show_default=True,
    help="Folder for the JSON, CSV, images and the HTML report.",
)
@click.option("--overwrite", is_flag=True, help="Replace files in --out that sd-ort did not write.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    folders: tuple[Path, ...],
    names: str,
    ablation: bool,
    mlperf: bool,
    profile: bool,
    guidance: float | None,
    torch_model: str | None,
    jobs: int,
    remarks: tuple[str, ...],
    inputs: Path | None,
    work: Path | None,
    out: Path,
    overwrite: bool,
    **options: Any,
) -> None:
    """Measure pipeline folders DIR... side by side, and torch eager beside them.

    DIR... may also be .onnx files of one model: they are called in turn on the same inputs.

    For an optimized folder given alone, the raw export it was made from joins. "faster", PSNR and error compare with
    the first engine. What was measured is kept when the run is interrupted or an engine fails.

    \b
    --engines names, made from the raw export where they need a folder:
      raw, raw-fp16            the export
      ours, ours-TARGET        sd-ort optimize, for the provider or another target
      ours-hoist               the same with --hoist
      ort, onnxscript          their optimizers
      ours-graph, ort-graph    the same, UNet calls captured as a CUDA or HIP graph (ours-hoist-graph: both)
      torch, torch-channels-last, torch-compile, torch-graph, xformers, tensorrt
      openvino, openvino-bf16  one component on the CPU
    """
    from sd_ort.benchmark import engine_selection, report, report_file, runner
    from sd_ort.benchmark.engines.interface import BenchmarkSettings
    from sd_ort.checkpoints.generation_defaults import generation_defaults
    from sd_ort.cli.model_options import choose_provider, options_on_command_line
    from sd_ort.core.cache import cache_folder
    from sd_ort.pipelines.arguments import check_text
    from sd_ort.runtime.providers import check_provider

    if any(folder.suffix == ".onnx" for folder in folders):
        _benchmark_files(ctx, folders, inputs)
        return
    if inputs is not None:
        raise InputError("--inputs goes with .onnx files: a pipeline folder is measured with --prompt.")
    for folder in folders:
        _check_settings(folder, options["component"], options["height"], options["width"])
    if options["component"] and options["calls"] > 1:
        raise InputError("--calls goes with whole images: leave out --component.")
    check_text([options["prompt"]])
    if options["provider"] == "auto":
        options["provider"] = choose_provider(folders[0], "auto")
    provider = options["provider"]
    if not mlperf and (options_of_mlperf := options_on_command_line({*MLPERF, *WEIGHTS, "accuracy_weights"})):
        raise InputError(f"{', '.join(options_of_mlperf)} goes with --mlperf: give it, or leave this out.")
    under_load = {name: options.pop(name) for name in MLPERF}
    under_load["weights"] = _accuracy_weights(
        options.pop("accuracy_weights"), {name: options.pop(name) for name in WEIGHTS}
    )
    on_replicas = under_load["gpus"] or under_load["replicas"]
    if ablation and (names or mlperf or profile):
        raise InputError("--ablation has its own rows: give it without --engines, --mlperf and --profile.")
    if mlperf and profile:
        raise InputError("--mlperf and --profile exclude each other: leave one out.")
    if ablation:
        engines, notes = engine_selection.ablation(folders[0], provider)
    else:
        if on_replicas:
            torch_model = torch_model or "none"  # replicas run pipeline folders
        selected = engine_selection.NAMES if names == "all" else tuple(filter(None, names.split(",")))
        engines, notes = engine_selection.find_engines(folders, torch_model, selected, provider)
    _check_out(out, folders)
    check_provider(provider, allow_fallback=options["allow_fallback"])
    settings = BenchmarkSettings(
        guidance=generation_defaults(folders[0]).guidance if guidance is None else guidance, **options
    )
    kind = "ablation" if ablation else "mlperf" if mlperf else "profile" if profile else "benchmark"
    common: dict[str, Any] = {
        "notes": [*notes, *remarks],
        "work": work or cache_folder() / "benchmark",
        "jobs": jobs,
        "overwrite": overwrite,
        "on_progress": partial(click.echo, err=True),
    }
    try:
        if mlperf:
            from sd_ort.benchmark import mlperf as stage

            result = stage.run(engines, settings, out, stage.Options(**under_load), **common)
            text = stage.to_table(result)
        elif profile:
            from sd_ort.benchmark import profile as stage_

            result = stage_.run(engines, settings, out, **common)
            text = stage_.to_table(result)
        else:
            result = runner.run(engines, settings, out, kind=kind, **common)
            text = report_file.to_table(result)
    except KeyboardInterrupt as interrupt:
        measured = (
            str(interrupt) or f"what was measured is in {out / f'{kind}.json'} and {report.write(out, overwrite)}."
        )
        click.echo(f"\nsd-ort: interrupted; {measured}", err=True)
        ctx.exit(130)
    click.echo(f"{text}\n{out / f'{kind}.json'}  {report.write(out, overwrite)}")
    if all(row["status"] == "failed" for row in result["engines"]):
        ctx.exit(1)


def _accuracy_weights(folder: Path | None, files: dict[str, Path | None]) -> AccuracyWeights:
    """Return the weights in a folder, or those of single options. Raises InputError for both."""
    from sd_ort.benchmark.quality import AccuracyWeights

    if folder is None:
        return AccuracyWeights(**files)
    if any(files.values()):
        raise InputError("--accuracy-weights has all of --clip, --inception and --fid-stats: leave these out.")
    return AccuracyWeights.from_folder(folder)


FILE_OPTIONS = frozenset({"folders", "inputs", "provider", "threads", "warmup", "runs"})


def _benchmark_files(ctx: click.Context, files: tuple[Path, ...], inputs: Path | None) -> None:
    """Print times of .onnx files. Raises InputError for options that only pipelines have."""
    from sd_ort.benchmark import model_files
    from sd_ort.cli.model_options import choose_provider, options_on_command_line

    if foreign := options_on_command_line({parameter.name or "" for parameter in ctx.command.params} - FILE_OPTIONS):
        raise InputError(f"{', '.join(foreign)} goes with pipeline folders: leave it out for .onnx files.")
    if wrong := [str(file) for file in files if file.suffix != ".onnx"]:
        raise InputError(f"{', '.join(wrong)} is no .onnx file: measure pipeline folders by themselves.")
    provider = ctx.params["provider"]
    provider = choose_provider(files[0], "auto") if provider == "auto" else provider
    options = {name: ctx.params[name] for name in ("threads", "warmup", "runs")}
    click.echo(model_files.to_table(model_files.compare_files(files, provider, inputs, **options)))
