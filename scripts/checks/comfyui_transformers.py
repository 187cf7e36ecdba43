"""Diffusion transformers as MODELs in ComfyUI: tiny nets by sd-ort's graphs and by ComfyUI's own code.

    python scripts/checks/comfyui_transformers.py --comfyui CHECKOUT [--out results/hosts/comfyui_transformers.json]

CHECKOUT is ComfyUI's source, 0.33.0 or later, of which nothing is changed; einops, torchsde, comfy-aimdo and
comfy-kitchen must be installed beside sd-ort, other requirements may be missing. Each net of random weights is exported
and optimized for the CPU, once whole and once hoisted. ComfyUI's net gets the same weights in its own layout, and both
predict through ComfyUI's `apply_model`, in float32: at three sizes of the image, with a patch of weights (query, key
and value joined; shift and scale of the last norm in ComfyUI's order), with a LoRA in diffusers' names, and with a
reference image where the family takes one. ComfyUI's sampler takes four steps with guidance.

The relative error is the norm of the difference in norms of ComfyUI's prediction, and must be at most 1e-5, the
rounding of two orders of summation; each change must move the prediction by at least 1e-3.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import torch

from scripts.checks.comfyui_host import make_importable
from scripts.report import save_findings
from sd_ort.checkpoints.presets import PRESETS, Preset, open_preset
from sd_ort.checkpoints.transformer_layouts import join_rows
from sd_ort.export.exporter import export
from sd_ort.integrations.models import TorchComponentSessions
from sd_ort.stages import optimize

MISSING = (
    "torchvision",
    "torchaudio",
    "av",
    "scipy",
    "sentencepiece",
    "blake3",
    "aiohttp",
    "yarl",
    "spandrel",
    "simpleeval",
)
SEED = 1
MAX_ERROR, MIN_CHANGE = 1e-5, 1e-3
# Of ComfyUI's nets: 64 channels a head in SD 3, at least 1024 channels in Z-Image, and a whole width of its MLP; in
# Krea 2 MLPs whose widths are multiples of 128, and two text blocks of each kind.
CHANGES: dict[str, dict[str, Any]] = {
    "flux-dev-tiny": {},
    "flux-schnell-tiny": {},
    "flux2-klein-4b-tiny": {},
    "sd35-medium-tiny": {"attention_head_dim": 64, "num_attention_heads": 2, "caption_projection_dim": 128},
    "sd35-large-tiny": {"attention_head_dim": 64, "num_attention_heads": 2, "caption_projection_dim": 128},
    "qwen-image-tiny": {},
    "z-image-turbo-tiny": {"dim": 1056, "n_heads": 11, "n_kv_heads": 11, "axes_dims": [32, 32, 32], "n_layers": 1},
    "krea2-tiny": {"intermediate_size": 384, "text_hidden_dim": 96, "text_intermediate_size": 256,
                   "num_layerwise_text_blocks": 2, "num_refiner_text_blocks": 2},
}  # fmt: skip
LORA_MODULES = ("to_k", "to_q", "to_out.0", "norm_out.linear", "proj_mlp")
WITH_REFERENCE = ("flux-dev-tiny", "flux2-klein-4b-tiny")


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference in norms of `expected`."""
    return float((actual - expected).norm() / expected.norm())


def own_net(host: Any, ours: Any, weights: Mapping[str, torch.Tensor]) -> Any:
    """Return ComfyUI's own BaseModel of the same config, with diffusers' weights in its layout."""
    net = ours.model.diffusion_model
    arrays = {name: tensor.numpy() for name, tensor in weights.items()}
    theirs = {name: torch.from_numpy(join_rows(arrays, parts)) for name, parts in net.names.items()}
    if "final_layer.scale_shift_table" in weights:  # of Krea 2, whose tables belong to no layer
        tables = {"last": "final_layer"} | {f"blocks.{i}": f"transformer_blocks.{i}" for i in range(len(net.names))}
        for block, diffusers in tables.items():
            if (table := weights.get(f"{diffusers}.scale_shift_table")) is not None:
                name = "modulation.lin" if block == "last" else "mod.lin"
                theirs[f"diffusion_model.{block}.{name}"] = table if block == "last" else table.flatten()
    for name in ("pos_embed", "x_pad_token", "cap_pad_token"):
        if (diffusers := f"pos_embed.{name}" if name == "pos_embed" else name) in weights:
            theirs[f"diffusion_model.{name}"] = weights[diffusers]
    description = type(ours.model.model_config)(ours.model.model_config.unet_config)
    description.unet_config |= {"disable_unet_model_creation": False, "dtype": torch.float32}
    description.sampling_settings = ours.model.model_config.sampling_settings
    description.unet_config.pop("disable_unet_model_creation")
    model = host.__mro__[2](description, model_type=ours.model.model_type)
    keys = model.load_state_dict(theirs, strict=False)
    missing = [name for name in keys.missing_keys if not name.startswith("model_sampling.")]
    assert (missing, keys.unexpected_keys) == ([], [])
    return model


def call(model: Any, inputs: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> torch.Tensor:
    """Return the denoised latents of ComfyUI's `apply_model` less the noisy ones: its net's prediction, scaled."""
    with torch.inference_mode():
        x = inputs["x"]
        out: torch.Tensor = model.apply_model(**inputs, transformer_options={**(options or {})}) - x
        return out


def inputs_of(
    name: str, config: Mapping[str, Any], comfy_config: Mapping[str, Any], size: tuple[int, int]
) -> dict[str, Any]:
    """Return arguments of `apply_model` for two images of `size` latents."""
    generator = torch.Generator().manual_seed(sum(size))
    channels = comfy_config.get("out_channels", comfy_config["in_channels"])
    shape = (2, channels, *([1] if name.startswith(("qwen", "krea2")) else []), *size)
    text = config.get("joint_attention_dim", config.get("cap_feat_dim"))
    if "num_text_layers" in config:
        text = config["num_text_layers"] * config["text_hidden_dim"]
    inputs: dict[str, Any] = {
        "x": torch.randn(shape, generator=generator),
        "t": torch.full((2,), 0.6),
        "c_crossattn": torch.randn(2, 21, text, generator=generator),
    }
    if pooled := config.get("pooled_projection_dim"):
        inputs["y"] = torch.randn(2, pooled, generator=generator)
    if config.get("guidance_embeds"):
        inputs["guidance"] = torch.full((2,), 3.0)
    if name.startswith("z-image"):
        inputs["num_tokens"] = 21
    return inputs


def compare(
    name: str, folder: Path, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> dict[str, float]:
    """Return relative errors of a folder's MODEL to ComfyUI's own, and how far each change moves the prediction."""
    from sd_ort.integrations.comfyui.model import open_model

    model_patcher = importlib.import_module("comfy.model_patcher")
    ours = open_model(TorchComponentSessions(folder, "cpu"))
    own = own_net(type(ours.model), ours, weights)
    comfy_config = ours.model.model_config.unet_config
    sizes = [(8, 12), (12, 8), (9, 7)]
    first = inputs_of(name, config, comfy_config, sizes[0])
    plain = call(own, first)
    errors = {}
    for size in sizes:
        inputs = inputs_of(name, config, comfy_config, size)
        errors[f"{size[0]} x {size[1]} latents"] = relative(
            call(ours.model, inputs, {"uuids": ["a"]}), call(own, inputs)
        )
    moves = {}
    if name in WITH_REFERENCE:
        inputs = {**first, "ref_latents": [first["x"].flip(2)[:, :, :6, :]]}
        expected = call(own, inputs)
        errors["a reference image"] = relative(call(ours.model, inputs), expected)
        moves["a reference image"] = relative(expected, plain)
    theirs = model_patcher.ModelPatcher(own, torch.device("cpu"), torch.device("cpu"))
    for what, patches in (
        ("a patch of weights", differences(ours)),
        ("a LoRA in diffusers' names", lora(ours, weights)),
    ):
        changed, reference = ours.clone(), theirs.clone()
        for patcher in (changed, reference):
            assert len(patcher.add_patches(patches, 0.7)) == len(patches)
        reference.patch_model()
        expected = call(own, first)
        reference.unpatch_model()
        moves[what] = relative(expected, plain)
        changed.pre_run()
        errors[what] = relative(call(changed.model, first, {"uuids": ["b"]}), expected)
    ours.pre_run()
    errors["without it again"] = relative(call(ours.model, first, {"uuids": ["b"]}), plain)
    sampled = [sample(patcher, first) for patcher in (ours, theirs)]
    errors["4 steps of ComfyUI's sampler"] = relative(*sampled)
    assert all(move >= MIN_CHANGE for move in moves.values()), moves
    return errors


def differences(ours: Any) -> dict[str, Any]:
    """Return ComfyUI's patches of joined matrices, of the last norm, and of Qwen-Image's and Krea 2's queries."""
    generator, patches = torch.Generator().manual_seed(SEED), {}
    for key, tensor in ours.model.state_dict().items():
        if key.endswith(".weight") and any(
            part in key for part in ("qkv.", "linear1", "final_layer.adaLN", "to_q.", "wq.")
        ):
            patches[key] = ("diff", (0.1 * torch.randn(tensor.shape, generator=generator) / tensor.shape[-1] ** 0.5,))
    assert patches
    return patches


def lora(ours: Any, weights: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    """Return ComfyUI's patches for a LoRA of rank 4 with diffusers' module names."""
    comfy_lora, generator = importlib.import_module("comfy.lora"), torch.Generator().manual_seed(SEED)
    key_map, tensors = comfy_lora.model_lora_keys_unet(ours.model, {}), {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.endswith(LORA_MODULES) and (key := f"transformer.{module}") in key_map:
            out, into = weight.shape
            tensors[f"{key}.lora_A.weight"] = torch.randn(4, into, generator=generator) / into**0.5
            tensors[f"{key}.lora_B.weight"] = 0.2 * torch.randn(out, 4, generator=generator)
    assert tensors
    patches: dict[Any, Any] = comfy_lora.load_lora(tensors, key_map)
    assert len(patches) == len(tensors) // 2
    return patches


def sample(patcher: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return the latents after 4 steps with guidance 3 by ComfyUI's sampler."""
    comfy_sample = importlib.import_module("comfy.sample")
    options = {name: inputs[key][:1] for name, key in (("pooled_output", "y"),) if key in inputs}
    texts = [[[text[None], {**options}]] for text in inputs["c_crossattn"]]
    latents = torch.zeros_like(inputs["x"][:1])
    out: torch.Tensor = comfy_sample.sample(
        patcher, inputs["x"][:1], 4, 3.0, "euler", "simple", *texts, latents, disable_pbar=True, seed=SEED
    )
    return out


@click.command()
@click.option("--comfyui", type=click.Path(path_type=Path), required=True, help="A checkout of ComfyUI.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the findings here.")
@click.option("--preset", "presets", multiple=True, type=click.Choice(list(CHANGES)), help="Only these.")
def main(comfyui: Path, out: Path | None, presets: tuple[str, ...]) -> None:
    """Compare the nets of `CHANGES`."""
    torch.set_num_threads(1)
    make_importable(comfyui.absolute(), MISSING)
    findings: dict[str, Any] = {}
    for name in presets or CHANGES:
        with tempfile.TemporaryDirectory(prefix="sd-ort-comfyui-") as temporary:
            base, preset = Path(temporary), PRESETS[name]
            config = preset.models["transformer"] | CHANGES[name]
            key = f"comfyui-{name}"
            PRESETS[key] = Preset(preset.pipeline, {"transformer": config}, preset.scheduler, preset.options)
            export(None, base / "raw", preset=key, random_weights=True, seed=SEED)
            weights = open_preset(key, SEED).load("transformer").state_dict()
            for way, hoist in (("whole", False), ("hoisted", True)):
                optimize(base / "raw", base / way, target="cpu", hoist=hoist)
                errors = compare(name, base / way, weights, config)
                findings[f"{name}, {way}"] = {what: float(f"{error:.1e}") for what, error in errors.items()}
                click.echo(f"{name}, {way}: {findings[f'{name}, {way}']}")
    findings["ComfyUI"] = (comfyui / "comfyui_version.py").read_text().split('"')[-2]
    save_findings(
        "Diffusion transformers in ComfyUI: relative error to its own nets, float32",
        "scripts/checks/comfyui_transformers.py --comfyui CHECKOUT", findings, out,
    )  # fmt: skip
    worst = max(max(each.values()) for each in findings.values() if isinstance(each, dict))
    assert worst <= MAX_ERROR, f"an error of {worst} is above {MAX_ERROR}"


if __name__ == "__main__":
    main()
