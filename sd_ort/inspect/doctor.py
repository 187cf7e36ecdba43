"""Diagnosis of a machine: versions, providers and missing shared libraries, op library, tuning files, GPUs, memory."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

from sd_ort.core.cache import cache_folder
from sd_ort.core.errors import SdOrtError
from sd_ort.inspect import amd
from sd_ort.runtime import machine, tuning
from sd_ort.runtime.bound_run import FAILED_CAPTURES, failed_captures
from sd_ort.runtime.library import library_path
from sd_ort.runtime.op_library import build_command, op_library
from sd_ort.runtime.ort_wheel import import_onnxruntime, installed_wheels
from sd_ort.runtime.provider_choice import choose_provider, provider_problem
from sd_ort.runtime.provider_table import PROVIDERS
from sd_ort.runtime.providers import missing_libraries
from sd_ort.runtime.rocm_checks import has_wrong_wave_size

WRONG_WAVE_SIZE = "its Softmax and LayerNormalization give wrong values on this GPU: optimize for target rocm"


def examine() -> dict[str, Any]:
    """Return the findings; memory and disk in GB, `problem` None for a provider that loads."""
    try:
        library, op_problem = library_path(), None
    except SdOrtError as error:
        library, op_problem = None, str(error)
    providers = {name: examine_provider(name) for name in PROVIDERS}
    return {
        "commit": machine.commit(),
        "machine": machine.machine(),
        "memory_free_GB": round(psutil.virtual_memory().available / 1e9, 1),
        "disk_free_GB": round(shutil.disk_usage(Path.cwd()).free / 1e9, 1),
        "versions": machine.versions(),
        "wheels": installed_wheels(),
        "clashes": clashes(),
        "amd": amd.examine(),
        "providers": providers,
        "auto": choose_provider().line if any(each["ok"] for each in providers.values()) else None,
        "op_library": str(library) if library else None,
        "op_library_problem": op_problem,
        "failed_captures": failed_captures(),
        "tuning": examine_tuning([name for name in providers if providers[name]["ok"]], library),
    }


def clashes(requirements: Sequence[str] | None = None) -> list[str]:
    """Return one line for each package that is missing, or of another version than sd-ort was tested with.

    In an application's environment sd-ort may work all the same. Unmet requirements of these packages follow.

    `requirements`: as for pip; None for those of the installed sd-ort without its extras.
    """
    lines = metadata.requires("sd-ort") if requirements is None else requirements
    direct = _applicable(lines)
    for requirement in _applicable(lines, "export"):  # torch and the like need not be installed
        with contextlib.suppress(metadata.PackageNotFoundError):
            if requirement not in direct and metadata.version(requirement.name):
                direct.append(requirement)
    problems = [line for requirement in direct if (line := _unmet(requirement, "{} was tested"))]
    for package in direct:
        with contextlib.suppress(metadata.PackageNotFoundError):
            indirect = _applicable(metadata.requires(package.name))
            problems += [line for r in indirect if (line := _unmet(r, f"{package.name} needs {{}}"))]
    return list(dict.fromkeys(problems))


def _applicable(lines: Sequence[str] | None, extra: str = "") -> list[Requirement]:
    """Return the requirements whose markers hold here, with those of one extra."""
    requirements = [Requirement(line) for line in lines or ()]
    return [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": extra})]


def _unmet(requirement: Requirement, expected: str) -> str | None:
    """Return what is wrong with the installed version, or None. `expected`: format string for the specifier."""
    name = requirement.name
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{name} is not installed: pip install '{name}{requirement.specifier}'"
    if requirement.specifier.contains(version, prereleases=True):
        return None
    return f"{name} {version} is installed, and {expected.format(requirement.specifier)}"


def examine_provider(name: str) -> dict[str, Any]:
    """Return whether a provider runs here, the problem if not, missing shared libraries, and a note on its faults."""
    if problem := provider_problem(name):
        missing = []
        with contextlib.suppress(SdOrtError):  # without onnxruntime, which `problem` says
            missing = missing_libraries(name)
        return {"ok": False, "problem": problem, "missing_libraries": missing, "note": None}
    return {"ok": True, "problem": None, "missing_libraries": [], "note": _note(name)}


def _note(provider: str) -> str | None:
    """Return what an available provider does wrong on this GPU."""
    if provider != "rocm" or not has_wrong_wave_size():
        return None
    has_ops = op_library(True, provider) is not None
    return WRONG_WAVE_SIZE + ("" if has_ops else f", and build the op library: {build_command(provider)}")


def examine_tuning(usable: list[str], library: Path | None) -> list[dict[str, Any]]:
    """Return {"path", "fresh", "problem"} of each tuning file; fresh: sessions on a usable provider load it."""
    paths = sorted(tuning.folder().glob("*.json"))
    if not paths:
        return []
    tunable = [name for name in usable if PROVIDERS[name].tuning or PROVIDERS[name].ep in tuning.GPU_LIBRARIES]
    validators = [
        tuning.validators_of(tuning.gpu_ops(name, library), import_onnxruntime().__version__) for name in tunable
    ]
    return [{"path": str(path), **_freshness(path, validators)} for path in paths]


def _freshness(path: Path, validators: Sequence[Any]) -> dict[str, Any]:
    problem = "no provider that can be tuned loads on this machine"
    for expected in validators:
        try:
            tuning.check(path, tuning.read(path), expected)
            return {"fresh": True, "problem": None}
        except SdOrtError as error:
            problem = str(error).removeprefix(f"{path} ")
    return {"fresh": False, "problem": problem}


def to_text(findings: dict[str, Any]) -> str:
    """Return the findings for a terminal, one per line."""
    machine = findings["machine"]
    lines = [
        f"machine     {machine['cpu']}, {machine['cores']} cores, {machine['system']}",
        f"memory      {findings['memory_free_GB']} of {machine['memory_GB']} GB free",
        f"disk        {findings['disk_free_GB']} GB free here",
        f"GPU         {'; '.join(machine['gpus']) or 'none found'}",
        "versions    " + ", ".join(f"{name} {version}" for name, version in findings["versions"].items()),
        f"op library  {findings['op_library'] or findings['op_library_problem'] or 'none: function bodies run'}",
    ]
    lines += amd.to_lines(findings["amd"]) if findings["amd"] else []
    lines += [f"clash       {clash}" for clash in findings["clashes"]]
    for name, provider in findings["providers"].items():
        lines.append(
            f"{name:<11} {provider['problem'] or 'ok' + (f', but {note}' if (note := provider['note']) else '')}"
        )
    if findings["auto"]:
        lines.append(f"auto        {findings['auto']}")
    if captures := findings["failed_captures"]:
        where = cache_folder() / FAILED_CAPTURES
        lines.append(f"GPU graphs  {len(captures)} runs were not captured ({where}), the last one: {captures[-1]}")
    for file in findings["tuning"]:
        lines.append(f"tuning      {file['path']}: {'fresh' if file['fresh'] else file['problem']}")
    return "\n".join(lines)
