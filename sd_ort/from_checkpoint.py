"""Checkpoint in, optimized folder out: templates are filled where there are some, else made on the way.

template there:   read the graph, fuse it, and read each tensor of the checkpoint when it is written    seconds
none yet:         export the component to a temporary folder beside the output, keep its template       minutes, once
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sd_ort.checkpoints.checkpoint import FileOptions, Source, choose, open_source
from sd_ort.checkpoints.recorded_inputs import check_recorded
from sd_ort.checkpoints.signatures import MODEL_OF
from sd_ort.checkpoints.tensors import reader
from sd_ort.core import pipeline_folder
from sd_ort.core.files import read_ahead
from sd_ort.core.paths import output_path
from sd_ort.export import DEFAULT_OPSET, templates
from sd_ort.optimize import unoptimized
from sd_ort.optimize.optimizer import chosen_hoisting, chosen_target, optimize_all
from sd_ort.optimize.targets import TARGETS

Report = Callable[[str], None]


def optimize_checkpoint(
    model: str,
    output: Path,
    *,
    target: str | None = None,
    dtype: str = "float32",
    components: Sequence[str] | None = None,
    calibrate: bool | None = None,
    inputs: Path | None = None,
    hoisted: bool | None = None,
    exporter: str = "dynamo",
    opset: int = DEFAULT_OPSET,
    controlnet: str | None = None,
    files: FileOptions = FileOptions(),  # noqa: B008 (frozen)
    report: Report = lambda line: None,
) -> dict[str, Any]:
    """Optimize a checkpoint (a diffusers folder, a file, a hub id, `demo`) into `output`; returns the manifest.

    Options as for `optimize.optimizer.optimize` and `export.exporter.export`; what they write is what both would, one
    after the other. Raises what the two stages raise.
    """
    started = time.perf_counter()
    target, why = chosen_target(target, dtype, bool(calibrate or inputs))
    source = open_source(model, None, False, 0, controlnet, files)
    output = output_path(output, *source.folders)
    names = choose(source, components)
    if inputs:
        check_recorded(inputs, names)
    hoisted = chosen_hoisting(hoisted, dtype, target, names)
    keys = {name: templates.component_key(source, name, opset, exporter) for name in names}
    found = {name: path for name, key in keys.items() if (path := templates.find_template(key)) is not None}
    missing = [name for name in names if name not in found]
    manifest: dict[str, Any] = {
        "stage": "optimize",
        "source": {"model": source.name, "random_weights": source.random_weights},
        "versions": {name: version(name) for name in ("sd-ort", "onnx", "onnx-ir", "onnxscript")},
        "options": {
            "target": target, "dtype": dtype, "components": names, "calibrate": calibrate,
            "inputs": pipeline_folder.sha256(inputs) if inputs else None, "hoist": hoisted, "exporter": exporter,
            "opset": opset,
            "templates": {name: path.name for name, path in found.items()},
        },
    }  # fmt: skip
    with pipeline_folder.staged(output, *source.folders) as work:
        for line in filter(None, (why, source.about)):
            report(line)
        source.write_configs(work)
        held = [source.holder(MODEL_OF.get(name, name)) for name in found]
        read_ahead({path for each in held if each is not None for path in each.paths})
        with tempfile.TemporaryDirectory(prefix=f".{output.name}.export-", dir=output.parent) as scratch:
            options = {"opset": opset, "exporter": exporter, "controlnet": controlnet, "files": files}
            exported = _export(model, missing, keys, Path(scratch) / "raw", options, report)
            for each in exported:
                pipeline_folder.copy_configs(Path(scratch) / "raw", work, [each.name])
            raws = {each.name: each for each in exported}
            manifest["components"], hashes = optimize_all(
                [raws.get(name) or _fill(found[name], source, name, work / name) for name in names],
                work,
                TARGETS[target],
                dtype,
                calibrate=calibrate,
                inputs=inputs,
                hoisted=hoisted,
                report=report,
            )
        pipeline_folder.write_manifest(work, manifest, hashes)
    how = "nothing was traced" if not missing else f"{', '.join(missing)} traced"
    report(f"{output}: made in {time.perf_counter() - started:.1f} s, {how}.")
    return pipeline_folder.read_manifest(output)


def _export(
    model: str, names: list[str], keys: dict[str, str], scratch: Path, options: dict[str, Any], report: Report
) -> list[unoptimized.Raw]:
    """Export the components that no template has, with options of `export`, and keep a template of each."""
    if not names:
        return []
    from sd_ort.export.exporter import export  # imports torch and diffusers: seconds

    manifest = export(model, scratch, components=names, on_progress=report, **options)
    for name in names:
        if why_not := templates.store_template(keys[name], scratch / name, manifest["components"][name]):
            report(f"{name}: no template was kept: {why_not}.")
        else:
            report(f"{name}: template {keys[name]} was kept for the next checkpoint of its kind.")
    return unoptimized.of_folder(scratch, names)


def _fill(path: Path, source: Source, component: str, out: Path) -> unoptimized.Raw:
    """A component whose graph is the template's and whose weights are the checkpoint's; its config.json is written."""
    template = templates.Template(path)
    model = MODEL_OF.get(component, component)
    config = {**template.config, **source.configs[model]}
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    read = reader(source, model, template.sources)
    return unoptimized.Raw(component, lambda: template.graph(read), lambda: config, template.bytes, read=read)
