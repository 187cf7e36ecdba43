"""Calls captured in CUDA graphs: when, when not, and that a changed model is captured anew.

A tape stands in for CUDA: it records torch's operators with the memory they read and write, and replays them without
any of the model's Python. So what a graph would have baked in, it has too.
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

from sd_ort.torch import graphs, optimize, reset_status, restore, status

SIZES: dict[str, Any] = {
    "block_out_channels": (8,), "norm_num_groups": 4, "cross_attention_dim": 6, "layers_per_block": 1,
    "attention_head_dim": 2, "down_block_types": ("CrossAttnDownBlock2D",),
}  # fmt: skip


class Tape(TorchDispatchMode):
    """What a graph is: calls of operators on memory that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        outs = [one for one in (made if isinstance(made, tuple | list) else [made]) if isinstance(one, torch.Tensor)]
        self.calls.append((func, args, kwargs or {}, outs))
        return made

    def replay(self) -> None:
        for func, args, kwargs, outs in self.calls:
            again = func(*args, **kwargs)
            again = again if isinstance(again, tuple | list) else [again]
            for out, one in zip(outs, again, strict=True):
                if out.data_ptr() != one.data_ptr():  # not a view
                    out.copy_(one)


@pytest.fixture(autouse=True)
def tapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def record(run: Callable[[], Any], device: torch.device, pool: Any) -> tuple[Callable[[], None], Any, Any]:
        run()
        with Tape() as tape:
            outputs = run()
        return tape.replay, outputs, pool

    monkeypatch.setattr(graphs, "record", record)
    monkeypatch.setattr(graphs, "on_gpu", lambda device: device.type == "cpu")
    monkeypatch.setattr(graphs, "can_be_captured", lambda device: True)
    monkeypatch.setattr(graphs, "after", lambda used, device: None)
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


def ran() -> dict[str, int]:
    return {what: count for (_, what), count in status().graphs.items()}


def why_not() -> dict[str, int]:
    return {why: count for (_, why), count in status().not_captured.items()}


def same(model: Any, seed: int, **more: Any) -> None:
    """A call gives what the model without graphs gives."""
    made = call(model, seed, **more)
    torch.testing.assert_close(made, call(restore(copy.deepcopy(model)), seed, **more), atol=1e-5, rtol=1e-4)


def test_captured_at_the_second_call_and_replayed_with_new_numbers() -> None:
    model = optimize(unet())
    for seed in range(1, 5):
        same(model, seed)  # other samples, contexts and time steps
    assert ran() == {"captured": 1, "replayed": 3}
    first, second = call(model, 1), call(model, 2)
    assert not torch.equal(first, second)  # a result is not overwritten by the next call
    same(model, 5, edge=6)
    same(model, 6, edge=6)
    assert ran()["captured"] == 2
    assert "UNet2DConditionModel replayed in a CUDA graph" in str(status())
    assert not why_not()


def test_graphs_are_few() -> None:
    model = optimize(unet())
    for edge in range(2, 2 + graphs.KEPT):
        call(model, edge=edge)
        call(model, edge=edge)
    call(model, edge=2)  # still held
    assert ran() == {"captured": graphs.KEPT, "replayed": graphs.KEPT + 1}
    call(model, edge=20)  # in the place of the one used longest ago
    call(model, edge=3)
    assert ran()["replayed"] == graphs.KEPT + 1


def fused_lora(model: Any) -> None:
    model.down_blocks[0].attentions[0].transformer_blocks[0].attn1.to_q.weight.mul_(2.0)


def moved_weight(model: Any) -> None:
    weight = model.conv_in.weight
    weight.data = weight.data * 2.0


def other_parameter(model: Any) -> None:
    model.conv_in.bias = torch.nn.Parameter(model.conv_in.bias + 1.0)


def processor(model: Any) -> None:
    attn = model.up_blocks[0].attentions[0].transformer_blocks[0].attn2
    attn.processor.scale = 0.5  # as an IP-Adapter's


def attribute(model: Any) -> None:
    model.up_blocks[0].resnets[0].output_scale_factor = 2.0


def lora_scale(model: Any) -> None:
    model.set_adapters(["default"], [0.3])


@pytest.mark.parametrize("change", [fused_lora, moved_weight, other_parameter, processor, attribute, lora_scale])
def test_a_changed_model_is_followed(change: Callable[[Any], None]) -> None:
    model = unet()
    if change is lora_scale:
        from peft import LoraConfig

        model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    if change is processor:
        model.up_blocks[0].attentions[0].transformer_blocks[0].attn2.set_processor(Scaled())
    optimize(model)
    for seed in (1, 2):
        same(model, seed)
    before = call(model, 3)
    change(model)
    for seed in (3, 4, 5):
        same(model, seed)
    assert not torch.equal(call(model, 3), before)
    assert ran()["captured"] == (1 if change is fused_lora else 2)  # numbers in place are read as they are


class Scaled:
    scale = 1.0

    def __call__(self, attn: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return hidden_states * self.scale


def test_a_model_that_changes_every_time_is_left_alone() -> None:
    model = optimize(unet())
    for turn in range(graphs.UNUSED + 1):
        moved_weight(model)
        for seed in (1, 2):
            same(model, turn + seed)
    assert ran()["captured"] == graphs.UNUSED
    assert why_not()["it changes between calls"] > 0


def test_controlnet_and_its_residuals() -> None:
    small = {"conditioning_embedding_out_channels": (4, 8), "mid_block_type": "UNetMidBlock2D"}
    net = optimize(ControlNetModel(**SIZES, **small)).eval()
    model, plain = optimize(unet()), restore(copy.deepcopy(net))
    for seed in (1, 2, 3):
        g = torch.Generator().manual_seed(seed)
        arguments = {
            "timestep": torch.tensor(seed), "encoder_hidden_states": torch.randn(2, 5, 6, generator=g),
            "controlnet_cond": torch.randn(2, 3, 8, 8, generator=g), "conditioning_scale": 0.5,
        }  # fmt: skip
        sample = torch.randn(2, 4, 4, 4, generator=g)
        made, wanted = net(sample, **arguments), plain(sample, **arguments)
        assert type(made) is type(wanted)
        torch.testing.assert_close(made.mid_block_res_sample, wanted.mid_block_res_sample, atol=1e-5, rtol=1e-4)
        same(model, seed, down_block_additional_residuals=made.down_block_res_samples,
             mid_block_additional_residual=made.mid_block_res_sample)  # fmt: skip
    assert status().graphs["ControlNetModel", "replayed"] == 2
    assert status().graphs["UNet2DConditionModel", "replayed"] == 2


class Odd:
    """An argument that nobody knows."""


@pytest.mark.parametrize(
    ("prepare", "more", "reason"),
    [
        (lambda model: model.conv_in.register_forward_hook(lambda *_: None), {}, "a module has hooks"),
        (lambda model: setattr(model.conv_in, "_hf_hook", object()), {}, "it is offloaded"),
        (lambda model: model.train(), {}, None),
        (lambda model: None, {"cross_attention_kwargs": {"odd": Odd()}}, "an argument is a Odd"),
        (lambda model: None, {"encoder_hidden_states": torch.ones(2, 5, 6, device="meta")}, None),
    ],
)
def test_what_is_not_captured(prepare: Any, more: Any, reason: str | None) -> None:
    model = optimize(unet(dropout=0.0))
    prepare(model)
    if reason is None and not more:
        for seed in (1, 2):
            same(model, seed)
        assert ran()["captured"] == 1
        return
    if reason is None:
        with pytest.raises((RuntimeError, NotImplementedError)):
            call(model, **more)
        assert why_not() == {"an argument lies on the meta": 1}
        return
    for seed in (1, 2, 3):
        call(model, seed, **more)
    assert (ran(), why_not()) == ({}, {reason: 3})


def test_around_a_call() -> None:
    model = optimize(unet())
    with torch.enable_grad():
        call(model).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        call(model)
    with Tape():
        call(model)
    assert why_not() == {"gradients are on": 1, "autocast is on": 1, "its calls are watched": 1}
    with torch.inference_mode():
        for seed in (1, 2, 3):
            assert call(model, seed).is_inference()
    same(model, 4)
    assert ran()["replayed"] >= 3


def test_a_capture_that_fails_is_counted_once_and_torch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graphs, "record", fails)
    model = optimize(unet())
    for seed in (1, 2, 3):
        same(model, seed)
    assert why_not() == {"capturing failed: operation not permitted when stream is capturing": 2}


def test_off_and_restored_and_saved(tmp_path: Any) -> None:
    for model in (optimize(unet(), graph=False), optimize(unet(), "memory"), restore(optimize(unet()))):
        assert type(model) is UNet2DConditionModel
        call(model)
        call(model)
    assert not ran()
    model = optimize(unet())
    call(model)
    call(model)
    model.save_pretrained(tmp_path)
    assert type(UNet2DConditionModel.from_pretrained(tmp_path)) is UNet2DConditionModel
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model)
    torch.testing.assert_close(call(again, 7), call(model, 7))
