"""Cache of checkpoints as optimized pipeline folders, so that a checkpoint is optimized once.

    ~/.cache/sd-ort/models/<key>/      the pipeline folder
    ~/.cache/sd-ort/models/<key>.lock  held while an entry is written (exclusive) or in use (shared); its time of
                                       modification is that of the last use

The key is made of the contents of the checkpoint's files, target, precision, and the code that optimizes. An entry that
was damaged is made again. The least recently used entries go when the cache exceeds $SD_ORT_CACHE_GB (default 40).
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd_ort import __version__
from sd_ort.checkpoints import is_checkpoint
from sd_ort.core import locks, pipeline_folder
from sd_ort.core.cache import cache_folder, cached_file, write_cached
from sd_ort.core.errors import InputError, OutputError, SdOrtError
from sd_ort.core.files import code_hash
from sd_ort.core.ownership import sha256
from sd_ort.core.progress import ProgressCallback, ignore_progress
from sd_ort.runtime.provider_choice import (
    AUTO,
    ProviderChoice,
    choose_provider,
    provider_for,
    resolve_device,
    target_of,
)

LIMIT_GB = 40
DTYPES = ("float32", "float16", "bfloat16")
# What a diffusers folder is read from; weights of other frameworks and pictures are not.
CHECKPOINT_SUFFIXES = (".json", ".txt", ".safetensors", ".bin")
IN_USE: dict[Path, int] = {}  # lock file -> descriptor with a shared lock, for the life of the process


def open_model(
    model: Path | str,
    provider: str = AUTO,
    *,
    dtype: Any = None,
    config: str | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> tuple[Path, ProviderChoice]:
    """Return the pipeline folder of a model, and the provider that runs it.

    Args:
        model: a pipeline folder, or a checkpoint, which is optimized for the provider, once.
        dtype: of a checkpoint's graphs; None for float16, on a CPU float32. A torch dtype, or its name.
        config: of a checkpoint in one file, a folder or hub id of its family.

    Raises:
        InputError: there is no such file, or it is no model.
        ProviderError: the provider cannot be used.
        OutputError: the cache cannot be written.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise InputError(f"a model is a path, a hub id or `demo`, not {str(model)[:80]!r}.")
    path = Path(model)
    if not is_checkpoint(path):
        if not path.exists():
            raise InputError(f"{model}: no such file or folder, nor a hub id (owner/name), nor `demo`.")
        if config:
            raise InputError(f"config goes with a checkpoint in one file: {model} is none.")
        pipeline_folder.components(path)
        return path, provider_for(path, provider)
    choice = choose_provider() if provider == AUTO else resolve_device(provider)
    return _optimized(str(model), choice.provider, dtype_for(choice.provider, dtype), config, on_progress), choice


def dtype_for(provider: str, dtype: Any = None) -> str:
    """Return the name of a dtype; of None, the provider's fastest. Raises InputError for another one."""
    automatic = dtype is None or str(dtype) == "auto"
    name = ("float32" if provider == "cpu" else "float16") if automatic else str(dtype)
    name = name.removeprefix("torch.")
    if name not in DTYPES:
        raise InputError(f"dtype {name[:80]} is unknown: use one of {', '.join(DTYPES)}.")
    return name


def _optimized(model: str, provider: str, dtype: str, config: str | None, on_progress: ProgressCallback) -> Path:
    """Return the cache entry of a checkpoint, made if it is missing or damaged; it stays while this process lives."""
    target = target_of(provider)
    options = [target, dtype, config, __version__, code_hash(*_code())]
    key = hashlib.sha256(repr([*map(file_hash, checkpoint_files(model)), *options]).encode()).hexdigest()[:20]
    entry = _folder() / key
    lock = entry.with_suffix(".lock")
    _use(lock)
    while not _is_complete(entry):
        _release(lock)
        with _locked(lock, locks.EXCLUSIVE):
            if not _is_complete(entry):  # else another process has made it meanwhile
                from sd_ort.checkpoints.open import CheckpointOptions
                from sd_ort.stages import optimize

                shutil.rmtree(entry, ignore_errors=True)
                on_progress(f"optimizing {model} for target {target} in {dtype}, once: it stays in {entry}")
                checkpoint = CheckpointOptions(config)
                optimize(model, entry, target=target, dtype=dtype, checkpoint=checkpoint, on_progress=on_progress)
        _use(lock)
        trim(int(float(os.environ.get("SD_ORT_CACHE_GB", LIMIT_GB)) * 1e9))
    return entry


def _code() -> list[Path]:
    """Return the packages that decide what an entry holds."""
    root = Path(__file__).parent
    parts = [root / name for name in ("checkpoints", "export", "graphs", "optimize", "weights")]
    return [*parts, root.with_name("fusion_passes")]


def checkpoint_files(model: str) -> list[Path]:
    """Return the files of a checkpoint, which a hub id downloads. Raises InputError for what is none."""
    from sd_ort.checkpoints.hub import download_pipeline
    from sd_ort.checkpoints.open import locate

    if Path(model).is_file():
        return [Path(model)]
    folder = locate(model, download_pipeline)
    return sorted(path for path in folder.rglob("*") if path.suffix in CHECKPOINT_SUFFIXES and path.is_file())


def file_hash(path: Path) -> str:
    """Return the name and SHA-256 of a file. The hash of a large one is cached by its place, size and time."""
    status = path.stat()
    if status.st_size < 1 << 20:
        return f"{path.name} {sha256(path)}"
    identity = repr([str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ino])
    name = f"hashes/{hashlib.sha256(identity.encode()).hexdigest()[:20]}"
    cached = cached_file(name)
    digest = cached.read_text() if cached else sha256(path)
    if not cached:
        write_cached(name, digest.encode())
    return f"{path.name} {digest}"


# --- Entries --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A cached pipeline folder; `last_use`: seconds since 1970."""

    folder: Path
    bytes: int
    last_use: float

    @property
    def model(self) -> str:
        """Checkpoint, target and precision in the manifest."""
        try:
            manifest = pipeline_folder.read_manifest(self.folder)
        except InputError:
            manifest = {}
        options = manifest.get("options", {})
        return f"{manifest.get('source', {}).get('model', '?')}, {options.get('target')}, {options.get('dtype')}"


def entries() -> list[Entry]:
    """Return the entries, the least recently used first."""
    cached = []
    for lock in _folder().glob("*.lock"):
        folder = lock.with_suffix("")
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        if folder.is_dir():
            cached.append(Entry(folder, size, lock.stat().st_mtime))
    return sorted(cached, key=lambda entry: entry.last_use)


def trim(limit: int) -> list[Entry]:
    """Remove the least recently used entries until at most `limit` bytes remain; return the removed entries.

    Entries that a process uses stay.
    """
    every, gone = entries(), []
    total = sum(entry.bytes for entry in every)
    for entry in every:
        if total > limit and _remove(entry.folder):
            total -= entry.bytes
            gone.append(entry)
    return gone


def _remove(folder: Path) -> bool:
    lock = folder.with_suffix(".lock")
    if lock in IN_USE:
        return False
    with suppress(OSError), _locked(lock, locks.EXCLUSIVE | locks.NON_BLOCKING):
        shutil.rmtree(folder)
        return True
    return False


def _is_complete(entry: Path) -> bool:
    """Whether every file of an entry has its size."""
    try:
        files = pipeline_folder.read_manifest(entry).get("files", {})
        sizes = [((entry / part / name).stat().st_size, file["bytes"]) for part, each in files.items()
                 for name, file in each.items()]  # fmt: skip
        pipeline_folder.components(entry)
    except (SdOrtError, OSError):
        return False
    return bool(sizes) and all(size == expected for size, expected in sizes)


def _folder() -> Path:
    return cache_folder() / "models"


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    """Hold a lock on a file, which is made. Raises OutputError if it cannot be."""
    descriptor = _open(path)
    try:
        locks.lock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        advice = "set XDG_CACHE_HOME to a folder that can, or make a folder with `sd-ort optimize MODEL OUT`"
        raise OutputError(f"the cache {path.parent} cannot be written ({error.strerror}): {advice}.") from error


def _use(lock: Path) -> None:
    """Mark an entry as used now and, for the life of this process, as in use: nobody removes it."""
    if lock not in IN_USE:
        IN_USE[lock] = _open(lock)
        locks.lock(IN_USE[lock], locks.SHARED)
    os.utime(lock)


def _release(lock: Path) -> None:
    os.close(IN_USE.pop(lock))
