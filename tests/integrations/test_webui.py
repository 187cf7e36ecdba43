"""The WebUI extension against stubs of the WebUIs' interfaces.

`scripts/checks/webui_page.py` runs it in AUTOMATIC1111's WebUI, its AMD fork and Forge, started whole.
"""

from __future__ import annotations

import os
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import MANIFEST
from sd_ort.integrations.models import TorchComponentSessions
from sd_ort.integrations.webui import extension
from sd_ort.integrations.webui.unet import WebUNet, decode_sinusoidal_embedding
from tests.integrations.test_comfyui_nodes import module


class SdUnetOption:
    model_name = None
    label = None


class SdUnet(torch.nn.Module):
    def activate(self) -> None: ...

    def deactivate(self) -> None: ...


class OriginalUNet(torch.nn.Module):
    """The WebUI's own UNet."""

    def forward(self, x: torch.Tensor, timesteps: Any, context: Any, **_: Any) -> torch.Tensor:
        return torch.full_like(x, 42.0)


class KModel(torch.nn.Module):
    """The part of Forge's KModel that calls `diffusion_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.diffusion_model = OriginalUNet()

    def apply_model(
        self, x: Any, t: Any, c_crossattn: Any, control: Any = None, transformer_options: Any = None
    ) -> Any:
        options = transformer_options or {}
        return self.diffusion_model(x, t, context=c_crossattn, control=control, transformer_options=options)


class Patcher:
    """The part of Forge's UnetPatcher that the extension uses."""

    def __init__(self) -> None:
        self.model, self.lora_patches, self.wrapper = KModel(), dict[Any, Any](), None

    def clone(self) -> Patcher:
        clone = Patcher()
        clone.model, clone.lora_patches = self.model, dict(self.lora_patches)
        return clone

    def set_model_unet_function_wrapper(self, wrapper: Any) -> None:
        self.wrapper = wrapper


@pytest.fixture
def root(small_export: Path, tmp_path: Path) -> Path:
    """A WebUI's models folder with one pipeline folder and one other folder."""
    (tmp_path / "sd_ort" / "other").mkdir(parents=True)
    (tmp_path / "sd_ort" / "tiny").symlink_to(small_export, target_is_directory=True)
    assert (tmp_path / "sd_ort" / "tiny" / MANIFEST).is_file()
    return tmp_path


@pytest.fixture
def webui(root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stubs of a WebUI's modules; `callbacks` are the arguments of on_list_unets."""
    callbacks: list[Any] = []
    model = types.SimpleNamespace(model=types.SimpleNamespace(diffusion_model=OriginalUNet()))
    networks = module("networks", loaded_networks=[])
    networks.__spec__ = types.SimpleNamespace(name="networks")  # type: ignore[assignment]
    stubs = {
        "modules": module("modules"),
        "modules.paths": module("modules.paths", models_path=str(root)),
        "modules.script_callbacks": module("modules.script_callbacks", on_list_unets=callbacks.append),
        "modules.sd_unet": module("modules.sd_unet", SdUnetOption=SdUnetOption, SdUnet=SdUnet, current_unet=None),
        "modules.shared": module("modules.shared", sd_model=model),
        "networks": networks,
    }
    for name, content in stubs.items():
        monkeypatch.setitem(sys.modules, name, content)
    return types.SimpleNamespace(
        callbacks=callbacks, **{name.split(".")[-1]: content for name, content in stubs.items()}
    )


@pytest.fixture(scope="module")
def call_inputs(small_export: Path) -> dict[str, torch.Tensor]:
    """Arguments of a WebUI's UNet call, and the expected prediction."""
    models = TorchComponentSessions(small_export, "cpu")
    generator = torch.Generator().manual_seed(0)
    width = models.unet_config["cross_attention_dim"]
    inputs = {
        "x": torch.randn(2, 4, 8, 8, generator=generator),
        "context": torch.randn(2, 77, width, generator=generator),
    }
    feed = {"sample": inputs["x"], "timestep": torch.full((1,), 7.0), "encoder_hidden_states": inputs["context"]}
    return {**inputs, "timesteps": torch.full((2,), 7.0), "expected": models.run("unet", **feed)["out_sample"]}


def test_webui(webui: Any, call_inputs: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]) -> None:
    """Each folder is an option; its UNet runs; the WebUI's UNet runs for unsupported calls, with a message."""
    assert extension.host() == "webui"
    assert extension.hook() is None
    unets: list[Any] = []
    webui.callbacks[0](unets)
    assert [(option.label, option.model_name) for option in unets] == [("[sd-ort] tiny", "tiny")]
    unet = webui.sd_unet.current_unet = unets[0].create_unet()
    assert isinstance(unet, SdUnet)
    unet.activate()
    x, timesteps, context = (call_inputs[name] for name in ("x", "timesteps", "context"))
    assert torch.equal(unet.forward(x, timesteps, context), call_inputs["expected"])
    assert not capsys.readouterr().out
    fallback = unet.forward(x, timesteps, context, y=torch.zeros(2, 5))
    assert torch.equal(fallback, torch.full_like(x, 42.0))
    assert webui.sd_unet.current_unet is unet
    message = capsys.readouterr().out
    assert message.startswith("sd-ort: the checkpoint is an SDXL one")
    assert message.count("\n") == 1
    unet.deactivate()
    assert torch.equal(unet.forward(x, timesteps, context), torch.full_like(x, 42.0))


@pytest.fixture
def lora(tmp_path: Path, call_inputs: dict[str, torch.Tensor]) -> Path:
    name = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k"
    width = call_inputs["context"].shape[-1]
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.lora_down.weight": torch.randn(2, width, generator=generator),
        f"{name}.lora_up.weight": torch.randn(32, 2, generator=generator),
    }
    save_file(tensors, tmp_path / "lora.safetensors")
    return tmp_path / "lora.safetensors"


def test_webui_loras(webui: Any, call_inputs: dict[str, torch.Tensor], lora: Path) -> None:
    """The LoRAs of the prompt's tags are applied at their scales, and removed without the tags or after an error."""
    other = Path(shutil.copy(lora, lora.with_stem("other")))
    unet = extension.webui_unet(extension.models_root() / "tiny")
    unet.activate()
    call = [call_inputs[name] for name in ("x", "timesteps", "context")]
    net = types.SimpleNamespace(network_on_disk=types.SimpleNamespace(filename=str(lora)), unet_multiplier=0.8)
    webui.networks.loaded_networks.append(net)
    prediction = unet.forward(*call)
    assert not torch.allclose(prediction, call_inputs["expected"], atol=1e-4)
    save_file({name: 2 * tensor for name, tensor in load_file(lora).items()}, lora.with_suffix(".new"))
    lora.with_suffix(".new").replace(lora)
    replaced = unet.forward(*call)
    assert not torch.allclose(replaced, prediction, atol=1e-4), "the file was replaced, and the former one is in use"
    lora.unlink()
    assert torch.equal(unet.forward(*call), replaced)
    webui.networks.loaded_networks.clear()
    assert torch.equal(unet.forward(*call), call_inputs["expected"])
    gone = types.SimpleNamespace(network_on_disk=types.SimpleNamespace(filename="gone.safetensors"), unet_multiplier=1)
    another = types.SimpleNamespace(network_on_disk=types.SimpleNamespace(filename=str(other)), unet_multiplier=1)
    webui.networks.loaded_networks[:] = [another, gone]
    assert torch.equal(unet.forward(*call), torch.full_like(call[0], 42.0))
    webui.networks.loaded_networks.clear()
    assert torch.equal(unet.forward(*call), call_inputs["expected"]), "a LoRA of the call that failed is in use"


def host_network(weight: torch.Tensor, tensors: dict[str, torch.Tensor], strength: float) -> torch.Tensor:
    """Return the difference that AUTOMATIC1111's, Forge's and ComfyUI's networks add: DoRA's is scaled as a whole."""
    if "lora_up.weight" in tensors:
        down = tensors["lora_down.weight"]
        difference, rank = tensors["lora_up.weight"] @ down, len(down)
    elif "hada_w1_a" in tensors:
        first, second = (tensors[f"hada_w{n}_a"] @ tensors[f"hada_w{n}_b"] for n in (1, 2))
        difference, rank = first * second, len(tensors["hada_w1_b"])
    elif "diff" in tensors:
        difference, rank = tensors["diff"], 0
    else:
        right = tensors["lokr_w2_a"] @ tensors["lokr_w2_b"]
        difference, rank = torch.kron(tensors["lokr_w1"], right), len(tensors["lokr_w2_b"])
    if rank and "alpha" in tensors:
        difference = difference * tensors["alpha"] / rank
    if (magnitude := tensors.get("dora_scale")) is not None:
        total = weight + difference
        difference = total * magnitude / total.norm(dim=0 if len(magnitude) == 1 else 1, keepdim=True) - weight
    return difference * strength


def host_tensors(kind: str, rows: int, columns: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return the tensors of one module of a LoRA file, rank 4 and alpha 2."""
    shapes = {
        "lora": {"lora_up.weight": (rows, 4), "lora_down.weight": (4, columns)},
        "loha": {"hada_w1_a": (rows, 4), "hada_w1_b": (4, columns), "hada_w2_a": (rows, 4), "hada_w2_b": (4, columns)},
        "lokr": {"lokr_w1": (4, 4), "lokr_w2_a": (rows // 4, 4), "lokr_w2_b": (4, columns // 4)},
        "full": {"diff": (rows, columns)},
    }[kind.split()[0]]
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    tensors["alpha"] = torch.tensor(2.0)
    if "dora" in kind:
        shape = (1, columns) if kind.endswith("columns") else (rows, 1)
        tensors["dora_scale"] = torch.rand(shape, generator=generator) + 0.5
    return tensors


KINDS = ["lora", "loha", "lokr", "full", "lora dora rows", "lora dora columns", "loha dora rows", "lokr dora columns"]


@pytest.fixture(scope="module")
def unet_with_networks(small_export: Path) -> WebUNet:
    """A U-Net that uses no networks between tests."""
    return WebUNet(small_export, "cpu")


@pytest.mark.parametrize("second", [None, "lora", "lora dora rows"])
@pytest.mark.parametrize("first", KINDS)
def test_networks(unet_with_networks: WebUNet, tmp_path: Path, first: str, second: str | None) -> None:
    """Networks change a weight as the WebUI's do, one after the other: DoRA's norm is that of the changed weight."""
    unet = unet_with_networks
    name = "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.weight"
    original = torch.tensor(unet.models.original_weight("unet", name))
    weight, generator, tags = original, torch.Generator().manual_seed(0), []
    for kind, strength in ((first, 0.7), (second, -0.4)):
        if kind is None:
            continue
        tensors = host_tensors(kind, *original.shape, generator)
        path = tmp_path / f"{len(tags)}.safetensors"
        module_name = f"lora_unet_{name.removesuffix('.weight').replace('.', '_')}"
        save_file({f"{module_name}.{key}": tensor for key, tensor in tensors.items()}, path)
        weight = weight + host_network(weight, tensors, strength)
        tags.append((str(path), strength))
    unet.use_loras(tags)
    assert unet.models.loras is not None
    delta = unet.models.loras.deltas(unet.models.lora_state.effective())["unet"][name]
    torch.testing.assert_close(torch.from_numpy(delta.dense()), weight - original, rtol=1e-4, atol=1e-5)
    unet.use_loras([])
    assert not unet.models.loras.deltas(unet.models.lora_state.effective()).get("unet")


def test_a_tag_with_dyn(webui: Any) -> None:
    webui.networks.loaded_networks.append(types.SimpleNamespace(dyn_dim=4))
    with pytest.raises(InputError, match="dyn cuts the rank"):
        extension.webui_loras()


def test_forge(
    webui: Any, call_inputs: dict[str, torch.Tensor], lora: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The wrapper runs while the checkbox is on; unsupported controls and patches fall back to Forge's UNet."""
    widget = lambda **options: types.SimpleNamespace(**options)  # noqa: E731

    class Accordion:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: Any) -> None: ...

    class Script: ...

    forge = module("modules_forge")
    forge.__spec__ = types.SimpleNamespace(name="modules_forge")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "modules_forge", forge)
    monkeypatch.setitem(sys.modules, "gradio", module("gradio", Accordion=Accordion, Checkbox=widget, Dropdown=widget))
    monkeypatch.setitem(sys.modules, "modules.scripts", module("scripts", Script=Script, AlwaysVisible=object()))
    script = extension.hook()()  # type: ignore[misc]
    assert isinstance(script, Script)
    enabled, folder = script.ui(False)
    assert (enabled.value, folder.choices) == (False, ["tiny"])
    patcher = Patcher()
    p = types.SimpleNamespace(sd_model=types.SimpleNamespace(forge_objects=types.SimpleNamespace(unet=patcher)))
    script.process_before_every_sampling(p, False, "tiny")
    assert p.sd_model.forge_objects.unet is patcher
    patcher.lora_patches[(str(lora), 0.8, 1.0, False)] = {}
    for expect_lora in (True, False):
        p.sd_model.forge_objects.unet = patcher
        script.process_before_every_sampling(p, True, "tiny", x=None, noise=None)
        unet = p.sd_model.forge_objects.unet
        call = {
            "input": call_inputs["x"],
            "timestep": call_inputs["timesteps"],
            "c": {"c_crossattn": call_inputs["context"]},
        }
        prediction = unet.wrapper(unet.model.apply_model, call)
        assert torch.equal(prediction, call_inputs["expected"]) != expect_lora
        patcher.lora_patches.clear()
    assert isinstance(patcher.model.diffusion_model, OriginalUNet)
    call["c"]["transformer_options"] = {"patches_replace": {"attn2": {}}}
    assert torch.equal(unet.wrapper(unet.model.apply_model, call), torch.full_like(call_inputs["x"], 42.0))
    assert "changes the model's layers (attn2)" in capsys.readouterr().out
    shutil.copytree(extension.models_root() / "tiny", extension.models_root() / "copy")
    folders = []
    monkeypatch.setattr(extension, "WebUNet", lambda folder: folders.append(folder.name) or WebUNet(folder, "cpu"))
    for seconds in (0, 0, 1):
        os.utime(extension.models_root() / "copy" / MANIFEST, (seconds, seconds))
        script.process_before_every_sampling(p, True, "copy")
    assert folders == ["copy", "copy"], "a folder that was made again is opened again"
    shutil.rmtree(extension.models_root() / "copy")
    script.process_before_every_sampling(p, True, "copy")
    assert "copy: no such file or folder" in capsys.readouterr().out
    script.process_before_every_sampling(p, True, "not there")
    assert "sd-ort: " in capsys.readouterr().out


def test_reforge_loras() -> None:
    """The LoRAs are read from its Lora extension's text, not from the patcher; other changes of weights raise."""
    patcher = types.SimpleNamespace(patches={"a weight": []})
    model = types.SimpleNamespace(forge_objects=types.SimpleNamespace(unet=patcher))
    model.current_lora_hash = str([["a.safetensors", 0.8, 1.0], ["b.safetensors", -0.5, 0.0]])
    assert extension.forge_loras(model) == [("a.safetensors", 0.8), ("b.safetensors", -0.5)]
    model.current_lora_hash = str([])
    with pytest.raises(InputError, match="no LoRA tag changes the weights"):
        extension.forge_loras(model)
    patcher.patches.clear()
    assert extension.forge_loras(model) == []


def test_decode_sinusoidal_embedding() -> None:
    """SDXL's embeddings as computed by sgm and ComfyUI, also in half precision."""
    sizes = torch.tensor([[1024.0, 832, 0, 16, 1531, 4096], [16_000, 1, 999, 2, 3, 512]])
    frequencies = torch.exp(-torch.arange(128) / 128 * torch.log(torch.tensor(10_000.0)))
    angles = sizes[..., None] * frequencies
    embedded = torch.cat([angles.cos(), angles.sin()], -1).reshape(2, -1)
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(decode_sinusoidal_embedding(embedded.to(dtype).float(), 6, 256), sizes)
    with pytest.raises(InputError, match="cannot be decoded"):
        decode_sinusoidal_embedding(torch.randn(2, 6 * 256), 6, 256)


def test_a_folder_of_another_family(small_export: Path, call_inputs: dict[str, torch.Tensor]) -> None:
    unet, (x, timesteps, context) = (
        WebUNet(small_export, "cpu"),
        (call_inputs[n] for n in ("x", "timesteps", "context")),
    )
    with pytest.raises(InputError, match="prompts have 5 channels"):
        unet(x, timesteps, context[..., :5])
    with pytest.raises(InputError, match="UNet reads 9 channels, the folder's 4"):
        unet(torch.zeros(2, 9, 8, 8), timesteps, context)
