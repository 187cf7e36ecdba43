"""Checkpoints in a folder that diffusers saved: model_index.json and a folder for each model."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_ort.checkpoints import unet_inputs
from sd_ort.checkpoints.checkpoint import (
    CLASSES,
    LIBRARIES,
    MODELS,
    Checkpoint,
    CheckpointModel,
    build_model,
    is_sdxl,
    model_class,
)
from sd_ort.checkpoints.configs import read_config
from sd_ort.checkpoints.diffusion_transformers import FAMILIES, encoder_mismatch, unsupported_setting
from sd_ort.checkpoints.signatures import READS_IMAGES, Config, tapped_layers
from sd_ort.checkpoints.tensor_readers import DirectTensorReader
from sd_ort.checkpoints.weight_file import read_entries
from sd_ort.core.errors import InputError, first_line
from sd_ort.core.files import check_regular, read_json
from sd_ort.core.pipeline_folder import MODEL, read_index
from sd_ort.core.quiet import no_progress_bars, quiet

if TYPE_CHECKING:
    import torch

log = logging.getLogger("sd_ort")

# Pipelines that are not exported: a pattern of their class -> what they are, and what to do.
OTHER_PIPELINES = {
    r"AnimateDiff|.*Motion|PIA": "makes videos with motion modules in its UNet, of which sd-ort has no export: use "
    "diffusers, or give the Stable Diffusion folder without its motion adapter",
    r".*(Video|Wan|LTX|Mochi|Allegro|Latte|SkyReels|CogView.*Video|EasyAnimate|ConsisID|I2VGen|TextToVideo|T2V|I2V)":
    "makes videos: sd-ort generates images, since its pipelines and graphs have no axis of time. Use diffusers",
    r"QwenImageEditInpaint": "changes a masked part of an image: sd-ort edits whole images with the same models. Write "
    "QwenImageEditPipeline into its model_index.json, or use diffusers",
    r"QwenImage(Layered|ControlNet)": "reads images beside the prompt: sd-ort runs Qwen-Image from text, from an image "
    "and with a mask. Use diffusers",
    r"ZImage(Omni|ControlNet)": "reads images beside the prompt: sd-ort runs Z-Image from text alone. Use diffusers",
}  # fmt: skip

PROMPT_IMAGE_PIPELINES = ("QwenImageEditPipeline", "QwenImageEditPlusPipeline")  # give images to the text encoder

LAYER_COUNTS = ("num_layers", "num_single_layers", "n_layers", "n_refiner_layers")  # settings of transformers

KREA2_LAYERS = tuple(range(2, 36, 3))  # of diffusers' pipeline, if its index names none


def other_pipeline(index: Config) -> str | None:
    """Return the pipeline kind that a model_index.json names if sd-ort does not export this kind, else None."""
    name = str(index.get("_class_name", ""))
    return next((f"{name} {text}" for pattern, text in OTHER_PIPELINES.items() if re.match(pattern, name)), None)


def open_folder(name: str, folder: Path) -> Checkpoint:
    """Return the checkpoint in `folder`. Raises InputError if it is no diffusers pipeline of a supported family."""
    index = read_index(folder, "diffusers pipeline")
    if reason := other_pipeline(index):
        raise InputError(f"{folder}: {reason}.")
    models = {}
    for model in MODELS:
        library, cls = (index.get(model) or (None, None))[:2]
        if cls is None:
            continue
        if not isinstance(cls, str) or CLASSES.get(cls) != library:
            raise InputError(f"{folder} has a {model} of class {cls}; sd-ort exports {', '.join(CLASSES)}.")
        if (folder / model / MODEL).is_file():
            raise InputError(f"{folder} holds ONNX models already: give it to `sd-ort optimize`.")
        config = read_config(folder / model / "config.json", f"{folder} lacks its {model}")
        models[model] = folder_model(folder / model, cls, config)
        if model == "text_encoder" and index["_class_name"] in PROMPT_IMAGE_PIPELINES:
            models[model] = _reading_images(models[model])
    if "unet" not in models and "transformer" not in models:
        raise InputError(
            f"{folder} has neither a UNet nor a transformer: sd-ort exports Stable Diffusion 1.x to 3.5, XL, "
            "FLUX.1, FLUX.2, Z-Image, Qwen-Image and Krea 2."
        )
    if "transformer" in models and (mismatch := encoder_mismatch(index)):
        raise InputError(f"{folder} {mismatch}: get the whole folder.")
    if "transformer" in models and (key := unsupported_setting(models["transformer"].config)):
        transformer = models["transformer"].config
        raise InputError(
            f"{folder} has a {transformer['_class_name']} with {key} = {transformer[key]}, a relative that sd-ort does "
            "not export: use diffusers."
        )
    if "text_encoder_select_layers" in index and (reason := _krea2_reason(index, models)):
        raise InputError(f"{folder} {reason}: use diffusers.")
    for part in ("scheduler", "tokenizer", "tokenizer_2", "tokenizer_3", "processor"):
        if (index.get(part) or [None])[0] and not (folder / part).is_dir():
            raise InputError(f"{folder} lacks its {part}, which drawing needs: get the whole folder.")
    unet = models["unet"].config if "unet" in models else {}
    if key := unet_inputs.unsupported_setting(unet):
        advice = ": save it without its IP-Adapter, and give that with --ip-adapter FILE"
        advice = advice if unet[key] == "ip_image_proj" else ""
        raise InputError(f"{folder} has a UNet with {key} = {unet[key]}, which sd-ort does not export{advice}.")
    return Checkpoint(name, index, models, folder, paths=(folder,))


def _reading_images(encoder: CheckpointModel) -> CheckpointModel:
    """Return a copy of a vision-language model that is exported with image inputs."""

    def load() -> torch.nn.Module:
        model: Any = encoder.load()
        setattr(model.config, READS_IMAGES, True)
        return model

    return replace(encoder, config={**encoder.config, READS_IMAGES: True}, load=load)


def _krea2_reason(index: Config, models: Mapping[str, CheckpointModel]) -> str | None:
    """Return a phrase on a setting of Krea 2's pipeline that is not exported, or None."""
    layers = index["text_encoder_select_layers"] or KREA2_LAYERS
    taps = tapped_layers(models["text_encoder"].config)
    if list(layers) != list(taps):
        named = (", ".join(map(str, each)) for each in (layers, taps))
        return "reads layers {} of its text encoder, and sd-ort exports {}".format(*named)
    patch = index.get("patch_size", 2)
    return None if patch == 2 else f"has patches of {patch} x {patch} latents, and sd-ort runs 2 x 2"


def add_controlnet(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """Return the checkpoint with the ControlNet in `folder`. Raises InputError if there is none that fits the UNet."""
    config = read_config(folder / "config.json", f"{folder} is no ControlNet", folder)
    if config.get("_class_name") != "ControlNetModel":
        raise InputError(f"{folder} holds a {config.get('_class_name')}, not a ControlNetModel.")
    if "unet" not in checkpoint.models:
        raise InputError(f"{checkpoint.name} has a transformer: sd-ort takes a ControlNet for a UNet only.")
    for key in ("cross_attention_dim", "block_out_channels"):
        if config.get(key) != checkpoint.configs["unet"].get(key):
            raise InputError(f"the ControlNet in {folder} was made for another UNet: their {key} differ.")
    pipeline = f"StableDiffusion{'XL' if is_sdxl(checkpoint) else ''}ControlNetPipeline"
    index = checkpoint.index | {"_class_name": pipeline, "controlnet": ["diffusers", "ControlNetModel"]}
    models = {**checkpoint.models, "controlnet": folder_model(folder, "ControlNetModel", config)}
    name, paths = f"{checkpoint.name} with {folder}", (*checkpoint.paths, folder)
    return replace(checkpoint, name=name, index=index, models=models, paths=paths)


def folder_model(folder: Path, cls: str, config: Config) -> CheckpointModel:
    """Return the model of class `cls` that diffusers or transformers saved in `folder`."""
    files = weight_files(folder)
    return CheckpointModel(
        config,
        partial(_load, folder, cls, files),
        files,
        DirectTensorReader(files),
        partial(_check_files, folder, files),
    )


def _check_files(folder: Path, files: Sequence[Path]) -> None:
    """Raise InputError for missing weights and shards, and for damaged safetensors. `files`: see `weight_files`."""
    names = {path.name for path in folder.iterdir()}
    for index, shards in shard_indexes(folder).items():
        single_file = index.name.partition(".index")[0]  # which is read instead of shards
        if single_file not in names and (missing := sorted(shards - names)):
            raise InputError(f"{folder} lacks {missing[0][:200]!r}, which {index.name} names: get the whole folder.")
    if not files:
        raise InputError(f"{folder} has no file of weights: get the whole folder.")
    for path in files:
        if path.suffix == ".safetensors":
            read_entries(path)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the files that `from_pretrained` reads the weights of a model from.

    Raises InputError for a damaged index of shards, and for one that names a file of another folder.
    """
    shard_indexes(folder)
    options = _weight_options(folder)
    files = sorted(folder.glob("*.safetensors" if options["use_safetensors"] else "*.bin"))
    files = [path for path in files if (".fp16" in path.name) == (options["variant"] is not None)]
    return tuple(check_regular(path, folder.parent) for path in files if ".non_ema." not in path.name)


def shard_indexes(folder: Path) -> dict[Path, set[str]]:
    """Return the names of the shards of a model, by the index that names them. Raises InputError as `weight_files`."""
    options = _weight_options(folder)
    suffix = ".safetensors" if options["use_safetensors"] else ".bin" if any(folder.glob("*.bin")) else ""
    indexes = {}
    for index in sorted(folder.glob(f"*{suffix}.index.{'fp16.' if options['variant'] else ''}json")):
        shards = read_json(index, root=folder.parent).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise InputError(f"{index} is damaged at 'weight_map': get it again.")
        indexes[index] = set(shards.values())
        if others := sorted(shard for shard in indexes[index] if not re.fullmatch(r"[^/\\]*[^/\\.]", shard)):
            raise InputError(f"{index} names {others[0][:200]!r}, which is no file of its folder: get it again.")
    return indexes


def _weight_options(folder: Path) -> dict[str, Any]:
    """Return options of `from_pretrained`: safetensors if there are any, variant "fp16" if there is no other."""
    safetensors = [path.name for path in folder.glob("*.safetensors")]
    files = safetensors or [path.name for path in folder.glob("*.bin")]
    only_float16 = bool(files) and all(".fp16" in name for name in files)
    return {"use_safetensors": bool(safetensors), "variant": "fp16" if only_float16 else None}


def _check_sizes(folder: Path, class_name: str, files: Sequence[Path]) -> None:
    """Check that a transformer is as large as its safetensors: else `from_pretrained` takes the memory of its config.

    Raises InputError for more layers than files have tensors, and for a tensor of another shape.
    """
    import torch

    shapes = {name: list(entry["shape"]) for path in files for name, entry in read_entries(path).items()}
    config = read_config(folder / "config.json")
    layers = sum(config.get(key) or 0 for key in LAYER_COUNTS)
    if files and layers > len(shapes):
        raise InputError(f"{folder} has {layers} layers by its config.json, and {len(shapes)} tensors: get it again.")
    try:
        with torch.device("meta"), quiet("diffusers"):
            model = build_model(class_name, config)
    except Exception as error:  # diffusers and torch raise their own kinds
        raise InputError(f"{folder}/config.json is of no {class_name}: {first_line(error)}") from error
    for name, tensor in model.state_dict().items():
        if name in shapes and shapes[name] != list(tensor.shape):
            raise InputError(
                f"{folder} has a tensor {name} of {shapes[name]}, and {list(tensor.shape)} by its config.json: "
                "get the folder again."
            )


def _load(folder: Path, class_name: str, files: Sequence[Path]) -> torch.nn.Module:
    """Return a model in float32 and eval mode. `files`: see `weight_files`.

    Raises InputError if the folder is no such model or lacks weights.
    """
    import torch

    if class_name in FAMILIES:
        _check_sizes(folder, class_name, [path for path in files if path.suffix == ".safetensors"])
    dtype = "dtype" if LIBRARIES[class_name] == "transformers" else "torch_dtype"
    options = {dtype: torch.float32, "local_files_only": True, **_weight_options(folder)}
    loaded: torch.nn.Module
    try:
        with no_progress_bars(), quiet("diffusers", "transformers"):
            cls = model_class(class_name)
            loaded, keys = cls.from_pretrained(str(folder), output_loading_info=True, **options)
    except Exception as error:  # safetensors, torch, json and both libraries each raise their own kinds
        raise InputError(f"{folder} cannot be loaded as {class_name}: {first_line(error)}") from error
    if missing := sorted(keys["missing_keys"]):  # both libraries initialize these at random, with a warning
        raise InputError(
            f"{folder} lacks {len(missing)} weights of its {class_name}, such as {missing[0]}: get it again."
        )
    if LIBRARIES[class_name] == "diffusers" and (unused := sorted(keys["unexpected_keys"])):
        log.warning(
            "%s has %d weights that its config.json leaves out, such as %s.", folder, len(unused), unused[0][:200]
        )
    return loaded.eval()
