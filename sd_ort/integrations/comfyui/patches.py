"""LoRAs of ComfyUI's loaders: applies their weight deltas to the sessions.

ComfyUI stores a patcher's LoRAs as patches by weight, and applies them when it loads the model. At that time the delta
is computed by ComfyUI's own code, and `weights.lora` adds it to the weights of the fused graph. Patches that add the
same to every weight run on zeros. Others, such as DoRA, OFT or a merge of models, run on the original weight, which is
restored from the graph's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import comfy.lora
import comfy.weight_adapter
import numpy as np
import torch
from comfy.patcher_extension import CallbacksMP

from sd_ort.checkpoints.transformer_layouts import RowSlice, join_rows, split_rows
from sd_ort.integrations.models import TorchComponentSessions

# Adapters that add a delta independent of the weight, and the index of the tuple element that must be None for this.
ADDITIVE_ADAPTERS = {"lora": 4, "loha": 7, "lokr": 8}


def apply_patches_on_load(
    patcher: Any, models: TorchComponentSessions, component: str, names: Mapping[str, Sequence[RowSlice]]
) -> None:
    """Register callbacks that apply the patches of `patcher`, or of a clone of it, to the sessions of `component`.

    `names`: ComfyUI's name of a weight -> its rows by their names in the weight recipes.
    """
    applied: list[Any] = [None]

    def apply(patcher: Any, *_: Any) -> None:
        version = patcher.patches_uuid if patcher.patches else None
        if applied[0] == version:
            return
        weights = patcher.model.state_dict()
        deltas: dict[str, np.ndarray] = {}
        for key, patches in patcher.patches.items():
            original = None
            if not all(map(_is_additive, patches)):
                values = {part.module: models.original_weight(component, part.module) for part in names[key]}
                original = join_rows(values, names[key])
            delta = _patch_delta(key, weights[key].shape, patches, original)
            # Patches of query alone change a joined matrix: its other parts keep their weights.
            deltas |= {name: part for name, part in split_rows(delta, names[key]).items() if part.any()}
        models.set_weight_deltas(component, deltas)
        applied[0] = version

    patcher.add_callback(CallbacksMP.ON_LOAD, apply)
    patcher.add_callback(CallbacksMP.ON_PRE_RUN, apply)


def _is_additive(patch: Any) -> bool:
    """Return whether a patch adds a delta that does not depend on the weight."""
    _, value, strength_model, *_ = patch
    name = getattr(value, "name", None)
    if name in ADDITIVE_ADAPTERS:
        return bool(strength_model == 1.0 and value.weights[ADDITIVE_ADAPTERS[name]] is None)
    return bool(strength_model == 1.0 and isinstance(value, tuple) and (len(value) == 1 or value[0] == "diff"))


def _patch_delta(key: str, shape: torch.Size, patches: list[Any], original: np.ndarray | None) -> np.ndarray:
    """Return the float32 delta of a weight's patches. `original`: the weight, None for additive patches."""
    start = torch.zeros(shape) if original is None else torch.tensor(original).reshape(shape)
    delta: torch.Tensor = comfy.lora.calculate_weight(patches, start.clone(), key) - start
    return delta.numpy()
