"""doctor on machines with an AMD GPU: simulated files of the kernel, and a simulated runtime."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from simulation import simulate

from sd_ort.inspect import amd

HIP = {
    "devices": [{"name": "Radeon", "free": 20_000_000_000, "total": 24_000_000_000}],
    "path": "/opt/rocm/lib/libamdhip64.so.7",
    "version": 70226015,
    "error": 0,
    "hipblaslt": {"path": "/opt/rocm/lib/libhipblaslt.so.1", "version": 100200},
}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A provider library with kernels for gfx11-generic."""
    path = tmp_path / "libsd_ort_ep_hip.so"
    path.write_bytes(b"hipv4-amdgcn-amd-amdhsa--gfx11-generic\0")
    monkeypatch.setattr(amd, "library_path", lambda name: path)
    return path


@pytest.fixture
def machine(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a file system with a 7900 XTX, on Ubuntu; the HIP runtime is `HIP`."""
    root = tmp_path / "root"
    for name, text in {
        "sys/class/kfd/kfd/topology/nodes/0/properties": "gfx_target_version 0\n",
        "sys/class/kfd/kfd/topology/nodes/1/properties": "gfx_target_version 110000\n",
        "sys/module/amdgpu/version": "6.14.14\n",
        "etc/os-release": 'ID=ubuntu\nID_LIKE="debian"\n',
        "dev/kfd": "",
        "dev/dri/renderD128": "",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(amd, "ask_hip", lambda library: HIP)
    monkeypatch.setenv("USER", "me")
    return root


def missing(root: Path) -> list[str]:
    """Return what `examine` finds missing."""
    findings = amd.examine(root)
    assert findings is not None
    return list(findings["missing"])


def test_a_complete_machine(machine: Path, library: Path) -> None:
    findings = amd.examine(machine)
    assert findings is not None
    assert amd.to_lines(findings) == [
        "AMD GPU 0   Radeon, gfx1100, 20.0 of 24.0 GB free",
        "AMD driver  amdgpu 6.14.14",
        "HIP runtime /opt/rocm/lib/libamdhip64.so.7 (7.2.26015)",
        "hipBLASLt   /opt/rocm/lib/libhipblaslt.so.1 (1.2.0)",
        f"AMD kernels gfx11-generic ({library})",
    ]


def test_unknown_versions(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver of Linux itself has no version, and hipBLASLt says its own only with a device."""
    (machine / "sys/module/amdgpu/version").unlink()
    blas = {"path": "/opt/rocm/lib/libhipblaslt.so.1", "version": None}
    monkeypatch.setattr(amd, "ask_hip", lambda library: HIP | {"devices": [], "version": None, "hipblaslt": blas})
    findings = amd.examine(machine)
    assert findings is not None
    assert amd.to_lines(findings)[:4] == [
        "AMD GPU 0   gfx1100, HIP does not see it",
        f"AMD driver  amdgpu of Linux {os.uname().release}",
        "HIP runtime /opt/rocm/lib/libamdhip64.so.7",
        "hipBLASLt   /opt/rocm/lib/libhipblaslt.so.1",
    ]


def test_no_amd_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amd, "ask_hip", lambda library: {"devices": []})
    assert amd.examine(tmp_path) is None


def test_a_card_without_its_driver(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PCI has it, and nobody else."""
    for name in ("sys/class/kfd/kfd/topology/nodes/1/properties", "sys/module/amdgpu/version", "dev/kfd"):
        (machine / name).unlink()
    (machine / "sys/module/amdgpu").rmdir()
    monkeypatch.setattr(amd, "ask_hip", lambda library: HIP | {"devices": [], "error": 100})
    device = machine / "sys/bus/pci/devices/0000:03:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x1002\n")
    (device / "class").write_text("0x040300\n")  # its audio device
    assert amd.examine(machine) is None
    (device / "class").write_text("0x030000\n")
    assert missing(machine) == [
        f"/dev/kfd does not exist: sudo modprobe amdgpu, or install the driver ({amd.INSTALL_GUIDE}).",
        "HIP sees no GPU (error 100): /opt/rocm/lib/libamdhip64.so.7 and the driver may not fit each other.",
    ]
    findings = amd.examine(machine)
    assert findings is not None
    assert "AMD driver  amdgpu is not loaded" in amd.to_lines(findings)


def test_groups(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who may not open the devices; in a container the group may have no name."""
    monkeypatch.setattr(amd.os, "access", lambda path, mode: False)
    monkeypatch.setattr(amd.Path, "group", lambda path: "render" if path.name.startswith(("kfd", "render")) else "")
    assert missing(machine) == [
        "/dev/kfd and /dev/dri/renderD128 cannot be opened by this user: sudo usermod -aG render me, then log in again."
    ]
    monkeypatch.setattr(amd.Path, "group", lambda path: "video" if path.name == "kfd" else "render")
    assert "sudo usermod -aG video,render me, then" in missing(machine)[0]
    (machine / ".dockerenv").touch()

    def unknown(path: Path) -> str:
        raise KeyError(path)

    monkeypatch.setattr(amd.Path, "group", unknown)
    (line,) = missing(machine)
    assert line.endswith(f"start the container with --group-add {(machine / 'dev/kfd').stat().st_gid}.")


def test_a_container_without_devices(machine: Path) -> None:
    (machine / "run").mkdir()
    (machine / "run/.containerenv").touch()
    (machine / "dev/kfd").unlink()
    assert missing(machine) == ["the container has no /dev/kfd: start it with --device=/dev/kfd --device=/dev/dri."]


@pytest.mark.parametrize(
    ("release", "runtime", "blas"),
    [
        ('ID=fedora\n', "sudo dnf install rocm-hip", "sudo dnf install hipblaslt"),
        ('ID=cachyos\nID_LIKE=arch\n', "sudo pacman -S hip-runtime-amd", "sudo pacman -S hipblaslt"),
        (
            'ID=ubuntu\nID_LIKE=debian\n',
            f"sudo apt-get install rocm-hip-runtime, with AMD's repository ({amd.INSTALL_GUIDE})",
            f"sudo apt-get install hipblaslt, with AMD's repository ({amd.INSTALL_GUIDE})",
        ),
        ("", f"install ROCm 6.4 or later ({amd.INSTALL_GUIDE})", f"install ROCm 6.4 or later ({amd.INSTALL_GUIDE})"),
    ],
)  # fmt: skip
def test_packages(machine: Path, release: str, runtime: str, blas: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "etc/os-release").write_text(release)
    monkeypatch.setattr(amd, "ask_hip", lambda library: {"devices": []})
    pip = f"pip install --index-url {amd.PIP_INDEX} 'rocm[libraries,device-gfx1100]'."
    assert missing(machine) == [f"no HIP runtime (libamdhip64.so.7, .6 or .5): {runtime}, or {pip}"]
    monkeypatch.setattr(amd, "ask_hip", lambda library: HIP | {"hipblaslt": None})
    assert missing(machine) == [f"no hipBLASLt: matrix products run on sd-ort's own kernels, slower. {blas}, or {pip}"]


NO_BLAS = "hipBLASLt has no kernels for gfx1032: linear layers take sd-ort's own. Use --float16."


def test_hipblaslt_is_not_advised_where_it_has_no_kernels(
    machine: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless another card has some."""
    nodes = machine / "sys/class/kfd/kfd/topology/nodes"
    (nodes / "1/properties").write_text("gfx_target_version 100302\n")
    monkeypatch.setattr(amd, "ask_hip", lambda library: HIP | {"hipblaslt": None})
    assert [line for line in missing(machine) if "hipBLASLt" in line] == [NO_BLAS]
    monkeypatch.setattr(amd, "ask_hip", lambda library: {"devices": []})
    assert missing(machine)[0].endswith(f", or pip install --index-url {amd.PIP_INDEX} 'rocm'.")
    monkeypatch.setattr(amd, "ask_hip", lambda library: HIP | {"hipblaslt": None})
    (nodes / "2").mkdir()
    (nodes / "2/properties").write_text("gfx_target_version 110501\n")
    first, second = [line for line in missing(machine) if "hipBLASLt" in line]
    assert first == NO_BLAS
    assert second.startswith("no hipBLASLt: ")


def test_kernels(machine: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = machine / "sys/class/kfd/kfd/topology/nodes/1/properties"
    for version, line in {
        "110501": [],  # gfx1151
        "90402": ["no kernels for gfx942 are installed: sd-ort build-ops --hip gfx942."],
        "100302": [NO_BLAS, "no kernels for gfx1032 are installed: sd-ort build-ops --hip gfx1032."],
        "100100": [f"no kernel is written for gfx1010; there are some for {', '.join(amd.amd_targets.TARGETS)}."],
    }.items():
        node.write_text(f"gfx_target_version {version}\n")
        assert missing(machine) == line
    node.write_text("gfx_target_version 110000\n")
    monkeypatch.setattr(amd, "library_path", lambda name: None)
    assert missing(machine) == ["no kernels for gfx1100 are installed: sd-ort build-ops --hip gfx1100."]


def test_wsl(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has /dev/dxg in place of Linux' files of the driver, and the driver of Windows, AMD's or another one."""
    for folder in ("sys", "dev/dri", "dev/kfd"):
        path = machine / folder
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (machine / "dev/dxg").touch()
    (machine / "usr/lib/wsl/drivers/nv.inf_amd64_1").mkdir(parents=True)
    monkeypatch.setattr(amd, "ask_hip", lambda library: HIP | {"devices": [], "error": 100})
    assert amd.examine(machine) is None
    driver = machine / "usr/lib/wsl/drivers/u0001.inf_amd64_1/amdxc64.so"
    driver.parent.mkdir()
    driver.touch()
    monkeypatch.delenv("HSA_ENABLE_DXG_DETECTION", raising=False)
    assert missing(machine)[0] == (
        f"WSL: ROCm 7.2 and later need librocdxg ({amd.WSL_GUIDE}) and export HSA_ENABLE_DXG_DETECTION=1."
    )
    monkeypatch.setenv("HSA_ENABLE_DXG_DETECTION", "1")
    monkeypatch.setattr(amd, "ask_hip", lambda library: HIP | {"target": "gfx1100"})
    with monkeypatch.context() as closed:
        closed.setattr(amd.os, "access", lambda path, mode: False)
        assert missing(machine) == ["/dev/dxg cannot be opened: update Windows' AMD driver and WSL (wsl --update)."]
    assert missing(machine) == []
    findings = amd.examine(machine)
    assert findings is not None
    assert "AMD driver  that of Windows, in WSL" in amd.to_lines(findings)


def test_windows(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no files that name the card: sd-ort's library does. Nothing of Linux is advised."""
    monkeypatch.setattr(sys, "platform", "win32")
    hip = HIP | {"path": "C:\\windows\\system32\\amdhip64_7.dll", "target": "gfx1151", "hipblaslt": None}
    monkeypatch.setattr(amd, "ask_hip", lambda library: hip)
    assert missing(tmp_path) == [
        "no hipBLASLt: matrix products run on sd-ort's own kernels, slower. HIP SDK has it, or "
        f"pip install --index-url {amd.PIP_INDEX} 'rocm[libraries,device-gfx1151]'."
    ]
    findings = amd.examine(tmp_path)
    assert findings is not None
    assert amd.to_lines(findings)[:2] == [
        "AMD GPU 0   Radeon, gfx1151, 20.0 of 24.0 GB free",
        "HIP runtime C:\\windows\\system32\\amdhip64_7.dll (7.2.26015)",
    ]
    monkeypatch.setattr(amd, "ask_hip", lambda library: hip | {"target": "gfx942"})
    assert missing(tmp_path)[1:] == [
        "no kernels for gfx942 are installed: make a wheel with them on Linux, "
        "scripts/build_wheels --hip=gfx942 --windows."
    ]


def ask(*options: str) -> dict[str, Any]:
    """Return what `ask_hip` returns on a simulated GPU."""
    code = "import json; from sd_ort.inspect import amd; print(json.dumps(amd.ask_hip()))"
    done = simulate("gfx1100", [sys.executable, "-c", code], "--kernels", "skip", *options)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_the_runtime_answers() -> None:
    answer = ask("--devices", "2", "--memory", "16G")
    assert [device["total"] for device in answer["devices"]] == [2**34, 2**34]
    assert all(0 < device["free"] <= 2**34 for device in answer["devices"])
    assert os.path.basename(answer["path"]).startswith("libamdhip64.so.7")
    assert answer["version"] // 10_000_000 == 7
    assert os.path.basename(answer["hipblaslt"]["path"]).startswith("libhipblaslt.so.1")
    assert answer["hipblaslt"]["version"] > 0


def test_a_runtime_without_devices_or_hipblaslt() -> None:
    answer = ask("--devices", "0", "--only-hip")
    assert (answer["devices"], answer["error"]) == ([], 100)
    assert "hipblaslt" not in answer
