"""Convolutions of resnet blocks by kept filters: when, the same numbers, weights that change, and memory given back."""

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

from sd_ort.torch import graphs, optimize, reset_status, restore, status, watchers
from sd_ort.torch.lasting import Kept
from sd_ort.torch.modules import winograd
from sd_ort.torch.modules.winograd import FILTERS
from tests.torch_layer.test_torch_graphs import Tape, tapes
from tests.torch_layer.test_torch_graphs import unet as small_unet
from tests.torch_layer.test_torch_lasting import Compared, prompt
from tests.torch_layer.test_torch_lasting import step as draw
from tests.torch_layer.test_torch_optimize import MODELS, call, randomized

__all__ = ["tapes"]  # the fixture in CUDA's place; it turns gradients off, too


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU where it pays. A capture is a tape, which torch takes for something that traces."""
    monkeypatch.setattr(winograd, "pays", lambda *_: True)
    monkeypatch.setattr(winograd, "watchers", SimpleNamespace(autocast=watchers.autocast, transformed=lambda: False))


def ran() -> tuple[int, int]:
    """How often images were convolved so, and filters transformed, since the last time."""
    found = {"nhwc_winograd": 0, "winograd_filters": 0}
    for (name, _), count in status().fallbacks.items():
        if name in found:
            found[name] += count
    reset_status()
    return found["nhwc_winograd"], found["winograd_filters"]


def block(channels: int = 8, **changes: Any) -> Any:
    made = ResnetBlock2D(in_channels=channels, out_channels=12, temb_channels=6, groups=4, **changes)
    return randomized(made).to(memory_format=torch.channels_last)


def image(channels: int = 8) -> torch.Tensor:
    drawn = torch.randn(2, channels, 5, 6, generator=torch.Generator().manual_seed(3))
    return drawn.to(memory_format=torch.channels_last)


def follows(layer: Any) -> None:
    """An optimized block computes what it does without us."""
    temb = torch.ones(2, 6)
    wanted = restore(copy.deepcopy(layer))(image(), temb)
    torch.testing.assert_close(layer(image(), temb), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["sd1", "vae"])
def test_same_numbers_and_weights_and_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "can_be_captured", lambda device: False)
    model = MODELS[kind]().to(memory_format=torch.channels_last)
    wanted, before = call(model), {name: value.clone() for name, value in model.state_dict().items()}
    layers = 2 * sum(isinstance(module, ResnetBlock2D) for module in model.modules())
    layers += kind == "sd1" and sum(isinstance(module, Upsample2D) for module in model.modules())
    optimize(model, "performance")
    reset_status()
    for filters in (layers, 0):
        torch.testing.assert_close(call(model), wanted, atol=2e-5, rtol=1e-4)
        assert ran() == (layers, filters)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    made = [weakref.ref(m.__dict__[FILTERS]._made._result) for m in model.modules() if FILTERS in m.__dict__]
    assert len(made) == layers
    assert torch.equal(call(restore(model)), wanted)
    assert not any(one() is not None for one in made)
    assert not any(FILTERS in module.__dict__ for module in model.modules())


def in_place(layer: Any) -> None:
    layer.conv1.weight.mul_(1.5)


def in_inference_mode(layer: Any) -> None:
    with torch.inference_mode():
        layer.conv2.weight.mul_(1.5)


def moved_and_moved_back(layer: Any) -> None:
    """As often as it takes until the memory is where it was."""
    weight, place = layer.conv1.weight, layer.conv1.weight.data_ptr()
    for _ in range(100):
        weight.data = weight.data * 1.01
        if weight.data_ptr() == place:
            return


def another(layer: Any) -> None:
    layer.conv1.weight = torch.nn.Parameter(layer.conv1.weight * 1.5)


def another_layer(layer: Any) -> None:
    layer.conv1 = copy.deepcopy(layer.conv1)
    layer.conv1.weight.mul_(1.5)


def loaded(layer: Any) -> None:
    layer.load_state_dict({name: value * 1.5 for name, value in layer.state_dict().items()})


def doubled(layer: Any) -> None:
    layer.double().float()


def trained(layer: Any) -> None:
    layer.requires_grad_(False)  # torch's GroupNorm of so few channels crashes where it takes gradients, channels last
    weight = layer.conv2.weight.requires_grad_()
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)  # counts no writes
    with torch.enable_grad():
        layer(image(), torch.ones(2, 6)).square().sum().backward()
    optimizer.step()


CHANGES = [in_place, in_inference_mode, moved_and_moved_back, another, another_layer, loaded, doubled, trained]


@pytest.mark.parametrize("change", CHANGES)
def test_other_weights_are_followed(change: Callable[[Any], None]) -> None:
    layer = optimize(block(), "performance")
    follows(layer)
    follows(layer)
    assert ran() == (4, 2)
    before = layer(image(), torch.ones(2, 6))
    ran()
    change(layer)
    follows(layer)
    assert ran()[1] > 0
    assert torch.equal(layer(image(), torch.ones(2, 6)), before) == (change is doubled)


def test_a_lora_around_a_convolution_and_fused_into_it() -> None:
    from peft import LoraConfig

    both, context = Compared(small_unet().to(memory_format=torch.channels_last)), prompt(1)
    for _ in range(3):
        both.step(context)
    assert ran()[1] == 2 * 6  # a new prompt's first replay makes all again
    before = draw(both.model, context)
    both.model.add_adapter(LoraConfig(r=2, target_modules=["conv1"], init_lora_weights=False))
    ran()
    both.step(context)
    assert ran() == (3, 3)  # the second convolutions
    both.model.fuse_lora()  # writes through .data, which is not counted
    both.model.unload_lora()
    for _ in range(3):
        both.step(context)
    assert not torch.allclose(draw(both.model, context), before, atol=1e-3)


def test_graphs_read_the_filters_that_calls_read() -> None:
    both, context = Compared(small_unet().to(memory_format=torch.channels_last)), prompt(1)
    weight = both.model.down_blocks[0].resnets[0].conv1.weight
    kept = [module.__dict__[FILTERS] for module in both.model.modules() if FILTERS in module.__dict__]
    for seed in range(3):
        both.step(context, seed)
    assert ran() == (5 * 6, 2 * 6)  # called, warmed up, recorded, replayed twice; and the prompt's first replay
    made = [one._made for one in kept]
    weight.mul_(1.5)
    both.step(context)
    assert ran()[1] == 1  # none was recorded
    weight.data.mul_(1.5)  # not counted
    other = prompt(2)
    both.step(other)
    both.step(other)
    assert ran()[1] == 6
    larger = prompt(3, batch=3)
    for _ in range(3):
        both.step(larger)
    assert ran()[1] == 6
    assert [one._made for one in kept] == made  # one for all
    weight.data = weight.data * 1.5
    for seed in range(3):
        both.step(context, seed)
    graphs_of = {what: count for (_, what), count in status().graphs.items()}
    assert graphs_of["captured"] == 1


def test_a_graph_renews_its_own() -> None:
    """Of a block that lay elsewhere for a call of its own, and is back."""
    both, context = Compared(small_unet().to(memory_format=torch.channels_last)), prompt(1)
    for _ in range(3):
        both.step(context)
    resnet = both.model.down_blocks[0].resnets[0]
    there = resnet.conv1.weight.data
    resnet.conv1.weight.data = there.double()
    resnet.conv1.__dict__[FILTERS].made(resnet.conv1.weight).renewed()
    resnet.conv1.weight.data = there
    resnet.conv1.weight.mul_(1.5)
    both.step(context)
    assert status().graphs["UNet2DConditionModel", "captured"] == 1


def test_copies_and_pickles_hold_none() -> None:
    layer = optimize(block(), "performance")
    follows(layer)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        kept = again.conv1.__dict__[FILTERS]
        assert isinstance(kept, Kept)
        assert kept._made is None
        follows(again)


def test_memory_where_weights_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "can_be_captured", lambda device: False)
    model = optimize(MODELS["sd1"]().to(memory_format=torch.channels_last), "performance")
    call(model)
    model.to(torch.float32)  # where it is
    made = [weakref.ref(m.__dict__[FILTERS]._made._result) for m in model.modules() if FILTERS in m.__dict__]
    assert all(one() is not None for one in made)
    model.to("meta")
    assert not any(one() is not None for one in made)


def test_no_kept_filters_of_inference_mode() -> None:
    with torch.inference_mode():
        layer = optimize(block(), "performance")
        ran()
        follows(layer)
    assert ran() == (0, 0)


def around(layer: torch.nn.Conv2d) -> torch.nn.Conv2d:
    layer.register_forward_hook(lambda *_: None)
    return layer


def tiled(layer: torch.nn.Conv2d) -> torch.nn.Conv2d:
    """As who wants images that can be put side by side."""
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
        around(torch.nn.Conv2d(8, 8, 3, padding=1)),
        tiled(torch.nn.Conv2d(8, 8, 3, padding=1)),
        torch.nn.Linear(8, 8),
    ],
)
def test_layers_that_run_themselves(layer: torch.nn.Module) -> None:
    plain = torch.nn.Conv2d(8, 8, 3, padding=1)
    winograd.prepare(plain)
    assert winograd.conv(plain, image()) is not None
    winograd.prepare(layer)
    assert winograd.conv(layer, image()) is None
    assert not winograd.takes(layer, image(), False)


def test_calls_that_run_the_layer() -> None:
    layer = optimize(block(), "performance")
    temb, wanted = torch.ones(2, 6), layer(image(), torch.ones(2, 6))
    assert ran() == (2, 2)
    layer(image().contiguous(), temb)
    assert ran() == (1, 0)  # the first convolution's result lies channels last
    with torch.enable_grad():
        layer(image(), temb)
    with torch.autocast("cpu", torch.bfloat16):
        layer(image(), temb)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(image(), temb), wanted)
    for level in ("auto", "memory"):
        optimize(layer, level)(image(), temb)  # type: ignore[arg-type]
    assert ran() == (0, 0)


def test_what_traces_finds_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = optimize(block(), "performance")
    monkeypatch.setattr(winograd, "watchers", watchers)
    ran()
    with Tape():
        layer(image(), torch.ones(2, 6))
    assert ran() == (0, 0)


@pytest.mark.parametrize(
    ("where", "dtype", "shape", "filters", "pays"),
    [
        ("cuda", torch.float16, (2, 1280, 32, 32), 1280, True),
        ("cuda", torch.float16, (2, 320, 16, 16), 640, True),
        ("cuda", torch.float16, (2, 320, 16, 16), 320, False),
        ("cuda", torch.float16, (2, 320, 16, 15), 640, False),
        ("cuda", torch.bfloat16, (2, 1280, 32, 32), 1280, False),
        ("cpu", torch.float16, (2, 1280, 32, 32), 1280, False),
    ],
)
def test_where_it_pays(
    where: str, dtype: torch.dtype, shape: Any, filters: int, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(winograd, "_has_kernels", lambda device: True)
    x: Any = SimpleNamespace(device=torch.device(where), dtype=dtype, shape=shape)
    weight: Any = SimpleNamespace(dtype=dtype, shape=(filters, shape[1], 3, 3))
    assert winograd.pays(x, weight, False) == pays
    assert not winograd.pays(x, SimpleNamespace(dtype=torch.float32, shape=weight.shape), False)  # type: ignore[arg-type]
