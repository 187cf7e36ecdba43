"""Where a pipeline comes from: a diffusers folder, the hub, the demo model, or a preset with random weights.

A source loads one model at a time, in fp32; it never edits what it reads.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sd_ort.checkpoints import presets, signatures, unet_inputs
from sd_ort.checkpoints.configs import read_config
from sd_ort.checkpoints.hub import download_configs, download_model, download_pipeline
from sd_ort.checkpoints.presets import PRESETS
from sd_ort.checkpoints.signatures import MODEL_OF, Config, Signature
from sd_ort.checkpoints.tensor_readers import Holder, StoredFiles
from sd_ort.core.errors import InputError, first_line
from sd_ort.core.pipeline_folder import CONFIG_FOLDERS, MODEL, copy_configs, read_index, tree_hash
from sd_ort.core.quiet import no_progress_bars, quiet

if TYPE_CHECKING:
    import torch


class Source(Protocol):
    """Where a pipeline comes from."""

    @property
    def name(self) -> str:
        """What the user called it."""

    @property
    def index(self) -> Config:
        """Its model_index.json."""

    @property
    def configs(self) -> dict[str, Config]:
        """The config of each model: text_encoder, text_encoder_2, unet, controlnet, vae, those that it has."""

    @property
    def hash(self) -> str:
        """Changes whenever the exported weights or configs would."""

    @property
    def random_weights(self) -> bool:
        """Whether the weights are made up."""

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where its files lie."""

    @property
    def about(self) -> str:
        """What was found out about it, to be told; empty when the user named all of it."""

    def holder(self, model: str) -> Holder | None:
        """What a model's tensors can be read from one at a time; None when it must be loaded whole."""

    def load(self, model: str) -> torch.nn.Module:
        """One model of the pipeline, in fp32 and eval mode."""

    def write_configs(self, out: Path) -> None:
        """Write model_index.json, scheduler and tokenizers."""


# Class names in a model_index.json that can be exported, by the library that holds them.
CLASSES = {
    "UNet2DConditionModel": "diffusers",
    "AutoencoderKL": "diffusers",
    "AutoencoderTiny": "diffusers",
    "ControlNetModel": "diffusers",
    "CLIPTextModel": "transformers",
    "CLIPTextModelWithProjection": "transformers",
}
MODELS = ("text_encoder", "text_encoder_2", "unet", "controlnet", "vae")
COMPONENTS = ("text_encoder", "text_encoder_2", "image_encoder", "unet", "controlnet", "vae_encoder", "vae_decoder")


def model_class(name: str) -> Any:
    """A class of CLASSES by its name."""
    return getattr(importlib.import_module(CLASSES[name]), name)


@dataclass(frozen=True)
class FolderSource:
    """A pipeline saved by diffusers: model_index.json and a folder a model. fp16 weights are loaded into fp32."""

    name: str
    folder: Path
    index: Config
    configs: dict[str, Config]
    controlnet: Path | None = None
    random_weights: bool = False
    about: str = ""

    @cached_property
    def hash(self) -> str:
        parts = [tree_hash(self.folder_of(model)) for model in self.configs]
        parts += [tree_hash(self.folder / name) for name in CONFIG_FOLDERS]
        return hashlib.sha256("".join([json.dumps(self.index, sort_keys=True), *parts]).encode()).hexdigest()

    def weight_files(self, model: str) -> list[Path]:
        """The files that `load` reads a model's weights from."""
        folder, options = self.folder_of(model), _weights(self.folder_of(model))
        found = sorted(folder.glob("*.safetensors" if options["use_safetensors"] else "*.bin"))
        kept = [path for path in found if (".fp16" in path.name) == (options["variant"] is not None)]
        return [path for path in kept if not path.name.count(".non_ema.")]

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.folder, *([self.controlnet] if self.controlnet else []))

    def holder(self, model: str) -> Holder:
        return StoredFiles(tuple(self.weight_files(model)))

    def folder_of(self, model: str) -> Path:
        return self.controlnet if model == "controlnet" and self.controlnet else self.folder / model

    def load(self, model: str) -> torch.nn.Module:
        name = self.index[model][1]
        return load_folder(self.folder_of(model), model_class(name), CLASSES[name])

    def write_configs(self, out: Path) -> None:
        copy_configs(self.folder, out)
        (out / "model_index.json").write_text(json.dumps(self.index, indent=2) + "\n")


def load_folder(folder: Path, cls: Any, library: str) -> torch.nn.Module:
    """One model that diffusers or transformers saved, in fp32 and eval mode. Raises InputError for what is no `cls`, or
    half of one."""
    import torch

    dtype = "dtype" if library == "transformers" else "torch_dtype"
    options = {dtype: torch.float32, "local_files_only": True, **_weights(folder)}
    loaded: torch.nn.Module
    try:
        with no_progress_bars(), quiet("diffusers", "transformers"):
            loaded, keys = cls.from_pretrained(str(folder), output_loading_info=True, **options)
    except Exception as error:  # safetensors, torch, json and both libraries each raise their own kinds
        raise InputError(f"{folder} cannot be loaded as {cls.__name__}: {first_line(error)}") from error
    if missing := sorted(keys["missing_keys"]):  # both libraries would make values up and only warn
        raise InputError(
            f"{folder} lacks {len(missing)} weights of its {cls.__name__}, such as {missing[0]}: get it again."
        )
    return loaded.eval()


def _weights(folder: Path) -> dict[str, Any]:
    """Which of a model's files to load: safetensors if there are some, the variant "fp16" if there is no other."""
    safe = [p.name for p in folder.glob("*.safetensors")]
    weights = safe or [p.name for p in folder.glob("*.bin")]
    only_half = bool(weights) and all(".fp16" in name for name in weights)
    return {"use_safetensors": bool(safe), "variant": "fp16" if only_half else None}


@dataclass(frozen=True)
class PresetSource:
    """A preset with random weights: the same seed gives the same weights."""

    name: str
    seed: int
    random_weights: bool = True
    folders: tuple[Path, ...] = ()
    about: str = ""

    @property
    def preset(self) -> presets.Preset:
        return PRESETS[self.name]

    @property
    def configs(self) -> dict[str, Config]:
        return self.preset.models

    @property
    def index(self) -> Config:
        index: Config = {"_class_name": self.preset.pipeline, "_diffusers_version": version("diffusers")}
        for model, config in self.configs.items():
            name = class_name(config)
            index[model] = [CLASSES[name], name]
            if model.startswith("text_encoder"):
                index[model.replace("text_encoder", "tokenizer")] = ["transformers", "CLIPTokenizer"]
        index["scheduler"] = ["diffusers", self.preset.scheduler["_class_name"]]
        absent = {"StableDiffusionXLImg2ImgPipeline": ["text_encoder", "tokenizer"]}
        if "XL" not in self.preset.pipeline:
            absent[self.preset.pipeline] = ["safety_checker", "feature_extractor"]
            index["requires_safety_checker"] = False
        index |= {name: [None, None] for name in absent.get(self.preset.pipeline, [])}
        return index | self.preset.options

    @property
    def hash(self) -> str:
        text = json.dumps([self.index, self.configs, self.preset.scheduler, self.seed], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def holder(self, model: str) -> None:
        return None

    def load(self, model: str) -> torch.nn.Module:
        from sd_ort.checkpoints.random_weights import fill_random

        config = self.configs[model]
        cls = model_class(class_name(config))
        made = cls(cls.config_class(**config)) if "model_type" in config else cls.from_config(config)
        fill_random(made, self.seed + zlib.crc32(model.encode()))
        return made.eval()

    def write_configs(self, out: Path) -> None:
        from sd_ort.checkpoints.random_weights import write_byte_tokenizer

        (out / "model_index.json").write_text(json.dumps(self.index, indent=2) + "\n")
        scheduler = out / "scheduler"
        scheduler.mkdir()
        config = self.preset.scheduler | {"_diffusers_version": version("diffusers")}
        (scheduler / "scheduler_config.json").write_text(json.dumps(config, indent=2) + "\n")
        for model, config in self.configs.items():
            if model.startswith("text_encoder"):
                write_byte_tokenizer(out / model.replace("text_encoder", "tokenizer"), config["vocab_size"])


def class_name(config: Config) -> str:
    return str(config.get("_class_name") or config["architectures"][0])


@dataclass(frozen=True)
class FileOptions:
    """What goes with a checkpoint.

    config: of one in a single file (see `single_file`), a diffusers folder or hub id of its family. vae: a file with
    another VAE. unsafe_pickle: whether files that may run code when they are read are taken. ip_adapter, image_encoder:
    a file, and a folder with the encoder it was trained with (see `ip_adapter`).
    """

    config: str | None = None
    vae: Path | None = None
    unsafe_pickle: bool = False
    ip_adapter: Path | None = None
    image_encoder: Path | None = None


def open_source(
    model: str | None,
    preset: str | None,
    random_weights: bool,
    seed: int,
    controlnet: str | None = None,
    files: FileOptions = FileOptions(),  # noqa: B008 (frozen)
) -> Source:
    """The source the user named. Raises InputError, saying what to give instead, for anything that cannot be one."""
    source = _open_source(model, preset, random_weights, seed, controlnet, files)
    if files.vae is not None:
        from sd_ort.checkpoints.single_file import swap_vae

        source = swap_vae(source, files.vae, files.unsafe_pickle)
    if files.ip_adapter is not None:
        from sd_ort.checkpoints.ip_adapter import with_ip_adapter

        return with_ip_adapter(source, files.ip_adapter, files.image_encoder)
    if files.image_encoder is not None:
        raise InputError("--image-encoder goes with an adapter: name its file with --ip-adapter.")
    return source


def _open_source(
    model: str | None, preset: str | None, random_weights: bool, seed: int, controlnet: str | None, files: FileOptions
) -> Source:
    if preset is not None:
        if preset not in PRESETS:
            raise InputError(f"unknown preset {preset!r}: choose one of {', '.join(PRESETS)}.")
        if not random_weights:
            raise InputError(f"preset {preset} has no weights: add --random-weights, or give a checkpoint instead.")
        if controlnet is not None:
            raise InputError("--controlnet goes with a checkpoint: use the preset sd15-controlnet instead.")
        return PresetSource(preset, seed)
    if random_weights:
        raise InputError(f"--random-weights needs a --preset: choose one of {', '.join(PRESETS)}.")
    if model is None:
        raise InputError("no model given: name `demo`, a checkpoint file, a diffusers folder, a hub id, or a --preset.")
    if Path(model).is_file():
        from sd_ort.checkpoints.single_file import open_file

        if controlnet is not None:
            raise InputError(
                "--controlnet goes with a diffusers folder or a hub id, not with a checkpoint in one file."
            )
        config = None if files.config is None else locate(files.config, download_configs)
        return open_file(Path(model), config, files.unsafe_pickle)
    if files.config is not None:
        raise InputError(f"--config goes with a checkpoint in one file: {model} has its own configs.")
    source = open_folder(model, locate(model, download_pipeline))
    return with_controlnet(source, locate(controlnet, download_model)) if controlnet is not None else source


def locate(model: str, download: Callable[[str], Path]) -> Path:
    """The folder of a model the user named. Raises InputError when it neither exists nor looks like a hub id."""
    if model == "demo":
        from sd_ort.demo import MODEL_DIR

        return MODEL_DIR
    path = Path(model)
    if path.is_file():
        raise InputError(f"{path} is a file: give a diffusers folder or a hub id here.")
    if path.exists():
        return path
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model) and not path.parent.exists():
        return download(model)
    raise InputError(
        f"{model} does not exist: give `demo`, a checkpoint file, a diffusers folder, a hub id (owner/name), "
        "or a --preset."
    )


def open_folder(name: str, folder: Path) -> FolderSource:
    """Check that `folder` is a diffusers pipeline of a family we know. Raises InputError when it is not."""
    index = read_index(folder, "diffusers pipeline")
    configs = {}
    for model in MODELS:
        library, cls = (index.get(model) or (None, None))[:2]
        if cls is None:
            continue
        if not isinstance(cls, str) or CLASSES.get(cls) != library:
            raise InputError(f"{folder} has a {model} of class {cls}; sd-ort exports {', '.join(CLASSES)}.")
        if (folder / model / MODEL).is_file():
            raise InputError(f"{folder} holds ONNX models already: give it to `sd-ort optimize`.")
        configs[model] = read_config(folder / model / "config.json", f"{folder} lacks its {model}")
    if "unet" not in configs:
        raise InputError(f"{folder} has no UNet: sd-ort exports Stable Diffusion 1.x, 2.x and XL pipelines.")
    for part in ("scheduler", "tokenizer", "tokenizer_2"):
        if (index.get(part) or [None])[0] and not (folder / part).is_dir():
            raise InputError(f"{folder} lacks its {part}, which drawing needs: get the whole folder.")
    _check_unet(folder, configs["unet"])
    return FolderSource(name, folder, index, configs)


def _check_unet(folder: Path, config: Config) -> None:
    if key := unet_inputs.unknown(config):
        advice = (
            ": save it without its IP-Adapter, and give that with --ip-adapter FILE"
            if config[key] == "ip_image_proj"
            else ""
        )
        raise InputError(f"{folder} has a UNet with {key} = {config[key]}, which sd-ort does not export{advice}.")


def with_controlnet(source: FolderSource, folder: Path) -> FolderSource:
    """The pipeline with a ControlNet from another folder. Raises InputError when that is none, or not its size."""
    config = read_config(folder / "config.json", f"{folder} is no ControlNet")
    if config.get("_class_name") != "ControlNetModel":
        raise InputError(f"{folder} holds a {config.get('_class_name')}, not a ControlNetModel.")
    for key in ("cross_attention_dim", "block_out_channels"):
        if config.get(key) != source.configs["unet"].get(key):
            raise InputError(f"the ControlNet in {folder} was made for another UNet: their {key} differ.")
    xl = "XL" if is_sdxl(source) else ""
    index = source.index | {
        "_class_name": f"StableDiffusion{xl}ControlNetPipeline",
        "controlnet": ["diffusers", "ControlNetModel"],
    }
    configs = source.configs | {"controlnet": config}
    return FolderSource(f"{source.name} with {folder}", source.folder, index, configs, folder)


def choose(source: Source, wanted: Sequence[str] | None) -> list[str]:
    """Components to export, in order. Raises InputError for one that the pipeline has not."""
    there = [c for c in COMPONENTS if MODEL_OF.get(c, c) in source.configs]
    if unknown := [c for c in wanted or () if c not in there]:
        raise InputError(f"{source.name} has no component {unknown[0]!r}: choose from {', '.join(there)}.")
    return [c for c in there if not wanted or c in wanted]


def is_sdxl(source: Source) -> bool:
    """Whether the UNet takes SDXL's extra inputs, text_embeds and time_ids."""
    return unet_inputs.is_sdxl(source.configs["unet"])


def component_signature(source: Source, component: str, config: Config) -> Signature:
    """Inputs and outputs of a component of `source`, whose model has the full `config`."""
    if component.startswith("text_encoder"):  # the index decides the class: a config may name the one it was cut from
        config = config | {"architectures": [source.index[component][1]]}
    return signatures.signature(component, config, sdxl=is_sdxl(source), controlnet="controlnet" in source.configs)
