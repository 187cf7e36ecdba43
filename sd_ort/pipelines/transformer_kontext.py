"""Changes of an image by a prompt with FLUX.1 Kontext, with diffusers' arguments and defaults."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.pipelines.arguments import check_numbers, is_integer
from sd_ort.pipelines.call_signature import transformer_call
from sd_ort.pipelines.images import as_image, is_latents, preprocess, repeat_to_batch, size_of
from sd_ort.pipelines.transformer_flux import FLUX_STEPS, TEXT_TOKENS, FluxPipeline
from sd_ort.pipelines.transformer_pipelines import image_ids, pack

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

    __call__ = transformer_call(
        "image {flux_texts} height width {steps} guidance_scale {draw} {flux_embeds} {result} "
        "joint_attention_kwargs {step_end} max_sequence_length max_area _auto_resize",
        """Generate images of `image`, changed as the prompt says. The arguments are those of diffusers' pipeline.

        Without `image`, the prompt alone is read. Height and width are scaled to `max_area` pixels at their ratio.
        `_auto_resize`: resize the image to a size of the training. Returns a `PipelineOutput`, a tuple without
        `return_dict`. Raises InputError for arguments that cannot be used.
        """,
        num_inference_steps=FLUX_STEPS,
        guidance_scale=3.5,
        max_sequence_length=TEXT_TOKENS,
    )

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
        image, channels = as_image(call.image), self.vae.latent_channels
        if is_latents(image, channels):
            encoded = preprocess(image, 0, 0, latent_channels=channels)
        else:
            self.models.require("vae_encoder")
            multiple = self.size_multiple
            height, width = (side // multiple * multiple for side in size_of(image, channels, self.vae_scale_factor))
            if not height or not width:
                raise InputError(f"image is smaller than {multiple} pixels.")
            if call._auto_resize:
                _, width, height = min((abs(width / height - w / h), w, h) for w, h in TRAINED_SIZES)
            height, width = height // multiple * multiple, width // multiple * multiple
            encoded = self.vae.to_latents(preprocess(image, height, width), None, sample=False)
        encoded = repeat_to_batch(encoded, count, "images")
        return pack(encoded), image_ids(encoded.shape[2] // 2, encoded.shape[3] // 2, 1)
