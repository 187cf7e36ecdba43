"""Registration of the op library in session options, if it has kernels for the session's provider."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from sd_ort.core.errors import ProviderError, first_line
from sd_ort.runtime.library import GPU_LIBRARIES, library_path
from sd_ort.runtime.ort_wheel import import_onnxruntime
from sd_ort.runtime.provider_table import CPU_EP
from sd_ort.runtime.providers import is_plugin, log, provider_named


def op_library(library: Path | bool, provider: str) -> Path | None:
    """Return the op library to register for a session on `provider`, None for none.

    `library`: its path, True for the newest build, False for none. A library without kernels for a GPU provider is not
    registered: ONNX Runtime would run each fused node on the CPU, between two copies. Nor is one for our own provider,
    which has the kernels: the library's schemas have the dtypes of its CPU kernels alone, and ONNX Runtime would reject
    a graph in bfloat16.
    """
    if library is True and is_plugin(provider):
        return None
    path = library if isinstance(library, Path) else library_path() if library else None
    ep = provider_named(provider).ep
    if path is None or ep == CPU_EP or is_plugin(provider) or ep not in import_onnxruntime().get_available_providers():
        return path
    return path if ep in GPU_LIBRARIES and (path.parent / GPU_LIBRARIES[ep]).is_file() else None


def build_command(provider: str) -> str:
    """Return the command that builds the op library with kernels for the provider."""
    flags = {
        "rocm": " --hip gfx1100 (or your GPU's architecture)",
        "cuda": " --cuda sm_90 (or your GPU's architecture)",
    }
    return f"sd-ort build-ops{flags.get(provider, '')}"


def register(options: Any, library: Path | bool, provider: str) -> bool:
    """Register the op library in session `options` if there is one for `provider`; return whether there is.

    Raises ProviderError if the library, or its half for the provider's GPU, cannot be loaded.
    """
    path = op_library(library, provider)
    if path is None:
        log.info("no custom-op library: fused operators run as plain ONNX functions.")
        return False
    try:
        options.register_custom_ops_library(str(path))
    except Exception as error:
        raise ProviderError(f"{path} cannot be loaded: {first_line(error)} Build it again.") from error
    _check_gpu_half(path, provider)
    return True


def _check_gpu_half(path: Path, provider: str) -> None:
    """Raise ProviderError if the registered library could not load its half for the provider's GPU."""
    ep = provider_named(provider).ep
    if is_plugin(provider) or ep not in GPU_LIBRARIES or ep not in import_onnxruntime().get_available_providers():
        return
    status = ctypes.CDLL(str(path)).sd_ort_gpu_status
    status.restype = ctypes.c_char_p
    half = str(path.parent / GPU_LIBRARIES[ep])
    lines = dict(line.split(": ", 1) for line in status().decode("utf-8", "replace").splitlines() if ": " in line)
    reason = lines.get(ep, "it is not registered")
    if not reason.endswith(Path(half).name):
        raise ProviderError(f"{half} cannot be loaded: {reason}. Build it again: {build_command(provider)}.")
