"""Checkpoint -> ONNX pipeline folder, one component at a time, each checked against torch before the next is loaded.

    source = open_source(...)            a diffusers folder, a hub id, the demo model, or a preset's configs
    for each component:                  text_encoder, text_encoder_2, unet, controlnet, vae_encoder, vae_decoder
        load in fp32 -> wrap -> run torch at CHECK sizes -> trace at TRACE sizes -> save -> free
        -> run ONNX Runtime at CHECK sizes -> compare

Only one component is in memory at once, and its weights are held once: the exporters borrow them and the file is
written tensor by tensor. Weights of a component lie in one external-data file.
"""

from __future__ import annotations

import gc
import platform
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fusion_passes.weight_recipes import dump
from sd_ort.core.errors import InputError, OutputError, VerificationError, first_line
from sd_ort.core.files import code_hash, read_json
from sd_ort.core.folder import DATA, MODEL, is_intact, read_manifest, staged, write_manifest
from sd_ort.core.interrupts import in_threads
from sd_ort.core.paths import output_path
from sd_ort.core.quiet import quiet
from sd_ort.export import templates
from sd_ort.export.origins import equal_tensors, origins
from sd_ort.export.tracing import DEFAULT_OPSET, EXPORTERS, OPSETS, tidy
from sd_ort.family.checkpoints import FileOptions, Source, choose, component_signature, is_sdxl, open_source
from sd_ort.family.conditions import CONDITIONS_BY_NAME
from sd_ort.family.modules import wrap
from sd_ort.family.signatures import MODEL_OF, Config, Signature, Tensor, size
from sd_ort.runtime.provider_records import CPU_EP
from sd_ort.runtime.wheels import runtime

if TYPE_CHECKING:
    import onnx_ir as ir

Progress = Callable[[str], None]


# Sizes the graphs are traced at and checked at: all different, so that a size baked in by the exporter is an error
# and not a coincidence. In latent pixels; a multiple of 8 as the UNets need. Batch 1 is checked because exporters
# like to treat 1 as a constant.
TRACE = {"batch": 2, "sequence": 12, "images": 3, "height": 16, "width": 24}
CHECK = {"batch": 1, "sequence": 19, "images": 2, "height": 24, "width": 16}

TOLERANCE = 1e-8  # normalized mean squared error of fp32 ONNX Runtime against fp32 torch; measured: about 1e-12
ALIGNMENT = 1 << 16  # of large tensors in the data file: every ONNX Runtime on every system can map it


# Loggers that report the exporters' inner doings; their errors are exceptions.
NOISY = (
    "torch.onnx",
    "torch.export",
    "torch.fx",
    "torch._dynamo",
    "onnxscript",
    "onnx_ir",
    "diffusers",
    "transformers",
)


# --- Exporters ------------------------------------------------------------------------------------------------------


def example(tensor: Tensor, sizes: Mapping[str, int], config: Mapping[str, Any], seed: int) -> torch.Tensor:
    """Random values for an input: token ids in the vocabulary, timesteps in 0..1000, conditions, or normal noise."""
    generator = torch.Generator().manual_seed(seed + zlib.crc32(tensor.name.encode()))
    shape = [size(axis, sizes) for axis in tensor.axes]
    if condition := CONDITIONS_BY_NAME.get(tensor.name):
        made = condition.made_up(np.random.default_rng([seed, zlib.crc32(tensor.name.encode())]), shape, config)
        return torch.from_numpy(made.astype(tensor.dtype))
    if tensor.dtype == "int64":
        return torch.randint(config["vocab_size"], shape, generator=generator)
    if tensor.name == "timestep":
        return torch.rand(shape, generator=generator) * 1000
    if tensor.name == "conditioning_scale":
        return torch.full(shape, 0.8)
    return torch.randn(shape, generator=generator)


# --- One component --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What changes the exported graphs."""

    opset: int
    exporter: str


def export_component(source: Source, component: str, folder: Path, options: Options, seed: int) -> dict[str, Any]:
    """Export one component into `folder` and compare it with torch; its entry of the manifest.

    Raises InputError for weights with which torch gives no numbers, VerificationError when ONNX Runtime's fp32 outputs
    differ from torch's by more than TOLERANCE.
    """
    import onnx_ir as ir

    started = time.perf_counter()
    folder.mkdir()
    scratch = folder / ".scratch"
    scratch.mkdir()
    with quiet(*NOISY), torch.no_grad():
        model = source.load(MODEL_OF.get(component, component))
        config = save_config(model, folder)
        check_space(model, folder, copies=2 if options.exporter == "torchscript" else 1)
        signature = component_signature(source, component, config)
        module = wrap(component, model, is_sdxl(source), "controlnet" in source.configs)
        inputs = {t.name: example(t, CHECK, config, seed) for t in signature.inputs}
        outputs = _in_torch(module, list(inputs.values()), component)
        expected = [o.numpy() for o in (outputs if isinstance(outputs, tuple) else (outputs,))]
        if not all(np.isfinite(array).all() for array in expected):
            raise InputError(f"{source.name}: its {component} gives NaN or infinite numbers in torch: get it again.")
        args = [example(t, TRACE, config, seed + 1) for t in signature.inputs]
        graph = _to_onnx(module, args, signature, options, scratch, component)
        tidy(graph, signature)
        tensors = model.state_dict()  # without what wrapping took away
        recipes, equal = dump(origins(graph, tensors)), [list(pair) for pair in equal_tensors(tensors)]
        nodes = len(graph.graph)
        ir.save(graph, folder / MODEL, external_data=DATA, alignment=ALIGNMENT)
    for value in graph.graph.initializers.values():  # onnxscript's rules keep the last graph they saw: not its weights
        value.const_value = None
    del model, module, args, outputs, graph, tensors
    shutil.rmtree(scratch)
    torch.compiler.reset()
    gc.collect()
    error = compare(run_onnx(folder / MODEL, inputs), expected)
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
        "weights": recipes,
        **({"equal_weights": equal} if equal else {}),
    }


def _in_torch(module: torch.nn.Module, inputs: Sequence[torch.Tensor], component: str) -> Any:
    """The module's outputs. Raises InputError for a config whose parts do not fit together."""
    try:
        return module(*inputs)
    except Exception as error:  # diffusers checks little of a config: the parts fail in their own ways
        raise InputError(f"torch cannot run this {component}: {first_line(error)}") from error


def _to_onnx(
    module: torch.nn.Module, args: Sequence[torch.Tensor], signature: Signature, options: Options, scratch: Path,
    component: str,
) -> ir.Model:  # fmt: skip
    """The module as an ONNX graph. Raises InputError for what the exporter cannot express."""
    try:
        return EXPORTERS[options.exporter](module, args, signature, options.opset, scratch)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # the exporters have no common base of errors
        other = next(name for name in EXPORTERS if name != options.exporter)
        raise InputError(
            f"the {options.exporter} exporter cannot take this {component} ({first_line(error)}): "
            f"try --exporter {other}."
        ) from error


def save_config(model: Any, folder: Path) -> Config:
    """Write the model's config.json, with the defaults filled in, and return it."""
    if hasattr(model, "save_config"):  # diffusers
        model.save_config(folder)
    else:
        model.config.save_pretrained(folder)
    return read_json(folder / "config.json", f"{folder} has no config")


def check_space(model: torch.nn.Module, folder: Path, copies: int) -> None:
    """Raise OutputError when the disk has no room for `copies` of the weights in fp32."""
    needed = sum(p.numel() for p in model.parameters()) * 4 * copies
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OutputError(
            f"no space left for {folder.name}: it needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free."
        )


def run_onnx(path: Path, inputs: Mapping[str, torch.Tensor]) -> list[np.ndarray]:
    """Outputs of the graph as it is: no graph optimization and no repacked weights, so they stay mapped from disk."""
    onnxruntime = runtime()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=[CPU_EP])
    outputs: list[np.ndarray] = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    return outputs


def compare(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> dict[str, float]:
    """Worst error over all outputs: `max_abs`, and `nmse` = sum (a - e)^2 / sum e^2. A wrong shape or NaN is inf."""
    worst = {"max_abs": 0.0, "nmse": 0.0}
    for a, e in zip(actual, expected, strict=True):
        if a.shape != e.shape or not (np.isfinite(a).all() and np.isfinite(e).all()):
            return {"max_abs": float("inf"), "nmse": float("inf")}
        difference = a.astype(np.float64) - e
        worst["max_abs"] = max(worst["max_abs"], float(np.abs(difference).max()))
        worst["nmse"] = max(worst["nmse"], float(np.square(difference).sum() / np.square(e, dtype=np.float64).sum()))
    return worst


# --- The stage ------------------------------------------------------------------------------------------------------


def export(
    model: str | None,
    out: Path,
    *,
    preset: str | None = None,
    random_weights: bool = False,
    opset: int = DEFAULT_OPSET,
    exporter: str = "dynamo",
    seed: int = 0,
    components: Sequence[str] | None = None,
    controlnet: str | None = None,
    files: FileOptions = FileOptions(),  # noqa: B008 (frozen)
    progress: Progress = lambda message: None,
) -> dict[str, Any]:
    """Export a pipeline to the folder `out` and return its manifest.

    `model`: "demo", a checkpoint in one file (with `files`), a diffusers folder or a hub id; or None with `preset` and
    `random_weights`, made from `seed`. `components`: export only these. `controlnet`: a diffusers folder or hub id of a
    ControlNet to export along, with the residual inputs in the UNet. `progress` is called with one line at each step.
    Nothing is done when `out` already holds the same export.

    Raises InputError for a source or option that cannot be used, OutputError when `out` cannot be written,
    VerificationError when a component's numbers differ from torch's. Nothing is left behind then.
    """
    if exporter not in EXPORTERS:
        raise InputError(f"unknown exporter {exporter!r}: choose one of {', '.join(EXPORTERS)}.")
    if opset not in OPSETS[exporter]:
        choices = ", ".join(map(str, OPSETS[exporter]))
        raise InputError(f"opset {opset} is not supported by the {exporter} exporter: choose one of {choices}.")
    source = open_source(model, preset, random_weights, seed, controlnet, files)
    if source.about:
        progress(source.about)
    out = output_path(out, *source.folders)
    names = choose(source, components)
    manifest: dict[str, Any] = {
        "stage": "export",
        "source": {"model": source.name, "hash": source.hash, "random_weights": source.random_weights},
        "versions": versions(),
        "options": {"opset": opset, "exporter": exporter, "seed": seed, "components": names},
    }
    if source.random_weights:
        manifest["source"]["tokenizer"] = "stand-in: one token a byte"
    previous = _previous(out)
    if all(previous.get(key) == value for key, value in manifest.items()) and is_intact(out, previous):
        progress(f"{out} is up to date.")
        return previous
    if model and all(templates.find(templates.key_of(source, name, opset, exporter)) for name in names):
        progress(f"there are templates for all of it: `sd-ort optimize {model} OUT` needs no export.")
    with staged(out, *source.folders) as work:
        source.write_configs(work)
        done: dict[str, Any] = {}

        def make(name: str, stopped: threading.Event) -> None:
            count = f"[{names.index(name) + 1}/{len(names)}] {name}"
            progress(f"{count}: exporting ...")
            done[name] = export_component(source, name, work / name, Options(opset, exporter), seed)
            if not stopped.is_set():
                progress(f"{count}: done in {done[name]['seconds']:.1f} s")

        in_threads(make, names, at_once=1)
        manifest["components"] = done
        write_manifest(work, manifest)
    progress(f"wrote {out}.")
    return read_manifest(out)


def _previous(out: Path) -> dict[str, Any]:
    """The manifest of an earlier export, or {} when there is none that can be read: it is replaced then."""
    try:
        return read_manifest(out)
    except InputError:
        return {}


def versions() -> dict[str, str]:
    """Versions of all that decides how a graph comes out; of this stage's own code a hash."""
    packages = ("sd-ort", "torch", "diffusers", "transformers", "onnx", "onnx-ir", "onnxscript")
    root = Path(__file__).resolve().parent
    code = code_hash(root, root.with_name("family"))
    own = {"python": platform.python_version(), "sd_ort.export": code}
    return own | {name: version(name) for name in packages}
