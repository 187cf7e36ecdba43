"""A checkpoint: the configs and weights of a pipeline's models. `open.open_checkpoint` returns one."""

from __future__ import annotations

import hashlib
import importlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.checkpoints import diffusion_transformers, signatures, unet_inputs
from sd_ort.checkpoints.signatures import MODEL_OF, READS_IMAGES, Config, Signature
from sd_ort.checkpoints.tensor_readers import Read, TensorReader, is_finite, open_tensors
from sd_ort.core.errors import InputError
from sd_ort.core.ownership import sha256
from sd_ort.core.pipeline_folder import COMPONENTS, CONFIG_FOLDERS, copy_configs

if TYPE_CHECKING:
    import torch

# Class names in a model_index.json that can be exported, and the libraries that define them.
CLASSES = {
    "UNet2DConditionModel": "diffusers",
    "AutoencoderKL": "diffusers",
    "AutoencoderKLFlux2": "diffusers",
    "AutoencoderKLQwenImage": "diffusers",
    "AutoencoderTiny": "diffusers",
    "ControlNetModel": "diffusers",
    **dict.fromkeys(diffusion_transformers.FAMILIES, "diffusers"),
    "CLIPTextModel": "transformers",
    "CLIPTextModelWithProjection": "transformers",
    "T5EncoderModel": "transformers",
    **dict.fromkeys(diffusion_transformers.LANGUAGE_MODELS, "transformers"),
}
LIBRARIES = {**CLASSES, "CLIPVisionModelWithProjection": "transformers"}  # with the image encoder of an IP-Adapter
MODELS = ("text_encoder", "text_encoder_2", "text_encoder_3", "unet", "transformer", "controlnet", "vae")


@dataclass(frozen=True)
class CheckpointModel:
    """One model of a checkpoint.

    config: its diffusers or transformers config. load: returns the torch module, in float32 and eval mode. files: all
    files that its weights are read from. reader: reads one tensor at a time; None if only `load` can read them.
    check_files: raises InputError for missing and damaged files of weights, without reading weights.
    """

    config: Config
    load: Callable[[], torch.nn.Module]
    files: tuple[Path, ...] = ()
    reader: TensorReader | None = None
    check_files: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Checkpoint:
    """The models and configs of a pipeline, wherever they come from. Weights are read on demand, and never changed.

    name: the user's name of it. index: content of model_index.json. models: by name, in the order of `MODELS`.
    config_folder: the pipeline folder with scheduler and tokenizers. generated_files: relative path -> content of
    config files that no folder has. byte_tokenizers: folder -> config of the text encoder, of tokenizers that no folder
    has (see `random_weights`). paths: files and folders that it is read from. seed: of random weights; None if the
    weights are trained. detection_note: a line on what was detected, for the user; may be empty.
    """

    name: str
    index: Config
    models: Mapping[str, CheckpointModel]
    config_folder: Path | None = None
    generated_files: Mapping[str, str] = field(default_factory=dict)
    byte_tokenizers: Mapping[str, Config] = field(default_factory=dict)
    paths: tuple[Path, ...] = ()
    seed: int | None = None
    detection_note: str = ""

    @property
    def configs(self) -> dict[str, Config]:
        return {name: model.config for name, model in self.models.items()}

    @property
    def random_weights(self) -> bool:
        """Whether the weights are random numbers."""
        return self.seed is not None

    @cached_property
    def hash(self) -> str:
        """SHA-256 of everything that the exported weights and configs depend on."""
        files = [file for model in self.models.values() for file in model.files]
        if self.config_folder is not None:
            folders = (self.config_folder / name for name in CONFIG_FOLDERS)
            files += [file for folder in folders for file in sorted(folder.rglob("*")) if file.is_file()]
        settings = [self.index, self.configs, dict(self.generated_files), self.seed]
        parts = [json.dumps(settings, sort_keys=True), *(f"{file.name} {sha256(file)}" for file in files)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def load(self, model: str) -> torch.nn.Module:
        """Return a model as a torch module, in float32 and eval mode."""
        return self.models[model].load()

    def read_tensors(self, model: str, names: Iterable[str]) -> Read:
        """Return a function that reads the tensors `names` of a model in their stored dtype.

        The function raises InputError for NaN and infinity. The tensors are read one at a time if safetensors files
        have all of them, else from the loaded model.
        """
        reader = self.models[model].reader
        read = (open_tensors(reader, list(names)) if reader is not None else None) or self._read_loaded(model)

        def read_finite(name: str) -> np.ndarray:
            values = read(name)
            if not is_finite(values):
                raise InputError(f"{self.name}: {name} of its {model} holds NaN or infinity: get it again.")
            return values

        return read_finite

    def _read_loaded(self, model: str) -> Read:
        """Return a function that loads the model at its first call; the model lives as long as the function."""
        state: dict[str, np.ndarray] = {}
        lock = threading.Lock()

        def read(name: str) -> np.ndarray:
            with lock:
                if not state:
                    state.update({key: tensor.numpy() for key, tensor in self.load(model).state_dict().items()})
            return state[name]

        return read

    def write_configs(self, out: Path) -> None:
        """Write model_index.json, scheduler and tokenizers."""
        if self.config_folder is not None:
            copy_configs(self.config_folder, out)
        for name, content in {**self.generated_files, "model_index.json": as_json(self.index)}.items():
            (out / name).parent.mkdir(exist_ok=True)
            (out / name).write_text(content)
        for name, config in self.byte_tokenizers.items():
            from sd_ort.checkpoints import random_weights  # imports torch

            if class_name(config) == "T5EncoderModel":
                random_weights.write_character_tokenizer(out / name)
            elif class_name(config) in diffusion_transformers.QWENS:
                random_weights.write_chat_tokenizer(out / name)
            elif class_name(config) == diffusion_transformers.MISTRAL:
                random_weights.write_mistral_tokenizer(out / name)
            else:
                random_weights.write_byte_tokenizer(out / name, config["vocab_size"])


def as_json(config: Config) -> str:
    """Return the content of a config file."""
    return json.dumps(config, indent=2) + "\n"


def class_name(config: Config) -> str:
    """Return the class of the model with this config."""
    return str(config.get("_class_name") or config["architectures"][0])


def model_class(name: str) -> Any:
    """Return a class of `LIBRARIES` by its name."""
    return getattr(importlib.import_module(LIBRARIES[name]), name)


def build_model(name: str, config: Config) -> Any:
    """Return a new torch module of a class of `LIBRARIES`."""
    cls = model_class(name)
    return cls(cls.config_class(**config)) if LIBRARIES[name] == "transformers" else cls.from_config(config)


def select_components(checkpoint: Checkpoint, names: Sequence[str] | None) -> list[str]:
    """Return the components `names`, or all, in order. Raises InputError for one that the pipeline does not have."""
    available = [c for c in COMPONENTS if MODEL_OF.get(c, c) in checkpoint.models]
    if not checkpoint.configs.get("text_encoder", {}).get(READS_IMAGES):
        available = [c for c in available if c != "vision_encoder"]
    if unknown := [c for c in names or () if c not in available]:
        raise InputError(f"{checkpoint.name} has no component {unknown[0]!r}: choose from {', '.join(available)}.")
    return [c for c in available if not names or c in names]


def check_weight_files(checkpoint: Checkpoint, components: Sequence[str]) -> None:
    """Raise InputError for a component without weights or with a damaged file of them, without reading weights."""
    for name in dict.fromkeys(MODEL_OF.get(component, component) for component in components):
        checkpoint.models[name].check_files()


def is_sdxl(checkpoint: Checkpoint) -> bool:
    """Return whether the UNet has SDXL's additional inputs, text_embeds and time_ids."""
    return unet_inputs.is_sdxl(checkpoint.models["unet"].config)


def has_penultimate_states(checkpoint: Checkpoint) -> bool:
    """Return whether the text encoders return the penultimate hidden state: CLIP of SDXL and SD3, Qwen3 of Z-Image."""
    transformer = checkpoint.models.get("transformer")
    if transformer is None:
        return is_sdxl(checkpoint)
    return diffusion_transformers.FAMILIES[class_name(transformer.config)].penultimate_states


def component_signature(checkpoint: Checkpoint, component: str, config: Config) -> Signature:
    """Return inputs and outputs of a component; `config` is the complete config of its model."""
    if component.startswith("text_encoder"):  # the index decides the class: a config may name the one it was cut from
        config = config | {"architectures": [checkpoint.index[component][1]]}
    controlnet = "controlnet" in checkpoint.configs
    penultimate = has_penultimate_states(checkpoint)
    return signatures.signature(component, config, penultimate=penultimate, controlnet=controlnet)
