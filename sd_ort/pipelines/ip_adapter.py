"""Pictures as prompts: what a UNet that was exported with an IP-Adapter is told about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from sd_ort.core.errors import InputError
from sd_ort.pipelines.images import as_array, clip_pixels, feature_extractor, is_tensor, readable
from sd_ort.pipelines.request import Request
from sd_ort.pipelines.sampling_job import check_finite
from sd_ort.pipelines.state import PipelineState

if TYPE_CHECKING:
    import torch


class IPAdapterMixin(PipelineState):
    """diffusers' methods for IP-Adapters."""

    ip_adapter_scales: np.ndarray | None = None  # of each layer that attends to pictures; None for 1

    def set_ip_adapter_scale(self, scale: Any) -> None:
        """How much pictures count from now on: a number (1 as trained, 0 not at all), or as diffusers has it by blocks,
        {"down": ..., "mid": ..., "up": {"block_0": [0.0, 1.0, 0.0]}}, where what is not named counts nothing.

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
        """What `__call__` takes as `ip_adapter_image_embeds`: one tensor, with guidance negative rows first."""
        import torch

        self._adapter()
        asked = Request(prompt="", ip_adapter_image=ip_adapter_image, ip_adapter_image_embeds=ip_adapter_image_embeds)
        asked.num_images_per_prompt = num_images_per_prompt
        asked.guidance = 1.0 if do_classifier_free_guidance else None
        return [torch.from_numpy(self.encode_ip_adapter_images(asked)["image_embeds"])]

    def encode_ip_adapter_images(self, request: Request) -> dict[str, np.ndarray]:
        """The UNet's inputs `image_embeds` (rows, pictures, ...) and `ip_adapter_scale` (rows, layers), float32, with
        guidance for 2B rows, negative first; {} where there is no IP-Adapter.

        Raises InputError for a picture without an adapter, or an adapter without a picture.
        """
        given, embeds = request.ip_adapter_image, request.ip_adapter_image_embeds
        if given is None and embeds is None and not self.unet_config.get("ip_adapter"):
            return {}
        scales = self.ip_adapter_scales
        scales = np.ones(len(self._adapter()["layers"]), np.float32) if scales is None else scales
        if given is not None and embeds is not None:
            raise InputError("ip_adapter_image and ip_adapter_image_embeds say the same: give one of them.")
        if embeds is not None:
            sides = self._given(_only(embeds, "tensors of embeddings"), request)
        elif given is not None:
            sides = self._encoded(_only(given, "pictures (of several [[a, b]] is a list)"), request)
        elif scales.any():
            raise InputError(
                "this UNet has an IP-Adapter: give it a picture, ip_adapter_image (--ip-adapter-image), or draw "
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
        """Of a picture's embedding."""
        adapter = self._adapter()
        length = adapter.get("hidden_state_length")
        return (length, adapter["width"]) if length else (adapter["width"],)

    def _given(self, embeds: Any, request: Request) -> list[np.ndarray]:
        """Embeddings (rows, pictures, ...), with guidance of negative rows before as many positive ones, by sides."""
        array, count = as_array(embeds), 1 if request.guidance is None else 2
        if array.shape[2:] != self._shape or array.ndim < 3 or len(array) % count:
            wanted = ", ".join(map(str, ("rows", "pictures", *self._shape)))
            raise InputError(
                f"ip_adapter_image_embeds of {list(array.shape)} were given where [{wanted}] are read, {count} rows a "
                f"prompt{': negative ones first, since there is guidance' if count == 2 else ', without guidance'}."
            )
        return np.split(array, count)

    def _encoded(self, pictures: Any, request: Request) -> list[np.ndarray]:
        """What the image encoder makes of pictures (1, pictures, ...); with guidance behind what it makes of none:
        zeros, or for IP-Adapter Plus what it sees in a picture of zeros."""
        encoder = self.models["image_encoder"]
        side = encoder.inputs["pixel_values"].shape[-1]
        if is_tensor(pictures):  # the feature extractor's, in diffusers too
            pixels = as_array(pictures)
            if pixels.ndim != 4 or pixels.shape[1:] != (3, side, side):
                raise InputError(f"a tensor as ip_adapter_image is the encoder's own: [pictures, 3, {side}, {side}].")
        else:
            config = feature_extractor(self.folder)
            pixels = np.stack([clip_pixels(each, side, config) for each in _pictures(pictures)])
        positive = self._embeds(pixels)
        if request.guidance is None:
            return [positive]
        if len(self._shape) == 1:
            return [np.zeros_like(positive), positive]
        return [self._embeds(np.zeros_like(pixels[:1])).repeat(len(pixels), 1), positive]

    def _embeds(self, pixels: np.ndarray) -> np.ndarray:
        """(1, pictures, ...) of pixels (pictures, 3, S, S)."""
        name = "image_embeds" if len(self._shape) == 1 else "hidden_states"
        made = self.models["image_encoder"](pixel_values=pixels)[name].astype(np.float32)
        check_finite(made, "image_encoder")
        return made[None]


def _only(given: Any, what: str) -> Any:
    """The adapter's own of a list of one an adapter, as diffusers takes them."""
    if not isinstance(given, (list, tuple)):
        return given
    if len(given) != 1:
        raise InputError(f"{len(given)} {what} were given for one IP-Adapter: give one.")
    return given[0]


def _pictures(given: Any) -> list[Image.Image]:
    """One or several pictures (PIL images, arrays of bytes or 0..1). Raises InputError for anything else."""
    made = []
    for each in given if isinstance(given, (list, tuple)) and given else [given]:
        picture = readable(each, "picture for the IP-Adapter")
        if isinstance(picture, np.ndarray):
            if picture.ndim != 3 or picture.shape[2] != 3:
                raise InputError(f"an array of {list(picture.shape)} is no picture: [height, width, 3] is.")
            picture = Image.fromarray((picture.clip(0, 1) * 255).round().astype(np.uint8))
        if not isinstance(picture, Image.Image):
            raise InputError("pictures for the IP-Adapter are PIL images or arrays, or one tensor of all of them.")
        made.append(picture.convert("RGB"))
    return made


def _for_batch(side: np.ndarray, request: Request) -> np.ndarray:
    """One row for all images, or one a prompt -> one an image."""
    if len(side) not in (1, request.count):
        raise InputError(f"{len(side)} rows of embeddings for {request.count} prompts: give one, or one a prompt.")
    return side.repeat(request.batch // len(side), 0)


def layer_scales(scale: Any, layers: Sequence[str]) -> np.ndarray:
    """The scale of each layer, float32, of what `set_ip_adapter_scale` is given. Raises InputError."""
    scale = _only(scale, "scales")
    places = [_place(name) for name in layers]
    if isinstance(scale, Mapping):
        _check_blocks(scale, places)
        scales = [_scale_at(scale, *place) for place in places]
    else:
        scales = [scale] * len(layers)
    if not all(isinstance(each, (int, float)) and np.isfinite(each) for each in scales):
        raise InputError(f"an IP-Adapter's scale is a number such as 0.6, or numbers by blocks, not {scale!r}.")
    return np.array(scales, np.float32)


def _place(layer: str) -> tuple[str, str, int]:
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


def _check_blocks(scale: Mapping[str, Any], places: Sequence[tuple[str, str, int]]) -> None:
    """Raise InputError for parts and blocks that do not attend to pictures, and lists of other lengths."""
    for part, value in scale.items():
        blocks = sorted({block for each, block, _ in places if each == part})
        named = dict(value) if isinstance(value, Mapping) else dict.fromkeys(blocks, value)
        for block, numbers in named.items() if blocks else [(part, 0)]:
            count = len({attention for each, name, attention in places if (each, name) == (part, block)})
            if not count:
                there = ", ".join(sorted({" ".join(place[:2]).strip() for place in places}))
                raise InputError(f"no layer of {part} {block} attends to pictures: those that do are {there}.")
            if isinstance(numbers, (list, tuple)) and len(numbers) not in (1, count):
                raise InputError(
                    f"{len(numbers)} scales for {part} {block}, which attends {count} times: give {count}."
                )
