"""Made-up inputs such as a component meets in use, for verification and calibration; `recorded` reads real ones.

They have the distributions of the pipeline: latents and text states N(0, 1), latents for the VAE decoder divided by its
scaling factor, images in [-1, 1], timesteps 1..999, prompts between a start and an end token; `conditions` makes up the
rest of what a denoiser is told. What an input of another model may hold is read off the graph: rows of the table that
it indexes, positive numbers where their logarithm or root is taken, times where their sines are. The same seed gives
the same numbers.
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
from sd_ort.checkpoints.presets import CLIP_VOCABULARY
from sd_ort.checkpoints.unet_inputs import CONDITIONS_BY_NAME, Axis
from sd_ort.core.errors import InputError

Arrays = dict[str, np.ndarray]

# Latent pixels; multiples of 8 as the UNets need. Not square, different in every axis, batch 1 and batch 2.
SIZES: tuple[dict[str, int], ...] = (
    {"batch": 1, "sequence": 77, "images": 1, "height": 24, "width": 16},
    {"batch": 2, "sequence": 13, "images": 3, "height": 16, "width": 32},
)
# What the axes are called by Optimum and by diffusers' old conversion script, where they say more than our sizes.
ALIASES: Mapping[str, Axis] = {
    "batch_size": "batch", "sequence_length": "sequence", "steps": 1, "height_latent": "height",
    "width_latent": "width", "latent_height": "height", "latent_width": "width",
}  # fmt: skip
# (rank, axis) -> what an axis with a name of its own is, in models of which no family is known.
POSITIONS = {
    **{(rank, 0): "batch" for rank in range(1, 6)},
    (2, 1): "sequence", (3, 1): "sequence", (4, 2): "height", (4, 3): "width",
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

    Sizes that the graph leaves open are those of the family, found from `config`; of other models the first axis is
    the batch, the second of three the sequence, and the last two of four are height and width. Raises InputError when
    an axis is none of these, and for an input whose values nobody can make up.
    """
    chosen = {"images": 1, **sizes}
    return {
        str(v.name): _values(component, v, _shape(component, inputs, v, config, chosen), config, seed) for v in inputs
    }


def _shape(
    component: str, inputs: Sequence[ir.Value], value: ir.Value, config: Mapping[str, Any], sizes: dict[str, int]
) -> list[int]:
    known = _family_axes(component, inputs, config).get(str(value.name), ())
    shape = []
    for index, declared in enumerate(known if value.shape is None else value.shape):
        axis = declared if isinstance(declared, (int, str)) else str(declared.value)
        if isinstance(axis, str):
            axis = known[index] if index < len(known) else ALIASES.get(axis, axis)
        if isinstance(axis, str) and index == 1 and len(value.shape or ()) == 4:
            axis = c.required_channels(value) or axis
        if isinstance(axis, str) and not known and not re.fullmatch(r"(batch|sequence|height|width)(\*\d+)?", axis):
            position = POSITIONS.get((len(value.shape or ()), index))
            if position is not None:  # axes of one name have one size
                axis = sizes.setdefault(axis, sizes[position]) if axis != "None" else sizes[position]
        try:
            shape.append(signatures.size(axis, sizes) * _pixels(component, value, axis, known))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"{component}: the size of axis {index} ({axis}) of input {value.name} is not known: "
                "put the model's config.json beside model.onnx, or give recorded inputs with --inputs."
            ) from error
    return shape


def _pixels(component: str, value: ir.Value, axis: Axis, known: Sequence[Axis]) -> int:
    """Pixels a latent pixel, for the image that a VAE encoder reads when no config tells its axes."""
    return 8 if component == "vae_encoder" and not known and axis in ("height", "width") else 1


# Operators whose result stands for their first input where its values are looked for.
CARRYING = ("Cast", "Reshape", "Flatten", "Unsqueeze", "Squeeze", "Expand", "Identity", "Mul", "Div", "Add", "Concat")


def _uses(value: ir.Value, reach: int = 8) -> list[tuple[str, ir.Value, ir.Node]]:
    """(operator, what it reads, node) of what reads an input, directly or through up to `reach` of `CARRYING`."""
    found, frontier = [], [value]
    for _ in range(reach):
        read = [(node.op_type, value, node) for value in frontier for node in c.data_consumers(value)]
        found += read
        frontier = list(dict.fromkeys(node.outputs[0] for op, _, node in read if op in CARRYING))
    return found


def _rows(ids: ir.Value) -> int | None:
    """Rows of the smallest constant table that `ids` index in the graph, or None."""
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
        return _token_ids(random, shape, _rows(value) or int(config.get("vocab_size", CLIP_VOCABULARY)))
    if name in ("timestep", "timesteps"):
        return random.integers(1, 1000, shape).astype(np.int64 if value.dtype == ir.DataType.INT64 else np.float32)
    whole = value.dtype is not None and not value.dtype.is_floating_point()
    if condition := CONDITIONS_BY_NAME.get(name):
        made = condition.made_up(random, shape, config)
        if not whole or np.issubdtype(made.dtype, np.integer):
            return made.astype(np.int64 if whole else np.float32)
    if name == "conditioning_scale":
        return np.ones(shape, np.float32)
    if component == "vae_encoder":
        return random.uniform(-1, 1, shape).astype(np.float32)
    if name == "controlnet_cond":
        return random.uniform(0, 1, shape).astype(np.float32)
    if name.endswith("mask") and len(shape) == 2:
        return (np.arange(shape[1]) < random.integers(1, shape[1] + 1, (shape[0], 1))).astype(np.float32)
    if whole:
        return _whole_numbers(component, value, shape, random)
    used = {op for op, _, _ in _uses(value)}
    if used & {"Log", "Sqrt"}:
        return np.exp(random.standard_normal(shape)).astype(np.float32)
    if len(shape) < 2 and used & {"Sin", "Cos"}:
        return random.integers(1, 1000, shape).astype(np.float32)
    scale = 1 / config.get("scaling_factor", SD_SCALING_FACTOR) if component == "vae_decoder" else 1.0
    return (random.standard_normal(shape) * scale).astype(np.float32)


def _whole_numbers(component: str, value: ir.Value, shape: list[int], random: np.random.Generator) -> np.ndarray:
    """Truth values, rows of the table that an input indexes, or times. Raises InputError for any other."""
    rows = _rows(value)
    if value.dtype == ir.DataType.BOOL:
        return random.integers(0, 2, shape).astype(np.bool_)
    if rows is not None:
        return random.integers(0, rows, shape)
    if len(shape) < 2 and {op for op, _, _ in _uses(value)} & {"Sin", "Cos"}:
        return random.integers(1, 1000, shape)
    dtype = "integers" if value.dtype is None else value.dtype.name
    raise InputError(f"{component}: no values are known for the input {value.name} ({dtype}): use --inputs.")


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
