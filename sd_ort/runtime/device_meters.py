"""Memory and energy of the device a provider runs on, read where the vendors' own tools read them.

    NVIDIA       NVML (what nvidia-smi shows): memory of a process, energy since the driver was loaded
    AMD          the amdgpu driver's files in /sys/class (what amd-smi shows): memory of a process, average power
    processor    RAPL, /sys/class/powercap: energy of the processor packages; its memory is the host's

Energy is that of the whole device, idle power and other processes included.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from custom_ops import rocm
from sd_ort.runtime.machine import MEGABYTE
from sd_ort.runtime.visible_devices import NVIDIA, VARIABLE

NOT_READABLE = "not readable"
UNKNOWN = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE


class DeviceMeter:
    """Readings of a device: memory in MB and energy in J, None if unavailable; `note` says why."""

    note = NOT_READABLE

    def used_MB(self, pid: int) -> float | None:
        """Return the device memory of a process in MB, with its context and the kernels' code; None if unknown."""
        return None

    def energy_J(self) -> float | None:
        """A counter of energy: differences count."""
        return None


class _NvmlProcess(ctypes.Structure):
    """nvmlProcessInfo_t of nvmlDeviceGetComputeRunningProcesses_v3."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Nvml(DeviceMeter):
    """An NVIDIA GPU through libnvidia-ml. Raises OSError when it is not there."""

    def __init__(self, index: int = 0) -> None:
        """`index`: the GPU, as NVML counts them."""
        self.library = ctypes.CDLL("libnvidia-ml.so.1")
        self.handle = ctypes.c_void_p()
        if self.library.nvmlInit_v2() or self.library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self.handle)):
            raise OSError("NVML finds no GPU")

    def used_MB(self, pid: int) -> float | None:
        count, processes = ctypes.c_uint(256), (_NvmlProcess * 256)()
        failed = self.library.nvmlDeviceGetComputeRunningProcesses_v3(self.handle, ctypes.byref(count), processes)
        if failed or any(process.used == UNKNOWN for process in processes[: count.value]):
            return None
        return sum(process.used for process in processes[: count.value] if process.pid == pid) / MEGABYTE

    def energy_J(self) -> float | None:
        millijoules = ctypes.c_ulonglong()
        failed = self.library.nvmlDeviceGetTotalEnergyConsumption(self.handle, ctypes.byref(millijoules))
        return None if failed else millijoules.value / 1e3


class AmdGpu(DeviceMeter):
    """An AMD GPU through sysfs. The driver gives power, not energy: it is summed up while `energy_J` is called.

    `device`: /sys/class/drm/card<N>/device. Raises OSError when it has no VRAM counter.
    """

    def __init__(self, device: Path, processes: Path = Path("/sys/class/kfd/kfd/proc")) -> None:
        (device / "mem_info_vram_used").read_text()
        self.processes = processes
        hwmon = (device / "hwmon").glob("hwmon*")
        names = ("power1_average", "power1_input")  # microwatts; newer GPUs have only the second
        self.power = next((path for folder in hwmon for name in names if (path := folder / name).is_file()), None)
        self.joules, self.last = 0.0, time.perf_counter()

    def used_MB(self, pid: int) -> float | None:
        """None also for a process without a folder, as all have in a container: the host's numbers name them."""
        folder = self.processes / str(pid)
        try:  # one file a GPU
            return sum(int(path.read_text()) for path in folder.glob("vram_*")) / MEGABYTE if folder.is_dir() else None
        except OSError:
            return None

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


class Rapl(DeviceMeter):
    """The processor packages through powercap. Raises OSError when the counters are absent or only root's."""

    def __init__(self, root: Path = Path("/sys/class/powercap")) -> None:
        self.counters = sorted(root.glob("intel-rapl:[0-9]/energy_uj"))  # AMD's processors have them too
        if not self.counters:
            raise OSError("no RAPL counters")
        self.energy_J()

    def energy_J(self) -> float | None:
        return sum(int(path.read_text()) for path in self.counters) / 1e6


def open_meter(provider: str) -> DeviceMeter:
    """The meter of a provider's first device; one that reads nothing, with the reason as its note, where none is."""
    try:
        if provider == "cpu":
            return Rapl()
        if VARIABLE.get(provider) == NVIDIA:
            return Nvml()
        return AmdGpu(amd_device())
    except OSError as error:
        meter = DeviceMeter()
        meter.note = f"{NOT_READABLE}: {error}"
        return meter


def amd_device(cards: Path = Path("/sys/class/drm")) -> Path:
    """Return the sysfs folder of the GPU that HIP counts as 0, $HIP_VISIBLE_DEVICES considered.

    Raises:
        OSError: there is no amdgpu device, or HIP does not say which of several it is.
    """
    devices = sorted(path.parent.resolve() for path in cards.glob("card[0-9]*/device/mem_info_vram_used"))
    if not devices:
        raise OSError(f"no amdgpu device in {cards}")
    address = devices[0].name if len(devices) == 1 else hip_pci_address()
    match = next((device for device in devices if device.name == address), None)
    if match is None:
        raise OSError(f"HIP's first GPU is {address or 'unknown'}, and {cards} has several")
    return match


# hipDeviceGetPCIBusId of device 0, by the first of the libraries named in the arguments that loads.
_ASK_HIP = """
import ctypes, sys
for name in sys.argv[1:]:
    try:
        library = ctypes.CDLL(name)
    except OSError:
        continue
    address = ctypes.create_string_buffer(64)
    if library.hipDeviceGetPCIBusId(address, len(address), 0) == 0:
        print(address.value.decode().lower())
    break
"""


def hip_pci_address() -> str | None:
    """Return the PCI address of HIP's device 0 ("0000:03:00.0"), or None if HIP does not say.

    Asked in a process of its own: the runtime would take device memory in this one.
    """
    command = [sys.executable, "-c", _ASK_HIP, *rocm.libraries("libamdhip64.so*"), *rocm.runtime_names()]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() or None


class DeviceUsage:
    """The device while a block ran: the most memory a process held, in MB, and energy in J; None if unread."""

    peak: float | None = None
    joules: float | None = None


@contextmanager
def watching(meter: DeviceMeter, pid: int, interval: float = 0.01) -> Iterator[DeviceUsage]:
    """Read memory of `pid` and energy every `interval` seconds while the block runs, in a thread of this process."""
    watch = DeviceUsage()
    watch.peak = meter.used_MB(pid)
    start = meter.energy_J()
    done = threading.Event()

    def sample() -> None:
        while not done.wait(interval):
            watch.peak = _larger(watch.peak, meter.used_MB(pid))
            meter.energy_J()

    thread = threading.Thread(target=sample, daemon=True)
    if type(meter) is not DeviceMeter:  # one that may read something, perhaps only once the process uses the device
        thread.start()
    try:
        yield watch
    finally:
        done.set()
        if thread.ident is not None:
            thread.join()
        end = meter.energy_J()
        watch.peak = _larger(watch.peak, meter.used_MB(pid))
        watch.joules = end - start if start is not None and end is not None and end >= start else None


def _larger(first: float | None, second: float | None) -> float | None:
    return second if first is None else first if second is None else max(first, second)
