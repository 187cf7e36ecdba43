"""What this machine can run: versions, providers and the shared libraries they miss, the op library, GPU, memory."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

from sd_ort.core.errors import ProviderError, SdOrtError
from sd_ort.runtime import machine, tuning
from sd_ort.runtime.library import library_path
from sd_ort.runtime.op_library import build_command, hip_runtime_clash, op_library
from sd_ort.runtime.provider_records import PROVIDERS
from sd_ort.runtime.providers import check_provider, is_plugin, missing_libraries
from sd_ort.runtime.rocm_checks import has_wrong_wave_size
from sd_ort.runtime.stream import open_stream
from sd_ort.runtime.wheels import installed_wheels, runtime

WRONG_WAVE_SIZE = "its Softmax and LayerNormalization give wrong values on this GPU: optimize for target rocm"


def examine() -> dict[str, Any]:
    """The findings; memory and disk in GB, `problem` None for a provider that loads."""
    try:
        library, op_problem = library_path(), None
    except SdOrtError as error:
        library, op_problem = None, str(error)
    providers = {name: examine_provider(name, library) for name in PROVIDERS}
    return {
        "commit": machine.commit(),
        "machine": machine.machine(),
        "memory_free_GB": round(psutil.virtual_memory().available / 1e9, 1),
        "disk_free_GB": round(shutil.disk_usage(Path.cwd()).free / 1e9, 1),
        "versions": machine.versions(),
        "wheels": installed_wheels(),
        "clashes": clashes(),
        "providers": providers,
        "op_library": str(library) if library else None,
        "op_library_problem": op_problem,
        "tuning": examine_tuning([name for name in providers if providers[name]["ok"]], library),
    }


def clashes(requirements: Sequence[str] | None = None) -> list[str]:
    """What is missing here, or of another version than sd-ort was tested with: in a host's environment it may run all
    the same, and nothing of the host's need be changed. Then what the packages asked for miss in their turn.

    `requirements`: as pip writes them; None for those of the installed sd-ort, without its extras.
    """
    asked = _asked(metadata.requires("sd-ort") if requirements is None else requirements)
    found = [line for requirement in asked if (line := _unmet(requirement, "{} was tested"))]
    for outer in asked:
        with contextlib.suppress(metadata.PackageNotFoundError):
            inner = _asked(metadata.requires(outer.name))
            found += [line for requirement in inner if (line := _unmet(requirement, f"{outer.name} needs {{}}"))]
    return list(dict.fromkeys(found))


def _asked(lines: Sequence[str] | None) -> list[Requirement]:
    """Those of a package's requirements that count here, without its extras."""
    every = [Requirement(line) for line in lines or ()]
    return [each for each in every if each.marker is None or each.marker.evaluate({"extra": ""})]


def _unmet(requirement: Requirement, why: str) -> str | None:
    """What is wrong with the installed version, if anything; `why` takes the versions wanted."""
    name = requirement.name
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{name} is not installed: pip install '{name}{requirement.specifier}'"
    if requirement.specifier.contains(version, prereleases=True):
        return None
    return f"{name} {version} is installed, and {why.format(requirement.specifier)}"


def examine_provider(name: str, library: Path | None = None) -> dict[str, Any]:
    """Whether a provider can be asked for and has a device: the reason if not, the shared libraries it misses, and a
    note on what it does wrong."""
    try:
        check_provider(name)
        if not is_plugin(name):  # whose devices were counted already
            open_stream(name)  # which fails without a device
        if library is not None and (problem := hip_runtime_clash(library, name)):
            raise ProviderError(problem)
    except SdOrtError as error:
        try:
            missing = missing_libraries(name)
        except SdOrtError:  # no onnxruntime at all: the problem says so
            missing = []
        return {"ok": False, "problem": str(error), "missing_libraries": missing, "note": None}
    return {"ok": True, "problem": None, "missing_libraries": [], "note": _note(name, library)}


def _note(provider: str, library: Path | None) -> str | None:
    if provider != "rocm" or not has_wrong_wave_size():
        return None
    has_ops = library is not None and op_library(library, provider) is not None
    return WRONG_WAVE_SIZE + ("" if has_ops else f", and build the op library: {build_command(provider)}")


def examine_tuning(usable: list[str], library: Path | None) -> list[dict[str, Any]]:
    """The files of `runtime.tuning.folder`: `fresh` if sessions on a usable provider load it, or else the `problem`."""
    paths = sorted(tuning.folder().glob("*.json"))
    tuned = [name for name in usable if PROVIDERS[name].tuning or PROVIDERS[name].ep in tuning.GPU_LIBRARIES]
    if not paths:
        return []
    here = [tuning.validators_of(tuning.gpu_ops(name, library), runtime().__version__) for name in tuned]
    found = []
    for path in paths:
        problem: str | None = "no provider that can be tuned loads on this machine"
        for validators in here:
            try:
                tuning.check(path, tuning.read(path), validators)
                problem = None
                break
            except SdOrtError as error:
                problem = str(error)
        found.append({"path": str(path), "fresh": problem is None, "problem": problem})
    return found


def to_text(findings: dict[str, Any]) -> str:
    """The findings for a terminal, one a line."""
    machine = findings["machine"]
    lines = [
        f"machine     {machine['cpu']}, {machine['cores']} cores, {machine['system']}",
        f"memory      {findings['memory_free_GB']} of {machine['memory_GB']} GB free",
        f"disk        {findings['disk_free_GB']} GB free here",
        f"GPU         {'; '.join(machine['gpus']) or 'none found'}",
        "versions    " + ", ".join(f"{name} {version}" for name, version in findings["versions"].items()),
        f"op library  {findings['op_library'] or findings['op_library_problem'] or 'none: function bodies run'}",
    ]
    lines += [f"clash       {clash}" for clash in findings["clashes"]]
    for name, provider in findings["providers"].items():
        lines.append(
            f"{name:<11} {provider['problem'] or 'ok' + (f', but {note}' if (note := provider['note']) else '')}"
        )
    for file in findings["tuning"]:
        lines.append(f"tuning      {file['path']}: {'fresh' if file['fresh'] else file['problem']}")
    return "\n".join(lines)
