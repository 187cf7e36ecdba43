"""Entry point of optimization: fuses a pipeline folder, a checkpoint or an ONNX file for a target.

pipeline folder   every component is optimized                                                    seconds
checkpoint        its tensors are read into templates, which are optimized as they are written    seconds
without template  the component is exported to a temporary folder first, and stored as template   minutes, once
ONNX file         optimized without pipeline folder and manifest                                  seconds
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from sd_ort.checkpoints import is_checkpoint
from sd_ort.checkpoints.checkpoint import Checkpoint, check_weight_files, select_components
from sd_ort.checkpoints.config_inference import infer_configs
from sd_ort.checkpoints.open import DEFAULT, CheckpointOptions, open_checkpoint
from sd_ort.checkpoints.recorded_inputs import check_recorded, load_recorded_inputs
from sd_ort.checkpoints.signatures import MODEL_OF
from sd_ort.core import pipeline_folder
from sd_ort.core.aliases import accept_old_names
from sd_ort.core.errors import InputError, OutputError
from sd_ort.core.files import read_ahead
from sd_ort.core.interrupts import run_interruptible
from sd_ort.core.onnx_file import CONSTANT_INPUTS
from sd_ort.core.ownership import sha256
from sd_ort.core.package_version import package_version
from sd_ort.core.paths import output_path
from sd_ort.core.progress import ProgressCallback, ignore_progress
from sd_ort.core.staging import scratch_folder
from sd_ort.export import DEFAULT_OPSET, templates
from sd_ort.graphs import hoist
from sd_ort.graphs.load import load
from sd_ort.graphs.unet import make_timestep_1d
from sd_ort.optimize import unoptimized
from sd_ort.optimize.optimizer import optimize_component, optimize_components
from sd_ort.optimize.options import OptimizeOptions
from sd_ort.optimize.targets import TARGETS
from sd_ort.runtime.session import check_opens, report_invalid_model


@accept_old_names(report="on_progress", hoisted="hoist")
def optimize(
    source: str | Path,
    output: Path,
    *,
    checkpoint: CheckpointOptions = DEFAULT,
    exporter: str = "dynamo",
    opset: int = DEFAULT_OPSET,
    overwrite: bool = False,
    on_progress: ProgressCallback = ignore_progress,
    **options: Any,
) -> dict[str, Any]:
    """Fuse `source` for a target into `output`, and return the manifest.

    An `output` that was written from the same pipeline folder with the same options, and is intact, stays as it is.
    After an error, no files remain. `report` and `hoisted` are old names of `on_progress` and `hoist`.

    Args:
        source: A pipeline folder, a checkpoint as `open_checkpoint` takes it, or an .onnx file of any model.
        checkpoint: Options of a checkpoint.
        exporter: torch's exporter for components of a checkpoint without template.
        opset: Opset of that export.
        overwrite: Replace files in `output` that were changed since sd-ort wrote them.
        on_progress: Called with one line per step.
        options: Fields of `OptimizeOptions`.

    Raises:
        InputError: The source or an option cannot be used.
        OutputError: `output` cannot be written.
    """
    resolved, note = OptimizeOptions(**options).with_target()
    if is_checkpoint(source):
        if resolved.float16_io:
            raise InputError(f"--float16-io goes with one ONNX file: {source} is none.")
        export_options = {"exporter": exporter, "opset": opset}
        return _optimize_checkpoint(
            str(source), output, checkpoint, export_options, resolved, note, overwrite, on_progress
        )
    if checkpoint != DEFAULT:
        raise InputError(
            "--config, --controlnet, --ip-adapter, --image-encoder, --vae and --unsafe-pickle go with a checkpoint: "
            f"{source} is none."
        )
    if (model := pipeline_folder.standalone_model(Path(source))) is None and resolved.float16_io:
        raise InputError(f"--float16-io goes with one ONNX file: {source} is none.")
    if model is not None:
        return _optimize_file(model, output, resolved, note, on_progress)
    return _optimize_folder(Path(source), output, resolved, note, overwrite, on_progress)


def check_request(
    source: str | Path, output: Path, checkpoint: CheckpointOptions, options: OptimizeOptions, overwrite: bool
) -> None:
    """Raise what `optimize` would raise for its options, their components or `output`. Reads headers of weights."""
    resolved, _ = options.with_target()
    if is_checkpoint(source):
        pipeline_folder.check_replaceable(output, overwrite=overwrite)  # before a download
        opened = open_checkpoint(str(source), checkpoint)
        paths, names = tuple(opened.paths), select_components(opened, resolved.components)
        check_weight_files(opened, names)
    elif (model := pipeline_folder.standalone_model(Path(source))) is not None:
        _check_file_options(model, resolved)
        return
    else:
        _check_not_optimized(Path(source))
        paths, names = (Path(source),), pipeline_folder.select_components(Path(source), resolved.components)
    resolved.with_components(names)
    pipeline_folder.check_replaceable(output, *paths, overwrite=overwrite)


# --- Pipeline folders -----------------------------------------------------------------------------------------------


def _optimize_folder(
    source: Path, output: Path, options: OptimizeOptions, note: str, overwrite: bool, on_progress: ProgressCallback
) -> dict[str, Any]:
    output = output_path(output, source)
    _check_not_optimized(source)
    names = pipeline_folder.select_components(source, options.components)
    if options.inputs:
        check_recorded(options.inputs, names)
    description = pipeline_folder.read_manifest(source)
    by_default = options.hoist is None
    options = options.with_components(names)
    components = unoptimized.folder_components(source, names)
    if options.hoist and by_default:
        denoiser = next(name for name in pipeline_folder.HOISTED if name in names)
        if not make_timestep_1d(load(pipeline_folder.check_component(source, denoiser))):
            note += f" The {denoiser} is not hoisted, since it computes with its timestep, which has no axis, at once."
            options = replace(options, hoist=False)
    manifest = _manifest(
        {
            **description.get("source", {"model": str(source)}),
            "folder": str(source.resolve()),
            "hash": _component_hashes(source, names),
        },
        options.manifest_entry(),
    )
    if (previous := pipeline_folder.manifest_if_current(output, manifest)) is not None:
        on_progress(f"{output} is up to date.")
        return previous
    with pipeline_folder.staged(output, source, overwrite=overwrite, on_progress=on_progress) as work:
        if note:
            on_progress(note.strip())
        pipeline_folder.copy_configs(source, work, names)
        for name, config in infer_configs(source).items():  # the fused graph no longer shows it
            if name in names:
                (work / name).mkdir()
                (work / name / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        manifest["components"], hashes = optimize_components(components, work, options, on_progress)
        pipeline_folder.write_manifest(work, manifest, hashes)
    return pipeline_folder.read_manifest(output)


def _check_not_optimized(source: Path) -> None:
    """Raise InputError for a folder that `sd-ort optimize` or `merge` wrote, whose fused nodes few fusions match."""
    pipeline_folder.check_not_merged(source, pipeline_folder.components(source))
    description = pipeline_folder.read_manifest(source)
    if description.get("stage") == "optimize":
        origin = description.get("source", {})
        name = origin.get("folder") or origin.get("model")
        raise InputError(f"{source} is optimized already: optimize what it was made from{f', {name}' if name else ''}.")
    if any(hoist.is_hoisted(source, name) for name in pipeline_folder.HOISTED):  # its manifest was removed
        raise InputError(f"{source} is hoisted already: optimize the folder it was made from with --hoist.")


def _manifest(source: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of the output without its components."""
    return {
        "stage": "optimize",
        "source": source,
        "versions": {name: package_version(name) for name in ("sd-ort", "onnx", "onnx-ir", "onnxscript")},
        "options": options,
    }


def _component_hashes(source: Path, names: Sequence[str]) -> dict[str, str]:
    """Return an identification of each component: the SHA-256 of its files, if the manifest has them.

    For folders of other tools, it is the hash of the graph, and size and time of the weights, which are gigabytes.
    """
    recorded = pipeline_folder.read_manifest(source).get("files", {})
    hashes = {}
    for name in names:
        files = recorded.get(name, {})
        if pipeline_folder.MODEL in files:
            hashes[name] = "+".join(files[f]["sha256"][:16] for f in sorted(files))
        else:
            others = [p for p in sorted((source / name).rglob("*")) if p.is_file() and p.name != pipeline_folder.MODEL]
            stats = [f"{p.name}:{p.stat().st_size}:{p.stat().st_mtime_ns}" for p in others]
            hashes[name] = "+".join([sha256(source / name / pipeline_folder.MODEL)[:16], *stats])
    return hashes


# --- Checkpoints ----------------------------------------------------------------------------------------------------


def _optimize_checkpoint(
    model: str,
    output: Path,
    checkpoint_options: CheckpointOptions,
    export_options: dict[str, Any],
    options: OptimizeOptions,
    note: str,
    overwrite: bool,
    on_progress: ProgressCallback,
) -> dict[str, Any]:
    started = time.perf_counter()
    pipeline_folder.check_replaceable(output, overwrite=overwrite)  # before a download
    checkpoint = open_checkpoint(model, checkpoint_options)
    output = output_path(output, *checkpoint.paths)
    names = select_components(checkpoint, options.components)
    check_weight_files(checkpoint, names)
    if options.inputs:
        check_recorded(options.inputs, names)
    options = options.with_components(names)
    keys = {name: templates.component_key(checkpoint, name, **export_options) for name in names}
    paths = {name: path for name, key in keys.items() if (path := templates.find_template(key)) is not None}
    missing = [name for name in names if name not in paths]
    manifest = _manifest(
        {"model": checkpoint.name, "random_weights": checkpoint.random_weights},
        {**options.manifest_entry(), **export_options, "templates": {name: path.name for name, path in paths.items()}},
    )
    with pipeline_folder.staged(output, *checkpoint.paths, overwrite=overwrite, on_progress=on_progress) as work:
        for line in filter(None, (note, checkpoint.detection_note)):
            on_progress(line)
        checkpoint.write_configs(work)
        read_ahead({file for name in paths for file in checkpoint.models[MODEL_OF.get(name, name)].files})
        with tempfile.TemporaryDirectory(prefix=f".{output.name}.export-", dir=output.parent) as scratch:
            exported = Path(scratch) / "raw"
            if missing:
                missing_keys = {name: keys[name] for name in missing}
                _export_missing(checkpoint, missing_keys, exported, export_options, on_progress)
                pipeline_folder.copy_configs(exported, work, missing)
                stored = {name: path.name for name in missing if (path := templates.find_template(keys[name]))}
                manifest["options"]["templates"] |= stored
            components = {c.name: c for c in unoptimized.folder_components(exported, missing)}
            components |= {name: _from_template(path, checkpoint, name, work / name) for name, path in paths.items()}
            manifest["components"], hashes = optimize_components(
                [components.pop(name) for name in names], work, options, on_progress
            )
        pipeline_folder.write_manifest(work, manifest, hashes)
    how = "nothing was traced" if not missing else f"{', '.join(missing)} traced"
    on_progress(f"{output}: made in {time.perf_counter() - started:.1f} s, {how}.")
    return pipeline_folder.read_manifest(output)


def _export_missing(
    checkpoint: Checkpoint, keys: Mapping[str, str], out: Path, options: dict[str, Any], on_progress: ProgressCallback
) -> None:
    """Export components to `out`, and store each as a template. `keys`: component -> template key."""
    from sd_ort.export.exporter import ExportOptions, export_checkpoint  # imports torch and diffusers: seconds

    manifest = export_checkpoint(checkpoint, out, ExportOptions(**options), list(keys), on_progress=on_progress)
    for name, key in keys.items():
        if reason := templates.store_template(key, out / name, manifest["components"][name]):
            on_progress(f"{name}: no template was kept: {reason}.")
        else:
            on_progress(f"{name}: template {key} was kept for the next checkpoint of its kind.")


def template_component(path: Path, checkpoint: Checkpoint, component: str) -> unoptimized.UnoptimizedComponent:
    """Return the component of a template with the weights of a checkpoint."""
    template = templates.Template(path)
    model = MODEL_OF.get(component, component)
    config = {**template.config, **checkpoint.configs[model]}
    read = checkpoint.read_tensors(model, template.sources)
    return unoptimized.UnoptimizedComponent(
        component, lambda: template.graph(read), lambda: config, template.bytes, read=read
    )


def _from_template(path: Path, checkpoint: Checkpoint, component: str, out: Path) -> unoptimized.UnoptimizedComponent:
    """Return `template_component`, and write its config.json to `out`."""
    result = template_component(path, checkpoint, component)
    out.mkdir()
    (out / "config.json").write_text(json.dumps(dict(result.config()), indent=2, sort_keys=True) + "\n")
    return result


# --- ONNX files -----------------------------------------------------------------------------------------------------


def _check_file_options(source: Path, options: OptimizeOptions) -> None:
    """Raise InputError for options that an ONNX file does not have."""
    if options.weights is not None:
        raise InputError(f"--weights goes with a pipeline folder or a checkpoint: {source} is one ONNX file.")
    if options.eight_bits:
        raise InputError(
            f"--{options.eight_bits} goes with a pipeline folder or a checkpoint: {source} is one ONNX file."
        )
    if options.components or options.hoist:
        raise InputError(f"--component and --hoist go with a pipeline folder: {source} is one ONNX file.")


def _optimize_file(
    source: Path, output: Path, options: OptimizeOptions, note: str, on_progress: ProgressCallback
) -> dict[str, Any]:
    """Optimize an ONNX file into the file `output`; the returned manifest is not written.

    Weights are in `output` if they are in `source`, else in OUTPUT.data. Recorded inputs are named as the graph's
    inputs, for several runs input/0, input/1.
    """
    _check_file_options(source, options)
    if output.suffix != ".onnx" or output.is_dir():
        raise OutputError(f"{source} is one ONNX file, so OUT must be one too: give a name that ends in .onnx.")
    output = output_path(output, source)
    data = output.with_name(f"{output.name}.data")
    for path in (output, data):
        if path.exists():
            raise OutputError(f"{path} exists: remove it or choose another name.")
    model, name = load(source), pipeline_folder.model_name(source)
    load_recorded_inputs(options.inputs, name, list(model.graph.inputs), required=True)
    tensors = [value.const_value for graph in model.graphs() for value in graph.initializers.values()]
    embed = all(Path(tensor.path).samefile(source) for tensor in tensors if isinstance(tensor, ir.ExternalTensor))
    if note:
        on_progress(note)
    if count := model.metadata_props.get(CONSTANT_INPUTS):
        on_progress(f"{count} inputs that have default values become constants.")
    assert options.target is not None
    if options.dtype == "float16" and not TARGETS[options.target].half_storage_only and not options.float16_io:
        on_progress("inputs and outputs stay float32 (--float16-io makes them float16).")
    manifest = _manifest({"model": str(source)}, options.manifest_entry())
    with scratch_folder(output.parent, output.name) as work:
        optimized = work / "model" / output.name

        def optimize_one(name: str, cancel_event: threading.Event) -> None:
            assert options.target is not None
            target, component = TARGETS[options.target], unoptimized.file_component(source)
            with report_invalid_model(source):
                entry = optimize_component(
                    component,
                    optimized,
                    target,
                    options.dtype,
                    calibrate=options.calibrate,
                    inputs=options.inputs,
                    cancel_event=cancel_event,
                    embed=embed,
                    float32_io=not options.float16_io,
                )
            manifest["components"] = {name: entry}
            check_opens(optimized)

        run_interruptible(optimize_one, [name], at_once=1)
        try:
            if optimized.with_name(data.name).exists():
                optimized.with_name(data.name).rename(data)
            optimized.rename(output)
        except BaseException:
            data.unlink(missing_ok=True)
            raise
    return manifest
