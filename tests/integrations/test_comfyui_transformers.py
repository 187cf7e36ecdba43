"""Diffusion transformers as ComfyUI's models, on stubs; scripts/checks/comfyui_transformers.py has its own nets."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sd_ort.checkpoints.presets import PRESETS
from sd_ort.checkpoints.transformer_layouts import RowSlice, join_rows, row_slices, split_rows
from sd_ort.core.errors import InputError
from sd_ort.integrations.denoiser import DenoiserRunner
from sd_ort.integrations.models import TorchComponentSessions
from sd_ort.pipelines import transformer_z_image
from sd_ort.pipelines.transformer_krea2 import Krea2Embeddings
from sd_ort.pipelines.transformer_pipelines import pack
from sd_ort.pipelines.transformer_qwen_image import Embeddings, positions
from sd_ort.stages import optimize

pytestmark = pytest.mark.usefixtures("one_thread")

QKV = "double_blocks.0.img_attn.qkv.weight"
LAST = "final_layer.adaLN_modulation.1.weight"
# Of `demo-dit`, and a name that it lacks.
SHAPES = {QKV: (576, 192), LAST: (384, 192), "img_in.bias": (192,), "distilled_guidance_layer.weight": (1, 1)}


class Net:
    """A net of ComfyUI's with weights of `SHAPES`."""

    def __init__(self, **config: Any) -> None:
        self.config, self.patch_size, self.params = config, config.get("patch_size", 2), types.SimpleNamespace(**config)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: torch.empty(shape, device="meta") for name, shape in SHAPES.items()}


class QwenNet(Net):
    def process_img(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Size]:
        padded = padded_to_patches(x[:, :, 0])
        ids = positions(padded.shape[2] // 2, padded.shape[3] // 2)
        tokens = torch.from_numpy(pack(padded.numpy()))
        return tokens, torch.from_numpy(ids)[None], padded[:, :, None].shape


class Krea2Net(Net):
    patch = 2

    def process_img(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        padded = padded_to_patches(x)
        rows, columns = padded.shape[2] // 2, padded.shape[3] // 2
        tokens = torch.from_numpy(pack(padded.numpy()))
        return tokens, pos_ids_x(0, rows, columns, 1, None).expand(len(x), -1, -1), rows, columns


class Description:
    """A class of comfy.supported_models."""

    def __init__(self, unet_config: dict[str, Any]) -> None:
        self.unet_config, self.sampling_settings = dict(unet_config), dict[str, Any]()
        self.latent_format = types.SimpleNamespace(scale_factor=1.0, shift_factor=0.0, latent_channels=16)


class BaseModel:
    def __init__(self, description: Any, model_type: Any = None) -> None:
        self.description, self.model_type = description, model_type


def padded_to_patches(x: torch.Tensor, patch_size: Any = (2, 2)) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2), mode="circular")


def pos_ids_x(first: int, rows: int, columns: int, batch: int, device: Any, **_: Any) -> torch.Tensor:
    grid = torch.full((rows, columns, 3), float(first))
    grid[..., 1], grid[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)
    return grid.reshape(1, -1, 3)


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module on stubs of ComfyUI."""
    descriptions = {name: type(name, (Description,), {}) for name in ("SD3", "Flux", "FluxSchnell", "Flux2", "Krea2")}
    content: dict[str, dict[str, Any]] = {
        "ldm.common_dit": {"pad_to_patch_size": padded_to_patches},
        "ldm.flux.model": {"Flux": Net},
        "ldm.krea2.model": {"SingleStreamDiT": Krea2Net},
        "ldm.lumina.model": {"NextDiT": type("NextDiT", (Net,), {}), "pos_ids_x": pos_ids_x},
        "ldm.modules.diffusionmodules.mmdit": {"OpenAISignatureMMDITWrapper": Net},
        "ldm.qwen_image.model": {"QwenImageTransformer2DModel": QwenNet},
        "model_base": dict.fromkeys(("SD3", "Flux", "Flux2", "QwenImage", "Lumina2", "Krea2"), BaseModel)
        | {"ModelType": types.SimpleNamespace(FLOW="flow")},
        "ops": {"disable_weight_init": None},
        "supported_models": descriptions,
        "lora": {},
        "weight_adapter": {},
        "patcher_extension": {"CallbacksMP": types.SimpleNamespace(ON_LOAD=0, ON_PRE_RUN=1)},
    }
    monkeypatch.setitem(sys.modules, "comfy", types.ModuleType("comfy"))
    for path, names in content.items():
        parent = sys.modules["comfy"]
        for end in range(1, path.count(".") + 2):
            name = ".".join(["comfy", *path.split(".")[:end]])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
            setattr(parent, name.rpartition(".")[2], sys.modules[name])
            parent = sys.modules[name]
        parent.__dict__.update(names)
    yield importlib.import_module("sd_ort.integrations.comfyui.transformer")
    for name in [name for name in sys.modules if name.startswith("sd_ort.integrations.comfyui.")]:
        del sys.modules[name]  # they refer to the stubs


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Mapping[bool, TorchComponentSessions]:
    """Return the transformer of `demo-dit` by whether it is hoisted."""
    folder = tmp_path_factory.mktemp("comfyui")
    for hoist in (False, True):
        optimize("demo-dit", folder / str(hoist), target="cpu", components=["transformer"], hoist=hoist)
    return {hoist: TorchComponentSessions(folder / str(hoist), "cpu") for hoist in (False, True)}


class Recorded:
    """Components whose transformer returns its input; `inputs` are those of the last call."""

    def __init__(self, preset: str) -> None:
        self.preset, self.folder, self.weights_version = preset, Path(preset), 0
        self.inputs_seen: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name == "transformer"

    def config(self, name: str) -> dict[str, Any]:
        return dict(PRESETS[self.preset].models[name])

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def inputs(self, name: str) -> list[str]:
        return []


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[Recorded]:
    def predict(self: Any, sample: Any, timestep: Any, conditioning: Any, key: Any = None) -> torch.Tensor:
        self.models.inputs_seen = {**sample, **conditioning, "timestep": timestep, "key": key}
        return next(iter(sample.values())).clone()

    monkeypatch.setattr(DenoiserRunner, "predict", predict)
    return Recorded


def flux_inputs() -> dict[str, torch.Tensor]:
    """Return arguments of ComfyUI's `forward_orig` for two images of 4 x 3 patches, and random positions."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    ids = {name: torch.randint(0, 20, (1, n, 3), generator=generator).float().expand(2, -1, -1)
           for name, n in (("img_ids", 12), ("txt_ids", 7))}  # fmt: skip
    return {
        "img": normal(2, 12, 16),
        "txt": normal(2, 7, 128),
        "y": normal(2, 140),
        "timesteps": torch.full((2,), 0.4),
        **ids,
    }


def test_flux(transformers: Any, flux: Mapping[bool, TorchComponentSessions]) -> None:
    """ComfyUI's tokens and positions go through the graph, hoisted or not; a new size is a new prompt."""
    inputs = flux_inputs()
    feed = {
        "hidden_states": inputs["img"], "encoder_hidden_states": inputs["txt"], "timestep": torch.tensor([0.4]),
        "pooled_projections": inputs["y"][:, :128], **{name: inputs[name][0] for name in ("img_ids", "txt_ids")},
    }  # fmt: skip
    expected = flux[False].run("transformer", **feed)["out_hidden_states"]
    turned = flux[False].run("transformer", **{**feed, "img_ids": inputs["img_ids"][0].flip(1)})["out_hidden_states"]
    assert (turned - expected).norm() > 1e-3 * expected.norm(), "positions count for nothing"
    for models in flux.values():
        net = transformers.transformer_model(models).diffusion_model
        options = {"uuids": ["one"], "cond_or_uncond": [0]}
        for size, ids, result in (((8, 6), inputs["img_ids"], expected), ((6, 8), inputs["img_ids"].flip(2), turned)):
            net.size = size
            call = {**inputs, "img_ids": ids, "guidance": torch.ones(2), "transformer_options": options}
            actual = net.forward_orig(**call)
            torch.testing.assert_close(actual, result, rtol=0, atol=2e-5 * float(result.abs().max()))
        without = net.forward_orig(**{**inputs, "y": None, "transformer_options": {}})
        assert not torch.allclose(without, expected, rtol=1e-3), "the pooled prompt counts for nothing"


def test_model_of_flux(transformers: Any, flux: Mapping[bool, TorchComponentSessions]) -> None:
    """The description is that of schnell; weights have ComfyUI's names, and their rows those of the recipes."""
    model = transformers.transformer_model(flux[False])
    description = model.description
    assert (type(description).__name__, model.model_type) == ("FluxSchnell", "flow")
    config: dict[str, Any] = {
        "in_channels": 4,
        "out_channels": 4,
        "hidden_size": 192,
        "depth": 3,
        "depth_single_blocks": 6,
    }
    config |= {"axes_dim": [8, 12, 12], "disable_unet_model_creation": True, "dtype": torch.float32, "vec_in_dim": 128}
    assert config.items() <= description.unet_config.items()
    assert description.latent_format.latent_channels == 4
    wrapped = torch.nn.ModuleDict({"diffusion_model": model.diffusion_model})
    assert {name: tuple(tensor.shape) for name, tensor in wrapped.state_dict().items()} == {
        f"diffusion_model.{name}": shape for name, shape in SHAPES.items() if not name.startswith("distilled")
    }
    names = model.diffusion_model.names
    attention = "transformer_blocks.0.attn.to_"
    assert names[f"diffusion_model.{QKV}"] == tuple(
        RowSlice(f"{attention}{name}.weight", i * 192, (i + 1) * 192) for i, name in enumerate("qkv")
    )
    assert names[f"diffusion_model.{LAST}"] == (RowSlice("norm_out.linear.weight", swapped=True),)
    assert names["diffusion_model.img_in.bias"] == (RowSlice("x_embedder.bias"),)


def test_unsupported(transformers: Any, recorded: type[Recorded]) -> None:
    """Block patches, masks and other families are rejected by name, in one line."""
    net = transformers.FluxNet(recorded("flux-dev"), Net())
    inputs = flux_inputs()
    for more, message in (
        ({"control": {"input": [], "output": []}}, "a ControlNet is not in sd-ort's graph"),
        ({"attn_mask": torch.zeros(2, 19, 19)}, "an attention mask is not in sd-ort's graph"),
        ({"timestep_zero_index": [[12, 24]]}, "timestep 0 of reference images"),
        ({"transformer_options": {"patches_replace": {"dit": {}}}}, r"model's layers \(dit\)"),
    ):
        with pytest.raises(InputError, match=message):
            net.forward_orig(**{**inputs, **more})
    net.forward_orig(**inputs)  # and without them it runs
    other = recorded("krea2")
    other.config = lambda name: {"_class_name": "WanTransformer3DModel"}  # type: ignore[method-assign]
    with pytest.raises(InputError, match="do not run WanTransformer3DModel"):
        transformers.transformer_model(other)
    with pytest.raises(InputError, match="has num_layerwise_text_blocks = 2, this one 1"):
        transformers.transformer_model(recorded("krea2-tiny"))
    with pytest.raises(InputError, match="64 channels a head, this one 32"):
        transformers.transformer_model(recorded("sd35-medium-tiny"))
    large = transformers.Sd3Net(recorded("sd35-large"), Net())
    with pytest.raises(InputError, match="at most 3072 pixels a side"):
        large.forward(torch.zeros(1, 16, 8, 386), torch.ones(1), torch.zeros(1, 5, 4096), torch.zeros(1, 2048))


def test_sd3(transformers: Any, recorded: type[Recorded]) -> None:
    """Latents of an odd size are padded, and the prediction is cut."""
    models = recorded("sd35-large")
    net = transformers.Sd3Net(models, Net())
    x = torch.randn(2, 16, 5, 7, generator=torch.Generator().manual_seed(0))
    times, context, pooled = torch.full((2,), 300.0), torch.zeros(2, 5, 4096), torch.ones(2, 2048)
    assert torch.equal(net.forward(x, times, context, pooled, transformer_options={"uuids": [1]}), x)
    inputs = models.inputs_seen
    assert torch.equal(inputs["hidden_states"], padded_to_patches(x))
    assert inputs["hidden_states"].shape == (2, 16, 6, 8)
    assert torch.equal(inputs["pooled_projections"], pooled)
    assert (inputs["encoder_hidden_states"] is context, inputs["timestep"] is times) == (True, True)
    assert inputs["key"] == ((1,), (), 5, 7)


def test_qwen_image(transformers: Any, recorded: type[Recorded]) -> None:
    """Tokens and positions are those of our pipeline; tokens that the mask leaves out are dropped."""
    models = recorded("qwen-image")
    net = transformers.QwenImageNet(models, QwenNet())
    generator = torch.Generator().manual_seed(0)
    x, context = torch.randn(2, 16, 1, 8, 11, generator=generator), torch.randn(2, 6, 3584, generator=generator)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1]] * 2)
    for given_mask, tokens in ((None, np.arange(6)), (mask, np.flatnonzero(mask[0]))):
        assert torch.equal(net._forward(x, torch.full((2,), 0.3), context, given_mask), x)
        text_ids, image_ids = Embeddings.position_ids(tokens, [(4, 6)])
        inputs = models.inputs_seen
        assert np.array_equal(inputs["txt_ids"].float().numpy(), text_ids)
        assert np.array_equal(inputs["img_ids"].numpy(), image_ids)
        assert torch.equal(inputs["encoder_hidden_states"], context[:, tokens])
    with pytest.raises(InputError, match="other tokens left out"):
        net._forward(x, torch.ones(2), context, torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]))
    with pytest.raises(InputError, match="a reference image is not in"):
        net._forward(x, torch.ones(2), context, ref_latents=[x])


def test_z_image(transformers: Any, recorded: type[Recorded]) -> None:
    """All inputs are those of our pipeline, and the sign is ComfyUI's."""
    models = recorded("z-image-turbo")
    net = transformers.ZImageNet(models, Net())
    generator = torch.Generator().manual_seed(0)
    x, context = torch.randn(2, 16, 10, 14, generator=generator), torch.randn(2, 37, 2560, generator=generator)
    assert torch.equal(net._forward(x, torch.full((2,), 0.25), context, num_tokens=37), -x)
    ((_, expected),) = transformer_z_image.token_groups(list(context.numpy()), 5, 7)
    expected["hidden_states"] = transformer_z_image.pad_tokens(transformer_z_image.patches(x.numpy()))
    expected["timestep"] = np.full(2, 0.75, np.float32)
    inputs = models.inputs_seen
    assert inputs.keys() - {"key"} == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(inputs[name].numpy(), array), name
    with pytest.raises(InputError, match="an image embedding is not in"):
        net._forward(x, torch.ones(2), context, num_tokens=37, siglip_feats=[x])


@pytest.mark.parametrize("frames", [(), (1,)])
def test_krea2(transformers: Any, recorded: type[Recorded], frames: tuple[int, ...]) -> None:
    """Tokens and positions are those of our pipeline, the text's layers apart, and the mask is ignored."""
    models = recorded("krea2")
    net = transformers.Krea2Net(models, Krea2Net())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 16, *frames, 7, 10, generator=generator)
    context = torch.randn(2, 6, 12 * 2560, generator=generator)
    assert torch.equal(net._forward(x, torch.full((2,), 0.3), context, torch.zeros(2, 6)), x)
    inputs = models.inputs_seen
    text_ids, image_ids = Krea2Embeddings.position_ids(np.arange(6), [(4, 5)])
    assert np.array_equal(inputs["txt_ids"].numpy(), text_ids)
    assert np.array_equal(inputs["img_ids"].numpy(), image_ids)
    assert torch.equal(inputs["encoder_hidden_states"], context.reshape(2, 6, 12, 2560))
    with pytest.raises(InputError, match="a reference image is not in"):
        net._forward(x, torch.ones(2), context, ref_latents=[x])


def test_a_model_of_krea2(transformers: Any, recorded: type[Recorded]) -> None:
    """Sizes that ComfyUI's net derives are those of the published model; norms have its names."""
    theirs = transformers._krea2_config(recorded("krea2").config("transformer"))
    assert {name: theirs[name] for name in ("multiplier", "features", "kvheads", "txtdim", "channels")} == {
        "multiplier": 4, "features": 6144, "kvheads": 12, "txtdim": 2560, "channels": 16,
    }  # fmt: skip
    for name, value in (("intermediate_size", 16000), ("text_intermediate_size", 6000), ("axes_dims_rope", [8, 8, 8])):
        config = recorded("krea2").config("transformer") | {name: value}
        with pytest.raises(InputError, match=rf"ComfyUI's Krea 2 has {name} = .*, this one"):
            transformers._krea2_config(config)
    parts = row_slices(recorded("krea2").config("transformer"), ["blocks.3.attn.qknorm.qnorm.scale"])
    assert parts == {"blocks.3.attn.qknorm.qnorm.scale": (RowSlice("transformer_blocks.3.attn.norm_q.weight"),)}


def test_parts_of_joined_weights() -> None:
    """A joined matrix and its parts, and the halves of the last norm, are converted back and forth."""
    values = np.arange(21.0).reshape(7, 3)
    parts = (RowSlice("q", 0, 2), RowSlice("k", 2, 4), RowSlice("mlp", 4, None))
    split = split_rows(values, parts)
    assert {name: array[:, 0].tolist() for name, array in split.items()} == {
        "q": [0, 3],
        "k": [6, 9],
        "mlp": [12, 15, 18],
    }
    assert np.array_equal(join_rows(split, parts), values)
    norm = (RowSlice("norm", swapped=True),)
    assert split_rows(values[:6], norm)["norm"][:, 0].tolist() == [9, 12, 15, 0, 3, 6]
    assert np.array_equal(join_rows(split_rows(values[:6], norm), norm), values[:6])


@pytest.mark.parametrize("additive", [True, False])
def test_patches_of_a_joined_matrix(
    transformers: Any, flux: Mapping[bool, TorchComponentSessions], monkeypatch: pytest.MonkeyPatch, additive: bool
) -> None:
    """A patch of the key's rows alone changes the key; one of the whole matrix runs on the joined weights."""
    patches = importlib.import_module("sd_ort.integrations.comfyui.patches")
    models = flux[True]
    names = transformers.transformer_model(models).diffusion_model.names
    key = f"diffusion_model.{QKV}"
    originals = [models.original_weight("transformer", part.module) for part in names[key]]
    change = torch.randn(192, 192, generator=torch.Generator().manual_seed(0))

    def calculate_weight(_: Any, weight: torch.Tensor, name: str) -> torch.Tensor:
        if not additive:
            assert np.array_equal(weight.numpy(), np.concatenate(originals))
            return 1.5 * weight
        weight[192:384] += change
        return weight

    monkeypatch.setattr(sys.modules["comfy.lora"], "calculate_weight", calculate_weight, raising=False)
    callbacks: list[Any] = []
    patcher = types.SimpleNamespace(
        patches={key: [(1.0, ("diff", None), 1.0 if additive else 1.5, None, None)]},
        patches_uuid="one",
        model=types.SimpleNamespace(state_dict=lambda: {key: torch.empty(SHAPES[QKV], device="meta")}),
        add_callback=lambda _, call: callbacks.append(call),
    )
    patches.apply_patches_on_load(patcher, models, "transformer", names)
    applied: list[dict[str, np.ndarray]] = []
    monkeypatch.setattr(models, "set_weight_deltas", lambda component, deltas: applied.append(deltas))
    callbacks[0](patcher)
    (deltas,) = applied
    if additive:
        assert list(deltas) == ["transformer_blocks.0.attn.to_k.weight"]
        assert np.array_equal(deltas["transformer_blocks.0.attn.to_k.weight"], change.numpy())
        return
    assert list(deltas) == [part.module for part in names[key]]
    for delta, original in zip(deltas.values(), originals, strict=True):
        np.testing.assert_allclose(delta, 0.5 * original, rtol=1e-4, atol=1e-6)
