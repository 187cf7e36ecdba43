"""Checkpoints in one file: equal to diffusers' from_single_file, recognized by their tensors, refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from cli_type import Cli, refusal
from safetensors.torch import load_file, save_file
from small_presets import mini

from scripts.fixtures import save_single_file
from sd_ort.checkpoints import base_pipeline
from sd_ort.checkpoints.checkpoint import Checkpoint
from sd_ort.checkpoints.detection import UNET_INPUT, detect_family
from sd_ort.checkpoints.diffusers_folder import open_folder
from sd_ort.checkpoints.open import CheckpointOptions, open_checkpoint
from sd_ort.checkpoints.presets import PRESETS, open_preset
from sd_ort.checkpoints.single_file import meta_tensors, open_single_file
from sd_ort.checkpoints.tensor_readers import is_finite
from sd_ort.core import pipeline_folder
from sd_ort.core.errors import InputError
from sd_ort.export.exporter import save_config

FAMILIES = ("sd15", "sd21", "sdxl", "sdxl-refiner", "sd15-inpaint")


def small(preset: str) -> str:
    """A preset of two resolutions; SD 2.1 keeps the width by which it is told from 1.5."""
    name = f"{preset}-one"
    PRESETS[name] = mini(PRESETS[f"{preset}-tiny"])
    if preset == "sd21":
        PRESETS[name].models["unet"]["cross_attention_dim"] = 1024
        PRESETS[name].models["text_encoder"]["hidden_size"] = 1024
    return name


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Preset -> (file, folder of configs without weights, as the hub's is fetched)."""
    root, saved = tmp_path_factory.mktemp("single"), {}

    def make(preset: str) -> tuple[Path, Path]:
        if preset not in saved:
            source = open_preset(small(preset), 3)
            base = root / preset
            base.mkdir()
            source.write_configs(base)
            models = {name: source.load(name) for name in source.configs}
            for name, model in models.items():
                save_config(model, base / name)
            saved[preset] = (save_single_file.save(models, root / f"{preset}.safetensors"), base)
        return saved[preset]

    return make


def equal(one: torch.nn.Module, other: torch.nn.Module) -> None:
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def models_in(file: Path, checkpoint: Checkpoint) -> set[str]:
    """Return the models whose weights are in the file."""
    return {name for name, model in checkpoint.models.items() if model.files == (file,)}


def streamed(source: Checkpoint, model: str, loaded: torch.nn.Module) -> None:
    """Each tensor read from the file by itself, as templates are filled, is that of the loaded model."""
    tensors = loaded.state_dict()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "load", lambda *_: pytest.fail("it was loaded whole"))
        read = source.read_tensors(model, tensors)
        assert [n for n, w in tensors.items() if not np.array_equal(read(n).astype(np.float32), w.numpy())] == []


@pytest.mark.parametrize("preset", FAMILIES)
def test_equals_its_source_pipeline(checkpoints: Callable, preset: str) -> None:
    file, base = checkpoints(preset)
    source = open_single_file(file, base)
    original = open_preset(f"{preset}-one", 3)
    assert models_in(file, source) == original.configs.keys()
    for name in original.configs:
        loaded = source.load(name)
        equal(loaded, original.load(name))
        streamed(source, name, loaded)
        assert {p.dtype for p in loaded.parameters()} == {torch.float32}
        assert all(torch.equal(b, dict(original.load(name).named_buffers())[n]) for n, b in loaded.named_buffers())


@pytest.mark.parametrize("preset", ["sd15", "sdxl"])
def test_equals_from_single_file(checkpoints: Callable, preset: str) -> None:
    import diffusers

    file, base = checkpoints(preset)
    source = open_single_file(file, base)
    for name, cls in (("unet", diffusers.UNet2DConditionModel), ("vae", diffusers.AutoencoderKL)):
        theirs = cls.from_single_file(str(file), config=str(base), subfolder=name, local_files_only=True)
        equal(source.load(name), theirs)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=lambda d: str(d).split(".")[1]
)
def test_storage_types_ema_and_foreign_keys(checkpoints: Callable, tmp_path: Path, dtype: torch.dtype) -> None:
    file, base = checkpoints("sd15")
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    ema = {f"model_ema.{i}": torch.zeros(1) for i in range(120)}
    save_file(tensors | ema | {"alphas_cumprod": torch.zeros(1000)}, tmp_path / "model.safetensors")
    source = open_single_file(tmp_path / "model.safetensors", base)
    loaded = source.load("unet").state_dict()
    expected = open_preset("sd15-one", 3).load("unet").state_dict()
    assert all(torch.equal(loaded[name], expected[name].to(dtype).float()) for name in expected)
    for name in ("unet", "vae"):
        streamed(source, name, source.load(name))
    stored = {
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
    }
    assert stored[dtype] in source.detection_note


@pytest.mark.parametrize(("scale_name", "rows"), [("scale_weight", False), ("weight_scale", True)])
def test_float8_with_scales(checkpoints: Callable, tmp_path: Path, scale_name: str, rows: bool) -> None:
    """Each weight is multiplied by its scale, one or one a row; scales of activations and marks are none of its."""
    file, base = checkpoints("sd15")
    tensors = load_file(file)
    stored, expected = {"model.diffusion_model.scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)}, {}
    for name, tensor in tensors.items():
        if name.startswith("model.") and name.endswith(".weight") and tensor.ndim > 1:
            scale = tensor.flatten(1).abs().amax(1) / 448 if rows else tensor.abs().amax().reshape(()) / 448
            shaped = scale.reshape(-1, *[1] * (tensor.ndim - 1))
            stored[name] = (tensor / shaped).to(torch.float8_e4m3fn)
            stored[f"{name.removesuffix('weight')}{scale_name}"] = scale.reshape(-1, 1) if rows else scale
            stored[f"{name.removesuffix('weight')}scale_input"] = torch.ones(1)
            expected[name] = stored[name].float() * shaped
        else:
            stored[name] = expected[name] = tensor
    save_file(stored, tmp_path / "scaled.safetensors")
    save_file(expected, tmp_path / "plain.safetensors")
    source, plain = (open_single_file(tmp_path / f"{name}.safetensors", base) for name in ("scaled", "plain"))
    assert "with scales" in source.detection_note
    for name in ("unet", "vae"):
        equal(source.load(name), plain.load(name))
        streamed(source, name, plain.load(name))


def diffusers_folder(tmp_path: Path) -> tuple[Path, Checkpoint]:
    """Write a diffusers folder of the checkpoint's preset with other random weights; return it and its source."""
    folder = tmp_path / "whole"
    folder.mkdir()
    source = open_preset("sd15-one", 4)
    source.write_configs(folder)
    for name in source.configs:
        source.load(name).save_pretrained(folder / name)
    return folder, source


def test_a_unet_without_the_prefix_of_a_whole_checkpoint(checkpoints: Callable, tmp_path: Path) -> None:
    file, _ = checkpoints("sd15")
    own = {n.removeprefix("model.diffusion_model."): t for n, t in load_file(file).items() if n.startswith("model.")}
    save_file(own, tmp_path / "unet.safetensors")
    folder, _ = diffusers_folder(tmp_path)
    mixed = open_single_file(tmp_path / "unet.safetensors", folder)
    assert models_in(tmp_path / "unet.safetensors", mixed) == {"unet"}
    equal(mixed.load("unet"), open_preset("sd15-one", 3).load("unet"))


def test_vae_and_encoders_from_elsewhere(checkpoints: Callable, tmp_path: Path) -> None:
    """Files without VAE or text encoder; --vae takes LDM's names, with and without prefix, and diffusers'."""
    file, base = checkpoints("sd15")
    tensors = load_file(file)
    save_file({n: t for n, t in tensors.items() if n.startswith("model.")}, tmp_path / "unet.safetensors")
    with pytest.raises(InputError, match="has no text encoder: give a whole"):
        open_single_file(tmp_path / "unet.safetensors", base)
    folder, source = diffusers_folder(tmp_path)
    mixed = open_single_file(tmp_path / "unet.safetensors", folder)
    assert models_in(tmp_path / "unet.safetensors", mixed) == {"unet"}
    equal(mixed.load("vae"), source.load("vae"))
    equal(mixed.load("unet"), open_preset("sd15-one", 3).load("unet"))
    own = {n.removeprefix("first_stage_model."): t for n, t in tensors.items() if n.startswith("first_stage")}
    save_file(own, tmp_path / "vae.safetensors")
    for vae in (tmp_path / "vae.safetensors", file):
        swapped = open_checkpoint(str(folder), CheckpointOptions(vae=vae))
        equal(swapped.load("vae"), open_preset("sd15-one", 3).load("vae"))
        equal(swapped.load("unet"), source.load("unet"))
        assert swapped.hash != open_folder("", folder).hash
    theirs = open_checkpoint(str(file), CheckpointOptions(str(base), folder / "vae" / DIFFUSERS))
    equal(theirs.load("vae"), source.load("vae"))
    with pytest.raises(InputError, match="holds no VAE"):
        open_checkpoint(str(folder), CheckpointOptions(vae=tmp_path / "unet.safetensors"))


DIFFUSERS = "diffusion_pytorch_model.safetensors"


def test_families_are_recognized(checkpoints: Callable) -> None:
    families = {"sd15": "v1", "sd21": "v2", "sd15-inpaint": "inpainting"}
    for preset, family in families.items():
        file, base = checkpoints(preset)
        assert detect_family(file, meta_tensors(file)) == family
        assert "Stable Diffusion " in open_single_file(file, base).detection_note
    for key, family in (
        ("conditioner.embedders.1.model.transformer.resblocks.9.mlp.c_proj.bias", "xl_base"),
        ("conditioner.embedders.0.model.transformer.resblocks.9.mlp.c_proj.bias", "xl_refiner"),
    ):
        tensors = {name: torch.empty(4, 4, device="meta") for name in (key, UNET_INPUT)}
        assert detect_family(Path("x"), tensors) == family


OTHERS = {
    "a LoRA": ["lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight"],
    "a LoRA, which": ["unet.down_blocks.0.attentions.0.proj_in.lora_A.weight"],
    "a ControlNet": ["control_model.input_blocks.0.0.weight"],
    "a textual inversion": ["emb_params"],
    "a diffusion transformer": ["model.diffusion_model.double_blocks.0.img_attn.norm.key_norm.scale"],
    "a VAE": ["decoder.conv_in.weight", "encoder.conv_in.weight"],
    "a UNet alone": ["down_blocks.0.resnets.0.conv1.weight"],
    "a text encoder": ["text_model.encoder.layers.0.mlp.fc1.weight"],
    "holds no Stable Diffusion UNet": ["some.thing"],
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_files_are_named(sd_ort: Cli, tmp_path: Path, what: str) -> None:
    save_file({name: torch.zeros(2, 2) for name in OTHERS[what]}, tmp_path / "file.safetensors")
    assert what in refusal(sd_ort, tmp_path, "export", tmp_path / "file.safetensors", tmp_path / "out")


def test_broken_files(checkpoints: Callable, sd_ort: Cli, tmp_path: Path) -> None:
    file, base = checkpoints("sd15")
    tensors, bad, out = load_file(file), tmp_path / "file.safetensors", tmp_path / "out"
    decoder = "first_stage_model.decoder.conv_in.bias"
    half = {name: tensor for i, (name, tensor) in enumerate(tensors.items()) if i % 2 or name == UNET_INPUT}
    save_file(half, bad)
    assert "lacks" in refusal(sd_ort, tmp_path, "export", bad, out, "--config", base)
    save_file(tensors | {decoder: torch.zeros(5)}, bad)
    message = refusal(sd_ort, tmp_path, "export", bad, out, "--config", base)
    assert "decoder.conv_in.bias is [5], not" in message
    save_file(tensors | {decoder: tensors[decoder] * torch.nan}, bad)
    assert "NaN" in refusal(sd_ort, tmp_path, "export", bad, out, "--config", base, "--component", "vae_decoder")
    save_file(tensors | {f"{UNET_INPUT[:-6]}weight_scale": torch.ones(3)}, bad)
    assert "weight_scale (F32 of the shape [3]) scales blocks" in refusal(
        sd_ort, tmp_path, "export", bad, out, "--config", base
    )
    bad.write_bytes(file.read_bytes()[:-1000])
    assert "truncated" in refusal(sd_ort, tmp_path, "export", bad, out, "--config", base)
    bad.write_bytes(b"")
    assert "truncated" in refusal(sd_ort, tmp_path, "export", bad, out, "--config", base)
    other = checkpoints("sdxl")[1]
    assert "has no text encoder 2" in refusal(sd_ort, tmp_path, "export", file, out, "--config", other)


def test_pickles_only_when_asked_for(checkpoints: Callable, sd_ort: Cli, tmp_path: Path) -> None:
    file, base = checkpoints("sd15")
    pickle, out = tmp_path / "model.ckpt", tmp_path / "out"
    torch.save({"state_dict": load_file(file), "global_step": 5}, pickle)
    assert "--unsafe-pickle" in refusal(sd_ort, tmp_path, "export", pickle, out, "--config", base)
    source = open_single_file(pickle, base, unsafe_pickle=True)
    equal(source.load("unet"), open_preset("sd15-one", 3).load("unet"))
    torch.save({"state_dict": small}, pickle)
    assert "weights alone" in refusal(sd_ort, tmp_path, "export", pickle, out, "--config", base, "--unsafe-pickle")


def test_export_of_a_file(checkpoints: Callable, sd_ort: Cli, tmp_path: Path) -> None:
    file, base = checkpoints("sd15")
    arguments = ("export", file, tmp_path / "out", "--config", base, "--component", "vae_decoder")
    code, _, text = sd_ort(*arguments, "--exporter", "torchscript")
    assert code == 0, text
    assert "Stable Diffusion 1.x" in text
    assert pipeline_folder.read_manifest(tmp_path / "out")["source"]["model"] == str(file)
    assert json.loads((tmp_path / "out" / "model_index.json").read_text())["safety_checker"] == [None, None]
    assert "up to date" in sd_ort(*arguments, "--exporter", "torchscript")[2]


def test_wrong_options(checkpoints: Callable, sd_ort: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, base = checkpoints("sd15")
    out = tmp_path / "out"
    assert "--config goes with" in refusal(sd_ort, tmp_path, "export", base, out, "--config", base)
    assert "--vae goes with" in refusal(
        sd_ort, tmp_path, "export", out, "--preset", "sd15-tiny", "--random-weights", "--vae", file
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    message = refusal(sd_ort, tmp_path, "export", file, out)
    assert "Stable Diffusion 1.x checkpoint" in message
    assert "as --config" in message


def test_configs_of_a_folder_of_sd_ort(checkpoints: Callable, tmp_path: Path) -> None:
    """Its component folders hold no weights of diffusers', and the VAE's config in those of its two halves."""
    file, base = checkpoints("sd15")
    optimized = tmp_path / "made"
    shutil.copytree(base, optimized)
    (optimized / "vae").rename(optimized / "vae_decoder")
    (optimized / "unet" / pipeline_folder.MODEL).touch()
    source = open_single_file(file, optimized)
    assert source.configs == open_single_file(file, base).configs
    assert models_in(file, source) == {"text_encoder", "unet", "vae"}
    equal(source.load("vae"), open_preset("sd15-one", 3).load("vae"))
    source.write_configs(out := tmp_path / "out")
    assert (out / "tokenizer" / "vocab.json").is_file()
    index = json.loads((optimized / "model_index.json").read_text())
    (optimized / "model_index.json").write_text(json.dumps(index | {"controlnet": ["diffusers", "ControlNetModel"]}))
    with pytest.raises(InputError, match="without ControlNet or IP-Adapter as --config"):
        open_single_file(file, optimized)


def test_configs_from_the_hubs_cache(checkpoints: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network: a pipeline of the family, of any name, but none that was trained otherwise."""

    def unreachable(hub_id: str) -> Path:
        raise InputError(f"{hub_id} cannot be fetched")

    file, base = checkpoints("sd15")
    unet = json.loads((base / "unet" / "config.json").read_text())
    monkeypatch.setattr(base_pipeline, "download_configs", unreachable)
    monkeypatch.setitem(base_pipeline.UNETS, "v1", (unet["cross_attention_dim"], 4))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", tmp_path / "hub")
    with pytest.raises(InputError, match="cannot be fetched for them: give a diffusers folder of that family as"):
        open_single_file(file)
    repository = tmp_path / "hub" / "models--someone--tuned"
    shutil.copytree(base, repository / "snapshots" / "1234")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1234")
    source = open_single_file(file)
    assert source.configs == open_single_file(file, base).configs
    assert source.detection_note.endswith("configs and tokenizer of someone/tuned")
    scheduler = repository / "snapshots" / "1234" / "scheduler" / "scheduler_config.json"
    for other in ({"prediction_type": "v_prediction"}, {"_class_name": "LCMScheduler"}):
        scheduler.write_text(json.dumps(json.loads((base / "scheduler" / scheduler.name).read_text()) | other))
        with pytest.raises(InputError, match="as --config"):
            open_single_file(file)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_is_finite(dtype: type) -> None:
    numbers = np.ones(70000, dtype)
    numbers[:2] = ml_dtypes.finfo(dtype).max, -ml_dtypes.finfo(dtype).max
    assert is_finite(numbers)
    for value in (np.nan, np.inf, -np.inf):
        numbers[-1] = value
        assert not is_finite(numbers)
        assert not is_finite(numbers.reshape(100, -1).T)
