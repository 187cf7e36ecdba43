"""A GPU's library under torch's operators, its kernels emulated on the host: AMD's waves of 64 lanes."""

from __future__ import annotations

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from emulation import compile_object, gpu_sources, link, load_blas_lt

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts/fixtures"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts/checks"))

from check_torch_ops_gpu import numbers
from torch_calls import NAMES, Draw

from custom_ops.libraries import GpuLibrary
from sd_ort.torch import kernels, operators, reset_status, status


@pytest.fixture(scope="module")
def library(run_folder: Path) -> GpuLibrary:
    load_blas_lt(run_folder)
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda source: compile_object(source, "cdna", run_folder), gpu_sources()))
    return GpuLibrary(link(objects, run_folder / "torch_cdna.so"))


class OnHost(kernels.GpuKernels):
    """Launched without a stream, on the CPU's tensors."""

    def run(self, name: str, params: ctypes.Structure, device: torch.device) -> None:
        self.launch(name, params, device, 0)

    def _load_tuning(self) -> None:
        pass


@pytest.fixture
def found(library: GpuLibrary, monkeypatch: pytest.MonkeyPatch) -> OnHost:
    made = OnHost(library)
    monkeypatch.setattr(kernels, "cpu_kernels", lambda: made)
    reset_status()
    return made


WANT_SCRATCH = ("linear_split_gelu", "nhwc_winograd")  # of every candidate


@pytest.mark.parametrize("memory", [False, True], ids=["performance", "memory"])
@pytest.mark.parametrize("name", NAMES)
def test_kernels_agree_with_torch_in_float64(name: str, memory: bool, found: OnHost) -> None:
    found.without_workspace = memory
    numbers(name, "cpu")
    ran = status()
    assert ran.kernels[name] > 0
    scratch = {"every kernel for it wants scratch memory"} if memory and name in WANT_SCRATCH else set()
    assert {why for _, why in ran.fallbacks} <= {"the weights lie apart"} | scratch


def test_scratch_memory_is_torchs_and_can_be_forbidden(found: OnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    run = found._library.run

    def noted(number: int, candidate: int, params: Any, workspace: int, stream: int = 0) -> None:
        given.append(workspace)
        run(number, candidate, params, workspace, stream)

    monkeypatch.setattr(found._library, "run", noted)
    d = Draw("cpu", torch.float32)
    x, gamma, beta = d.image(1, 32, 24, 24), d(32), d(32)
    wanted = operators.group_norm(x, gamma, beta, 4, 1e-5)
    found.without_workspace = True
    torch.testing.assert_close(operators.group_norm(x, gamma, beta, 4, 1e-5), wanted)
    assert given[1] == 0


def test_what_a_library_refuses_runs_in_torch(found: OnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> None:
        raise RuntimeError("no such size")

    monkeypatch.setattr(found._library, "run", refuses)
    d = Draw("cpu", torch.float32)
    x, bias = d(2, 4), d(4)
    for grad in (True, False):  # by the dispatcher, and past it
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(operators.bias_add(x, bias, x), x + bias + x)
    assert status().fallbacks == {("bias_add", "no such size"): 2}


def test_attention_to_a_prompt_is_left_to_the_tuner(found: OnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(operators.attention.__globals__, "_torch_is_faster", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    d = Draw("cpu", torch.float16)
    for tunes, keys in ((False, 77), (True, 77), (True, 81)):
        found._tunes = tunes
        q, k = d(1, 4, 2, 8), d(1, keys, 2, 8)
        operators.attention(q, k, k)
    assert status().fallbacks == {("attention", "its attention is faster on this GPU"): 2}
    assert status().kernels == {"attention": 1}
