"""Templates: exports without their weights, which any checkpoint of the same architecture fills without being traced.

    the package's own   sd_ort/export/shipped, made by scripts/fixtures/make_templates.py: published architectures
    the user's          in the cache, kept when a checkpoint of another architecture is exported for the first time

A template is the exported graph, compressed: 10 to 60 kB. The location of each weight's data is no file but a recipe of
the checkpoint's tensors (`fusion_passes.weight_recipes`), so that a filled template is the graph that exporting this
checkpoint would give, its weights read when they are asked for. What is done to exported graphs is done to it: it is
fused for any target, calibrated on this checkpoint's numbers, and written.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from fusion_passes import weight_recipes as recipes
from sd_ort.core import files, folder
from sd_ort.core.cache import cache_folder, is_there
from sd_ort.core.errors import InputError, OutputError
from sd_ort.family.checkpoints import Source, is_sdxl
from sd_ort.family.signatures import MODEL_OF
from sd_ort.graphs.load import load as load_graph
from sd_ort.graphs.template_weights import Read, fill

Config = Mapping[str, Any]

SHIPPED = Path(__file__).with_name("shipped")
INDEX = "index.json"
CONFIG = "sd_ort.config"  # key of the model's metadata
# Of a config: what says where a model came from, or what pipelines read and its graph is the same for. upcast_attention
# turns float32 into float32: exports are traced in it.
INCIDENTAL = frozenset(
    "_class_name _diffusers_version _name_or_path sample_size scaling_factor shift_factor latents_mean latents_std "
    "force_upcast upcast_attention".split()
)
# What decides the graph of a CLIP text encoder; its config has much else, as all of transformers'.
OF_ENCODERS = frozenset(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings hidden_act "
    "layer_norm_eps eos_token_id projection_dim".split()
)
MOST_NUMBERS = 1 << 14  # of a tensor that is the graph's own: a row of zeros, a table of frequencies


# --- Names ----------------------------------------------------------------------------------------------------------


def key(component: str, kind: str, config: Config, variant: bool, opset: int, exporter: str) -> str:
    """What tells one template from another, 16 hex digits.

    kind: the model's class. config: its config, in which defaults may be missing. variant: of a text encoder, whether
    it is SDXL's and gives another hidden state; of a UNet, whether it takes the residuals of a ControlNet.
    """
    defaults = index()["defaults"].get(kind, {})
    whole = {**defaults, **{name: value for name, value in config.items() if name in defaults or not defaults}}
    if encoder := component.startswith("text_encoder"):
        whole = {name: value for name, value in whole.items() if name in OF_ENCODERS}
        if kind == "CLIPTextModel":
            whole.pop("projection_dim", None)
    kept = {name: value for name, value in whole.items() if name not in INCIDENTAL}
    kept |= {"ip_adapter": config["ip_adapter"]} if "ip_adapter" in config else {}
    what = ["text_encoder" if encoder else component, kind, kept, variant, opset, exporter]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def key_of(source: Source, component: str, opset: int, exporter: str) -> str:
    """The key of a component of a checkpoint."""
    model = MODEL_OF.get(component, component)
    variant = component == "unet" and "controlnet" in source.configs
    if component.startswith("text_encoder"):
        variant = is_sdxl(source)
    return key(component, source.index[model][1], source.configs[model], variant, opset, exporter)


@cache
def index() -> dict[str, Any]:
    """The package's list: `graphs`, key -> file name; `defaults`, class -> what its config says unasked."""
    return files.read_json(SHIPPED / INDEX)


def find(name: str) -> Path | None:
    """The template of this key: the package's, or the one in the cache, if there is one."""
    shipped = index()["graphs"].get(name)
    if shipped is not None:
        return SHIPPED / shipped
    path = _cached(name)
    return path if is_there(path) else None


def user_folder() -> Path:
    """Where the user's templates are: SD_ORT_TEMPLATES, or `templates` in sd-ort's cache folder."""
    given = os.environ.get("SD_ORT_TEMPLATES")
    return Path(given) if given else cache_folder() / "templates"


def _cached(name: str) -> Path:
    """Templates of other versions of the exporters are not taken."""
    packages = ("torch", "diffusers", "transformers", "onnx", "onnx-ir", "onnxscript")
    here = Path(__file__).resolve().parent
    what = [files.code_hash(here, here.with_name("family")), *map(version, packages)]
    return user_folder() / f"{name}-{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:12]}.onnx.xz"


# --- Making ---------------------------------------------------------------------------------------------------------


def keep(name: str, exported: Path, entry: Mapping[str, Any]) -> str | None:
    """Keep an exported component as template `name` in the cache; why it cannot be one, or None.

    exported: the component's folder. entry: of the export's manifest.
    """
    if pairs := entry.get("equal_weights"):
        return f"{pairs[0][0]} and {pairs[0][1]} are equal, which exporters merge"
    graph = load_graph(exported / folder.MODEL)
    table = recipes.load(entry["weights"])
    for value in graph.graph.initializers.values():
        tensor = value.const_value
        if value.name in table or not isinstance(tensor, ir.ExternalTensor):
            continue
        if tensor.size > MOST_NUMBERS:
            return f"{value.name} is a weight that is made in a way no recipe says"
        value.const_value = ir.Tensor(tensor.numpy().copy(), name=tensor.name)
    try:
        write(_cached(name), graph, table, files.read_json(exported / "config.json"))
    except OutputError as error:
        return str(error).removesuffix(".")
    return None


def write(path: Path, graph: ir.Model, table: Mapping[str, recipes.WeightRecipe], config: Config) -> None:
    """Write `graph` without the weights that `table` has recipes for, which it loses; `config`: the model's, whole."""
    for name, recipe in table.items():
        value = graph.graph.initializers[name]
        tensor = value.const_value
        assert tensor is not None
        location = json.dumps(recipe, separators=(",", ":"))
        value.const_value = ir.ExternalTensor(
            location, 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name, base_dir=""
        )
    graph.metadata_props[CONFIG] = json.dumps(config, sort_keys=True)
    files.write_bytes(path, lzma.compress(ir.to_proto(graph).SerializeToString(), preset=9))


# --- Filling --------------------------------------------------------------------------------------------------------


class Template:
    """A template, read: `config`, the whole one of its model; `sources`, the tensors that it asks a checkpoint for."""

    def __init__(self, path: Path) -> None:
        """Raises InputError for a file that is broken."""
        try:
            self.proto = onnx.ModelProto.FromString(lzma.decompress(path.read_bytes()))
        except Exception as error:  # lzma and protobuf each raise their own kind
            raise InputError(f"{path} is broken: remove it, or install sd-ort again.") from error
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

    def graph(self, read: Read) -> ir.Model:
        """The exported graph of a checkpoint, of which `read` gives tensors by name (see `graphs.template_weights`)."""
        model = ir.from_proto(self.proto)
        assert isinstance(model, ir.Model)
        model.metadata_props.pop(CONFIG, None)
        recipes.init_recipes(model, recipes.dump(self.recipes))
        fill(model, read)
        return model
