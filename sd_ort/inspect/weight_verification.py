"""Bit-exact check of every initializer of an optimized graph against the graph that is optimized from its source again.

The graph is rewritten with the options in its metadata, but neither written nor run, so this takes seconds. Nothing in
the manifest decides what is compared: every initializer of the file must be rebuilt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from fusion_passes import weight_recipes
from fusion_passes.graph_edits import tensor_values
from sd_ort.checkpoints.checkpoint import Checkpoint, select_components
from sd_ort.checkpoints.configs import component_config
from sd_ort.checkpoints.open import DEFAULT, CheckpointOptions, open_checkpoint
from sd_ort.checkpoints.signatures import MODEL_OF
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import InputError, VerificationError
from sd_ort.export import DEFAULT_OPSET, templates
from sd_ort.graphs import hoist
from sd_ort.graphs.load import load
from sd_ort.graphs.save import fix_names
from sd_ort.optimize.calibration import recorded_calibration
from sd_ort.optimize.eight_bits import recorded_eight_bits
from sd_ort.optimize.optimizer import OPTIONS_KEY, rewrite
from sd_ort.optimize.targets import TARGETS
from sd_ort.optimize.unoptimized import UnoptimizedComponent, file_component
from sd_ort.optimize.weight_storage import WeightStorage
from sd_ort.runtime.session import report_invalid_model
from sd_ort.stages import template_component
from sd_ort.weights.recipes import Read, derived_weight, read_recipes


@dataclass
class WeightComparison:
    """Counts of a component's initializers: total, different, and not recomputed."""

    weights: int = 0
    different: list[str] = field(default_factory=list)
    not_rebuilt: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether every initializer was rebuilt and is equal."""
        return not self.different and not self.not_rebuilt


def verify_weights(
    model: str,
    optimized: Path,
    *,
    components: Sequence[str] | None = None,
    files: CheckpointOptions = DEFAULT,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Compare the weights of a pipeline folder with those of a checkpoint; return {"rows": [...], "passed": bool}.

    A row is one component: component, weights (initializers of its graphs), different and not_rebuilt (names), passed.
    Rows that fail raise no exception, see `check_weights`.

    Args:
        model, files: as for `checkpoints.open.open_checkpoint`.
        on_row: called with each row.

    Raises:
        InputError: for a folder without components of the checkpoint, or a checkpoint without their tensors.
    """
    checkpoint = open_checkpoint(model, files)
    if component_config(optimized, "unet").get("ip_adapter") and "image_encoder" not in checkpoint.configs:
        raise InputError(f"{optimized} has an IP-Adapter beside {model}: name its file with --ip-adapter.")
    optimized_names = pipeline_folder.select_components(optimized, components)
    names = [name for name in select_components(checkpoint, components) if name in optimized_names]
    if not names:
        raise InputError(f"{optimized} and {model} have no component in common.")
    tables = read_recipes(optimized)
    rows = []
    for name in names:
        graphs = component_graphs(optimized, name)
        recipes = tables.get(name, {})
        read = checkpoint.read_tensors(
            MODEL_OF.get(name, name), {n for recipe in recipes.values() for n in weight_recipes.sources(recipe)}
        )
        rebuilt = _from_checkpoint(checkpoint, name, optimized, graphs)
        comparison = compare_weights(graphs, rebuilt, recipes, read)
        rows.append({"component": name, **vars(comparison), "passed": comparison.exact})
        on_row(rows[-1])
    return {"rows": rows, "passed": all(row["passed"] for row in rows)}


def check_weights(result: dict[str, Any], model: str, optimized: Path) -> None:
    """Raise VerificationError that names the first component that differs in a result of `verify_weights`."""
    for row in result["rows"]:
        if row["different"]:
            raise VerificationError(
                f"{len(row['different'])} of {row['weights']} weights of {optimized}'s {row['component']} are not "
                f"{model}'s, such as {row['different'][0]}: it was made of another checkpoint, or changed."
            )
        if row["not_rebuilt"]:
            raise VerificationError(
                f"{len(row['not_rebuilt'])} of {row['weights']} weights of {optimized}'s {row['component']} cannot be "
                f"rebuilt from {model}: {', '.join(row['not_rebuilt'][:5])}. Optimize {model} again, or compare "
                "outputs: sd-ort export, then verify with that folder."
            )


def component_graphs(folder: Path, name: str) -> dict[str, ir.Model]:
    """Return the graphs of a component of a pipeline folder by subfolder: three of a hoisted one, else one."""
    return {part: load(pipeline_folder.check_component(folder, part)) for part in hoist.parts_of(folder, name)}


def rebuild(source: UnoptimizedComponent, graphs: Mapping[str, ir.Model]) -> dict[str, ir.Model]:
    """Optimize `source` again with the options that `graphs` record; {} for graphs that record none."""
    props = next(iter(graphs.values())).metadata_props
    try:
        options = json.loads(props.get(OPTIONS_KEY, "null"))
        target, dtype, sites = TARGETS[options["target"]], options["dtype"], options["float32_sites"]
        float32_io = bool(options["float32_io"])
        weights = WeightStorage(**options["weights"]) if "weights" in options else None
        quantization = recorded_eight_bits(options["eight_bits"]) if "eight_bits" in options else None
        if dtype not in target.dtypes:
            return {}
        if weights is not None:
            weights.check(target.name, dtype)
    except (KeyError, TypeError, ValueError):
        return {}
    parts, _ = rewrite(
        source,
        list(graphs)[-1],  # the component's name, of its step graph if it is hoisted
        target,
        dtype,
        lambda model: recorded_calibration(model, sites),
        hoisted=len(graphs) > 1,
        float32_io=float32_io,
        weights=weights,
        quantization=quantization,
    )
    for part in parts.values():
        fix_names(part)
    return parts


def compare_with_file(source: Path, graphs: Mapping[str, ir.Model]) -> tuple[WeightComparison, dict[str, ir.Model]]:
    """Compare the weights of optimized graphs with those of the ONNX file `source`; return the rebuilt graphs too."""
    with report_invalid_model(source):
        rebuilt = rebuild(file_component(source), graphs)
    return compare_weights(graphs, rebuilt), rebuilt


def compare_weights(
    graphs: Mapping[str, ir.Model],
    rebuilt: Mapping[str, ir.Model],
    recipes: Mapping[str, weight_recipes.WeightRecipe] | None = None,
    read: Read | None = None,
) -> WeightComparison:
    """Compare every initializer of `graphs` with that of the same name in `rebuilt`.

    recipes, read: recompute initializers that `rebuilt` does not have, as those of another version's graph.
    """
    result = WeightComparison()
    for part, model in graphs.items():
        expected = dict(initializers(rebuilt[part])) if part in rebuilt else {}
        for (index, name), tensor in initializers(model):
            result.weights += 1
            if (like := expected.get((index, name))) is not None:
                values = tensor_values(like)
            elif recipes is not None and read is not None and name in recipes:
                values = derived_weight(recipes[name], tensor, read)
            else:
                result.not_rebuilt.append(name)
                continue
            if not _are_equal(values, tensor_values(tensor)):
                result.different.append(name)
    return result


def initializers(model: ir.Model) -> Iterator[tuple[tuple[int, str], ir.TensorProtocol]]:
    """Yield ((index of the graph or subgraph, name), tensor) of every initializer."""
    for index, graph in enumerate(model.graphs()):
        for name, value in graph.initializers.items():
            if value.const_value is not None:
                yield (index, name), value.const_value


def _are_equal(expected: np.ndarray, actual: np.ndarray) -> bool:
    if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
        return False
    return expected.tobytes() == actual.tobytes()


def _from_checkpoint(
    checkpoint: Checkpoint, name: str, optimized: Path, graphs: Mapping[str, ir.Model]
) -> dict[str, ir.Model]:
    """Rebuild a component from its template; {} if there is none, for example after an update of torch."""
    options = pipeline_folder.read_manifest(optimized).get("options", {})
    exporter, opset = options.get("exporter", "dynamo"), options.get("opset", DEFAULT_OPSET)
    template = templates.find_template(templates.component_key(checkpoint, name, opset=opset, exporter=exporter))
    return {} if template is None else rebuild(template_component(template, checkpoint, name), graphs)
