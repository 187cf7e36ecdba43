"""Image prompts: the conditioning inputs of a UNet that was exported with an IP-Adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.pipelines.images import as_array, as_image, clip_pixels, feature_extractor, is_pil, is_tensor, pil_images
from sd_ort.pipelines.request import Request
from sd_ort.pipelines.sampling_job import check_finite
from sd_ort.pipelines.state import PipelineState

if TYPE_CHECKING:
    import torch
    from PIL import Image


class IPAdapterMixin(PipelineState):
    """diffusers' methods for IP-Adapters."""

    ip_adapter_scales: np.ndarray | None = None  # of each layer that attends to images; None for 1

    def set_ip_adapter_scale(self, scale: Any) -> None:
        """Set the scale of image prompts: a number (1 as trained, 0 without effect), or diffusers' scales by blocks.

        Blocks are {"down": ..., "mid": ..., "up": {"block_0": [0.0, 1.0, 0.0]}}; those that are absent have scale 0.

        Raises InputError for a folder without an IP-Adapter, and for blocks that its UNet has not.
        """
        self.ip_adapter_scales = layer_scales(scale, self._adapter()["layers"])

    def encode_image(
        self, image: Any, device: Any, num_images_per_prompt: int, output_hidden_states: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the embeddings (N * num_images_per_prompt, ...) of images and of no image, for the IP-Adapter.

        Raises InputError for `output_hidden_states` of another kind of adapter than the folder's.
        """
        import torch

        if bool(output_hidden_states) != (len(self._shape) == 2):
            raise InputError(f"This IP-Adapter reads {'hidden states' if len(self._shape) == 2 else 'embeddings'}.")
        request = Request()
        request.guidance = 1.0  # for both
        negative, positive = (
            torch.from_numpy(side[0].repeat(num_images_per_prompt, 0)).to(device)
            for side in self._encoded(image, request)
        )
        return positive, negative

    def prepare_ip_adapter_image_embeds(
        self,
        ip_adapter_image: Any = None,
        ip_adapter_image_embeds: Any = None,
        device: Any = None,
        num_images_per_prompt: int = 1,
        do_classifier_free_guidance: bool = True,
    ) -> list[torch.Tensor]:
        """Return `ip_adapter_image_embeds` of `__call__`: one tensor, with guidance negative rows first."""
        import torch

        self._adapter()
        request = Request(prompt="", ip_adapter_image=ip_adapter_image, ip_adapter_image_embeds=ip_adapter_image_embeds)
        request.num_images_per_prompt = num_images_per_prompt
        request.guidance = 1.0 if do_classifier_free_guidance else None
        return [torch.from_numpy(self.encode_ip_adapter_images(request)["image_embeds"])]

    def encode_ip_adapter_images(self, request: Request) -> dict[str, np.ndarray]:
        """Return the UNet's inputs `image_embeds` (rows, images, ...) and `ip_adapter_scale` (rows, layers), float32.

        With guidance there are 2B rows, negative first. {} if the UNet has no IP-Adapter.

        Raises InputError for an image without an adapter, or an adapter without an image.
        """
        images, embeds = request.ip_adapter_image, request.ip_adapter_image_embeds
        if images is None and embeds is None and not self.unet_config.get("ip_adapter"):
            return {}
        scales = self.ip_adapter_scales
        scales = np.ones(len(self._adapter()["layers"]), np.float32) if scales is None else scales
        if images is not None and embeds is not None:
            raise InputError("ip_adapter_image and ip_adapter_image_embeds say the same: give one of them.")
        if embeds is not None:
            sides = self._split_embeds(_only(embeds, "tensors of embeddings"), request)
        elif images is not None:
            sides = self._encoded(_only(images, "images (of several [[a, b]] is a list)"), request)
        elif scales.any():
            raise InputError(
                "this UNet has an IP-Adapter: give it an image, ip_adapter_image (--ip-adapter-image), or generate "
                "without one after set_ip_adapter_scale(0) (--ip-adapter-scale 0)."
            )
        else:
            sides = [np.zeros((1, 1, *self._shape), np.float32)] * (1 if request.guidance is None else 2)
        rows = np.concatenate([_for_batch(side, request) for side in sides])
        return {"image_embeds": rows, "ip_adapter_scale": np.tile(scales, (len(rows), 1))}

    def _adapter(self) -> dict[str, Any]:
        adapter: dict[str, Any] | None = self.unet_config.get("ip_adapter")
        if adapter is None:
            raise InputError(f"{self.folder} has no IP-Adapter: export its model with --ip-adapter FILE.")
        return adapter

    @property
    def _shape(self) -> tuple[int, ...]:
        """Shape of the embedding of an image."""
        adapter = self._adapter()
        length = adapter.get("hidden_state_length")
        return (length, adapter["width"]) if length else (adapter["width"],)

    def _split_embeds(self, embeds: Any, request: Request) -> list[np.ndarray]:
        """Return embeddings (rows, images, ...) by sides: with guidance the negative rows, then the positive ones."""
        array, count = as_array(embeds), 1 if request.guidance is None else 2
        if array.shape[2:] != self._shape or array.ndim < 3 or len(array) % count:
            expected = ", ".join(map(str, ("rows", "images", *self._shape)))
            raise InputError(
                f"ip_adapter_image_embeds of {list(array.shape)} were given where [{expected}] are read, {count} rows "
                f"a prompt{': negative ones first, since there is guidance' if count == 2 else ', without guidance'}."
            )
        return np.split(array, count)

    def _encoded(self, images: Any, request: Request) -> list[np.ndarray]:
        """Return the embeddings of images (1, images, ...); with guidance the embedding of no image comes first.

        That is zeros, or for IP-Adapter Plus the embedding of an image of zeros.
        """
        encoder = self.models["image_encoder"]
        side = encoder.inputs["pixel_values"].shape[-1]
        if is_tensor(images):  # the feature extractor's, in diffusers too
            pixels = as_array(images)
            if pixels.ndim != 4 or pixels.shape[1:] != (3, side, side):
                raise InputError(f"a tensor as ip_adapter_image is the encoder's own: [images, 3, {side}, {side}].")
        else:
            config = feature_extractor(self.folder)
            pixels = np.stack([clip_pixels(each, side, config) for each in _images(images)])
        positive = self._embeds(pixels)
        if request.guidance is None:
            return [positive]
        if len(self._shape) == 1:
            return [np.zeros_like(positive), positive]
        return [self._embeds(np.zeros_like(pixels[:1])).repeat(len(pixels), 1), positive]

    def _embeds(self, pixels: np.ndarray) -> np.ndarray:
        """Return embeddings (1, images, ...) of pixels (images, 3, S, S)."""
        name = "image_embeds" if len(self._shape) == 1 else "hidden_states"
        embeds = self.models["image_encoder"](pixel_values=pixels)[name].astype(np.float32)
        check_finite(embeds, "image_encoder")
        return embeds[None]


def _only(values: Any, what: str) -> Any:
    """Return the entry of a list with one entry per adapter, as diffusers takes it; other values as they are."""
    if not isinstance(values, (list, tuple)):
        return values
    if len(values) != 1:
        raise InputError(f"{len(values)} {what} were given for one IP-Adapter: give one.")
    return values[0]


def _images(values: Any) -> list[Image.Image]:
    """Return one or several images (PIL, arrays of bytes or 0..1) as RGB. Raises InputError for anything else."""
    images = []
    for each in values if isinstance(values, (list, tuple)) and values else [values]:
        image = as_image(each, "image for the IP-Adapter")
        if isinstance(image, np.ndarray):
            if image.ndim != 3 or image.shape[2] != 3:
                raise InputError(f"an array of {list(image.shape)} is no image: [height, width, 3] is.")
            (image,) = pil_images((image[None].clip(0, 1) * 255).round().astype(np.uint8))
        if not is_pil(image):
            raise InputError("images for the IP-Adapter are PIL images or arrays, or one tensor of all of them.")
        images.append(image.convert("RGB"))
    return images


def _for_batch(side: np.ndarray, request: Request) -> np.ndarray:
    """Repeat one row for all images, or one row per prompt, to one row per image."""
    if len(side) not in (1, request.count):
        raise InputError(f"{len(side)} rows of embeddings for {request.count} prompts: give one, or one a prompt.")
    return side.repeat(request.batch // len(side), 0)


def layer_scales(scale: Any, layers: Sequence[str]) -> np.ndarray:
    """Return the scale of each layer (float32) for an argument of `set_ip_adapter_scale`. Raises InputError."""
    scale = _only(scale, "scales")
    locations = [_location(name) for name in layers]
    if isinstance(scale, Mapping):
        _check_blocks(scale, locations)
        scales = [_scale_at(scale, *location) for location in locations]
    else:
        scales = [scale] * len(layers)
    if not all(isinstance(each, (int, float)) and np.isfinite(each) for each in scales):
        raise InputError(f"an IP-Adapter's scale is a number such as 0.6, or numbers by blocks, not {scale!r}.")
    return np.array(scales, np.float32)


def _location(layer: str) -> tuple[str, str, int]:
    """down_blocks.1.attentions.0.transformer_blocks.2 -> ("down", "block_1", 0), and of the middle ("mid", "", 0)."""
    part, *rest = layer.split(".")
    if part == "mid_block":
        return "mid", "", 0
    return part.removesuffix("_blocks"), f"block_{rest[0]}", int(rest[2])


def _scale_at(scale: Mapping[str, Any], part: str, block: str, attention: int) -> Any:
    value = scale.get(part, 0.0)
    value = value.get(block, 0.0) if isinstance(value, Mapping) else value
    if isinstance(value, (list, tuple)):
        return value[0] if len(value) == 1 else value[attention]
    return value


def _check_blocks(scale: Mapping[str, Any], locations: Sequence[tuple[str, str, int]]) -> None:
    """Raise InputError for parts and blocks that do not attend to images, and lists of other lengths."""
    for part, value in scale.items():
        blocks = sorted({block for each, block, _ in locations if each == part})
        named = dict(value) if isinstance(value, Mapping) else dict.fromkeys(blocks, value)
        for block, numbers in named.items() if blocks else [(part, 0)]:
            count = len({attention for each, name, attention in locations if (each, name) == (part, block)})
            if not count:
                attending = ", ".join(sorted({" ".join(location[:2]).strip() for location in locations}))
                raise InputError(f"no layer of {part} {block} attends to images: those that do are {attending}.")
            if isinstance(numbers, (list, tuple)) and len(numbers) not in (1, count):
                raise InputError(
                    f"{len(numbers)} scales for {part} {block}, which attends {count} times: give {count}."
                )
