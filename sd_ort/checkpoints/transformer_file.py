"""Diffusion transformers in one file, with original names (Black Forest Labs, Stability AI), ComfyUI's or diffusers'.

The file holds the transformer alone, or ComfyUI's whole checkpoint with VAE and text encoders. Configs, scheduler,
tokenizers and the models that it lacks come from a folder of the family (`base_pipeline`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fusion_passes import weight_recipes
from sd_ort.checkpoints.base_pipeline import find_base_pipeline
from sd_ort.checkpoints.checkpoint import Checkpoint, CheckpointModel, build_model, class_name
from sd_ort.checkpoints.detection import FAMILIES
from sd_ort.checkpoints.tensor_readers import RecipeTensorReader, TensorReader, open_tensors
from sd_ort.checkpoints.transformer_layouts import original_prefix, original_recipes
from sd_ort.checkpoints.weight_file import DTYPES, dtypes_of, read_entries
from sd_ort.core.errors import InputError
from sd_ort.core.safetensors_file import Entry

if TYPE_CHECKING:
    import torch

    from sd_ort.checkpoints.signatures import Config

Recipes = dict[str, weight_recipes.WeightRecipe]
# A name in diffusers' layout, behind a prefix.
DIFFUSERS_NAMES = re.compile(
    r"(model\.diffusion_model\.|diffusion_model\.|transformer\.)?((single_)?transformer_blocks\.0\."
    r"(attn\.(to_q|to_qkv_mlp_proj)|norm1?\.linear)|layers\.0\.attention\.to_q)\.weight"
)
# Names in diffusers' layout that tell a family -> original names that do, for `detect_transformer`.
DIFFUSERS_MARKS = {
    "x_embedder.weight": "img_in.weight", "text_fusion.projector.weight": "txtfusion.projector.weight",
    "pos_embed.proj.weight": "joint_blocks.0.x_block.attn.qkv.weight",
    "transformer_blocks.0.attn2.to_q.weight": "joint_blocks.0.x_block.attn2.qkv.weight",
    "double_stream_modulation_img.linear.weight": "double_stream_modulation_img.lin.weight",
    "time_text_embed.guidance_embedder.linear_1.weight": "guidance_in.in_layer.weight",
    "time_guidance_embed.guidance_embedder.linear_1.weight": "guidance_in.in_layer.weight",
}  # fmt: skip
# A name in transformers that are not supported -> the family.
OTHER_FAMILIES = {
    "cap_embedder.": "Lumina", "adaln_single.": "PixArt or Sana",
    "individual_token_refiner": "Hunyuan", "double_layers.": "AuraFlow", "distilled_guidance_layer": "Chroma",
    "self_attn.norm_q": "Wan", "controlnet_": "ControlNet", "llm_adapter": "Anima or Cosmos",
    "caption_projection": "PixArt or HiDream",
}  # fmt: skip


def is_transformer_file(names: Mapping[str, Any]) -> bool:
    """Return whether a file with tensors of these names holds a diffusion transformer of a supported layout."""
    return original_prefix(names) is not None or diffusers_prefix(names) is not None


def diffusers_prefix(names: Mapping[str, Any]) -> str | None:
    """Return the prefix of a transformer's tensors in diffusers' layout, None for a file without one."""
    matches = (match for match in map(DIFFUSERS_NAMES.fullmatch, names) if match)
    return next((match[1] or "" for match in matches), None)


def other_family(names: Mapping[str, Any]) -> str | None:
    """Return the family of a diffusion transformer that is not supported, None for other files."""
    return next((family for part, family in OTHER_FAMILIES.items() if any(part in name for name in names)), None)


def detect_transformer(path: Path, entries: Mapping[str, Entry], prefix: str) -> str:
    """Return the family of a transformer by its tensor names, which are original or those in DIFFUSERS_MARKS.

    Raises InputError for one that is not supported.
    """

    def shape(name: str) -> list[int]:
        return list(entries.get(f"{prefix}{name}", {}).get("shape", [0, 0]))

    if f"{prefix}cap_pad_token" in entries:
        if f"{prefix}siglip_pad_token" in entries:
            raise InputError(f"{path} is Z-Image Omni: sd-ort runs Z-Image from text alone.")
        return "z-image-turbo"
    if f"{prefix}txt_norm.weight" in entries:
        return "qwen-image"
    if f"{prefix}txtfusion.projector.weight" in entries:
        return "krea2"
    if family := other_family(entries):
        raise InputError(f"{path} is a {family} model: sd-ort runs {', '.join(FAMILIES.values())}.")
    if f"{prefix}joint_blocks.0.x_block.attn.qkv.weight" in entries:
        return "sd35-medium" if f"{prefix}joint_blocks.0.x_block.attn2.qkv.weight" in entries else "sd35-large"
    if f"{prefix}img_in.weight" not in entries:
        raise InputError(f"{path} is a diffusion transformer without {prefix}img_in.weight: download it again.")
    channels = shape("img_in.weight")[1]
    if f"{prefix}double_stream_modulation_img.lin.weight" in entries:
        return "flux2-dev" if f"{prefix}guidance_in.in_layer.weight" in entries else "flux2-klein"
    if channels != 64:
        raise InputError(f"{path} is a FLUX.1 of {channels} input channels, for fill or control: sd-ort runs 64.")
    return "flux-dev" if f"{prefix}guidance_in.in_layer.weight" in entries else "flux-schnell"


def open_transformer_file(
    path: Path, config_folder: Path | None, vae_reader: Callable[[Path, Checkpoint], TensorReader]
) -> Checkpoint:
    """Return the checkpoint in the file `path`.

    config_folder: a folder of its family. vae_reader: returns the reader of a VAE in the file, in original names.
    Raises InputError for a family that is not supported, for quantized weights, and if models are missing.
    """
    entries = read_entries(path)
    if is_diffusers := (prefix := diffusers_prefix(entries)) is not None:
        of_model = {name.removeprefix(prefix): entry for name, entry in entries.items() if name.startswith(prefix)}
        marks = {DIFFUSERS_MARKS.get(name, name): entry for name, entry in of_model.items()}
        family = detect_transformer(path, marks, "")
    else:
        prefix = original_prefix(entries) or ""
        family = detect_transformer(path, entries, prefix)
    _check_dtypes(path, entries, prefix)
    base = find_base_pipeline(path, family, config_folder)
    if "transformer" not in base.models:
        raise InputError(f"{base.name} has no transformer: give a diffusers folder of {FAMILIES[family]} as --config.")
    config = base.configs["transformer"]
    _check_class(path, family, config, base)
    shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
    own: Recipes = {name.removeprefix(prefix): name for name in shapes if name.startswith(prefix)}
    recipes = {"transformer": own if is_diffusers else original_recipes(config, shapes, prefix)}
    for name, cls in ((n, base.index[n][1]) for n in base.models if n.startswith("text_encoder")):
        if encoder_recipes := _text_encoder_recipes(entries, name, cls, base.configs[name]):
            recipes[name] = encoder_recipes
    readers: dict[str, TensorReader] = {name: RecipeTensorReader((path,), table) for name, table in recipes.items()}
    if any(name.startswith(("vae.", "first_stage_model.")) for name in entries):
        readers["vae"] = vae_reader(path, base)
    models = dict(base.models)
    for name, model in base.models.items():
        if name in readers:
            load = partial(_load, path, base.index[name][1], model.config, readers[name])
            models[name] = CheckpointModel(model.config, load, (path,), readers[name])
        elif not model.files:
            raise InputError(
                f"{path} has no {name.replace('_', ' ')}: give a whole diffusers folder of {FAMILIES[family]}, with "
                "its weights, as --config."
            )
    others = [name for name in base.models if name not in readers]
    dtypes = dtypes_of(entry for name, entry in entries.items() if name.startswith(prefix))
    note = f"{path.name}: {FAMILIES[family]}, {dtypes}; {', '.join(others)} from {base.config_folder}"
    paths = (path, *base.paths)
    return replace(base, name=str(path), models=models, paths=paths, detection_note=note)


def _check_dtypes(path: Path, entries: Mapping[str, Entry], prefix: str) -> None:
    """Raise InputError for weights of the transformer in other types than DTYPES."""
    for name, entry in entries.items():
        if name.startswith(prefix) and name.endswith(".weight") and entry["dtype"] not in DTYPES:
            raise InputError(
                f"{path} has {entry['dtype']} weights, such as {name}: such quantized weights are not "
                "read. Get the file in bfloat16, float16, float8, int8 with scales or GGUF."
            )


def _check_class(path: Path, family: str, config: Config, base: Checkpoint) -> None:
    classes = {"sd35": "SD3Transformer2DModel", "flux2": "Flux2Transformer2DModel", "flux": "FluxTransformer2DModel"}
    classes |= {
        "z": "ZImageTransformer2DModel",
        "qwen": "QwenImageTransformer2DModel",
        "krea2": "Krea2Transformer2DModel",
    }
    expected = classes[family.partition("-")[0]]
    if class_name(config) != expected:
        raise InputError(
            f"{path} is {FAMILIES[family]}, and {base.name} has a {class_name(config)}: give a folder of that family."
        )
    guidance = config.get("guidance_embeds", expected == "Flux2Transformer2DModel")  # diffusers' default of each class
    if family.startswith("flux") and bool(guidance) != family.endswith("-dev"):
        raise InputError(f"{path} is {FAMILIES[family]}, and {base.name} is the other FLUX: give a folder of its own.")


def _text_encoder_recipes(entries: Mapping[str, Entry], name: str, cls: str, config: Config) -> Recipes:
    """Return name -> recipe of a text encoder's tensors in ComfyUI's layout; empty if the file has none."""
    is_t5 = cls == "T5EncoderModel"
    part = "t5xxl" if is_t5 else "clip_g" if config.get("hidden_size") == 1280 else "clip_l"
    if not is_t5 and name == "text_encoder_2":
        part = "clip_g"
    prefix = f"text_encoders.{part}.transformer."
    recipes: Recipes = {name.removeprefix(prefix): name for name in entries if name.startswith(prefix)}
    if is_t5 and "shared.weight" in recipes:
        recipes.setdefault("encoder.embed_tokens.weight", recipes["shared.weight"])
    return recipes


def _load(path: Path, cls: str, config: Config, reader: TensorReader) -> torch.nn.Module:
    """Return a model in float32 and eval mode. Raises InputError for missing weights and other shapes."""
    import torch
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model: torch.nn.Module = build_model(cls, config)
    names = list(model.state_dict())
    read = open_tensors(reader, names)
    if read is None:
        stored = read_entries(path)
        missing = [name for name in names if not reader.has(name, stored)]
        raise InputError(f"{path} lacks {len(missing)} weights of its {cls}, such as {missing[:1]}: get it again.")
    values = {name: torch.from_numpy(read(name).astype(np.float32)) for name in names}
    try:
        model.load_state_dict(values, assign=True)
    except RuntimeError as error:
        raise InputError(
            f"{path} does not fit the config of its {cls}: {str(error).splitlines()[-1].strip()}"
        ) from error
    return model.eval()
