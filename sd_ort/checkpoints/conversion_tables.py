"""Precomputed conversions of published single-file checkpoints to diffusers names.

diffusers' conversion depends only on names and shapes of the tensors. scripts/fixtures/make_conversion_tables.py traced
it for the published architectures. A file with exactly these tensors is read without importing torch and diffusers,
which takes longer than reading SD 1.5's weights. For any other file the conversion is traced (`single_file`).
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fusion_passes import weight_recipes
from sd_ort.checkpoints.signatures import Config
from sd_ort.checkpoints.tensor_readers import RecipeTensorReader, TensorReader
from sd_ort.checkpoints.weight_file import DTYPES, SUFFIXES, read_entries
from sd_ort.core.errors import InputError

BUNDLED = Path(__file__).with_name("conversion_tables.json.xz")
Shapes = Mapping[str, tuple[int, ...]]

# Tensors of such files that are not converted: averaged weights of training, buffers of the noise schedule and of
# transformers, the last layer of SD 2's text encoder, which the pipeline does not use, and CLIP's text projection.
IGNORED_TENSORS = re.compile(
    r"model_ema\..*|(alphas_|betas|log_one_minus_|posterior_|sqrt_).*|(cond_stage_model|conditioner)\..*"
    r"(position_ids|attn_mask|logit_scale)|cond_stage_model\.model\.(text_projection|transformer\.resblocks\.23\..*)"
)


@dataclass(frozen=True)
class ConversionTable:
    """The conversion of one model of a family.

    family: key of `detection.FAMILIES`. model: unet, vae, text_encoder or text_encoder_2. config: settings that
    determine the shapes of its weights. shapes: of the stored tensors. recipes: diffusers name of a weight -> recipe of
    stored tensors.
    """

    family: str
    model: str
    config: Config
    shapes: Shapes
    recipes: Mapping[str, weight_recipes.WeightRecipe]


@cache
def bundled_tables() -> tuple[ConversionTable, ...]:
    """Return the tables in the package."""
    return tuple(from_json(json.loads(lzma.decompress(BUNDLED.read_bytes()))))


def from_json(entries: list[dict[str, Any]]) -> list[ConversionTable]:
    """Return the tables that `to_json` serialized."""
    return [
        ConversionTable(
            entry["family"], entry["model"], entry["config"],
            {name: tuple(shape) for name, shape in entry["shapes"].items()}, weight_recipes.load(entry["made"]),
        )
        for entry in entries
    ]  # fmt: skip


def to_json(table: ConversionTable) -> dict[str, Any]:
    """Return a table as JSON; `made` is the key of its recipes."""
    entry = dict(vars(table))
    del entry["recipes"]
    return {**entry, "made": weight_recipes.dump(table.recipes)}


def stored_shapes(path: Path) -> Shapes:
    """Return the shapes of the tensors in a file; empty for a broken file and for one with other dtypes."""
    if path.suffix not in SUFFIXES:
        return {}
    try:
        entries = read_entries(path)
    except (InputError, OSError):
        return {}
    is_read = all(entry["dtype"] in DTYPES for entry in entries.values())
    return {name: tuple(entry["shape"]) for name, entry in entries.items()} if is_read else {}


def find_tables(shapes: Shapes) -> list[ConversionTable]:
    """Return the tables of all models in a file, of one family; empty if the file has any unknown tensor."""
    matches = [table for table in bundled_tables() if table.shapes.items() <= shapes.items()]
    families = [table.family for table in matches if table.model == "unet"]
    tables = [table for table in matches if table.family in families]
    others = shapes.keys() - {name for table in tables for name in table.shapes}
    return tables if len(families) == 1 and all(map(IGNORED_TENSORS.fullmatch, others)) else []


def table_readers(path: Path, tables: list[ConversionTable], configs: Mapping[str, Config]) -> dict[str, TensorReader]:
    """Return a reader of each model in the file at `path`; empty if a table does not match the configs."""
    for table in tables:
        config = configs.get(table.model, {})
        if any(config.get(key) != value for key, value in table.config.items()):
            return {}
    return {table.model: RecipeTensorReader((path,), table.recipes) for table in tables}
