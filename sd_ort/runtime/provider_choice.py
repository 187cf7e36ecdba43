"""Choice of the execution provider: `auto`, the names of devices, and the providers that run an optimized folder.

`auto` is the best provider that this machine really runs: its library is there and loads, a device answers, and the
weights fit into its free memory. The choice is always reported with its reason, in one line.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd_ort.core.errors import ProviderError, SdOrtError
from sd_ort.core.pipeline_folder import DATA, read_manifest
from sd_ort.runtime.library import PROVIDER_LIBRARIES, library_path
from sd_ort.runtime.ort_wheel import import_onnxruntime
from sd_ort.runtime.provider_table import PROVIDERS
from sd_ort.runtime.providers import PLUGIN, check_provider, provider_named, warn_once
from sd_ort.runtime.stream import open_stream

AUTO = "auto"
# Fastest first (README, "Speed": sdcuda before cuda on an H200; AMD's order follows it, unmeasured).
PREFERENCE = ("sdcuda", "hip", "cuda", "rocm", "migraphx", "cpu")
# ONNX Runtime's providers, which run a graph without a target, and share device memory with torch.
ORT_PROVIDERS = tuple(name for name in PREFERENCE if PROVIDERS[name].vendor is None)
# A device's name -> sd-ort's provider of the same GPUs, where the installed wheel lacks ONNX Runtime's.
SAME_DEVICE = {"cuda": "sdcuda", "rocm": "hip"}


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine. vendor: see `ProviderSpec.vendor`. architecture: gfx942, or "" if unknown."""

    vendor: str
    name: str
    architecture: str = ""


@dataclass(frozen=True)
class ProviderChoice:
    """The provider for a model, and why; `reason` is "" if the user named it."""

    provider: str
    reason: str = ""

    @property
    def line(self) -> str:
        """Return the message about an automatic choice."""
        return f"provider {self.provider}: {self.reason} (--provider or provider= names another)."


def target_of(provider: str) -> str:
    """Return the target of `sd-ort optimize` whose graphs the provider runs; `portable` for a foreign plugin."""
    entry = provider_named(provider)
    return entry.target or (provider if provider in PROVIDERS else "portable")


def providers_of(target: str | None) -> tuple[str, ...]:
    """Return the providers that run graphs of a target, best first; None: graphs as they were exported."""
    if target in (None, "portable", "raw"):
        return ORT_PROVIDERS
    if target in ("hip", "gpu"):  # the same graphs
        return "sdcuda", "hip"
    return tuple(name for name in PREFERENCE if target_of(name) == target)


def provider_problem(name: str, required_bytes: int = 0) -> str | None:
    """Return why this machine does not run a provider, with what to do; None if it does.

    `required_bytes`: device memory that must be free.
    """
    try:
        check_provider(name)
        stream = open_stream(name)  # raises without a device
        if name == "migraphx" and not any(gpu.vendor == "hip" for gpu in installed_gpus()):
            return "no AMD GPU is visible: check its driver, and who may open /dev/kfd."
        free = math.inf if stream is None else stream.free_bytes()
    except SdOrtError as error:
        return str(error)
    if free < required_bytes:
        return f"{required_bytes / 1e9:.1f} GB of weights do not fit into {free / 1e9:.1f} GB of free device memory."
    return None


def choose_provider(candidates: Collection[str] = PREFERENCE, required_bytes: int = 0) -> ProviderChoice:
    """Return the first of `candidates` that this machine runs; raise ProviderError with the problems if none does.

    A GPU that is not used is named in the reason, with the command that changes it.
    """
    problems: dict[str, str] = {}
    for name in candidates:
        if PROVIDERS[name].vendor and library_path(PROVIDER_LIBRARIES[str(PROVIDERS[name].vendor)]) is None:
            problems[name] = "not built"
        elif not PROVIDERS[name].vendor and PROVIDERS[name].ep not in import_onnxruntime().get_available_providers():
            problems[name] = "not in the installed wheel"
        elif problem := provider_problem(name, required_bytes):
            problems[name] = problem.removesuffix(".")
        else:
            return ProviderChoice(name, _reason(name, candidates, problems))
    raise ProviderError("; ".join(f"{name}: {problem}" for name, problem in problems.items()) + ".")


def _reason(name: str, candidates: Collection[str], problems: dict[str, str]) -> str:
    """Why a provider was chosen of `candidates`, after those with `problems`."""
    gpus = installed_gpus()
    missing = next((gpu for gpu in gpus if (own := _own_provider(gpu)) in candidates and own in problems), None)
    build = ""
    if missing is not None and problems[str(_own_provider(missing))] == "not built":
        build = f"; {build_command_of(missing)} builds {_own_provider(missing)}, the faster provider"
    serious = [f"{each}: {text}" for each, text in problems.items() if not text.startswith("not ")]
    if name != "cpu":
        gpu_names = " and ".join(dict.fromkeys(gpu.name for gpu in gpus))
        return f"the fastest that runs here{f', on {gpu_names}' if gpu_names else ''}{build}"
    if not gpus:
        # Windows and WSL name their GPUs to HIP alone, whose message about kernels is then the only sign of one.
        is_seen = any("has no kernels for" in text for text in serious)
        summary = "the GPU is not used" if is_seen else "no GPU is visible"
        return summary + (f" ({'; '.join(serious)})" if serious else "")
    names = " and ".join(dict.fromkeys(gpu.name for gpu in gpus))
    why = "; ".join(serious) or "no provider for it is installed"
    return f"{names} is not used: {why}{build}"


def _own_provider(gpu: Gpu) -> str | None:
    return next((name for name, each in PROVIDERS.items() if each.vendor == gpu.vendor), None)


def build_command_of(gpu: Gpu) -> str:
    """Return the one command that builds sd-ort's library for a GPU."""
    architecture = gpu.architecture or (_compute_capability() if gpu.vendor == "cuda" else "")
    example = "" if architecture else " (its architecture, such as sm_90)"
    return f"`sd-ort build-ops --{gpu.vendor} {architecture or 'ARCH'}`{example}"


def likely_provider(model: Path) -> str | None:
    """Return sd-ort's own provider that `auto` most likely chooses for a model, by files alone; None for others.

    For `warm_up`, before libraries are loaded and a device is asked.
    """
    with suppress(SdOrtError, OSError):
        manifest = read_manifest(model)
        names = providers_of(manifest.get("options", {}).get("target")) if manifest else PREFERENCE
        vendors = {gpu.vendor for gpu in installed_gpus()}
        for name in names:
            vendor = PROVIDERS[name].vendor
            if vendor in vendors and library_path(PROVIDER_LIBRARIES[str(vendor)]) is not None:
                return name
    return None


def provider_for(folder: Path, name: str = AUTO) -> ProviderChoice:
    """Return the provider that runs a pipeline folder: `name`, or for `auto` the best one for its target.

    Raises ProviderError, with the command that makes the right folder, if no provider of its target runs here.
    """
    manifest = read_manifest(folder)
    target = manifest.get("options", {}).get("target")
    if name != AUTO:
        choice = resolve_device(name)
        if not choice.provider.startswith(PLUGIN) and choice.provider not in providers_of(target):
            advice = optimize_command(manifest, target_of(choice.provider))
            state = f"is made for target {target}, not" if target else "is an export, not made"
            warn_once(f"{folder} {state} for provider {choice.provider}: {advice}.")
        return choice
    if target == "cpu":
        best = choose_provider()
        if best.provider == "cpu":
            return best
        advice = optimize_command(manifest, target_of(best.provider))
        return ProviderChoice("cpu", f"{folder} is made for target cpu, and {best.provider} runs here: {advice}")
    required = sum(file.stat().st_size for file in folder.glob(f"*/{DATA}"))
    try:
        return choose_provider(providers_of(target), required)
    except ProviderError as error:
        advice = optimize_command(manifest, target_of(choose_provider().provider))
        why = f"{folder} is made for target {target}, which does not run here: {error}"
        raise ProviderError(f"{why} {advice}.") from None


def resolve_device(name: str) -> ProviderChoice:
    """Return the provider of a name.

    For the device `cuda` or `rocm` without an ONNX Runtime provider, it is sd-ort's own provider of these GPUs if it is
    built. Raises ProviderError for an unknown name.
    """
    if name.startswith(PLUGIN):
        return ProviderChoice(name)
    provider, own = provider_named(name), SAME_DEVICE.get(name)
    if own is None or provider.ep in import_onnxruntime().get_available_providers():
        return ProviderChoice(name)
    if library_path(PROVIDER_LIBRARIES[str(PROVIDERS[own].vendor)]) is None:
        return ProviderChoice(name)  # opening it says what to install
    return ProviderChoice(own, f"the installed onnxruntime wheel has no {name} provider, and sd-ort's own is built")


def optimize_command(manifest: dict[str, Any], target: str) -> str:
    """Return the command that makes the folder of a manifest again, for another target."""
    model = manifest.get("source", {}).get("model", "MODEL")
    half = "" if target == "cpu" else " --float16"
    return f"`sd-ort optimize {model} OUT --target {target}{half}` makes one for it"


def installed_gpus(root: Path = Path("/")) -> list[Gpu]:
    """Return the GPUs whose kernel driver is loaded; `root`: of the file system."""
    gpus = []
    for path in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        model = next((line for line in _lines(path) if line.startswith("Model:")), "Model: NVIDIA GPU")
        gpus.append(Gpu("cuda", model.partition(":")[2].strip()))
    for path in sorted(root.glob("sys/class/kfd/kfd/topology/nodes/*/properties")):
        fields = dict(line.split() for line in _lines(path) if len(line.split()) == 2)
        if version := int(fields.get("gfx_target_version", 0)):  # 0: a CPU. 90402 is gfx942, 90010 is gfx90a
            architecture = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
            gpus.append(Gpu("hip", f"AMD {architecture}", architecture))
    return gpus


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _compute_capability() -> str:
    """Return sm_90 or the like of the first NVIDIA GPU, "" without nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        result = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        return f"sm_{result.stdout.split()[0].replace('.', '')}" if result.stdout.split() else ""
    return ""
