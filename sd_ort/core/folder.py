"""Pipeline folders: what every stage reads and writes.

A folder is laid out as diffusers and Optimum do (`model_index.json`, `scheduler/`, `tokenizer/`, and
`<component>/model.onnx` with its external data) and carries one `sd_ort.json` manifest. A stage never edits its
input: it writes to a temporary sibling folder, which is renamed into place only when all of it is there.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sd_ort.core.errors import InputError, OutputError

MANIFEST = "sd_ort.json"
FORMAT = 1
MODEL = "model.onnx"
DATA = "model.onnx.data"
MERGED = "pipeline"  # the one component of a folder that `sd-ort merge` wrote
COMPONENTS = ("text_encoder", "text_encoder_2", "unet", "vae_encoder", "vae_decoder")
CONFIG_FOLDERS = ("scheduler", "tokenizer", "tokenizer_2", "feature_extractor")


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
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give the folder that `sd-ort export` or `optimize` wrote.")
    found = sorted(p.parent.name for p in folder.glob(f"*/{MODEL}"))
    if not found or not (folder / "model_index.json").is_file():
        raise InputError(
            f"{folder} is not a pipeline folder (no model_index.json with <component>/{MODEL}): "
            "make one with `sd-ort export MODEL OUT`."
        )
    return [c for c in COMPONENTS if c in found] + [c for c in found if c not in COMPONENTS]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a pipeline folder, or {} for a folder of another tool. Raises InputError when it is broken."""
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): export or optimize again.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise InputError(f"{path} has another format than this sd-ort reads: export or optimize again.")
    return manifest


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write `manifest`, adding the format and a size and SHA-256 for every file of every component."""
    hashes = {}
    for component in sorted(p.parent.name for p in folder.glob(f"*/{MODEL}")):
        files = sorted(p for p in (folder / component).iterdir() if p.is_file())
        hashes[component] = {p.name: {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in files}
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, **manifest, "files": hashes}, indent=1) + "\n")


def is_intact(folder: Path, manifest: dict[str, Any]) -> bool:
    """Whether every file the manifest lists is there with the size and content it had when written."""
    for component, files in manifest.get("files", {}).items():
        for name, expected in files.items():
            path = folder / component / name
            if not path.is_file() or path.stat().st_size != expected["bytes"] or sha256(path) != expected["sha256"]:
                return False
    return bool(manifest.get("files"))


def check_component(folder: Path, component: str) -> Path:
    """Path of a component's `model.onnx`, once the model parses and its external data lies whole within its folder.

    Raises InputError for a truncated or foreign file, and for external data that is missing, too short, or whose
    location leaves the component's folder (a model from the internet must not read other files).
    """
    import onnx
    from google.protobuf.message import DecodeError

    path = folder / component / MODEL
    if not path.is_file():
        raise InputError(f"{path} is missing: export the pipeline again.")
    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise InputError(f"{path} is truncated or not an ONNX model: export it again.") from error
    if not model.graph.node:
        raise InputError(f"{path} is truncated or empty: export it again.")
    recorded = read_manifest(folder).get("files", {}).get(component, {}).get(MODEL)
    if recorded and recorded["bytes"] != path.stat().st_size:
        raise InputError(f"{path} is truncated or was changed since it was written: export it again.")
    root = path.parent.resolve()
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        entry = {e.key: e.value for e in tensor.external_data}
        data = (root / entry.get("location", "")).resolve()
        if root not in data.parents:
            raise InputError(f"{path} refers to data outside its folder ({entry.get('location')}): do not trust it.")
        if not data.is_file():
            raise InputError(f"{data} is missing: {MODEL} keeps its weights there; copy both or export again.")
        if int(entry.get("offset", 0)) + int(entry.get("length", 0)) > data.stat().st_size:
            raise InputError(f"{data} is truncated: copy or export it again.")
    return path


def copy_configs(source: Path, target: Path) -> None:
    """Copy the scheduler, tokenizers and index of a pipeline, but no weights."""
    shutil.copy2(source / "model_index.json", target / "model_index.json")
    for name in CONFIG_FOLDERS:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name)


@contextmanager
def staged(output: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `output` that replaces it on success and vanishes on any error or interrupt.

    Raises OutputError when `output` exists and was not written by sd-ort, or when the disk is full.
    """
    output = Path(os.path.abspath(output))
    if output.exists() and not (output / MANIFEST).is_file() and (not output.is_dir() or any(output.iterdir())):
        raise OutputError(f"{output} exists and was not written by sd-ort: choose another folder or remove it.")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{output.name}.partial-", dir=output.parent))
    except OSError as error:
        raise OutputError(f"cannot write to {output.parent}: {error.strerror}.") from error
    try:
        yield work
        work.chmod(0o755)
        if output.exists():
            old = work.with_name(work.name + "-old")
            output.rename(old)
            work.rename(output)
            shutil.rmtree(old)
        else:
            work.rename(output)
    except OSError as error:
        if _is_full(error):
            raise OutputError(f"no space left for {output}: free some disk space and run it again.") from error
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _is_full(error: OSError) -> bool:
    """Whether a write failed for want of space. NumPy's `tofile` sets no errno, only a text."""
    text = str(error)
    short_write = error.errno is None and ("problem writing element" in text or "requested and" in text)
    return short_write or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
