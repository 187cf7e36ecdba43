"""The simulated HIP runtime: devices, memory, capture rules and limits. Kernels do nothing here."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hip_client import ON_DEVICE, RELAXED, TO_DEVICE, TO_HOST, Hip, in_thread
from simulation import run_client, simulate

from sd_ort.core.cache import cache_folder

SKIP = ("--kernels", "skip")


# ---- devices


def describe_device(hip: Hip) -> list:
    """Count, architecture in the old and the new struct of properties, lanes of a wave, PCI address."""
    count, wave = ctypes.c_int(), ctypes.c_int()
    hip.hipGetDeviceCount(ctypes.byref(count))
    properties = ctypes.create_string_buffer(8192)
    names = []
    for function in ("hipGetDeviceProperties", "hipGetDevicePropertiesR0600"):
        assert getattr(hip, function)(properties, 0) == "hipSuccess"
        names += re.findall(rb"Simulated gfx\w+|gfx[\w:+-]+", properties.raw)
    hip.hipDeviceGetAttribute(ctypes.byref(wave), 87, 0)  # hipDeviceAttributeWarpSize
    address = ctypes.create_string_buffer(16)
    hip.hipDeviceGetPCIBusId(address, 16, 0)
    return [count.value, [name.decode() for name in names], wave.value, address.value.decode()]


@pytest.mark.parametrize(
    ("target", "name", "wave"),
    [
        ("gfx1030", "gfx1030", 32),
        ("gfx1100", "gfx1100", 32),
        ("gfx942", "gfx942:sramecc+:xnack-", 64),
        ("gfx1201", "gfx1201", 32),
    ],
)
def test_a_device_describes_its_target(target: str, name: str, wave: int) -> None:
    names = [f"Simulated {target}", name] * 2
    assert run_client(describe_device, target, options=SKIP) == [1, names, wave, "0000:03:00.0"]


def count_without_devices(hip: Hip) -> list:
    count = ctypes.c_int(7)
    return [hip.hipGetDeviceCount(ctypes.byref(count)), count.value, hip.hipMalloc(ctypes.byref(ctypes.c_void_p()), 4)]


def test_a_machine_can_have_no_device() -> None:
    result = run_client(count_without_devices, "gfx1100", options=(*SKIP, "--devices", "0"))
    assert result == ["hipErrorNoDevice", 0, "hipErrorNoDevice"]


def select_devices(hip: Hip) -> list:
    statuses = [hip.hipSetDevice(1)]
    current = ctypes.c_int()
    hip.hipGetDevice(ctypes.byref(current))
    other = in_thread(lambda: (hip.hipGetDevice(ctypes.byref(value := ctypes.c_int())), value.value)[1])
    return [*statuses, current.value, other, hip.hipSetDevice(2)]


def test_a_thread_has_its_own_device() -> None:
    result = run_client(select_devices, "gfx1100", options=(*SKIP, "--devices", "2"))
    assert result == ["hipSuccess", 1, 0, "hipErrorInvalidDevice"]


def test_an_unknown_target_is_one_line() -> None:
    result = simulate("gfx906", ["python3", "-c", "import ctypes; ctypes.CDLL('libamdhip64.so').hipInit(0)"], *SKIP)
    assert result.returncode != 0
    assert result.stderr.startswith("simulated HIP: SIMULATED_HIP_TARGET must be one of gfx90a ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.usefixtures("tinygrad")
def test_kernels_of_rdna2_can_only_be_skipped() -> None:
    """The emulator does not have its instructions."""
    command = ["python3", "-c", "import ctypes; ctypes.CDLL('libamdhip64.so').hipInit(0)"]
    result = simulate("gfx1030", command)
    assert result.returncode != 0
    assert result.stderr == (
        "simulated HIP: The emulator has no instructions of gfx1030: SIMULATED_HIP_KERNELS must be skip.\n"
    )


def test_kernels_need_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SD_ORT_TINYGRAD", raising=False)
    result = simulate("gfx1100", ["true"])
    assert result.returncode == 1
    assert result.stderr == (
        "Kernels run in tinygrad's emulator: pass --tinygrad with a checkout, or --kernels skip.\n"
    )


def test_a_checkout_has_the_emulator(tmp_path: Path) -> None:
    result = simulate("gfx1100", ["true"], "--tinygrad", str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.startswith(f"{tmp_path} is not a tinygrad checkout ")
    assert len(result.stderr.splitlines()) == 1


def symbol_versions(library: Path) -> dict[str, str]:
    """Version of each HIP function that a library defines."""
    lines = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    return dict(re.findall(r" T (\w*hip\w+)@@(hip_[\d.]+)$", lines.stdout, re.MULTILINE))


def test_symbol_versions_are_those_of_hip() -> None:
    """Of Debian 12's libamdhip64.so.5: its functions are unchanged in newer ones."""
    folder = max((cache_folder() / "simulated_rocm").glob("*/libamdhip64.so.7"), key=lambda path: path.stat().st_mtime)
    simulated = symbol_versions(folder)
    real = symbol_versions(Path("/usr/lib/x86_64-linux-gnu/libamdhip64.so.5"))
    both = simulated.keys() & real.keys()
    assert len(both) > 70
    assert {name: simulated[name] for name in both} == {name: real[name] for name in both}
    assert simulated["hipGetDevicePropertiesR0600"] == "hip_6.0"
    assert simulated["hipLaunchHostFunc"] == "hip_5.3"


# ---- memory


def exhaust_memory(hip: Hip) -> list:
    total, free = ctypes.c_size_t(), ctypes.c_size_t()
    first = hip.allocate(3 << 20)
    statuses = [hip.hipMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(2 << 20))]
    hip.hipMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    statuses += [hip.hipFree(first), hip.hipFree(first), hip.hipFree(None)]
    return [*statuses, free.value, total.value]


def test_memory_is_limited() -> None:
    result = run_client(exhaust_memory, "gfx1100", options=(*SKIP, "--memory", "4M"))
    errors = ["hipErrorOutOfMemory", "hipSuccess", "hipErrorInvalidValue", "hipSuccess"]
    assert result == [*errors, 1 << 20, 4 << 20]


def copy_out_of_bounds(hip: Hip) -> list:
    address, host = hip.allocate(100), ctypes.create_string_buffer(200)
    inner = ctypes.c_void_p((address.value or 0) + 60)
    other = hip.allocate(100)
    return [
        hip.copy(address, host, 100, TO_DEVICE),
        hip.copy(address, host, 101, TO_DEVICE),
        hip.copy(host, inner, 41, TO_HOST),
        hip.copy(inner, other, 41, ON_DEVICE),
        hip.copy(host, other, 100, ON_DEVICE),
        hip.hipMemcpyAsync(inner, host, ctypes.c_size_t(41), TO_DEVICE, None),
        hip.hipMemset(inner, 0, ctypes.c_size_t(41)),
        hip.hipMemsetAsync(host, 0, ctypes.c_size_t(1), None),
        hip.hipMemset(inner, 0, ctypes.c_size_t(40)),
    ]


def test_copies_stay_in_their_allocations() -> None:
    result = run_client(copy_out_of_bounds, "gfx1100", options=SKIP)
    assert result == ["hipSuccess", *["hipErrorInvalidValue"] * 7, "hipSuccess"]


def fail_and_succeed(hip: Hip) -> list:
    failed = hip.hipSetDevice(5)
    hip.hipSetDevice(0)
    return [
        failed,
        in_thread(hip.hipGetLastError),
        hip.hipPeekAtLastError(),
        hip.hipGetLastError(),
        hip.hipGetLastError(),
    ]


def test_the_last_error_stays_until_it_is_read() -> None:
    """As in HIP 7: a later success does not clear it; and it is the thread's own."""
    error = "hipErrorInvalidDevice"
    assert run_client(fail_and_succeed, "gfx1100", options=SKIP) == [error, "hipSuccess", error, error, "hipSuccess"]


# ---- capture


def call_during_capture(hip: Hip, name: str, mode: str, where: str) -> list:
    """Status of a call while a stream captures, and of the end of that capture."""
    stream, other = hip.create("hipStreamCreate"), hip.create("hipStreamCreate")
    memory, host = hip.allocate(64), ctypes.create_string_buffer(64)
    event, pointer, count = hip.create("hipEventCreate"), ctypes.c_void_p(), ctypes.c_size_t(64)
    calls: dict[str, Callable[[], str]] = {
        "hipMemcpy": lambda: hip.copy(memory, host, 64, TO_DEVICE),
        "hipMemset": lambda: hip.hipMemset(memory, 0, count),
        "hipDeviceSynchronize": hip.hipDeviceSynchronize,
        "hipStreamSynchronize": lambda: hip.hipStreamSynchronize(stream),
        "hipStreamSynchronize of another": lambda: hip.hipStreamSynchronize(other),
        "hipMalloc": lambda: hip.hipMalloc(ctypes.byref(pointer), count),
        "hipHostMalloc": lambda: hip.hipHostMalloc(ctypes.byref(pointer), count, 0),
        "hipMemcpyAsync": lambda: hip.hipMemcpyAsync(memory, host, count, TO_DEVICE, stream),
        "hipMemcpyAsync on another": lambda: hip.hipMemcpyAsync(memory, host, count, TO_DEVICE, other),
        "hipEventQuery": lambda: hip.hipEventQuery(event),
        "hipStreamBeginCapture": lambda: hip.hipStreamBeginCapture(stream, RELAXED),
    }
    assert hip.hipStreamBeginCapture(stream, int(mode)) == "hipSuccess"
    hip.hipEventRecord(event, stream)
    status = calls[name]() if where == "here" else in_thread(calls[name])
    graph = ctypes.c_void_p()
    return [status, hip.hipStreamEndCapture(stream, ctypes.byref(graph))]


_OK, _INVALID = "hipSuccess", "hipErrorStreamCaptureInvalidated"
_UNSUPPORTED, _IMPLICIT = "hipErrorStreamCaptureUnsupported", "hipErrorStreamCaptureImplicit"


@pytest.mark.parametrize("where", ["here", "another thread"])
@pytest.mark.parametrize(
    ("name", "status", "end"),
    [
        ("hipMemcpy", _IMPLICIT, _INVALID),
        ("hipMemset", _IMPLICIT, _INVALID),
        ("hipDeviceSynchronize", _UNSUPPORTED, _INVALID),
        ("hipStreamSynchronize", _UNSUPPORTED, _INVALID),
        ("hipStreamSynchronize of another", _OK, _OK),
        ("hipMalloc", _OK, _OK),
        ("hipHostMalloc", _OK, _OK),
        ("hipMemcpyAsync", _OK, _OK),
        ("hipMemcpyAsync on another", _OK, _OK),
        ("hipEventQuery", "hipErrorCapturedEvent", _INVALID),
        ("hipStreamBeginCapture", "hipErrorIllegalState", _OK),
    ],
)
def test_calls_during_a_relaxed_capture(name: str, status: str, end: str, where: str) -> None:
    """What clr 6.4.3 does."""
    assert run_client(call_during_capture, "gfx1100", name, RELAXED, where, options=SKIP) == [status, end]


@pytest.mark.parametrize("name", ["hipMalloc", "hipHostMalloc", "hipStreamSynchronize of another"])
def test_calls_during_a_global_capture(name: str) -> None:
    result = run_client(call_during_capture, "gfx1100", name, 0, "another thread", options=SKIP)
    assert result == [_UNSUPPORTED, _INVALID]


def replay_copies(hip: Hip) -> list:
    """A graph of two copies, replayed after its source changed; forked to a second stream and joined."""
    stream, side = hip.create("hipStreamCreate"), hip.create("hipStreamCreate")
    fork, join = hip.create("hipEventCreate"), hip.create("hipEventCreate")
    a, b, c = (hip.upload((ctypes.c_int * 1)(value)) for value in (1, 2, 3))
    size = ctypes.c_size_t(4)
    hip.hipStreamBeginCapture(stream, RELAXED)
    hip.hipMemcpyAsync(b, a, size, ON_DEVICE, stream)
    hip.hipEventRecord(fork, stream)
    hip.hipStreamWaitEvent(side, fork, 0)
    hip.hipMemcpyAsync(c, b, size, ON_DEVICE, side)
    hip.hipEventRecord(join, side)
    hip.hipStreamWaitEvent(stream, join, 0)
    graph = ctypes.c_void_p()
    statuses = [hip.hipStreamEndCapture(stream, ctypes.byref(graph))]
    executable = hip.create("hipGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))
    statuses.append(hip.hipGraphDestroy(graph))
    results = [hip.download(c, (ctypes.c_int * 1)())[0]]
    for value in (7, 8):
        hip.copy(a, (ctypes.c_int * 1)(value), 4, TO_DEVICE)
        statuses.append(hip.hipGraphLaunch(executable, stream))
        results.append(hip.download(c, (ctypes.c_int * 1)())[0])
    return [*statuses, hip.hipGraphExecDestroy(executable), hip.hipGraphLaunch(executable, stream), results]


def test_a_graph_is_replayed() -> None:
    result = run_client(replay_copies, "gfx1100", options=SKIP)
    assert result == [*[_OK] * 5, "hipErrorInvalidValue", [3, 7, 8]]


def fork_without_join(hip: Hip) -> list:
    stream, side, fork = hip.create("hipStreamCreate"), hip.create("hipStreamCreate"), hip.create("hipEventCreate")
    hip.hipStreamBeginCapture(stream, RELAXED)
    hip.hipEventRecord(fork, stream)
    hip.hipStreamWaitEvent(side, fork, 0)
    graph = ctypes.c_void_p()
    return [hip.hipStreamEndCapture(side, ctypes.byref(graph)), hip.hipStreamEndCapture(stream, ctypes.byref(graph))]


def test_a_fork_must_be_joined() -> None:
    result = run_client(fork_without_join, "gfx1100", options=SKIP)
    assert result == ["hipErrorStreamCaptureUnmatched", "hipErrorStreamCaptureUnjoined"]


# ---- kernels


def launch_beyond_limits(hip: Hip, image: str) -> list:
    function, x = hip.function(image, "add"), hip.allocate(4)
    arguments = (x, ctypes.c_float(1), ctypes.c_uint(1))
    launches: list[tuple] = [
        ((1, 1, 1), (1024, 1, 1), 0),
        ((1, 1, 1), (1025, 1, 1), 0),
        ((1, 1, 1), (64, 32, 1), 0),
        ((0, 1, 1), (64, 1, 1), 0),
        ((1, 1, 1), (0, 1, 1), 0),
        ((1, 1, 1), (64, 1, 1), 65536),
        ((1, 1, 1), (64, 1, 1), 65537),
        ((1, 65537, 1), (64, 1, 1), 0),
        ((1 << 26, 1, 1), (64, 1, 1), 0),
    ]
    return [hip.launch(function, grid, block, *arguments, lds=lds) for grid, block, lds in launches]


def test_a_launch_has_limits(code_object: Callable[..., Path]) -> None:
    value, configuration = "hipErrorInvalidValue", "hipErrorInvalidConfiguration"
    result = run_client(launch_beyond_limits, "gfx1100", code_object("gfx1100"), options=SKIP)
    assert result == [_OK, value, value, value, configuration, _OK, value, configuration, configuration]


def load_images(hip: Hip, *images: str) -> list:
    return [hip.hipModuleLoad(ctypes.byref(ctypes.c_void_p()), image.encode()) for image in images]


def bundle(path: Path, target: str, code: Path) -> Path:
    """A bundle of HIP with one code object."""
    entries = ["--targets=host-x86_64-unknown-linux-gnu,hipv4-amdgcn-amd-amdhsa--" + target]
    files = ["-input=/dev/null", f"-input={code}", f"-output={path}"]
    subprocess.run(["clang-offload-bundler-19", "-type=o", *entries, *files], check=True)
    return path


def test_code_objects_are_chosen_by_target(code_object: Callable[..., Path], tmp_path: Path) -> None:
    generic = code_object("gfx11-generic", "-mcode-object-version=6")
    images = [
        bundle(tmp_path / "exact", "gfx1100", code_object("gfx1100")),
        bundle(tmp_path / "generic", "gfx11-generic", generic),
        bundle(tmp_path / "other", "gfx942", code_object("gfx942")),
    ]
    (tmp_path / "compressed").write_bytes(b"CCOB" + bytes(64))
    images.append(tmp_path / "compressed")
    expected = [_OK, _OK, "hipErrorNoBinaryForGpu", "hipErrorNoBinaryForGpu"]
    assert run_client(load_images, "gfx1100", *images, options=SKIP) == expected
    rdna2 = bundle(tmp_path / "rdna2", "gfx10-3-generic", code_object("gfx10-3-generic", "-mcode-object-version=6"))
    assert run_client(load_images, "gfx1032", rdna2, images[1], options=SKIP) == [_OK, "hipErrorNoBinaryForGpu"]
    # Clang 19 has no gfx9-4-generic: the entry's name is looked at, and the code is that of gfx942.
    mi300 = bundle(tmp_path / "mi300", "gfx9-4-generic", code_object("gfx942"))
    for target in ("gfx942", "gfx950"):
        assert run_client(load_images, target, mi300, images[1], options=SKIP) == [_OK, "hipErrorNoBinaryForGpu"]
    features = bundle(tmp_path / "features", "gfx942:xnack-", code_object("gfx942"))
    wrong = bundle(tmp_path / "wrong", "gfx942:xnack+", code_object("gfx942"))
    assert run_client(load_images, "gfx942", features, wrong, options=SKIP) == [_OK, "hipErrorNoBinaryForGpu"]
