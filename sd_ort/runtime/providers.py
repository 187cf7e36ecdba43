"""Execution providers: names, options, plugins, and whether this machine can really use one.

ONNX Runtime falls back to the CPU without an error when a provider's shared libraries are missing. Here the provider
asked for is either really used, or the call fails and says what to install.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from custom_ops import amd_targets, rocm
from custom_ops.libraries import GpuLibrary
from sd_ort.core.errors import ProviderError, first_line
from sd_ort.runtime.library import PROVIDER_LIBRARIES, library_path
from sd_ort.runtime.ort_wheel import can_load, import_onnxruntime, installed_wheels, needed_libraries, search_folders
from sd_ort.runtime.provider_table import OURS, PROVIDERS, ProviderSpec

log = logging.getLogger("sd_ort")
# `plugin:PATH` names the provider in a shared library of its own, which ONNX Runtime loads when asked to.
PLUGIN = "plugin:"
_REGISTRATION = threading.Lock()
_WARNING = threading.Lock()
warnings_logged: set[str] = set()  # by `warn_once`
_registered: dict[Path, list[Any]] = {}  # plugin providers of this process, with their devices


def provider_named(name: str) -> ProviderSpec:
    """The table's entry for a provider name, or one for a plugin. Raises ProviderError for a name that is neither."""
    if name.startswith(PLUGIN):
        ep = plugin_devices(plugin_library(name))[0].ep_name
        return OURS[ep] if ep in OURS else ProviderSpec(ep, "", needs="what it drives")
    if name in PROVIDERS:
        return PROVIDERS[name]
    counterpart = next((each for each, entry in PROVIDERS.items() if entry.target == name), None)
    if counterpart or name == "portable":
        advice = f"its provider is {counterpart}" if counterpart else "every provider runs its graphs; leave it out"
        raise ProviderError(f"{name} is a target of `sd-ort optimize`, not a provider: {advice}.")
    raise ProviderError(f"unknown provider {name!r}: choose auto or one of {', '.join(PROVIDERS)}.")


def is_plugin(name: str) -> bool:
    """Whether a provider lies in a shared library of its own: `plugin:PATH`, and ours by their names."""
    return name.startswith(PLUGIN) or provider_named(name).vendor is not None


def plugin_library(name: str) -> Path:
    """The shared library of a plugin provider. Raises ProviderError when ours is not built.

    A process keeps the first of ours that it loaded: a build that finishes meanwhile is for new processes.
    """
    if name.startswith(PLUGIN):
        return Path(name.removeprefix(PLUGIN))
    entry = PROVIDERS[name]
    file = PROVIDER_LIBRARIES[str(entry.vendor)]
    library = next((path for path in _registered if path.name == file), None) or library_path(file)
    if library is None:
        raise ProviderError(
            f"the {name} provider is not built for these sources: sd-ort build-ops {entry.build}, "
            "with your GPU's architecture."
        )
    return library


def plugin_devices(library: Path) -> list[Any]:
    """Register a plugin provider with ONNX Runtime, once a process; the devices that it can run on.

    Raises ProviderError for a library that is missing, lacks libraries of its own, is no provider, or sees no device.
    """
    with _REGISTRATION:
        if library not in _registered:
            _registered[library] = _register(library)
        return _registered[library]


def _register(library: Path) -> list[Any]:
    if not library.is_file():
        raise ProviderError(f"{library} does not exist: give the provider's shared library as {PLUGIN}LIBRARY.")
    onnxruntime = import_onnxruntime()
    if not hasattr(onnxruntime, "register_execution_provider_library"):
        raise ProviderError(f"ONNX Runtime {onnxruntime.__version__} takes no plugin providers: install 1.29 or later.")
    if missing := unloadable_libraries(library):
        raise ProviderError(f"{library} cannot load {', '.join(missing)}: {library_path_advice(missing)}.")
    if library.name == PROVIDER_LIBRARIES["hip"] and (problem := hip_problem(library)):
        raise ProviderError(problem)
    before = {device.ep_name for device in onnxruntime.get_ep_devices()}
    try:
        onnxruntime.register_execution_provider_library(library.name, str(library.resolve()))
    except Exception as error:  # pybind's exceptions share no base class but Exception
        raise ProviderError(f"{library} is no plugin provider: {first_line(error)}") from error
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name not in before]
    if not devices:
        onnxruntime.unregister_execution_provider_library(library.name)  # or the next check meets it as registered
        tool = "nvidia-smi" if library.name == PROVIDER_LIBRARIES["cuda"] else "rocminfo"
        raise ProviderError(f"{library} finds no device that it can run on: see whether {tool} lists one.")
    if devices[0].ep_name in OURS:
        warn_of_missing_library(library)
    return devices


def hip_problem(library: Path) -> str | None:
    """Return why sd-ort's provider for AMD cannot run here, with what to do; None if it can, or has no device.

    It has no HIP runtime, or the library no kernels for the device.
    """
    try:
        c = GpuLibrary(library).c
    except (OSError, AttributeError):  # ONNX Runtime says what is wrong with the file
        return None
    if (message := c.sd_ort_missing_runtime()) is not None:
        return str(message.decode())
    device, targets = c.sd_ort_gpu_arch().decode(), amd_targets.kernel_targets(library)
    if not device or not targets or amd_targets.covers(targets, device):
        return None
    advice = f"sd-ort build-ops --hip {device}" if device in amd_targets.TARGETS else "no kernel is written for it"
    return f"{library} has no kernels for {device}, only for {', '.join(targets)}: {advice}."


def warn_of_missing_library(library: Path) -> None:
    """Log a warning where our provider finds no BLAS library of its vendor: it runs all the same, slowly."""
    ask = ctypes.CDLL(str(library)).sd_ort_missing_library
    ask.restype = ctypes.c_char_p
    if name := ask():
        warn_once(
            f"{library.name} finds no {name.decode()}: matrix products run on its own kernels, which are slower, in "
            f"float32 and in 8 bits many times. Install it, or {library_path_advice([name.decode()])}."
        )


def missing_libraries(name: str) -> list[str]:
    """Shared libraries that the provider's own library asks for and this machine cannot load; [] if none or unknown."""
    provider = provider_named(name)
    if is_plugin(name):
        return unloadable_libraries(plugin_library(name))
    if provider.library is None:
        return []
    onnxruntime = import_onnxruntime()
    if name == "cuda" and hasattr(onnxruntime, "preload_dlls"):
        with contextlib.redirect_stdout(None):  # it prints what it does not find, as missing_libraries says too
            onnxruntime.preload_dlls()  # finds the CUDA libraries that pip packages (torch's too) brought
    library = wheel_library(provider)
    return [] if library is None else unloadable_libraries(library)


def wheel_library(provider: ProviderSpec) -> Path | None:
    """The provider's shared library in the installed wheel; None if there is none."""
    if provider.library is None:
        return None
    library = Path(import_onnxruntime().__file__).parent / "capi" / provider.library
    return library if library.is_file() else None


def unloadable_libraries(library: Path) -> list[str]:
    """Return the libraries that `library` needs and this machine cannot load.

    Libraries of ROCm are loaded from pip's ROCm packages first, where there are any: no loader knows their folders.
    """
    needed, folders = needed_libraries(library), search_folders(library)
    if any(name.startswith("libamdhip64") for name in needed):
        rocm.load_pip_libraries(*needed, "libhipblaslt.so.1")
    return [name for name in needed if not can_load(name, folders)]


def library_path_advice(missing: Sequence[str]) -> str:
    """Return the advice for libraries that cannot be loaded, with the folders of ROCm if one of them is ROCm's."""
    path, root = ("PATH", "HIP_PATH") if sys.platform == "win32" else ("LD_LIBRARY_PATH", "ROCM_PATH")
    advice = f"add {'their' if len(missing) > 1 else 'its'} folder to {path}"
    if not any(name.startswith(("libamdhip64", "libhipblaslt")) for name in missing):
        return advice
    folders = ", ".join(map(str, rocm.library_folders())) or f"none; set {root}"
    return f"{advice} (folders of ROCm's libraries here: {folders})"


def check_provider(name: str, *, allow_fallback: bool = False) -> None:
    """Check that a provider is in the installed wheel and that the shared libraries it needs can be loaded.

    Raises ProviderError that names the extra or the libraries to install; a warning instead with `allow_fallback`.
    """
    provider = provider_named(name)
    if is_plugin(name):
        import_onnxruntime()  # without which there is nothing to plug in
        try:
            plugin_devices(plugin_library(name))
        except ProviderError as error:
            raise_or_warn(str(error), allow_fallback)
        return
    available = import_onnxruntime().get_available_providers()
    if provider.ep not in available:
        raise_or_warn(
            f"the {name} provider is not in the installed onnxruntime wheel (it has {', '.join(available)}): "
            f"pip uninstall -y {' '.join(installed_wheels())} && pip install 'sd-ort[{provider.extra}]'.",
            allow_fallback,
        )
    elif missing := missing_libraries(name):
        raise_or_warn(
            f"the {name} provider cannot load {', '.join(missing)}: install {provider.needs}, "
            f"or {library_path_advice(missing)}.",
            allow_fallback,
        )


def raise_or_warn(message: str, allow_fallback: bool) -> None:
    """Raise ProviderError with `message`, or warn that the CPU takes over if `allow_fallback`."""
    if not allow_fallback:
        raise ProviderError(message)
    warn_once(f"{message} Falling back to the CPU.")


def warn_once(message: str) -> None:
    """Log a warning that every component would repeat. Components are opened by several threads at once."""
    with _WARNING:
        is_new = message not in warnings_logged
        warnings_logged.add(message)
    if is_new:
        log.warning(message)
