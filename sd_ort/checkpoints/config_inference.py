"""Infers missing config.json files of a pipeline folder from its graphs: diffusers' old conversion script wrote none.

Channels, resolutions, layers and widths are in the graphs. Training resolution and latent scale are the defaults of the
family, which the cross-attention width determines.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import onnx_ir as ir

from fusion_passes import value_queries as c
from sd_ort.checkpoints.unet_inputs import is_sdxl
from sd_ort.core.errors import InputError
from sd_ort.core.files import read_json
from sd_ort.core.pipeline_folder import COMPONENTS, MODEL, check_component
from sd_ort.graphs.load import load
from sd_ort.runtime.providers import warn_once

Config = dict[str, Any]


class FamilyDefaults(NamedTuple):
    """Values that are in no graph: height and width of the training latents, and their scale."""

    name: str
    latents: int
    scaling_factor: float


SD1 = FamilyDefaults("Stable Diffusion 1.x", 64, 0.18215)
# (cross_attention_dim, has time_ids) -> defaults.
FAMILIES = {
    (768, False): SD1,
    (1024, False): FamilyDefaults("Stable Diffusion 2.x", 64, 0.18215),
    (2048, True): FamilyDefaults("SDXL", 128, 0.13025),
    (1280, True): FamilyDefaults("SDXL's refiner", 128, 0.13025),
}


def infer_configs(folder: Path) -> dict[str, Config]:
    """Return component -> config of the components without config.json, and log a warning with the assumed family.

    Raises InputError for a broken graph, and one from which the config cannot be inferred.
    """
    missing = tuple(
        name
        for name in COMPONENTS
        if name != "controlnet" and (folder / name / MODEL).is_file() and not (folder / name / "config.json").exists()
    )
    unet = folder / "unet" / MODEL
    return _infer(folder, missing, unet.stat().st_mtime_ns) if missing and unet.is_file() else {}


@lru_cache(maxsize=8)
def _infer(folder: Path, missing: tuple[str, ...], _mtime_ns: int) -> dict[str, Config]:
    graphs = {name: load(check_component(folder, name)).graph for name in {*missing, "unet"}}
    unet = _unet(graphs["unet"])
    width, sdxl = unet["cross_attention_dim"], is_sdxl(unet)
    family = FAMILIES.get((width, sdxl))
    name = family.name if family else f"{'SDXL' if sdxl else SD1.name}, though its text is {width} wide"
    family = family or (FAMILIES[2048, True] if sdxl else SD1)
    latents = 96 if family == FAMILIES[1024, False] and _predicts_velocity(folder) else family.latents
    warn_once(
        f"{folder} has no config.json for {', '.join(missing)}: read from the graphs, and taken for {name}, trained on "
        f"{latents} x {latents} latents of scale {family.scaling_factor}."
    )
    configs = {}
    for name in missing:
        if name.startswith("text_encoder"):
            configs[name] = _text_encoder(graphs[name])
        elif name == "unet":
            configs[name] = {**unet, "sample_size": latents}
        else:
            vae = _vae_decoder(graphs[name]) if name == "vae_decoder" else _vae_encoder(graphs[name])
            scale = 2 ** (len(vae["block_out_channels"]) - 1)
            configs[name] = {**vae, "scaling_factor": family.scaling_factor, "sample_size": scale * latents}
    return configs


def _predicts_velocity(folder: Path) -> bool:
    """Return whether it is one of the SD 2.x models for 768 pixels; those for 512 pixels predict noise."""
    path = folder / "scheduler" / "scheduler_config.json"
    return path.is_file() and read_json(path, root=folder).get("prediction_type") == "v_prediction"


def _text_encoder(graph: ir.Graph) -> Config:
    outputs = {str(value.name): value for value in graph.outputs}
    projected = outputs.get("text_embeds")
    tables = [n.inputs[0] for n in graph if n.op_type == "Gather" and c.is_constant(n.inputs[0])]
    rows = sorted(c.size(table, 0) or 0 for table in tables if c.rank(table) == 2)
    layers = sum(node.op_type in ("Softmax", "Attention") for node in graph)
    layers += (
        "hidden_states" in outputs and projected is None
    )  # our export of SDXL's first encoder ends before its last layer
    width = next((c.size(table, 1) for table in tables if c.rank(table) == 2), None)
    if not rows or not width or not layers:
        raise _not_inferable("text_encoder", "its words and layers")
    return {
        "architectures": ["CLIPTextModel" if projected is None else "CLIPTextModelWithProjection"],
        "hidden_size": width,
        "max_position_embeddings": rows[0] if len(rows) > 1 else 77,
        "num_hidden_layers": layers,
        "vocab_size": rows[-1],
        **({} if projected is None else {"projection_dim": c.size(projected, 1) or width}),
    }


def _unet(graph: ir.Graph) -> Config:
    inputs = {str(value.name): value for value in graph.inputs}
    width = c.size(inputs.get("encoder_hidden_states"), 2)
    down, up = _downsampling_convs(graph), _convs_after_resize(graph)
    channels = c.required_channels(inputs["sample"]) if "sample" in inputs else None
    if not width or not channels or not up or len(up) != len(down):
        raise _not_inferable("unet", "its resolutions and its text")
    if unknown := inputs.keys() & {"class_labels"}:
        raise _not_inferable("unet", f"what its input {unknown.pop()} is")
    time_ids, pooled = inputs.get("time_ids"), inputs.get("text_embeds")
    config: Config = {
        "_class_name": "UNet2DConditionModel",
        "in_channels": channels,
        "out_channels": _channels(_all_convs(graph)[-1])[0],
        "block_out_channels": [*(_channels(node)[1] for node in down), _channels(up[0])[0]],
        "cross_attention_dim": width,
    }
    if time_ids is not None and pooled is not None:
        width = 256  # of each id in SDXL; the graph has only the sum
        total = (c.size(pooled, 1) or 0) + (c.size(time_ids, 1) or 6) * width
        config |= {"addition_embed_type": "text_time", "addition_time_embed_dim": width}
        config["projection_class_embeddings_input_dim"] = total
    if (guidance := inputs.get("timestep_cond")) is not None:
        config["time_cond_proj_dim"] = c.size(guidance, 1)
    return config


def _vae_decoder(graph: ir.Graph) -> Config:
    latents = next((value for value in graph.inputs if value.name == "latent_sample"), None)
    up, last = _convs_after_resize(graph), _all_convs(graph)[-1:]
    channels = c.required_channels(latents) if latents is not None else None
    if not up or not channels:
        raise _not_inferable("vae_decoder", "its resolutions")
    widths = [_channels(node)[0] for node in up]
    return _vae([_channels(last[0])[1], *reversed(widths)], channels)


def _vae_encoder(graph: ir.Graph) -> Config:
    down, convs = _downsampling_convs(graph), [node for node in _all_convs(graph) if c.size(node.inputs[1], 2) == 3]
    if not down:
        raise _not_inferable("vae_encoder", "its resolutions")
    outputs, inputs = _channels(convs[-1])
    return _vae([*(_channels(node)[1] for node in down), inputs], outputs // 2)


def _vae(widths: list[int], latents: int) -> Config:
    channels = {"latent_channels": latents, "in_channels": 3, "out_channels": 3}
    return {"_class_name": "AutoencoderKL", "block_out_channels": widths, **channels}


def _all_convs(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph if node.op_type == "Conv" and None not in _channels(node)]


def _downsampling_convs(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in _all_convs(graph) if list(node.attributes.get_ints("strides") or ()) == [2, 2]]


def _convs_after_resize(graph: ir.Graph) -> list[ir.Node]:
    """Return the convolutions after upsampling, in order."""
    upsampled = [node.outputs[0] for node in graph if node.op_type in ("Resize", "Upsample")]
    return [node for value in upsampled for node in c.consumers(value) if node.op_type == "Conv"]


def _channels(conv: ir.Node) -> tuple[Any, Any]:
    """Return output and input channels of a convolution."""
    return c.size(conv.inputs[1], 0), c.size(conv.inputs[1], 1)


def _not_inferable(component: str, missing: str) -> InputError:
    return InputError(
        f"{component} has no config.json, and its graph does not show {missing}: copy it from the original model."
    )
