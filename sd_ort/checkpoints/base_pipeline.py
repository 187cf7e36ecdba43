"""Configs, scheduler and tokenizers of a checkpoint in one file, which has none of its own.

Taken, in this order, from the folder or hub id that the user names (a diffusers folder, or one that sd-ort wrote), from
the pipeline that diffusers takes for the family, fetched or in the hub's cache, and from any other pipeline of the
family in that cache whose scheduler says the same of the model: without a network a file needs no option then.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sd_ort import demo
from sd_ort.checkpoints.checkpoint import FolderSource, open_folder
from sd_ort.checkpoints.configs import read_config
from sd_ort.checkpoints.detection import FAMILIES, HUB
from sd_ort.checkpoints.hub import cached_pipelines, download_configs
from sd_ort.core.errors import InputError
from sd_ort.core.files import read_json
from sd_ort.core.pipeline_folder import MODEL, read_index

# Family -> the text's width and the input channels of its UNet. Those of SD 2.x are left out: models of either
# prediction are called so, and nothing in a file tells which.
UNETS = {"v1": (768, 4), "xl_base": (2048, 4), "xl_refiner": (1280, 4), "inpainting": (768, 9), "xl_inpaint": (2048, 9)}
# Of a scheduler's config, what differs in a model that was trained otherwise, such as LCM or Turbo.
PLAIN = {"prediction_type": "epsilon", "rescale_betas_zero_snr": False, "timestep_spacing": "leading"}
SCHEDULERS = frozenset(
    f"{name}Scheduler"
    for name in "PNDM DDIM EulerDiscrete EulerAncestralDiscrete DPMSolverMultistep LMSDiscrete UniPCMultistep".split()
)


def borrow(path: Path, family: str, given: Path | None) -> FolderSource:
    """The configs for the file `path`, of `family`. Raises InputError, saying what to give, where there are none."""
    if given is not None:
        return _written(given) if any(given.glob(f"*/{MODEL}")) else open_folder(str(given), given)
    if family == "demo":
        return open_folder("demo", demo.MODEL_DIR)
    try:
        return open_folder(HUB[family], download_configs(HUB[family]))
    except InputError as error:
        if (found := _cached(family)) is not None:
            return found
        raise InputError(
            f"{path} is a {FAMILIES[family]} checkpoint in one file, which has no tokenizer and no configs, and "
            f"{HUB[family]} cannot be fetched for them: give a diffusers folder of that family as --config, or one "
            "that sd-ort made of such a model."
        ) from error


def _written(folder: Path) -> FolderSource:
    """The pipeline that sd-ort made the folder of, without its weights. Raises InputError for one that was extended."""
    index = read_index(folder)
    homes = {"vae": "vae_decoder", **{name: name for name in ("text_encoder", "text_encoder_2", "unet")}}
    configs = {
        name: read_config(folder / home / "config.json", f"{folder} lacks its {home}")
        for name, home in homes.items()
        if (index.get(name) or [None])[0]
    }
    if index.get("controlnet") or "unet" not in configs or "ip_adapter" in configs["unet"]:
        raise InputError(f"{folder} is not of a plain model: give one without ControlNet or IP-Adapter as --config.")
    return FolderSource(str(folder), folder, index, configs)


def _cached(family: str) -> FolderSource | None:
    """A pipeline of the family in the hub's cache."""
    for hub_id, folder in cached_pipelines():
        try:
            found = open_folder(hub_id, folder)
            scheduler = read_json(folder / "scheduler" / "scheduler_config.json")
        except InputError:
            continue
        if is_plain(family, found.configs["unet"], scheduler) and "controlnet" not in found.configs:
            return found
    return None


def is_plain(family: str, unet: Mapping[str, Any], scheduler: Mapping[str, Any]) -> bool:
    """Whether a pipeline with these configs is of the family, and its scheduler as that of the family's own."""
    return (
        (unet.get("cross_attention_dim"), unet.get("in_channels")) == UNETS.get(family)
        and scheduler.get("_class_name") in SCHEDULERS
        and all(scheduler.get(key, value) == value for key, value in PLAIN.items())
    )
