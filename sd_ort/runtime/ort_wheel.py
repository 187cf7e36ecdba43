"""The installed ONNX Runtime wheel, and the libraries that its providers need. Only one wheel may be installed."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sd_ort.core.errors import ProviderError
from sd_ort.runtime.provider_table import WHEELS

# ONNX Runtime's severity: its warnings are about plugins that nobody asked for, and what exporters leave behind.
ERRORS_ONLY = 3
FATAL_ONLY = 4


@cache
def import_onnxruntime() -> Any:
    """Return the module `onnxruntime`, with errors as its only log lines and without telemetry.

    The installed wheels are read once a process, in a millisecond. Raises ProviderError if ONNX Runtime is not
    installed, or if two of its wheels are.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        raise ProviderError("onnxruntime is not installed: pip install 'sd-ort[cpu]' (or [cuda], [rocm], [migraphx]).")
    wheels = installed_wheels()
    if len(wheels) > 1:
        names = " and ".join(wheels)
        raise ProviderError(
            f"{names} are installed at once and overwrite each other: "
            f"pip uninstall -y {' '.join(wheels)}, then install one with pip install 'sd-ort[cpu]' (or another extra)."
        )
    # Its Linux wheels report sessions to Microsoft from 1.29 on, unless told otherwise.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    onnxruntime.set_default_logger_severity(ERRORS_ONLY)
    return onnxruntime


def installed_wheels() -> dict[str, str]:
    """Name -> version of each onnxruntime wheel unpacked in the folder that `import onnxruntime` reads."""
    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        return {}
    # importlib.metadata, which says the same, takes 10 ms to import.
    folders = Path(spec.origin).resolve().parents[1].glob("onnxruntime*.dist-info")
    named = (folder.name.removesuffix(".dist-info").rpartition("-") for folder in folders)
    versions = {name.lower().replace("_", "-"): version for name, _, version in named}
    return {wheel: versions[wheel] for wheel in WHEELS if wheel in versions}


def needed_libraries(library: Path) -> list[str]:
    """The DT_NEEDED names of a 64-bit little-endian ELF library; [] for any other file."""
    needed = 1
    return _dynamic_strings(library).get(needed, [])


def search_folders(library: Path) -> list[Path]:
    """Return the folders of a library's DT_RUNPATH, else of its DT_RPATH, where the loader searches; [] if none."""
    rpath, runpath = 15, 29
    strings = _dynamic_strings(library)
    origin = str(library.resolve().parent)
    folders = [name for text in strings.get(runpath) or strings.get(rpath, []) for name in text.split(":") if name]
    return [Path(name.replace("${ORIGIN}", origin).replace("$ORIGIN", origin)) for name in folders]


def _dynamic_strings(library: Path) -> dict[int, list[str]]:
    """DT_NEEDED, DT_RPATH and DT_RUNPATH of an ELF library: tag -> strings; {} for a file of another kind.

    Field offsets: System V ABI, Elf64_Ehdr, Elf64_Phdr and Elf64_Dyn. Only the headers are read, never the code.
    """
    segment_load, segment_dynamic, tag_strings, text_tags = 1, 2, 5, (1, 15, 29)
    with library.open("rb") as file:
        header = file.read(64)
        if header[:6] != b"\x7fELF\x02\x01":
            return {}
        (table,) = struct.unpack_from("<Q", header, 32)
        entry_size, entries = struct.unpack_from("<HH", header, 54)
        file.seek(table)
        raw = file.read(entry_size * entries)
        # p_type, p_flags, p_offset, p_vaddr, p_paddr, p_filesz
        segments = [struct.unpack_from("<IIQQQQ", raw, i * entry_size) for i in range(entries)]
        loads = [s for s in segments if s[0] == segment_load]
        dynamic = next((s for s in segments if s[0] == segment_dynamic), None)
        if dynamic is None:
            return {}
        file.seek(dynamic[2])
        tags = list(struct.iter_unpack("<QQ", file.read(dynamic[5] // 16 * 16)))
        strings = next((value for tag, value in tags if tag == tag_strings), None)
        if strings is None:
            return {}
        base = next(offset + strings - vaddr for _, _, offset, vaddr, _, size in loads if 0 <= strings - vaddr < size)
        values: dict[int, list[str]] = {}
        for tag, value in tags:
            if tag in text_tags:
                file.seek(base + value)
                values.setdefault(tag, []).append(file.read(4096).split(b"\0")[0].decode())
        return values


def can_load(library: str, folders: Sequence[Path] = ()) -> bool:
    """Whether the loader finds a library by its name, or it lies in one of `folders` and loads."""
    if library.startswith("libonnxruntime"):  # comes with the wheel itself, off the loader's path
        return True
    for path in (library, *(str(folder / library) for folder in folders)):
        try:
            ctypes.CDLL(path)
        except OSError:
            continue
        return True
    return False
