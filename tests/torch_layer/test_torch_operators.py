"""torch.ops.sd_ort: kernels against the plain expression, gradients, tracing, autocast, vmap, and what falls back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts/fixtures"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts/checks"))

from check_torch_ops_gpu import gradients, numbers, operator
from torch_calls import NAMES, Draw, calls

from sd_ort.runtime import build
from sd_ort.torch import kernels, operators, reset_status, status
from sd_ort.torch.operators import contract

NO_CPU_KERNEL = {"doubled_weight", "linear_split_gelu", "nhwc_winograd", "softmax", "winograd_filters"}


@pytest.fixture(autouse=True, scope="module")
def library() -> None:
    build.build()
    kernels.forget()


@pytest.fixture(autouse=True)
def counts() -> Iterator[None]:
    reset_status()
    yield
    kernels.forget()


@pytest.mark.parametrize("name", NAMES)
def test_kernels_agree_with_torch_in_float64(name: str) -> None:
    numbers(name, "cpu")
    gradients(name, "cpu")
    ran = status()
    assert ran.kernels.get(name, 0) > 0
    reasons = {reason for _, reason in ran.fallbacks}
    allowed = {"no kernel for bfloat16", "no kernel for that type", "the weights lie apart"}
    assert reasons <= allowed | ({"the library has no such CPU kernel"} if name in NO_CPU_KERNEL else set())


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_and_gradcheck(name: str) -> None:
    for arguments in calls(name, Draw("cpu", torch.float32)):
        torch.library.opcheck(operator(name), arguments, test_utils=("test_schema", "test_faketensor"))
    with_gradients = next(calls(name, Draw("cpu", torch.float32, grad=True)))
    traced = ("test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator(name), with_gradients, test_utils=traced)
    for arguments in calls(name, Draw("cpu", torch.float64, grad=True)):
        if any(isinstance(each, torch.Tensor) and each.numel() == 0 for each in arguments):
            continue  # opcheck has met them; gradcheck refuses their strides
        assert torch.autograd.gradcheck(operator(name), arguments, fast_mode=True)


def test_gradients_of_gradients() -> None:
    d = Draw("cpu", torch.float64, grad=True)
    assert torch.autograd.gradgradcheck(operators.bias_split_gelu, (d(2, 6), d(6)), fast_mode=True)


def test_threads_share_a_call() -> None:
    before, d = torch.get_num_threads(), Draw("cpu", torch.float32)
    arguments = (d.image(2, 32, 9, 7), d(32), d(32), 8, 1e-5, True)
    one = operators.group_norm(*arguments)
    try:
        torch.set_num_threads(2 if before == 1 else 1)
        assert torch.equal(operators.group_norm(*arguments), one)
    finally:
        torch.set_num_threads(before)


def test_channels_last_stays() -> None:
    d = Draw("cpu", torch.float32)
    x = d.image(2, 8, 4, 3)
    y, total = operators.skip_group_norm(x, d(2, 8), None, d(8), d(8), 2, 1e-5)
    for made in (y, total, operators.upsample_nearest(x)):
        assert made.is_contiguous(memory_format=torch.channels_last)
    assert operators.group_norm(x.contiguous(), d(8), d(8), 2, 1e-5).is_contiguous()


def test_attention_with_gradients_is_torchs_own() -> None:
    d = Draw("cpu", torch.float32, grad=True)
    operators.attention(d(1, 4, 2, 8), d(1, 4, 2, 8), d(1, 4, 2, 8)).sum().backward()
    assert not status().kernels
    with torch.no_grad():
        operators.attention(d(1, 4, 2, 8), d(1, 4, 2, 8), d(1, 4, 2, 8))
    assert status().kernels == {"attention": 1}


@pytest.mark.parametrize("doubled", [False, True])
@pytest.mark.parametrize("size", [(6, 4), (5, 3), (1, 1), (1, 8)])
def test_winograd_is_the_convolution(size: tuple[int, int], doubled: bool) -> None:
    d = Draw("cpu", torch.float64)
    x, weight, bias = d.image(2, 3, *size), d(5, 3, 3, 3), d(5)
    filters = operators.winograd_filters(weight, doubled)
    wanted = torch.nn.functional.conv2d(operators.upsample_nearest(x) if doubled else x, weight, bias, padding=1)
    made = operators.nhwc_winograd(x, filters, bias, wanted)
    torch.testing.assert_close(made, wanted + wanted)


@pytest.fixture(params=[True, False], ids=["grad", "no_grad"])
def grad(request: pytest.FixtureRequest) -> Iterator[None]:
    """With gradients on and off: by torch's dispatcher, and past it where nothing stands in between."""
    with torch.set_grad_enabled(request.param):
        yield


@pytest.mark.usefixtures("grad")
def test_autocast_does_as_torch_does() -> None:
    d = Draw("cpu", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert operators.linear_add(d(4, 8), d(8, 8), d(8), d(4, 8)).dtype == torch.bfloat16
        assert operators.group_norm(d(2, 8, 4).half(), d(8).half(), d(8).half(), 2, 1e-5).dtype == torch.float32
        assert operators.bias_add(d(2, 8).half(), d(8), d(2, 8)).dtype == torch.float32


@pytest.mark.usefixtures("grad")
def test_modes_and_subclasses_meet_the_operator() -> None:
    d = Draw("cpu", torch.float32)
    with FakeTensorMode() as mode:
        fake = operators.upsample_nearest(mode.from_tensor(d(1, 2, 3, 4)))
    assert isinstance(fake, FakeTensor)
    assert fake.shape == (1, 2, 6, 8)
    meta = operators.upsample_nearest(torch.empty(1, 2, 3, 4, device="meta"))
    assert (meta.device.type, meta.shape) == ("meta", (1, 2, 6, 8))
    with FlopCounterMode(display=False) as seen:
        operators.bias_add(d(2, 4), d(4), d(2, 4))
    assert seen.get_total_flops() == 0
    two = TwoTensor(d(2, 4), d(2, 4))
    assert isinstance(operators.bias_add(two, d(4), two), TwoTensor)


@pytest.mark.usefixtures("grad")
def test_vmap_is_refused_in_one_line() -> None:
    d = Draw("cpu", torch.float32)
    x, bias = d(3, 2, 4), d(4)
    with pytest.raises(NotImplementedError, match=r"^sd_ort::bias_add .* does not run under vmap.*$"):
        torch.vmap(lambda x: operators.bias_add(x, bias, x))(x)
    for name in NAMES:
        first, *others = next(calls(name, d))
        with pytest.raises(NotImplementedError, match=f"^sd_ort::{name} takes batches itself"):
            torch.vmap(lambda x: operator(name)(x, *others))(torch.stack([first, first]))  # noqa: B023


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (lambda d: (d(2, 8, 4), d(8, dtype=torch.float16), d(8), 2, 1e-5, True), "gamma and beta of another type"),
        (lambda d: (d(2, 8, 4), d(16)[::2], d(8), 2, 1e-5, True), "gamma or beta is strided"),
        (lambda d: (d(2, 8, 4, dtype=torch.bfloat16), d(8), d(8), 2, 1e-5, True), "no kernel for bfloat16"),
    ],
)
def test_what_no_kernel_takes_runs_in_torch(arguments: Any, reason: str) -> None:
    x, gamma, beta, groups, epsilon, silu = arguments(Draw("cpu", torch.float32))
    made = operators.group_norm(x, gamma, beta, groups, epsilon, silu)
    assert status().fallbacks == {("group_norm", reason): 1}
    wanted = torch.nn.functional.silu(
        torch.nn.functional.group_norm(x.float(), groups, gamma.float(), beta.float(), epsilon)
    )
    torch.testing.assert_close(made.float(), wanted, atol=0.05 if x.dtype == torch.bfloat16 else 1e-5, rtol=0.02)
    assert f"group_norm: torch, {reason}" in str(status())


def test_a_wrong_call_says_what_torch_says() -> None:
    d = Draw("cpu", torch.float32)
    with pytest.raises(RuntimeError, match="divisible"):
        operators.group_norm(d(2, 8, 4), d(8), d(8), 3, 1e-5)


@pytest.mark.parametrize("found", ["missing", "damaged", "other"])
def test_without_a_usable_library_torch_runs(found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path: Path | None = tmp_path / "libsd_ort_ops.so"
    reason = "libsd_ort_ops.so cannot be loaded"
    if found == "missing":
        path, reason = None, "no libsd_ort_ops.so of these sources: sd-ort build-ops makes it"
    elif found == "damaged":
        path.write_bytes(b"not a library")
    else:
        path, reason = build.build(), "libsd_ort_ops.so has another interface"
        monkeypatch.setattr(kernels, "INTERFACE_VERSION", 99)
    monkeypatch.setattr(kernels, "library_path", lambda name: path)
    kernels.forget()
    d = Draw("cpu", torch.float32)
    x, bias = d(2, 4), d(4)
    torch.testing.assert_close(operators.bias_add(x, bias, x), x + bias + x)
    assert status().fallbacks == {("bias_add", reason): 1}


def test_tensors_of_two_devices_are_one_line() -> None:
    with pytest.raises(RuntimeError, match=r"^the tensors of one call lie on cpu and meta$"):
        kernels.of(torch.ones(2), torch.ones(2, device="meta"))


def test_inductor_knows_all_operators_once_one_is_traced() -> None:
    """torch 2.11 would take hours to meet the last operator of a deep model (contract.py)."""
    from torch._inductor import lowering

    operators.softmax(torch.empty(2, 3, device="meta"))
    for name in contract.PLAIN:
        overload = getattr(torch.ops.sd_ort, name).default
        assert overload in lowering.lowerings
        assert lowering._maybe_layout_constraints[overload] is lowering.constrain_to_fake_tensors
