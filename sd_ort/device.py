"""Memory and energy of the device a provider runs on, read where the vendors' own tools read them.

    cuda             NVML (what nvidia-smi shows): memory in use, energy since the driver was loaded
    rocm, migraphx   the amdgpu driver's files in /sys/class/drm (what amd-smi shows): memory in use, average power
    cpu              RAPL, /sys/class/powercap: energy of the processor packages; its memory is the host's

All are numbers of the whole device, idle power and other processes included.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MEGABYTE = 2**20
NOT_READABLE = "not readable"


class Meter:
    """What can be read of a device: memory in MB and energy in J, None where it cannot; `note` says why not."""

    note = NOT_READABLE

    def used_MB(self) -> float | None:
        """Device memory in use now, by all processes."""
        return None

    def energy_J(self) -> float | None:
        """A counter of energy: differences count."""
        return None


class _NvmlMemory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]  # nvmlMemory_t


class Nvml(Meter):
    """An NVIDIA GPU through libnvidia-ml. Raises OSError when it is not there."""

    def __init__(self, index: int = 0) -> None:
        """`index`: the GPU, as NVML counts them."""
        self.library = ctypes.CDLL("libnvidia-ml.so.1")
        self.handle = ctypes.c_void_p()
        if self.library.nvmlInit_v2() or self.library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self.handle)):
            raise OSError("NVML finds no GPU")

    def used_MB(self) -> float | None:
        memory = _NvmlMemory()
        failed = self.library.nvmlDeviceGetMemoryInfo(self.handle, ctypes.byref(memory))
        return None if failed else memory.used / MEGABYTE

    def energy_J(self) -> float | None:
        millijoules = ctypes.c_ulonglong()
        failed = self.library.nvmlDeviceGetTotalEnergyConsumption(self.handle, ctypes.byref(millijoules))
        return None if failed else millijoules.value / 1e3


class AmdGpu(Meter):
    """An AMD GPU through sysfs. The driver gives power, not energy: it is summed up while `energy_J` is called.

    `device`: /sys/class/drm/card<N>/device. Raises OSError when it has no VRAM counter.
    """

    def __init__(self, device: Path) -> None:
        self.memory = device / "mem_info_vram_used"
        self.memory.read_text()
        hwmon = (device / "hwmon").glob("hwmon*")
        names = ("power1_average", "power1_input")  # microwatts; newer GPUs have only the second
        self.power = next((path for folder in hwmon for name in names if (path := folder / name).is_file()), None)
        self.joules, self.last = 0.0, time.perf_counter()

    def used_MB(self) -> float | None:
        return int(self.memory.read_text()) / MEGABYTE

    def energy_J(self) -> float | None:
        if self.power is None:
            return None
        try:
            watts = int(self.power.read_text()) / 1e6
        except OSError:
            return None
        now = time.perf_counter()
        self.joules, self.last = self.joules + watts * (now - self.last), now
        return self.joules


class Rapl(Meter):
    """The processor packages through powercap. Raises OSError when the counters are absent or only root's."""

    def __init__(self, root: Path = Path("/sys/class/powercap")) -> None:
        self.counters = sorted(root.glob("intel-rapl:[0-9]/energy_uj"))  # AMD's processors have them too
        if not self.counters:
            raise OSError("no RAPL counters")
        self.energy_J()

    def energy_J(self) -> float | None:
        return sum(int(path.read_text()) for path in self.counters) / 1e6


def open_meter(provider: str) -> Meter:
    """The meter of a provider's first device; one that reads nothing, with the reason as its note, where none is."""
    try:
        if provider == "cpu":
            return Rapl()
        if provider == "cuda":
            return Nvml()
        cards = sorted(Path("/sys/class/drm").glob("card[0-9]*/device/mem_info_vram_used"))
        if not cards:
            raise OSError("no amdgpu device in /sys/class/drm")
        return AmdGpu(cards[0].parent)
    except OSError as error:
        meter = Meter()
        meter.note = f"{NOT_READABLE}: {error}"
        return meter


class Watch:
    """The device while a block ran: memory before, at its peak and after it in MB, and energy in J; None if unread."""

    before: float | None = None
    peak: float | None = None
    after: float | None = None
    joules: float | None = None


@contextmanager
def watching(meter: Meter, interval: float = 0.01) -> Iterator[Watch]:
    """Read memory and energy every `interval` seconds while the block runs, in a thread of this process."""
    watch = Watch()
    watch.before = watch.peak = meter.used_MB()
    start = meter.energy_J()
    done = threading.Event()

    def sample() -> None:
        with suppress(OSError):
            while not done.wait(interval):
                watch.peak = _larger(watch.peak, meter.used_MB())
                meter.energy_J()

    thread = threading.Thread(target=sample, daemon=True)
    if watch.before is not None or start is not None:
        thread.start()
    try:
        yield watch
    finally:
        done.set()
        if thread.ident is not None:
            thread.join()
        end = meter.energy_J()
        watch.after = meter.used_MB()
        watch.peak = _larger(watch.peak, watch.after)
        watch.joules = end - start if start is not None and end is not None and end >= start else None


def _larger(first: float | None, second: float | None) -> float | None:
    return second if first is None else first if second is None else max(first, second)


def watched(meter: Meter, function: Callable[..., Any], *arguments: Any) -> tuple[Any, Watch]:
    """`function(*arguments)` and what the device did meanwhile."""
    with watching(meter) as watch:
        result = function(*arguments)
    return result, watch
