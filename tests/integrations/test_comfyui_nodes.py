"""ComfyUI's nodes against stubs of its interfaces (V3, 0.33.0); scripts/checks/comfyui.py runs the real one."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sd_ort.checkpoints.transformer_layouts import RowSlice
from sd_ort.core.errors import InputError
from sd_ort.integrations.application_installers import PACKAGE_FOLDER
from sd_ort.integrations.comfyui import comfy_entrypoint
from sd_ort.integrations.models import TorchComponentSessions


def module(name: str, **content: Any) -> types.ModuleType:
    stub = types.ModuleType(name)
    stub.__dict__.update(content)
    return stub


class SocketType:
    """io.Combo, io.Model, ...: factories of inputs and outputs."""

    def __init__(self, name: str) -> None:
        self.Input = lambda id, **options: types.SimpleNamespace(kind=name, id=id, **options)
        self.Output = lambda display_name=None: types.SimpleNamespace(kind=name)


class Base:
    def __init__(self, *_: Any, **__: Any) -> None: ...


SOCKET_TYPES = {
    name: SocketType(name) for name in ("Combo", "String", "Boolean", "Model", "Clip", "Vae", "Latent", "ControlNet")
}


@pytest.fixture
def comfy(small_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stub the modules that the nodes import; yield ComfyUI's models folder, which has one pipeline folder."""
    paths = {"checkpoints": ([], set())}
    folder_paths = module(
        "folder_paths",
        models_dir=str(tmp_path),
        folder_names_and_paths=paths,
        add_model_folder_path=lambda kind, path: paths.update({kind: ([path], set())}),
        get_folder_paths=lambda kind: paths[kind][0],
        get_filename_list=lambda kind: ["a.safetensors", "b.ckpt"],
        get_full_path=lambda kind, name: None,
    )
    io = types.SimpleNamespace(
        ComfyNode=object,
        Schema=lambda **fields: types.SimpleNamespace(**fields),
        NodeOutput=lambda *outputs: types.SimpleNamespace(result=outputs),
        **SOCKET_TYPES,
    )
    utils = module("comfy.utils", ProgressBar=lambda total: types.SimpleNamespace(update=lambda by: None))
    modules = {
        "folder_paths": folder_paths,
        "comfy": module("comfy", utils=utils),
        "comfy.utils": utils,
        "comfy_api": module("comfy_api"),
        "comfy_api.latest": module("comfy_api.latest", ComfyExtension=Base, io=io),
        "comfy.model_base": module("comfy.model_base", SDXL=Base, SDXLRefiner=Base, BaseModel=Base),
        "comfy.model_management": module("comfy.model_management"),
        "comfy.supported_models": module("comfy.supported_models"),
        "comfy.sd": module("comfy.sd", CLIP=Base, VAE=Base),
        "comfy.sd1_clip": module("comfy.sd1_clip", SDClipModel=Base),
        "comfy.sdxl_clip": module("comfy.sdxl_clip", SDXLClipModel=Base, SDXLTokenizer=Base),
        "comfy.controlnet": module("comfy.controlnet", ControlNet=Base),
        "comfy.model_patcher": module("comfy.model_patcher", ModelPatcher=Base),
        "comfy.lora": module("comfy.lora"),
        "comfy.weight_adapter": module("comfy.weight_adapter"),
        "comfy.patcher_extension": module("comfy.patcher_extension", CallbacksMP=Base),
    }
    for name, content in modules.items():
        monkeypatch.setitem(sys.modules, name, content)
        if name.startswith("comfy."):
            setattr(modules["comfy"], name.removeprefix("comfy."), content)
    (tmp_path / "sd_ort").mkdir()
    (tmp_path / "sd_ort" / "tiny").symlink_to(small_export, target_is_directory=True)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("sd_ort.integrations.comfyui.")]:
        del sys.modules[name]  # they refer to the stubs


def test_nodes_and_workflows(comfy: Path) -> None:
    """The inputs of sd-ort's nodes in the workflows are those of their schemas, in that order."""
    extension = asyncio.run(comfy_entrypoint())
    schemas = {node.define_schema().node_id: node.define_schema() for node in asyncio.run(extension.get_node_list())}
    assert schemas["SdOrtLoadModel"].inputs[0].options == ["tiny", "a.safetensors"]
    assert [output.kind for output in schemas["SdOrtLoadModel"].outputs] == ["Model", "Clip", "Vae"]
    seen = set()
    for path in (PACKAGE_FOLDER / "comfyui" / "workflows").glob("*.json"):
        for node in json.loads(path.read_text())["nodes"]:
            if schema := schemas.get(node["type"]):
                seen.add(node["type"])
                assert [socket["name"] for socket in node["inputs"]] == [socket.id for socket in schema.inputs]
                assert [output["type"] for output in node["outputs"]] == [
                    {"ControlNet": "CONTROL_NET"}.get(output.kind, output.kind.upper()) for output in schema.outputs
                ]
    assert seen == {"SdOrtLoadModel", "SdOrtLoadControlNet"}


def test_errors_have_one_line(comfy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = importlib.import_module("sd_ort.integrations.comfyui.nodes")
    for call, message in (
        (lambda: nodes.Convert.execute("a.safetensors", "../up", "auto", True), "no name of a folder"),
        (lambda: nodes.Convert.execute("a.safetensors", "new", "auto", True), "neither in models/checkpoints nor"),
        (lambda: nodes.LoadModel.execute("tiny", "rocm"), "rocm"),
        (lambda: nodes.LoadControlNet.execute("tiny", "cpu"), "has no controlnet"),
        (lambda: nodes.LoadDiffusionModel.execute("tiny", "rocm"), "rocm"),
    ):
        with pytest.raises(RuntimeError, match=message) as caught:
            call()
        assert str(caught.value).startswith("sd-ort: ")
        assert "\n" not in str(caught.value)
    assert [output.kind for output in nodes.LoadDiffusionModel.define_schema().outputs] == ["Model"]
    other_model = types.SimpleNamespace(model=types.SimpleNamespace(diffusion_model=torch.nn.Identity()))
    assert nodes.Info.execute(other_model).result == ("this MODEL is not sd-ort's",)
    monkeypatch.setattr(nodes, "TorchComponentSessions", lambda *_: {"transformer"})
    with pytest.raises(RuntimeError, match="use Load sd-ort diffusion model"):
        nodes.LoadModel.execute("tiny", "cpu")


def test_diffusion_model(comfy: Path, small_export: Path) -> None:
    """ComfyUI's call runs the folder's UNet; unsupported arguments raise; LoRAs find the weights by name."""
    model = importlib.import_module("sd_ort.integrations.comfyui.model")
    models = TorchComponentSessions(small_export, "cpu")
    name = "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.weight"
    width = models.unet_config["cross_attention_dim"]
    theirs = "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"
    to_comfy = {name: theirs, "a weight that ComfyUI's UNet lacks": "other"}
    ours = model.DiffusionModel(models, to_comfy, {theirs: torch.empty(4, width, device="meta")})
    wrapped = torch.nn.ModuleDict({"diffusion_model": ours})
    (key,) = wrapped.state_dict()
    assert ours.names == {key: (RowSlice(name),)}
    assert tuple(wrapped.state_dict()[key].shape)[1] == width
    generator = torch.Generator().manual_seed(0)
    x, context = torch.randn(2, 4, 8, 8, generator=generator), torch.randn(2, 77, width, generator=generator)
    times = torch.full((2,), 7.0)
    options = {"uuids": ["u", "v"], "cond_or_uncond": [0, 1], "patches": {}}
    feed = {"sample": x, "timestep": times[:1], "encoder_hidden_states": context}
    with torch.inference_mode():
        prediction = ours(x, times, context=context, control=None, transformer_options=options)
    assert torch.equal(prediction, models.run("unet", **feed)["out_sample"])
    nodes = importlib.import_module("sd_ort.integrations.comfyui.nodes")
    patcher = types.SimpleNamespace(model=types.SimpleNamespace(diffusion_model=ours))
    assert "median of 1" in nodes.Info.execute(patcher).result[0]
    for more, message in (
        ({"transformer_options": {"patches": {"output_block_patch": []}}}, r"layers \(output_block_patch\)"),
        ({"control": {"input": [x], "output": [], "middle": []}}, "T2I-Adapters"),
        ({"control": {"output": [x] * 12, "middle": [x]}}, "takes no ControlNet"),
    ):
        with pytest.raises(InputError, match=message):
            ours(x, times, context=context, **more)


def test_free_memory_is_queried_once_per_image(comfy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch size, and with it the captured graph, stays the same in all steps."""
    answers = iter((3, 2, 1))
    monkeypatch.setattr(Base, "pre_run", lambda self: None, raising=False)
    monkeypatch.setattr(Base, "get_free_memory", lambda self, device: next(answers), raising=False)
    patcher = importlib.import_module("sd_ort.integrations.comfyui.patcher").GraphPatcher()
    free_bytes = []
    for _ in range(2):
        patcher.pre_run()
        free_bytes.append([patcher.get_free_memory(torch.device("cpu")) for _ in range(3)])
    assert free_bytes == [[3] * 3, [2] * 3]


def test_prompts_are_on_the_samplers_device(comfy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all model families: ComfyUI would concatenate them on the CPU in every step."""
    model = importlib.import_module("sd_ort.integrations.comfyui.model")
    conditioning = {"c_crossattn": torch.zeros(1, 77, 8), "y": torch.zeros(1, 4), "frames": 3}
    conds = {name: types.SimpleNamespace(cond=value) for name, value in conditioning.items()}
    monkeypatch.setattr(Base, "extra_conds", lambda self, **_: conds, raising=False)
    for cls in (model._Model, model._SdxlModel, model._SdxlRefinerModel):
        moved = cls.extra_conds(cls.__new__(cls), device=torch.device("meta"))
        assert [getattr(moved[name].cond, "device", None) for name in conditioning] == [torch.device("meta")] * 2 + [
            None
        ]


@pytest.mark.parametrize("kind", ["lora", "lora dora", "loha", "loha dora", "lokr", "lokr dora", "diff"])
def test_patches(comfy: Path, small_export: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """ComfyUI computes a patch on zeros if it is a sum, else on the original weight; the sessions run with it."""
    patches = importlib.import_module("sd_ort.integrations.comfyui.patches")
    models = TorchComponentSessions(small_export, "cpu")
    name = "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.weight"
    original = torch.tensor(models.original_weight("unet", name))
    generator = torch.Generator().manual_seed(0)
    difference = torch.randn(original.shape, generator=generator)
    magnitude = torch.rand(len(original), 1, generator=generator) if kind.endswith("dora") else None
    length = {"lora": 6, "loha": 8, "lokr": 9}.get(kind.split()[0], 0)  # of the adapters' tuples, as ComfyUI has them
    places = {"lora": 4, "loha": 7, "lokr": 8}
    values: list[Any] = [None] * length
    if length:
        values[places[kind.split()[0]]] = magnitude
    adapter: Any = types.SimpleNamespace(name=kind.split()[0], weights=tuple(values)) if length else ("diff", None)
    starts = []

    def calculate_weight(patches: Any, weight: torch.Tensor, key: str) -> torch.Tensor:
        starts.append(weight.clone())
        strength = patches[0][0]
        total = weight + difference
        if magnitude is None:
            return weight + strength * difference
        return weight + strength * (total * magnitude / total.norm(dim=1, keepdim=True) - weight)

    monkeypatch.setattr(sys.modules["comfy.lora"], "calculate_weight", calculate_weight, raising=False)
    callbacks: list[Any] = []
    calls = types.SimpleNamespace(ON_LOAD=0, ON_PRE_RUN=1)
    monkeypatch.setattr(patches, "CallbacksMP", calls)
    patcher = types.SimpleNamespace(
        patches={"key": [(0.7, adapter, 1.0, None, None)]},
        patches_uuid="one",
        model=types.SimpleNamespace(state_dict=lambda: {"key": original}),
        add_callback=lambda _, call: callbacks.append(call),
    )
    patches.apply_patches_on_load(patcher, models, "unet", {"key": (RowSlice(name),)})
    applied = []
    monkeypatch.setattr(models, "set_weight_deltas", lambda component, deltas: applied.append(deltas))
    for callback in callbacks:
        callback(patcher)
    expected = calculate_weight([(0.7,)], original.clone(), "key") - original
    assert len(applied) == 1
    torch.testing.assert_close(torch.from_numpy(applied[0][name]), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(starts[0], torch.zeros_like(original)) == (magnitude is None)
