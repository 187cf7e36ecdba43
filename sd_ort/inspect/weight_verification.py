"""Bit-exact check that the weights of an optimized folder are those of a checkpoint, recomputed by their recipes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fusion_passes import weight_recipes
from fusion_passes.graph_edits import tensor_values
from sd_ort.checkpoints.checkpoint import select_components
from sd_ort.checkpoints.configs import component_config
from sd_ort.checkpoints.open import DEFAULT, CheckpointOptions, open_checkpoint
from sd_ort.checkpoints.signatures import MODEL_OF
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import InputError, VerificationError
from sd_ort.graphs.load import load
from sd_ort.weights.recipes import derived_weight, read_recipes


def verify_weights(
    model: str,
    optimized: Path,
    *,
    components: Sequence[str] | None = None,
    files: CheckpointOptions = DEFAULT,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Compare the weights of a pipeline folder with those of a checkpoint; return {"rows": [...], "passed": bool}.

    A row is one component: component, weights (number of weights with a recipe), different (names), passed. Different
    weights raise no exception, see `check_weights`.

    Args:
        model, files: as for `checkpoints.open.open_checkpoint`.
        on_row: called with each row.

    Raises:
        InputError: for a folder without recipes, or a checkpoint without the tensors that they read.
    """
    checkpoint = open_checkpoint(model, files)
    if component_config(optimized, "unet").get("ip_adapter") and "image_encoder" not in checkpoint.configs:
        raise InputError(f"{optimized} has an IP-Adapter beside {model}: name its file with --ip-adapter.")
    tables, entries = read_recipes(optimized), pipeline_folder.read_manifest(optimized).get("components", {})
    names = [name for name in select_components(checkpoint, components) if name in tables]
    if not names:
        raise InputError(
            f"{optimized} says of no weight where it comes from: give a folder that `sd-ort optimize` wrote."
        )
    rows = []
    for name in names:
        recipes = tables[name]
        sources = {n for recipe in recipes.values() for n in weight_recipes.sources(recipe)}
        read = checkpoint.read_tensors(MODEL_OF.get(name, name), sources)
        count, different = 0, list[str]()
        for part in pipeline_folder.folders_of(name, entries[name]):
            initializers = load(pipeline_folder.check_component(optimized, part)).graph.initializers
            stored = {n: v.const_value for n, v in initializers.items() if n in recipes and v.const_value is not None}
            for weight, tensor in stored.items():
                if derived_weight(recipes[weight], tensor, read).tobytes() != tensor_values(tensor).tobytes():
                    different.append(weight)
            count += len(stored)
        rows.append({"component": name, "weights": count, "different": different, "passed": not different})
        on_row(rows[-1])
    return {"rows": rows, "passed": all(row["passed"] for row in rows)}


def check_weights(result: dict[str, Any], model: str, optimized: Path) -> None:
    """Raise VerificationError that names the first component that differs in a result of `verify_weights`."""
    for row in result["rows"]:
        if not row["passed"]:
            raise VerificationError(
                f"{len(row['different'])} of {row['weights']} weights of {optimized}'s {row['component']} are not "
                f"{model}'s, such as {row['different'][0]}: it was made of another checkpoint, or changed."
            )
