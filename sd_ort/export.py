"""Checkpoint -> ONNX pipeline folder, one component at a time, each checked against torch before the next is loaded.

    source = open_source(...)            a diffusers folder, a hub id, the demo model, or a preset's configs
    for each component:                  text_encoder, text_encoder_2, unet, controlnet, vae_encoder, vae_decoder
        load in fp32 -> wrap -> run torch at CHECK sizes -> trace at TRACE sizes -> save -> free
        -> run ONNX Runtime at CHECK sizes -> compare

Only one component is in memory at once, and its weights are held once: the exporters borrow them and the file is
written tensor by tensor. Weights of a component lie in one external-data file.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import math
import platform
import re
import shutil
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from sd_ort import models
from sd_ort.errors import InputError, OutputError, VerificationError
from sd_ort.folder import (
    CONFIG_FOLDERS,
    DATA,
    MODEL,
    copy_configs,
    is_intact,
    read_manifest,
    staged,
    tree_hash,
    write_manifest,
)
from sd_ort.models import MODEL_OF, PRESETS, Config, Signature, Tensor
from sd_ort.session import CPU_EP, first_line, runtime

if TYPE_CHECKING:
    import onnx_ir as ir

Progress = Callable[[str], None]

# What each exporter of torch 2.13 can write and we test. Dynamo's own opset is 18; later ones add Gelu (20),
# GroupNormalization (21) and Attention (23).
OPSETS = {"dynamo": (18, 20, 21, 23), "torchscript": (17, 20)}
DEFAULT_OPSET = 20

COMPONENTS = ("text_encoder", "text_encoder_2", "unet", "controlnet", "vae_encoder", "vae_decoder")

# Sizes the graphs are traced at and checked at: all different, so that a size baked in by the exporter is an error
# and not a coincidence. In latent pixels; a multiple of 8 as the UNets need. Batch 1 is checked because exporters
# like to treat 1 as a constant.
TRACE = {"batch": 2, "sequence": 12, "height": 16, "width": 24}
CHECK = {"batch": 1, "sequence": 19, "height": 24, "width": 16}

TOLERANCE = 1e-8  # normalized mean squared error of fp32 ONNX Runtime against fp32 torch; measured: about 1e-12
ALIGNMENT = 1 << 16  # of large tensors in the data file: every ONNX Runtime on every system can map it


# --- Sources --------------------------------------------------------------------------------------------------------


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

    def load(self, model: str) -> torch.nn.Module:
        """One model of the pipeline, in fp32 and eval mode."""

    def write_configs(self, out: Path) -> None:
        """Write model_index.json, scheduler and tokenizers."""


# Class names in a model_index.json that can be exported, by the library that holds them.
CLASSES = {
    "UNet2DConditionModel": "diffusers",
    "AutoencoderKL": "diffusers",
    "ControlNetModel": "diffusers",
    "CLIPTextModel": "transformers",
    "CLIPTextModelWithProjection": "transformers",
}
MODELS = tuple(dict.fromkeys(MODEL_OF.get(c, c) for c in COMPONENTS))


def _class(name: str) -> Any:
    import importlib

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

    @cached_property
    def hash(self) -> str:
        parts = [tree_hash(self.folder_of(model)) for model in self.configs]
        parts += [tree_hash(self.folder / name) for name in CONFIG_FOLDERS]
        return hashlib.sha256("".join([json.dumps(self.index, sort_keys=True), *parts]).encode()).hexdigest()

    def folder_of(self, model: str) -> Path:
        return self.controlnet if model == "controlnet" and self.controlnet else self.folder / model

    def load(self, model: str) -> torch.nn.Module:
        folder, name = self.folder_of(model), self.index[model][1]
        dtype = "dtype" if CLASSES[name] == "transformers" else "torch_dtype"
        options = {dtype: torch.float32, "local_files_only": True, "variant": _variant(folder)}
        try:
            loaded: torch.nn.Module = _class(name).from_pretrained(str(folder), **options)
        except Exception as error:  # safetensors, torch, json and both libraries each raise their own kinds
            raise InputError(f"{folder} cannot be loaded as {name}: {first_line(error)}") from error
        return loaded.eval()

    def write_configs(self, out: Path) -> None:
        copy_configs(self.folder, out)
        (out / "model_index.json").write_text(json.dumps(self.index, indent=2) + "\n")


def _variant(folder: Path) -> str | None:
    """ "fp16" when a model's folder holds only that variant of its weights."""
    weights = [p.name for p in folder.glob("*.safetensors")] or [p.name for p in folder.glob("*.bin")]
    return "fp16" if weights and all(".fp16" in name for name in weights) else None


@dataclass(frozen=True)
class PresetSource:
    """A preset with random weights: the same seed gives the same weights."""

    name: str
    seed: int
    random_weights: bool = True

    @property
    def preset(self) -> models.Preset:
        return PRESETS[self.name]

    @property
    def configs(self) -> dict[str, Config]:
        return self.preset.models

    @property
    def index(self) -> Config:
        index: Config = {"_class_name": self.preset.pipeline, "_diffusers_version": version("diffusers")}
        for model, config in self.configs.items():
            name = _class_name(config)
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

    def load(self, model: str) -> torch.nn.Module:
        config = self.configs[model]
        cls = _class(_class_name(config))
        made = cls(cls.config_class(**config)) if "model_type" in config else cls.from_config(config)
        fill_random(made, self.seed + zlib.crc32(model.encode()))
        return made.eval()

    def write_configs(self, out: Path) -> None:
        (out / "model_index.json").write_text(json.dumps(self.index, indent=2) + "\n")
        scheduler = out / "scheduler"
        scheduler.mkdir()
        config = self.preset.scheduler | {"_diffusers_version": version("diffusers")}
        (scheduler / "scheduler_config.json").write_text(json.dumps(config, indent=2) + "\n")
        for model, config in self.configs.items():
            if model.startswith("text_encoder"):
                write_byte_tokenizer(out / model.replace("text_encoder", "tokenizer"), config["vocab_size"])


def _class_name(config: Config) -> str:
    return str(config.get("_class_name") or config["architectures"][0])


def fill_random(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter its own random values, in place.

    Matrices and convolutions get variance 1/fan_in, so activations keep their scale; norm weights vary around 1 and
    biases around 0. No two parameters are equal and no bias is zero: exporters merge equal tensors, and a rule that
    forgets a zero bias would go unnoticed.
    """
    generator = torch.Generator().manual_seed(seed % 2**63)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5, generator=generator)
            else:
                parameter.normal_(float(name.endswith("weight")), 0.1, generator=generator)


def write_byte_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a CLIP tokenizer without merges: each byte is a token, with another id where it ends a word.

    Ids are laid out as CLIP's: 0-255 bytes, 256-511 bytes that end a word, and the last two of the vocabulary are
    start and end of text. A stand-in, so that pipelines with random weights run without a download.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    characters = sorted(ByteLevel.alphabet())
    tokens = [*characters, *(c + "</w>" for c in characters)]
    ids = {token: i for i, token in enumerate(tokens)}
    ids |= {"<|startoftext|>": vocabulary - 2, "<|endoftext|>": vocabulary - 1}
    CLIPTokenizer(vocab=ids, merges=[], model_max_length=77).save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps(ids, ensure_ascii=False))
    (folder / "merges.txt").write_text("#version: 0.2\n")


def open_source(
    model: str | None, preset: str | None, random_weights: bool, seed: int, controlnet: str | None = None
) -> Source:
    """The source the user named. Raises InputError, saying what to give instead, for anything that cannot be one."""
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
        raise InputError("no model given: name `demo`, a diffusers folder, a hub id, or a --preset.")
    source = open_folder(model, _locate(model, download_pipeline))
    return with_controlnet(source, _locate(controlnet, download_model)) if controlnet is not None else source


def _locate(model: str, download: Callable[[str], Path]) -> Path:
    """The folder of a model the user named. Raises InputError when it neither exists nor looks like a hub id."""
    if model == "demo":
        from sd_ort.demo import MODEL_DIR

        return MODEL_DIR
    path = Path(model)
    if path.is_file():
        raise InputError(
            f"{path} is a file: save it as a folder with diffusers' from_single_file(FILE).save_pretrained(DIR)."
        )
    if path.exists():
        return path
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model) and not path.parent.exists():
        return download(model)
    raise InputError(f"{model} does not exist: give `demo`, a diffusers folder, a hub id (owner/name), or a --preset.")


def open_folder(name: str, folder: Path) -> FolderSource:
    """Check that `folder` is a diffusers pipeline of a family we know. Raises InputError when it is not."""
    index = _read_json(folder / "model_index.json", f"{folder} is no diffusers pipeline")
    configs = {}
    for model in MODELS:
        library, cls = (index.get(model) or (None, None))[:2]
        if cls is None:
            continue
        if not isinstance(cls, str) or CLASSES.get(cls) != library:
            raise InputError(f"{folder} has a {model} of class {cls}; sd-ort exports {', '.join(CLASSES)}.")
        if (folder / model / MODEL).is_file():
            raise InputError(f"{folder} holds ONNX models already: give it to `sd-ort optimize`.")
        configs[model] = _read_json(folder / model / "config.json", f"{folder} lacks its {model}")
    if "unet" not in configs:
        raise InputError(f"{folder} has no UNet: sd-ort exports Stable Diffusion 1.x, 2.x and XL pipelines.")
    _check_unet(folder, configs["unet"])
    return FolderSource(name, folder, index, configs)


# Parts of a diffusers UNet that would need inputs which the pipelines do not give.
FOREIGN = ("class_embed_type", "num_class_embeds", "encoder_hid_dim_type", "encoder_hid_dim", "time_cond_proj_dim")


def _check_unet(folder: Path, config: Config) -> None:
    foreign = [key for key in FOREIGN if config.get(key)]
    if config.get("addition_embed_type") not in (None, "text_time"):
        foreign.append("addition_embed_type")
    if foreign:
        raise InputError(f"{folder} has a UNet with {foreign[0]} = {config[foreign[0]]}, which sd-ort does not export.")


def with_controlnet(source: FolderSource, folder: Path) -> FolderSource:
    """The pipeline with a ControlNet from another folder. Raises InputError when that is none, or not its size."""
    config = _read_json(folder / "config.json", f"{folder} is no ControlNet")
    if config.get("_class_name") != "ControlNetModel":
        raise InputError(f"{folder} holds a {config.get('_class_name')}, not a ControlNetModel.")
    for key in ("cross_attention_dim", "block_out_channels"):
        if config.get(key) != source.configs["unet"].get(key):
            raise InputError(f"the ControlNet in {folder} was made for another UNet: their {key} differ.")
    xl = "XL" if _is_sdxl(source) else ""
    index = source.index | {
        "_class_name": f"StableDiffusion{xl}ControlNetPipeline",
        "controlnet": ["diffusers", "ControlNetModel"],
    }
    configs = source.configs | {"controlnet": config}
    return FolderSource(f"{source.name} with {folder}", source.folder, index, configs, folder)


def _read_json(path: Path, otherwise: str) -> Config:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise InputError(f"{otherwise}: {path} is missing.") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a JSON object.")
    return content


def download_pipeline(hub_id: str) -> Path:
    """Fetch a pipeline from the Hugging Face hub, or find it in its cache. Raises InputError when that fails."""
    from diffusers import DiffusionPipeline

    return _fetch(hub_id, lambda: DiffusionPipeline.download(hub_id, use_safetensors=True))


def download_model(hub_id: str) -> Path:
    """Fetch a single model, such as a ControlNet, from the hub. Raises InputError when that fails."""
    from huggingface_hub import snapshot_download

    return _fetch(hub_id, lambda: snapshot_download(hub_id, allow_patterns=["config.json", "*model.safetensors"]))


def _fetch(hub_id: str, download: Callable[[], str]) -> Path:
    try:
        with quiet():
            return Path(download())
    except Exception as error:  # the hub client raises its own, httpx's and the system's kinds
        raise InputError(
            f"{hub_id} is no folder here and cannot be fetched from the hub: check the name and the network, "
            f"or give a diffusers folder ({first_line(error)})."
        ) from error


# --- Wrappers: a torch module with exactly the inputs and outputs of the ONNX graph ----------------------------------


class TextEncoder(torch.nn.Module):
    """input_ids [B, S] -> last_hidden_state, pooler_output; for SDXL the penultimate hidden state [, text_embeds]."""

    def __init__(self, model: torch.nn.Module, sdxl: bool) -> None:
        super().__init__()
        self.model = model
        self.sdxl = sdxl

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output = self.model(input_ids, output_hidden_states=self.sdxl)
        if not self.sdxl:
            return output.last_hidden_state, output.pooler_output
        hidden = output.hidden_states[-2]
        return (hidden, output.text_embeds) if "text_embeds" in output else (hidden,)


class UNet(torch.nn.Module):
    """sample, timestep, encoder_hidden_states [, text_embeds, time_ids] [, ControlNet's residuals] -> out_sample."""

    def __init__(self, model: torch.nn.Module, sdxl: bool, controlnet: bool) -> None:
        super().__init__()
        self.model = model
        self.sdxl = sdxl
        self.controlnet = controlnet

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, *extra: Any) -> torch.Tensor:
        options: dict[str, Any] = {}
        if self.sdxl:
            options["added_cond_kwargs"] = {"text_embeds": extra[0], "time_ids": extra[1]}
            extra = extra[2:]
        if self.controlnet:
            options["down_block_additional_residuals"] = tuple(extra[:-1])
            options["mid_block_additional_residual"] = extra[-1]
        output: torch.Tensor = self.model(sample, timestep, context, return_dict=False, **options)[0]
        return output


class ControlNet(torch.nn.Module):
    """The UNet's inputs, an image and a scale -> one residual a skip connection, and one for the middle block."""

    def __init__(self, model: torch.nn.Module, sdxl: bool) -> None:
        super().__init__()
        self.model = model
        self.sdxl = sdxl

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, *extra: Any) -> Any:
        options: dict[str, Any] = {}
        if self.sdxl:
            options["added_cond_kwargs"] = {"text_embeds": extra[0], "time_ids": extra[1]}
        image, scale = extra[-2:]
        down, middle = self.model(sample, timestep, context, image, scale, return_dict=False, **options)
        return (*down, middle)


class VaeEncoder(torch.nn.Module):
    """image [B, 3, H, W] in -1..1 -> mean and log variance [B, 2C, H/8, W/8], not scaled."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        del model.decoder

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        parameters: torch.Tensor = self.model.encode(sample).latent_dist.parameters  # type: ignore[operator]
        return parameters


class VaeDecoder(torch.nn.Module):
    """latent [B, C, H, W], already divided by the scaling factor -> image [B, 3, 8H, 8W]."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        del model.encoder

    def forward(self, latent_sample: torch.Tensor) -> torch.Tensor:
        image: torch.Tensor = self.model.decode(latent_sample, return_dict=False)[0]  # type: ignore[operator]
        return image


def wrap(component: str, model: torch.nn.Module, sdxl: bool, controlnet: bool) -> torch.nn.Module:
    """The module of `component`, in eval mode."""
    if component.startswith("text_encoder"):
        return TextEncoder(model, sdxl).eval()
    if component == "unet":
        return UNet(model, sdxl, controlnet).eval()
    if component == "controlnet":
        return ControlNet(model, sdxl).eval()
    return (VaeEncoder if component == "vae_encoder" else VaeDecoder)(model).eval()


def example(tensor: Tensor, sizes: Mapping[str, int], config: Mapping[str, Any], seed: int) -> torch.Tensor:
    """Random values for an input: token ids in the vocabulary, timesteps in 0..1000, SDXL's sizes, or normal noise."""
    generator = torch.Generator().manual_seed(seed + zlib.crc32(tensor.name.encode()))
    shape = [models.size(axis, sizes) for axis in tensor.axes]
    if tensor.dtype == "int64":
        return torch.randint(config["vocab_size"], shape, generator=generator)
    if tensor.name == "timestep":
        return torch.rand(shape, generator=generator) * 1000
    if tensor.name == "time_ids":
        return torch.randint(1024, shape, generator=generator).float()
    if tensor.name == "conditioning_scale":
        return torch.full(shape, 0.8)
    return torch.randn(shape, generator=generator)


# --- Exporters ------------------------------------------------------------------------------------------------------


def export_dynamo(
    module: torch.nn.Module, args: Sequence[torch.Tensor], signature: Signature, opset: int, scratch: Path
) -> ir.Model:
    """The module as an ONNX graph, through torch.export. Weights are borrowed from the module, not copied."""
    shapes = dynamic_shapes(module, signature)
    captured = torch.export.export(module, tuple(args), dynamic_shapes=shapes, strict=False)
    program = torch.onnx.export(
        captured,
        dynamo=True,
        input_names=[t.name for t in signature.inputs],
        output_names=[t.name for t in signature.outputs],
        opset_version=opset,
        verbose=False,
    )
    assert program is not None
    return program.model


def dynamic_shapes(module: torch.nn.Module, signature: Signature) -> tuple[Any, ...]:
    """`signature`'s axes as torch.export wants them: tied symbols as multiples of one Dim.

    A UNet's height is declared as 8 times a Dim: then the sizes at every level are whole by construction, and the
    graph has no rounding arithmetic.
    """
    from torch.export import Dim

    dims: dict[str, Any] = {}

    def dim(axis: str) -> Any:
        symbol, times, divisor = split_axis(axis)
        unit = signature.multiples.get(symbol, 1)
        base = dims.setdefault(symbol, Dim(f"_{symbol}", max=(LIMITS | signature.limits)[symbol]))
        count = unit * times // divisor
        return base if count == 1 else count * base

    shapes = [{i: dim(axis) for i, axis in t.dynamic_axes.items()} for t in signature.inputs]
    named = len([p for p in _parameters(module) if p.kind != p.VAR_POSITIONAL])
    return (*shapes[:named], tuple(shapes[named:])) if len(shapes) > named else tuple(shapes)


# Upper bounds torch.export is told. Not enforced by the graphs: 63 is where diffusers' upsampling starts to ask for a
# contiguous tensor, which is nothing in ONNX.
LIMITS = {"batch": 63, "sequence": 4096, "height": 4096, "width": 4096}


def _parameters(module: torch.nn.Module) -> list[Any]:
    import inspect

    return list(inspect.signature(module.forward).parameters.values())


def export_torchscript(
    module: torch.nn.Module, args: Sequence[torch.Tensor], signature: Signature, opset: int, scratch: Path
) -> ir.Model:
    """The module as an ONNX graph, through the TorchScript tracer. Writes to `scratch`, where the weights stay."""
    import onnx_ir as ir

    path = scratch / MODEL
    torch.onnx.export(
        module,
        tuple(args),
        str(path),
        dynamo=False,
        dynamic_axes={t.name: t.dynamic_axes for t in (*signature.inputs, *signature.outputs)},
        input_names=[t.name for t in signature.inputs],
        output_names=[t.name for t in signature.outputs],
        opset_version=opset,
    )
    return ir.load(path)


EXPORTERS = {"dynamo": export_dynamo, "torchscript": export_torchscript}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporters' warnings and log lines from the terminal; errors are exceptions and still come through."""
    names = ("torch.onnx", "torch.export", "torch.fx", "torch._dynamo", "onnxscript", "onnx_ir", "transformers")
    loggers = [logging.getLogger(name) for name in names]
    loggers += [
        log
        for name, log in logging.root.manager.loggerDict.items()
        if isinstance(log, logging.Logger) and name.startswith(names)
    ]
    levels = [log.level for log in loggers]
    try:
        for log in loggers:
            log.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(loggers, levels, strict=True):
            log.setLevel(level)


def tidy(model: ir.Model, signature: Signature) -> None:
    """Name all axes after `signature`, drop the wrapper's prefix, and keep of the metadata only module scopes.

    Stack traces in the metadata would carry paths of this machine and make up a third of the file.
    """
    import onnx_ir as ir

    graph = model.graph
    symbols = axis_symbols(graph.inputs, signature)
    for node in graph.all_nodes():
        for key in [key for key in node.metadata_props if key not in KEPT_METADATA]:
            del node.metadata_props[key]
        for value in node.outputs:
            value.metadata_props.clear()
            if value.shape is not None:
                sizes = [d if isinstance(d, int) else rename(d.value, symbols) for d in value.shape]
                value.shape = ir.Shape(sizes)
    tensors = [*signature.inputs, *signature.outputs]
    for value, tensor in zip([*graph.inputs, *graph.outputs], tensors, strict=True):
        value.shape = ir.Shape(tensor.axes)
        value.metadata_props.clear()
    for value in list(graph.initializers.values()):
        value.name = (value.name or "").removeprefix("model.")
        value.metadata_props.clear()
    graph.metadata_props.clear()
    model.metadata_props.clear()
    model.producer_name, model.producer_version = "sd-ort", version("sd-ort")


KEPT_METADATA = ("pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy")


def axis_symbols(inputs: Sequence[ir.Value], signature: Signature) -> dict[str, str]:
    """The exporter's symbol -> ours, from the graph's inputs: `8*s26` at axis `height` gives {"s26": "height/8"}.

    Empty for the TorchScript exporter, which uses our names.
    """
    symbols = {}
    for value, tensor in zip(inputs, signature.inputs, strict=True):
        assert value.shape is not None
        for i, axis in tensor.dynamic_axes.items():
            if str(value.shape[i]) == axis:
                continue
            factor, symbol = re.fullmatch(r"(?:(\d+)\*)?(\w+)", str(value.shape[i])).groups()  # type: ignore[union-attr]
            name, times, divisor = split_axis(axis)
            symbols[symbol] = join_axis(name, times, divisor * int(factor or 1))
    return symbols


def rename(axis: str | None, symbols: Mapping[str, str]) -> str | None:
    """A size in the exporter's symbols, in ours: with s26 = height/8, `4*s26` is `height/2`. None is unknown."""
    if axis is None:
        return None
    if match := re.fullmatch(r"(?:(\d+)\*)?(\w+)", axis):
        factor, symbol = match.groups()
        if symbol in symbols:
            name, times, divisor = split_axis(symbols[symbol])
            return join_axis(name, times * int(factor or 1), divisor)
    ours = {symbol: f"({name})" if "/" in name else name for symbol, name in symbols.items()}
    return re.sub(r"[A-Za-z_]\w*", lambda m: ours.get(m[0], m[0]), axis)


def split_axis(axis: str) -> tuple[str, int, int]:
    """`height*8` -> (height, 8, 1); `height/4` -> (height, 1, 4)."""
    name, times, divisor = re.fullmatch(r"(\w+)(?:\*(\d+))?(?:/(\d+))?", axis).groups()  # type: ignore[union-attr]
    return name, int(times or 1), int(divisor or 1)


def join_axis(name: str, times: int, divisor: int) -> str:
    """The inverse of `split_axis`, reduced."""
    common = math.gcd(times, divisor)
    times, divisor = times // common, divisor // common
    return name + (f"*{times}" if times > 1 else "") + (f"/{divisor}" if divisor > 1 else "")


# --- One component --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What changes the exported graphs."""

    opset: int
    exporter: str


def export_component(source: Source, component: str, folder: Path, options: Options, seed: int) -> dict[str, Any]:
    """Export one component into `folder` and compare it with torch; its entry of the manifest.

    Raises VerificationError when ONNX Runtime's fp32 outputs differ from torch's by more than TOLERANCE.
    """
    import onnx_ir as ir

    started = time.perf_counter()
    folder.mkdir()
    scratch = folder / ".scratch"
    scratch.mkdir()
    with quiet(), torch.no_grad():
        model = source.load(MODEL_OF.get(component, component))
        config = save_config(model, folder)
        check_space(model, folder, copies=2 if options.exporter == "torchscript" else 1)
        signature = component_signature(source, component, config)
        module = wrap(component, model, _is_sdxl(source), "controlnet" in source.configs)
        inputs = {t.name: example(t, CHECK, config, seed) for t in signature.inputs}
        outputs = module(*inputs.values())
        expected = [o.numpy() for o in (outputs if isinstance(outputs, tuple) else (outputs,))]
        args = [example(t, TRACE, config, seed + 1) for t in signature.inputs]
        graph = EXPORTERS[options.exporter](module, args, signature, options.opset, scratch)
        tidy(graph, signature)
        nodes = len(graph.graph)
        ir.save(graph, folder / MODEL, external_data=DATA, alignment=ALIGNMENT)
    for value in graph.graph.initializers.values():  # onnxscript's rules keep the last graph they saw: not its weights
        value.const_value = None
    del model, module, args, outputs, graph
    shutil.rmtree(scratch)
    torch.compiler.reset()
    gc.collect()
    error = compare(run_onnx(folder / MODEL, inputs), expected)
    if not error["nmse"] <= TOLERANCE:
        raise VerificationError(
            f"{component} differs from torch after export (NMSE {error['nmse']:.1e}, tolerance {TOLERANCE:.0e}): "
            "try another --opset or --exporter."
        )
    return {
        "torch_error": error | {"shapes": {name: list(value.shape) for name, value in inputs.items()}},
        "nodes": nodes,
        "bytes": sum((folder / name).stat().st_size for name in (MODEL, DATA)),
        "seconds": round(time.perf_counter() - started, 1),
    }


def _is_sdxl(source: Source) -> bool:
    return bool(source.configs["unet"].get("addition_embed_type") == "text_time")


def component_signature(source: Source, component: str, config: Config) -> Signature:
    """Inputs and outputs of a component of `source`, whose model has the full `config`."""
    if component.startswith("text_encoder"):  # the index decides the class: a config may name the one it was cut from
        config = config | {"architectures": [source.index[component][1]]}
    return models.signature(component, config, sdxl=_is_sdxl(source), controlnet="controlnet" in source.configs)


def save_config(model: Any, folder: Path) -> Config:
    """Write the model's config.json, with the defaults filled in, and return it."""
    if hasattr(model, "save_config"):  # diffusers
        model.save_config(folder)
    else:
        model.config.save_pretrained(folder)
    return _read_json(folder / "config.json", f"{folder} has no config")


def check_space(model: torch.nn.Module, folder: Path, copies: int) -> None:
    """Raise OutputError when the disk has no room for `copies` of the weights in fp32."""
    needed = sum(p.numel() for p in model.parameters()) * 4 * copies
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OutputError(
            f"no space left for {folder.name}: it needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free."
        )


def run_onnx(path: Path, inputs: Mapping[str, torch.Tensor]) -> list[np.ndarray]:
    """Outputs of the graph as it is: no graph optimization and no repacked weights, so they stay mapped from disk."""
    onnxruntime = runtime()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=[CPU_EP])
    outputs: list[np.ndarray] = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    return outputs


def compare(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> dict[str, float]:
    """Worst error over all outputs: `max_abs`, and `nmse` = sum (a - e)^2 / sum e^2. A wrong shape or NaN is inf."""
    worst = {"max_abs": 0.0, "nmse": 0.0}
    for a, e in zip(actual, expected, strict=True):
        if a.shape != e.shape or not (np.isfinite(a).all() and np.isfinite(e).all()):
            return {"max_abs": float("inf"), "nmse": float("inf")}
        difference = a.astype(np.float64) - e
        worst["max_abs"] = max(worst["max_abs"], float(np.abs(difference).max()))
        worst["nmse"] = max(worst["nmse"], float(np.square(difference).sum() / np.square(e, dtype=np.float64).sum()))
    return worst


# --- The stage ------------------------------------------------------------------------------------------------------


def export(
    model: str | None,
    out: Path,
    *,
    preset: str | None = None,
    random_weights: bool = False,
    opset: int = DEFAULT_OPSET,
    exporter: str = "dynamo",
    seed: int = 0,
    components: Sequence[str] | None = None,
    controlnet: str | None = None,
    progress: Progress = lambda message: None,
) -> dict[str, Any]:
    """Export a pipeline to the folder `out` and return its manifest.

    `model`: "demo", a diffusers folder or a hub id; or None with `preset` and `random_weights`, made from `seed`.
    `components`: export only these. `controlnet`: a diffusers folder or hub id of a ControlNet to export along, with
    the residual inputs in the UNet. `progress` is called with one line when a component starts and when it is done.
    Nothing is done when `out` already holds the same export.

    Raises InputError for a source or option that cannot be used, OutputError when `out` cannot be written,
    VerificationError when a component's numbers differ from torch's. Nothing is left behind then.
    """
    if exporter not in EXPORTERS:
        raise InputError(f"unknown exporter {exporter!r}: choose one of {', '.join(EXPORTERS)}.")
    if opset not in OPSETS[exporter]:
        choices = ", ".join(map(str, OPSETS[exporter]))
        raise InputError(f"opset {opset} is not supported by the {exporter} exporter: choose one of {choices}.")
    source = open_source(model, preset, random_weights, seed, controlnet)
    names = _choose(source, components)
    manifest: dict[str, Any] = {
        "stage": "export",
        "source": {"model": source.name, "hash": source.hash, "random_weights": source.random_weights},
        "versions": versions(),
        "options": {"opset": opset, "exporter": exporter, "seed": seed, "components": names},
    }
    if source.random_weights:
        manifest["source"]["tokenizer"] = "stand-in: one token a byte"
    previous = _previous(out)
    if all(previous.get(key) == value for key, value in manifest.items()) and is_intact(out, previous):
        progress(f"{out} is up to date.")
        return previous
    with staged(out) as work:
        source.write_configs(work)
        done = {}
        for i, name in enumerate(names, 1):
            progress(f"[{i}/{len(names)}] {name}: exporting ...")
            done[name] = export_component(source, name, work / name, Options(opset, exporter), seed)
            progress(f"[{i}/{len(names)}] {name}: done in {done[name]['seconds']:.1f} s")
        manifest["components"] = done
        write_manifest(work, manifest)
    return read_manifest(out)


def _choose(source: Source, wanted: Sequence[str] | None) -> list[str]:
    """Components to export, in order. Raises InputError for one that the pipeline has not."""
    there = [c for c in COMPONENTS if MODEL_OF.get(c, c) in source.configs]
    if unknown := [c for c in wanted or () if c not in there]:
        raise InputError(f"{source.name} has no component {unknown[0]!r}: choose from {', '.join(there)}.")
    return [c for c in there if not wanted or c in wanted]


def _previous(out: Path) -> dict[str, Any]:
    """The manifest of an earlier export, or {} when there is none that can be read: it is replaced then."""
    try:
        return read_manifest(out)
    except InputError:
        return {}


def versions() -> dict[str, str]:
    """Versions of the packages that decide how a graph comes out."""
    packages = ("sd-ort", "torch", "diffusers", "transformers", "onnx", "onnx-ir", "onnxscript")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}
