"""Inputs that a component meets in use: made up, or recorded by the user. For verification and calibration.

Made-up inputs have the distributions of the pipeline: latents and text states N(0, 1), latents for the VAE decoder
divided by its scaling factor, images in [-1, 1], timesteps 1..999, prompts between a start and an end token. SDXL's
time_ids are the sizes of a square image. The same seed gives the same numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from fusion_passes import checks as c
from sd_ort.core.errors import InputError
from sd_ort.family import signatures
from sd_ort.family.configs import component_config

Arrays = dict[str, np.ndarray]

# Latent pixels; multiples of 8 as the UNets need. Not square, different in every axis, batch 1 and batch 2.
SIZES: tuple[dict[str, int], ...] = (
    {"batch": 1, "sequence": 77, "height": 24, "width": 16},
    {"batch": 2, "sequence": 13, "height": 16, "width": 32},
)
CLIP_VOCABULARY = 49408
# What the axes are called by Optimum and by diffusers' old conversion script, where they say more than our sizes.
ALIASES: Mapping[str, signatures.Axis] = {
    "batch_size": "batch", "sequence_length": "sequence", "steps": 1, "height_latent": "height",
    "width_latent": "width", "latent_height": "height", "latent_width": "width",
}  # fmt: skip
SD_SCALING_FACTOR = 0.18215


def pixels_per_latent(folder: Path) -> int:
    """Pixels of an image's side for one of its latent, as the config of a VAE has them: 8 without one."""
    for name in ("vae_decoder", "vae_encoder"):
        if config := component_config(folder, name):
            return int(2 ** (signatures.levels(config) - 1))
    return 8


def random_inputs(
    component: str, inputs: Sequence[ir.Value], config: Mapping[str, Any], sizes: Mapping[str, int], seed: int = 0
) -> Arrays:
    """Made-up values, float32 or integer, for the graph inputs `inputs` at `sizes` (see `SIZES`), by name.

    Sizes that the graph leaves open are those of the family, found from `config`. Raises InputError when an axis is
    neither in the graph nor in the config.
    """
    return {
        str(v.name): _values(component, v, _shape(component, inputs, v, config, sizes), config, seed) for v in inputs
    }


def recorded_inputs(path: Path, component: str) -> list[Arrays]:
    """Runs recorded in an .npz whose arrays are called `component/input`, or `component/input/0`, `.../1` for several.

    Raises InputError for a file that cannot be read; [] when it has nothing for this component.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files if name.split("/")[0] == component}
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): save it with numpy.savez.") from error
    runs: dict[str, Arrays] = {}
    for name, array in arrays.items():
        _, value, *run = name.split("/")
        runs.setdefault(run[0] if run else "", {})[value] = array
    return [runs[key] for key in sorted(runs)]


def _shape(
    component: str, inputs: Sequence[ir.Value], value: ir.Value, config: Mapping[str, Any], sizes: Mapping[str, int]
) -> list[int]:
    known = _family_axes(component, inputs, config).get(str(value.name), ())
    shape = []
    for index, declared in enumerate(value.shape or known):
        axis = declared if isinstance(declared, (int, str)) else str(declared.value)
        if isinstance(axis, str):
            axis = known[index] if index < len(known) else ALIASES.get(axis, axis)
        if isinstance(axis, str) and index == 1 and len(value.shape or ()) == 4:
            axis = c.demanded_channels(value) or axis
        try:
            shape.append(signatures.size(axis, sizes) * _pixels(component, value, axis, known))
        except (KeyError, TypeError) as error:
            raise InputError(
                f"{component}: the size of axis {index} ({axis}) of input {value.name} is not known: "
                f"put the model's config.json beside model.onnx, or give recorded inputs with --inputs."
            ) from error
    return shape


def _pixels(component: str, value: ir.Value, axis: signatures.Axis, known: Sequence[signatures.Axis]) -> int:
    """Pixels a latent pixel, for the image that a VAE encoder reads when no config tells its axes."""
    return 8 if component == "vae_encoder" and not known and axis in ("height", "width") else 1


def _vocabulary(ids: ir.Value, config: Mapping[str, Any]) -> int:
    """Rows of the table that token ids index: of the config, or else of the graph."""
    frontier = [ids]
    for _ in range(4):
        readers = [node for value in frontier for node in c.users(value)]
        rows = [
            c.size(node.inputs[0], 0) for node in readers if node.op_type == "Gather" and c.is_constant(node.inputs[0])
        ]
        if rows and rows[0] is not None:
            return rows[0]
        frontier = [node.outputs[0] for node in readers if node.op_type in ("Cast", "Reshape", "Flatten")]
    return int(config.get("vocab_size", CLIP_VOCABULARY))


def _family_axes(
    component: str, inputs: Sequence[ir.Value], config: Mapping[str, Any]
) -> dict[str, tuple[signatures.Axis, ...]]:
    if not config:
        return {}
    controlnet = any(str(v.name).startswith("down_block") for v in inputs)
    try:
        return {t.name: t.axes for t in signatures.signature(component, config, controlnet=controlnet).inputs}
    except KeyError:
        return {}


def _values(component: str, value: ir.Value, shape: list[int], config: Mapping[str, Any], seed: int) -> np.ndarray:
    name = str(value.name)
    random = np.random.default_rng([seed, zlib.crc32(f"{component}/{name}".encode())])
    if name == "input_ids":
        return _token_ids(random, shape, _vocabulary(value, config))
    if name == "timestep":
        return random.integers(1, 1000, shape).astype(np.int64 if value.dtype == ir.DataType.INT64 else np.float32)
    if name == "time_ids":  # height and width of the original, top and left of the crop, height and width (or a score)
        return np.broadcast_to(np.array([1024, 1024, 0, 0, 1024, 1024][: shape[-1]], np.float32), shape).copy()
    if name == "class_labels" and config.get("num_class_embeds"):
        return random.integers(0, config["num_class_embeds"], shape)
    if name == "conditioning_scale":
        return np.ones(shape, np.float32)
    if component == "vae_encoder":
        return random.uniform(-1, 1, shape).astype(np.float32)
    if name == "controlnet_cond":
        return random.uniform(0, 1, shape).astype(np.float32)
    if value.dtype is not None and not value.dtype.is_floating_point():
        raise InputError(f"{component}: no values are known for the input {name} ({value.dtype.name}): use --inputs.")
    scale = 1 / config.get("scaling_factor", SD_SCALING_FACTOR) if component == "vae_decoder" else 1.0
    return (random.standard_normal(shape) * scale).astype(np.float32)


def _token_ids(random: np.random.Generator, shape: list[int], vocabulary: int) -> np.ndarray:
    """Start token, words, end token, and end tokens to the full length; both are the last of CLIP's vocabulary."""
    length = shape[1]
    ids = np.full(shape, vocabulary - 1, np.int64)
    for row in ids:
        words = int(random.integers(1, max(2, length - 1)))
        row[0] = vocabulary - 2
        row[1 : 1 + words] = random.integers(0, vocabulary - 2, len(row[1 : 1 + words]))
        row[-1] = vocabulary - 1
    return ids
