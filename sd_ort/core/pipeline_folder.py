"""Pipeline folders: what every stage reads and writes.

A folder is laid out as diffusers and Optimum do (`model_index.json`, `scheduler/`, `tokenizer/`, and
`<component>/model.onnx` with its external data) and carries one `sd_ort.json` manifest. A stage never edits its
input: it writes to a temporary sibling folder, which is renamed into place only when all of it is there.
"""

from __future__ import annotations

import errno
import functools
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sd_ort.core import onnx_file
from sd_ort.core.errors import InputError, OutputError
from sd_ort.core.files import JSON_LIMIT, read_json, read_regular, without_nulls, write_bytes, write_json
from sd_ort.core.ownership import FILE_RECORD, FileRecord, FolderState, compare, format_names, record_file, sha256
from sd_ort.core.paths import check_writable, inside, output_path
from sd_ort.core.progress import ProgressCallback, ignore_progress
from sd_ort.core.schema import dict_of, list_of, record_type, schema_mismatch
from sd_ort.core.staging import recover, replace_folder, scratch_folder

MANIFEST = "sd_ort.json"
FORMAT = 1
MODEL = "model.onnx"
DATA = "model.onnx.data"
MERGED = "pipeline"  # the one component of a folder that `sd-ort merge` wrote
# Components that run in every denoising step, and their graphs if they are hoisted. The step graph has the name of the
# component.
HOISTED = {name: {"prompt": f"{name}_prompt", "time": f"{name}_time", "step": name} for name in ("unet", "transformer")}
DEEP_FEATURES = "deep_features"  # with DeepCache: output of the graph of full steps, input of that of shallow ones
COMPONENTS = (
    "text_encoder", "text_encoder_2", "text_encoder_3", "image_encoder", "vision_encoder", "unet", "transformer",
    "controlnet", "vae_encoder", "vae_decoder",
)  # fmt: skip
CONFIG_FOLDERS = ("scheduler", "tokenizer", "tokenizer_2", "tokenizer_3", "feature_extractor", "processor")
# All that diffusers and transformers read there; a folder may hold anything beside.
CONFIG_FILES = (
    "scheduler_config.json", "vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "preprocessor_config.json", "processor_config.json", "spiece.model",
)  # fmt: skip
_OPTIONS = {**dict.fromkeys(("target", "dtype", "exporter"), str), "opset": int, "seed": int, "components": list[str],
            "templates": dict_of(str)}  # fmt: skip
_COMPONENT = {"kernel_fallbacks": list[str], "float32_sites": list[dict], "calibration": str}
_MANIFEST = record_type(
    "Manifest",
    {
        "stage": str,
        "source": record_type("Source", {"model": str, "folder": str, "random_weights": bool}),
        "versions": dict,
        "options": record_type("Options", _OPTIONS),
        "components": dict_of(record_type("Component", _COMPONENT)),
        "files": dict_of(dict_of(FILE_RECORD)),
    },
)

# What the keys of a manifest mean; docs/reference/targets.md has them.
MANIFEST_KEYS = {
    "format": "Version of this format, 1.",
    "stage": "`export`, `optimize` or `merge`.",
    "source": "`model`: what was exported. `random_weights`: whether its weights are random.",
    "versions": "Version of each package that wrote the folder, by name.",
    "options": "Options of the command: `target`, `dtype`, `hoist`, `calibrate`, `exporter`, `opset`, `seed`. "
    "`templates`: the template of each component of a checkpoint, if there is one.",
    "components": "By component: what follows.",
    "components.*.nodes_before, nodes": "Number of nodes before and after.",
    "components.*.rewrite_counts": "Number of rewrites by pass.",
    "components.*.op_counts": "Number of nodes by fused operator.",
    "components.*.kernel_fallbacks": "Fused operators that the target lacks a kernel for, and that stay apart.",
    "components.*.weight_recipes": "By initializer: the checkpoint tensors that it is made of, and how. A recipe is a "
    "tensor's name, or JSON: [operation, argument, operands ...].",
    "components.*.hoisted": "Number of nodes by graph, of a UNet or transformer whose work for prompt and "
    "schedule leaves the loop.",
    "components.*.float32_sites": "Nodes that calibration keeps in float32.",
    "components.*.seconds": "Time of optimizing.",
    "files": "By folder and name: size and SHA-256 of each file that was written. Others are not sd-ort's.",
}


# Keys of a component in manifests until 2026-11 -> their names now.
_OLD_KEYS = {
    "weights": "weight_recipes", "rules": "rewrite_counts", "counts": "op_counts", "not_lowered": "kernel_fallbacks",
    "few": "low_coverage", "equal_weights": "duplicate_weights",
}  # fmt: skip


def tree_hash(folder: Path) -> str:
    """Hex SHA-256 over names and contents of all files below `folder`, in sorted order."""
    digest = hashlib.sha256()
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(f"{file.relative_to(folder)}\0{sha256(file)}\0".encode())
    return digest.hexdigest()


def components(folder: Path) -> list[str]:
    """Names of the ONNX components in a pipeline folder, in the order of `COMPONENTS`, others after them.

    Raises InputError when the folder is missing or holds no component.
    """
    if not folder.exists():
        raise InputError(f"{folder}: no such file or folder.")
    if not folder.is_dir():
        raise InputError(
            f"{folder} is not a folder: give one that `sd-ort export` or `optimize` wrote (sd-ort optimize MODEL OUT)."
        )
    names = sorted(p.parent.name for p in folder.glob(f"*/{MODEL}"))
    if not names or not (folder / "model_index.json").is_file():
        raise InputError(
            f"{folder} is not a pipeline folder (no model_index.json with <component>/{MODEL}): "
            "make one with `sd-ort export MODEL OUT`, or name one .onnx file."
        )
    return [c for c in COMPONENTS if c in names] + [c for c in names if c not in COMPONENTS]


def select_components(folder: Path, names: Collection[str] | None) -> list[str]:
    """Return the components `names` of a pipeline folder, or all. Raises InputError for one that it does not have."""
    available = components(folder)
    if missing := [name for name in names or () if name not in available]:
        raise InputError(f"{folder} has no component {', '.join(missing)}: it has {', '.join(available)}.")
    return list(names or available)


def check_not_merged(folder: Path, names: Iterable[str]) -> None:
    """Raise InputError for a folder that `sd-ort merge` wrote; `names`: its components."""
    if MERGED in names:
        raise InputError(f"{folder} is a merged pipeline: give the folder it was made from.")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a pipeline folder, or {} for a folder of another tool. Raises InputError when it is broken."""
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    manifest = read_json(path, root=folder)
    if manifest.get("format") != FORMAT:
        raise InputError(f"{path} has another format than this sd-ort reads: export or optimize again.")
    if isinstance(entries := manifest.get("components"), dict):
        manifest["components"] = {name: _with_new_keys(entry) for name, entry in entries.items()}
    if wrong := schema_mismatch(manifest, _MANIFEST):
        raise InputError(f"{path} is damaged at {wrong!r}: export or optimize again.")
    return {
        key: value if key == "options" else without_nulls(value) for key, value in manifest.items() if value is not None
    }


def manifest_options(folder: Path) -> Mapping[str, Any]:
    """Return the options in a folder's manifest, {} without a manifest. Cached until the file changes."""
    try:
        state = (folder / MANIFEST).stat()
    except OSError:
        return {}
    return _options_of(folder, state.st_ino, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=16)
def _options_of(folder: Path, *_state: int) -> Mapping[str, Any]:
    return MappingProxyType(read_manifest(folder).get("options", {}))


def _with_new_keys(entry: Any) -> Any:
    return {_OLD_KEYS.get(key, key): value for key, value in entry.items()} if isinstance(entry, dict) else entry


Hashes = Mapping[str, FileRecord]


def write_manifest(folder: Path, manifest: Mapping[str, Any], hashes: Mapping[str, Hashes] | None = None) -> None:
    """Write `manifest`, adding the format and the records of all files by their folder; `hashes`: some of them."""
    files: dict[str, dict[str, FileRecord]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST):
        home = path.parent.relative_to(folder).as_posix()
        record = (hashes or {}).get(home, {}).get(path.name) or record_file(path)
        files.setdefault(home, {})[path.name] = record
    write_json(folder / MANIFEST, {"format": FORMAT, **manifest, "files": files})


def file_hashes(component: Path, data_hashes: Mapping[str, str] | None = None) -> Hashes:
    """Size and SHA-256 of every file of a component, by name; `data_hashes`: SHA-256 of some already."""
    files = sorted(p for p in component.iterdir() if p.is_file())
    return {path.name: record_file(path, (data_hashes or {}).get(path.name)) for path in files}


def recorded_files(manifest: Mapping[str, Any]) -> dict[str, FileRecord]:
    """The records in a manifest, by relative path."""
    folders = manifest.get("files", {}).items()
    return {(Path(home) / name).as_posix(): record for home, files in folders for name, record in files.items()}


def rewrite_index(folder: Path, data: bytes) -> None:
    """Replace the model_index.json of a pipeline folder, and its record if it has one."""
    index = folder / "model_index.json"
    write_bytes(index, data)
    manifest = read_manifest(folder)
    if index.name in manifest.get("files", {}).get(".", {}):
        manifest["files"]["."][index.name] = record_file(index)
        write_json(folder / MANIFEST, manifest)


def is_intact(folder: Path, manifest: dict[str, Any]) -> bool:
    """Whether every file the manifest lists is there with the size and content it had when written."""
    record = recorded_files(manifest)
    return bool(record) and len(compare(folder, record).owned) == len(record)


def manifest_if_current(folder: Path, expected: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the manifest of a folder that is intact and whose entries are those of `expected`, else None."""
    try:
        manifest = read_manifest(folder)
    except InputError:
        return None
    is_equal = all(manifest.get(key) == value for key, value in expected.items())
    return manifest if is_equal and is_intact(folder, manifest) else None


_PARTS = (*COMPONENTS, *CONFIG_FOLDERS, "vae", "safety_checker")
_INDEX = record_type("Index", {"_class_name": str, **dict.fromkeys(_PARTS, list_of(str | None, 2, 2))})


def read_index(folder: Path, kind: str = "pipeline folder") -> dict[str, Any]:
    """The model_index.json of a pipeline folder: part -> [library, class]. Raises InputError when it is broken."""
    path = folder / "model_index.json"
    index = read_json(path, f"{folder} is no {kind}", folder)
    if wrong := schema_mismatch(index, _INDEX):
        raise InputError(f"{path} is damaged at {wrong!r}: get it, or export it, again.")
    return index


def folders_of(name: str, entry: Mapping[str, Any]) -> list[str]:
    """Return the folders of a component with the manifest entry `entry`: three if it is hoisted, else one."""
    return list(HOISTED[name].values()) if "hoisted" in entry else [name]


def check_component(folder: Path, component: str) -> Path:
    """Return the path of a component's `model.onnx` after `onnx_file.check` of it and its external data.

    Raises InputError for a file that is truncated, broken or foreign, or that leads out of the pipeline folder: a model
    from the internet must not read other files.
    """
    path = folder / component / MODEL
    inside(path, folder)
    onnx_file.check(path)
    recorded = read_manifest(folder).get("files", {}).get(component, {}).get(MODEL)
    if recorded and recorded["bytes"] != path.stat().st_size:
        raise InputError(f"{path} is truncated or was changed since it was written: export it again.")
    return path


def standalone_model(path: Path) -> Path | None:
    """The ONNX file that `path` names, or the only one in a folder that is no pipeline; else None."""
    if path.suffix == ".onnx" and not path.is_dir():
        return path
    if not path.is_dir() or (path / "model_index.json").is_file():
        return None
    files = list(path.glob("*.onnx"))
    return files[0] if len(files) == 1 else None


def check_model(path: Path) -> Path:
    """Return `path`, checked as a component of a pipeline folder (`check_component`) or as a single file."""
    home = path.absolute().parent
    if path.name == MODEL and (home.parent / "model_index.json").is_file():
        return check_component(home.parent, home.name)
    onnx_file.check(path)
    return path


def model_name(path: Path) -> str:
    """Return the name of an ONNX file in tables and recorded inputs: its component, or its file name without .onnx."""
    home = path.absolute().parent.name
    return home if path.name == MODEL and home else path.stem


def copy_configs(source: Path, target: Path, components: Iterable[str] = ()) -> None:
    """Copy a pipeline's index, scheduler and tokenizers, and the config.json of `components`, but no weights.

    Of each folder the files that a pipeline needs and no others. Raises InputError for one that is a link to a file
    elsewhere, which could be anything on this machine, and for damaged JSON, also if nothing here reads it.
    """
    configs = ["model_index.json", *(f"{name}/{file}" for name in CONFIG_FOLDERS for file in CONFIG_FILES)]
    for name in (*configs, *(f"{component}/config.json" for component in components)):
        if (source / name).is_file():
            if name.endswith(".json"):
                read_json(source / name, root=source)
            (target / name).parent.mkdir(exist_ok=True)
            (target / name).write_bytes(read_regular(source / name, source, JSON_LIMIT))


@contextmanager
def staged(
    output: Path, *sources: Path, overwrite: bool = False, on_progress: ProgressCallback = ignore_progress
) -> Iterator[Path]:
    """Yield a temporary sibling of `output` that replaces it on success and vanishes on any error or interrupt.

    Files in `output` that sd-ort did not write stay there. `sources`: folders that it is made from. `overwrite`:
    replace files that were changed since sd-ort wrote them.

    Raises OutputError when `output` is a source, holds one or lies in one, when it was not written by sd-ort or holds
    what would be lost, or when the disk is full.
    """
    output = output_path(output, *sources)
    with report_full_disk(output):
        recover(output)
        state = _replaceable(output, overwrite)
        with scratch_folder(output.parent, output.name) as work:
            yield work
            work.chmod(0o755)
            state = _replaceable(output, overwrite, state)
            replace_folder(work, output, state.foreign)
    for names, action in ((state.changed, "replaced, changed since they were written"), (state.foreign, "kept")):
        if names:
            on_progress(f"{output}: {action}: {format_names(names)}")


@contextmanager
def report_full_disk(output: Path) -> Iterator[None]:
    """Context manager that raises OutputError with the name of `output` for a write that finds no space."""
    try:
        yield
    except OSError as error:
        if _is_full(error):
            raise OutputError(f"no space left for {output}: free some disk space and run it again.") from error
        raise


def check_replaceable(output: Path, *sources: Path, overwrite: bool = False) -> None:
    """Raise OutputError if `staged` would not replace `output`, or if its folder cannot be written to."""
    output = output_path(output, *sources)
    _replaceable(output, overwrite)
    check_writable(output)


def _replaceable(output: Path, overwrite: bool, before: FolderState | None = None) -> FolderState:
    """Return what lies at an output. Raises OutputError if it must not be replaced."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return FolderState()
    try:
        manifest = read_manifest(output) if output.is_dir() else {}
    except InputError as error:
        raise OutputError(f"{output} has a damaged {MANIFEST}: choose another folder or remove it.") from error
    record = recorded_files(manifest)
    # Manifests until 2026-11 recorded the components' files alone, or none.
    is_older = "model_index.json" not in record and "stage" in manifest and bool(manifest.get("components"))
    if not record and not is_older:
        raise OutputError(f"{output} exists and was not written by sd-ort: choose another folder or remove it.")
    state = compare(output, record, before)
    state.foreign.remove(MANIFEST)
    if is_older:
        state.adopt(output, _is_written_name, before)
    state.check_replaceable(output, overwrite)
    return state


def _is_written_name(name: str) -> bool:
    """Whether stages write files of this relative path."""
    home, _, file = name.rpartition("/")
    if home in CONFIG_FOLDERS:
        return file in CONFIG_FILES
    is_component = home in (*COMPONENTS, *(part for parts in HOISTED.values() for part in parts.values()), MERGED)
    return name == "model_index.json" or (is_component and file in (MODEL, DATA, "config.json"))


def _is_full(error: OSError) -> bool:
    """Whether a write failed for want of space. NumPy's `tofile` sets no errno, only a text."""
    text = str(error)
    short_write = error.errno is None and ("problem writing element" in text or "requested and" in text)
    return short_write or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
