"""Calls captured in CUDA graphs: conditions of a capture, and that a changed model is captured again.

A tape simulates a CUDA graph: it records torch's operators with their input and output memory, and replays them without
the model's Python. A tape has the same addresses and decisions baked in as a graph.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from torch.utils._python_dispatch import TorchDispatchMode

from sd_ort.torch import cuda_graphs, optimize, reset_status, restore, status

SIZES: dict[str, Any] = {
    "block_out_channels": (8,), "norm_num_groups": 4, "cross_attention_dim": 6, "layers_per_block": 1,
    "attention_head_dim": 2, "down_block_types": ("CrossAttnDownBlock2D",),
}  # fmt: skip


class Tape(TorchDispatchMode):
    """Simulated CUDA graph: calls of operators on fixed memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else [result]
        outputs = [tensor for tensor in results if isinstance(tensor, torch.Tensor)]
        self.calls.append((func, args, kwargs or {}, outputs))
        return result

    def replay(self) -> None:
        for func, args, kwargs, outputs in self.calls:
            result = func(*args, **kwargs)
            results = result if isinstance(result, tuple | list) else [result]
            for output, tensor in zip(outputs, results, strict=True):
                if output.data_ptr() != tensor.data_ptr():  # not a view
                    output.copy_(tensor)


@pytest.fixture(autouse=True)
def tapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def capture(run: Callable[[], Any], device: torch.device, pool: Any) -> tuple[Callable[[], None], Any, Any]:
        run()
        with Tape() as tape:
            outputs = run()
        return tape.replay, outputs, pool

    monkeypatch.setattr(cuda_graphs, "capture", capture)
    monkeypatch.setattr(cuda_graphs, "on_gpu", lambda device: device.type == "cpu")
    monkeypatch.setattr(cuda_graphs, "can_capture", lambda device: True)
    monkeypatch.setattr(cuda_graphs, "order_after", lambda previous, device: None)
    torch.manual_seed(0)
    reset_status()
    with torch.no_grad():
        yield


def unet(**changes: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(**SIZES, up_block_types=("CrossAttnUpBlock2D",), mid_block_type=None, **changes).eval()


def call(model: Any, seed: int = 1, edge: int = 4, **more: Any) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    more = {"timestep": 10 * seed, "encoder_hidden_states": torch.randn(2, 5, 6, generator=g), **more}
    return model(torch.randn(2, 4, edge, edge, generator=g), **more).sample


def graph_events() -> dict[str, int]:
    return {event: count for (_, event), count in status().graphs.items()}


def uncaptured_reasons() -> dict[str, int]:
    return {reason: count for (_, reason), count in status().not_captured.items()}


def assert_same(model: Any, seed: int, **more: Any) -> None:
    """Check that a call equals a call of the model without graphs."""
    output = call(model, seed, **more)
    torch.testing.assert_close(output, call(restore(copy.deepcopy(model)), seed, **more), atol=1e-5, rtol=1e-4)


def test_captured_at_the_second_call_and_replayed_with_new_inputs() -> None:
    model = optimize(unet())
    for seed in range(1, 5):
        assert_same(model, seed)  # other samples, contexts and timesteps
    assert graph_events() == {"captured": 1, "replayed": 3}
    first, second = call(model, 1), call(model, 2)
    assert not torch.equal(first, second)  # a result is not overwritten by the next call
    assert_same(model, 5, edge=6)
    assert_same(model, 6, edge=6)
    assert graph_events()["captured"] == 2
    assert "UNet2DConditionModel replayed in a CUDA graph" in str(status())
    assert not uncaptured_reasons()


def test_the_number_of_graphs_is_limited() -> None:
    model = optimize(unet())
    for edge in range(2, 2 + cuda_graphs.MAX_GRAPHS):
        call(model, edge=edge)
        call(model, edge=edge)
    call(model, edge=2)  # still cached
    assert graph_events() == {"captured": cuda_graphs.MAX_GRAPHS, "replayed": cuda_graphs.MAX_GRAPHS + 1}
    call(model, edge=20)  # replaces the least recently used one
    call(model, edge=3)
    assert graph_events()["replayed"] == cuda_graphs.MAX_GRAPHS + 1


def in_place_update(model: Any) -> None:
    model.down_blocks[0].attentions[0].transformer_blocks[0].attn1.to_q.weight.mul_(2.0)


def moved_weight(model: Any) -> None:
    weight = model.conv_in.weight
    weight.data = weight.data * 2.0


def new_parameter(model: Any) -> None:
    model.conv_in.bias = torch.nn.Parameter(model.conv_in.bias + 1.0)


def processor_attribute(model: Any) -> None:
    attn = model.up_blocks[0].attentions[0].transformer_blocks[0].attn2
    attn.processor.scale = 0.5  # as an IP-Adapter's


def attribute(model: Any) -> None:
    model.up_blocks[0].resnets[0].output_scale_factor = 2.0


def lora_scale(model: Any) -> None:
    model.set_adapters(["default"], [0.3])


@pytest.mark.parametrize(
    "change", [in_place_update, moved_weight, new_parameter, processor_attribute, attribute, lora_scale]
)
def test_replays_follow_changes_of_the_model(change: Callable[[Any], None]) -> None:
    model = unet()
    if change is lora_scale:
        from peft import LoraConfig

        model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    if change is processor_attribute:
        model.up_blocks[0].attentions[0].transformer_blocks[0].attn2.set_processor(Scaled())
    optimize(model)
    for seed in (1, 2):
        assert_same(model, seed)
    before = call(model, 3)
    change(model)
    for seed in (3, 4, 5):
        assert_same(model, seed)
    assert not torch.equal(call(model, 3), before)
    captures = 1 if change is in_place_update else 2  # a graph reads weights that were updated in place
    assert graph_events()["captured"] == captures


class Scaled:
    scale = 1.0

    def __call__(self, attn: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return hidden_states * self.scale


def test_a_model_that_changes_every_time_is_not_captured() -> None:
    model = optimize(unet())
    for change in range(cuda_graphs.MAX_UNUSED_CAPTURES + 1):
        moved_weight(model)
        for seed in (1, 2):
            assert_same(model, change + seed)
    assert graph_events()["captured"] == cuda_graphs.MAX_UNUSED_CAPTURES
    assert uncaptured_reasons()["it changes between calls"] > 0


def test_controlnet_and_its_residuals() -> None:
    small = {"conditioning_embedding_out_channels": (4, 8), "mid_block_type": "UNetMidBlock2D"}
    net = optimize(ControlNetModel(**SIZES, **small)).eval()
    model, original = optimize(unet()), restore(copy.deepcopy(net))
    for seed in (1, 2, 3):
        g = torch.Generator().manual_seed(seed)
        arguments = {
            "timestep": torch.tensor(seed), "encoder_hidden_states": torch.randn(2, 5, 6, generator=g),
            "controlnet_cond": torch.randn(2, 3, 8, 8, generator=g), "conditioning_scale": 0.5,
        }  # fmt: skip
        sample = torch.randn(2, 4, 4, 4, generator=g)
        output, expected = net(sample, **arguments), original(sample, **arguments)
        assert type(output) is type(expected)
        torch.testing.assert_close(output.mid_block_res_sample, expected.mid_block_res_sample, atol=1e-5, rtol=1e-4)
        assert_same(model, seed, down_block_additional_residuals=output.down_block_res_samples,
             mid_block_additional_residual=output.mid_block_res_sample)  # fmt: skip
    assert status().graphs["ControlNetModel", "replayed"] == 2
    assert status().graphs["UNet2DConditionModel", "replayed"] == 2


class Custom:
    """An argument of a type that cannot be compared."""


@pytest.mark.parametrize(
    ("prepare", "more", "reason"),
    [
        (lambda model: model.conv_in.register_forward_hook(lambda *_: None), {}, "a module has hooks"),
        (lambda model: setattr(model.conv_in, "_hf_hook", object()), {}, "it is offloaded"),
        (lambda model: model.train(), {}, None),
        (lambda model: None, {"cross_attention_kwargs": {"custom": Custom()}}, "an argument has type Custom"),
        (lambda model: None, {"encoder_hidden_states": torch.ones(2, 5, 6, device="meta")}, None),
    ],
)
def test_models_and_arguments_that_are_not_captured(prepare: Any, more: Any, reason: str | None) -> None:
    model = optimize(unet(dropout=0.0))
    prepare(model)
    if reason is None and not more:
        for seed in (1, 2):
            assert_same(model, seed)
        assert graph_events()["captured"] == 1
        return
    if reason is None:
        with pytest.raises((RuntimeError, NotImplementedError)):
            call(model, **more)
        assert uncaptured_reasons() == {"an argument is on device meta": 1}
        return
    for seed in (1, 2, 3):
        call(model, seed, **more)
    assert (graph_events(), uncaptured_reasons()) == ({}, {reason: 3})


def test_contexts_that_are_not_captured() -> None:
    model = optimize(unet())
    with torch.enable_grad():
        call(model).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        call(model)
    with Tape():
        call(model)
    assert uncaptured_reasons() == {
        "gradients are on": 1, "autocast is on": 1, "a mode or hook intercepts its calls": 1,
    }  # fmt: skip
    with torch.inference_mode():
        for seed in (1, 2, 3):
            assert call(model, seed).is_inference()
    assert_same(model, 4)
    assert graph_events()["replayed"] >= 3


def test_a_capture_that_fails_is_counted_once_and_torch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(cuda_graphs, "capture", fail)
    model = optimize(unet())
    for seed in (1, 2, 3):
        assert_same(model, seed)
    assert uncaptured_reasons() == {"capturing failed: operation not permitted when stream is capturing": 2}


def test_disabled_restored_saved_and_pickled(tmp_path: Any) -> None:
    for model in (optimize(unet(), graph=False), optimize(unet(), "memory"), restore(optimize(unet()))):
        assert type(model) is UNet2DConditionModel
        call(model)
        call(model)
    assert not graph_events()
    model = optimize(unet())
    call(model)
    call(model)
    model.save_pretrained(tmp_path)
    assert type(UNet2DConditionModel.from_pretrained(tmp_path)) is UNet2DConditionModel
    unpickled = pickle.loads(pickle.dumps(model))
    assert type(unpickled) is type(model)
    torch.testing.assert_close(call(unpickled, 7), call(model, 7))
