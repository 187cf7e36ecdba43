"""sd_ort.torch.optimize: the same numbers and weights, reversible, under torch.compile, LoRA and checkpointing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, ControlNetModel, UNet2DConditionModel
from diffusers.models.attention_processor import Attention
from diffusers.models.upsampling import Upsample2D

from sd_ort.core.errors import InputError
from sd_ort.core.metrics import psnr
from sd_ort.runtime import build
from sd_ort.torch import kernels, optimize, reset_status, restore, status
from sd_ort.torch.modules import doubling, packing, transformer
from sd_ort.torch.modules.resnet import TOGETHER, FastResnetBlock2D
from sd_ort.torch.modules.together import Together
from sd_ort.torch.operators.group_norm import is_channels_last

SIZES: dict[str, Any] = {
    "block_out_channels": (16, 32), "norm_num_groups": 8, "cross_attention_dim": 12, "layers_per_block": 1,
}  # fmt: skip
BLOCKS = ("CrossAttnDownBlock2D", "DownBlock2D")


@pytest.fixture(autouse=True, scope="module")
def library() -> None:
    build.build()
    kernels.forget()


@pytest.fixture(autouse=True)
def counts() -> Iterator[None]:
    torch.manual_seed(0)
    reset_status()
    return


def unet(**changes: Any) -> UNet2DConditionModel:
    """As SD 1.x's, two levels; `changes` make it SD 2.x's or SDXL's. Weights distinct and not zero."""
    kinds = {"attention_head_dim": 2, "down_block_types": BLOCKS, "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
    return randomized(UNet2DConditionModel(**{**SIZES, **kinds, **changes}))


def randomized(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        spread = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.1
        torch.nn.init.normal_(parameter, float(parameter.ndim == 1 and name.endswith("weight")), spread)
    return model.eval()


SDXL = {
    "use_linear_projection": True, "transformer_layers_per_block": (2, 1), "attention_head_dim": (2, 4),
    "addition_embed_type": "text_time", "addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": 34,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "sd1": unet,
    "sd2": lambda: unet(use_linear_projection=True, attention_head_dim=(2, 4), upcast_attention=True),
    "sdxl": lambda: unet(**SDXL),
    "controlnet": lambda: randomized(
        ControlNetModel(
            **SIZES, attention_head_dim=2, down_block_types=BLOCKS, conditioning_embedding_out_channels=(4, 8)
        )
    ),
    "vae": lambda: randomized(
        AutoencoderKL(
            block_out_channels=(8, 16),
            norm_num_groups=4,
            layers_per_block=1,
            sample_size=16,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
        )
    ),
}


def call(model: Any, **more: Any) -> torch.Tensor:
    """One call of any of them, with the same arguments every time."""
    g = torch.Generator().manual_seed(1)
    if isinstance(model, AutoencoderKL):
        image = torch.randn(2, 3, 16, 12, generator=g)
        return model.decode(model.encode(image).latent_dist.mode()).sample  # type: ignore[no-any-return]
    more = dict(more, encoder_hidden_states=torch.randn(2, 5, 12, generator=g), return_dict=False)
    if isinstance(model, ControlNetModel):
        more["controlnet_cond"] = torch.randn(2, 3, 16, 12, generator=g)
    if getattr(getattr(model, "config", None), "addition_embed_type", None):
        more["added_cond_kwargs"] = {"text_embeds": torch.randn(2, 10, generator=g), "time_ids": torch.ones(2, 6)}
    out = model(torch.randn(2, 4, 8, 6, generator=g), torch.tensor(500.0), **more)
    return torch.cat([part.flatten() for part in (*out[0], out[1])]) if len(out) == 2 else out[0]


@pytest.mark.parametrize("last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_same_numbers_and_weights_and_back(kind: str, last: bool) -> None:
    model = MODELS[kind]()
    if last:
        model.to(memory_format=torch.channels_last)
    wanted, before = call(model), {name: value.clone() for name, value in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    for level in ("auto", "performance", "memory"):
        parameters = list(model.parameters())
        assert optimize(model, level) is model
        reset_status()
        torch.testing.assert_close(call(model), wanted, atol=2e-5, rtol=1e-4)
        ran = status()
        assert not ran.fallbacks
        assert {"group_norm", "attention", "skip_group_norm"} <= ran.kernels.keys()
        assert ("stacked_linear" in ran.kernels) == (level == "performance" and kind != "vae")
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        after = model.state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], value) for name, value in before.items())
    restore(model)
    assert [type(module) for module in model.modules()] == classes
    reset_status()
    assert torch.equal(call(model), wanted)
    assert not status().kernels


@torch.no_grad()
def test_what_it_replaces_and_leaves_alone() -> None:
    class Mine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unet = unet(resnet_time_scale_shift="scale_shift")

    model = Mine()
    model.unet.mid_block.attentions[0].transformer_blocks[0].attn1.set_processor(Custom())
    optimize(model)
    ran = status()
    assert ran.left_alone == {
        ("Attention", "its processor is Custom"): 1,
        ("ResnetBlock2D", "its time embedding is used as scale_shift"): 8,
    }
    assert ran.replaced["BasicTransformerBlock"] == 4
    assert ran.replaced["Attention"] == 7


@torch.no_grad()
def test_free_u_is_diffusers_own() -> None:
    model, size = unet(), {"s1": 0.9, "s2": 0.2, "b1": 1.5, "b2": 1.6}
    plain = call(model)
    model.enable_freeu(**size)
    wanted = call(model)
    assert not torch.allclose(plain, wanted, atol=1e-3)
    optimize(model)
    torch.testing.assert_close(call(model), wanted, atol=2e-5, rtol=1e-4)
    model.disable_freeu()
    torch.testing.assert_close(call(model), plain, atol=2e-5, rtol=1e-4)


class Custom:
    """An attention processor that nobody knows."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return hidden_states


def test_bad_targets_are_one_line() -> None:
    with pytest.raises(InputError, match=r"^unknown level 'fast': choose one of auto, performance, memory.$"):
        optimize(unet(), "fast")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^a str holds no modules"):
        optimize("runwayml/stable-diffusion-v1-5")


@torch.no_grad()
def test_saves_with_weights_side_by_side(tmp_path: Path) -> None:
    model = optimize(unet(), "performance")
    model.save_pretrained(tmp_path)
    again = UNet2DConditionModel.from_pretrained(tmp_path)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


@torch.no_grad()
def test_weights_that_move_apart_still_count() -> None:
    """A fused LoRA writes into weights, and a cast gives them other memory: the products follow."""
    model = optimize(unet(), "performance")
    for module in model.modules():
        if hasattr(module, "to_q"):
            module.to_q.weight.data += 0.1
    wanted = call(restore(copy.deepcopy(model)))
    torch.testing.assert_close(call(model), wanted, atol=2e-5, rtol=1e-4)
    reset_status()
    torch.testing.assert_close(call(model.double().float()), wanted, atol=2e-5, rtol=1e-4)
    assert status().fallbacks == {("stacked_linear", "the weights lie apart"): 8}


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
@torch.no_grad()
def test_weights_by_columns(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "columns_are_faster", lambda *_: True)
    model = MODELS[kind]()
    wanted, before = call(model), {name: value.clone() for name, value in model.state_dict().items()}
    optimize(model, "performance")
    reset_status()
    torch.testing.assert_close(call(model), wanted, atol=2e-5, rtol=1e-4)
    assert not status().fallbacks
    block = model.down_blocks[0].attentions[0].transformer_blocks[0]
    for layer in (block.attn1.to_q, block.attn1.to_v, block.ff.net[0].proj):
        assert layer.weight.stride(0) == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.save_pretrained(tmp_path)
    assert torch.equal(call(UNet2DConditionModel.from_pretrained(tmp_path)), wanted)
    restore(model)
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    assert torch.equal(call(model), wanted)


@torch.no_grad()
def test_feed_forward_layers_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that reads weights by columns."""
    monkeypatch.setattr(packing, "columns_are_faster", lambda *_: True)
    monkeypatch.setattr(transformer, "is_read_by_columns", lambda weight: weight.t().is_contiguous())
    model = MODELS["sd1"]()
    wanted = call(model)
    optimize(model, "performance")
    reset_status()
    torch.testing.assert_close(call(model), wanted, atol=2e-5, rtol=1e-4)
    ((operator, reason),) = status().fallbacks
    assert (operator, reason) == ("linear_split_gelu", "the library has no such CPU kernel")
    assert "bias_split_gelu" not in status().kernels


@pytest.mark.parametrize("kind", ["sd1", "vae"])
@torch.no_grad()
def test_images_doubled_and_convolved_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubling, "pays", is_channels_last)
    model = MODELS[kind]().to(memory_format=torch.channels_last)
    wanted, before = call(model), {name: value.clone() for name, value in model.state_dict().items()}
    optimize(model, "performance")
    reset_status()
    torch.testing.assert_close(call(model), wanted, atol=2e-5, rtol=1e-4)
    assert status().fallbacks == {("doubled_weight", "the library has no such CPU kernel"): 1}
    assert "upsample_nearest" not in status().kernels
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(call(restore(model)), wanted)


@torch.no_grad()
def test_what_is_doubled_and_convolved_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that change, gradients, compiling, a layer around the layer, other sizes."""
    monkeypatch.setattr(doubling, "pays", is_channels_last)
    layer = randomized(Upsample2D(8, use_conv=True, out_channels=12)).to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 5, 3).to(memory_format=torch.channels_last)
    plain = copy.deepcopy(layer)
    optimize(layer, "performance")
    for each in (layer, plain):
        each.conv.weight.data *= 1.5
    wanted = plain(x)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for made in (layer(x), compiled(x)):
        torch.testing.assert_close(made, wanted)
    assert not status().kernels.get("upsample_nearest")
    with torch.enable_grad():
        torch.testing.assert_close(layer(x), wanted)
    layer.conv.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(layer(x), wanted)
    assert status().kernels["upsample_nearest"] == 2
    torch.testing.assert_close(layer(x, (9, 7)), plain(x, (9, 7)))
    assert type(restore(layer)) is Upsample2D


@torch.no_grad()
def test_products_of_the_time_and_the_prompt_run_once() -> None:
    model = optimize(unet(), "performance", graph=False)
    blocks = [module for module in model.modules() if isinstance(module, FastResnetBlock2D)]
    attentions = [module.processor for module in model.modules() if isinstance(module, Attention)]
    shared = [blocks[0].__dict__[TOGETHER][0], *{one.shared[0] for one in attentions if one.shared}]
    assert (len(blocks), len(shared)) == (8, 2)
    for products in shared:
        made = products._products
        products._products = Mock(side_effect=made)
    wanted = call(restore(copy.deepcopy(model)))
    for _ in range(2):
        torch.testing.assert_close(call(model), wanted, atol=2e-5, rtol=1e-4)
    assert [products._products.call_count for products in shared] == [2, 2]  # not kept from call to call
    assert all(products._held is None for products in shared)
    # a block called alone, and a layer that is not plain any more, compute their own
    x, temb = torch.randn(1, 32, 4, 4), torch.randn(1, 64)
    alone = next(block for block in blocks[1:] if block.in_channels == 32)
    torch.testing.assert_close(alone(x, temb), restore(copy.deepcopy(alone))(x, temb), atol=2e-5, rtol=1e-4)
    blocks[3].time_emb_proj.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(call(model), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_products_made_together_are_of_what_is_there_now(mode: Callable[[], Any]) -> None:
    """Another tensor, one that was written to, weights that were: in the same call or in the next."""
    layers = [torch.nn.Linear(6, 4, bias=False) for _ in range(3)]
    together = Together([(layer,) for layer in layers])
    with mode():
        x = torch.randn(2, 5, 6)
        for factor in (1.0, 2.0):
            layers[1].weight.data.mul_(factor)
            for place, layer in enumerate(layers):
                torch.testing.assert_close(together.part(place, x, layer), layer(x))
        assert together.part(0, x, layers[0]) is not None
        assert together.part(1, x.clone(), layers[1]) is None
    with torch.no_grad():
        x = torch.randn(2, 5, 6)
        assert together.part(0, x, layers[0]) is not None
        x.add_(1)
        assert together.part(1, x, layers[1]) is None
        torch.testing.assert_close(together.part(0, x, layers[0]), layers[0](x))
    assert together.part(0, x, layers[0]) is None  # gradients are on


@torch.no_grad()
def test_layers_put_around_others_later_count() -> None:
    """A LoRA that is loaded after `optimize`, and a layer replaced by another."""
    from peft import LoraConfig

    model = optimize(unet(), "performance", graph=False)
    before = call(model)
    model.add_adapter(LoraConfig(r=2, target_modules=["time_emb_proj", "to_k"], init_lora_weights=False))
    wanted = call(restore(copy.deepcopy(model)))
    assert not torch.allclose(wanted, before, atol=1e-2)
    torch.testing.assert_close(call(model), wanted, atol=2e-5, rtol=1e-4)

    model = optimize(unet(), "performance", graph=False)
    block = model.down_blocks[0].resnets[0]
    block.time_emb_proj = copy.deepcopy(block.time_emb_proj)
    block.time_emb_proj.weight.mul_(3.0)
    wanted = call(restore(copy.deepcopy(model)))
    torch.testing.assert_close(call(model), wanted, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_compiles_as_one_graph() -> None:
    model = optimize(one_level(), "performance").to(memory_format=torch.channels_last)
    wanted = call(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(call(compiled), wanted)
    assert restore(compiled) is compiled  # reaches the module inside


def one_level() -> UNet2DConditionModel:
    blocks = {"down_block_types": BLOCKS[:1], "up_block_types": ("CrossAttnUpBlock2D",)}
    return unet(**blocks, block_out_channels=(16,), mid_block_type=None)


def lora_unet() -> Any:
    from peft import LoraConfig

    model = one_level()
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0", "proj", "conv1"]))
    return model.train()


def train(model: Any, steps: int = 3) -> list[float]:
    """Losses of some steps towards a fixed noise."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    target = torch.randn(2, 4, 8, 6, generator=torch.Generator().manual_seed(2))
    losses = []
    for _ in range(steps):
        loss = (call(model) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_learns_as_in_torch(checkpointing: bool) -> None:
    torch.manual_seed(0)
    model = lora_unet()
    wanted, ours = train(copy.deepcopy(model)), optimize(copy.deepcopy(model), "performance")
    if checkpointing:
        ours.enable_gradient_checkpointing()
    reset_status()
    losses = train(ours)
    assert losses[2] < losses[1] < losses[0]
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    assert {"group_norm", "skip_group_norm", "skip_layer_norm"} <= status().kernels.keys()


def test_pictures_of_the_demo_are_the_same() -> None:
    from sd_ort.benchmark.engines.pytorch import torch_pipeline

    pipeline = torch_pipeline("demo")
    arguments = {"prompt": "a red circle", "num_inference_steps": 2, "output_type": "np"}
    before = pipeline(**arguments, generator=torch.Generator().manual_seed(0)).images
    optimize(pipeline)
    reset_status()
    after = pipeline(**arguments, generator=torch.Generator().manual_seed(0)).images
    assert status().kernels["attention"] > 0
    assert psnr(before, after) >= 60
