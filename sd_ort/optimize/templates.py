"""Templates: optimized graphs without their weights, which any checkpoint of the same architecture fills in seconds.

    export + optimize of a first checkpoint ──store──▶ one file in the cache, named by configs, options and code
    another checkpoint of those configs ──fill──▶ the same folder as export + optimize would write, bit for bit

What a template holds: the manifest's entries with the recipe of every weight (see `fusion_passes.recipes`), each
component's config and `model.onnx`, whose tensors say where in the data file they lie, and the few numbers that are the
graph's own. Filling reads one tensor of the checkpoint at a time and writes it where it belongs.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

import fusion_passes
from fusion_passes import recipes
from sd_ort.core import files, folder
from sd_ort.core.cache import cache_folder
from sd_ort.core.errors import InputError
from sd_ort.family.signatures import MODEL_OF
from sd_ort.graphs import hoist

Read = Callable[[str], np.ndarray]
# Of a config: what says where a model came from, not what it is.
INCIDENTAL = ("_name_or_path", "_diffusers_version", "transformers_version", "torch_dtype", "dtype")
MANIFEST, CONSTANTS = "template.json", "constants.npz"
MOST_NUMBERS = 1 << 14  # of a tensor that is the graph's own: a row of zeros, a table of frequencies


def cache() -> Path:
    """Where templates are kept: SD_ORT_TEMPLATES, or sd-ort/templates in the user's cache folder."""
    given = os.environ.get("SD_ORT_TEMPLATES")
    return Path(given) if given else cache_folder() / "templates"


def key(configs: Mapping[str, Any], classes: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """What tells one template from another: all that decides the graphs, the code that makes them included.

    configs, classes: of each model, as in `family.checkpoints`. options: of export and optimize.
    """
    kept = {n: {k: v for k, v in config.items() if k not in INCIDENTAL} for n, config in configs.items()}
    packages = ("torch", "diffusers", "transformers", "onnx", "onnx-ir", "onnxscript")
    ours = Path(__file__).resolve().parents[1]
    code = files.code_hash(
        *(ours / name for name in ("export", "family", "graphs", "optimize")), Path(fusion_passes.__file__).parent
    )
    what = [kept, {n: classes[n] for n in configs}, options, {p: version(p) for p in packages}, code]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:20]


# --- Making ---------------------------------------------------------------------------------------------------------


def store(name: str, optimized: Path, exported: Mapping[str, Any]) -> str | None:
    """Keep the optimized folder's graphs as template `name`; why it cannot be one, or None.

    exported: the manifest of the export it was made from.
    """
    for component, entry in exported["components"].items():
        if pairs := entry.get("equal_weights"):
            return f"{pairs[0][0]} and {pairs[0][1]} of the {component} are equal, which exporters merge"
    manifest = folder.read_manifest(optimized)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_LZMA) as archive:
        kept = {"components": manifest["components"], "data": {}}
        for component, entry in manifest["components"].items():
            table = recipes.load(entry["weights"])
            for part in parts(component, entry):
                model = optimized / part / folder.MODEL
                constants = _own_numbers(model, table)
                if constants is None:
                    return f"weights of the {part} are made in a way that no recipe says"
                archive.write(model, f"{part}/{folder.MODEL}")
                data = io.BytesIO()
                np.savez(data, allow_pickle=False, **constants)
                archive.writestr(f"{part}/{CONSTANTS}", data.getvalue())
                path = model.with_name(folder.DATA)
                kept["data"][part] = path.stat().st_size if path.is_file() else 0
            if (config := optimized / component / "config.json").is_file():
                archive.write(config, f"{component}/config.json")
        archive.writestr(MANIFEST, json.dumps(kept))
    files.write_bytes(cache() / f"{name}.zip", buffer.getvalue())
    return None


def parts(component: str, entry: Mapping[str, Any]) -> list[str]:
    """The folders of a component: its own, or the three of a hoisted UNet."""
    return list(hoist.PARTS.values()) if "hoisted" in entry else [component]


def _own_numbers(model: Path, table: Mapping[str, recipes.Recipe]) -> dict[str, np.ndarray] | None:
    """The graph's own numbers in its data file, by initializer; None when there are weights among them."""
    own = {
        str(v.name): v.const_value
        for v in ir.load(model).graph.initializers.values()
        if v.name not in table and isinstance(v.const_value, ir.ExternalTensor)
    }
    if any(tensor.size > MOST_NUMBERS for tensor in own.values()):
        return None
    return {name: np.frombuffer(tensor.tobytes(), np.uint8) for name, tensor in own.items()}


# --- Filling --------------------------------------------------------------------------------------------------------


def find(name: str) -> Path | None:
    """The template of this name in the cache, if there is one."""
    path = cache() / f"{name}.zip"
    return path if zipfile.is_zipfile(path) else None


def fill(template: Path, reader: Callable[[str, list[str]], Read], work: Path) -> dict[str, Any]:
    """Write the components of a template into the folder `work`; returns their entries of the manifest.

    reader(model, names): what gives a tensor of a model ("unet", "vae", ...) by its name, in float32, for `names`.
    Raises InputError for a tensor that is missing, of another shape than the graph's, or not finite.
    """
    with zipfile.ZipFile(template) as archive:
        kept = json.loads(archive.read(MANIFEST))
        for component, entry in kept["components"].items():
            table = recipes.load(entry["weights"])
            names = sorted({name for recipe in table.values() for name in recipes.sources(recipe)})
            read = reader(MODEL_OF.get(component, component), names)
            for part in parts(component, entry):
                (work / part).mkdir()
                constants = np.load(io.BytesIO(archive.read(f"{part}/{CONSTANTS}")))
                model = onnx.load_from_string(archive.read(f"{part}/{folder.MODEL}"))
                _fill_part(model, work / part, kept["data"][part], table, constants, read)
            if f"{component}/config.json" in archive.namelist():
                archive.extract(f"{component}/config.json", work)
    components: dict[str, Any] = kept["components"]
    return components


def _fill_part(
    model: onnx.ModelProto,
    path: Path,
    size: int,
    table: Mapping[str, recipes.Recipe],
    constants: Mapping[str, np.ndarray],
    read: Read,
) -> None:
    with (path / folder.DATA).open("wb") as data, ThreadPoolExecutor(2) as pool:
        data.truncate(size)

        def write(tensor: onnx.TensorProto) -> None:
            where = {entry.key: entry.value for entry in tensor.external_data}
            recipe = table.get(tensor.name)
            if recipe is None:
                if where:
                    os.pwrite(data.fileno(), constants[tensor.name].tobytes(), int(where["offset"]))
                return
            numbers = _made(tensor, recipe, read)
            if where:
                os.pwrite(data.fileno(), numbers.tobytes(), int(where["offset"]))
            else:
                tensor.raw_data = numbers.tobytes()

        for _ in pool.map(write, model.graph.initializer):
            pass
    if not size:
        (path / folder.DATA).unlink()
    (path / folder.MODEL).write_bytes(model.SerializeToString())


def _made(tensor: onnx.TensorProto, recipe: recipes.Recipe, read: Read) -> np.ndarray:
    try:
        numbers = recipes.evaluate(recipe, read)
    except (ValueError, np.exceptions.AxisError) as error:
        raise InputError(
            f"{', '.join(recipes.sources(recipe))} of the checkpoint do not fit its config: {error}."
        ) from error
    if list(numbers.shape) != list(tensor.dims):
        what = f"{', '.join(recipes.sources(recipe))} make {list(numbers.shape)}, not {list(tensor.dims)}"
        raise InputError(f"the checkpoint's weights do not fit its config: {what}.")
    return np.ascontiguousarray(numbers)
