"""The base pipeline of a single-file checkpoint: the folder that its configs, scheduler and tokenizers come from.

It is the first of: the folder or hub id that the user names (of diffusers or of sd-ort); the pipeline that diffusers
uses for the family, from the hub or its cache; any other pipeline of the family in that cache with default scheduler
settings, so that a file needs no option without a network.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sd_ort import demo
from sd_ort.checkpoints.checkpoint import Checkpoint
from sd_ort.checkpoints.configs import read_config
from sd_ort.checkpoints.detection import FAMILIES, HUB_IDS
from sd_ort.checkpoints.diffusers_folder import folder_model, open_folder
from sd_ort.checkpoints.hub import cached_pipelines, download_configs
from sd_ort.core.errors import InputError
from sd_ort.core.files import read_json
from sd_ort.core.pipeline_folder import MODEL, read_index

# Family -> cross_attention_dim and in_channels of its UNet. SD 2.x is missing: it has models of both prediction types,
# and a file does not tell which.
UNETS = {"v1": (768, 4), "xl_base": (2048, 4), "xl_refiner": (1280, 4), "inpainting": (768, 9), "xl_inpaint": (2048, 9)}
# Settings of a scheduler that differ for models trained in other ways, such as LCM and Turbo.
DEFAULT_SETTINGS = {"prediction_type": "epsilon", "rescale_betas_zero_snr": False, "timestep_spacing": "leading"}
SCHEDULERS = frozenset(
    f"{name}Scheduler"
    for name in "PNDM DDIM EulerDiscrete EulerAncestralDiscrete DPMSolverMultistep LMSDiscrete UniPCMultistep".split()
)


def find_base_pipeline(path: Path, family: str, config_folder: Path | None) -> Checkpoint:
    """Return the base pipeline of the file `path`. Raises InputError, with advice, if there is none."""
    if config_folder is not None:
        written_by_us = any(config_folder.glob(f"*/{MODEL}"))
        return _open_onnx_folder(config_folder) if written_by_us else open_folder(str(config_folder), config_folder)
    if family == "demo":
        return open_folder("demo", demo.MODEL_DIR)
    try:
        return open_folder(HUB_IDS[family], download_configs(HUB_IDS[family]))
    except InputError as error:
        if (cached := _find_cached(family)) is not None:
            return cached
        raise InputError(
            f"{path} is a {FAMILIES[family]} checkpoint in one file, which has no tokenizer and no configs, and "
            f"{HUB_IDS[family]} cannot be fetched for them: give a diffusers folder of that family as --config, or one "
            "that sd-ort made of such a model."
        ) from error


def _open_onnx_folder(folder: Path) -> Checkpoint:
    """Return the pipeline of a folder that sd-ort wrote, without weights. Raises InputError for one with additions."""
    index = read_index(folder)
    names = ("text_encoder", "text_encoder_2", "text_encoder_3", "unet", "transformer")
    folders = {**{name: name for name in names}, "vae": "vae_decoder"}
    models = {
        name: folder_model(
            folder / name, index[name][1], read_config(folder / home / "config.json", f"{folder} lacks its {home}")
        )
        for name, home in folders.items()
        if (index.get(name) or [None])[0]
    }
    denoiser = models.get("unet") or models.get("transformer")
    if index.get("controlnet") or denoiser is None or "ip_adapter" in denoiser.config:
        raise InputError(f"{folder} is not of a plain model: give one without ControlNet or IP-Adapter as --config.")
    return Checkpoint(str(folder), index, models, folder, paths=(folder,))


def _find_cached(family: str) -> Checkpoint | None:
    """Return the first pipeline of the family in the hub's cache, or None."""
    for hub_id, folder in cached_pipelines():
        try:
            pipeline = open_folder(hub_id, folder)
            scheduler = read_json(folder / "scheduler" / "scheduler_config.json", root=folder)
        except InputError:
            continue
        if (
            matches_family_defaults(family, pipeline.configs.get("unet", {}), scheduler)
            and "controlnet" not in pipeline.models
        ):
            return pipeline
    return None


def matches_family_defaults(family: str, unet: Mapping[str, Any], scheduler: Mapping[str, Any]) -> bool:
    """Return whether a pipeline with these configs is of the family, with default scheduler settings."""
    return (
        (unet.get("cross_attention_dim"), unet.get("in_channels")) == UNETS.get(family)
        and scheduler.get("_class_name") in SCHEDULERS
        and all(scheduler.get(key, value) == value for key, value in DEFAULT_SETTINGS.items())
    )
