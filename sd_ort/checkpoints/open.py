"""Open the checkpoint that a user names: a diffusers folder, a single file, a hub id, `demo` or a preset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sd_ort import demo
from sd_ort.checkpoints.checkpoint import Checkpoint
from sd_ort.checkpoints.diffusers_folder import add_controlnet, open_folder
from sd_ort.checkpoints.hub import download_configs, download_model, download_pipeline, is_hub_id
from sd_ort.checkpoints.presets import PRESETS, open_preset
from sd_ort.checkpoints.single_file import open_single_file, replace_vae
from sd_ort.core.errors import InputError


@dataclass(frozen=True)
class CheckpointOptions:
    """Options that accompany a checkpoint.

    config: diffusers folder or hub id with the configs of a single-file checkpoint. vae: file with another VAE.
    unsafe_pickle: whether to read pickle files, which may run code. ip_adapter: file of an IP-Adapter. image_encoder:
    folder of its image encoder. controlnet: diffusers folder or hub id. preset: name in `PRESETS`, instead of a
    checkpoint; needs random_weights. seed: of the random weights.
    """

    config: str | None = None
    vae: Path | None = None
    unsafe_pickle: bool = False
    ip_adapter: Path | None = None
    image_encoder: Path | None = None
    controlnet: str | None = None
    preset: str | None = None
    random_weights: bool = False
    seed: int = 0


DEFAULT = CheckpointOptions()


def open_checkpoint(model: str | None, options: CheckpointOptions = DEFAULT) -> Checkpoint:
    """Return the checkpoint `model`, or the preset of the options. Raises InputError, with advice, if there is none."""
    if options.preset is not None or options.random_weights:
        checkpoint = _open_preset(options)
    elif model is None:
        raise InputError("no model given: name `demo`, a checkpoint file, a diffusers folder, a hub id, or a --preset.")
    elif Path(model).is_file():
        if options.controlnet is not None:
            raise InputError(
                "--controlnet goes with a diffusers folder or a hub id, not with a checkpoint in one file."
            )
        config = None if options.config is None else locate(options.config, download_configs)
        checkpoint = open_single_file(Path(model), config, options.unsafe_pickle)
    else:
        if options.config is not None:
            raise InputError(f"--config goes with a checkpoint in one file: {model} has its own configs.")
        checkpoint = open_folder(model, locate(model, download_pipeline))
        if options.controlnet is not None:
            checkpoint = add_controlnet(checkpoint, locate(options.controlnet, download_model))
    if options.vae is not None:
        checkpoint = replace_vae(checkpoint, options.vae, options.unsafe_pickle)
    if options.ip_adapter is not None:
        from sd_ort.checkpoints.ip_adapter import add_ip_adapter  # imports torch

        return add_ip_adapter(checkpoint, options.ip_adapter, options.image_encoder)
    if options.image_encoder is not None:
        raise InputError("--image-encoder goes with an adapter: name its file with --ip-adapter.")
    return checkpoint


def _open_preset(options: CheckpointOptions) -> Checkpoint:
    if options.preset is None:
        raise InputError(f"--random-weights needs a --preset: choose one of {', '.join(PRESETS)}.")
    if options.preset not in PRESETS:
        raise InputError(f"unknown preset {options.preset!r}: choose one of {', '.join(PRESETS)}.")
    if not options.random_weights:
        raise InputError(f"preset {options.preset} has no weights: add --random-weights, or give a checkpoint instead.")
    if options.controlnet is not None:
        raise InputError("--controlnet goes with a checkpoint: use the preset sd15-controlnet instead.")
    return open_preset(options.preset, options.seed)


def local_path(model: str) -> Path | None:
    """Return the file or folder of a model, or None if it is not on this machine."""
    path = demo.FOLDERS.get(model, Path(model))
    return path if path.exists() else None


def locate(model: str, download: Callable[[str], Path]) -> Path:
    """Return the folder of a model. Raises InputError if it neither exists nor looks like a hub id."""
    if (path := local_path(model)) is not None:
        if path.is_file():
            raise InputError(f"{path} is a file: give a diffusers folder or a hub id here.")
        return path
    if is_hub_id(model):
        return download(model)
    raise InputError(
        f"{model} does not exist: give `demo`, a checkpoint file, a diffusers folder, a hub id (owner/name), "
        "or a --preset."
    )
