"""Layouts of published checkpoints in one file: which tensors make which of diffusers' weights.

What diffusers' mapping does to a file depends on its tensors' names and shapes alone. For the published architectures
scripts/fixtures/make_conversion_tables.py did it once: a file whose tensors are these is read without torch and
diffusers, whose imports take longer than reading SD 1.5's weights. Any other file goes the long way (`single_file`).
"""

from __future__ import annotations

import json
import lzma
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fusion_passes import weight_recipes as recipes
from sd_ort.checkpoints.signatures import Config
from sd_ort.checkpoints.tensor_readers import Holder, LaidOut
from sd_ort.checkpoints.tensors import DTYPES, entries
from sd_ort.core.errors import InputError

SHIPPED = Path(__file__).with_name("conversion_tables.json.xz")
Shapes = Mapping[str, tuple[int, ...]]

# What such files hold beside weights that are used: averaged weights of training, buffers of the noise's schedule and
# of transformers, the last layer of SD 2's text encoder, which it does without, and the head of CLIP.
BESIDE = re.compile(
    r"model_ema\..*|(alphas_|betas|log_one_minus_|posterior_|sqrt_).*|(cond_stage_model|conditioner)\..*"
    r"(position_ids|attn_mask|logit_scale)|cond_stage_model\.model\.(text_projection|transformer\.resblocks\.23\..*)"
)


@dataclass(frozen=True)
class Layout:
    """A model in such files. family: its name, as `recognized.FAMILIES` has it. model: unet, vae, text_encoder or
    text_encoder_2. config: what decides its weights' shapes. shapes: of the file's tensors. made: diffusers' name of a
    weight -> its recipe of the file's tensors."""

    family: str
    model: str
    config: Config
    shapes: Shapes
    made: Mapping[str, recipes.WeightRecipe]


@cache
def layouts(path: Path = SHIPPED) -> tuple[Layout, ...]:
    """Those that the package has."""
    return tuple(read(json.loads(lzma.decompress(path.read_bytes()))))


def read(stored: list[dict[str, Any]]) -> list[Layout]:
    """What `stored` made."""
    return [
        Layout(
            entry["family"], entry["model"], entry["config"],
            {name: tuple(shape) for name, shape in entry["shapes"].items()}, recipes.load(entry["made"]),
        )
        for entry in stored
    ]  # fmt: skip


def stored(layout: Layout) -> dict[str, Any]:
    """As JSON."""
    return {**vars(layout), "made": recipes.dump(layout.made)}


def shapes(path: Path) -> Shapes:
    """Of the tensors of a file, by name; none for a file that is not to be read so, which the long way says more of."""
    if path.suffix != ".safetensors":
        return {}
    try:
        found = entries(path)
        whole = all(_bytes(entry) == entry["data_offsets"][1] - entry["data_offsets"][0] for entry in found.values())
        return {name: tuple(entry["shape"]) for name, entry in found.items()} if whole else {}
    except (InputError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _bytes(entry: Mapping[str, Any]) -> int:
    return math.prod(entry["shape"]) * np.dtype(DTYPES[entry["dtype"]]).itemsize


def find(shapes: Shapes) -> list[Layout]:
    """The layouts of a file's models, all of one family; none for a file that is not known to its last tensor."""
    whole = [layout for layout in layouts() if layout.shapes.items() <= shapes.items()]
    families = [layout.family for layout in whole if layout.model == "unet"]
    here = [layout for layout in whole if layout.family in families]
    left = shapes.keys() - {name for layout in here for name in layout.shapes}
    known = len(families) == 1 and all(BESIDE.fullmatch(name) for name in left)
    return here if known else []


def held(path: Path, here: list[Layout], configs: Mapping[str, Config]) -> dict[str, Holder]:
    """What reads the models of the file at `path`, for a pipeline of these configs; nothing where one does not fit."""
    for layout in here:
        config = configs.get(layout.model, {})
        if any(config.get(key) != value for key, value in layout.config.items()):
            return {}
    return {layout.model: LaidOut(path, layout.made) for layout in here}
