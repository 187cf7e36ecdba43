"""Selection of a benchmark's engines: those of the given folders, of --engines, or the ablation's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sd_ort import demo
from sd_ort.benchmark.engine_builds import ABLATION, HOIST, BuildSpec, ablation_steps
from sd_ort.benchmark.engines.interface import ENGINE_TYPES, Engine
from sd_ort.checkpoints import is_diffusers_folder
from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import components, read_manifest
from sd_ort.model_cache import dtype_for
from sd_ort.optimize.targets import TARGETS
from sd_ort.runtime.library import library_path
from sd_ort.runtime.provider_choice import target_of
from sd_ort.runtime.providers import provider_named

PRECISIONS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
# Engine type by name, of engines other than ONNX Runtime on a folder.
OTHER_ENGINES = {name: engine for engine, engine_type in ENGINE_TYPES.items() for name in engine_type.names}
# Values of --engines, besides `ours-TARGET`.
NAMES = (
    *("raw", "raw-fp16", "ours", "ours-graph", "ours-hoist", "ours-hoist-graph", "ort", "ort-graph", "onnxscript"),
    *OTHER_ENGINES,
)


def find_engines(
    folders: Sequence[Path], torch_model: str | None = None, names: Sequence[str] = (), provider: str = "cpu"
) -> tuple[list[Engine], list[str]]:
    """Return the engines of a run, raw exports first and torch last, and notes on omitted engines.

    The source of an optimized folder is added if there is no raw export in `folders` and the source still exists.

    Args:
        torch_model: diffusers folder, "demo", "demo-dit", "none", or None for the model that the first folder was
            exported from.
        names: engines of `NAMES` or `ours-TARGET` instead of the raw export and torch eager; optimized folders stay.

    Raises:
        InputError: if a folder is no pipeline, a model does not exist, or a name is unknown.
    """
    for folder in folders:
        components(folder)
    manifests = {folder: read_manifest(folder) for folder in folders}
    if not any(m.get("stage") == "export" for m in manifests.values()):
        for manifest in list(manifests.values()):
            raw = Path(str(manifest.get("source", {}).get("folder", "")))
            if manifest.get("stage") == "optimize" and read_manifest(raw).get("stage") == "export":
                manifests = {raw: read_manifest(raw), **manifests}
                break
    ordered = sorted(manifests, key=lambda folder: manifests[folder].get("stage") != "export")
    engines = _distinct([_onnx_engine(folder, manifests[folder]) for folder in ordered])
    torch_engines, notes = _torch_engines(torch_model, engines[0])
    if not names:
        return [*engines, *torch_engines], notes
    named = [engine for name in names for engine in _named(name, engines[0], torch_engines, provider)]
    first_torch = next((i for i, engine in enumerate(named) if engine.engine == "torch"), len(named))
    optimized = [engine for engine in engines if engine.stage != "export"]
    uses_torch = any(OTHER_ENGINES.get(name) == "torch" for name in names)
    return [*named[:first_torch], *optimized, *named[first_torch:]], notes if uses_torch else []


def ablation(raw: Path, provider: str) -> tuple[list[Engine], list[str]]:
    """Return the ablation's rows for a provider, from the raw export to all optimizations, and notes.

    On the CPU, which emulates half precision, only one row is in half precision. Raises InputError if `raw` is no
    export.
    """
    engine = _raw_export(raw)
    dtype, target = dtype_for(provider), target_of(provider)
    rows = [replace(engine, label="raw fp32"), _built(engine, "raw fp16", ("raw", "float16"), target="raw")]
    for name in ablation_steps(TARGETS[target]):
        if name != "none":
            label = f"{ABLATION[name].label}{'' if dtype == 'float16' else ' fp32'}"
            rows.append(_built(engine, label, ("ours", target, dtype, name), target=target))
    notes = ["rows add up from the second (raw fp16) on, but on the CPU from the first (raw fp32) on."]
    last = rows[-1]
    rows = [replace(row, library=False) for row in rows]
    if library_path() is not None:
        rows.append(replace(last, label="ours: + op library", build_spec=("ours", target, dtype)))
    else:
        notes.append("no row for the op library: it is not built (sd-ort build-ops).")
    rows.append(replace(rows[-1], label="+ hoisting", build_spec=("ours", target, dtype, HOIST)))
    if provider_named(provider).graph is not None:
        rows.append(replace(rows[-1], label="+ graph capture", graph=True))
    else:
        notes.append(f"no row for graph capture: the {provider} provider has none.")
    return rows, notes


# --- One engine -----------------------------------------------------------------------------------------------------


def _named(name: str, first: Engine, torch_engines: Sequence[Engine], provider: str) -> list[Engine]:
    """Return the engines of a name: [] for torch without a model. Raises InputError for an unknown name."""
    folder = Path(first.directory)
    if name in OTHER_ENGINES:
        variant, label = ENGINE_TYPES[OTHER_ENGINES[name]].names[name]
        engines = torch_engines if OTHER_ENGINES[name] == "torch" else [_raw_export(folder)]
        return [replace(engine, label=label, engine=OTHER_ENGINES[name], variant=variant) for engine in engines]
    dtype = dtype_for(provider)
    precision = PRECISIONS[dtype]
    kind, _, rest = name.partition("-")
    words = rest.split("-") if rest else []
    graph, hoisted = words[-1:] == ["graph"], HOIST in words
    default_target = not set(words) - {"graph", HOIST}
    target = target_of(provider) if default_target else rest
    if name not in NAMES and not (kind == "ours" and target in TARGETS):
        raise InputError(f"unknown engine {name!r}: choose from {', '.join(NAMES)}, or ours-TARGET.")
    if name == "ours" and _is_optimized_for(folder, target, dtype):
        return []  # the folder itself stays in the comparison
    raw = _raw_export(folder)
    if name == "raw":
        return [raw]
    if name == "raw-fp16":
        return [_built(raw, "raw ONNX fp16", ("raw", "float16"), target="raw")]
    if kind == "onnxscript":
        return [_built(raw, f"onnxscript {precision}", ("onnxscript", dtype))]
    if kind == "ours":
        label = f"ours {precision}{'' if default_target else ' ' + target}{' hoisted' if hoisted else ''}"
        engine = _built(raw, label, ("ours", target, dtype, *([HOIST] if hoisted else [])), target=target)
    else:
        engine = _built(raw, f"ORT optimizer {precision}", ("ort", provider, dtype))
    return [replace(engine, label=f"{engine.label} + graph", graph=True) if graph else engine]


def _built(raw: Engine, label: str, spec: BuildSpec, target: str = "") -> Engine:
    """Return an engine whose folder is built from a raw export before it is loaded."""
    return replace(raw, label=label, stage="made", target=target, build_spec=spec, raw_export=raw.directory)


def _raw_export(folder: Path) -> Engine:
    manifest = read_manifest(folder) if folder.is_dir() else {}
    components(folder)
    if manifest.get("stage") not in ("export", None):
        model = manifest.get("source", {}).get("model", "MODEL")
        raise InputError(
            f"{folder} is optimized, and there is no raw export that it was made from: sd-ort export {model} RAW, and "
            "give RAW before it."
        )
    return replace(_onnx_engine(folder, manifest), label="raw ONNX")


def _is_optimized_for(folder: Path, target: str, dtype: str) -> bool:
    manifest = read_manifest(folder)
    options = manifest.get("options", {})
    return manifest.get("stage") == "optimize" and (options.get("target"), options.get("dtype")) == (target, dtype)


def _onnx_engine(folder: Path, manifest: dict[str, Any]) -> Engine:
    source, options, stage = manifest.get("source", {}), manifest.get("options", {}), manifest.get("stage", "")
    precision = f"{PRECISIONS.get(options.get('dtype'), '')} {options.get('eight_bits', '')}"
    precision += " dynamic" if options.get("dynamic_scales") else ""
    labels = {"export": "raw ONNX", "optimize": f"fused {precision}".strip()}
    return Engine(
        label=labels.get(stage, folder.name),
        engine="onnxruntime",
        directory=str(folder),
        model=str(source.get("model") or folder.name),
        stage=stage,
        target=options.get("target", ""),
        random_weights=bool(source.get("random_weights")),
        weights_seed=options.get("seed"),
        raw_export=str(folder),
    )


def _distinct(engines: list[Engine]) -> list[Engine]:
    """Append the target to equal labels, and to labels that are still equal the folder's name."""
    for suffix in (lambda e: e.target, lambda e: Path(e.directory).name):
        labels = [e.label for e in engines]
        engines = [
            replace(e, label=f"{e.label} {suffix(e)}".strip()) if labels.count(e.label) > 1 else e for e in engines
        ]
    return engines


def _torch_engines(torch_model: str | None, first: Engine) -> tuple[list[Engine], list[str]]:
    """Return ([torch eager on `torch_model` or on the first engine's model], []), or ([], [reason])."""
    torch = replace(first, label="torch eager", engine="torch", stage="torch", target="")
    if torch_model == "none":
        return [], []
    if torch_model:
        if torch_model not in demo.FOLDERS and not is_diffusers_folder(Path(torch_model)):
            raise InputError(f"{torch_model} is not a diffusers folder: give one, `demo` or `none` to --torch.")
        return [replace(torch, directory=torch_model, model=torch_model, random_weights=False)], []
    if first.random_weights and first.weights_seed is None:
        return [], ["torch was not measured: the export, which records the seed of its random weights, is gone."]
    if first.random_weights or first.model in demo.FOLDERS or is_diffusers_folder(Path(first.model)):
        return [replace(torch, directory=first.model)], []
    return [], [f"torch was not measured: {first.model!r} is no diffusers folder on this machine (use --torch)."]
