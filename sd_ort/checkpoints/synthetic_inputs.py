"""Synthetic inputs of components, for verification and calibration (`recorded_inputs` reads recorded ones).

They have the distributions of the pipeline: latents and text states N(0, 1), latents for the VAE decoder divided by its
scaling factor, images in [-1, 1], timesteps 1..999, prompts between a start and an end token, and the conditioning
inputs of `unet_inputs`. Inputs of other models are derived from their consumers in the graph: indices of a table,
positive numbers for a logarithm or root, timesteps for sines. They are the same for the same seed.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from fusion_passes import value_queries as c
from sd_ort.checkpoints import signatures
from sd_ort.checkpoints.configs import component_config
from sd_ort.checkpoints.diffusion_transformers import synthetic_values
from sd_ort.checkpoints.presets import CLIP_VOCABULARY
from sd_ort.checkpoints.signatures import has_packed_latents
from sd_ort.checkpoints.unet_inputs import CONDITIONING_INPUTS_BY_NAME, Axis
from sd_ort.core.errors import InputError

Arrays = dict[str, np.ndarray]

# In latent pixels, multiples of 8 as the UNets need: not square, all different, batch 1 and 2.
SIZES: tuple[dict[str, int], ...] = (
    {"batch": 1, "sequence": 77, "images": 1, "height": 24, "width": 16, "image_sequence": 96, "windows": 2,
     "patches": 72},
    {"batch": 2, "sequence": 13, "images": 3, "height": 16, "width": 32, "image_sequence": 128, "windows": 6,
     "patches": 96},
)  # fmt: skip
# Names of axes by Optimum and diffusers' old conversion script -> our names.
ALIASES: Mapping[str, Axis] = {
    "batch_size": "batch", "sequence_length": "sequence", "packed_height_width": "image_sequence",
    "steps": 1, "height_latent": "height",
    "width_latent": "width", "latent_height": "height", "latent_width": "width",
}  # fmt: skip
# (rank, axis) -> meaning of an axis with another name, in models of unknown families.
POSITIONS = {
    **{(rank, 0): "batch" for rank in range(1, 6)},
    (2, 1): "sequence", (3, 1): "sequence", (4, 2): "height", (4, 3): "width",
}  # fmt: skip
SD_SCALING_FACTOR = 0.18215


def pixels_per_latent(folder: Path) -> int:
    """Return the size of an image divided by that of its latents, from the config of a VAE; 8 without one."""
    for name in ("vae_decoder", "vae_encoder"):
        if config := component_config(folder, name):
            return int(2 ** (signatures.levels(config) - 1))
    return 8


def random_inputs(
    component: str, inputs: Sequence[ir.Value], config: Mapping[str, Any], sizes: Mapping[str, int], seed: int = 0
) -> Arrays:
    """Return name -> values, float32 or integer, of the graph inputs `inputs` at `sizes` (see `SIZES`).

    Dynamic axes are those of the family of `config`. In other models, the first axis is the batch, the second of three
    the sequence, and the last two of four are height and width. Raises InputError for an axis of unknown size and an
    input of unknown values.
    """
    all_sizes = {"images": 1, **sizes}
    return {
        str(v.name): _values(component, v, _shape(component, inputs, v, config, all_sizes), config, seed)
        for v in inputs
    }


def _shape(
    component: str, inputs: Sequence[ir.Value], value: ir.Value, config: Mapping[str, Any], sizes: dict[str, int]
) -> list[int]:
    family_axes = _family_axes(component, inputs, config).get(str(value.name), ())
    shape = []
    for index, declared in enumerate(family_axes if value.shape is None else value.shape):
        axis = declared if isinstance(declared, (int, str)) else str(declared.value)
        if isinstance(axis, str):
            axis = family_axes[index] if index < len(family_axes) else ALIASES.get(axis, axis)
        if isinstance(axis, str) and index == 1 and len(value.shape or ()) == 4:
            axis = c.required_channels(value) or axis
        if (
            isinstance(axis, str)
            and not family_axes
            and not re.fullmatch(r"(batch|sequence|height|width)(\*\d+)?", axis)
        ):
            position = POSITIONS.get((len(value.shape or ()), index))
            if position is not None:  # axes of one name have one size
                axis = sizes.setdefault(axis, sizes[position]) if axis != "None" else sizes[position]
        try:
            shape.append(signatures.size(axis, sizes) * _pixels(component, value, axis, family_axes))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"{component}: the size of axis {index} ({axis}) of input {value.name} is not known: "
                "put the model's config.json beside model.onnx, or give recorded inputs with --inputs."
            ) from error
    return shape


def _pixels(component: str, value: ir.Value, axis: Axis, family_axes: Sequence[Axis]) -> int:
    """Return the pixels per latent pixel of the axis of a VAE encoder's image without a config, else 1."""
    return 8 if component == "vae_encoder" and not family_axes and axis in ("height", "width") else 1


# Operators that pass values of an input on, in the search for its consumers.
PASS_THROUGH_OPS = (
    "Cast",
    "Reshape",
    "Flatten",
    "Unsqueeze",
    "Squeeze",
    "Expand",
    "Identity",
    "Mul",
    "Div",
    "Add",
    "Concat",
)


def _uses(value: ir.Value) -> list[tuple[str, ir.Value, ir.Node]]:
    """Return (operator, input, node) of the consumers of a value, also behind up to 8 `PASS_THROUGH_OPS`."""
    uses, frontier = [], [value]
    for _ in range(8):
        read = [(node.op_type, value, node) for value in frontier for node in c.data_consumers(value)]
        uses += read
        frontier = list(dict.fromkeys(node.outputs[0] for op, _, node in read if op in PASS_THROUGH_OPS))
    return uses


def _table_size(ids: ir.Value) -> int | None:
    """Return the size of the smallest constant table that `ids` index, or None."""
    rows = [
        c.size(node.inputs[0], node.attributes.get_int("axis", 0))
        for op, value, node in _uses(ids)
        if op == "Gather" and node.inputs[1] is value and c.is_constant(node.inputs[0])
    ]
    return min((size for size in rows if size is not None), default=None)


def _family_axes(component: str, inputs: Sequence[ir.Value], config: Mapping[str, Any]) -> dict[str, tuple[Axis, ...]]:
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
        return _token_ids(
            random, shape, _table_size(value) or int(signatures.text_config(config).get("vocab_size", CLIP_VOCABULARY))
        )
    if (values := synthetic_values(config, name, random, shape)) is not None:
        is_index = value.dtype == ir.DataType.INT64
        return values.astype(np.int64 if is_index else np.float32)
    if name in ("timestep", "timesteps"):
        return random.integers(1, 1000, shape).astype(np.int64 if value.dtype == ir.DataType.INT64 else np.float32)
    is_integer = value.dtype is not None and not value.dtype.is_floating_point()
    if spec := CONDITIONING_INPUTS_BY_NAME.get(name):
        values = spec.synthesize(random, shape, config)
        if not is_integer or np.issubdtype(values.dtype, np.integer):
            return values.astype(np.int64 if is_integer else np.float32)
    if name == "conditioning_scale":
        return np.ones(shape, np.float32)
    if component == "vae_encoder":
        return random.uniform(-1, 1, shape).astype(np.float32)
    if name == "controlnet_cond":
        return random.uniform(0, 1, shape).astype(np.float32)
    if name.endswith("mask") and len(shape) == 2:
        return (np.arange(shape[1]) < random.integers(1, shape[1] + 1, (shape[0], 1))).astype(np.float32)
    if is_integer:
        return _integers(component, value, shape, random)
    used = {op for op, _, _ in _uses(value)}
    if used & {"Log", "Sqrt"}:
        return np.exp(random.standard_normal(shape)).astype(np.float32)
    if len(shape) < 2 and used & {"Sin", "Cos"}:
        return random.integers(1, 1000, shape).astype(np.float32)
    scale = 1.0
    if component == "vae_decoder" and not has_packed_latents(config):
        scale = 1 / (config.get("scaling_factor") or (1.0 if config.get("z_dim") else SD_SCALING_FACTOR))
    return (random.standard_normal(shape) * scale).astype(np.float32)


def _integers(component: str, value: ir.Value, shape: list[int], random: np.random.Generator) -> np.ndarray:
    """Return booleans, indices of a table, or timesteps. Raises InputError for any other input."""
    rows = _table_size(value)
    if value.dtype == ir.DataType.BOOL:
        return random.integers(0, 2, shape).astype(np.bool_)
    if rows is not None:
        return random.integers(0, rows, shape)
    if len(shape) < 2 and {op for op, _, _ in _uses(value)} & {"Sin", "Cos"}:
        return random.integers(1, 1000, shape)
    dtype = "integers" if value.dtype is None else value.dtype.name
    raise InputError(f"{component}: no values are known for the input {value.name} ({dtype}): use --inputs.")


def _token_ids(random: np.random.Generator, shape: list[int], vocabulary: int) -> np.ndarray:
    """Return start token, words and end tokens; start and end are the last two ids of CLIP's vocabulary."""
    length = shape[1]
    ids = np.full(shape, vocabulary - 1, np.int64)
    for row in ids:
        words = int(random.integers(1, max(2, length - 1)))
        row[0] = vocabulary - 2
        row[1 : 1 + words] = random.integers(0, vocabulary - 2, len(row[1 : 1 + words]))
        row[-1] = vocabulary - 1
    return ids
