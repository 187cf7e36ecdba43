"""Image arguments of a call: PIL images, arrays, tensors or latents, one for all, one a prompt or one an image."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from sd_ort.checkpoints.conditioning import CLIP_MEAN, CLIP_STD
from sd_ort.core.errors import InputError
from sd_ort.core.files import read_json
from sd_ort.core.schema import list_of, record_type, schema_mismatch
from sd_ort.pipelines.request import Picture, Request

if TYPE_CHECKING:
    import torch
    from PIL import Image

PIXEL_BLOCK = 1 << 16  # values that are converted at once, in the processor's cache


def is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a torch tensor, without importing torch."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def is_pil(value: Any) -> TypeGuard[Image.Image]:
    """Return whether a value is a PIL image, without importing PIL."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def pil_images(pixels: np.ndarray) -> list[Image.Image]:
    """Return uint8 pixels (B, H, W, 3) as PIL images."""
    from PIL import Image

    return [Image.fromarray(each) for each in pixels]


def as_array(value: Any) -> np.ndarray:
    """Return a tensor or an array as a float32 array on the host."""
    return np.asarray(value.detach().float().cpu().numpy() if is_tensor(value) else value, np.float32)


def as_tensor(value: Any) -> Any:
    """Return an array or a number as a torch tensor over the same memory; as it is where torch is not installed."""
    try:
        import torch
    except ModuleNotFoundError:
        return value
    return torch.as_tensor(value)


def latents_of_shape(latents: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return latents as an array. Raises InputError for latents of another shape."""
    array = as_array(latents)
    if array.shape != shape:
        raise InputError(f"latents of shape {array.shape} were given where {shape} are needed.")
    return array


def as_image(source: Picture | None, what: str = "image") -> Any:
    """Return an image as diffusers' image processor takes it; uint8 becomes 0..1. Raises InputError for no image."""
    if isinstance(source, (list, tuple)) and source:
        return [as_image(image, what) for image in source]
    if isinstance(source, np.ndarray) and source.ndim in (2, 3, 4) and source.size:
        return source.astype(np.float32) / 255 if source.dtype == np.uint8 else source
    if is_tensor(source) and source.ndim in (2, 3, 4) and source.numel():
        return source.float() / 255 if str(source.dtype) == "torch.uint8" else source.float()
    if is_pil(source):
        return source
    raise InputError(f"no {what} was given: pass a PIL image, an array, a tensor, or a list of them.")


def to_output_type(pixels: np.ndarray, output_type: str) -> Any:
    """Convert pixels (B, 3, H, W), float32, about -1..1, to images of `output_type`: "pil", "np", "pt" or "uint8"."""
    if output_type in ("pt", "np"):
        unit = unit_interval(pixels, np.empty(pixels.shape, np.float32))
        if output_type == "np":
            return channels_last(unit)
        import torch

        return torch.from_numpy(unit)
    rounded = channels_last(rounded_pixels(pixels))
    return rounded if output_type == "uint8" else pil_images(rounded)


def unit_interval(pixels: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Write pixels of about -1..1 to `out` as 0..1, and return it."""
    np.multiply(pixels, np.float32(0.5), out=out)
    out += np.float32(0.5)
    return np.clip(out, 0, 1, out=out)


def rounded_pixels(pixels: np.ndarray) -> np.ndarray:
    """Return pixels, about -1..1, as uint8 of the same shape."""
    rounded = np.empty(pixels.shape, np.uint8)
    source, target = pixels.reshape(-1), rounded.reshape(-1)
    buffer = np.empty(min(len(source), PIXEL_BLOCK), np.float32)
    for start in range(0, len(source), PIXEL_BLOCK):
        block = source[start : start + PIXEL_BLOCK]
        unit = unit_interval(block, buffer[: len(block)])
        unit *= 255
        target[start : start + PIXEL_BLOCK] = np.rint(unit, out=unit)
    return rounded


def channels_last(images: np.ndarray) -> np.ndarray:
    """Return images (B, C, H, W) as (B, H, W, C), channel by channel: ten times as fast as a transposed view."""
    return np.stack(list(images.swapaxes(0, 1)), -1)


def size_of(image: Any, latent_channels: int, factor: int) -> tuple[int, int]:
    """Return height and width in pixels of a `readable` image, or of the first one. A latent is `factor` pixels."""
    first = image[0] if isinstance(image, list) else image
    if is_pil(first):
        return first.height, first.width
    if is_tensor(first):
        height, width = first.shape[-2:]
        scale = factor if is_latents(first, latent_channels) else 1
        return height * scale, width * scale
    height, width = first.shape[-3:-1] if first.ndim > 2 else first.shape
    return int(height), int(width)


def is_latents(image: Any, latent_channels: int) -> bool:
    """Return whether a `readable` image is latents: a tensor with that number of channels."""
    first = image[0] if isinstance(image, list) else image
    return is_tensor(first) and first.ndim > 2 and first.shape[-3] == latent_channels


def preprocess(
    images: Any, height: int, width: int, *, mask: bool = False, signed: bool = True, latent_channels: int | None = None
) -> np.ndarray:
    """Return `readable` images resized to pixels (B, 3, H, W) float32, as diffusers' VaeImageProcessor does.

    `signed`: -1..1 instead of 0..1. `mask`: (B, 1, H, W) of zeros and ones instead. A tensor of `latent_channels`
    channels is returned as it is: latents.
    """
    listed = images if isinstance(images, list) else [images]
    if is_pil(listed[0]):
        from PIL import Image

        sized = [
            image.resize((width, height), Image.Resampling.LANCZOS).convert("L" if mask else "RGB") for image in listed
        ]
        pixels = np.stack([np.asarray(image, np.float32) / 255 for image in sized])
        pixels = pixels[:, None] if mask else pixels.transpose(0, 3, 1, 2)
    else:
        channels_first = is_tensor(listed[0])
        arrays = [as_array(image) if channels_first else image for image in listed]
        if mask and images is not listed and arrays[0].ndim == 3 and (channels_first or arrays[0].shape[-1] != 1):
            arrays = list(arrays[0])  # (B, H, W): several masks
        pixels = np.concatenate(arrays) if arrays[0].ndim == 4 else np.stack(arrays)
        if pixels.ndim == 3:
            pixels = pixels[:, None] if channels_first else pixels[..., None]
        if channels_first and pixels.shape[1] == latent_channels:
            return pixels
        pixels = nearest(pixels if channels_first else pixels.transpose(0, 3, 1, 2), height, width)
    if mask:
        return (pixels >= 0.5).astype(np.float32)
    return (2 * pixels - 1 if signed and pixels.min() >= 0 else pixels).astype(np.float32)


def nearest(x: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return x (..., H, W) resized to the nearest pixels, as torch.nn.functional.interpolate does by default."""
    rows, columns = (
        np.minimum((np.arange(out, dtype=np.float32) * np.float32(size / out)).astype(np.int64), size - 1)
        for size, out in zip(x.shape[-2:], (height, width), strict=True)
    )
    return x[..., rows[:, None], columns]


def for_batch(x: np.ndarray, request: Request, what: str) -> np.ndarray:
    """Repeat one row, or one a prompt, to one an image. Raises InputError for other counts."""
    if len(x) == request.batch:
        return x
    if len(x) not in (1, request.count):
        raise InputError(f"{len(x)} {what} for {request.count} prompts: give one, or one a prompt.")
    return x.repeat(request.batch // len(x), 0)


def repeat_to_batch(x: np.ndarray, batch: int, what: str) -> np.ndarray:
    """Repeat the rows in turn up to the batch size, independent of the prompts, as diffusers does.

    Raises InputError for a number of rows that does not divide the batch.
    """
    if batch % len(x):
        raise InputError(f"{len(x)} {what} were given for {batch} images: give one, or one an image.")
    return np.concatenate([x] * (batch // len(x)))


def clip_pixels(image: Image.Image, size: int, config: Mapping[str, Any]) -> np.ndarray:
    """Return CLIP's input for an image: its central square, resized and normalized, (3, size, size) float32. `config`:
    see `feature_extractor`."""
    from PIL import Image

    sides = [max(size, size * side // min(image.size)) for side in image.size]
    image = image.resize((sides[0], sides[1]), Image.Resampling.BICUBIC)
    left, top = ((side - size) // 2 for side in sides)
    pixels = np.asarray(image.crop((left, top, left + size, top + size)), np.float32) / 255
    normalized = (pixels - config.get("image_mean", CLIP_MEAN)) / config.get("image_std", CLIP_STD)
    return normalized.transpose(2, 0, 1).astype(np.float32)


PREPROCESSOR = record_type("Preprocessor", dict.fromkeys(("image_mean", "image_std"), list_of(float, 3, 3)))


def feature_extractor(folder: Path) -> dict[str, Any]:
    """Return a pipeline folder's feature_extractor/preprocessor_config.json; {} without one, for CLIP's own values.
    Raises InputError for a damaged file."""
    path = folder / "feature_extractor" / "preprocessor_config.json"
    if not path.is_file():
        return {}
    config = read_json(path, root=folder)
    if wrong := schema_mismatch(config, PREPROCESSOR):
        raise InputError(f"{path} is damaged at {wrong!r}: copy it from the original model.")
    return {name: value for name, value in config.items() if value is not None}
