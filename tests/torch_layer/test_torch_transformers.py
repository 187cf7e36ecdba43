"""sd_ort.torch.optimize of diffusion transformers: the images of diffusers' pipelines, restore, refusals."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry
from image_metrics import psnr

from scripts.fixtures.parity_models import Models
from scripts.fixtures.transformer_pairs import PROMPTS, SHARED
from sd_ort.core.errors import InputError
from sd_ort.torch import operators, optimize, reset_status, restore, status
from sd_ort.torch.modules import joint_attention

# Family of scripts/fixtures/parity_models.py -> diffusers' pipeline, and operators that its transformer calls.
MODULATED = {"adaptive_norm", "skip_adaptive_norm", "attention"}
PIPELINES = {
    "flux": ("FluxPipeline", MODULATED | {"rotary_embedding"}),
    "klein": ("Flux2KleinPipeline", MODULATED | {"rotary_embedding", "swiglu"}),
    "sd3": ("StableDiffusion3Pipeline", MODULATED),
    "z_image": ("ZImagePipeline", MODULATED | {"rotary_embedding", "swiglu"}),
    "qwen_image": ("QwenImagePipeline", MODULATED | {"rotary_embedding"}),
    "krea2": ("Krea2Pipeline", MODULATED | {"rotary_embedding", "swiglu"}),
}


pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def counts() -> Iterator[None]:
    reset_status()
    yield
    reset_status()


def image(pipe: Any, family: str, prompt: Any = PROMPTS[0]) -> np.ndarray:
    generator = torch.Generator().manual_seed(1)
    arguments = dict(SHARED[family], num_inference_steps=2, output_type="np", generator=generator)
    return np.asarray(pipe(prompt=copy.copy(prompt), **arguments).images)  # Z-Image's replaces the prompts of a list


def processors(model: torch.nn.Module) -> list[Any]:
    return [module.processor for module in model.modules() if hasattr(module, "processor")]


@pytest.mark.parametrize("family", PIPELINES)
def test_images_are_diffusers_and_restore_undoes_it(family: str, models: Models) -> None:
    kind, called = PIPELINES[family]
    pipe = models.theirs(family, kind)
    randomize_norms(pipe.transformer)
    expected, before = image(pipe, family), [type(module) for module in pipe.transformer.modules()]
    originals = processors(pipe.transformer)
    weights = {name: value.clone() for name, value in pipe.transformer.state_dict().items()}
    assert optimize(pipe, "memory") is pipe
    assert all(torch.equal(value, weights[name]) for name, value in pipe.transformer.state_dict().items())
    # Each attention is replaced.
    assert [each.original for each in processors(pipe.transformer)] == originals
    reset_status()
    assert psnr(image(pipe, family), expected) > 90  # float32: sums of other orders
    assert called <= status().kernels.keys()
    # Masks are torch's: the kernels have none over keys alone.
    assert not {reason for name, reason in status().fallbacks if name != "attention"}
    restore(pipe)
    assert [type(module) for module in pipe.transformer.modules()] == before
    assert processors(pipe.transformer) == originals
    assert np.array_equal(image(pipe, family), expected)


def randomize_norms(model: torch.nn.Module) -> None:
    """Give norms weights that are not all the same, which random weights are."""
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "norm" in name and parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)


@pytest.mark.parametrize("family", ["z_image", "qwen_image", "krea2"])
def test_prompts_of_other_lengths_keep_their_masks(family: str, models: Models) -> None:
    """Rows of a batch have their own angles (Z-Image) and masks."""
    pipe, prompts = models.theirs(family, PIPELINES[family][0]), ["a", PROMPTS[0]]
    expected = image(pipe, family, prompts)
    try:
        assert psnr(image(optimize(pipe), family, prompts), expected) > 90
    finally:
        restore(pipe)


@pytest.mark.parametrize(("family", "kinds"), [("flux", 1), ("klein", 1), ("z_image", 3), ("qwen_image", 1)])
def test_rotary_tables_are_prepared_once_a_forward(
    family: str, kinds: int, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers read the same angles; Z-Image has tables of the prompt, of the image, and of both."""
    pipe, prepare = models.theirs(family, PIPELINES[family][0]), joint_attention.copy_like
    prepared, forwards = list[Any](), list[int]()

    def count(*arguments: Any) -> Any:
        prepared.append(arguments)
        return prepare(*arguments)

    monkeypatch.setattr(joint_attention, "copy_like", count)
    hook = pipe.transformer.register_forward_hook(lambda *_: forwards.append(1))
    try:
        image(optimize(pipe.transformer) and pipe, family)
    finally:
        hook.remove()
        restore(pipe)
    assert status().kernels["rotary_embedding"] > 2 * len(forwards)  # several attentions
    assert len(prepared) == kinds * len(forwards)


def test_a_changed_table_is_read_again() -> None:
    x, tables = torch.zeros(1, 3, 2, 4), (torch.rand(3, 4), torch.rand(3, 4))
    first = joint_attention.real_angles(tables, x)
    assert joint_attention.real_angles(tables, x) is first
    assert joint_attention.real_angles((tables[0], tables[1].clone()), x) is not first
    tables[1].mul_(2)
    changed = joint_attention.real_angles(tables, x)
    assert changed is not None
    torch.testing.assert_close(changed[1], tables[1][:, ::2])
    double = joint_attention.real_angles(tables, x.double())
    assert double is not None
    assert double[0].dtype == torch.float64


@torch.no_grad()
def test_backends_fused_projections_and_other_processors_are_diffusers(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A model's backend becomes the process's, too.
    monkeypatch.setattr(registry, "_active_backend", registry._active_backend)
    native = registry._active_backend
    pipe = models.theirs("flux", "FluxPipeline")
    expected = image(pipe, "flux")

    def attentions() -> int:
        reset_status()
        assert psnr(image(pipe, "flux"), expected) > 90
        return status().kernels.get("attention", 0)

    try:
        optimize(pipe.transformer)
        assert attentions() > 0
        pipe.transformer.set_attention_backend("_native_math")
        assert attentions() == 0
        pipe.transformer.reset_attention_backend()
        assert attentions() == 0  # the process's
        registry.set_active_backend(native)
        assert attentions() > 0
        pipe.transformer.fuse_qkv_projections()
        assert attentions() == 0
        optimize(pipe.transformer)
        assert ("FluxAttention", "its projections are fused") in status().not_replaced
        pipe.transformer.unfuse_qkv_projections()
        custom = Custom()
        pipe.transformer.transformer_blocks[0].attn.set_processor(custom)
        reset_status()
        optimize(pipe.transformer)
        assert ("FluxAttention", "its processor is Custom") in status().not_replaced
        assert pipe.transformer.transformer_blocks[0].attn.processor is custom
    finally:
        restore(pipe)


@torch.no_grad()
def test_compiles_as_one_graph() -> None:
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(2, 2, 4),
    ).eval()  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 6, 4), "encoder_hidden_states": torch.randn(1, 3, 8),
        "pooled_projections": torch.randn(1, 8), "timestep": torch.tensor([0.5]),
        "img_ids": torch.randn(6, 3), "txt_ids": torch.zeros(3, 3), "return_dict": False,
    }  # fmt: skip
    expected = model(**inputs)[0]
    compiled = torch.compile(optimize(model), fullgraph=True, backend="aot_eager")
    reset_status()
    torch.testing.assert_close(compiled(**inputs)[0], expected)
    assert status().kernels.keys() >= MODULATED


class Custom:
    def __call__(self, attn: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return hidden_states


def test_a_scale_for_each_token_runs_in_torch() -> None:
    x, scale = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    y = operators.adaptive_norm(x, scale, None, 1e-5)
    assert status().fallbacks == {("adaptive_norm", "a scale, shift or gate of another shape"): 1}
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (8,)) * scale)


def test_a_transformer_of_another_family_is_refused_and_left_as_it_was() -> None:
    torch.manual_seed(0)
    other = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8, freq_dim=8, ffn_dim=16,
        num_layers=1,
    )  # fmt: skip
    before = [type(module) for module in other.modules()]
    with pytest.raises(InputError, match=r"^WanTransformer3DModel is not supported: optimize pipe.vae alone\.$"):
        optimize(SimpleNamespace(components={"transformer": other}))
    assert [type(module) for module in other.modules()] == before
