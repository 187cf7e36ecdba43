"""Changes of images by a prompt with Qwen-Image-Edit, with diffusers' arguments and defaults.

The text encoder sees the images beside the prompt, and their latents follow those of the generated image in the
transformer. Tokens of images in the prompt have positions on three axes, as the model was trained: diffusers 0.42.1
with transformers 5 numbers them like text (its issue 14194).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image

from sd_ort.checkpoints.configs import component_config
from sd_ort.checkpoints.signatures import vision_config
from sd_ort.core.errors import InputError
from sd_ort.pipelines.call_signature import transformer_call
from sd_ort.pipelines.images import is_pil, preprocess
from sd_ort.pipelines.qwen_vision import LONGEST_RATIO, VisionProcessor, VisionTokenizer, encode_chats
from sd_ort.pipelines.request import Prompt
from sd_ort.pipelines.transformer_pipelines import TransformerPipeline, pack, prompt_list
from sd_ort.pipelines.transformer_qwen_image import Embeddings, QwenImagePipeline

# The chat that the model was trained with; its first tokens are dropped from the embeddings, as in diffusers.
SYSTEM = (
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain how "
    "the user's text instruction should alter or modify the image. Generate a new image that meets the user's "
    "requirements while maintaining consistency with the original input where appropriate."
)
TEMPLATE = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{{}}<|im_end|>\n<|im_start|>assistant\n"
TEMPLATE_TOKENS = 64
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
MODES = ("RGB", "RGBA", "RGBX", "L", "LA", "P", "PA", "1", "CMYK", "YCbCr", "LAB", "HSV")  # that have 8 bits


class QwenImageEditPipeline(QwenImagePipeline):
    """Changes of an image with Qwen-Image-Edit pipeline folders. Make one with `from_pretrained`."""

    INDEX_CLASS = "QwenImageEditPipeline"
    OTHER_INDEX_CLASSES: tuple[str, ...] = ("QwenImageEditPlusPipeline",)  # whose folders have the same models
    REQUIRED_COMPONENTS = (*TransformerPipeline.REQUIRED_COMPONENTS, "vae_encoder", "vision_encoder")
    IMAGE_LIMIT = 1
    VAE_PIXELS = 1024 * 1024  # of the images that the VAE encodes, and of the generated one
    VISION_PIXELS = 1024 * 1024  # of the images that the vision encoder reads

    def _open_tokenizers(self) -> None:
        # diffusers tokenizes with the processor, whose folder has a tokenizer.json where that of the tokenizer may not.
        folder = self.folder / "processor"
        folder = folder if (folder / "tokenizer.json").is_file() else self.folder / "tokenizer"
        self.tokenizer = VisionTokenizer(folder, TEMPLATE, reads_padding=False)
        vision = vision_config(component_config(self.folder, "vision_encoder", required=True))
        self.processor = VisionProcessor.open(self.folder, vision)

    def encode_prompt(  # type: ignore[override]
        self, prompt: Prompt | None, image: Image.Image | Sequence[Image.Image] | None = None, count: int | None = None
    ) -> Embeddings:
        """Return the embeddings of prompts about images, float32, without the tokens of the template.

        count: of prompts, for a single text. Raises InputError for images that cannot be used.
        """
        return self._embeddings(prompt_list(prompt, count=count), *self._encode_images(self._images(image)))

    def _embeddings(
        self, prompts: Sequence[str], image_embeds: np.ndarray, grids: Sequence[tuple[int, int]]
    ) -> Embeddings:
        """Return `encode_prompt` of the outputs of `_encode_images`."""
        images = self._images_in_chat(len(grids))
        inputs = encode_chats(self.tokenizer, [self.tokenizer.chat.replace("{}", images + each) for each in prompts],
                              grids)  # fmt: skip
        dtype = self.models["text_encoder"].dtype("image_embeds")
        outputs = self.models["text_encoder"](**inputs, image_embeds=image_embeds.astype(dtype))
        mask = inputs["attention_mask"][:, TEMPLATE_TOKENS:] == 1
        return Embeddings(self._float32(outputs)["hidden_states"][:, TEMPLATE_TOKENS:], mask)

    def _images_in_chat(self, count: int) -> str:
        """Return the chat's text before the prompt."""
        return IMAGE

    def _encode_images(self, images: Sequence[Image.Image]) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Return the tokens (I, C) of images in prompts, and rows and columns of each image."""
        tokens, grids = [], []
        for image in images:
            width, height = size_of_area(self.VISION_PIXELS, image)
            image = image.resize((width, height), Image.Resampling.LANCZOS)
            inputs, places, grid = self.processor.inputs(image)
            inputs["pixel_values"] = inputs["pixel_values"].astype(self.models["vision_encoder"].dtype("pixel_values"))
            tokens.append(self.models["vision_encoder"](**inputs)["image_embeds"][places])
            grids.append(grid)
        return np.concatenate(tokens), grids

    __call__ = transformer_call(
        "image prompt negative_prompt true_cfg_scale height width {steps} guidance_scale {draw} {masked_embeds} "
        "{result} attention_kwargs {step_end} max_sequence_length",
        """Generate images of `image`, a PIL image, changed as the prompt says. The arguments are those of diffusers.

        Height and width are by default those of a million pixels at the image's ratio. `true_cfg_scale` above 1 guides
        if there is a `negative_prompt`, also " ", which doubles the time of a step. The model ignores `guidance_scale`;
        prompts are not cut to `max_sequence_length`. Latents, given or returned, are packed (B, S, C). Returns a
        `PipelineOutput`, a tuple without `return_dict`. Raises InputError for arguments that cannot be used.
        """,
        true_cfg_scale=4.0,
    )

    def _generate(self, call: SimpleNamespace) -> Any:
        """Generate images. call: the arguments of `__call__`."""
        call.images = self._images(call.image)
        call.image_tokens = None
        width, height = size_of_area(self.VAE_PIXELS, call.images[-1])
        call.height, call.width = call.height or height, call.width or width
        return super()._generate(call)

    def _images(self, image: Any) -> list[Image.Image]:
        """Return one image or a list of them as RGB. Raises InputError for anything else, and for shapes of no use."""
        images = list(image) if isinstance(image, (list, tuple)) else [image]
        if not images or not all(map(is_pil, images)):
            kinds = "a PIL image, or a list of them" if self.IMAGE_LIMIT > 1 else "a PIL image"
            raise InputError(f"{type(self).__name__} changes images: give image, {kinds}.")
        if len(images) > self.IMAGE_LIMIT:
            advice = " or QwenImageEditPlusPipeline" if self.IMAGE_LIMIT == 1 else ""
            raise InputError(f"{len(images)} images were given: give at most {self.IMAGE_LIMIT}{advice}.")
        for each in images:
            if each.mode not in MODES:
                raise InputError(f"an image has the mode {each.mode}: convert it to RGB.")
            if not min(each.size) or max(each.size) > LONGEST_RATIO * min(each.size):
                raise InputError(f"image {each.width} x {each.height} is too long: at most {LONGEST_RATIO} to 1.")
        return [each.convert("RGB") for each in images]

    def _encode(self, call: SimpleNamespace, prompt: Prompt | None, count: int | None) -> Embeddings:
        prompts = prompt_list(prompt, count=count)
        call.image_tokens = self._encode_images(call.images) if call.image_tokens is None else call.image_tokens
        return self._embeddings(prompts, *call.image_tokens)

    def _checked_embeddings(
        self, states: np.ndarray, mask: np.ndarray | None, prefix: str, count: int | None, length: int
    ) -> Embeddings:
        longest = states.shape[1] if states.ndim > 1 else length  # which diffusers' class does not cut
        return super()._checked_embeddings(states, mask, prefix, count, longest)

    def _references(self, call: SimpleNamespace, count: int) -> tuple[np.ndarray | None, tuple[tuple[int, int], ...]]:
        tokens, sizes, side = [], [], 2 * self.vae_scale_factor
        for image in call.images:
            width, height = size_of_area(self.VAE_PIXELS, image)
            tokens.append(pack(self.vae.to_latents(preprocess(image, height, width), None, sample=False)))
            sizes.append((height // side, width // side))
        return np.repeat(np.concatenate(tokens, 1), count, 0), tuple(sizes)


class QwenImageEditPlusPipeline(QwenImageEditPipeline):
    """Changes of several images with Qwen-Image-Edit pipeline folders, of 2509 and later."""

    INDEX_CLASS = "QwenImageEditPlusPipeline"
    OTHER_INDEX_CLASSES = ("QwenImageEditPipeline",)
    IMAGE_LIMIT = 16
    VISION_PIXELS = 384 * 384

    def _images_in_chat(self, count: int) -> str:
        return "".join(f"Picture {number + 1}: {IMAGE}" for number in range(count))


def size_of_area(pixels: int, image: Image.Image) -> tuple[int, int]:
    """Return width and height of about so many pixels at an image's ratio, multiples of 32."""
    ratio = image.width / image.height
    width = math.sqrt(pixels * ratio)
    return round(width / 32) * 32, round(width / ratio / 32) * 32
