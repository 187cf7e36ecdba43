"""LoRAs of ComfyUI's loaders, through our own path: what they add to a weight goes into the sessions' weights.

ComfyUI keeps a patcher's LoRAs as patches by weight, and applies them when it loads the model. Then, here, their sum is
computed by ComfyUI's own code on a weight of zeros, and `pipeline.lora` puts it where the fused graph has that weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import comfy.lora
import comfy.weight_adapter
import numpy as np
import torch
from comfy.patcher_extension import CallbacksMP

from sd_ort.core.errors import InputError
from sd_ort.hosts.models import HostModels

# Adapters that add to a weight whatever it is, and where in their tuple the one number lies with which they do not.
ADDING = {"lora": 4, "loha": 7, "lokr": 8}


def follow_patches(patcher: Any, models: HostModels, component: str, names: Mapping[str, str]) -> None:
    """From now on have the sessions of `component` follow what LoRA nodes put on the patcher, or on a clone of it.

    `names`: ComfyUI's name of a weight -> the name in our recipes.
    """
    applied: list[Any] = [None]

    def apply(patcher: Any, *_: Any) -> None:
        mark = patcher.patches_uuid if patcher.patches else None
        if applied[0] == mark:
            return
        listed = patcher.model.state_dict()
        changes = {names[key]: _added(key, listed[key], patches) for key, patches in patcher.patches.items()}
        models.change(component, changes)
        applied[0] = mark

    patcher.add_callback(CallbacksMP.ON_LOAD, apply)
    patcher.add_callback(CallbacksMP.ON_PRE_RUN, apply)


def _added(key: str, weight: torch.Tensor, patches: list[Any]) -> np.ndarray:
    """What the patches add to a weight, float32. Raises InputError for those that do more than add."""
    for _, value, strength_model, *_ in patches:
        name = getattr(value, "name", None)
        adds = name in ADDING and value.weights[ADDING[name]] is None
        if (
            not (adds or (isinstance(value, tuple) and (len(value) == 1 or value[0] == "diff")))
            or strength_model != 1.0
        ):
            raise InputError(
                f"a node changes {key} by more than adding to it ({name or 'merge'}, DoRA or a merge of models): "
                "sd-ort's graphs take LoRA, LoHa and LoKr."
            )
    zeros = torch.zeros(weight.shape, dtype=torch.float32)
    made: np.ndarray = comfy.lora.calculate_weight(patches, zeros, key).numpy()
    return made
