"""Exports a checkpoint to an ONNX pipeline folder, one component at a time, each compared with torch.

    open_checkpoint(...)                 a diffusers folder, a hub id, the demo model, or the configs of a preset
    for each component:                  text_encoder(_2, _3), unet or transformer, controlnet, vae_encoder, vae_decoder
        load in float32 -> wrap -> run torch at CHECK_SIZES -> trace at TRACE_SIZES -> save -> free
        -> run ONNX Runtime at CHECK_SIZES -> compare

Only one component is in memory at a time, with one copy of its weights: the exporters share them, and the file is
written tensor by tensor. Each component has one external data file.
"""

from __future__ import annotations

import gc
import platform
import shutil
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fusion_passes.weight_recipes import dump
from sd_ort.checkpoints.checkpoint import (
    Checkpoint,
    check_weight_files,
    component_signature,
    has_penultimate_states,
    select_components,
)
from sd_ort.checkpoints.diffusion_transformers import synthetic_values
from sd_ort.checkpoints.modules import derived_weights, wrap
from sd_ort.checkpoints.open import CheckpointOptions, open_checkpoint
from sd_ort.checkpoints.signatures import MODEL_OF, Config, Signature, TensorSpec, size, text_config
from sd_ort.checkpoints.unet_inputs import CONDITIONING_INPUTS_BY_NAME
from sd_ort.core.aliases import accept_old_names
from sd_ort.core.errors import InputError, OutputError, VerificationError, first_line
from sd_ort.core.files import read_json
from sd_ort.core.interrupts import run_interruptible
from sd_ort.core.metrics import array_errors
from sd_ort.core.package_version import package_version
from sd_ort.core.paths import output_path
from sd_ort.core.pipeline_folder import DATA, MODEL, manifest_if_current, read_manifest, staged, write_manifest
from sd_ort.core.progress import ProgressCallback, ignore_progress
from sd_ort.core.quiet import quiet
from sd_ort.export import templates
from sd_ort.export.finished import FinishedComponents
from sd_ort.export.initializer_sources import duplicate_tensors, initializer_recipes
from sd_ort.export.tracing import DEFAULT_OPSET, EXPORTERS, OPSETS, normalize_exported_names
from sd_ort.graphs.external_data_writer import ALIGNMENT
from sd_ort.runtime.ort_wheel import import_onnxruntime
from sd_ort.runtime.provider_table import CPU_EP

if TYPE_CHECKING:
    import onnx_ir as ir

# Sizes for tracing and for the comparison with torch. All differ, so that a size that the exporter made constant is an
# error. Heights and widths are in latent pixels, multiples of 8 as UNets require. The comparison uses batch 1, since
# exporters may treat 1 as a constant.
TRACE_SIZES = {"batch": 2, "sequence": 12, "images": 3, "height": 16, "width": 24, "image_sequence": 40,
               "windows": 5, "patches": 52}  # fmt: skip
CHECK_SIZES = {"batch": 1, "sequence": 19, "images": 2, "height": 24, "width": 16, "image_sequence": 28,
               "windows": 3, "patches": 36}  # fmt: skip

TOLERANCE = 1e-8  # normalized mean squared error of ONNX Runtime against torch in float32; measured: about 1e-12


# Loggers of exporter internals; errors are exceptions.
NOISY_LOGGERS = "torch.onnx torch.export torch.fx torch._dynamo onnxscript onnx_ir diffusers transformers".split()


# --- Inputs ---------------------------------------------------------------------------------------------------------


def example_input(tensor: TensorSpec, sizes: Mapping[str, int], config: Mapping[str, Any], seed: int) -> torch.Tensor:
    """Return random values for a graph input: token ids, timesteps in 0..1000, conditioning inputs or normal noise."""
    generator = torch.Generator().manual_seed(seed + zlib.crc32(tensor.name.encode()))
    shape = [size(axis, sizes) for axis in tensor.axes]
    random = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
    values = synthetic_values(config, tensor.name, random, shape)
    if values is None and (spec := CONDITIONING_INPUTS_BY_NAME.get(tensor.name)):
        values = spec.synthesize(random, shape, config)
    if values is not None:
        return torch.from_numpy(values.astype(tensor.dtype))
    if tensor.dtype == "int64":
        return torch.randint(text_config(config)["vocab_size"], shape, generator=generator)
    if tensor.name == "timestep":
        return torch.rand(shape, generator=generator) * 1000
    if tensor.name == "conditioning_scale":
        return torch.full(shape, 0.8)
    return torch.randn(shape, generator=generator)


# --- One component --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExportOptions:
    """Options that change the exported graphs."""

    opset: int = DEFAULT_OPSET
    exporter: str = "dynamo"
    seed: int = 0  # of the inputs that outputs are compared for


def export_component(source: Checkpoint, component: str, folder: Path, options: ExportOptions) -> dict[str, Any]:
    """Export one component into `folder`, compare it with torch, and return its entry for the manifest.

    Raises InputError if torch's outputs are NaN or infinite, VerificationError if the float32 outputs of ONNX Runtime
    differ from torch's by more than TOLERANCE.
    """
    import onnx_ir as ir

    started = time.perf_counter()
    folder.mkdir()
    scratch = folder / ".scratch"
    scratch.mkdir()
    with quiet(*NOISY_LOGGERS), torch.no_grad():
        model = source.load(MODEL_OF.get(component, component))
        config = save_config(model, folder)
        check_disk_space(model, folder, copies=2 if options.exporter == "torchscript" else 1)
        signature = component_signature(source, component, config)
        module = wrap(component, model, has_penultimate_states(source), "controlnet" in source.configs)
        inputs = {t.name: example_input(t, CHECK_SIZES, config, options.seed) for t in signature.inputs}
        outputs = _run_torch(module, list(inputs.values()), component)
        expected = [o.numpy() for o in (outputs if isinstance(outputs, tuple) else (outputs,))]
        if not all(np.isfinite(array).all() for array in expected):
            raise InputError(f"{source.name}: the {component} returns NaN or infinity in torch: download it again.")
        args = [example_input(t, TRACE_SIZES, config, options.seed + 1) for t in signature.inputs]
        graph = _to_onnx(module, args, signature, options, scratch, component)
        normalize_exported_names(graph, signature)
        tensors = model.state_dict()  # without modules that the wrapper removed
        recipes = dump(initializer_recipes(graph.graph.initializers.values(), tensors, derived_weights(module)))
        duplicates = [list(pair) for pair in duplicate_tensors(tensors)]
        nodes = len(graph.graph)
        ir.save(graph, folder / MODEL, external_data=DATA, alignment=ALIGNMENT)
    for value in graph.graph.initializers.values():  # onnxscript's rules retain their last graph
        value.const_value = None
    del model, module, args, outputs, graph, tensors
    shutil.rmtree(scratch)
    torch.compiler.reset()
    gc.collect()
    error = compare_outputs(run_onnx(folder / MODEL, inputs), expected)
    if not error["nmse"] <= TOLERANCE:
        raise VerificationError(
            f"{component} differs from torch after export (NMSE {error['nmse']:.1e}, tolerance {TOLERANCE:.0e}): "
            "try another --opset or --exporter."
        )
    return {
        "torch_error": error | {"shapes": {name: list(value.shape) for name, value in inputs.items()}},
        "nodes": nodes,
        "bytes": sum((folder / name).stat().st_size for name in (MODEL, DATA)),
        "seconds": round(time.perf_counter() - started, 1),
        "weight_recipes": recipes,
        **({"duplicate_weights": duplicates} if duplicates else {}),
    }


def _run_torch(module: torch.nn.Module, inputs: Sequence[torch.Tensor], component: str) -> Any:
    """Return the module's outputs. Raises InputError for an inconsistent config."""
    try:
        return module(*inputs)
    except Exception as error:  # diffusers hardly checks configs; modules raise various errors
        raise InputError(f"PyTorch cannot run this {component}: {first_line(error)}") from error


def _to_onnx(
    module: torch.nn.Module, args: Sequence[torch.Tensor], signature: Signature, options: ExportOptions, scratch: Path,
    component: str,
) -> ir.Model:  # fmt: skip
    """Return the module as an ONNX graph. Raises InputError if the exporter fails."""
    try:
        return EXPORTERS[options.exporter](module, args, signature, options.opset, scratch)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # the exporters have no common base class of errors
        other = next(name for name in EXPORTERS if name != options.exporter)
        raise InputError(
            f"The {options.exporter} exporter cannot export this {component} ({first_line(error)}): "
            f"try --exporter {other}."
        ) from error


def save_config(model: Any, folder: Path) -> Config:
    """Write the model's config.json with all defaults, and return it."""
    if hasattr(model, "save_config"):  # diffusers
        model.save_config(folder)
    else:
        model.config.save_pretrained(folder)
    return read_json(folder / "config.json", f"{folder} has no config")


def check_disk_space(model: torch.nn.Module, folder: Path, copies: int) -> None:
    """Raise OutputError if the disk has no room for `copies` of the weights in float32."""
    required = sum(p.numel() for p in model.parameters()) * 4 * copies
    free = shutil.disk_usage(folder).free
    if free < required:
        raise OutputError(
            f"No space left for {folder.name}: it needs {required / 1e9:.1f} GB and {free / 1e9:.1f} GB are free."
        )


def run_onnx(path: Path, inputs: Mapping[str, torch.Tensor]) -> list[np.ndarray]:
    """Return the outputs of a graph without graph optimization and prepacking, so that weights stay mapped files."""
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=[CPU_EP])
    return session.run(None, {name: value.numpy() for name, value in inputs.items()})


def compare_outputs(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> dict[str, float]:
    """Return the largest `max_abs` and `nmse` of all outputs, see `metrics.array_errors`."""
    errors = [array_errors(a, e) for a, e in zip(actual, expected, strict=True)]
    return {name: max(error[name] for error in errors) for name in ("max_abs", "nmse")}


# --- Export ---------------------------------------------------------------------------------------------------------


@accept_old_names(progress="on_progress")
def export(
    model: str | None,
    out: Path,
    *,
    opset: int = DEFAULT_OPSET,
    exporter: str = "dynamo",
    components: Sequence[str] | None = None,
    overwrite: bool = False,
    on_progress: ProgressCallback = ignore_progress,
    **checkpoint_options: Any,
) -> dict[str, Any]:
    """Export a pipeline to the folder `out` and return its manifest.

    Args:
        model: "demo", a single-file checkpoint, a diffusers folder or a hub id; None with the options `preset` and
            `random_weights`.
        components: Export only these components.
        overwrite: Replace files in `out` that were changed since sd-ort wrote them.
        on_progress: Called with one line per step. `progress` is its old name.
        checkpoint_options: Fields of `CheckpointOptions`.

    Raises: see `export_checkpoint`.
    """
    options = CheckpointOptions(**checkpoint_options)
    check_exporter(exporter, opset)
    checkpoint = open_checkpoint(model, options)
    if checkpoint.detection_note:
        on_progress(checkpoint.detection_note)
    export_options = ExportOptions(opset, exporter, options.seed)
    return export_checkpoint(checkpoint, out, export_options, components, overwrite, on_progress)


def check_exporter(exporter: str, opset: int) -> None:
    """Raise InputError for an unknown exporter or an opset that it does not support."""
    if exporter not in EXPORTERS:
        raise InputError(f"Unknown exporter {exporter!r}: choose one of {', '.join(EXPORTERS)}.")
    if opset not in OPSETS[exporter]:
        choices = ", ".join(map(str, OPSETS[exporter]))
        raise InputError(f"Opset {opset} is not supported by the {exporter} exporter: choose one of {choices}.")


def export_checkpoint(
    source: Checkpoint,
    out: Path,
    options: ExportOptions,
    components: Sequence[str] | None = None,
    overwrite: bool = False,
    on_progress: ProgressCallback = ignore_progress,
) -> dict[str, Any]:
    """Export components of an open checkpoint to the folder `out` and return its manifest.

    If `out` already contains the same export, nothing is written. After an error, no files remain; after an interrupt,
    the finished components remain beside `out`, and the same call goes on from there.

    Raises:
        InputError: The checkpoint or an option cannot be used.
        OutputError: `out` cannot be written.
        VerificationError: The outputs of a component differ from torch's.
    """
    check_exporter(options.exporter, options.opset)
    out = output_path(out, *source.paths)
    names = select_components(source, components)
    check_weight_files(source, names)
    manifest: dict[str, Any] = {
        "stage": "export",
        "source": {"model": source.name, "hash": source.hash, "random_weights": source.random_weights},
        "versions": versions(),
        "options": {**vars(options), "components": names},
    }
    if source.random_weights:
        manifest["source"]["tokenizer"] = "stand-in: one token a byte"
    if (previous := manifest_if_current(out, manifest)) is not None:
        on_progress(f"{out} is up to date.")
        return previous
    keys = [templates.component_key(source, name, options.opset, options.exporter) for name in names]
    if not source.random_weights and all(map(templates.find_template, keys)):
        on_progress(f"All components have templates: `sd-ort optimize {source.name} OUT` needs no export.")
    finished = FinishedComponents(out, manifest | {"options": vars(options)})
    with staged(out, *source.paths, overwrite=overwrite, on_progress=on_progress) as work:
        source.write_configs(work)
        manifest["components"] = _export_components(source, names, work, options, finished, on_progress)
        write_manifest(work, manifest)
    finished.remove()
    on_progress(f"wrote {out}.")
    return read_manifest(out)


def _export_components(
    source: Checkpoint, names: Sequence[str], work: Path, options: ExportOptions, finished: FinishedComponents,
    on_progress: ProgressCallback,
) -> dict[str, Any]:  # fmt: skip
    """Export components one after the other, but for those in `finished`, and return their manifest entries."""
    entries: dict[str, Any] = {}

    def export_one(name: str, cancel_event: threading.Event) -> None:
        count = f"[{names.index(name) + 1}/{len(names)}] {name}"
        if entry := finished.take(name, work / name):
            entries[name] = entry
            on_progress(f"{count}: taken from the export that was interrupted")
            return
        on_progress(f"{count}: exporting ...")
        entries[name] = export_component(source, name, work / name, options)
        if not cancel_event.is_set():
            finished.keep(name, work / name, entries[name])
            on_progress(f"{count}: done in {entries[name]['seconds']:.1f} s")

    try:
        run_interruptible(export_one, names, at_once=1)
    except KeyboardInterrupt:
        if exported := finished.names():
            on_progress(f"{', '.join(exported)}: kept in {finished.folder}, from where the same command goes on.")
        raise
    except Exception:
        finished.remove()
        raise
    return entries


def versions() -> dict[str, str]:
    """Return the versions in the manifest of an export."""
    return {"python": platform.python_version(), "sd-ort": package_version("sd-ort"), **templates.exporter_versions()}
