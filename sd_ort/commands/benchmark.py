"""`sd-ort benchmark`: latency and memory of several engines, side by side."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("folders", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--provider", default="cpu", show_default=True, help="cpu, cuda, rocm or migraphx.")
@click.option("--steps", type=click.IntRange(1), default=20, show_default=True, help="Denoising steps an image.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Images drawn at once.")
@click.option("--height", type=int, help="Pixels [default: the model's].")
@click.option("--width", type=int, help="Pixels [default: the model's].")
@click.option("--guidance", type=float, help="Guidance scale; 1 or less is none [default: 7.5, demo model 3].")
@click.option("--prompt", default="a red circle on a blue background", show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--warmup", type=click.IntRange(0), default=1, show_default=True, help="Batches drawn before timing.")
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True, help="Batches timed.")
@click.option("--torch", "torch_model", help="What torch draws with: a diffusers folder, demo, none [default: source].")
@click.option("--threads", type=click.IntRange(1), help="CPU threads [default: one a core].")
@click.option("--tuning", is_flag=True, help="Let the provider search for its fastest kernels.")
@click.option("--sequential", is_flag=True, help="One engine in memory at a time; ratios then are not of one moment.")
@click.option("--allow-fallback", is_flag=True, help="Warn instead of failing when the provider is not really used.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("results/benchmark"),
    show_default=True,
    help="Folder for benchmark.json, benchmark.csv and the images.",
)
@click.pass_context
def command(
    ctx: click.Context,
    folders: tuple[Path, ...],
    provider: str,
    steps: int,
    batch: int,
    height: int | None,
    width: int | None,
    guidance: float | None,
    prompt: str,
    seed: int,
    warmup: int,
    runs: int,
    torch_model: str | None,
    threads: int | None,
    tuning: bool,
    sequential: bool,
    allow_fallback: bool,
    out: Path,
) -> None:
    """Measure pipeline folders DIR... side by side, and torch eager beside them.

    For an optimized folder given alone, the raw export it was made from joins. "faster" and PSNR compare with the
    first engine. What was measured is kept when the run is interrupted or an engine fails.
    """
    from sd_ort import benchmark
    from sd_ort.commands.generate import default_guidance
    from sd_ort.engines import Settings
    from sd_ort.session import check_provider

    engines, notes = benchmark.find_engines(folders, torch_model)
    check_provider(provider, allow_fallback=allow_fallback)
    settings = Settings(
        provider=provider,
        prompt=prompt,
        steps=steps,
        batch=batch,
        height=height,
        width=width,
        guidance=default_guidance(folders[0]) if guidance is None else guidance,
        seed=seed,
        warmup=warmup,
        runs=runs,
        threads=threads,
        tuning=tuning,
        allow_fallback=allow_fallback,
        sequential=sequential,
    )
    try:
        report = benchmark.run(engines, settings, out, notes=notes, say=lambda line: click.echo(line, err=True))
    except KeyboardInterrupt:
        click.echo(f"\nsd-ort: interrupted; what was measured is in {out / 'benchmark.json'}.", err=True)
        ctx.exit(130)
    click.echo(benchmark.to_table(report))
    click.echo(f"{out / 'benchmark.json'}  {out / 'benchmark.csv'}")
    if all(row["status"] == "failed" for row in report["engines"]):
        ctx.exit(1)
