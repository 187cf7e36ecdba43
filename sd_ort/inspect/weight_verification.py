"""Is an optimized folder made of this checkpoint? Every weight, made again by its recipe, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from fusion_passes import graph_edits
from fusion_passes import weight_recipes as recipes
from sd_ort.checkpoints.checkpoint import select_components
from sd_ort.checkpoints.configs import component_config
from sd_ort.checkpoints.open import DEFAULT, CheckpointOptions, open_checkpoint
from sd_ort.checkpoints.signatures import MODEL_OF
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import InputError, VerificationError
from sd_ort.graphs import hoist
from sd_ort.graphs.load import load
from sd_ort.weights.template_weights import Read, fill


def verify_weights(
    model: str,
    made: Path,
    *,
    components: Sequence[str] | None = None,
    files: CheckpointOptions = DEFAULT,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Compare the weights of the pipeline folder `made` with those that its recipes make of a checkpoint: {"rows":
    [...], "passed": bool}.

    A row is one component: component, weights (how many have a recipe), different (the names of those that are other
    numbers), passed. `report` gets every row when it is known. `model`, `files`: as for
    `checkpoints.open.open_checkpoint`. Raises InputError for a folder without recipes or a checkpoint that lacks what
    they read; weights that differ are no exception here: see `check_weights`.
    """
    checkpoint = open_checkpoint(model, files)
    if component_config(made, "unet").get("ip_adapter") and "image_encoder" not in checkpoint.configs:
        raise InputError(f"{made} has an IP-Adapter beside {model}: name its file with --ip-adapter.")
    described = pipeline_folder.read_manifest(made).get("components", {})
    names = [name for name in select_components(checkpoint, components) if "weight_recipes" in described.get(name, {})]
    if not names:
        raise InputError(f"{made} says of no weight where it comes from: give a folder that `sd-ort optimize` wrote.")
    rows = []
    for name in names:
        table = recipes.load(described[name]["weight_recipes"])
        stored = {n for recipe in table.values() for n in recipes.sources(recipe)}
        read = checkpoint.read_tensors(MODEL_OF.get(name, name), stored)
        count, wrong = 0, list[str]()
        for part in hoist.folders_of(name, described[name]):
            compared, different = _compare(load(pipeline_folder.check_component(made, part)), table, read)
            count, wrong = count + compared, wrong + different
        rows.append({"component": name, "weights": count, "different": wrong, "passed": not wrong})
        report(rows[-1])
    return {"rows": rows, "passed": all(row["passed"] for row in rows)}


def check_weights(result: dict[str, Any], model: str, made: Path) -> None:
    """Raise VerificationError that names the first component that differs in a result of `verify_weights`."""
    for row in result["rows"]:
        if not row["passed"]:
            raise VerificationError(
                f"{len(row['different'])} of {row['weights']} weights of {made}'s {row['component']} are not {model}'s,"
                f" such as {row['different'][0]}: it was made of another checkpoint, or changed."
            )


def _compare(model: ir.Model, table: dict[str, Any], read: Read) -> tuple[int, list[str]]:
    """How many weights of a graph have recipes, and the names of those that are other numbers."""
    recipes.init_recipes(model, recipes.dump(table))
    weights = [value for value in model.graph.initializers.values() if recipes.recipe_of(value) is not None]
    stored = [value.const_value for value in weights]
    fill(model, read)
    wrong = []
    for value, kept in zip(weights, stored, strict=True):
        assert kept is not None
        assert value.const_value is not None
        if value.const_value.numpy().tobytes() != graph_edits.tensor_values(kept).tobytes():
            wrong.append(str(value.name))
    return len(weights), wrong
