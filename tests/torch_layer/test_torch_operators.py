"""torch.ops.sd_ort: kernels against the torch fallback, gradients, tracing, autocast, vmap, and fallbacks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

from scripts.checks.check_torch_ops_gpu import gradients, operator, values
from scripts.fixtures.torch_calls import NAMES, RandomTensors, calls
from sd_ort.runtime import build
from sd_ort.torch import kernels, operators, reset_status, status
from sd_ort.torch.operators import registration

NO_CPU_KERNEL = {"linear_split_gelu", "nhwc_winograd", "softmax", "upsample_conv_weight", "winograd_filters"}


pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture(autouse=True)
def counts() -> Iterator[None]:
    reset_status()
    yield
    kernels.reset_libraries()


@pytest.mark.parametrize("name", NAMES)
def test_kernels_agree_with_torch_in_float64(name: str) -> None:
    values(name, "cpu")
    gradients(name, "cpu")
    counts = status()
    assert counts.kernels.get(name, 0) > 0
    reasons = {reason for _, reason in counts.fallbacks}
    allowed = {"no kernel for bfloat16", "no kernel for that dtype", "the weights are not packed"}
    assert reasons <= allowed | ({"the library has no such CPU kernel"} if name in NO_CPU_KERNEL else set())


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_and_gradcheck(name: str) -> None:
    for arguments in calls(name, RandomTensors("cpu", torch.float32)):
        torch.library.opcheck(operator(name), arguments, test_utils=("test_schema", "test_faketensor"))
    with_gradients = next(calls(name, RandomTensors("cpu", torch.float32, grad=True)))
    tracing = ("test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator(name), with_gradients, test_utils=tracing)
    for arguments in calls(name, RandomTensors("cpu", torch.float64, grad=True)):
        if any(isinstance(a, torch.Tensor) and a.numel() == 0 for a in arguments):
            continue  # opcheck covers them; gradcheck rejects their strides
        assert torch.autograd.gradcheck(operator(name), arguments, fast_mode=True)


def test_gradients_of_gradients() -> None:
    d = RandomTensors("cpu", torch.float64, grad=True)
    assert torch.autograd.gradgradcheck(operators.bias_split_gelu, (d(2, 6), d(6)), fast_mode=True)


def test_the_number_of_threads_does_not_change_the_result() -> None:
    before, d = torch.get_num_threads(), RandomTensors("cpu", torch.float32)
    arguments = (d.image(2, 32, 9, 7), d(32), d(32), 8, 1e-5, True)
    expected = operators.group_norm(*arguments)
    try:
        torch.set_num_threads(2 if before == 1 else 1)
        assert torch.equal(operators.group_norm(*arguments), expected)
    finally:
        torch.set_num_threads(before)


def test_channels_last_inputs_give_channels_last_outputs() -> None:
    d = RandomTensors("cpu", torch.float32)
    x = d.image(2, 8, 4, 3)
    y, total = operators.skip_group_norm(x, d(2, 8), None, d(8), d(8), 2, 1e-5)
    for output in (y, total, operators.upsample_nearest(x)):
        assert output.is_contiguous(memory_format=torch.channels_last)
    assert operators.group_norm(x.contiguous(), d(8), d(8), 2, 1e-5).is_contiguous()


def test_attention_with_gradients_runs_in_torch() -> None:
    d = RandomTensors("cpu", torch.float32, grad=True)
    operators.attention(d(1, 4, 2, 8), d(1, 4, 2, 8), d(1, 4, 2, 8)).sum().backward()
    assert not status().kernels
    with torch.no_grad():
        operators.attention(d(1, 4, 2, 8), d(1, 4, 2, 8), d(1, 4, 2, 8))
    assert status().kernels == {"attention": 1}


@pytest.mark.parametrize("upsample_2x", [False, True])
@pytest.mark.parametrize("size", [(6, 4), (5, 3), (1, 1), (1, 8)])
def test_winograd_equals_the_convolution(size: tuple[int, int], upsample_2x: bool) -> None:
    d = RandomTensors("cpu", torch.float64)
    x, weight, bias = d.image(2, 3, *size), d(5, 3, 3, 3), d(5)
    filters = operators.winograd_filters(weight, upsample_2x)
    y = torch.nn.functional.conv2d(operators.upsample_nearest(x) if upsample_2x else x, weight, bias, padding=1)
    torch.testing.assert_close(operators.nhwc_winograd(x, filters, bias, y), y + y)


@pytest.fixture(params=[True, False], ids=["grad", "no_grad"])
def grad(request: pytest.FixtureRequest) -> Iterator[None]:
    """Gradients on and off: through torch's dispatcher, and directly if nothing needs the dispatcher."""
    with torch.set_grad_enabled(request.param):
        yield


@pytest.mark.usefixtures("grad")
def test_autocast_uses_torchs_dtypes() -> None:
    d = RandomTensors("cpu", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert operators.linear_add(d(4, 8), d(8, 8), d(8), d(4, 8)).dtype == torch.bfloat16
        assert operators.group_norm(d(2, 8, 4).half(), d(8).half(), d(8).half(), 2, 1e-5).dtype == torch.float32
        assert operators.bias_add(d(2, 8).half(), d(8), d(2, 8)).dtype == torch.float32


@pytest.mark.usefixtures("grad")
def test_modes_and_subclasses_dispatch_the_operator() -> None:
    d = RandomTensors("cpu", torch.float32)
    with FakeTensorMode() as mode:
        fake = operators.upsample_nearest(mode.from_tensor(d(1, 2, 3, 4)))
    assert isinstance(fake, FakeTensor)
    assert fake.shape == (1, 2, 6, 8)
    meta = operators.upsample_nearest(torch.empty(1, 2, 3, 4, device="meta"))
    assert (meta.device.type, meta.shape) == ("meta", (1, 2, 6, 8))
    with FlopCounterMode(display=False) as counter:
        operators.bias_add(d(2, 4), d(4), d(2, 4))
    assert counter.get_total_flops() == 0
    two = TwoTensor(d(2, 4), d(2, 4))
    assert isinstance(operators.bias_add(two, d(4), two), TwoTensor)


@pytest.mark.usefixtures("grad")
def test_vmap_is_rejected_in_one_line() -> None:
    d = RandomTensors("cpu", torch.float32)
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
        (lambda d: (d(2, 8, 4), d(8, dtype=torch.float16), d(8), 2, 1e-5, True), "gamma and beta of another dtype"),
        (lambda d: (d(2, 8, 4), d(16)[::2], d(8), 2, 1e-5, True), "gamma or beta is strided"),
        (lambda d: (d(2, 8, 4, dtype=torch.bfloat16), d(8), d(8), 2, 1e-5, True), "no kernel for bfloat16"),
    ],
)
def test_a_call_without_a_kernel_runs_in_torch(arguments: Any, reason: str) -> None:
    x, gamma, beta, groups, epsilon, silu = arguments(RandomTensors("cpu", torch.float32))
    output = operators.group_norm(x, gamma, beta, groups, epsilon, silu)
    assert status().fallbacks == {("group_norm", reason): 1}
    expected = torch.nn.functional.silu(
        torch.nn.functional.group_norm(x.float(), groups, gamma.float(), beta.float(), epsilon)
    )
    torch.testing.assert_close(output.float(), expected, atol=0.05 if x.dtype == torch.bfloat16 else 1e-5, rtol=0.02)
    assert f"group_norm: torch, {reason}" in str(status())


def test_an_invalid_call_raises_torchs_error() -> None:
    d = RandomTensors("cpu", torch.float32)
    with pytest.raises(RuntimeError, match="divisible"):
        operators.group_norm(d(2, 8, 4), d(8), d(8), 3, 1e-5)


@pytest.mark.parametrize("state", ["missing", "damaged", "other"])
def test_without_a_usable_library_torch_runs(state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path: Path | None = tmp_path / "libsd_ort_ops.so"
    reason = "libsd_ort_ops.so cannot be loaded"
    if state == "missing":
        path, reason = None, "no libsd_ort_ops.so of these sources: run sd-ort build-ops"
    elif state == "damaged":
        path.write_bytes(b"not a library")
    else:
        path, reason = build.build(), "libsd_ort_ops.so has another interface version"
        monkeypatch.setattr(kernels, "INTERFACE_VERSION", 99)
    monkeypatch.setattr(kernels, "library_path", lambda name: path)
    kernels.reset_libraries()
    d = RandomTensors("cpu", torch.float32)
    x, bias = d(2, 4), d(4)
    torch.testing.assert_close(operators.bias_add(x, bias, x), x + bias + x)
    assert status().fallbacks == {("bias_add", reason): 1}


def test_tensors_of_two_devices_raise_one_line() -> None:
    with pytest.raises(RuntimeError, match=r"^The tensors of one call are on cpu and meta: move them to one device\.$"):
        kernels.kernels_for(torch.ones(2), torch.ones(2, device="meta"))


def test_tracing_one_operator_registers_all_with_inductor() -> None:
    """torch 2.11 would take hours to reach the last operator of a deep model (registration.py)."""
    from torch._inductor import lowering

    operators.softmax(torch.empty(2, 3, device="meta"))
    for name in registration.FALLBACKS:
        overload = getattr(torch.ops.sd_ort, name).default
        assert overload in lowering.lowerings
        assert lowering._maybe_layout_constraints[overload] is lowering.constrain_to_fake_tensors


@pytest.mark.usefixtures("grad")
def test_the_old_name_of_upsample_conv_weight_is_an_alias() -> None:
    weight = RandomTensors("cpu", torch.float32, grad=True).image(8, 4, 3, 3)
    expected = operators.upsample_conv_weight(weight)
    assert torch.equal(operators.doubled_weight(weight), expected)
    assert torch.equal(torch.ops.sd_ort.doubled_weight(weight), expected)
    assert expected.requires_grad == torch.ops.sd_ort.doubled_weight(weight).requires_grad == torch.is_grad_enabled()
