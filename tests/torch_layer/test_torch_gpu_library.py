"""The torch operators on a GPU library whose kernels run in the kernel emulator: AMD waves of 64 lanes."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from emulation import compile_object, gpu_sources, link, load_blas_lt

from custom_ops.libraries import GpuLibrary
from scripts.checks.check_torch_ops_gpu import values
from scripts.fixtures.torch_calls import NAMES, RandomTensors
from sd_ort.torch import kernels, operators, reset_status, status


@pytest.fixture(scope="module")
def library(run_folder: Path) -> GpuLibrary:
    load_blas_lt(run_folder)
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda source: compile_object(source, "cdna", run_folder), gpu_sources()))
    return GpuLibrary(link(objects, run_folder / "torch_cdna.so"))


class EmulatedKernels(kernels.GpuKernels):
    """GPU kernels that run without a stream, on CPU tensors."""

    def run(self, name: str, params: ctypes.Structure, device: torch.device) -> None:
        self.launch(name, params, device, 0)

    def _load_tuning(self) -> None:
        pass


@pytest.fixture
def emulated(library: GpuLibrary, monkeypatch: pytest.MonkeyPatch) -> EmulatedKernels:
    gpu = EmulatedKernels(library)
    monkeypatch.setattr(kernels, "cpu_kernels", lambda: gpu)
    reset_status()
    return gpu


NEEDS_SCRATCH = ("linear_split_gelu", "nhwc_winograd")  # every candidate needs scratch memory


@pytest.mark.parametrize("memory", [False, True], ids=["performance", "memory"])
@pytest.mark.parametrize("name", NAMES)
def test_kernels_agree_with_torch_in_float64(name: str, memory: bool, emulated: EmulatedKernels) -> None:
    emulated.without_workspace = memory
    values(name, "cpu")
    counts = status()
    assert counts.kernels[name] > 0
    scratch = {"every kernel for it needs scratch memory"} if memory and name in NEEDS_SCRATCH else set()
    assert {reason for _, reason in counts.fallbacks} <= {"the weights are not packed"} | scratch


def test_scratch_memory_comes_from_torch_and_can_be_disabled(
    emulated: EmulatedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspaces: list[int] = []
    run = emulated._library.run

    def record_workspace(operator: int, candidate: int, params: Any, workspace: int, stream: int = 0) -> None:
        workspaces.append(workspace)
        run(operator, candidate, params, workspace, stream)

    monkeypatch.setattr(emulated._library, "run", record_workspace)
    d = RandomTensors("cpu", torch.float32)
    x, gamma, beta = d.image(1, 32, 24, 24), d(32), d(32)
    expected = operators.group_norm(x, gamma, beta, 4, 1e-5)
    emulated.without_workspace = True
    torch.testing.assert_close(operators.group_norm(x, gamma, beta, 4, 1e-5), expected)
    assert workspaces[1] == 0


def test_a_call_that_the_library_rejects_runs_in_torch(
    emulated: EmulatedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(*_: Any) -> None:
        raise RuntimeError("no such size")

    monkeypatch.setattr(emulated._library, "run", reject)
    d = RandomTensors("cpu", torch.float32)
    x, bias = d(2, 4), d(4)
    for grad in (True, False):  # through the dispatcher, and directly
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(operators.bias_add(x, bias, x), x + bias + x)
    assert status().fallbacks == {("bias_add", "no such size"): 2}


def test_the_tuner_decides_about_attention_to_a_prompt(
    emulated: EmulatedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(operators.attention.__globals__, "_torch_is_faster", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    d = RandomTensors("cpu", torch.float16)
    for tuning, keys in ((False, 77), (True, 77), (True, 81)):
        emulated._tuning = tuning
        q, k = d(1, 4, 2, 8), d(1, keys, 2, 8)
        operators.attention(q, k, k)
    assert status().fallbacks == {("attention", "torch's attention is faster on this GPU"): 2}
    assert status().kernels == {"attention": 1}
