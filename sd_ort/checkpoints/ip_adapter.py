"""IP-Adapters: a UNet with image prompts as additional inputs, and the image encoder for them.

An adapter is a file of weights in h94/IP-Adapter's layout, `image_proj.*` and `ip_adapter.N.*` for each layer. It fits
UNets of one family and one image encoder. Its kind is detected from names and shapes, all checked before a model is
loaded. The UNet's config.json records it for later stages, as `ip_adapter`: `width` of the image encoder's output,
`hidden_state_length` (its sequence length, IP-Adapter Plus only), the `layers` with image attention, and the other
settings that determine the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sd_ort.checkpoints.checkpoint import Checkpoint, CheckpointModel, as_json, build_model, class_name
from sd_ort.checkpoints.conditioning import CLIP_MEAN, CLIP_STD
from sd_ort.checkpoints.configs import read_config
from sd_ort.checkpoints.diffusers_folder import folder_model
from sd_ort.checkpoints.ip_adapter_modules import (
    HEAD_SIZE,
    BaseImageProjection,
    ImageProjection,
    Resampler,
    attach_adapter,
    cross_attention_layers,
)
from sd_ort.checkpoints.signatures import Config, signature
from sd_ort.checkpoints.single_file import PICKLES, meta_tensors, read_tensors
from sd_ort.checkpoints.tensor_readers import IPAdapterTensorReader
from sd_ort.core.errors import InputError

Tensors = Mapping[str, torch.Tensor]

ENCODER = "CLIPVisionModelWithProjection"
PREFIXES = ("image_proj.", "ip_adapter.")


@dataclass(frozen=True)
class IPAdapter:
    """An IP-Adapter that fits a UNet.

    config: the entry `ip_adapter` of the UNet's config. names: name in the UNet -> name in `file`, of its tensors.
    """

    file: Path
    config: Config
    names: Mapping[str, str]


def add_ip_adapter(checkpoint: Checkpoint, file: Path, encoder: Path | None) -> Checkpoint:
    """Return the checkpoint with the IP-Adapter in `file` and its image encoder.

    `encoder`: folder of the image encoder, by default `image_encoder` next to the file. Raises InputError for a file
    without an adapter, an adapter of another family or kind, and an encoder that it was not trained with.
    """
    if file.suffix in PICKLES:
        raise InputError(f"{file} is a pickle, which can run any code when it is read: get the .safetensors file.")
    if not file.is_file():
        raise InputError(f"{file} is no file: give an IP-Adapter's .safetensors file (h94/IP-Adapter on the hub).")
    encoder = encoder or file.parent / "image_encoder"
    image_config = encoder_config(encoder)
    adapter = read_ip_adapter(file, checkpoint.configs["unet"], encoder, image_config)
    unet = checkpoint.models["unet"]
    reader = IPAdapterTensorReader(unet.reader, file, adapter.names) if unet.reader is not None else None
    config = unet.config | {"ip_adapter": adapter.config}
    unet = CheckpointModel(config, partial(_load_unet, unet, adapter), (*unet.files, file), reader)
    image_encoder = replace(folder_model(encoder, ENCODER, image_config), reader=None)
    index = {"image_encoder": ["transformers", ENCODER], "feature_extractor": ["transformers", "CLIPImageProcessor"]}
    side = image_config["image_size"]
    processor: Config = {"crop_size": {"height": side, "width": side}, "size": {"shortest_edge": side}}
    processor |= {"image_mean": CLIP_MEAN, "image_std": CLIP_STD, "image_processor_type": "CLIPImageProcessor"}
    kind = "IP-Adapter Plus" if "hidden_state_length" in adapter.config else "IP-Adapter"
    tokens, layers = adapter.config["tokens"], len(adapter.config["layers"])
    note = f"{file.name}: {kind}, {tokens} tokens per image, {layers} layers"
    return replace(
        checkpoint,
        name=f"{checkpoint.name} with {file}",
        index=checkpoint.index | index,
        models={**checkpoint.models, "unet": unet, "image_encoder": image_encoder},
        generated_files={
            **checkpoint.generated_files,
            "feature_extractor/preprocessor_config.json": as_json(processor),
        },
        paths=(encoder, file, *checkpoint.paths),
        detection_note="; ".join(filter(None, (checkpoint.detection_note, note))),
    )


def _load_unet(unet: CheckpointModel, adapter: IPAdapter) -> torch.nn.Module:
    """Return the UNet with the modules and weights of the adapter. Raises InputError for NaN and infinite weights."""
    module: Any = unet.load()
    tensors = read_tensors(adapter.file, PREFIXES)
    _attach(module, adapter.file, tensors)
    weights = {name: tensors[stored].float() for name, stored in adapter.names.items()}
    if broken := [name for name, tensor in weights.items() if not torch.isfinite(tensor).all()]:
        raise InputError(f"{adapter.file}: {adapter.names[broken[0]]} holds NaN or infinity: get it again.")
    module.load_state_dict(weights, strict=False, assign=True)
    module.register_to_config(ip_adapter=adapter.config)
    return module.eval()


def read_ip_adapter(file: Path, unet: Config, encoder: Path, image_config: Config) -> IPAdapter:
    """Return the adapter in `file`. Raises InputError if it does not fit the UNet or the image encoder."""
    tensors = meta_tensors(file)
    with torch.device("meta"):
        model = build_model(class_name(unet), unet)
    unet_names = model.state_dict().keys()
    config = _attach(model, file, tensors)
    shapes = {name: list(t.shape) for name, t in model.state_dict().items() if name not in unet_names}
    names = {name: _stored_name(name, config["layers"]) for name in shapes}
    _compare_shapes(file, tensors, {names[name]: shape for name, shape in shapes.items()})
    hidden_state, embedding = (tensor.axes for tensor in signature("image_encoder", image_config).outputs)
    output = hidden_state if "hidden_state_length" in config else embedding
    if output[-1] != config["width"]:
        raise InputError(
            f"{file} reads {config['width']} numbers of its image encoder, and {encoder} gives {output[-1]}: give the "
            "one it was trained with as --image-encoder."
        )
    if "hidden_state_length" in config:
        config["hidden_state_length"] = output[1]
    return IPAdapter(file, config, names)


def encoder_config(folder: Path) -> Config:
    """Return the config of the image encoder in `folder`. Raises InputError if there is none."""
    config = read_config(
        folder / "config.json", f"there is no image encoder in {folder} (give it as --image-encoder)", folder
    )
    required = ("image_size", "patch_size", "hidden_size", "projection_dim")
    if config.get("architectures") != [ENCODER] or not all(config.get(name) for name in required):
        raise InputError(f"{folder} holds no {ENCODER}: give the image encoder that the adapter was trained with.")
    if not any(folder.glob("*.safetensors")):
        raise InputError(f"{folder} has no .safetensors file: get it again, and no pickle.")
    return config


def _attach(unet: Any, file: Path, tensors: Tensors) -> Config:
    """Add the modules of the adapter with these `tensors` to `unet`, without weights; return the adapter's config.

    Raises InputError for another kind of adapter, and one for another family of UNets.
    """
    if description := _describe_other_file(tensors):
        raise InputError(f"{file} is {description}.")

    def size(name: str, axis: int) -> int:
        shape = tensors[f"image_proj.{name}"].shape if f"image_proj.{name}" in tensors else ()
        if len(shape) <= axis or not shape[axis]:
            raise InputError(f"{file} is no whole IP-Adapter: its image_proj.{name} is missing or has no axis {axis}.")
        return int(shape[axis])

    is_plus = "image_proj.latents" in tensors
    layers = cross_attention_layers(unet)
    context = size("norm_out.weight" if is_plus else "norm.weight", 0)
    if context != unet.config.cross_attention_dim:
        raise InputError(
            f"{file} is for UNets that attend to tokens of {context} numbers, and this one's have "
            f"{unet.config.cross_attention_dim}: get the adapter of its family (768 SD 1.x, 2048 SDXL)."
        )
    settings: Config
    projection: BaseImageProjection
    with torch.device("meta"):
        if is_plus:
            depth = len({name.split(".")[2] for name in tensors if name.startswith("image_proj.layers.")})
            width, count, inner = size("proj_in.weight", 1), size("latents", 1), size("latents", 2)
            settings = {"inner": inner, "depth": depth, "heads": size("layers.0.0.to_q.weight", 0) // HEAD_SIZE}
            projection = Resampler(width, count, context, **settings)
            settings["hidden_state_length"] = None
        else:
            width, count, settings = size("proj.weight", 1), size("proj.weight", 0) // context, {}
            projection = ImageProjection(width, count, context)
    attach_adapter(unet, projection, layers, context)
    return {"width": width, "tokens": count, "layers": layers, **settings}


def _describe_other_file(tensors: Tensors) -> str | None:
    """Return what a file is if it is no supported IP-Adapter, with advice; else None."""

    def has(*parts: str) -> bool:
        return any(part in name for name in tensors for part in parts)

    if has("_lora.", "perceiver_resampler.") or ("image_proj.norm.weight" in tensors and has("image_proj.proj.0.")):
        return "an IP-Adapter FaceID, which reads faces of another network: sd-ort takes IP-Adapter and IP-Adapter Plus"
    if has("image_proj.proj.3."):
        return "an IP-Adapter Full Face, which sd-ort does not run: take IP-Adapter Plus Face"
    if not all(has(prefix) for prefix in PREFIXES) or not has("to_k_ip."):
        return "no IP-Adapter: it holds no image_proj and ip_adapter weights, as h94/IP-Adapter's files do"
    return None


def _stored_name(name: str, layers: list[str]) -> str:
    """Return the name in a file of the UNet's tensor `name`. Files number the self- and cross-attentions of layers."""
    if name.startswith("pictures."):
        return name.replace("pictures.", "image_proj.", 1)
    layer, _, parameter = name.partition(".attn2.processor.")
    return f"ip_adapter.{2 * layers.index(layer) + 1}.{parameter}"


def _compare_shapes(file: Path, tensors: Tensors, expected: Mapping[str, list[int]]) -> None:
    """Raise InputError unless the adapter's tensors in the file have exactly these names and shapes."""
    actual = {name: list(tensor.shape) for name, tensor in tensors.items() if name.startswith(PREFIXES)}
    if missing := [name for name in expected if name not in actual]:
        raise InputError(f"{file} lacks {len(missing)} weights that this UNet's adapter has, such as {missing[0]}.")
    if foreign := [name for name in actual if name not in expected]:
        raise InputError(f"{file} has {len(foreign)} weights that this UNet's adapter has not, such as {foreign[0]}.")
    if wrong := [name for name in expected if actual[name] != expected[name]]:
        raise InputError(f"{file} is for another UNet: {wrong[0]} is {actual[wrong[0]]}, not {expected[wrong[0]]}.")
