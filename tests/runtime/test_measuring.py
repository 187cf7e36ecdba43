"""Memory, power and energy, as the system's files tell them."""

from __future__ import annotations

import json
import mmap
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sd_ort.runtime import device_meters, machine


def test_peak_memory_counts_from_its_reset() -> None:
    """Of mapped memory: what malloc gave stays with a process whose heap had room for it."""
    if not machine.reset_peak_memory():
        pytest.skip("this system does not let a process reset its peak")
    before = machine.peak_memory_MB()
    with mmap.mmap(-1, 64 * machine.MEGABYTE) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        assert machine.peak_memory_MB() - before == pytest.approx(64, abs=8)
    machine.reset_peak_memory()
    assert machine.peak_memory_MB() - before == pytest.approx(0, abs=8)


def test_device_memory_and_power_of_an_amd_gpu(tmp_path: Path) -> None:
    power = tmp_path / "hwmon" / "hwmon3" / "power1_average"
    power.parent.mkdir(parents=True)
    (tmp_path / "mem_info_vram_used").write_text("1048576000\n")
    power.write_text("250000000\n")
    process = tmp_path / "proc" / "42"
    process.mkdir(parents=True)
    (process / "vram_1").write_text("1048576000\n")
    meter = device_meters.AmdGpu(tmp_path, tmp_path / "proc")
    assert meter.used_MB(42) == 1000
    assert meter.used_MB(43) is None  # in a container all are named by the host's numbers
    with device_meters.watching(meter, 42, interval=0.001) as watch:
        for bytes_ in ("2097152000", "1572864000"):
            (tmp_path / "new").write_text(bytes_)
            (tmp_path / "new").replace(process / "vram_1")
            time.sleep(0.05)
    assert watch.peak == 2000
    assert watch.joules is not None
    assert 250 * 0.1 <= watch.joules < 250 * 0.5
    power.unlink()
    assert device_meters.AmdGpu(tmp_path).energy_J() is None


def test_memory_of_a_process_that_uses_the_gpu_later(tmp_path: Path) -> None:
    """The driver names it once it does; without a power sensor there is nothing to read until then."""
    (tmp_path / "mem_info_vram_used").write_text("0\n")
    meter = device_meters.AmdGpu(tmp_path, tmp_path / "proc")
    with device_meters.watching(meter, 42, interval=0.001) as watch:
        (tmp_path / "new").mkdir()
        (tmp_path / "new/vram_1").write_text("1048576000\n")
        (tmp_path / "proc").mkdir()
        (tmp_path / "new").rename(tmp_path / "proc/42")
        while watch.peak is None:
            time.sleep(0.001)
        (tmp_path / "proc/42").rename(tmp_path / "gone")
    assert watch.peak == 1000


def drm(folder: Path, cards: dict[str, str]) -> Path:
    """A folder as /sys/class/drm with these cards, by name, at PCI addresses."""
    for name, address in cards.items():
        pci = folder.parent / "pci" / address
        pci.mkdir(parents=True)
        (pci / "mem_info_vram_used").write_text("0\n")
        (folder / name).mkdir(parents=True)
        (folder / name / "device").symlink_to(pci)
    return folder


def test_the_first_gpu_is_the_one_that_hip_counts_as_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As card10 beside a processor's own GPU, which comes first by name."""
    cards = drm(tmp_path / "drm", {"card1": "0000:c4:00.0", "card10": "0000:03:00.0"})
    monkeypatch.setattr(device_meters, "hip_pci_address", lambda: "0000:03:00.0")
    assert device_meters.amd_device(cards).name == "0000:03:00.0"
    monkeypatch.setattr(device_meters, "hip_pci_address", lambda: None)
    with pytest.raises(OSError, match="HIP's first GPU is unknown"):
        device_meters.amd_device(cards)
    alone = drm(tmp_path / "alone/drm", {"card0": "0000:05:00.0"})
    assert device_meters.amd_device(alone).name == "0000:05:00.0"
    with pytest.raises(OSError, match="no amdgpu device"):
        device_meters.amd_device(tmp_path / "absent")


def test_hip_is_asked_for_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a library of ROCm's folder, with the variables that hide GPUs; nobody answers without one."""
    source = tmp_path / "hip.c"
    source.write_text(
        "#include <stdio.h>\n#include <stdlib.h>\n"
        "int hipDeviceGetPCIBusId(char* to, int bytes, int device) {\n"
        '  const char* seen = getenv("HIP_VISIBLE_DEVICES");\n'
        '  return snprintf(to, bytes, "0000:%02X:00.0", 0xa0 + (seen ? atoi(seen) : device)) < 0; }\n'
    )
    library = tmp_path / "rocm/lib/libamdhip64.so.7"
    library.parent.mkdir(parents=True)
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    assert device_meters.hip_pci_address() == "0000:a0:00.0"
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3,1")
    assert device_meters.hip_pci_address() == "0000:a3:00.0"


ASIC = {"market_name": "AMD Radeon RX 7900 XTX", "target_graphics_version": "gfx1100"}
DRIVER = {"name": "amdgpu", "version": "6.12.12"}
ROCM_SMI = """
WARNING: AMD GPU device(s) is/are in a low-power state.
device,Card Series,Card Model,Card Vendor
card0,AMD Instinct MI300X OAM,0x74a1,"Advanced Micro Devices, Inc. [AMD/ATI]"
card1,AMD Instinct MI300X OAM,0x74a1,"Advanced Micro Devices, Inc. [AMD/ATI]"

device,Driver version
cardsystem,6.8.5
"""


@pytest.mark.parametrize("wrap", [lambda entries: entries, lambda entries: {"gpu_data": entries}])
def test_gpus_as_amd_smi_names_them(wrap: Callable[[list], object]) -> None:
    """ROCm 6 prints a list, ROCm 7 an object with it."""
    output = json.dumps(wrap([{"gpu": 0, "asic": ASIC, "driver": DRIVER}]))
    assert machine.amd_smi_gpus(output) == ["AMD Radeon RX 7900 XTX, 6.12.12"]


def test_gpus_as_rocm_smi_names_them() -> None:
    """Headings, warnings and the row of the system are no GPUs."""
    assert machine.rocm_smi_gpus(ROCM_SMI) == ["AMD Instinct MI300X OAM, 6.8.5"] * 2


def test_gpus_by_the_first_tool_that_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """amd-smi that fails leaves the question to rocm-smi; without tools there are none."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpus() == []
    for name, text in (("amd-smi", "echo no GPU; exit 1"), ("rocm-smi", f"echo '{ROCM_SMI}'")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    assert machine.gpus() == ["AMD Instinct MI300X OAM, 6.8.5"] * 2
    listing = json.dumps([{"gpu": 0, "asic": ASIC, "driver": DRIVER}])
    (tmp_path / "amd-smi").write_text(f"#!/bin/sh\necho '{listing}'\n")
    assert machine.gpus() == ["AMD Radeon RX 7900 XTX, 6.12.12"]


def test_energy_of_the_processor(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no RAPL"):
        device_meters.Rapl(tmp_path)
    for package, microjoules in ((0, 1_500_000), (1, 500_000)):
        (tmp_path / f"intel-rapl:{package}").mkdir()
        (tmp_path / f"intel-rapl:{package}" / "energy_uj").write_text(f"{microjoules}\n")
    assert device_meters.Rapl(tmp_path).energy_J() == 2


@pytest.mark.parametrize("provider", ["cuda", "sdcuda"])
def test_meter_of_an_nvidia_gpu(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML's, for ONNX Runtime's provider and for ours."""
    monkeypatch.setattr(device_meters, "Nvml", lambda: device_meters.DeviceMeter())
    assert device_meters.open_meter(provider).note == device_meters.NOT_READABLE  # without an amdgpu driver's reason


def test_device_that_is_not_there() -> None:
    meter = device_meters.open_meter("rocm")
    if not meter.note.startswith(device_meters.NOT_READABLE) or meter.energy_J() is not None:
        pytest.skip("this machine has an AMD GPU")
    assert meter.energy_J() is None
    assert meter.note.startswith("not readable: ")
