"""Replays recompute the keys and values of the prompt only if the prompt or one of their weights changed."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import ControlNetModel

from sd_ort.torch import cuda_graphs, optimize, restore, status
from tests.torch_layer.test_torch_cuda_graphs import SIZES, tapes, unet

__all__ = ["tapes"]  # the fixture that simulates CUDA graphs applies to these tests too


def prompt(seed: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 5, 6, generator=torch.Generator().manual_seed(seed))


def step(model: Any, context: torch.Tensor, seed: int = 1) -> torch.Tensor:
    return model(torch.randn(len(context), 4, 4, 4, generator=torch.Generator().manual_seed(seed)), seed, context)[0]


def prompt_reuses(name: str = "UNet2DConditionModel") -> int:
    return status().graphs.get((name, cuda_graphs.SAME_PROMPT), 0)


class ComparedUNet:
    """An optimized UNet that is compared with the same model without graphs."""

    def __init__(self, model: Any = None) -> None:
        self.model = optimize(unet() if model is None else model, "performance")

    def step(self, context: torch.Tensor, seed: int = 1) -> bool:
        """Compare one step. Return whether a replay reused the tensors derived from the prompt."""
        before = prompt_reuses()
        output = step(self.model, context, seed)
        original = restore(copy.deepcopy(self.model))
        torch.testing.assert_close(output, step(original, context.clone(), seed), atol=1e-5, rtol=1e-4)
        return prompt_reuses() > before


def cross(model: Any) -> Any:
    return model.down_blocks[0].attentions[0].transformer_blocks[0].attn2


def test_reused_while_the_prompt_and_its_weights_are_the_same() -> None:
    compared, context, other = ComparedUNet(), prompt(1), prompt(2)
    assert [compared.step(context, seed) for seed in (1, 2, 3, 4)] == [False, False, True, True]
    context.mul_(2.0)
    assert [compared.step(context), compared.step(context)] == [False, True]
    assert [compared.step(one) for one in (other, context, other, other)] == [False, False, False, True]
    assert [compared.step(other.clone()), compared.step(other.clone())] == [False, False]  # a new tensor per step
    for seed in range(3, 6):
        assert not compared.step(prompt(seed))  # may have the address and the id of the one before
    compared.step(context)
    context.data = prompt(7)
    assert [compared.step(context), compared.step(context)] == [False, True]
    cross(compared.model).to_k.weight.mul_(1.5)
    assert [compared.step(context), compared.step(context)] == [False, True]
    cross(compared.model).to_q.weight.mul_(1.5)  # does not read the prompt
    assert compared.step(context)
    assert status().graphs["UNet2DConditionModel", "captured"] == 1
    assert "replayed for the same prompt" in str(status())


def test_each_graph_has_its_own_derived_tensors() -> None:
    compared, small, large = ComparedUNet(), prompt(1, 1), prompt(2, 3)
    reused = [compared.step(context) for context in (small, small, large, large, small, large)]
    assert reused == [False, False, False, False, True, True]
    large.add_(1.0)
    assert [compared.step(small), compared.step(large)] == [True, False]


def moved_weight(model: Any) -> None:
    cross(model).to_v.weight.data = cross(model).to_v.weight.data * 2.0


def load_and_fuse_lora(model: Any) -> None:
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=2, target_modules=["to_k"], init_lora_weights=False))
    step(model, prompt(9))
    model.fuse_lora()


def load_fuse_and_unload_lora(model: Any) -> None:
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=2, target_modules=["to_k"], init_lora_weights=False))
    model.fuse_lora()  # writes through .data, past the version counter
    model.unload_lora()


def train(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)  # writes past the version counter
    with torch.enable_grad():
        step(model, prompt(9)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("change", [moved_weight, load_and_fuse_lora, load_fuse_and_unload_lora, train])
def test_changed_weights_are_read_with_the_same_prompt(change: Callable[[Any], None]) -> None:
    compared, context = ComparedUNet(), prompt(1)
    if change is load_fuse_and_unload_lora:
        change(compared.model)  # the first one adds attributes to the model, which would reveal the second one
    assert [compared.step(context) for _ in range(3)][-1]
    before = step(compared.model, context)
    change(compared.model)
    assert not compared.step(context)
    compared.step(context)
    compared.step(context)
    assert not torch.equal(step(compared.model, context), before)


def test_inference_tensors_are_always_recomputed() -> None:
    compared = ComparedUNet()
    with torch.inference_mode():
        context = prompt(1)
        for _ in range(4):
            assert not compared.step(context)
            context.mul_(1.5)


def test_controlnets_and_copies() -> None:
    small = {"conditioning_embedding_out_channels": (4, 8), "mid_block_type": "UNetMidBlock2DCrossAttn"}
    net, context = optimize(ControlNetModel(**SIZES, **small).eval(), "performance"), prompt(1)
    image = {"controlnet_cond": prompt(3).new_ones(2, 3, 8, 8), "return_dict": False}
    expected = restore(copy.deepcopy(net))(torch.ones(2, 4, 4, 4), 1, context, **image)
    for _ in range(3):
        output = net(torch.ones(2, 4, 4, 4), 1, context, **image)
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)
    assert prompt_reuses("ControlNetModel") == 1
    compared = ComparedUNet()
    for _ in range(3):
        compared.step(context)
    copied = ComparedUNet(copy.deepcopy(compared.model))
    assert [copied.step(context) for _ in range(3)] == [False, False, True]
    assert compared.step(context)


def test_one_prompt_per_thread() -> None:
    model = optimize(unet(), "performance")
    original = restore(copy.deepcopy(model))
    wrong_seeds: list[int] = []

    def run(seed: int) -> None:
        context = prompt(seed)
        with torch.no_grad():  # per thread
            expected = step(original, context)
            for _ in range(6):
                if not torch.allclose(step(model, context), expected, atol=1e-5, rtol=1e-4):
                    wrong_seeds.append(seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong_seeds
    assert status().graphs["UNet2DConditionModel", "replayed"] >= 12
