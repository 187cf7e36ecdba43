"""The GPUs that this process may use, and the environment variables that show another process one of them."""

from __future__ import annotations

import ctypes
import os

from sd_ort.core.errors import InputError, ProviderError
from sd_ort.runtime.provider_choice import installed_gpus

# What the vendors' runtimes read when they are loaded: numbers of GPUs, or NVIDIA's names of them, with commas.
NVIDIA, AMD = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
VARIABLE = {"cuda": NVIDIA, "sdcuda": NVIDIA, "rocm": AMD, "migraphx": AMD, "hip": AMD}


def per_gpu_environments(provider: str, count: int) -> list[dict[str, str]]:
    """The environments of `count` processes with a GPU each, the first ones that this process sees.

    Raises ProviderError for a provider that drives no GPUs, InputError for more GPUs than there are.
    """
    if provider not in VARIABLE:
        drivers = ", ".join(VARIABLE)
        raise ProviderError(f"the provider {provider} takes no --gpus: choose --provider from {drivers}.")
    visible = visible_gpus(VARIABLE[provider])
    if count > len(visible):
        raise InputError(
            f"{count} GPUs were asked for, and {len(visible)} are there for the {provider} provider: ask for fewer, or "
            "see `sd-ort doctor`."
        )
    return [{VARIABLE[provider]: name} for name in visible[:count]]


def visible_gpus(variable: str) -> list[str]:
    """Return the names of the GPUs in a vendor's environment variable, or of all GPUs if it is unset."""
    count = nvidia_gpus() if variable == NVIDIA else sum(gpu.vendor == "hip" for gpu in installed_gpus())
    listed = os.environ.get(variable)
    if listed is None:
        return [str(index) for index in range(count)]
    return [name.strip() for name in listed.split(",") if name.strip()][:count]


def nvidia_gpus() -> int:
    """Return the number of GPUs of NVIDIA's driver."""
    count = ctypes.c_uint()
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    failed = library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    return 0 if failed else count.value


def threads_per_process(replicas: int) -> int:
    """CPU threads for each of several processes that share the cores of this one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // replicas)
