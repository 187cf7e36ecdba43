"""Original module names of diffusion transformers (Black Forest Labs, Stability AI, ComfyUI), by their diffusers names.

An original matrix may be several of diffusers' matrices, one below the other: query, key and value, and in the single
blocks of FLUX.1 the first layer of the MLP. diffusers has shift and scale of the last norms in the other order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fusion_passes.weight_recipes import WeightRecipe

Config = Mapping[str, Any]


@dataclass(frozen=True)
class RowSlice:
    """The rows of an original module's weight and bias that are a module of diffusers.

    start, stop: rows; None for all of them. swapped: whether the halves of the rows change places.
    """

    module: str
    start: int | None = None
    stop: int | None = None
    swapped: bool = False


# Original module -> diffusers' module, or the modules of a joined matrix. {i}: number of the block.
_FLUX1 = {
    "img_in": "x_embedder", "txt_in": "context_embedder",
    "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
    "final_layer.linear": "proj_out", "final_layer.adaLN_modulation.1": "norm_out.linear~",
}  # fmt: skip
_FLUX2 = {
    "img_in": "x_embedder", "txt_in": "context_embedder",
    "time_in.in_layer": "time_guidance_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_guidance_embed.timestep_embedder.linear_2",
    "guidance_in.in_layer": "time_guidance_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_guidance_embed.guidance_embedder.linear_2",
    "double_stream_modulation_img.lin": "double_stream_modulation_img.linear",
    "double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
    "single_stream_modulation.lin": "single_stream_modulation.linear",
    "final_layer.linear": "proj_out", "final_layer.adaLN_modulation.1": "norm_out.linear~",
}  # fmt: skip
_SD3 = {
    "x_embedder.proj": "pos_embed.proj", "context_embedder": "context_embedder",
    "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
    "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
    "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
    "final_layer.linear": "proj_out", "final_layer.adaLN_modulation.1": "norm_out.linear~",
}  # fmt: skip
_Z_IMAGE = {
    "x_embedder": "all_x_embedder.2-1", "final_layer.linear": "all_final_layer.2-1.linear",
    "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1",
    **{name: name for name in ("cap_embedder.0", "cap_embedder.1", "t_embedder.mlp.0", "t_embedder.mlp.2")},
}  # fmt: skip
_Z_IMAGE_BLOCK = {
    "attention.q_norm": "attention.norm_q", "attention.k_norm": "attention.norm_k",
    "attention.out": "attention.to_out.0",
    **{name: name for name in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2", "adaLN_modulation.0")},
    **{f"feed_forward.{name}": f"feed_forward.{name}" for name in ("w1", "w2", "w3")},
}  # fmt: skip
_KREA2 = {
    "first": "img_in", "last.linear": "final_layer.linear", "tmlp.0": "time_embed.linear_1",
    "tmlp.2": "time_embed.linear_2", "tproj.1": "time_mod_proj", "txtmlp.0": "txt_in.norm",
    "txtmlp.1": "txt_in.linear_1", "txtmlp.3": "txt_in.linear_2", "txtfusion.projector": "text_fusion.projector",
    "last.norm": "final_layer.norm",
}  # fmt: skip
_KREA2_BLOCK = {
    "attn.wq": "attn.to_q", "attn.wk": "attn.to_k", "attn.wv": "attn.to_v", "attn.wo": "attn.to_out.0",
    "attn.gate": "attn.to_gate", "mlp.gate": "ff.gate", "mlp.up": "ff.up", "mlp.down": "ff.down",
    "attn.qknorm.qnorm": "attn.norm_q", "attn.qknorm.knorm": "attn.norm_k", "prenorm": "norm1", "postnorm": "norm2",
}  # fmt: skip
# Parameters of no module: original name -> diffusers' name.
_PARAMETERS = {"SD3Transformer2DModel": {"pos_embed": "pos_embed.pos_embed"},
               "Krea2Transformer2DModel": {"last.modulation.lin": "final_layer.scale_shift_table"},
               "ZImageTransformer2DModel": {name: name for name in ("x_pad_token", "cap_pad_token")}}  # fmt: skip
_TO, _ADD = ("attn.to_q", "attn.to_k", "attn.to_v"), ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")


def _flux_double(config: Config) -> dict[str, str | tuple[str, ...]]:
    is_flux2 = config["_class_name"] == "Flux2Transformer2DModel"
    block: dict[str, str | tuple[str, ...]] = {
        "img_attn.qkv": _TO, "txt_attn.qkv": _ADD, "img_attn.proj": "attn.to_out.0", "txt_attn.proj": "attn.to_add_out",
        "img_attn.norm.query_norm": "attn.norm_q", "img_attn.norm.key_norm": "attn.norm_k",
        "txt_attn.norm.query_norm": "attn.norm_added_q", "txt_attn.norm.key_norm": "attn.norm_added_k",
    }  # fmt: skip
    layers = ("linear_in", "linear_out") if is_flux2 else ("net.0.proj", "net.2")
    for stream, name in (("img", "ff"), ("txt", "ff_context")):
        block |= {f"{stream}_mlp.0": f"{name}.{layers[0]}", f"{stream}_mlp.2": f"{name}.{layers[1]}"}
    return block if is_flux2 else block | {"img_mod.lin": "norm1.linear", "txt_mod.lin": "norm1_context.linear"}


def _flux_single(config: Config) -> dict[str, str | tuple[str, ...]]:
    norms: dict[str, str | tuple[str, ...]] = {"norm.query_norm": "attn.norm_q", "norm.key_norm": "attn.norm_k"}
    if config["_class_name"] == "Flux2Transformer2DModel":
        return norms | {"linear1": "attn.to_qkv_mlp_proj", "linear2": "attn.to_out"}
    return norms | {"modulation.lin": "norm.linear", "linear1": (*_TO, "proj_mlp"), "linear2": "proj_out"}


def _sd3_block(config: Config, i: int) -> dict[str, str | tuple[str, ...]]:
    last = i == int(config["num_layers"]) - 1
    block: dict[str, str | tuple[str, ...]] = {}
    streams = (
        ("x_block", _TO, "", "", "attn.to_out.0"),
        ("context_block", _ADD, "added_", "_context", "attn.to_add_out"),
    )
    for stream, qkv, norm, suffix, out in streams:
        block |= {
            f"{stream}.attn.qkv": qkv,
            f"{stream}.attn.ln_q": f"attn.norm_{norm}q", f"{stream}.attn.ln_k": f"attn.norm_{norm}k",
            f"{stream}.adaLN_modulation.1": f"norm1{suffix}.linear" + ("~" if last and suffix else ""),
        }  # fmt: skip
        if not (last and suffix):
            block |= {
                f"{stream}.attn.proj": out,
                f"{stream}.mlp.fc1": f"ff{suffix}.net.0.proj", f"{stream}.mlp.fc2": f"ff{suffix}.net.2",
            }  # fmt: skip
    if i in config.get("dual_attention_layers", ()):
        block |= {
            "x_block.attn2.qkv": tuple(name.replace("attn.", "attn2.") for name in _TO),
            "x_block.attn2.ln_q": "attn2.norm_q", "x_block.attn2.ln_k": "attn2.norm_k",
            "x_block.attn2.proj": "attn2.to_out.0",
        }  # fmt: skip
    return block


def original_modules(config: Config) -> dict[str, tuple[RowSlice, ...]]:
    """Return original module -> its row slices, for a transformer of `diffusion_transformers.FAMILIES`."""
    is_z_image = config["_class_name"] == "ZImageTransformer2DModel"
    width = int(config["dim"] if is_z_image else config["num_attention_heads"] * config["attention_head_dim"])
    modules: dict[str, tuple[RowSlice, ...]] = {}
    if config["_class_name"] == "QwenImageTransformer2DModel":
        return modules  # whose original names are those of diffusers

    def add(original: str, targets: str | tuple[str, ...], block: str = "") -> None:
        if isinstance(targets, str):
            modules[original] = (RowSlice(f"{block}{targets.removesuffix('~')}", swapped=targets.endswith("~")),)
        else:  # the last one may be wider
            ends = [(i * width, (i + 1) * width if i < 3 else None) for i in range(len(targets))]
            modules[original] = tuple(RowSlice(block + t, *rows) for t, rows in zip(targets, ends, strict=True))

    if config["_class_name"] == "Krea2Transformer2DModel":
        top: Mapping[str, str] = _KREA2
        parts = [("blocks", "transformer_blocks", config["num_layers"])]
        parts += [(f"txtfusion.{part}_blocks", f"text_fusion.{part}_blocks", config[f"num_{part}_text_blocks"])
                  for part in ("layerwise", "refiner")]  # fmt: skip
        for stored, name, count in parts:
            for i in range(count):
                for original, target in _KREA2_BLOCK.items():
                    add(f"{stored}.{i}.{original}", target, f"{name}.{i}.")
    elif config["_class_name"] == "SD3Transformer2DModel":
        top = _SD3
        for i in range(int(config["num_layers"])):
            for original, targets in _sd3_block(config, i).items():
                add(f"joint_blocks.{i}.{original}", targets, f"transformer_blocks.{i}.")
    elif is_z_image:
        top, refiners = _Z_IMAGE, int(config["n_refiner_layers"])
        counts = {"noise_refiner": refiners, "context_refiner": refiners, "layers": int(config["n_layers"])}
        for block in (f"{part}.{i}." for part, count in counts.items() for i in range(count)):
            add(f"{block}attention.qkv", tuple(name.replace("attn.", "attention.") for name in _TO), block)
            for original, target in _Z_IMAGE_BLOCK.items():
                add(f"{block}{original}", target, block)
    else:
        top = _FLUX2 if config["_class_name"] == "Flux2Transformer2DModel" else _FLUX1
        for i in range(int(config["num_layers"])):
            for original, targets in _flux_double(config).items():
                add(f"double_blocks.{i}.{original}", targets, f"transformer_blocks.{i}.")
        for i in range(int(config["num_single_layers"])):
            for original, targets in _flux_single(config).items():
                add(f"single_blocks.{i}.{original}", targets, f"single_transformer_blocks.{i}.")
    for original, target in top.items():
        add(original, target)
    return modules


def row_slices(config: Config, names: Iterable[str]) -> dict[str, tuple[RowSlice, ...]]:
    """Return the row slices of each original weight, for weights and biases `names` of known modules."""
    if config["_class_name"] == "QwenImageTransformer2DModel":
        return {name: (RowSlice(name),) for name in names}
    modules, parts = original_modules(config), {}
    for name in names:
        module, _, end = name.rpartition(".")
        if module in modules:
            end = "weight" if end == "scale" else end  # of a norm
            parts[name] = tuple(replace(part, module=f"{part.module}.{end}") for part in modules[module])
    return parts


def original_recipes(config: Config, shapes: Mapping[str, tuple[int, ...]], prefix: str) -> dict[str, WeightRecipe]:
    """Return diffusers' name -> recipe of the tensors of a file in the original layout.

    shapes: of the tensors in the file. prefix: of the transformer's tensors. Tensors that the file lacks have none.
    """
    recipes: dict[str, WeightRecipe] = {}
    if config["_class_name"] == "QwenImageTransformer2DModel":
        return {name.removeprefix(prefix): name for name in shapes if name.startswith(prefix)}
    for original, parts in original_modules(config).items():
        for end, name in (("weight", "weight"), ("bias", "bias"), ("scale", "weight")):
            stored = f"{prefix}{original}.{end}"
            if stored in shapes:
                for part in parts:
                    recipes[f"{part.module}.{name}"] = _rows(stored, part, shapes[stored])
    for original, name in _PARAMETERS.get(str(config["_class_name"]), {}).items():
        if (stored := f"{prefix}{original}") in shapes:
            recipes[name] = stored
    if config["_class_name"] == "Krea2Transformer2DModel":  # a vector of six rows in the file
        for i in range(config["num_layers"]):
            if (stored := f"{prefix}blocks.{i}.mod.lin") in shapes:
                recipes[f"transformer_blocks.{i}.scale_shift_table"] = ["reshape", [6, -1], stored]
    return recipes


def split_rows(array: np.ndarray, parts: Sequence[RowSlice]) -> dict[str, np.ndarray]:
    """Split the values of an original weight, and return them by module name."""
    return {part.module: _swapped(array[part.start : part.stop], part) for part in parts}


def join_rows(arrays: Mapping[str, np.ndarray], parts: Sequence[RowSlice]) -> np.ndarray:
    """Return the original weight for the values of its slices' modules: the inverse of `split_rows`."""
    return np.concatenate([_swapped(arrays[part.module], part) for part in parts])


def _swapped(array: np.ndarray, part: RowSlice) -> np.ndarray:
    return np.roll(array, len(array) // 2, 0) if part.swapped else array


def _rows(stored: str, part: RowSlice, shape: tuple[int, ...]) -> WeightRecipe:
    if part.swapped:
        half, rows = shape[0] // 2, shape[0]
        return ["concat", None, ["rows", [half, rows], stored], ["rows", [0, half], stored]]
    if part.start is None:
        return stored
    return ["rows", [part.start, shape[0] if part.stop is None else part.stop], stored]


def original_prefix(names: Iterator[str] | Mapping[str, Any]) -> str | None:
    """Return the prefix of a transformer's tensors in the original layout, None for a file without one."""
    for name in names:
        # The last ones are Z-Image's, Qwen-Image's and Krea 2's.
        for first in ("double_blocks.0.", "joint_blocks.0.", "cap_pad_token", "txt_norm.", "txtfusion."):
            head, separator, _ = name.partition(first)
            if separator and head in ("", "model.diffusion_model.", "diffusion_model."):
                return head
    return None
