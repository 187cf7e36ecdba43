"""Winograd convolutions with cached filters: conditions, same outputs, updated weights, and freed memory."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D

from sd_ort.torch import cuda_graphs, dispatch_state, optimize, reset_status, restore, status
from sd_ort.torch.derived_tensors import DerivedTensor
from sd_ort.torch.modules import winograd
from sd_ort.torch.modules.winograd import FILTERS
from tests.torch_layer.test_torch_cuda_graphs import Tape, tapes
from tests.torch_layer.test_torch_cuda_graphs import unet as small_unet
from tests.torch_layer.test_torch_derived_tensors import ComparedUNet, prompt
from tests.torch_layer.test_torch_derived_tensors import step as run_step
from tests.torch_layer.test_torch_optimize import MODELS, call, randomized

__all__ = ["tapes"]  # the fixture that simulates CUDA graphs and disables gradients


@pytest.fixture(autouse=True)
def always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU where Winograd is faster. A capture is a tape here, which is a dispatch mode for torch."""
    monkeypatch.setattr(winograd, "is_faster", lambda *_: True)
    state = SimpleNamespace(is_autocast=dispatch_state.is_autocast, is_intercepted=lambda: False)
    monkeypatch.setattr(winograd, "dispatch_state", state)


def call_counts() -> tuple[int, int]:
    """Return the calls of nhwc_winograd and of winograd_filters since the last call of this function."""
    counts = {"nhwc_winograd": 0, "winograd_filters": 0}
    for (name, _), count in status().fallbacks.items():
        if name in counts:
            counts[name] += count
    reset_status()
    return counts["nhwc_winograd"], counts["winograd_filters"]


def block(channels: int = 8, **changes: Any) -> Any:
    resnet = ResnetBlock2D(in_channels=channels, out_channels=12, temb_channels=6, groups=4, **changes)
    return randomized(resnet).to(memory_format=torch.channels_last)


def image(channels: int = 8) -> torch.Tensor:
    values = torch.randn(2, channels, 5, 6, generator=torch.Generator().manual_seed(3))
    return values.to(memory_format=torch.channels_last)


def assert_same(layer: Any) -> None:
    """Check that an optimized block computes the same as the original one."""
    temb = torch.ones(2, 6)
    expected = restore(copy.deepcopy(layer))(image(), temb)
    torch.testing.assert_close(layer(image(), temb), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["sd1", "vae"])
def test_outputs_and_weights_are_the_same_and_restore_undoes_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "can_capture", lambda device: False)
    model = MODELS[kind]().to(memory_format=torch.channels_last)
    expected, before = call(model), {name: value.clone() for name, value in model.state_dict().items()}
    layers = 2 * sum(isinstance(module, ResnetBlock2D) for module in model.modules())
    layers += kind == "sd1" and sum(isinstance(module, Upsample2D) for module in model.modules())
    optimize(model, "performance")
    reset_status()
    for transforms in (layers, 0):
        torch.testing.assert_close(call(model), expected, atol=2e-5, rtol=1e-4)
        assert call_counts() == (layers, transforms)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    filters = [weakref.ref(m.__dict__[FILTERS]._cached._tensor) for m in model.modules() if FILTERS in m.__dict__]
    assert len(filters) == layers
    assert torch.equal(call(restore(model)), expected)
    assert not any(filter_() is not None for filter_ in filters)
    assert not any(FILTERS in module.__dict__ for module in model.modules())


def in_place(layer: Any) -> None:
    layer.conv1.weight.mul_(1.5)


def in_place_in_inference_mode(layer: Any) -> None:
    with torch.inference_mode():
        layer.conv2.weight.mul_(1.5)


def moved_and_moved_back(layer: Any) -> None:
    """Replace the memory until it has the same address again."""
    weight, address = layer.conv1.weight, layer.conv1.weight.data_ptr()
    for _ in range(100):
        weight.data = weight.data * 1.01
        if weight.data_ptr() == address:
            return


def new_parameter(layer: Any) -> None:
    layer.conv1.weight = torch.nn.Parameter(layer.conv1.weight * 1.5)


def new_layer(layer: Any) -> None:
    layer.conv1 = copy.deepcopy(layer.conv1)
    layer.conv1.weight.mul_(1.5)


def loaded_state_dict(layer: Any) -> None:
    layer.load_state_dict({name: value * 1.5 for name, value in layer.state_dict().items()})


def cast_and_cast_back(layer: Any) -> None:
    layer.double().float()


def trained(layer: Any) -> None:
    layer.requires_grad_(False)  # torch's GroupNorm of so few channels crashes where it takes gradients, channels last
    weight = layer.conv2.weight.requires_grad_()
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)  # writes past the version counter
    with torch.enable_grad():
        layer(image(), torch.ones(2, 6)).square().sum().backward()
    optimizer.step()


CHANGES = [
    in_place, in_place_in_inference_mode, moved_and_moved_back, new_parameter, new_layer, loaded_state_dict,
    cast_and_cast_back, trained,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_read(change: Callable[[Any], None]) -> None:
    layer = optimize(block(), "performance")
    assert_same(layer)
    assert_same(layer)
    assert call_counts() == (4, 2)
    before = layer(image(), torch.ones(2, 6))
    call_counts()
    change(layer)
    assert_same(layer)
    assert call_counts()[1] > 0
    assert torch.equal(layer(image(), torch.ones(2, 6)), before) == (change is cast_and_cast_back)


def test_a_lora_that_wraps_a_convolution_and_is_fused() -> None:
    from peft import LoraConfig

    compared, context = ComparedUNet(small_unet().to(memory_format=torch.channels_last)), prompt(1)
    for _ in range(3):
        compared.step(context)
    assert call_counts()[1] == 2 * 6  # the first replay of a new prompt recomputes all
    before = run_step(compared.model, context)
    compared.model.add_adapter(LoraConfig(r=2, target_modules=["conv1"], init_lora_weights=False))
    call_counts()
    compared.step(context)
    assert call_counts() == (3, 3)  # conv2 of the blocks
    compared.model.fuse_lora()  # writes through .data, past the version counter
    compared.model.unload_lora()
    for _ in range(3):
        compared.step(context)
    assert not torch.allclose(run_step(compared.model, context), before, atol=1e-3)


def test_graphs_and_calls_share_filters() -> None:
    compared, context = ComparedUNet(small_unet().to(memory_format=torch.channels_last)), prompt(1)
    weight = compared.model.down_blocks[0].resnets[0].conv1.weight
    derived = [module.__dict__[FILTERS] for module in compared.model.modules() if FILTERS in module.__dict__]
    for seed in range(3):
        compared.step(context, seed)
    # Convolutions: call, warm-up, capture, two replays. Filters: call, and the first replay of the prompt.
    assert call_counts() == (5 * 6, 2 * 6)
    cached = [tensor._cached for tensor in derived]
    weight.mul_(1.5)
    compared.step(context)
    assert call_counts()[1] == 1  # the graph contains no transforms
    weight.data.mul_(1.5)  # past the version counter
    other = prompt(2)
    compared.step(other)
    compared.step(other)
    assert call_counts()[1] == 6
    larger = prompt(3, batch=3)
    for _ in range(3):
        compared.step(larger)
    assert call_counts()[1] == 6
    assert [tensor._cached for tensor in derived] == cached  # one for all graphs
    weight.data = weight.data * 1.5
    for seed in range(3):
        compared.step(context, seed)
    assert status().graphs["UNet2DConditionModel", "captured"] == 1


def test_a_graph_refreshes_its_own_filters() -> None:
    """Of a block whose weight had another dtype for one call in between."""
    compared, context = ComparedUNet(small_unet().to(memory_format=torch.channels_last)), prompt(1)
    for _ in range(3):
        compared.step(context)
    resnet = compared.model.down_blocks[0].resnets[0]
    data = resnet.conv1.weight.data
    resnet.conv1.weight.data = data.double()
    resnet.conv1.__dict__[FILTERS].cached(resnet.conv1.weight).read()
    resnet.conv1.weight.data = data
    resnet.conv1.weight.mul_(1.5)
    compared.step(context)
    assert status().graphs["UNet2DConditionModel", "captured"] == 1


def test_copies_and_pickles_have_no_filters() -> None:
    layer = optimize(block(), "performance")
    assert_same(layer)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        derived = copied.conv1.__dict__[FILTERS]
        assert isinstance(derived, DerivedTensor)
        assert derived._cached is None
        assert_same(copied)


def test_filters_are_freed_when_weights_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "can_capture", lambda device: False)
    model = optimize(MODELS["sd1"]().to(memory_format=torch.channels_last), "performance")
    call(model)
    model.to(torch.float32)  # does not move
    filters = [weakref.ref(m.__dict__[FILTERS]._cached._tensor) for m in model.modules() if FILTERS in m.__dict__]
    assert all(filter_() is not None for filter_ in filters)
    model.to("meta")
    assert not any(filter_() is not None for filter_ in filters)


def test_no_cached_filters_of_inference_tensors() -> None:
    with torch.inference_mode():
        layer = optimize(block(), "performance")
        call_counts()
        assert_same(layer)
    assert call_counts() == (0, 0)


def hooked(layer: torch.nn.Conv2d) -> torch.nn.Conv2d:
    layer.register_forward_hook(lambda *_: None)
    return layer


def tiled(layer: torch.nn.Conv2d) -> torch.nn.Conv2d:
    """Replace the implementation of the convolution, as users do for tileable images."""
    layer._conv_forward = lambda x, weight, bias: x  # type: ignore[method-assign, assignment]
    return layer


@pytest.mark.parametrize(
    "layer",
    [
        torch.nn.Conv2d(8, 8, 3, stride=2, padding=1),
        torch.nn.Conv2d(8, 8, 3, padding=0),
        torch.nn.Conv2d(8, 8, 3, padding=2, dilation=2),
        torch.nn.Conv2d(8, 8, 3, padding=1, groups=2),
        torch.nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"),
        torch.nn.Conv2d(8, 8, 1),
        hooked(torch.nn.Conv2d(8, 8, 3, padding=1)),
        tiled(torch.nn.Conv2d(8, 8, 3, padding=1)),
        torch.nn.Linear(8, 8),
    ],
)
def test_unsupported_layers_run_themselves(layer: torch.nn.Module) -> None:
    supported = torch.nn.Conv2d(8, 8, 3, padding=1)
    winograd.prepare(supported)
    assert winograd.conv(supported, image()) is not None
    winograd.prepare(layer)
    assert winograd.conv(layer, image()) is None
    assert not winograd.is_supported(layer, image(), False)


def test_unsupported_calls_run_the_layer() -> None:
    layer = optimize(block(), "performance")
    temb, expected = torch.ones(2, 6), layer(image(), torch.ones(2, 6))
    assert call_counts() == (2, 2)
    layer(image().contiguous(), temb)
    assert call_counts() == (1, 0)  # the first convolution's output is channels last
    with torch.enable_grad():
        layer(image(), temb)
    with torch.autocast("cpu", torch.bfloat16):
        layer(image(), temb)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(image(), temb), expected)
    for level in ("auto", "memory"):
        optimize(layer, level)(image(), temb)  # type: ignore[arg-type]
    assert call_counts() == (0, 0)


def test_dispatch_modes_see_torchs_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = optimize(block(), "performance")
    monkeypatch.setattr(winograd, "dispatch_state", dispatch_state)
    call_counts()
    with Tape():
        layer(image(), torch.ones(2, 6))
    assert call_counts() == (0, 0)


@pytest.mark.parametrize(
    ("device", "dtype", "shape", "filters", "expected"),
    [
        ("cuda", torch.float16, (2, 1280, 32, 32), 1280, True),
        ("cuda", torch.float16, (2, 320, 16, 16), 640, True),
        ("cuda", torch.float16, (2, 320, 16, 16), 320, False),
        ("cuda", torch.float16, (2, 320, 16, 15), 640, False),
        ("cuda", torch.bfloat16, (2, 1280, 32, 32), 1280, False),
        ("cpu", torch.float16, (2, 1280, 32, 32), 1280, False),
    ],
)
def test_when_it_is_faster(
    device: str, dtype: torch.dtype, shape: Any, filters: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(winograd, "_has_kernels", lambda device: True)
    x: Any = SimpleNamespace(device=torch.device(device), dtype=dtype, shape=shape)
    weight: Any = SimpleNamespace(dtype=dtype, shape=(filters, shape[1], 3, 3))
    assert winograd.is_faster(x, weight, False) == expected
    assert not winograd.is_faster(x, SimpleNamespace(dtype=torch.float32, shape=weight.shape), False)  # type: ignore[arg-type]
