"""Templates: exported graphs without weights, to which any checkpoint of the same architecture adds its weights.

    bundled   sd_ort/export/bundled, written by scripts/fixtures/make_templates.py: published architectures
    user's    in the cache, stored when a checkpoint of another architecture is first exported

A template is the compressed graph, 10 to 60 kB. Bundled templates that resemble each other, such as the UNets of SDXL,
are the members of one .tar.xz, less than half as large as they are one by one. The location of each weight's external
data is a recipe of checkpoint tensors (see `fusion_passes.weight_recipes`) instead of a file. A template with the
weights of a checkpoint equals the export of that checkpoint, and reads weights lazily. It is fused for any target,
calibrated and saved as an exported graph is.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import tarfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from fusion_passes import weight_recipes as recipes
from sd_ort.checkpoints.checkpoint import Checkpoint, has_penultimate_states
from sd_ort.checkpoints.diffusion_transformers import LANGUAGE_MODELS, MISTRAL, QWEN3_VL, QWEN_VL
from sd_ort.checkpoints.signatures import MODEL_OF, READS_IMAGES, text_config, vision_config
from sd_ort.core import files, pipeline_folder
from sd_ort.core.cache import cache_folder, is_reachable_file
from sd_ort.core.errors import InputError, OutputError
from sd_ort.core.package_version import package_version
from sd_ort.graphs.load import load as load_graph
from sd_ort.weights.recipes import Read, fill_initializers

Config = Mapping[str, Any]

BUNDLED = Path(__file__).with_name("bundled")
INDEX = "index.json"
ARCHIVE = ".tar.xz"
CONFIG = "sd_ort.config"  # key in the metadata of the ONNX model
# Keys of a config that do not change the graph: the source of the model, and values that pipelines read.
# upcast_attention has no effect on float32, in which exports are traced. axes_lens limits the positions of Z-Image.
NON_STRUCTURAL_KEYS = frozenset(
    "_class_name _diffusers_version _name_or_path sample_size scaling_factor shift_factor latents_mean latents_std "
    "force_upcast upcast_attention axes_lens".split()
)
# Keys that determine the graph of a CLIP, T5 or Qwen3 text encoder, whose config has many others.
TEXT_ENCODER_KEYS = frozenset(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings hidden_act "
    "layer_norm_eps eos_token_id projection_dim d_model d_kv d_ff num_layers num_heads feed_forward_proj "
    "relative_attention_num_buckets relative_attention_max_distance layer_norm_epsilon "
    "num_key_value_heads head_dim rms_norm_eps attention_bias rope_theta".split()
)
MAX_CONSTANT_ELEMENTS = 1 << 14  # of a tensor without a recipe that the template stores: zeros, frequencies


# --- Keys -----------------------------------------------------------------------------------------------------------


def template_key(component: str, cls: str, config: Config, variant: bool, opset: int, exporter: str) -> str:
    """Return the key of a template, 16 hex digits.

    cls: name of the model's class.
    config: the model's config, which may omit defaults.
    variant: of a text encoder, whether it returns the penultimate hidden state; of a UNet, whether it has
        inputs for the residuals of a ControlNet.
    """
    defaults = bundled_index()["defaults"].get(cls, {})
    if component == "vision_encoder":
        defaults, config = {}, vision_config(config)
    else:
        config = text_config(config) if cls in (QWEN_VL, QWEN3_VL, MISTRAL) else config
    complete = {**defaults, **{name: value for name, value in config.items() if name in defaults or not defaults}}
    if encoder := component.startswith("text_encoder"):
        complete = {name: value for name, value in complete.items() if name in TEXT_ENCODER_KEYS}
        if cls in LANGUAGE_MODELS:  # rope_theta was a key of its own before transformers 5
            rope = config.get("rope_parameters") or config
            complete["rope_theta"] = float(rope.get("rope_theta") or 1e6)
        if not cls.startswith("CLIP"):
            complete.pop("eos_token_id", None)
        if cls == "CLIPTextModel":
            complete.pop("projection_dim", None)
        if config.get(READS_IMAGES):
            complete[READS_IMAGES] = True
    structural = {name: value for name, value in complete.items() if name not in NON_STRUCTURAL_KEYS}
    structural |= {"ip_adapter": config["ip_adapter"]} if "ip_adapter" in config else {}
    content = ["text_encoder" if encoder else component, cls, structural, variant, opset, exporter]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def component_key(source: Checkpoint, component: str, opset: int, exporter: str) -> str:
    """Return the template key of a component of a checkpoint."""
    model = MODEL_OF.get(component, component)
    variant = component == "unet" and "controlnet" in source.configs
    if component.startswith("text_encoder"):
        variant = source.index[model][1].startswith(("CLIP", "Qwen3")) and has_penultimate_states(source)
    return template_key(component, source.index[model][1], source.configs[model], variant, opset, exporter)


@cache
def bundled_index() -> dict[str, Any]:
    """Return the index of bundled templates: `graphs` (key -> path), `defaults` (class -> config defaults).

    The path of a member of an archive is that of the archive and the member's name.
    """
    return files.read_json(BUNDLED / INDEX)


def find_template(key: str) -> Path | None:
    """Return the path of the template of this key, bundled or in the cache; None if there is none."""
    bundled = bundled_index()["graphs"].get(key)
    if bundled is not None:
        return BUNDLED / bundled
    path = cached_path(key)
    return path if is_reachable_file(path) else None


def find_template_file(name: str) -> Path | None:
    """Return the path of the template whose file, or member of an archive, has this name; None if there is none."""
    bundled = (BUNDLED / path for path in bundled_index()["graphs"].values() if Path(path).name == name)
    path = next(bundled, user_folder() / Path(name).name)
    return path if path.is_relative_to(BUNDLED) or is_reachable_file(path) else None


def user_folder() -> Path:
    """Return the folder of the user's templates: SD_ORT_TEMPLATES, or `templates` in sd-ort's cache folder."""
    path = os.environ.get("SD_ORT_TEMPLATES")
    return Path(path) if path else cache_folder() / "templates"


def exporter_versions() -> dict[str, str]:
    """Return the versions of the packages that determine an exported graph, and a hash of our code that does."""
    packages = ("torch", "diffusers", "transformers", "onnx", "onnx-ir", "onnxscript")
    folder = Path(__file__).resolve().parent
    code = files.code_hash(folder, folder.with_name("checkpoints"))
    return {"sd_ort.export": code, **{name: package_version(name) for name in packages}}


def cached_path(key: str) -> Path:
    """Return the path of a template in the cache, which depends on `exporter_versions`."""
    versions = json.dumps(exporter_versions())
    return user_folder() / f"{key}-{hashlib.sha256(versions.encode()).hexdigest()[:12]}.onnx.xz"


# --- Writing --------------------------------------------------------------------------------------------------------


def store_template(key: str, exported: Path, entry: Mapping[str, Any]) -> str | None:
    """Store an exported component as a template in the cache. Return why it cannot be one, or None.

    exported: the component's folder. entry: the component's entry in the export's manifest.
    """
    if pairs := entry.get("duplicate_weights"):
        return f"{pairs[0][0]} and {pairs[0][1]} are equal, which exporters merge"
    graph = load_graph(exported / pipeline_folder.MODEL)
    table = recipes.load(entry["weight_recipes"])
    for value in graph.graph.initializers.values():
        tensor = value.const_value
        if value.name in table or not isinstance(tensor, ir.ExternalTensor):
            continue
        if tensor.size > MAX_CONSTANT_ELEMENTS:
            return f"the weight {value.name} has no recipe"
        value.const_value = ir.Tensor(tensor.numpy().copy(), name=tensor.name)
    try:
        write_template(cached_path(key), graph, table, files.read_json(exported / "config.json"))
    except OutputError as error:
        return str(error).removesuffix(".")
    return None


def write_template(path: Path, graph: ir.Model, table: Mapping[str, recipes.WeightRecipe], config: Config) -> None:
    """Write a template: `graph` without the weights that have recipes in `table`, which are removed from `graph`.

    config: the complete config of the model.
    """
    files.write_bytes(path, lzma.compress(template_bytes(graph, table, config), preset=9))


def template_bytes(graph: ir.Model, table: Mapping[str, recipes.WeightRecipe], config: Config) -> bytes:
    """Return the ONNX file of a template, uncompressed; the arguments are those of `write_template`."""
    for name, recipe in table.items():
        value = graph.graph.initializers[name]
        tensor = value.const_value
        assert tensor is not None
        location = json.dumps(recipe, separators=(",", ":"))
        value.const_value = ir.ExternalTensor(
            location, 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name, base_dir=""
        )
    graph.metadata_props[CONFIG] = json.dumps(config, sort_keys=True)
    return ir.to_proto(graph).SerializeToString()


def write_archive(path: Path, members: Mapping[str, bytes]) -> None:
    """Write templates that resemble each other (member name -> ONNX file) as one .tar.xz."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    files.write_bytes(path, lzma.compress(archive.getvalue(), preset=9))


# --- Reading --------------------------------------------------------------------------------------------------------


def read_bytes(path: Path) -> bytes:
    """Return the ONNX file of a template at a path of `find_template`, uncompressed."""
    if not path.parent.name.endswith(ARCHIVE):
        return lzma.decompress(path.read_bytes())
    with tarfile.open(path.parent, "r:xz") as archive:
        member = archive.extractfile(path.name)
        assert member is not None
        return member.read()


class Template:
    """A template that was read.

    config: the complete config of the model. recipes: initializer -> recipe. sources: names of the checkpoint tensors
    that the recipes read. bytes: size of the weights in float32.
    """

    def __init__(self, path: Path) -> None:
        """Raises InputError for a damaged file."""
        try:
            self.proto = onnx.ModelProto.FromString(read_bytes(path))
        except Exception as error:  # lzma, tarfile and protobuf have no common base class of errors
            raise InputError(f"{path} is damaged: remove it, or install sd-ort again.") from error
        props = {entry.key: entry.value for entry in self.proto.metadata_props}
        self.config: dict[str, Any] = json.loads(props.get(CONFIG, "{}"))
        self.recipes: dict[str, recipes.WeightRecipe] = {
            tensor.name: json.loads(entry.value)
            for tensor in self.proto.graph.initializer
            for entry in tensor.external_data
            if entry.key == "location"
        }
        self.sources = sorted({name for recipe in self.recipes.values() for name in recipes.sources(recipe)})
        self.bytes = sum(
            4 * int(np.prod(tensor.dims)) for tensor in self.proto.graph.initializer if tensor.name in self.recipes
        )

    def graph(self, read: Read | None) -> ir.Model:
        """Return the graph with a checkpoint's weights. `read` returns a tensor by name (`weights.recipes`).

        None: with random weights, no two of which are equal, for passes that compare them.
        """
        model = ir.from_proto(self.proto)
        assert isinstance(model, ir.Model)
        model.metadata_props.pop(CONFIG, None)
        recipes.init_recipes(model, self.recipes)
        if read is not None:
            fill_initializers(model, read)
            return model
        for seed, name in enumerate(self.recipes):
            value = model.graph.initializers[name]
            assert value.const_value is not None
            value.const_value = _random_tensor(value.const_value, seed)
        return model


def _random_tensor(like: ir.TensorProtocol, seed: int) -> ir.LazyTensor:
    shape, dtype = like.shape.numpy(), like.dtype
    return ir.LazyTensor(
        lambda: ir.tensor(np.random.default_rng(seed).standard_normal(shape).astype(dtype.numpy()), name=like.name),
        dtype=dtype, shape=ir.Shape(shape), name=like.name,
    )  # fmt: skip
