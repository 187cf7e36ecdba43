"""`sd-ort serve`: answer requests for images over HTTP."""

from __future__ import annotations

from pathlib import Path

import click

from sd_ort.cli.numbers import REPLICAS, THREADS, Number
from sd_ort.runtime.provider_table import PROVIDERS


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--gpus", type=REPLICAS, help="One replica on each of so many GPUs [default: 1].")
@click.option("--replicas", type=REPLICAS, help="So many on the CPU, or on one GPU [default: 1].")
@click.option("--provider", default="auto", help=f"One of {', '.join(PROVIDERS)} [default: the best that runs here].")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to serve at; 0.0.0.0 for all.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 for any free one.")
@click.option("--allow-host", "names", multiple=True, help="A name of this server besides --host and IP addresses.")
@click.option("--token", envvar="SD_ORT_TOKEN", help="What requests must carry [default: $SD_ORT_TOKEN, or none].")
@click.option(
    "--batch", type=click.IntRange(1), default=4, show_default=True, help="Images generated at once, at most."
)
@click.option("--queue", type=click.IntRange(1), default=64, show_default=True, help="Images that may wait.")
@click.option("--timeout", type=Number(1, 86_400), default=600, show_default=True, help="Seconds for a request.")
@click.option("--max-pixels", type=click.IntRange(1), help="Pixels of an image, at most [default: 2048 x 2048].")
@click.option(
    "--scheduler",
    help="A diffusers scheduler: euler, ddim, dpmsolver, unipc, ... [default: the model's].",
)
@click.option(
    "--lora", "loras", multiple=True, metavar="FILE[:SCALE]", help="Add a LoRA; repeatable. Requests scale it."
)
@click.option(
    "--compare",
    "variants",
    multiple=True,
    metavar="NAME=FOLDER",
    help="Also generate on the page with this pipeline; repeatable. Torch weights are run by diffusers.",
)
@click.option("--threads", type=THREADS, help="CPU threads of a replica [default: its share of the cores].")
def command(
    folder: Path,
    gpus: int | None,
    replicas: int | None,
    provider: str,
    host: str,
    port: int,
    names: tuple[str, ...],
    token: str | None,
    batch: int,
    queue: int,
    timeout: float,
    max_pixels: int | None,
    scheduler: str | None,
    loras: tuple[str, ...],
    variants: tuple[str, ...],
    threads: int | None,
) -> None:
    """Serve the pipeline FOLDER over HTTP, in the shape of OpenAI's images API, until Ctrl-C.

    POST /v1/images/generations generates, GET /health and GET /metrics say how the server is. A browser shows a page at
    the address that is printed.
    """
    import functools

    from sd_ort.cli.model_options import check_files, load_adapters, parse_lora, resolve_pipeline_folder
    from sd_ort.core.errors import InputError
    from sd_ort.core.interrupts import run_coroutine
    from sd_ort.serving.dispatch import Dispatcher
    from sd_ort.serving.image_jobs import ModelInfo
    from sd_ort.serving.ray_replicas import RayCluster, require
    from sd_ort.serving.replica import ReplicaConfig, replica_configs

    if token is not None and not (token.strip() and token.isascii() and token.isprintable()):
        raise InputError("the token is empty, or not printable ASCII: give one that an HTTP header can carry, or none.")
    check_files(loras, ())
    scales = {Path(path).stem: scale for path, scale in map(parse_lora, loras)}
    if len(scales) < len(loras):
        raise InputError("two files of --lora have one name: requests could not tell them apart.")
    others = parse_variants(variants)
    model, (folder, provider) = folder, resolve_pipeline_folder(folder, provider)
    setup = functools.partial(load_adapters, loras, (), names=tuple(scales))
    options = {"provider": provider, "scheduler": scheduler}
    config = ReplicaConfig(folder, options, setup=setup, loras=tuple(scales.items()), variants=others)
    configs = replica_configs(config, gpus, replicas, threads)
    require("uvicorn", "starlette", "prometheus_client")
    from sd_ort.serving.api import Limits
    from sd_ort.serving.server import Service, bind_socket, serve

    limits = Limits(pixels=max_pixels) if max_pixels else Limits()
    several_of = f"{len(configs)} x {model} on {provider}"

    def ready(model: ModelInfo) -> None:
        named = f"[{host}]" if ":" in host else host
        open_to_all = "" if token or host in ("127.0.0.1", "::1", "localhost") else ", open to all without a token"
        click.echo(f"{several_of}{open_to_all}: http://{named}:{listener.getsockname()[1]}")

    with bind_socket(host, port) as listener, RayCluster(configs) as cluster:
        dispatcher = Dispatcher(cluster.replicas, batch, queue, timeout)
        run_coroutine(
            serve(
                dispatcher,
                listener,
                lambda info: Service(dispatcher, info, limits, token, timeout, (host, *names), several_of),
                ready,
            )
        )


def parse_variants(texts: tuple[str, ...]) -> tuple[tuple[str, Path], ...]:
    """Return name and folder of each NAME=FOLDER; `demo` is the demo model in torch. Raises InputError."""
    from sd_ort.core.errors import InputError
    from sd_ort.demo import FOLDERS

    variants = {}
    for text in texts:
        name, separator, path = text.partition("=")
        folder = FOLDERS.get(path, Path(path))
        if not (name.strip() and separator and (folder / "model_index.json").is_file()):
            raise InputError(f"--compare {text} is not NAME=FOLDER, of a diffusers or a pipeline folder.")
        variants[name.strip()] = folder
    return tuple(variants.items())
