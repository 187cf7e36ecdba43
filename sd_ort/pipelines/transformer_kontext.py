"""Changes of an image by a prompt with FLUX.1 Kontext, with diffusers' arguments and defaults."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.pipelines.arguments import check_numbers, is_integer
from sd_ort.pipelines.images import is_latents, preprocess, readable, size_of
from sd_ort.pipelines.request import Generator, Picture, Prompt, StepCallback
from sd_ort.pipelines.transformer_pipelines import (
    FLUX_STEPS,
    TEXT_TOKENS,
    FluxPipeline,
    arguments,
    image_ids,
    pack,
)

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("sd_ort")

# Widths and heights that the model was trained with; an image is resized to the one of the nearest ratio.
TRAINED_SIZES = (
    (672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184), (944, 1104),
    (1024, 1024), (1104, 944), (1184, 880), (1248, 832), (1328, 800), (1392, 752), (1456, 720), (1504, 688),
    (1568, 672),
)  # fmt: skip


class FluxKontextPipeline(FluxPipeline):
    """Image and text to image with FLUX.1 Kontext pipeline folders. Make one with `from_pretrained`."""

    INDEX_CLASS = "FluxKontextPipeline"
    OTHER_INDEX_CLASSES = ("FluxPipeline",)  # whose folders have the same models

    def __call__(  # type: ignore[override]
        self, image: Picture | None = None, prompt: Prompt | None = None, prompt_2: Prompt | None = None,
        negative_prompt: Prompt | None = None, negative_prompt_2: Prompt | None = None, true_cfg_scale: float = 1.0,
        height: int | None = None, width: int | None = None, num_inference_steps: int = FLUX_STEPS,
        sigmas: Sequence[float] | None = None, guidance_scale: float = 3.5, num_images_per_prompt: int | None = 1,
        generator: Generator = None, latents: Tensor | None = None, prompt_embeds: Tensor | None = None,
        pooled_prompt_embeds: Tensor | None = None, ip_adapter_image: Picture | None = None,
        ip_adapter_image_embeds: Sequence[Tensor] | None = None, negative_ip_adapter_image: Picture | None = None,
        negative_ip_adapter_image_embeds: Sequence[Tensor] | None = None,
        negative_prompt_embeds: Tensor | None = None, negative_pooled_prompt_embeds: Tensor | None = None,
        output_type: str | None = "pil", return_dict: bool = True,
        joint_attention_kwargs: Mapping[str, Any] | None = None, callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), max_sequence_length: int = TEXT_TOKENS,
        max_area: int = 1024**2, _auto_resize: bool = True, progress: bool = False, **unsupported: Any,
    ) -> Any:  # fmt: skip
        """Generate images of `image`, changed as the prompt says. The arguments are those of diffusers' pipeline.

        Without `image`, the prompt alone is read. Height and width are scaled to `max_area` pixels at their ratio.
        `_auto_resize`: resize the image to a size of the training. Returns a `PipelineOutput`, a tuple without
        `return_dict`. Raises InputError for arguments that cannot be used.
        """
        return self._generate(arguments(locals()))

    def _generate(self, call: SimpleNamespace) -> Any:
        """Generate images. call: the arguments of `__call__`."""
        check_numbers(call.height, call.width, 1)
        if not is_integer(call.max_area) or not 256 <= call.max_area <= 1 << 28:
            raise InputError(f"max_area must be a number of pixels from 256 on, got {str(call.max_area)[:80]!r}.")
        height, width = call.height or self.default_size, call.width or self.default_size
        ratio, multiple = width / height, self.size_multiple
        sides = round((call.max_area / ratio) ** 0.5), round((call.max_area * ratio) ** 0.5)
        call.height, call.width = (max(side // multiple, 1) * multiple for side in sides)
        if (call.height, call.width) != (height, width):
            log.warning("generating %s x %s, for max_area %s.", call.height, call.width, call.max_area)
        return super()._generate(call)

    def _references(self, call: SimpleNamespace, count: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        if call.image is None:
            return None, None
        picture, channels = readable(call.image), self.vae.latent_channels
        if is_latents(picture, channels):
            encoded = preprocess(picture, 0, 0, latent_channels=channels)
        else:
            self.models.require("vae_encoder")
            multiple = self.size_multiple
            height, width = (side // multiple * multiple for side in size_of(picture, channels, self.vae_scale_factor))
            if not height or not width:
                raise InputError(f"image is smaller than {multiple} pixels.")
            if call._auto_resize:
                _, width, height = min((abs(width / height - w / h), w, h) for w, h in TRAINED_SIZES)
            height, width = height // multiple * multiple, width // multiple * multiple
            encoded = self.vae.to_latents(preprocess(picture, height, width), None, sample=False)
        if count % len(encoded):
            raise InputError(f"{len(encoded)} images were given for {count} images: give one, or one an image.")
        encoded = np.concatenate([encoded] * (count // len(encoded)))
        ids = image_ids(encoded.shape[2] // 2, encoded.shape[3] // 2)
        ids[:, 0] = 1
        return pack(encoded), ids
