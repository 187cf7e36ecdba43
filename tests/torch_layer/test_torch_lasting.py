"""Keys and values of the prompt are made again when it or a weight of theirs changed, and not at other replays."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import ControlNetModel

from sd_ort.torch import graphs, optimize, restore, status
from tests.torch_layer.test_torch_graphs import SIZES, tapes, unet

__all__ = ["tapes"]  # the fixture in CUDA's place, for these tests too


def prompt(seed: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 5, 6, generator=torch.Generator().manual_seed(seed))


def step(model: Any, context: torch.Tensor, seed: int = 1) -> torch.Tensor:
    return model(torch.randn(len(context), 4, 4, 4, generator=torch.Generator().manual_seed(seed)), seed, context)[0]


def kept(name: str = "UNet2DConditionModel") -> int:
    return status().graphs.get((name, graphs.SAME_PROMPT), 0)


class Compared:
    """A U-Net and the same without graphs. `step` compares them; returns whether the prompt's part was kept."""

    def __init__(self, model: Any = None) -> None:
        self.model = optimize(unet() if model is None else model, "performance")

    def step(self, context: torch.Tensor, seed: int = 1) -> bool:
        before = kept()
        made = step(self.model, context, seed)
        plain = restore(copy.deepcopy(self.model))
        torch.testing.assert_close(made, step(plain, context.clone(), seed), atol=1e-5, rtol=1e-4)
        return kept() > before


def cross(model: Any) -> Any:
    return model.down_blocks[0].attentions[0].transformer_blocks[0].attn2


def test_kept_while_the_prompt_and_its_weights_are_the_same() -> None:
    both, context, other = Compared(), prompt(1), prompt(2)
    assert [both.step(context, seed) for seed in (1, 2, 3, 4)] == [False, False, True, True]
    context.mul_(2.0)
    assert [both.step(context), both.step(context)] == [False, True]
    assert [both.step(one) for one in (other, context, other, other)] == [False, False, False, True]
    assert [both.step(other.clone()), both.step(other.clone())] == [False, False]  # anew each step: made each step
    for seed in range(3, 6):
        assert not both.step(prompt(seed))  # in the place in memory, and of the id perhaps, of the one before
    both.step(context)
    context.data = prompt(7)
    assert [both.step(context), both.step(context)] == [False, True]
    cross(both.model).to_k.weight.mul_(1.5)
    assert [both.step(context), both.step(context)] == [False, True]
    cross(both.model).to_q.weight.mul_(1.5)  # reads no prompt
    assert both.step(context)
    assert status().graphs["UNet2DConditionModel", "captured"] == 1
    assert "replayed for the same prompt" in str(status())


def test_each_graph_keeps_its_own() -> None:
    both, small, large = Compared(), prompt(1, 1), prompt(2, 3)
    made = [both.step(context) for context in (small, small, large, large, small, large)]
    assert made == [False, False, False, False, True, True]
    large.add_(1.0)
    assert [both.step(small), both.step(large)] == [True, False]


def weights_elsewhere(model: Any) -> None:
    cross(model).to_v.weight.data = cross(model).to_v.weight.data * 2.0


def loaded_and_fused_lora(model: Any) -> None:
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=2, target_modules=["to_k"], init_lora_weights=False))
    step(model, prompt(9))
    model.fuse_lora()


def loaded_fused_and_unloaded_lora(model: Any) -> None:
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=2, target_modules=["to_k"], init_lora_weights=False))
    model.fuse_lora()  # writes through .data, which is not counted
    model.unload_lora()


def trained(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)  # counts no writes
    with torch.enable_grad():
        step(model, prompt(9)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("change", [weights_elsewhere, loaded_and_fused_lora, loaded_fused_and_unloaded_lora, trained])
def test_other_weights_are_followed_under_the_same_prompt(change: Callable[[Any], None]) -> None:
    both, context = Compared(), prompt(1)
    if change is loaded_fused_and_unloaded_lora:
        change(both.model)  # the first leaves attributes at the model, by which the second would be noticed
    assert [both.step(context) for _ in range(3)][-1]
    before = step(both.model, context)
    change(both.model)
    assert not both.step(context)
    both.step(context)
    both.step(context)
    assert not torch.equal(step(both.model, context), before)


def test_inference_mode_counts_no_writes_so_all_is_made() -> None:
    both = Compared()
    with torch.inference_mode():
        context = prompt(1)
        for _ in range(4):
            assert not both.step(context)
            context.mul_(1.5)


def test_controlnets_and_copies() -> None:
    small = {"conditioning_embedding_out_channels": (4, 8), "mid_block_type": "UNetMidBlock2DCrossAttn"}
    net, context = optimize(ControlNetModel(**SIZES, **small).eval(), "performance"), prompt(1)
    image = {"controlnet_cond": prompt(3).new_ones(2, 3, 8, 8), "return_dict": False}
    wanted = restore(copy.deepcopy(net))(torch.ones(2, 4, 4, 4), 1, context, **image)
    for _ in range(3):
        made = net(torch.ones(2, 4, 4, 4), 1, context, **image)
        torch.testing.assert_close(made, wanted, atol=1e-5, rtol=1e-4)
    assert kept("ControlNetModel") == 1
    both = Compared()
    for _ in range(3):
        both.step(context)
    again = Compared(copy.deepcopy(both.model))
    assert [again.step(context) for _ in range(3)] == [False, False, True]
    assert both.step(context)


def test_threads_with_a_prompt_each() -> None:
    model = optimize(unet(), "performance")
    plain = restore(copy.deepcopy(model))
    wrong: list[int] = []

    def draw(seed: int) -> None:
        context = prompt(seed)
        with torch.no_grad():  # a thread's own
            wanted = step(plain, context)
            for _ in range(6):
                if not torch.allclose(step(model, context), wanted, atol=1e-5, rtol=1e-4):
                    wrong.append(seed)

    threads = [threading.Thread(target=draw, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert status().graphs["UNet2DConditionModel", "replayed"] >= 12
