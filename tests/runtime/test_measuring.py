"""Memory, power and energy, as the system's files tell them."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import pytest

from sd_ort.runtime import device, machine


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
    meter = device.AmdGpu(tmp_path, tmp_path / "proc")
    assert meter.used_MB(42) == 1000
    assert meter.used_MB(43) == 0
    with device.watching(meter, 42, interval=0.001) as watch:
        for bytes_ in ("2097152000", "1572864000"):
            (tmp_path / "new").write_text(bytes_)
            (tmp_path / "new").replace(process / "vram_1")
            time.sleep(0.05)
    assert watch.peak == 2000
    assert watch.joules is not None
    assert 250 * 0.1 <= watch.joules < 250 * 0.5
    power.unlink()
    assert device.AmdGpu(tmp_path).energy_J() is None


def test_energy_of_the_processor(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no RAPL"):
        device.Rapl(tmp_path)
    for package, microjoules in ((0, 1_500_000), (1, 500_000)):
        (tmp_path / f"intel-rapl:{package}").mkdir()
        (tmp_path / f"intel-rapl:{package}" / "energy_uj").write_text(f"{microjoules}\n")
    assert device.Rapl(tmp_path).energy_J() == 2


def test_device_that_is_not_there() -> None:
    meter = device.open_meter("rocm")
    if not meter.note.startswith(device.NOT_READABLE) or meter.energy_J() is not None:
        pytest.skip("this machine has an AMD GPU")
    assert meter.energy_J() is None
    assert meter.note.startswith("not readable: ")
