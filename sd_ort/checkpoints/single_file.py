"""Checkpoints in one file, as Stable Diffusion was first published (LDM names), through diffusers' own mapping.

Such a file holds weights and nothing else: what it is must be read off its tensors' names and shapes, and configs,
scheduler and tokenizer come from a folder of the same family (see `borrowed`). What the file lacks (a VAE, text
encoders) is taken from that folder too, where it has weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_ort.checkpoints import conversion_tables
from sd_ort.checkpoints.base_pipeline import borrow
from sd_ort.checkpoints.checkpoint import FolderSource, Source, model_class
from sd_ort.checkpoints.detection import FAMILIES, UNET_INPUT, recognize
from sd_ort.checkpoints.signatures import Config
from sd_ort.checkpoints.source_override import Changed
from sd_ort.checkpoints.tensor_readers import Holder
from sd_ort.core.errors import InputError, first_line
from sd_ort.core.pipeline_folder import CONFIG_FOLDERS, sha256
from sd_ort.core.quiet import quiet

if TYPE_CHECKING:
    import torch

    from sd_ort.checkpoints.traced_conversion import MappedFile

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


@dataclass(frozen=True)
class SingleFileSource:
    """A checkpoint in one file; `base` is the diffusers folder of its family. Weights are loaded into fp32."""

    name: str
    file: Path
    about: str
    base: FolderSource
    held: Mapping[str, Holder]  # the models whose weights are in the file
    unsafe_pickle: bool = False
    random_weights: bool = field(default=False, init=False)

    @property
    def index(self) -> Config:
        return self.base.index | {"safety_checker": [None, None], "requires_safety_checker": False}

    @property
    def configs(self) -> dict[str, Config]:
        return self.base.configs

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.file, *self.base.folders)

    @cached_property
    def hash(self) -> str:
        files = [self.file, *(p for name in CONFIG_FOLDERS for p in sorted((self.base.folder / name).glob("*")))]
        files += [p for name in self.configs for p in self.base.weight_files(name) if name not in self.held]
        parts = [json.dumps([self.index, self.configs], sort_keys=True), *(sha256(file) for file in files)]
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    def holder(self, model: str) -> Holder | None:
        return None if self.unsafe_pickle else self.held.get(model) or self.base.holder(model)

    def load(self, model: str) -> torch.nn.Module:
        if model not in self.held:
            return self.base.load(model)
        return load_model(self.file, model, self.base, self.unsafe_pickle)

    def write_configs(self, out: Path) -> None:
        self.base.write_configs(out)
        (out / "model_index.json").write_text(json.dumps(self.index, indent=2) + "\n")


@dataclass(frozen=True)
class SwappedVae(Changed):
    """Another source with the VAE of a file: LDM names with or without prefix, or diffusers' names."""

    base: FolderSource
    held: MappedFile
    unsafe_pickle: bool = False

    @property
    def hash(self) -> str:
        return hashlib.sha256((self.source.hash + sha256(self.file)).encode()).hexdigest()

    def holder(self, model: str) -> Holder | None:
        if model == "vae":
            return None if self.unsafe_pickle else self.held
        return self.source.holder(model)

    def load(self, model: str) -> torch.nn.Module:
        return (
            load_model(self.file, "vae", self.base, self.unsafe_pickle) if model == "vae" else self.source.load(model)
        )


def open_file(path: Path, config: Path | None = None, unsafe_pickle: bool = False) -> SingleFileSource:
    """The checkpoint in the file `path`. `config`: a folder of its family (see `borrowed`).

    Raises InputError, saying what the file is and what to do, for anything but a whole checkpoint of our families.
    """
    known = conversion_tables.find(conversion_tables.shapes(path))
    tensors = {} if known else shapes(path, unsafe_pickle)
    family = known[0].family if known else recognize(path, tensors)
    base = borrow(path, family, config)
    held: dict[str, Holder] = conversion_tables.held(path, known, base.configs)
    tensors = tensors if held or tensors else shapes(path)
    for name in [name for name in base.configs if name not in held]:
        if part := own(tensors, name):
            held[name] = map_file(path, name, base, part)  # half a checkpoint is told at once
        elif not base.weight_files(name):
            what, option = ("VAE", "--vae FILE or ") if name == "vae" else (name.replace("_", " "), "")
            raise InputError(f"{path} has no {what}: give {option}a whole diffusers folder of its family as --config.")
    about = f"{path.name}: {FAMILIES[family]}, {_types(path)}" + "".join(
        f", {name} from {base.folder}" for name in base.configs if name not in held
    )
    if config is None and family != "demo":
        about += f", configs and tokenizer of {base.name}"
    return SingleFileSource(str(path), path, about, base, held, unsafe_pickle)


def swap_vae(source: Source, file: Path, unsafe_pickle: bool = False) -> SwappedVae:
    """`source` with the VAE in `file`. Raises InputError when that holds no VAE of the source's config."""
    base = source.base if isinstance(source, SingleFileSource) else source
    if not isinstance(base, FolderSource):
        raise InputError("--vae goes with a checkpoint, not with a preset: its weights are made up.")
    tensors = own(shapes(file, unsafe_pickle), "vae")
    if not any(name.endswith("decoder.conv_in.weight") for name in tensors):
        raise InputError(f"{file} holds no VAE: give a file with the weights of an AutoencoderKL.")
    return SwappedVae(source, file, base, map_file(file, "vae", base, tensors), unsafe_pickle)


def load_model(file: Path, model: str, base: FolderSource, unsafe_pickle: bool = False) -> torch.nn.Module:
    """One model of a file, in fp32 and eval mode. Raises InputError for weights that are missing, NaN or infinite."""
    import torch

    loaded = _convert(file, model, base, read(file, PREFIXES[model], unsafe_pickle))
    broken = [name for name, tensor in loaded.state_dict().items() if not torch.isfinite(tensor).all()]
    if broken:
        raise InputError(f"{file}: {len(broken)} weights of its {model} hold NaN or infinity, such as {broken[0]}.")
    return loaded.eval()


# --- Reading --------------------------------------------------------------------------------------------------------


def shapes(path: Path, unsafe_pickle: bool = False) -> Tensors:
    """The tensors of a file without their numbers (on torch's meta device). Raises InputError for a broken file."""
    import torch

    if path.suffix in PICKLES:
        return {name: tensor.to("meta") for name, tensor in _unpickle(path, unsafe_pickle).items()}
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
            return {name: torch.empty(part.get_shape(), device="meta") for name, part in parts.items()}
    except Exception as error:  # SafetensorError is no OSError, and a file of another kind fails in more ways
        raise InputError(f"{path} is truncated or no safetensors file ({first_line(error)}): get it again.") from error


def read(path: Path, prefixes: Iterable[str], unsafe_pickle: bool = False) -> Tensors:
    """The tensors of a file whose names begin with one of `prefixes`, all when none does; in the type they have."""
    if path.suffix in PICKLES:
        return _select(_unpickle(path, unsafe_pickle), tuple(prefixes))
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in _select(dict.fromkeys(file.keys()), tuple(prefixes))}


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


def _select(tensors: Mapping[str, Any], prefixes: tuple[str, ...]) -> dict[str, Any]:
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(prefixes)}
    return own or dict(tensors)


def own(tensors: Tensors, model: str) -> Tensors:
    """A model's tensors of a file's."""
    prefixes = PREFIXES.get(model, ())
    found = {name: tensor for name, tensor in tensors.items() if name.startswith(prefixes)}
    return found or (dict(tensors) if model == "vae" and UNET_INPUT not in tensors else {})


def _types(path: Path) -> str:
    """The element types of a safetensors file, from the largest part to the smallest."""
    if path.suffix in PICKLES:
        return "pickle"
    header = json.loads(_header(path))
    sizes: dict[str, int] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            sizes[entry["dtype"]] = sizes.get(entry["dtype"], 0) + end - begin
    return " and ".join(sorted(sizes, key=lambda dtype: -sizes[dtype])[:2])


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))


# --- To diffusers' modules ------------------------------------------------------------------------------------------


def map_file(path: Path, model: str, base: FolderSource, tensors: Tensors) -> MappedFile:
    """The tensors of a model in a file, to be read one at a time. Raises InputError as `_mapped`."""
    from sd_ort.checkpoints.traced_conversion import MappedFile, Recorded

    recorded: Tensors = {name: Recorded.of(name, tensor) for name, tensor in tensors.items()}
    _, made = _mapped(path, model, base, recorded)
    return MappedFile(path, {name: tensor for name, tensor in made.items() if isinstance(tensor, Recorded)})


def _convert(path: Path, model: str, base: FolderSource, tensors: Tensors) -> torch.nn.Module:
    """A model of `base`'s config with the weights `tensors`, in fp32. Raises InputError as `_mapped`."""
    loaded, made = _mapped(path, model, base, tensors)
    loaded.load_state_dict({name: tensor.float() for name, tensor in made.items()}, assign=True)
    return loaded


def _mapped(path: Path, model: str, base: FolderSource, tensors: Tensors) -> tuple[torch.nn.Module, Tensors]:
    """A model of `base`'s config on the meta device, and `tensors` under the names of its weights.

    Raises InputError when weights are missing or of other shapes than the config's.
    """
    from accelerate import init_empty_weights

    cls, folder, config = model_class(base.index[model][1]), base.folder_of(model), base.configs[model]
    with init_empty_weights(), quiet("diffusers", "transformers"):
        loaded = cls(cls.config_class(**config)) if "model_type" in config else cls.from_config(config)
    wanted = {name: list(tensor.shape) for name, tensor in loaded.state_dict().items()}
    try:
        with quiet("diffusers"):
            made = {name: tensor for name, tensor in _map(loaded, config, tensors).items() if name in wanted}
    except Exception as error:  # diffusers checks little: a file that does not fit fails in its own ways
        raise InputError(f"the {model} in {path} does not fit the config in {folder}: {first_line(error)}") from error
    if missing := [name for name in wanted if name not in made]:
        raise InputError(f"{path} lacks {len(missing)} weights of its {model}, such as {missing[0]}: get it again.")
    if wrong := [name for name in wanted if list(made[name].shape) != wanted[name]]:
        there = list(made[wrong[0]].shape)
        raise InputError(
            f"the {model} in {path} does not fit the config in {folder}: {wrong[0]} is {there}, not {wanted[wrong[0]]}."
        )
    return loaded, made


def _map(model: torch.nn.Module, config: Config, tensors: Tensors) -> Tensors:
    """`tensors` under the names of `model`, a diffusers or transformers module, by diffusers' mapping."""
    from diffusers.loaders import single_file_model as models
    from diffusers.loaders import single_file_utils as encoders

    name = type(model).__name__
    if name in models.SINGLE_FILE_LOADABLE_CLASSES:
        if model.state_dict().keys() <= tensors.keys():
            return tensors
        mapped = models.SINGLE_FILE_LOADABLE_CLASSES[name]["checkpoint_mapping_fn"](tensors, config=model.config)
    elif prefix := next((p for p in OPEN_CLIP if any(key.startswith(p) for key in tensors)), None):
        mapped = encoders.convert_open_clip_checkpoint(model, tensors, prefix=prefix)
    else:
        mapped = encoders.convert_ldm_clip_checkpoint(tensors)
    own = model.state_dict().keys()
    return {key if key in own else key.removeprefix("text_model."): tensor for key, tensor in mapped.items()}
