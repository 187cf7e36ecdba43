"""Which engines a benchmark compares: those of the folders given, those named with --engines, the ablation's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sd_ort.benchmark.ablation import ABLATION, ablation_steps
from sd_ort.benchmark.engine_builds import HOIST
from sd_ort.benchmark.engines.interface import Engine
from sd_ort.benchmark.engines.registry import KINDS
from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import MODEL, components, read_manifest
from sd_ort.optimize.targets import TARGETS
from sd_ort.runtime.library import library_path
from sd_ort.runtime.providers import provider_named

PRECISIONS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
# The engines that are not ONNX Runtime on a folder, by name.
OTHERS = {name: kind for kind, record in KINDS.items() for name in record.names}
# What --engines takes, beside `ours-TARGET`.
NAMES = (
    *("raw", "raw-fp16", "ours", "ours-graph", "ours-hoist", "ours-hoist-graph", "ort", "ort-graph", "onnxscript"),
    *OTHERS,
)


def find_engines(
    folders: Sequence[Path],
    torch_model: str | None = None,
    names: Sequence[str] = (),
    provider: str = "cpu",
) -> tuple[list[Engine], list[str]]:
    """The engines of a run, raw exports first, torch last; and notes on what was left out and why.

    For an optimized folder alone, the export it was made from joins when it still exists. `torch_model`: a diffusers
    folder, "demo", "none", or None for the model that the first folder was exported from, if it can be found. `names`:
    engines to compare instead of the raw export and torch eager, of `NAMES` or `ours-TARGET`; optimized folders given
    stay. Raises InputError for a folder that is no pipeline, a model that does not exist, or an unknown name.
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
    found = _distinct([_onnx_engine(folder, manifests[folder]) for folder in ordered])
    torch_engine, note = _torch_engine(torch_model, found[0])
    if not names:
        return [*found, *torch_engine], note
    given = [engine for engine in found if engine.stage != "export"]
    named = [_named(name, found[0], torch_engine, provider) for name in names]
    chosen = [engine for engines in named for engine in engines]
    split = next((i for i, engine in enumerate(chosen) if engine.engine == "torch"), len(chosen))
    return [*chosen[:split], *given, *chosen[split:]], note if any(
        OTHERS.get(name) == "torch" for name in names
    ) else []


def ablation(raw: Path, provider: str) -> tuple[list[Engine], list[str]]:
    """The ablation's rows for a provider, from the raw export to everything on; and notes.

    On the CPU, where half precision is emulated, it is a row of its own and the rows after it are in float32. Raises
    InputError when `raw` is no export.
    """
    engine = _raw_export(raw)
    dtype = best_dtype(provider)
    target = target_of(provider)
    rows = [replace(engine, label="raw fp32"), _made(engine, "raw fp16", ("raw", "float16"), target="raw")]
    for name in ablation_steps(TARGETS[target]):
        if name != "none":
            label = f"{ABLATION[name].label}{'' if dtype == 'float16' else ' fp32'}"
            rows.append(_made(engine, label, ("ours", target, dtype, name), target=target))
    notes = ["rows add up from the second (raw fp16) on, but on the CPU from the first (raw fp32) on."]
    last = rows[-1]
    rows = [replace(row, library=False) for row in rows]
    if library_path() is not None:
        rows.append(replace(last, label="ours: + op library", make=("ours", target, dtype)))
    else:
        notes.append("no row for the op library: it is not built (sd-ort build-ops).")
    rows.append(replace(rows[-1], label="+ hoisting", make=("ours", target, dtype, HOIST)))
    if provider_named(provider).graph is not None:
        rows.append(replace(rows[-1], label="+ graph capture", graph=True))
    else:
        notes.append(f"no row for graph capture: the {provider} provider has none.")
    return rows, notes


def best_dtype(provider: str) -> str:
    """The precision a provider is fastest in: float16 on GPUs."""
    return "float32" if provider == "cpu" else "float16"


def target_of(provider: str) -> str:
    """Our target for a provider: its own, that of its name, or else `portable`."""
    target = provider_named(provider).target or provider
    return target if target in TARGETS else "portable"


# --- One engine -----------------------------------------------------------------------------------------------------


def _named(name: str, first: Engine, torch_engine: Sequence[Engine], provider: str) -> list[Engine]:
    """The engine of a name; [] for a torch engine whose model is not there. Raises InputError for an unknown name."""
    dtype = best_dtype(provider)
    short = PRECISIONS[dtype]
    if name in OTHERS:
        variant, label = KINDS[OTHERS[name]].names[name]
        of = torch_engine if OTHERS[name] == "torch" else [_raw_export(Path(first.directory))]
        return [replace(engine, label=label, engine=OTHERS[name], variant=variant) for engine in of]
    kind, _, rest = name.partition("-")
    words = rest.split("-") if rest else []
    graph = " + graph" if words[-1:] == ["graph"] else ""
    hoist = HOIST in words
    plain = not set(words) - {"graph", HOIST}
    target = target_of(provider) if plain else rest
    if name not in NAMES and not (kind == "ours" and target in TARGETS):
        raise InputError(f"unknown engine {name!r}: choose from {', '.join(NAMES)}, or ours-TARGET.")
    if name == "ours" and _is_ours(Path(first.directory), target, dtype):
        return []  # the folder itself, which stays in the comparison
    raw = _raw_export(Path(first.directory))
    if name == "raw":
        return [raw]
    if name == "raw-fp16":
        return [_made(raw, "raw ONNX fp16", ("raw", "float16"), target="raw")]
    if kind == "ours":
        label = f"ours {short}{'' if plain else ' ' + target}{' hoisted' if hoist else ''}{graph}"
        recipe = ("ours", target, dtype, *([HOIST] if hoist else []))
        return [replace(_made(raw, label, recipe, target=target), graph=bool(graph))]
    if kind == "ort":
        return [replace(_made(raw, f"ORT optimizer {short}{graph}", ("ort", provider, dtype)), graph=bool(graph))]
    return [_made(raw, f"onnxscript {short}", ("onnxscript", dtype))]


def _made(raw: Engine, label: str, recipe: tuple[str, ...], target: str = "") -> Engine:
    """An engine whose folder is made from a raw export before it is loaded."""
    return replace(raw, label=label, stage="made", target=target, make=recipe, raw=raw.directory)


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


def _is_ours(folder: Path, target: str, dtype: str) -> bool:
    """Return whether `folder` is what `optimize` writes for a target and a precision."""
    manifest = read_manifest(folder)
    options = manifest.get("options", {})
    return manifest.get("stage") == "optimize" and (options.get("target"), options.get("dtype")) == (target, dtype)


def _onnx_engine(folder: Path, manifest: dict[str, Any]) -> Engine:
    source, options, stage = manifest.get("source", {}), manifest.get("options", {}), manifest.get("stage", "")
    labels = {"export": "raw ONNX", "optimize": f"fused {PRECISIONS.get(options.get('dtype'), '')}".strip()}
    return Engine(
        label=labels.get(stage, folder.name),
        engine="onnxruntime",
        directory=str(folder),
        model=str(source.get("model") or folder.name),
        stage=stage,
        target=options.get("target", ""),
        random_weights=bool(source.get("random_weights")),
        weights_seed=options.get("seed"),
        raw=str(folder),
    )


def _distinct(found: list[Engine]) -> list[Engine]:
    """Labels that occur twice get the target, and if that does not tell them apart, the folder's name."""
    for extra in (lambda e: e.target, lambda e: Path(e.directory).name):
        labels = [e.label for e in found]
        found = [replace(e, label=f"{e.label} {extra(e)}".strip()) if labels.count(e.label) > 1 else e for e in found]
    return found


def _torch_engine(asked: str | None, first: Engine) -> tuple[list[Engine], list[str]]:
    """([torch eager on the asked model or on the first engine's own], []), or ([], [why there is none])."""
    torch = replace(first, label="torch eager", engine="torch", stage="torch", target="")
    if asked == "none":
        return [], []
    if asked:
        if asked != "demo" and not is_diffusers_folder(Path(asked)):
            raise InputError(f"{asked} is not a diffusers folder: give one, `demo` or `none` to --torch.")
        return [replace(torch, directory=asked, model=asked, random_weights=False)], []
    if first.random_weights and first.weights_seed is None:
        return [], ["torch was not measured: the export, which records the seed of its random weights, is gone."]
    if first.random_weights or first.model == "demo" or is_diffusers_folder(Path(first.model)):
        return [replace(torch, directory=first.model)], []
    return [], [f"torch was not measured: {first.model!r} is no diffusers folder on this machine (use --torch)."]


def is_diffusers_folder(folder: Path) -> bool:
    """Whether a folder is a pipeline with torch weights, and not one of ONNX models."""
    return (folder / "model_index.json").is_file() and not (folder / "unet" / MODEL).is_file()
