"""Checkpoints in one file, as Stable Diffusion was first published (LDM names), through diffusers' own mapping.

A file is safetensors, GGUF or a pickle, and has only weights: its family is detected from names and shapes of its
tensors, and configs, scheduler and tokenizer come from a folder of the same family (see `base_pipeline`). Models that
the file lacks (a VAE, text encoders) come from that folder too, if it has weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sd_ort.checkpoints import conversion_tables, weight_file
from sd_ort.checkpoints.base_pipeline import find_base_pipeline
from sd_ort.checkpoints.checkpoint import Checkpoint, CheckpointModel, build_model
from sd_ort.checkpoints.detection import FAMILIES, UNET_INPUT, detect_family
from sd_ort.checkpoints.tensor_readers import TensorReader
from sd_ort.checkpoints.transformer_file import is_transformer_file, open_transformer_file
from sd_ort.core.errors import InputError, first_line
from sd_ort.core.files import parsing
from sd_ort.core.quiet import quiet

if TYPE_CHECKING:
    import torch

    from sd_ort.checkpoints.traced_conversion import TracedTensorReader

Tensors = dict[str, "torch.Tensor"]

# What the names of a model's tensors begin with. SDXL's first encoder is a CLIP of transformers, its second one of
# OpenCLIP; the refiner has that one alone, in the first place.
PREFIXES = {
    "unet": ("model.diffusion_model.",),
    "vae": ("first_stage_model.", "vae."),
    "text_encoder": ("cond_stage_model.", "conditioner.embedders.0.transformer."),
    "text_encoder_2": ("conditioner.embedders.1.model.", "conditioner.embedders.0.model."),
}
PICKLES = (".ckpt", ".bin", ".pt", ".pth")
# Prefixes of text encoders in OpenCLIP's names, which pack query, key and value in one matrix.
OPEN_CLIP = ("cond_stage_model.model.", "conditioner.embedders.1.model.", "conditioner.embedders.0.model.")


def open_single_file(path: Path, config_folder: Path | None = None, unsafe_pickle: bool = False) -> Checkpoint:
    """Return the checkpoint in the file `path`. `config_folder`: a folder of its family (see `base_pipeline`).

    Raises InputError, with what the file is and what to do, for anything but a complete checkpoint of a known family.
    """
    if path.suffix in weight_file.SUFFIXES:
        entries = weight_file.read_entries(path)
        if is_transformer_file(entries):
            return open_transformer_file(path, config_folder, _vae_reader)
        if path.suffix == weight_file.GGUF and UNET_INPUT not in entries:
            raise InputError(
                f"{path} is a GGUF file of the architecture {weight_file.architecture(path) or 'unknown'!r}, without a "
                f"U-Net or transformer that sd-ort runs: {', '.join(FAMILIES.values())}."
            )
    tables = conversion_tables.find_tables(conversion_tables.stored_shapes(path))
    tensors = {} if tables else meta_tensors(path, unsafe_pickle)
    with parsing(path, "a checkpoint"):
        family = tables[0].family if tables else detect_family(path, tensors)
    base = find_base_pipeline(path, family, config_folder)
    if "unet" not in base.models:
        raise InputError(f"{base.name} has no UNet: give a diffusers folder of {FAMILIES[family]} as --config.")
    readers: dict[str, TensorReader] = conversion_tables.table_readers(path, tables, base.configs)
    tensors = tensors if readers or tensors else meta_tensors(path)
    models = dict(base.models)
    for name, model in base.models.items():
        if name not in readers and (model_tensors := select_tensors(tensors, name)):
            readers[name] = trace_conversion(path, name, base, model_tensors)  # raises if weights are missing
        if name in readers:
            models[name] = _file_model(path, name, base, readers[name], unsafe_pickle)
        elif not model.files:
            what, option = ("VAE", "--vae FILE or ") if name == "vae" else (name.replace("_", " "), "")
            raise InputError(f"{path} has no {what}: give {option}a whole diffusers folder of its family as --config.")
        elif unsafe_pickle:
            models[name] = replace(model, reader=None)
    note = f"{path.name}: {FAMILIES[family]}, {_stored_dtypes(path)}" + "".join(
        f", {name} from {base.config_folder}" for name in base.models if name not in readers
    )
    if config_folder is None and family != "demo":
        note += f", configs and tokenizer of {base.name}"
    index = base.index | {"safety_checker": [None, None], "requires_safety_checker": False}
    paths = (path, *base.paths)
    return replace(base, name=str(path), index=index, models=models, paths=paths, detection_note=note)


def replace_vae(checkpoint: Checkpoint, file: Path, unsafe_pickle: bool = False) -> Checkpoint:
    """Return the checkpoint with the VAE in `file`: LDM names with or without prefix, or diffusers names.

    Raises InputError if the file has no VAE that fits the config of the checkpoint.
    """
    if checkpoint.random_weights:
        raise InputError("--vae goes with a checkpoint, not with a preset: its weights are random.")
    tensors = select_tensors(meta_tensors(file, unsafe_pickle), "vae")
    if not any(name.endswith("decoder.conv_in.weight") for name in tensors):
        raise InputError(f"{file} holds no VAE: give a file with the weights of an AutoencoderKL.")
    vae = _file_model(file, "vae", checkpoint, trace_conversion(file, "vae", checkpoint, tensors), unsafe_pickle)
    name, paths = f"{checkpoint.name} with {file}", (file, *checkpoint.paths)
    return replace(checkpoint, name=name, models={**checkpoint.models, "vae": vae}, paths=paths)


def _vae_reader(path: Path, base: Checkpoint) -> TensorReader:
    """Return the reader of the VAE in a file."""
    return trace_conversion(path, "vae", base, select_tensors(meta_tensors(path), "vae"))


def _file_model(file: Path, model: str, base: Checkpoint, reader: TensorReader, unsafe_pickle: bool) -> CheckpointModel:
    """Return a model of `base` with its weights in `file`; those of a pickle are read together."""
    load = partial(_load, file, model, base, unsafe_pickle)
    return CheckpointModel(base.configs[model], load, (file,), None if unsafe_pickle else reader)


def _load(file: Path, model: str, base: Checkpoint, unsafe_pickle: bool) -> torch.nn.Module:
    """Return a model in float32 and eval mode. Raises InputError for missing, NaN and infinite weights."""
    import torch

    loaded, tensors = _convert(file, model, base, read_tensors(file, PREFIXES[model], unsafe_pickle))
    loaded.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, assign=True)
    broken = [name for name, tensor in loaded.state_dict().items() if not torch.isfinite(tensor).all()]
    if broken:
        raise InputError(f"{file}: {len(broken)} weights of its {model} hold NaN or infinity, such as {broken[0]}.")
    return loaded.eval()


# --- Tensors of a file ----------------------------------------------------------------------------------------------


def meta_tensors(path: Path, unsafe_pickle: bool = False) -> Tensors:
    """Return the tensors of a file without data, on torch's meta device. Raises InputError for a broken file."""
    import torch

    if path.suffix in PICKLES:
        return {name: tensor.to("meta") for name, tensor in _unpickle(path, unsafe_pickle).items()}
    entries = weight_file.read_entries(path)
    return {name: torch.empty(entry["shape"], device="meta") for name, entry in entries.items()}


def read_tensors(path: Path, prefixes: tuple[str, ...], unsafe_pickle: bool = False) -> Tensors:
    """Return the tensors of a file whose names begin with one of `prefixes`, or all if there are none of these.

    Those of safetensors and GGUF files are float32.
    """
    if path.suffix in PICKLES:
        content = _unpickle(path, unsafe_pickle)
        return {name: content[name] for name in _with_prefix(content, prefixes)}
    import torch

    entries = weight_file.read_entries(path)
    names = _with_prefix(entries, prefixes)
    with parsing(path, "a checkpoint"):
        return {
            name: torch.from_numpy(weight_file.read_tensor(path, entries[name]).astype(np.float32, copy=False))
            for name in names
        }


def _unpickle(path: Path, allowed: bool) -> Tensors:
    if not allowed:
        raise InputError(
            f"{path} is a pickle, which can run any code when it is read: get the .safetensors file, or pass "
            "--unsafe-pickle if you trust it."
        )
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # pickle, zip files and torch raise their own kinds
        raise InputError(f"{path} cannot be read as weights alone: {first_line(error)}") from error
    content = content.get("state_dict", content) if isinstance(content, dict) else {}
    return {name: tensor for name, tensor in content.items() if isinstance(tensor, torch.Tensor)}


def _with_prefix(names: Iterable[str], prefixes: tuple[str, ...]) -> list[str]:
    names = list(names)
    return [name for name in names if name.startswith(prefixes)] or names


def select_tensors(tensors: Tensors, model: str) -> Tensors:
    """Return the tensors of one model; a file without a UNet may be a VAE whose names have no prefix."""
    prefixes = PREFIXES.get(model, ())
    selected = {name: tensor for name, tensor in tensors.items() if name.startswith(prefixes)}
    return selected or (dict(tensors) if model == "vae" and UNET_INPUT not in tensors else {})


def _stored_dtypes(path: Path) -> str:
    """Return the two dtypes of a file with the most bytes, the largest first, for the user."""
    return "pickle" if path.suffix in PICKLES else weight_file.dtypes_of(weight_file.read_entries(path).values())


# --- Conversion to diffusers names ----------------------------------------------------------------------------------


def trace_conversion(path: Path, model: str, base: Checkpoint, tensors: Tensors) -> TracedTensorReader:
    """Return a reader of a model in a file, from its meta tensors. Raises InputError as `_convert`."""
    from sd_ort.checkpoints.traced_conversion import TracedTensor, TracedTensorReader

    traced: Tensors = {name: TracedTensor.stored(name, tensor) for name, tensor in tensors.items()}
    _, converted = _convert(path, model, base, traced)
    return TracedTensorReader(
        (path,), {name: tensor for name, tensor in converted.items() if isinstance(tensor, TracedTensor)}
    )


def _convert(path: Path, model: str, base: Checkpoint, tensors: Tensors) -> tuple[torch.nn.Module, Tensors]:
    """Return a model of `base` on the meta device, and `tensors` under its diffusers names.

    Raises InputError for missing weights and weights of other shapes than the config's.
    """
    from accelerate import init_empty_weights

    config = base.configs[model]
    misfit = f"the {model} in {path} does not fit the config in {base.config_folder}/{model}"
    with init_empty_weights(), quiet("diffusers", "transformers"):
        empty = build_model(base.index[model][1], config)
    shapes = {name: list(tensor.shape) for name, tensor in empty.state_dict().items()}
    try:
        with quiet("diffusers"):
            converted = {name: t for name, t in _diffusers_names(empty, tensors).items() if name in shapes}
    except Exception as error:  # diffusers checks little: a file that does not fit fails in its own ways
        raise InputError(f"{misfit}: {first_line(error)}") from error
    if missing := [name for name in shapes if name not in converted]:
        raise InputError(f"{path} lacks {len(missing)} weights of its {model}, such as {missing[0]}: get it again.")
    for name, shape in shapes.items():
        if list(converted[name].shape) != shape:
            raise InputError(f"{misfit}: {name} is {list(converted[name].shape)}, not {shape}.")
    return empty, converted


def _diffusers_names(model: torch.nn.Module, tensors: Tensors) -> Tensors:
    """Return `tensors` under the names of `model`, a diffusers or transformers module, by diffusers' mapping."""
    from diffusers.loaders import single_file_model as models
    from diffusers.loaders import single_file_utils as encoders

    name, names = type(model).__name__, model.state_dict().keys()
    if name in models.SINGLE_FILE_LOADABLE_CLASSES:
        if names <= tensors.keys():
            return tensors
        mapped = models.SINGLE_FILE_LOADABLE_CLASSES[name]["checkpoint_mapping_fn"](tensors, config=model.config)
    elif prefix := next((p for p in OPEN_CLIP if any(key.startswith(p) for key in tensors)), None):
        mapped = encoders.convert_open_clip_checkpoint(model, tensors, prefix=prefix)
    else:
        mapped = encoders.convert_ldm_clip_checkpoint(tensors)
    return {key if key in names else key.removeprefix("text_model."): tensor for key, tensor in mapped.items()}
