"""IP-Adapters: a UNet that is told pictures beside its prompt, and the image encoder that looks at them.

An adapter is a file of weights (h94/IP-Adapter's layout: `image_proj.*`, and `ip_adapter.N.*` a layer) that goes with
UNets of one family and with one image encoder; what it is, is read off its tensors' names and shapes, and all of it is
checked before a model is loaded. The UNet's config.json tells later stages: `ip_adapter`, with `width` and, of
IP-Adapter Plus, `rows` of what the encoder gives a picture, `layers` that attend to pictures, and what else decides the
graph.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sd_ort.checkpoints.checkpoint import Source, class_name, load_folder, model_class
from sd_ort.checkpoints.conditioning import CLIP_MEAN, CLIP_STD
from sd_ort.checkpoints.configs import read_config
from sd_ort.checkpoints.ip_adapter_modules import HEAD, Pictures, Projection, Resampler, attach, cross_attentions
from sd_ort.checkpoints.signatures import Config, signature
from sd_ort.checkpoints.single_file import PICKLES, read, shapes
from sd_ort.checkpoints.source_override import Changed
from sd_ort.checkpoints.tensor_readers import Holder, Read
from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import sha256, tree_hash

Tensors = Mapping[str, torch.Tensor]

ENCODER = "CLIPVisionModelWithProjection"
PREFIXES = ("image_proj.", "ip_adapter.")


@dataclass(frozen=True)
class IpAdapter(Changed):
    """Another source whose UNet has the adapter in `file`. `record`: what its config says of it. `names`: tensors of
    the UNet that are the adapter's -> what they are called in the file."""

    encoder: Path
    record: Config
    names: Mapping[str, str]

    @property
    def index(self) -> Config:
        both = {"image_encoder": ["transformers", ENCODER], "feature_extractor": ["transformers", "CLIPImageProcessor"]}
        return self.source.index | both

    @cached_property
    def configs(self) -> dict[str, Config]:
        unet = self.source.configs["unet"] | {"ip_adapter": self.record}
        return self.source.configs | {"unet": unet, "image_encoder": encoder_config(self.encoder)}

    @property
    def about(self) -> str:
        kind = "IP-Adapter Plus" if "rows" in self.record else "IP-Adapter"
        own = f"{self.file.name}: {kind}, {self.record['tokens']} tokens a picture, {len(self.record['layers'])} layers"
        return "; ".join(part for part in (self.source.about, own) if part)

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.encoder, *super().folders)

    @cached_property
    def hash(self) -> str:
        parts = self.source.hash + sha256(self.file) + tree_hash(self.encoder)
        return hashlib.sha256(parts.encode()).hexdigest()

    def holder(self, model: str) -> Holder | None:
        if model == "image_encoder":
            return None
        held = self.source.holder(model)
        return held if model != "unet" or held is None else AdaptedFiles(held, self.file, self.names)

    def load(self, model: str) -> torch.nn.Module:
        if model == "image_encoder":
            import transformers

            return load_folder(self.encoder, getattr(transformers, ENCODER), "transformers")
        loaded: Any = self.source.load(model)
        return self._adapted(loaded) if model == "unet" else loaded

    def _adapted(self, unet: Any) -> torch.nn.Module:
        tensors = read(self.file, PREFIXES)
        _attached(unet, self.file, tensors)
        weights = {ours: tensors[theirs].float() for ours, theirs in self.names.items()}
        if broken := [name for name, tensor in weights.items() if not torch.isfinite(tensor).all()]:
            raise InputError(f"{self.file}: {self.names[broken[0]]} holds NaN or infinity: get it again.")
        unet.load_state_dict(weights, strict=False, assign=True)
        unet.register_to_config(ip_adapter=self.record)
        made: torch.nn.Module = unet.eval()
        return made

    def write_configs(self, out: Path) -> None:
        super().write_configs(out)
        (out / "model_index.json").write_text(json.dumps(self.index, indent=2) + "\n")
        (out / "feature_extractor").mkdir(exist_ok=True)
        side = self.configs["image_encoder"]["image_size"]
        config: Config = {"crop_size": {"height": side, "width": side}, "size": {"shortest_edge": side}}
        config |= {"image_mean": CLIP_MEAN, "image_std": CLIP_STD, "image_processor_type": "CLIPImageProcessor"}
        (out / "feature_extractor" / "preprocessor_config.json").write_text(json.dumps(config, indent=2) + "\n")


@dataclass(frozen=True)
class AdaptedFiles:
    """A UNet's files and its adapter's."""

    held: Holder
    file: Path
    names: Mapping[str, str]

    @property
    def paths(self) -> tuple[Path, ...]:
        return (*self.held.paths, self.file)

    def has(self, name: str, stored: Container[str]) -> bool:
        return self.names[name] in stored if name in self.names else self.held.has(name, stored)

    def sources(self, name: str) -> list[str]:
        return [self.names[name]] if name in self.names else self.held.sources(name)

    def make(self, name: str, read: Read) -> np.ndarray:
        return read(self.names[name]) if name in self.names else self.held.make(name, read)


def with_ip_adapter(source: Source, file: Path, encoder: Path | None) -> IpAdapter:
    """`source` with the IP-Adapter in `file`; `encoder`: the folder of its image encoder, else the one beside the file.

    Raises InputError for a file that is none, one of another family or kind, and for an encoder that it was not trained
    with.
    """
    if file.suffix in PICKLES:
        raise InputError(f"{file} is a pickle, which can run any code when it is read: get the .safetensors file.")
    if not file.is_file():
        raise InputError(f"{file} is no file: give an IP-Adapter's .safetensors file (h94/IP-Adapter on the hub).")
    encoder = encoder or file.parent / "image_encoder"
    config = encoder_config(encoder)
    tensors = shapes(file)
    unet = source.configs["unet"]
    with torch.device("meta"):
        model = model_class(class_name(unet)).from_config(unet)
    before = model.state_dict().keys()
    record = _attached(model, file, tensors)
    wanted = {name: list(tensor.shape) for name, tensor in model.state_dict().items() if name not in before}
    names = {name: _name_in_file(name, record["layers"]) for name in wanted}
    _compare(file, tensors, {names[name]: shape for name, shape in wanted.items()})
    hidden, embeds = (tensor.axes for tensor in signature("image_encoder", config).outputs)
    made = hidden if "rows" in record else embeds
    if made[-1] != record["width"]:
        raise InputError(
            f"{file} reads {record['width']} numbers of its image encoder, and {encoder} gives {made[-1]}: give the "
            "one it was trained with as --image-encoder."
        )
    if "rows" in record:
        record["rows"] = made[1]
    return IpAdapter(source, file, encoder, record, names)


def encoder_config(folder: Path) -> Config:
    """The config of an image encoder. Raises InputError for a folder without one."""
    config = read_config(folder / "config.json", f"there is no image encoder in {folder} (give it as --image-encoder)")
    needed = ("image_size", "patch_size", "hidden_size", "projection_dim")
    if config.get("architectures") != [ENCODER] or not all(config.get(name) for name in needed):
        raise InputError(f"{folder} holds no {ENCODER}: give the image encoder that the adapter was trained with.")
    if not any(folder.glob("*.safetensors")):
        raise InputError(f"{folder} has no .safetensors file: get it again, and no pickle.")
    return config


def _attached(unet: Any, file: Path, tensors: Tensors) -> Config:
    """Give `unet` the modules whose weights `tensors` are, without weights; what its config says of them.

    Raises InputError for another kind of adapter, and one of another family of UNets.
    """
    if reason := _other_kind(tensors):
        raise InputError(f"{file} is {reason}.")

    def size(name: str, axis: int) -> int:
        shape = tensors[f"image_proj.{name}"].shape if f"image_proj.{name}" in tensors else ()
        if len(shape) <= axis or not shape[axis]:
            raise InputError(f"{file} is no whole IP-Adapter: its image_proj.{name} is missing or has no axis {axis}.")
        return int(shape[axis])

    plus = "image_proj.latents" in tensors
    layers = cross_attentions(unet)
    context = size("norm_out.weight" if plus else "norm.weight", 0)
    if context != unet.config.cross_attention_dim:
        raise InputError(
            f"{file} is for UNets that attend to tokens of {context} numbers, and this one's have "
            f"{unet.config.cross_attention_dim}: get the adapter of its family (768 SD 1.x, 2048 SDXL)."
        )
    more: Config
    pictures: Pictures
    with torch.device("meta"):
        if plus:
            depth = len({name.split(".")[2] for name in tensors if name.startswith("image_proj.layers.")})
            width, count, inner = size("proj_in.weight", 1), size("latents", 1), size("latents", 2)
            more = {"inner": inner, "depth": depth, "heads": size("layers.0.0.to_q.weight", 0) // HEAD}
            pictures = Resampler(width, count, context, **more)
            more["rows"] = None
        else:
            width, count, more = size("proj.weight", 1), size("proj.weight", 0) // context, {}
            pictures = Projection(width, count, context)
    attach(unet, pictures, layers, context)
    return {"width": width, "tokens": count, "layers": layers, **more}


def _other_kind(tensors: Tensors) -> str | None:
    """What a file is, where it is no IP-Adapter that is taken, and what to do; else None."""

    def has(*parts: str) -> bool:
        return any(part in name for name in tensors for part in parts)

    if has("_lora.", "perceiver_resampler.") or ("image_proj.norm.weight" in tensors and has("image_proj.proj.0.")):
        return "an IP-Adapter FaceID, which reads faces of another network: sd-ort takes IP-Adapter and IP-Adapter Plus"
    if has("image_proj.proj.3."):
        return "an IP-Adapter Full Face, which sd-ort does not run: take IP-Adapter Plus Face"
    if not all(has(prefix) for prefix in PREFIXES) or not has("to_k_ip."):
        return "no IP-Adapter: it holds no image_proj and ip_adapter weights, as h94/IP-Adapter's files do"
    return None


def _name_in_file(name: str, layers: list[str]) -> str:
    """What a file calls the tensor `name` of the UNet; it counts a layer's attentions to itself and to the prompt."""
    if name.startswith("pictures."):
        return name.replace("pictures.", "image_proj.", 1)
    layer, _, parameter = name.partition(".attn2.processor.")
    return f"ip_adapter.{2 * layers.index(layer) + 1}.{parameter}"


def _compare(file: Path, tensors: Tensors, wanted: Mapping[str, list[int]]) -> None:
    """Raise InputError unless the file holds tensors of these names and shapes, and no others of an adapter's."""
    there = {name: list(tensor.shape) for name, tensor in tensors.items() if name.startswith(PREFIXES)}
    if missing := [name for name in wanted if name not in there]:
        raise InputError(f"{file} lacks {len(missing)} weights that this UNet's adapter has, such as {missing[0]}.")
    if foreign := [name for name in there if name not in wanted]:
        raise InputError(f"{file} has {len(foreign)} weights that this UNet's adapter has not, such as {foreign[0]}.")
    if wrong := [name for name in wanted if there[name] != wanted[name]]:
        raise InputError(f"{file} is for another UNet: {wrong[0]} is {there[wrong[0]]}, not {wanted[wrong[0]]}.")
