"""Kernels on the simulated HIP runtime: their machine code runs in tinygrad's emulator."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, run_client, simulate
from hip_client import RELAXED, Hip

from sd_ort.runtime import build

pytestmark = pytest.mark.usefixtures("tinygrad")
TARGETS = ("gfx942", "gfx1100", "gfx1201")


def run_kernels(hip: Hip, image: str) -> list:
    """Results of kernels.c."""
    add, reverse = hip.function(image, "add"), hip.function(image, "reverse")
    count, add_atomically = hip.function(image, "count_in_halves"), hip.function(image, "add_atomically")
    x = hip.upload((ctypes.c_float * 300)(*range(300)))
    stream = hip.create("hipStreamCreate")
    hip.hipStreamBeginCapture(stream, RELAXED)
    value = ctypes.c_float(0.5)
    statuses = [hip.launch(add, (3, 1, 1), (100, 1, 1), x, value, ctypes.c_uint(299), stream=stream)]
    value.value = 100  # the graph has a copy
    graph = ctypes.c_void_p()
    hip.hipStreamEndCapture(stream, ctypes.byref(graph))
    executable = hip.create("hipGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))
    statuses += [hip.hipGraphLaunch(executable, stream) for _ in range(2)]
    sums = hip.download(x, (ctypes.c_float * 300)())
    y = hip.upload((ctypes.c_uint * 512)(*range(512)))
    statuses.append(hip.launch(reverse, (2, 1, 1), (256, 1, 1), y))
    halves, total = hip.upload((ctypes.c_ushort * 64)()), hip.upload((ctypes.c_uint * 1)())
    statuses.append(hip.launch(count, (64, 1, 1), (1, 1, 1), halves, ctypes.c_uint(500)))
    statuses.append(hip.launch(add_atomically, (64, 1, 1), (64, 1, 1), total))
    return [
        statuses,
        sums,
        hip.download(y, (ctypes.c_uint * 512)()),
        hip.download(halves, (ctypes.c_ushort * 64)()),
        hip.download(total, (ctypes.c_uint * 1)()),
    ]


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compute(target: str, code_object: Callable[..., Path]) -> None:
    """Hidden arguments, partial waves, barriers, LDS; and several host threads at neighboring halves of a word."""
    statuses, sums, reversed_, halves, total = run_client(run_kernels, target, code_object(target))
    assert set(statuses) == {"hipSuccess"}
    assert sums == [*(value + 1 for value in range(299)), 299]
    assert reversed_ == [*range(255, -1, -1), *range(511, 255, -1)]
    assert halves == [500] * 64
    assert total == [4096]


def read_behind_an_allocation(hip: Hip, image: str) -> list:
    x = hip.upload((ctypes.c_float * 64)())
    hip.launch(hip.function(image, "add"), (2, 1, 1), (64, 1, 1), x, ctypes.c_float(1), ctypes.c_uint(128))
    return []


def test_a_kernel_out_of_bounds_ends_the_process(code_object: Callable[..., Path]) -> None:
    with pytest.raises(AssertionError, match=r"simulated HIP: memory access fault at 0x[0-9a-f]+ by kernel add"):
        run_client(read_behind_an_allocation, "gfx1100", code_object("gfx1100"))


@pytest.mark.parametrize("target", ["gfx942", "gfx1100"])
def test_every_candidate_of_an_operator(target: str, tmp_path: Path) -> None:
    """scripts/checks/check_ops_gpu.py as on a GPU."""
    library = build.build(cpu=False, hip=[target])
    check = [str(ROOT / "scripts/checks/check_ops_gpu.py"), "--arch", target, "--library", str(library)]
    report = tmp_path / "report.json"
    options = ("--report", str(report))
    result = simulate(target, [sys.executable, *check, "--operators", "bias_add", "--limit", "100000"], *options)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 faults" in result.stdout
    assert json.loads(report.read_text())["total"]["launches"] > 50
