"""LoRAs of ComfyUI's loaders: applies their weight deltas to the sessions.

ComfyUI stores a patcher's LoRAs as patches by weight, and applies them when it loads the model. At that time the delta
is computed by ComfyUI's own code on a weight of zeros, and `pipeline.lora` adds it to the weights of the fused graph.
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
from sd_ort.integrations.models import TorchComponentSessions

# Adapters that add a delta independent of the weight, and the index of the tuple element that must be None for this.
ADDITIVE_ADAPTERS = {"lora": 4, "loha": 7, "lokr": 8}


def apply_patches_on_load(
    patcher: Any, models: TorchComponentSessions, component: str, names: Mapping[str, str]
) -> None:
    """Register callbacks that apply the patches of `patcher`, or of a clone of it, to the sessions of `component`.

    `names`: ComfyUI's name of a weight -> its name in the weight recipes.
    """
    applied: list[Any] = [None]

    def apply(patcher: Any, *_: Any) -> None:
        version = patcher.patches_uuid if patcher.patches else None
        if applied[0] == version:
            return
        weights = patcher.model.state_dict()
        deltas = {names[key]: _patch_delta(key, weights[key], patches) for key, patches in patcher.patches.items()}
        models.set_weight_deltas(component, deltas)
        applied[0] = version

    patcher.add_callback(CallbacksMP.ON_LOAD, apply)
    patcher.add_callback(CallbacksMP.ON_PRE_RUN, apply)


def _patch_delta(key: str, weight: torch.Tensor, patches: list[Any]) -> np.ndarray:
    """Return the float32 delta of a weight's patches. Raises InputError for patches that are not additive."""
    for _, value, strength_model, *_ in patches:
        name = getattr(value, "name", None)
        adds = name in ADDITIVE_ADAPTERS and value.weights[ADDITIVE_ADAPTERS[name]] is None
        if (
            not (adds or (isinstance(value, tuple) and (len(value) == 1 or value[0] == "diff")))
            or strength_model != 1.0
        ):
            raise InputError(
                f"a node changes {key} by more than adding to it ({name or 'merge'}, DoRA or a merge of models): "
                "sd-ort supports LoRA, LoHa and LoKr."
            )
    zeros = torch.zeros(weight.shape, dtype=torch.float32)
    delta: np.ndarray = comfy.lora.calculate_weight(patches, zeros, key).numpy()
    return delta
