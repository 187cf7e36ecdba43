"""Image inputs of Qwen2.5-VL prompts in NumPy: patches, windows and positions, equal to those of transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sd_ort.checkpoints.conditioning import CLIP_MEAN, CLIP_STD
from sd_ort.checkpoints.prompt_tokenizers import ChatTokenizer, QwenTokenizer
from sd_ort.core.errors import InputError
from sd_ort.core.files import read_json
from sd_ort.core.schema import bounded, list_of, record_type, schema_mismatch

IMAGE_TOKEN = "<|image_pad|>"
LONGEST_RATIO = 200  # of the sides of an image, as in transformers
PIXELS = bounded(int, 1, 1 << 28)
PROCESSOR = record_type(
    "ImageProcessor",
    {
        **dict.fromkeys(("min_pixels", "max_pixels"), PIXELS),
        **dict.fromkeys(("patch_size", "temporal_patch_size", "merge_size"), int),
        **dict.fromkeys(("image_mean", "image_std"), list_of(float, 3, 3)),
        "size": record_type("Size", dict.fromkeys(("shortest_edge", "longest_edge"), PIXELS)),
    },
)


class VisionTokenizer(QwenTokenizer):
    """Prompt -> token ids of a chat about images."""

    TOKENS = (*QwenTokenizer.TOKENS, "<|vision_start|>", "<|vision_end|>", IMAGE_TOKEN)


@dataclass(frozen=True)
class VisionProcessor:
    """Settings of the image processor of a pipeline folder and of the vision tower.

    Attributes:
        min_pixels, max_pixels: Of a resized image.
        patch, frames, merge: Pixels of a patch's side, its copies in time, and patches of a token's side.
        window: Tokens of a window's side.
        mean, std: Of each channel.
    """

    min_pixels: int
    max_pixels: int
    patch: int
    frames: int
    merge: int
    window: int
    mean: Sequence[float]
    std: Sequence[float]

    @classmethod
    def open(cls, folder: Path, vision: Mapping[str, Any]) -> VisionProcessor:
        """Return the settings of a folder. vision: config of the vision tower.

        Raises InputError for a folder without them, for damaged ones, and for those of another tower.
        """
        files = [folder / "processor" / f"{name}_config.json" for name in ("preprocessor", "processor")]
        path = next((each for each in files if each.is_file()), None)
        if path is None:
            raise InputError(f"{folder} lacks its processor/preprocessor_config.json: get the whole folder.")
        config = read_json(path, root=folder)
        config = config.get("image_processor", config)  # transformers 5 writes the processor's parts into one file
        if wrong := schema_mismatch(config, PROCESSOR):
            raise InputError(f"{path} is damaged at {wrong!r}: copy it from the original model.")
        names = ("patch_size", "temporal_patch_size", "merge_size"), (
            "patch_size", "temporal_patch_size", "spatial_merge_size"
        )  # fmt: skip
        for name, of_tower in zip(*names, strict=True):
            if config.get(name, vision[of_tower]) != vision[of_tower]:
                raise InputError(f"{path} has {name} = {config[name]}, and the vision tower {vision[of_tower]}.")
        size = config.get("size") or {}
        smallest = config.get("min_pixels") or size.get("shortest_edge") or 56 * 56
        largest = config.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
        patch, merge = vision["patch_size"], vision["spatial_merge_size"]
        return cls(
            smallest, largest, patch, vision["temporal_patch_size"], merge, vision["window_size"] // patch // merge,
            config.get("image_mean") or CLIP_MEAN, config.get("image_std") or CLIP_STD,
        )  # fmt: skip

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of a resized image, multiples of a token's pixels."""
        unit = self.patch * self.merge
        if max(height, width) > LONGEST_RATIO * min(height, width):
            raise InputError(f"image {width} x {height} is too long: at most {LONGEST_RATIO} to 1.")
        rounded = round(height / unit) * unit, round(width / unit) * unit
        if rounded[0] * rounded[1] > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            return tuple(max(unit, math.floor(side / scale / unit) * unit) for side in (height, width))  # type: ignore[return-value]
        if rounded[0] * rounded[1] < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            return tuple(math.ceil(side * scale / unit) * unit for side in (height, width))  # type: ignore[return-value]
        return rounded

    def inputs(self, image: Image.Image) -> tuple[dict[str, np.ndarray], np.ndarray, tuple[int, int]]:
        """Return the vision encoder's inputs for an RGB image, the places of tokens in its output, rows and columns."""
        height, width = self.size(image.height, image.width)
        image = image.resize((width, height), Image.Resampling.BICUBIC)
        mean, std = (np.asarray(each, np.float32) for each in (self.mean, self.std))
        pixels = (np.asarray(image, np.float32) * np.float32(1 / 255) - mean) / std
        rows, columns = height // self.patch, width // self.patch
        blocks = pixels.reshape(
            rows // self.merge, self.merge, self.patch, columns // self.merge, self.merge, self.patch, 3
        )
        patches = blocks.transpose(0, 3, 1, 4, 6, 2, 5)  # tokens, patches of a token, channel, pixels of a patch
        patches = np.repeat(patches[:, :, :, :, :, None], self.frames, 5).reshape(rows * columns, -1)
        grid = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), -1)
        grid = grid.reshape(rows // self.merge, self.merge, columns // self.merge, self.merge, 2)
        grid = grid.transpose(0, 2, 1, 3, 4).reshape(-1, 2)
        windows, places = self.windows(rows // self.merge, columns // self.merge)
        inputs = {
            "pixel_values": _in_places(patches, windows), "position_ids": _in_places(grid, windows),
            "patch_ids": places, "window_ids": windows,
        }  # fmt: skip
        count = self.merge**2
        return inputs, places[::count] // count, (rows // self.merge, columns // self.merge)

    def windows(self, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the patches in the places of each window, -1 for none, and the places of the patches.

        rows, columns: of tokens. The patches of a token are side by side.
        """
        side = self.window
        tokens = np.arange(rows * columns).reshape(rows, columns)
        tokens = np.pad(tokens, ((0, -rows % side), (0, -columns % side)), constant_values=-1)
        tokens = tokens.reshape(tokens.shape[0] // side, side, -1, side).transpose(0, 2, 1, 3).reshape(-1, side**2)
        count = self.merge**2
        windows = np.where(tokens[..., None] < 0, -1, count * tokens[..., None] + np.arange(count))
        windows = windows.reshape(len(tokens), -1)
        flat = windows.reshape(-1)
        places = np.empty(rows * columns * count, np.int64)
        places[flat[flat >= 0]] = np.flatnonzero(flat >= 0)
        return windows, places


def _in_places(values: np.ndarray, windows: np.ndarray) -> np.ndarray:
    """Return values of patches (P, ...) in the places of windows (W, L, ...); zeros in empty places."""
    placed = values[windows.clip(0)]
    placed[windows < 0] = 0
    return placed


def encode_chats(
    tokenizer: ChatTokenizer, chats: Sequence[str], grids: Sequence[tuple[int, int]]
) -> dict[str, np.ndarray]:
    """Return the text encoder's inputs for a batch of chats about the same images.

    Each chat has one image token for each image, which stands for all of its tokens. Positions of text count up on all
    axes; an image's tokens have the position before it, plus their row and column on the second and third axis. Padding
    is on the right.

    grids: rows and columns of tokens of each image.

    Raises InputError for a chat with another number of image tokens, which a prompt may have.
    """
    (image_token,) = tokenizer.tokens(IMAGE_TOKEN)
    encoded = []
    for tokens in map(tokenizer.tokens, chats):
        if tokens.count(image_token) != len(grids):
            raise InputError(f"a prompt must not have the token {IMAGE_TOKEN}, which stands for an image.")
        ids, positions, images, position, first = list[int](), [], list[int](), 0, 0
        sizes = iter(grids)
        for token in tokens:
            rows, columns = next(sizes) if token == image_token else (1, 1)
            count = rows * columns
            ids += [token] * count
            images += range(first, first + count) if token == image_token else [-1]
            first += count if token == image_token else 0
            grid = np.stack(np.meshgrid([0], np.arange(rows), np.arange(columns), indexing="ij"), -1)
            positions.append(position + grid.reshape(-1, 3))
            position += max(rows, columns)
        encoded.append((ids, np.concatenate(positions), images))
    shape = len(chats), max(len(ids) for ids, _, _ in encoded)
    inputs = {
        "input_ids": np.full(shape, tokenizer.pad_token_id), "attention_mask": np.zeros(shape, np.int64),
        "position_ids": np.zeros((*shape, 3), np.int64), "image_ids": np.full(shape, -1),
    }  # fmt: skip
    for row, (ids, ids_positions, images) in enumerate(encoded):
        for name, values in zip(inputs, (ids, 1, ids_positions, images), strict=True):
            inputs[name][row, : len(ids)] = values
    return inputs
