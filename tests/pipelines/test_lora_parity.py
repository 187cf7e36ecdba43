"""Adapters of every kind and layout: diffusers and PEFT are the judge of our images, on CPU sessions and in place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import pytest
import torch
from diffusers import StableDiffusionPipeline as DiffusersPipeline
from image_metrics import psnr
from safetensors.torch import save_file

from sd_ort import StableDiffusionPipeline
from sd_ort.checkpoints.presets import open_preset
from sd_ort.checkpoints.torch_pipeline import torch_pipeline
from sd_ort.core.errors import InputError
from sd_ort.core.files import read_json
from sd_ort.demo import TRANSFORMER_DIR
from sd_ort.weights.lora import LoraManager
from sd_ort.weights.lora_files import read_adapter

Tensors = dict[str, torch.Tensor]
SETTINGS: dict[str, Any] = {"prompt": "a red circle", "num_inference_steps": 2, "guidance_scale": 4.0,
                            "output_type": "np", "height": 64, "width": 64}  # fmt: skip
LINEAR = ["attn1.to_q", "attn1.to_v", "attn2.to_k", "attn1.to_out.0", "ff.net.0.proj", "ff.net.2", "time_emb_proj"]
CONVOLUTION = ["resnets.0.conv1", "conv_shortcut", "upsamplers.0.conv", "proj_in"]
WITH_BIAS = ["attn1.to_out.0", "ff.net.0.proj", "time_emb_proj", "resnets.0.conv1"]
TEXT = ["q_proj", "fc1"]


def draw(pipeline: Any, **more: Any) -> np.ndarray:
    return np.asarray(pipeline(**SETTINGS, **more, generator=torch.Generator().manual_seed(3)).images)


def copy_of(judge: Any) -> Any:
    """The judge with models of its own, which PEFT changes."""
    return DiffusersPipeline(
        **{n: deepcopy(c) if n in ("unet", "text_encoder") else c for n, c in judge.components.items()},
        requires_safety_checker=False,
    )


@pytest.fixture(scope="module")
def judge(one_thread: None) -> Any:
    pipeline = torch_pipeline("sd15-small", True, 0)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensors]:
    source = open_preset("sd15-small", 0)
    return {name: source.load(name).state_dict() for name in ("unet", "text_encoder")}


@pytest.fixture(scope="module")
def make(weights: dict[str, Tensors]) -> Callable[..., Tensors]:
    """Kohya's tensors of random LoRAs of all modules with such ends of names."""

    def make(
        seed: int = 1, names: list[str] = LINEAR + CONVOLUTION + TEXT, components: str = "unet text_encoder"
    ) -> Tensors:
        generator = torch.Generator().manual_seed(seed)
        tensors: Tensors = {}
        for component in components.split():
            prefix = {"unet": "lora_unet_", "text_encoder": "lora_te_text_model_"}[component]
            for name, weight in weights[component].items():
                module = name.removesuffix(".weight")
                if name.endswith(".weight") and module.endswith(tuple(names)):
                    out, *rest = weight.shape
                    kohya = prefix + module.replace(".", "_")
                    tensors[f"{kohya}.lora_down.weight"] = torch.randn(4, *rest, generator=generator) * 0.3
                    up = torch.randn(out, 4, *[1] * (len(rest) - 1), generator=generator) * 0.3
                    tensors |= {f"{kohya}.lora_up.weight": up, f"{kohya}.alpha": torch.tensor(3.0)}
        return tensors

    return make


@pytest.fixture(scope="module")
def ours(small_fused: Path, make: Callable[..., Tensors]) -> list[Any]:
    """A pipeline that opens its sessions again with new weights, and one that writes them in place, as GPUs do."""
    pipelines = [StableDiffusionPipeline.from_pretrained(small_fused) for _ in range(2)]
    pipelines[1].models.in_place = True
    for pipeline in pipelines:
        pipeline.set_progress_bar_config(disable=True)
        pipeline.load_lora_weights(make())
        pipeline.unload_lora_weights()
    return pipelines


@pytest.fixture(autouse=True)
def unload(request: pytest.FixtureRequest) -> Iterator[None]:
    """No adapter of a failed test is left for the next one."""
    yield
    if "ours" in request.fixturenames:
        for pipeline in request.getfixturevalue("ours"):
            pipeline.unload_lora_weights()


@pytest.fixture(scope="module")
def plain_image(judge: Any) -> np.ndarray:
    return draw(judge)


@dataclass
class Case:
    """Tensors, and the images that the judge draws with them by adapter scale."""

    source: Any
    images: dict[float, np.ndarray]


def check(ours: list[Any], case: Case, plain_image: np.ndarray, bound: float = 60.0) -> None:
    """The judge's images; the original image, to the last bit, after unloading."""
    for pipeline in ours:
        first = draw(pipeline)
        pipeline.load_lora_weights(case.source, "a")
        for scale, image in case.images.items():
            pipeline.set_adapters("a", scale)
            assert psnr(draw(pipeline), image, min_std=0.02) >= bound
            assert psnr(image, plain_image, min_std=0.02) < 50
        pipeline.unload_lora_weights()
        np.testing.assert_array_equal(draw(pipeline), first)
        weights = {part: pipeline.loras._initializers(part) for part in pipeline.models.overrides.updatable}
        for part, updatable in pipeline.models.overrides.updatable.items():
            for name, value in updatable.values.items():
                np.testing.assert_array_equal(value.numpy(), pipeline.loras._values(weights[part][name]))


def images_at_scales(theirs: Any) -> dict[float, np.ndarray]:
    images = {}
    for scale in (1.0, 0.6):
        theirs.set_adapters("a", scale)
        images[scale] = draw(theirs)
    return images


def randomize(model: torch.nn.Module) -> None:
    """Random adapter weights; magnitudes near the weights' norms."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.data *= 1 + 0.5 * torch.rand(parameter.shape, generator=generator)
        elif any(part in name for part in ("lora_", "hada_", "lokr_")):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3


# --- PEFT's LoRA, saved by diffusers --------------------------------------------------------------------------------

CONFIGS: dict[str, dict[str, Any]] = {
    "alpha": {"lora_alpha": 6},
    "rslora": {"lora_alpha": 6, "use_rslora": True},
    "alpha pattern": {"alpha_pattern": {"attn1.to_q": 9, "ff.net.2": 0.5}},
    "rank pattern": {"rank_pattern": {"to_v": 2, "resnets.0.conv1": 3}, "lora_alpha": 3},
    "both patterns, rslora": {"rank_pattern": {"to_v": 2}, "alpha_pattern": {"to_v": 3}, "use_rslora": True},
    "bias": {"lora_bias": True, "lora_alpha": 6, "target_modules": WITH_BIAS},
    "DoRA": {"use_dora": True, "lora_alpha": 6},
    "DoRA, rslora": {"use_dora": True, "use_rslora": True, "target_modules": LINEAR},
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::peft.utils.warning.PeftWarning")
def test_peft_configs(name: str, judge: Any, ours: list[Any], plain_image: np.ndarray, tmp_path: Path) -> None:
    """diffusers writes the config into the metadata, and reads it."""
    theirs = copy_of(judge)
    options = {"r": 4, "lora_alpha": 4, "target_modules": LINEAR + CONVOLUTION} | CONFIGS[name]
    theirs.unet.add_adapter(peft.LoraConfig(**options), "made")
    theirs.text_encoder.add_adapter(peft.LoraConfig(**(options | {"target_modules": TEXT, "lora_bias": False})), "made")
    for model in (theirs.unet, theirs.text_encoder):
        randomize(model)
    models = {"unet": theirs.unet, "text_encoder": theirs.text_encoder}
    layers = {f"{n}_lora_layers": peft.get_peft_model_state_dict(m, adapter_name="made") for n, m in models.items()}
    configs = {f"{n}_lora_adapter_metadata": m.peft_config["made"].to_dict() for n, m in models.items()}
    DiffusersPipeline.save_lora_weights(tmp_path, **layers, **configs, weight_name="a.safetensors")
    theirs = copy_of(judge)
    theirs.load_lora_weights(tmp_path, weight_name="a.safetensors", adapter_name="a")
    # transformers 5.23 leaves out the magnitudes, whose names in files lack ".weight"; PEFT itself reads them.
    peft.set_peft_model_state_dict(theirs.text_encoder, layers["text_encoder_lora_layers"], adapter_name="a")
    check(ours, Case(tmp_path / "a.safetensors", images_at_scales(theirs)), plain_image)


# --- Other layouts and kinds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("components", ["unet", "unet text_encoder"])
def test_kohya(
    components: str, judge: Any, make: Callable[..., Tensors], ours: list[Any], plain_image: np.ndarray
) -> None:
    """LoCon of every module, in one dict with alphas, as diffusers converts it."""
    theirs, tensors = copy_of(judge), make(components=components)
    theirs.load_lora_weights(tensors if components == "unet" else peft_names(theirs, tensors), adapter_name="a")
    check(ours, Case(tensors, images_at_scales(theirs)), plain_image)


def peft_names(theirs: Any, kohya: Tensors) -> Tensors:
    """The same in PEFT's names: diffusers 0.42 loads no Kohya file into transformers 5's text encoders."""
    tensors: Tensors = {}
    for component, prefix in (("unet", "lora_unet_"), ("text_encoder", "lora_te_text_model_")):
        for name, _ in getattr(theirs, component).named_modules():
            kohya_name = prefix + name.replace(".", "_")
            if f"{kohya_name}.alpha" in kohya:
                scale = kohya[f"{kohya_name}.alpha"] / 4
                tensors[f"{component}.{name}.lora_A.weight"] = kohya[f"{kohya_name}.lora_down.weight"] * scale
                tensors[f"{component}.{name}.lora_B.weight"] = kohya[f"{kohya_name}.lora_up.weight"]
    return tensors


INJECTED = {
    "LoHa": (peft.LoHaConfig, {"r": 3, "alpha": 5}),
    "LoHa, Tucker": (peft.LoHaConfig, {"r": 3, "alpha": 5, "use_effective_conv2d": True}),
    "LoKr": (peft.LoKrConfig, {"r": 2, "alpha": 5}),
    "LoKr, Tucker": (peft.LoKrConfig, {"r": 2, "alpha": 5, "use_effective_conv2d": True}),
    "LoKr of two products": (peft.LoKrConfig, {"r": 1, "alpha": 3, "decompose_both": True}),
}


@pytest.mark.parametrize("layout", ["LyCORIS", "PEFT"])
@pytest.mark.parametrize("name", INJECTED)
def test_lycoris_kinds(
    name: str, layout: str, judge: Any, ours: list[Any], plain_image: np.ndarray, tmp_path: Path
) -> None:
    """PEFT's own layers are the judge: diffusers' load_lora_weights takes no LoHa or LoKr of Stable Diffusion."""
    config_class, options = INJECTED[name]
    theirs = copy_of(judge)
    config = config_class(target_modules=LINEAR + CONVOLUTION, **options)
    peft.inject_adapter_in_model(config, theirs.unet, "a")
    randomize(theirs.unet)
    tensors = peft.get_peft_model_state_dict(theirs.unet, adapter_name="a")
    metadata = {}
    if layout == "PEFT":
        values = {"r": options["r"], "alpha": options["alpha"]}
        metadata = {"lora_adapter_metadata": json.dumps({f"unet.{key}": value for key, value in values.items()})}
        tensors = {f"unet.{name}": tensor for name, tensor in tensors.items()}
    else:
        tensors = lycoris_names(tensors, options["alpha"], options["r"])
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "a.safetensors", metadata)
    check(ours, Case(tmp_path / "a.safetensors", {1.0: draw(theirs)}), plain_image)


def lycoris_names(tensors: Tensors, alpha: float, rank: int) -> Tensors:
    """LyCORIS' names; where both factors of a LoKr are matrices it ignores alpha, so that the scale is in one."""
    named: Tensors = {}
    for name, tensor in tensors.items():
        module, _, key = name.rpartition(".")
        kohya = "lora_unet_" + module.replace(".", "_")
        full = f"{module}.lokr_w1" in tensors and f"{module}.lokr_w2" in tensors
        named[f"{kohya}.{key}"] = tensor * (alpha / rank) if full and key == "lokr_w1" else tensor
        named[f"{kohya}.alpha"] = torch.tensor(float(alpha))
    return named


def test_kohya_dora(
    judge: Any, make: Callable[..., Tensors], weights: dict, ours: list[Any], plain_image: np.ndarray
) -> None:
    """diffusers drops dora_scale with a warning. The judge has the same numbers in PEFT's names."""
    names = ["attn1.to_q", "ff.net.2", "resnets.0.conv1", "upsamplers.0.conv"]
    kohya, modules = make(2, names, "unet"), {}
    generator = torch.Generator().manual_seed(5)
    for name, weight in weights["unet"].items():
        module = name.removesuffix(".weight")
        if f"lora_unet_{module.replace('.', '_')}.alpha" in kohya:
            norms = weight.flatten(1).norm(dim=1) * (1 + 0.5 * torch.rand(len(weight), generator=generator))
            kohya[f"lora_unet_{module.replace('.', '_')}.dora_scale"] = norms.reshape(-1, *[1] * (weight.dim() - 1))
            modules[module] = norms
    theirs = copy_of(judge)
    theirs.unet.add_adapter(peft.LoraConfig(r=4, lora_alpha=3, use_dora=True, target_modules=names), "a")
    for name, parameter in theirs.unet.named_parameters():
        module, _, key = name.partition(".lora_")
        if key:
            kohya_name = f"lora_unet_{module.replace('.', '_')}"
            keys = {"A": "lora_down.weight", "B": "lora_up.weight", "m": "dora_scale"}
            parameter.data = kohya[f"{kohya_name}.{keys[key[0]]}"].reshape(parameter.shape).clone()
    check(ours, Case(kohya, images_at_scales(theirs)), plain_image)


def merged(judge: Any, new: Mapping[str, torch.Tensor]) -> np.ndarray:
    """The judge's image with these weights of the UNet."""
    theirs = copy_of(judge)
    theirs.unet.load_state_dict(theirs.unet.state_dict() | new)
    return draw(theirs)


def test_full_differences(judge: Any, weights: dict, ours: list[Any], plain_image: np.ndarray, tmp_path: Path) -> None:
    """Weights and biases of linear layers, convolutions and norms; a file of halves."""
    generator = torch.Generator().manual_seed(4)
    names = [n for n in weights["unet"] if ".resnets.0." in n or "attn1.to_out" in n or n.startswith("conv_out")]
    new, tensors = {}, {}
    for name in names:
        difference = (torch.randn(weights["unet"][name].shape, generator=generator) * 0.05).half()
        module, _, kind = name.rpartition(".")
        end = {"weight": "w_norm", "bias": "b_norm"} if "norm" in module else {"weight": "diff", "bias": "diff_b"}
        tensors[f"lora_unet_{module.replace('.', '_')}.{end[kind]}"] = difference
        new[name] = weights["unet"][name] + difference.float()
    save_file(tensors, tmp_path / "a.safetensors")
    check(ours, Case(tmp_path / "a.safetensors", {1.0: merged(judge, new)}), plain_image)


def test_locon_with_a_core(
    judge: Any, make: Callable[..., Tensors], weights: dict, ours: list[Any], plain_image: np.ndarray
) -> None:
    """LyCORIS' lora_mid; the judge is the product of three convolutions in torch."""
    kohya, new = make(6, ["resnets.0.conv1"], "unet"), {}
    for name in [name for name in kohya if name.endswith("lora_down.weight")]:
        module = name.removesuffix(".lora_down.weight")
        down, up = kohya[name][:, :, :1, :1].contiguous(), kohya[f"{module}.lora_up.weight"]
        core = torch.randn(4, 4, 3, 3, generator=torch.Generator().manual_seed(len(new))) * 0.5
        kohya |= {name: down, f"{module}.lora_mid.weight": core}
        weight = next(n for n in weights["unet"] if f"lora_unet_{n.replace('.', '_')}" == f"{module}_weight")
        identity = torch.eye(down.shape[1])[:, :, None, None]
        hidden = torch.nn.functional.conv2d(torch.nn.functional.pad(identity, [2] * 4), down)
        delta = torch.nn.functional.conv2d(torch.nn.functional.conv2d(hidden, core), up).flip(2, 3).transpose(0, 1)
        new[weight] = weights["unet"][weight] + 0.75 * delta
    check(ours, Case(kohya, {1.0: merged(judge, new)}), plain_image)


LDM_NAMES = {
    "down_blocks_0_resnets_0_conv1": "input_blocks_1_0_in_layers_2",
    "down_blocks_0_resnets_0_time_emb_proj": "input_blocks_1_0_emb_layers_1",
    "down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q": "input_blocks_1_1_transformer_blocks_0_attn1_to_q",
    "down_blocks_0_downsamplers_0_conv": "input_blocks_2_0_op",
    "down_blocks_1_resnets_0_conv_shortcut": "input_blocks_3_0_skip_connection",
    "mid_block_resnets_1_conv2": "middle_block_2_out_layers_3",
    "mid_block_attentions_0_proj_in": "middle_block_1_proj_in",
    "up_blocks_0_upsamplers_0_conv": "output_blocks_1_1_conv",
    "up_blocks_3_attentions_1_proj_out": "output_blocks_7_1_proj_out",
    "conv_in": "input_blocks_0_0", "conv_out": "out_2", "time_embedding_linear_1": "time_embed_0",
    "add_embedding_linear_2": "label_emb_0_2",
}  # fmt: skip


def test_ldm_names() -> None:
    """Kohya trains SDXL on LDM's UNet. Layers per block are those of the UNet's config."""

    def tensors(module: str) -> Tensors:
        return {
            f"lora_unet_{module}.lora_down.weight": torch.ones(1, 2),
            f"lora_unet_{module}.lora_up.weight": torch.ones(2, 1),
        }

    for diffusers_name, ldm_name in LDM_NAMES.items():
        for module in (diffusers_name, ldm_name):
            adapter = read_adapter(tensors(module), {"layers_per_block": 1})
            assert list(adapter.modules["unet"]) == [diffusers_name]
    converted = DiffusersPipeline.lora_state_dict(
        {
            f"lora_unet_{name}.lora_{way}.weight": torch.ones(1, 1)
            for name in LDM_NAMES.values()
            for way in ("down", "up")
            if name != "output_blocks_1_1_conv"
        },  # diffusers takes an upsampler without transformers for one
        unet_config=SimpleNamespace(layers_per_block=1),
    )[0]
    names = {name.replace("_to_q", "_to_q_lora") for name in LDM_NAMES}
    for name in converted:
        module = name.removeprefix("unet.").replace(".processor", "").split(".lora.")[0].split(".down.")[0]
        assert module.split(".up.weight")[0].replace(".", "_") in names


# --- Several adapters -----------------------------------------------------------------------------------------------


def both(judge: Any, ours: list[Any], act: Callable[[Any], Any]) -> None:
    """The same calls on a copy of the judge and on ours; `act` draws where it wants to compare."""
    theirs = copy_of(judge)
    images = list(act(theirs))
    assert psnr(images[0], images[-1], min_std=0.02) < 50
    for pipeline in ours:
        for image, expected in zip(act(pipeline), images, strict=True):
            assert psnr(image, expected, min_std=0.02) >= 60
        pipeline.unload_lora_weights()


def load(pipeline: Any, tensors: Tensors, name: str) -> None:
    is_judge = isinstance(pipeline, DiffusersPipeline)
    clean = pipeline.components if is_judge else {}
    pipeline.load_lora_weights(peft_names(SimpleNamespace(**clean), tensors) if is_judge else tensors, name)


@pytest.mark.filterwarnings(
    "ignore:Already found a `peft_config`", "ignore:Adapter one was active", "ignore:Already unmerged"
)
def test_last_loaded_is_used(judge: Any, make: Callable[..., Tensors], ours: list[Any]) -> None:
    """In the components that it changes; an earlier one stays in the others."""

    def act(pipeline: Any) -> Iterator[np.ndarray]:
        load(pipeline, make(1), "one")
        yield draw(pipeline)
        load(pipeline, make(2, LINEAR, "unet"), "two")
        yield draw(pipeline)
        assert pipeline.get_list_adapters() == {"unet": ["one", "two"], "text_encoder": ["one"]}
        pipeline.set_adapters(["one", "two"], [0.5, -0.7])
        assert pipeline.get_active_adapters() == ["one", "two"]
        yield draw(pipeline)
        yield draw(pipeline, cross_attention_kwargs={"scale": 0.4})
        pipeline.disable_lora()
        yield draw(pipeline)
        pipeline.enable_lora()
        yield draw(pipeline)
        pipeline.delete_adapters("one")
        assert pipeline.get_list_adapters() == {"unet": ["two"]}
        yield draw(pipeline)
        pipeline.delete_adapters("two")
        yield draw(pipeline)

    both(judge, ours, act)


BLOCKS: dict[str, Any] = {
    "one component": {"text_encoder": 0.3},
    "a number": {"unet": 0.2},
    "ways": {"unet": {"down": 0.8, "mid": 0.3}},
    "blocks": {"unet": {"down": {"block_0": 0.4}, "up": {"block_3": 0.1}}, "text_encoder": 0.5},
    "transformers": {"unet": {"mid": [0.2], "up": {"block_3": [0.1, 1.4]}}},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_block_scales(name: str, judge: Any, make: Callable[..., Tensors], ours: list[Any]) -> None:
    def act(pipeline: Any) -> Iterator[np.ndarray]:
        load(pipeline, make(1), "one")
        yield draw(pipeline)
        pipeline.set_adapters("one", BLOCKS[name])
        yield draw(pipeline)

    both(judge, ours, act)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`", "ignore:Already unmerged")
def test_fused_stay_after_unloading(judge: Any, make: Callable[..., Tensors], small_fused: Path) -> None:
    def act(pipeline: Any) -> Iterator[np.ndarray]:
        load(pipeline, make(1), "one")
        load(pipeline, make(2), "two")
        pipeline.set_adapters(["one", "two"], [0.5, 0.8])
        pipeline.fuse_lora(lora_scale=0.7)
        assert (pipeline.num_fused_loras, pipeline.fused_loras) == (2, {"one", "two"})
        yield draw(pipeline)
        pipeline.unfuse_lora()
        assert pipeline.num_fused_loras == 0
        yield draw(pipeline)
        pipeline.fuse_lora(adapter_names=["one"], components=["unet"])
        yield draw(pipeline)
        pipeline.unload_lora_weights()
        yield draw(pipeline)
        load(pipeline, make(3), "one")
        yield draw(pipeline)

    pipeline = StableDiffusionPipeline.from_pretrained(small_fused)
    both(judge, [pipeline], act)


def test_mixed_kinds(judge: Any, make: Callable[..., Tensors], weights: dict, ours: list[Any]) -> None:
    """LoRA, DoRA, LoHa and LoKr of one weight add up; each DoRA decomposes the original weight.

    In place no session is opened again. Scales of 0 leave nothing; that of a DoRA would leave its magnitude.
    """
    module = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    kohya = f"lora_unet_{module.replace('.', '_')}"
    lora = {n: t for n, t in make(1, LINEAR, "unet").items() if n.startswith(kohya)}
    magnitude = torch.rand(32, 1) + 0.5
    a, b = torch.randn(2, 32, 3) * 0.3
    loha = {f"{kohya}.hada_{w}_{x}": t for w in ("w1", "w2") for x, t in (("a", a), ("b", b.T.contiguous()))}
    left, right = torch.randn(4, 8) * 0.3, torch.randn(8, 4) * 0.3
    lokr = {f"{kohya}.lokr_w1": left, f"{kohya}.lokr_w2": right}
    scales = [1.0, 0.5, -0.3, 0.8]
    weight = weights["unet"][f"{module}.weight"]
    low_rank = 0.75 * lora[f"{kohya}.lora_up.weight"] @ lora[f"{kohya}.lora_down.weight"]
    total = weight + 0.5 * low_rank
    dora = magnitude / total.norm(dim=1, keepdim=True) * total - weight
    new = weight + low_rank + dora - 0.3 * (a @ b.T) ** 2 + 0.8 * torch.kron(left, right)
    image = merged(judge, {f"{module}.weight": new})
    for pipeline in ours:
        first = draw(pipeline)
        sessions = {name: model.session for name, model in pipeline.models.opened.items()}
        for name, tensors in zip("abcd", (lora, lora | {f"{kohya}.dora_scale": magnitude}, loha, lokr), strict=True):
            pipeline.load_lora_weights(tensors, name)
        pipeline.set_adapters(list("abcd"), scales)
        assert psnr(draw(pipeline), image, min_std=0.02) >= 60
        opened = {name: model.session for name, model in pipeline.models.opened.items()}
        assert (opened == sessions) == pipeline.models.in_place
        pipeline.set_adapters(["a", "c", "d"], 0.0)
        np.testing.assert_array_equal(draw(pipeline), first)
        pipeline.unload_lora_weights()
        np.testing.assert_array_equal(draw(pipeline), first)


# --- Failures -------------------------------------------------------------------------------------------------------


def fail_at_second(update: Callable[..., Any]) -> Callable[..., Any]:
    """`update`, but for its second call, which is for the second component of a LoRA."""
    calls: list[int] = []

    def fail(*arguments: Any) -> Any:
        calls.append(0)
        if len(calls) == 2:
            raise MemoryError("no memory")
        return update(*arguments)

    return fail


def test_a_failure_leaves_the_former_state(
    make: Callable[..., Tensors], ours: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An unreadable file, one of another model, and weights that cannot be updated; no file stays open."""
    wrong = {
        name: tensor[..., :1].contiguous() if name.endswith("to_q.lora_down.weight") else tensor
        for name, tensor in make().items()
    }
    save_file(wrong, tmp_path / "wrong.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 100)
    for pipeline in ours:
        pipeline.load_lora_weights(make(1), "one")
        pipeline.set_adapters("one", 0.6)
        first, state = draw(pipeline), pipeline.lora_state
        for file in ("wrong", "broken", "missing"):
            with pytest.raises(InputError):
                pipeline.load_lora_weights(tmp_path / f"{file}.safetensors", "two")
        with monkeypatch.context() as patch:
            patch.setattr(LoraManager, "updated_weights", fail_at_second(LoraManager.updated_weights))
            with pytest.raises(MemoryError):
                pipeline.load_lora_weights(make(2), "two")
        assert pipeline.lora_state == state
        assert list(pipeline.loras.adapters) == ["one"]
        np.testing.assert_array_equal(draw(pipeline), first)
        pipeline.unload_lora_weights()
    open_files = [os.path.realpath(file) for file in Path("/proc/self/fd").glob("*")]
    assert not [file for file in open_files if str(tmp_path) in file]


PROJECTION = "lora_unet_mid_block_attentions_0_proj_out"
QUERY = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
REFUSED = {
    "OFT": ({"lora_unet_conv_in.oft_blocks": torch.zeros(2, 4, 4)}, "is OFT"),
    "BOFT": ({"unet.conv_in.boft_R": torch.zeros(2, 4, 4)}, "is BOFT"),
    "IA3": ({"lora_unet_conv_in.on_input": torch.zeros(1)}, "is IA3"),
    "GLoRA": ({"lora_unet_conv_in.a1.weight": torch.zeros(1)}, "is GLoRA"),
    "alpha": ({"lora_unet_conv_in.alpha": torch.zeros(2)}, "is no number"),
    "ranks": ({f"{PROJECTION}.lora_down.weight": torch.zeros(3, 32, 1, 1),
               f"{PROJECTION}.lora_up.weight": torch.zeros(32, 4, 1, 1)}, "do not fit together"),
    "a bias that is not there": ({f"unet.{QUERY}.diff_b": torch.zeros(32)}, "which the graph lacks"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, ours: list[Any]) -> None:
    tensors, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        ours[0].load_lora_weights(tensors)
    assert ours[0].get_list_adapters() == {}


def test_refused_calls(make: Callable[..., Tensors], ours: list[Any]) -> None:
    pipeline = ours[0]
    pipeline.load_lora_weights(make(1), "one")
    for scales, message in (
        ({"unet": {"sideways": 1}}, "no blocks 'sideways'"), ({"unet": {"down": {"block_1": 1}}}, "no transformers"),
        ({"unet": {"up": {"block_3": [1, 2, 3]}}}, "3 scales for the 2"), ({"text_encoder": {"a": 1}}, "no strength"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            pipeline.set_adapters("one", scales)
    pipeline.disable_lora()
    with pytest.raises(InputError, match="call enable_lora"):
        pipeline.load_lora_weights(make(2), "two")
    pipeline.enable_lora()
    pipeline.fuse_lora()
    with pytest.raises(InputError, match="unfuse_lora before"):
        pipeline.load_lora_weights(make(2), "two")
    pipeline.unfuse_lora()
    with pytest.raises(InputError, match=r"components '0\.7'"):
        pipeline.fuse_lora(0.7)
    pipeline.unload_lora_weights()


@pytest.mark.parametrize(
    ("component", "name", "config"),
    [
        ("unet", "mid_block.attentions.0.transformer_blocks.0.attn1.to_q", {}),
        ("transformer", "transformer_blocks.0.attn.to_q", read_json(TRANSFORMER_DIR / "transformer/config.json")),
    ],
)
def test_config_next_to_the_file(component: str, name: str, config: dict[str, Any], tmp_path: Path) -> None:
    """PEFT's own folder: adapter_model.safetensors and adapter_config.json."""
    tensors = {f"base_model.model.{name}.lora_{x}.weight": torch.ones(s) for x, s in (("A", (4, 32)), ("B", (32, 4)))}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 6, "use_rslora": true, "alpha_pattern": {}}')
    adapter = read_adapter(tmp_path / "adapter_model.safetensors", config)
    delta = adapter.modules[component][name.replace(".", "_")].delta()
    np.testing.assert_allclose(delta.dense(), 12.0, rtol=1e-6)
    (tmp_path / "adapter_config.json").write_text('{"alpha_pattern": 3}')
    with pytest.raises(InputError, match="is no config of a LoRA"):
        read_adapter(tmp_path / "adapter_model.safetensors", config)
