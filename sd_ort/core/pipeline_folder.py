"""Pipeline folders: what every stage reads and writes.

A folder is laid out as diffusers and Optimum do (`model_index.json`, `scheduler/`, `tokenizer/`, and
`<component>/model.onnx` with its external data) and carries one `sd_ort.json` manifest. A stage never edits its
input: it writes to a temporary sibling folder, which is renamed into place only when all of it is there.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sd_ort.core import onnx_file
from sd_ort.core.errors import InputError, OutputError
from sd_ort.core.files import read_json, schema_mismatch, scratch_folder, without_nulls
from sd_ort.core.paths import inside, output_path

MANIFEST = "sd_ort.json"
FORMAT = 1
MODEL = "model.onnx"
DATA = "model.onnx.data"
MERGED = "pipeline"  # the one component of a folder that `sd-ort merge` wrote
# Components of a hoisted pipeline folder by graph. The step graph has the name of the UNet.
HOISTED = {"prompt": "unet_prompt", "time": "unet_time", "step": "unet"}
COMPONENTS = (
    "text_encoder", "text_encoder_2", "text_encoder_3", "image_encoder", "unet", "transformer", "controlnet",
    "vae_encoder", "vae_decoder",
)  # fmt: skip
CONFIG_FOLDERS = ("scheduler", "tokenizer", "tokenizer_2", "tokenizer_3", "feature_extractor")
# All that diffusers and transformers read there; a folder may hold anything beside.
CONFIG_FILES = (
    "scheduler_config.json", "vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "preprocessor_config.json", "spiece.model",
)  # fmt: skip
_MANIFEST_LIKE = {
    "stage": str,
    "source": {"model": str, "folder": str, "random_weights": bool},
    "versions": dict,
    "options": {"target": str, "dtype": str, "exporter": str, "opset": int, "seed": int, "components": [str]},
    "components": {str: {"kernel_fallbacks": [str], "float32_sites": [dict], "calibration": str}},
    "files": {str: {str: lambda entry: isinstance(entry, dict) and {"bytes", "sha256"} <= entry.keys()}},
}


# Keys of a component in manifests until 2026-11 -> their names now.
_OLD_KEYS = {
    "weights": "weight_recipes", "rules": "rewrite_counts", "counts": "op_counts", "not_lowered": "kernel_fallbacks",
    "few": "low_coverage", "equal_weights": "duplicate_weights",
}  # fmt: skip


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file, read in 1 MiB blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


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
    found = sorted(p.parent.name for p in folder.glob(f"*/{MODEL}"))
    if not found or not (folder / "model_index.json").is_file():
        raise InputError(
            f"{folder} is not a pipeline folder (no model_index.json with <component>/{MODEL}): "
            "make one with `sd-ort export MODEL OUT`, or name one .onnx file."
        )
    return [c for c in COMPONENTS if c in found] + [c for c in found if c not in COMPONENTS]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a pipeline folder, or {} for a folder of another tool. Raises InputError when it is broken."""
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    manifest = read_json(path)
    if manifest.get("format") != FORMAT:
        raise InputError(f"{path} has another format than this sd-ort reads: export or optimize again.")
    if isinstance(entries := manifest.get("components"), dict):
        manifest["components"] = {name: _with_new_keys(entry) for name, entry in entries.items()}
    if wrong := schema_mismatch(manifest, _MANIFEST_LIKE):
        raise InputError(f"{path} is damaged at {wrong!r}: export or optimize again.")
    return {
        key: value if key == "options" else without_nulls(value) for key, value in manifest.items() if value is not None
    }


def _with_new_keys(entry: Any) -> Any:
    return {_OLD_KEYS.get(key, key): value for key, value in entry.items()} if isinstance(entry, dict) else entry


Hashes = Mapping[str, Mapping[str, Any]]


def write_manifest(folder: Path, manifest: Mapping[str, Any], known: Mapping[str, Hashes] | None = None) -> None:
    """Write `manifest`, adding the format and `file_hashes` of every component, which `known` may have already."""
    known = known or {}
    names = sorted(p.parent.name for p in folder.glob(f"*/{MODEL}"))
    hashes = {name: known.get(name) or file_hashes(folder / name) for name in names}
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, **manifest, "files": hashes}, indent=1) + "\n")


def file_hashes(component: Path, known: Mapping[str, str] | None = None) -> Hashes:
    """Size and SHA-256 of every file of a component, by name; `known`: SHA-256 of some already."""
    files = sorted(p for p in component.iterdir() if p.is_file())
    return {p.name: {"bytes": p.stat().st_size, "sha256": (known or {}).get(p.name) or sha256(p)} for p in files}


def is_intact(folder: Path, manifest: dict[str, Any]) -> bool:
    """Whether every file the manifest lists is there with the size and content it had when written."""
    for component, files in manifest.get("files", {}).items():
        for name, expected in files.items():
            path = folder / component / name
            if not path.is_file() or path.stat().st_size != expected["bytes"]:
                return False
            if sha256(path) != expected["sha256"]:
                return False
    return bool(manifest.get("files"))


def read_index(folder: Path, kind: str = "pipeline folder") -> dict[str, Any]:
    """The model_index.json of a pipeline folder: part -> [library, class]. Raises InputError when it is broken."""
    path = folder / "model_index.json"
    index = read_json(path, f"{folder} is no {kind}")
    parts = [*COMPONENTS, *CONFIG_FOLDERS, "vae", "safety_checker"]
    like = {"_class_name": str, **dict.fromkeys(parts, _is_library_and_class)}
    if wrong := schema_mismatch(index, like):
        raise InputError(f"{path} is damaged at {wrong!r}: get it, or export it, again.")
    return index


def _is_library_and_class(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and all(name is None or isinstance(name, str) for name in entry)


def folders_of(name: str, entry: Mapping[str, Any]) -> list[str]:
    """Return the folders of a component with the manifest entry `entry`: three if it is hoisted, else one."""
    return list(HOISTED.values()) if "hoisted" in entry else [name]


def check_component(folder: Path, component: str) -> Path:
    """Path of a component's `model.onnx`, once all of it and of its external data is there and well (`onnx_file.read`).

    Raises InputError for a file that is truncated, broken or foreign, or that leads out of the pipeline folder: a model
    from the internet must not read other files.
    """
    path = folder / component / MODEL
    inside(path, folder)
    onnx_file.read(path)
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
    found = list(path.glob("*.onnx"))
    return found[0] if len(found) == 1 else None


def check_model(path: Path) -> Path:
    """`path`, checked as what it is: a component of a pipeline folder (`check_component`), or a file by itself."""
    home = path.absolute().parent
    if path.name == MODEL and (home.parent / "model_index.json").is_file():
        return check_component(home.parent, home.name)
    onnx_file.read(path)
    return path


def model_name(path: Path) -> str:
    """What an ONNX file is called in tables and recorded inputs: its component, or its own name without .onnx."""
    home = path.absolute().parent.name
    return home if path.name == MODEL and home else path.stem


def copy_configs(source: Path, target: Path, components: Iterable[str] = ()) -> None:
    """Copy a pipeline's index, scheduler and tokenizers, and the config.json of `components`, but no weights.

    Of each folder the files that a pipeline needs and no others. Raises InputError for one that is a link to a file
    elsewhere: it could be anything on this machine.
    """
    wanted = ["model_index.json", *(f"{name}/{file}" for name in CONFIG_FOLDERS for file in CONFIG_FILES)]
    for name in (*wanted, *(f"{component}/config.json" for component in components)):
        if (source / name).is_file():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(inside(source / name, source), target / name)


@contextmanager
def staged(output: Path, *sources: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `output` that replaces it on success and vanishes on any error or interrupt.

    `sources`: folders that it is made from. Raises OutputError when `output` is one of them, holds one or lies in one,
    when it exists and was not written by sd-ort, or when the disk is full.
    """
    output = output_path(output, *sources)
    if output.exists() and not (output / MANIFEST).is_file() and (not output.is_dir() or any(output.iterdir())):
        raise OutputError(f"{output} exists and was not written by sd-ort: choose another folder or remove it.")
    try:
        with scratch_folder(output.parent, output.name) as work:
            yield work
            work.chmod(0o755)
            if output.exists():
                old = work.with_name(work.name + "-old")
                output.rename(old)
                try:
                    work.rename(output)
                except BaseException:
                    old.rename(output)
                    raise
                shutil.rmtree(old)
            else:
                work.rename(output)
    except OSError as error:
        if _is_full(error):
            raise OutputError(f"no space left for {output}: free some disk space and run it again.") from error
        raise


def _is_full(error: OSError) -> bool:
    """Whether a write failed for want of space. NumPy's `tofile` sets no errno, only a text."""
    text = str(error)
    short_write = error.errno is None and ("problem writing element" in text or "requested and" in text)
    return short_write or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
