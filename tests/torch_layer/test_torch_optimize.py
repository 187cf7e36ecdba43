"""sd_ort.torch.optimize: same outputs and weights, `restore`, torch.compile, LoRA and gradient checkpointing."""

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
from image_metrics import psnr

from sd_ort.core.errors import InputError
from sd_ort.torch import optimize, reset_status, restore, status
from sd_ort.torch.modules import transformer, upsample, weight_packing
from sd_ort.torch.modules.concatenated_linears import ConcatenatedLinears
from sd_ort.torch.modules.resnet import TIME_PROJECTIONS, FastResnetBlock2D
from sd_ort.torch.operators.group_norm import is_channels_last

SIZES: dict[str, Any] = {
    "block_out_channels": (16, 32), "norm_num_groups": 8, "cross_attention_dim": 12, "layers_per_block": 1,
}  # fmt: skip
BLOCKS = ("CrossAttnDownBlock2D", "DownBlock2D")


pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture(autouse=True)
def counts() -> Iterator[None]:
    torch.manual_seed(0)
    reset_status()
    return


def unet(**changes: Any) -> UNet2DConditionModel:
    """Return a UNet of SD 1.x with two levels and random weights; `changes` of its config give SD 2.x or SDXL."""
    blocks = {"down_block_types": BLOCKS, "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
    return randomized(UNet2DConditionModel(**{**SIZES, "attention_head_dim": 2, **blocks, **changes}))


def randomized(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        deviation = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.1
        torch.nn.init.normal_(parameter, float(parameter.ndim == 1 and name.endswith("weight")), deviation)
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
    """Call one of MODELS with the same arguments every time."""
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
    return torch.cat([residual.flatten() for residual in (*out[0], out[1])]) if len(out) == 2 else out[0]


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_outputs_and_weights_are_the_same_and_restore_undoes_it(kind: str, channels_last: bool) -> None:
    model = MODELS[kind]()
    if channels_last:
        model.to(memory_format=torch.channels_last)
    expected, before = call(model), {name: value.clone() for name, value in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    for level in ("auto", "performance", "memory"):
        parameters = list(model.parameters())
        assert optimize(model, level) is model
        reset_status()
        torch.testing.assert_close(call(model), expected, atol=2e-5, rtol=1e-4)
        counts = status()
        assert not counts.fallbacks
        assert {"group_norm", "attention", "skip_group_norm"} <= counts.kernels.keys()
        assert ("stacked_linear" in counts.kernels) == (level == "performance" and kind != "vae")
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        after = model.state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], value) for name, value in before.items())
    restore(model)
    assert [type(module) for module in model.modules()] == classes
    reset_status()
    assert torch.equal(call(model), expected)
    assert not status().kernels


@torch.no_grad()
def test_replaced_and_not_replaced_modules_are_counted() -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unet = unet(resnet_time_scale_shift="scale_shift")

    model = Wrapper()
    model.unet.mid_block.attentions[0].transformer_blocks[0].attn1.set_processor(Custom())
    optimize(model)
    counts = status()
    assert counts.left_alone == counts.not_replaced  # the old name
    assert counts.not_replaced == {
        ("Attention", "its processor is Custom"): 1,
        ("ResnetBlock2D", "its time embedding is used as scale_shift"): 8,
    }
    assert counts.replaced["BasicTransformerBlock"] == 4
    assert counts.replaced["Attention"] == 7


@torch.no_grad()
def test_free_u_runs_diffusers_own_code() -> None:
    model, size = unet(), {"s1": 0.9, "s2": 0.2, "b1": 1.5, "b2": 1.6}
    original = call(model)
    model.enable_freeu(**size)
    expected = call(model)
    assert not torch.allclose(original, expected, atol=1e-3)
    optimize(model)
    torch.testing.assert_close(call(model), expected, atol=2e-5, rtol=1e-4)
    model.disable_freeu()
    torch.testing.assert_close(call(model), original, atol=2e-5, rtol=1e-4)


class Custom:
    def __call__(self, attn: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return hidden_states


def test_invalid_arguments_raise_one_line() -> None:
    with pytest.raises(InputError, match=r"^Unknown level 'fast': choose one of auto, performance, memory.$"):
        optimize(unet(), "fast")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^A str has no modules"):
        optimize("runwayml/stable-diffusion-v1-5")


@torch.no_grad()
def test_packed_weights_can_be_saved(tmp_path: Path) -> None:
    model = optimize(unet(), "performance")
    model.save_pretrained(tmp_path)
    loaded = UNet2DConditionModel.from_pretrained(tmp_path)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())


@torch.no_grad()
def test_updated_and_unpacked_weights_are_read() -> None:
    """A fused LoRA writes into weights, and a cast gives each its own memory: the layers read the current values."""
    model = optimize(unet(), "performance")
    for module in model.modules():
        if hasattr(module, "to_q"):
            module.to_q.weight.data += 0.1
    expected = call(restore(copy.deepcopy(model)))
    torch.testing.assert_close(call(model), expected, atol=2e-5, rtol=1e-4)
    reset_status()
    torch.testing.assert_close(call(model.double().float()), expected, atol=2e-5, rtol=1e-4)
    assert status().fallbacks == {("stacked_linear", "the weights are not packed"): 8}


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
@torch.no_grad()
def test_column_major_weights(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_packing, "column_major_is_faster", lambda *_: True)
    model = MODELS[kind]()
    expected, before = call(model), {name: value.clone() for name, value in model.state_dict().items()}
    optimize(model, "performance")
    reset_status()
    torch.testing.assert_close(call(model), expected, atol=2e-5, rtol=1e-4)
    assert not status().fallbacks
    block = model.down_blocks[0].attentions[0].transformer_blocks[0]
    for layer in (block.attn1.to_q, block.attn1.to_v, block.ff.net[0].proj):
        assert layer.weight.stride(0) == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.save_pretrained(tmp_path)
    assert torch.equal(call(UNet2DConditionModel.from_pretrained(tmp_path)), expected)
    restore(model)
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    assert torch.equal(call(model), expected)


@torch.no_grad()
def test_geglu_with_its_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where weights are column-major."""
    monkeypatch.setattr(weight_packing, "column_major_is_faster", lambda *_: True)
    monkeypatch.setattr(transformer, "can_use_linear_add", lambda weight: weight.t().is_contiguous())
    model = MODELS["sd1"]()
    expected = call(model)
    optimize(model, "performance")
    reset_status()
    torch.testing.assert_close(call(model), expected, atol=2e-5, rtol=1e-4)
    ((operator, reason),) = status().fallbacks
    assert (operator, reason) == ("linear_split_gelu", "the library has no such CPU kernel")
    assert "bias_split_gelu" not in status().kernels


@pytest.mark.parametrize("kind", ["sd1", "vae"])
@torch.no_grad()
def test_upsampling_fused_into_the_convolution(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upsample, "is_faster", is_channels_last)
    model = MODELS[kind]().to(memory_format=torch.channels_last)
    expected, before = call(model), {name: value.clone() for name, value in model.state_dict().items()}
    optimize(model, "performance")
    reset_status()
    torch.testing.assert_close(call(model), expected, atol=2e-5, rtol=1e-4)
    assert status().fallbacks == {("upsample_conv_weight", "the library has no such CPU kernel"): 1}
    assert "upsample_nearest" not in status().kernels
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(call(restore(model)), expected)


@torch.no_grad()
def test_fused_upsampling_follows_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updated weights, gradients, torch.compile, hooks, other output sizes."""
    monkeypatch.setattr(upsample, "is_faster", is_channels_last)
    layer = randomized(Upsample2D(8, use_conv=True, out_channels=12)).to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 5, 3).to(memory_format=torch.channels_last)
    original = copy.deepcopy(layer)
    optimize(layer, "performance")
    for upsampler in (layer, original):
        upsampler.conv.weight.data *= 1.5
    expected = original(x)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for output in (layer(x), compiled(x)):
        torch.testing.assert_close(output, expected)
    assert not status().kernels.get("upsample_nearest")
    with torch.enable_grad():
        torch.testing.assert_close(layer(x), expected)
    layer.conv.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(layer(x), expected)
    assert status().kernels["upsample_nearest"] == 2
    torch.testing.assert_close(layer(x, (9, 7)), original(x, (9, 7)))
    assert type(restore(layer)) is Upsample2D


@torch.no_grad()
def test_projections_of_time_and_prompt_run_once_per_call() -> None:
    model = optimize(unet(), "performance", graph=False)
    blocks = [module for module in model.modules() if isinstance(module, FastResnetBlock2D)]
    attentions = [module.processor for module in model.modules() if isinstance(module, Attention)]
    prompt = {processor.prompt_projections[0] for processor in attentions if processor.prompt_projections}
    projections = [blocks[0].__dict__[TIME_PROJECTIONS][0], *prompt]
    assert (len(blocks), len(projections)) == (8, 2)
    for linears in projections:
        linears._compute = Mock(side_effect=linears._compute)
    expected = call(restore(copy.deepcopy(model)))
    for _ in range(2):
        torch.testing.assert_close(call(model), expected, atol=2e-5, rtol=1e-4)
    assert [linears._compute.call_count for linears in projections] == [2, 2]  # once per call
    assert all(linears._outputs is None for linears in projections)
    # A block that is called alone, and a layer with a hook, run themselves.
    x, temb = torch.randn(1, 32, 4, 4), torch.randn(1, 64)
    single = next(block for block in blocks[1:] if block.in_channels == 32)
    torch.testing.assert_close(single(x, temb), restore(copy.deepcopy(single))(x, temb), atol=2e-5, rtol=1e-4)
    blocks[3].time_emb_proj.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(call(model), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_concatenated_outputs_are_of_the_current_input_and_weights(mode: Callable[[], Any]) -> None:
    """Another input, an updated input and updated weights, in the same call or in the next one."""
    layers = [torch.nn.Linear(6, 4, bias=False) for _ in range(3)]
    linears = ConcatenatedLinears([(layer,) for layer in layers])
    with mode():
        x = torch.randn(2, 5, 6)
        for factor in (1.0, 2.0):
            layers[1].weight.data.mul_(factor)
            for group, layer in enumerate(layers):
                torch.testing.assert_close(linears.output_slice(group, x, layer), layer(x))
        assert linears.output_slice(0, x, layers[0]) is not None
        assert linears.output_slice(1, x.clone(), layers[1]) is None
    with torch.no_grad():
        x = torch.randn(2, 5, 6)
        assert linears.output_slice(0, x, layers[0]) is not None
        x.add_(1)
        assert linears.output_slice(1, x, layers[1]) is None
        torch.testing.assert_close(linears.output_slice(0, x, layers[0]), layers[0](x))
    assert linears.output_slice(0, x, layers[0]) is None  # gradients are on


@torch.no_grad()
def test_layers_that_are_replaced_later_are_called() -> None:
    """A LoRA that is loaded after `optimize`, and a layer that is replaced by another."""
    from peft import LoraConfig

    model = optimize(unet(), "performance", graph=False)
    before = call(model)
    model.add_adapter(LoraConfig(r=2, target_modules=["time_emb_proj", "to_k"], init_lora_weights=False))
    expected = call(restore(copy.deepcopy(model)))
    assert not torch.allclose(expected, before, atol=1e-2)
    torch.testing.assert_close(call(model), expected, atol=2e-5, rtol=1e-4)

    model = optimize(unet(), "performance", graph=False)
    block = model.down_blocks[0].resnets[0]
    block.time_emb_proj = copy.deepcopy(block.time_emb_proj)
    block.time_emb_proj.weight.mul_(3.0)
    expected = call(restore(copy.deepcopy(model)))
    torch.testing.assert_close(call(model), expected, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_compiles_as_one_graph() -> None:
    model = optimize(one_level(), "performance").to(memory_format=torch.channels_last)
    expected = call(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(call(compiled), expected)
    assert restore(compiled) is compiled  # reaches the original module


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
    """Return the losses of some training steps towards a fixed noise target."""
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
def test_lora_training_equals_torch(checkpointing: bool) -> None:
    torch.manual_seed(0)
    model = lora_unet()
    expected, optimized = train(copy.deepcopy(model)), optimize(copy.deepcopy(model), "performance")
    if checkpointing:
        optimized.enable_gradient_checkpointing()
    reset_status()
    losses = train(optimized)
    assert losses[2] < losses[1] < losses[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert {"group_norm", "skip_group_norm", "skip_layer_norm"} <= status().kernels.keys()


def test_demo_images_are_the_same() -> None:
    from sd_ort.checkpoints.torch_pipeline import torch_pipeline

    pipeline = torch_pipeline("demo")
    arguments = {"prompt": "a red circle", "num_inference_steps": 2, "output_type": "np"}
    before = pipeline(**arguments, generator=torch.Generator().manual_seed(0)).images
    optimize(pipeline)
    reset_status()
    after = pipeline(**arguments, generator=torch.Generator().manual_seed(0)).images
    assert status().kernels["attention"] > 0
    assert psnr(before, after) >= 60
