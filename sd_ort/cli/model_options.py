"""Options shared by commands: checkpoint, model, provider, LoRAs, embeddings and arguments of generation."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from sd_ort.runtime.provider_choice import ProviderChoice


ONE_DEVICE = ("cpu",)  # providers that do not run on several devices


def checkpoint_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with the options of a checkpoint: fields of `CheckpointOptions`."""
    path = click.Path(path_type=Path)
    for option in (
        click.option("--unsafe-pickle", is_flag=True,
                     help="Read .ckpt and .bin, as weights alone; only if you trust them."),
        click.option("--vae", type=path, help="Take the VAE of this file instead of the checkpoint's."),
        click.option("--image-encoder", type=path, help="Its encoder [default: image_encoder beside it]."),
        click.option("--ip-adapter", type=path, help="With a checkpoint: add the IP-Adapter in this file."),
        click.option("--controlnet", metavar="MODEL",
                     help="With a checkpoint: a ControlNet's diffusers folder or hub id."),
        click.option("--config", metavar="MODEL",
                     help="With a checkpoint in one file: a folder or hub id of its family."),
    ):  # fmt: skip
        command = option(command)
    return command


def options_on_command_line(names: Collection[str]) -> list[str]:
    """Return the options of `names` that are on the command line, in the form `--name`."""
    ctx = click.get_current_context()
    parameters = [parameter for parameter in ctx.command.params if parameter.name in names]
    return [p.opts[0] for p in parameters if ctx.get_parameter_source(p.name or "") == ParameterSource.COMMANDLINE]


def echo_progress(line: str) -> None:
    """Print a progress line to stderr."""
    click.echo(line, err=True)


def choose_provider(folder: Path, provider: str) -> str:
    """Return the provider that runs a pipeline folder or an ONNX file, and print an automatic choice."""
    from sd_ort.core.pipeline_folder import components, standalone_model
    from sd_ort.runtime.provider_choice import provider_for

    if standalone_model(folder) is None:
        components(folder)
    return _print_choice(provider_for(folder, provider))


def _print_choice(choice: ProviderChoice) -> str:
    if choice.reason:
        echo_progress(choice.line)
    return choice.provider


def resolve_pipeline_folder(
    model: Path,
    provider: str,
    *,
    config: str | None = None,
    save_to: Path | None = None,
    allow_fallback: bool = False,
    gpu_options: Sequence[str] = (),
) -> tuple[Path, str]:
    """Return the pipeline folder of --model, and the provider that runs it.

    A checkpoint is optimized for the provider, into the cache of models or into `save_to`. Raises InputError for what
    is no model and for `gpu_options` without a GPU, ProviderError for a provider that cannot be used: before seconds of
    optimizing.
    """
    from sd_ort import model_cache
    from sd_ort.checkpoints import is_checkpoint
    from sd_ort.core.errors import InputError
    from sd_ort.runtime import provider_choice
    from sd_ort.runtime.providers import check_provider

    def check_choice(provider: str) -> None:
        check_provider(provider, allow_fallback=allow_fallback)
        if gpu_options and provider in ONE_DEVICE:
            raise InputError(
                f"{', '.join(gpu_options)} is for several GPUs, not for provider {provider}: leave it out."
            )

    if not is_checkpoint(model):
        if save_to or config:
            raise InputError(f"--save-optimized and --config go with a checkpoint: {model} is none.")
        folder, choice = model_cache.open_model(model, provider)
        check_choice(choice.provider)
        return folder, _print_choice(choice)
    auto = provider == provider_choice.AUTO
    provider = _print_choice(provider_choice.choose_provider() if auto else provider_choice.resolve_device(provider))
    check_choice(provider)
    if save_to is None:
        return model_cache.open_model(model, provider, config=config, on_progress=echo_progress)[0], provider
    from sd_ort.checkpoints.open import CheckpointOptions
    from sd_ort.stages import optimize

    target, dtype = provider_choice.target_of(provider), model_cache.dtype_for(provider)
    optimize(
        str(model), save_to, target=target, dtype=dtype, checkpoint=CheckpointOptions(config), on_progress=echo_progress
    )
    return save_to, provider


def check_files(loras: tuple[str, ...], embedding_files: tuple[str, ...]) -> None:
    """Raise InputError if the file of a LoRA or an embedding is missing, or an adapter scale is not a number."""
    from sd_ort.core.errors import InputError

    for path in (*(parse_lora(lora)[0] for lora in loras), *embedding_files):
        if not Path(path).is_file():
            raise InputError(f"{path}: no such file; pass a .safetensors file.")


def parse_lora(text: str) -> tuple[str, float]:
    """FILE:0.8 -> (FILE, 0.8), FILE -> (FILE, 1.0). Raises InputError if the adapter scale is not a number."""
    from sd_ort.core.errors import InputError

    path, colon, scale = text.rpartition(":")
    if not colon or scale.endswith(".safetensors"):
        return text, 1.0
    try:
        number = float(scale)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"--lora {text}: {scale!r} is not a number; write FILE or FILE:0.8.")
    return path, number


def load_adapters(
    loras: tuple[str, ...], embedding_files: tuple[str, ...], pipeline: Any, *, names: Sequence[str] = ()
) -> None:
    """Load LoRAs, each FILE or FILE:SCALE, and textual inversion embeddings into a pipeline. `names`: of the LoRAs."""
    names = list(names) or [f"lora{number}" for number in range(len(loras))]
    scales = []
    for name, (path, scale) in zip(names, map(parse_lora, loras), strict=True):
        pipeline.load_lora_weights(path, name)
        scales.append(scale)
    if names:
        pipeline.set_adapters(names, scales)
    for path in embedding_files:
        from sd_ort.pipelines.textual_inversion import file_word

        pipeline.load_textual_inversion(path, token=file_word(path))


def integer_if_whole(_: Any, __: Any, value: float | None) -> float | None:
    """Return an integer option value as int, others unchanged."""
    return int(value) if value is not None and value.is_integer() else value


def enable_cache(setting: float | None, pipeline: Any) -> None:
    """Enable the cache of steps in a pipeline; None leaves it off.

    setting: DeepCache's interval for a UNet, the threshold of FirstBlockCache for a transformer. Raises InputError for
    a setting or a model that cannot be used.
    """
    if setting is not None:
        pipeline.enable_cache(setting)


def set_up_pipeline(
    loras: tuple[str, ...], embedding_files: tuple[str, ...], cache: float | None, pipeline: Any
) -> None:
    """Load LoRAs and embeddings as `load_adapters`, and enable the cache as `enable_cache`."""
    load_adapters(loras, embedding_files, pipeline)
    enable_cache(cache, pipeline)
