"""Checks of `sd-ort doctor` for AMD GPUs, on Linux and Windows: driver, HIP runtime, hipBLASLt and kernels."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from custom_ops import amd_targets
from sd_ort.runtime.library import PROVIDER_LIBRARIES, library_path
from sd_ort.runtime.provider_choice import installed_gpus

AMD_VENDOR, DISPLAY_CLASS, ACCELERATOR_CLASS = "0x1002", "0x03", "0x12"  # PCI
INSTALL_GUIDE = "https://rocm.docs.amd.com/projects/install-on-linux"
WINDOWS_DRIVER = "install AMD's driver (https://www.amd.com/en/support/download/drivers.html) or HIP SDK"
WSL_DRIVER = "that of Windows, in WSL"
WSL_GUIDE = "https://github.com/ROCm/librocdxg"
PIP_INDEX = "https://repo.amd.com/rocm/whl-multi-arch/"
# Packages with the HIP runtime and with hipBLASLt, by ID or ID_LIKE of /etc/os-release. Fedora and Arch have their own;
# those for the others are in AMD's repository.
_PACKAGES = {
    "fedora": ("sudo dnf install", "rocm-hip", "hipblaslt", ""),
    "arch": ("sudo pacman -S", "hip-runtime-amd", "hipblaslt", ""),
    "debian": ("sudo apt-get install", "rocm-hip-runtime", "hipblaslt", INSTALL_GUIDE),
    "rhel": ("sudo dnf install", "rocm-hip-runtime", "hipblaslt", INSTALL_GUIDE),
    "suse": ("sudo zypper install", "rocm-hip-runtime", "hipblaslt", INSTALL_GUIDE),
}

# Asked in a process of its own: a driver that fails ends that one. hipDeviceProp_t differs between versions, so nothing
# is read of it.
_ASK_HIP = """
import ctypes, json, sys
from pathlib import Path
from custom_ops import rocm
from custom_ops.libraries import GpuLibrary

answer, library = {"devices": []}, None
for name in rocm.runtime_names():
    try:
        library = ctypes.CDLL(name)
        break
    except OSError:
        continue
if library is not None:
    version, count = ctypes.c_int(), ctypes.c_int()
    failed = library.hipRuntimeGetVersion(ctypes.byref(version))
    answer |= {"path": rocm.path_of(library.hipGetDeviceCount), "version": None if failed else version.value}
    answer["error"] = library.hipGetDeviceCount(ctypes.byref(count))
    for device in range(0 if answer["error"] else count.value):
        text, free, total = ctypes.create_string_buffer(256), ctypes.c_size_t(), ctypes.c_size_t()
        library.hipDeviceGetName(text, len(text), device)
        library.hipSetDevice(device)
        library.hipMemGetInfo(ctypes.byref(free), ctypes.byref(total))
        answer["devices"].append({"name": text.value.decode(), "free": free.value, "total": total.value})
    for name in rocm.blas_names(answer["path"]):
        try:
            blas = ctypes.CDLL(name)
        except OSError:
            continue
        answer["hipblaslt"] = {"path": rocm.path_of(blas.hipblasLtCreate), "version": None}
        handle = ctypes.c_void_p()
        if answer["devices"] and blas.hipblasLtCreate(ctypes.byref(handle)) == 0:
            if blas.hipblasLtGetVersion(handle, ctypes.byref(version)) == 0:
                answer["hipblaslt"]["version"] = version.value
        break
    if answer["devices"] and len(sys.argv) > 1:
        answer["target"] = GpuLibrary(Path(sys.argv[1])).c.sd_ort_gpu_arch().decode()
print(json.dumps(answer))
"""


def examine(root: Path = Path("/")) -> dict[str, Any] | None:
    """Return the findings about AMD GPUs, or None on a machine without one. `root`: of the file system.

    `missing` has a line for everything that keeps the hip provider from running or makes it slow, with the command
    that changes it.
    """
    gpus = [gpu for gpu in installed_gpus(root) if gpu.vendor == "hip"]
    is_wsl = (root / "dev/dxg").exists()
    library = library_path(PROVIDER_LIBRARIES["hip"])
    hip = ask_hip(library)
    if not gpus and not hip["devices"] and not _has_device(root):
        return None
    targets = [] if library is None else amd_targets.kernel_targets(library)
    findings = {
        "targets": [gpu.architecture for gpu in gpus] or list(filter(None, [hip.get("target")])),
        "devices": hip["devices"],
        "driver": _driver(root),
        "wsl": is_wsl,
        "runtime": hip.get("path"),
        "runtime_version": _version(hip.get("version")),
        "hipblaslt": hip.get("hipblaslt"),
        "library": str(library) if library else None,
        "kernels": targets,
    }
    missing = [
        *([] if sys.platform == "win32" else _missing_access(root, is_wsl)),
        *_missing_software(root, hip, findings["targets"]),
        *_missing_kernels(findings),
    ]
    return findings | {"missing": missing}


def ask_hip(library: Path | None = None) -> dict[str, Any]:
    """Return the report of the HIP runtime: "path", "version", "devices", "error" and "hipblaslt".

    Without a runtime there is only "devices", an empty list. `library`: sd-ort's, which knows the "target" of device 0;
    Windows and WSL have no other place that names it.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    command = [sys.executable, "-c", _ASK_HIP, *([str(library)] if library else [])]
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
        return dict(json.loads(run.stdout))
    return {"devices": []}


def to_lines(findings: dict[str, Any]) -> list[str]:
    """Return the findings for a terminal."""
    lines = []
    for index in range(max(len(findings["targets"]), len(findings["devices"]))):
        target = findings["targets"][index] if index < len(findings["targets"]) else ""
        device = findings["devices"][index] if index < len(findings["devices"]) else None
        memory = (
            f"{device['free'] / 1e9:.1f} of {device['total'] / 1e9:.1f} GB free" if device else "HIP does not see it"
        )
        lines.append(f"AMD GPU {index}   {', '.join(filter(None, (device and device['name'], target, memory)))}")
    blas = findings["hipblaslt"]
    version = blas and _blas_version(blas["version"])
    lines += (
        []
        if sys.platform == "win32"
        else [f"AMD driver  {findings['driver'] or (WSL_DRIVER if findings['wsl'] else 'amdgpu is not loaded')}"]
    )
    lines += [
        f"HIP runtime {findings['runtime'] or 'none'}{_in_parentheses(findings['runtime_version'])}",
        f"hipBLASLt   {blas['path'] if blas else 'none'}{_in_parentheses(version)}",
        f"AMD kernels {', '.join(findings['kernels']) or 'none'}{_in_parentheses(findings['library'])}",
    ]
    return lines + [f"missing     {line}" for line in findings["missing"]]


def _in_parentheses(value: object) -> str:
    return f" ({value})" if value else ""


def _version(number: int | None) -> str | None:
    """Return 7.2.26015 for HIP's 70226015; None for None."""
    return None if number is None else f"{number // 10_000_000}.{number // 100_000 % 100}.{number % 100_000}"


def _blas_version(number: int | None) -> str | None:
    """Return 1.2.0 for hipBLASLt's 100200; None for None."""
    return None if number is None else f"{number // 100_000}.{number // 100 % 1000}.{number % 100}"


def _has_device(root: Path) -> bool:
    """Return whether PCI has an AMD GPU, with a driver or not, or WSL the files of AMD's driver for Windows."""
    if any(any(root.glob(f"usr/lib/wsl/drivers/{folder}/amdxc64.so")) for folder in ("*", "*/*")):
        return True
    for folder in root.glob("sys/bus/pci/devices/*"):
        with suppress(OSError):
            vendor, kind = (folder / "vendor").read_text().strip(), (folder / "class").read_text().strip()
            if vendor == AMD_VENDOR and kind.startswith((DISPLAY_CLASS, ACCELERATOR_CLASS)):
                return True
    return False


def _driver(root: Path) -> str | None:
    """Return name and version of the loaded kernel driver, or None. The kernel's own has no version of its own."""
    folder = root / "sys/module/amdgpu"
    if not folder.is_dir():
        return None
    with suppress(OSError):
        return f"amdgpu {(folder / 'version').read_text().strip()}"
    return f"amdgpu of Linux {os.uname().release}"


def _missing_access(root: Path, is_wsl: bool) -> Iterator[str]:
    """Yield what keeps this user from the devices: a driver, a container without them, or groups."""
    kfd, nodes = root / "dev/kfd", sorted(root.glob("dev/dri/renderD*"))
    if is_wsl:
        if not os.access(root / "dev/dxg", os.R_OK | os.W_OK):
            yield "/dev/dxg cannot be opened: update Windows' AMD driver and WSL (wsl --update)."
        if os.environ.get("HSA_ENABLE_DXG_DETECTION") != "1":
            yield f"WSL: ROCm 7.2 and later need librocdxg ({WSL_GUIDE}) and export HSA_ENABLE_DXG_DETECTION=1."
        return
    in_container = any((root / name).exists() for name in (".dockerenv", "run/.containerenv"))
    absent = [f"/{path.relative_to(root)}" for path in (kfd, root / "dev/dri") if not path.exists()]
    if absent and in_container:
        yield f"the container has no {' and no '.join(absent)}: start it with --device=/dev/kfd --device=/dev/dri."
    elif not kfd.exists():
        yield f"/dev/kfd does not exist: sudo modprobe amdgpu, or install the driver ({INSTALL_GUIDE})."
    closed = [path for path in (kfd, *nodes) if path.exists() and not os.access(path, os.R_OK | os.W_OK)]
    if not closed:
        return
    groups = dict.fromkeys(_group(path) for path in closed)
    names = " and ".join(f"/{path.relative_to(root)}" for path in closed)
    if in_container:
        flags = " ".join(f"--group-add {group}" for group in groups)
        yield f"{names} cannot be opened by this user: start the container with {flags}."
    else:
        yield (
            f"{names} cannot be opened by this user: sudo usermod -aG {','.join(groups)} "
            f"{shlex.quote(os.environ.get('USER', '$USER'))}, then log in again."
        )


def _group(path: Path) -> str:
    """Return the group that a device belongs to, as a number if it has no name here."""
    try:
        return path.group()
    except KeyError:
        return str(path.stat().st_gid)


def _missing_software(root: Path, hip: dict[str, Any], targets: Sequence[str]) -> Iterator[str]:
    """Yield the packages with HIP and hipBLASLt, if this machine lacks them, and a runtime that sees no device."""
    if hip.get("path") is None:
        names = "amdhip64_7.dll or amdhip64_6.dll" if sys.platform == "win32" else "libamdhip64.so.7, .6 or .5"
        yield f"no HIP runtime ({names}): {_install(root, 1)}, or {_pip(targets)}."
        return
    if not hip["devices"]:
        yield f"HIP sees no GPU (error {hip.get('error')}): {hip['path']} and the driver may not fit each other."
    without = [target for target in dict.fromkeys(targets) if target in amd_targets.WITHOUT_HIPBLASLT]
    for target in without:
        yield f"hipBLASLt has no kernels for {target}: linear layers take sd-ort's own. Use --float16."
    if not hip.get("hipblaslt") and not (targets and set(targets) <= set(without)):
        commands = f"{_install(root, 2)}, or {_pip(targets)}"
        yield f"no hipBLASLt: matrix products run on sd-ort's own kernels, slower. {commands}."


def _install(root: Path, package: int) -> str:
    """Return the command that installs HIP (1) or hipBLASLt (2) here."""
    if sys.platform == "win32":
        return WINDOWS_DRIVER if package == 1 else "HIP SDK has it"
    release: dict[str, str] = {}
    for line in _read(root / "etc/os-release").splitlines():
        key, _, value = line.partition("=")
        release[key] = value.strip('"')
    names = [release.get("ID", ""), *release.get("ID_LIKE", "").split()]
    packages = next((_PACKAGES[name] for name in names if name in _PACKAGES), None)
    if packages is None:
        return f"install ROCm 6.4 or later ({INSTALL_GUIDE})"
    command, repository = f"{packages[0]} {packages[package]}", packages[3]
    return f"{command}, with AMD's repository ({repository})" if repository else command


def _pip(targets: Sequence[str]) -> str:
    """Return pip's command that installs HIP, and hipBLASLt if it has kernels for one of the targets."""
    devices = [target for target in dict.fromkeys(targets) if target not in amd_targets.WITHOUT_HIPBLASLT]
    extras = ",".join(["libraries", *(f"device-{target}" for target in devices or ["all"])])
    package = "rocm" if targets and not devices else f"rocm[{extras}]"
    return f"pip install --index-url {PIP_INDEX} '{package}'"


def _missing_kernels(findings: dict[str, Any]) -> Iterator[str]:
    """Yield the cards that the installed library has no kernels for."""
    for target in dict.fromkeys(findings["targets"]):
        if target not in amd_targets.TARGETS:
            yield f"no kernel is written for {target}; there are some for {', '.join(amd_targets.TARGETS)}."
        elif not findings["library"] or (findings["kernels"] and not amd_targets.covers(findings["kernels"], target)):
            build = f"sd-ort build-ops --hip {target}"
            on_linux = f"make a wheel with them on Linux, scripts/build_wheels --hip={target} --windows"
            yield f"no kernels for {target} are installed: {on_linux if sys.platform == 'win32' else build}."


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
