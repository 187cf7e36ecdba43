"""Text to image with FLUX.2 dev and klein, also with reference images; diffusers' arguments and defaults."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image

from sd_ort.checkpoints import flow_match
from sd_ort.checkpoints.configs import component_config
from sd_ort.checkpoints.prompt_tokenizers import MistralTokenizer, QwenTokenizer
from sd_ort.checkpoints.signatures import tapped_layers
from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import check_component
from sd_ort.pipelines.call_signature import transformer_call
from sd_ort.pipelines.images import preprocess
from sd_ort.pipelines.request import Prompt
from sd_ort.pipelines.transformer_denoising import Denoising
from sd_ort.pipelines.transformer_pipelines import TransformerPipeline, image_ids, prompt_list, repeat_rows, unpack

log = logging.getLogger("sd_ort")

REFERENCE_PIXELS = 1024 * 1024  # larger reference images are scaled down
REFERENCE_DISTANCE = 10  # of reference images on the first axis of positions


class Flux2Pipeline(TransformerPipeline):
    """Text to image with FLUX.2 dev pipeline folders. Make one with `from_pretrained`."""

    CLASS, INDEX_CLASS, ROUNDS_SIZE = "Flux2Transformer2DModel", "Flux2Pipeline", True
    ENCODERS = ("text_encoder",)
    TOKENIZER: type[MistralTokenizer] | type[QwenTokenizer] = MistralTokenizer
    LAYERS = (10, 20, 30)  # of the text encoder, by diffusers' default

    def _open_tokenizers(self) -> None:
        self.tokenizer = self.TOKENIZER(self.folder / "tokenizer")
        self.vae_scale_factor = self.vae.scale_factor // 2
        self.taps = tapped_layers(component_config(self.folder, "text_encoder", required=True))

    @property
    def default_size(self) -> int:
        return 128 * self.vae_scale_factor

    def encode_prompt(self, prompt: Prompt | None, max_sequence_length: int = 512) -> tuple[np.ndarray]:
        """Return the prompt embeddings (B, max_sequence_length, 3 * C), float32."""
        ids, mask = self.tokenizer.encode(prompt_list(prompt), max_sequence_length)
        outputs = self.models["text_encoder"](input_ids=ids, attention_mask=mask)
        return (self._float32(outputs)["hidden_states"],)

    __call__ = transformer_call(
        "image prompt height width {steps} guidance_scale {draw} prompt_embeds {result} attention_kwargs {step_end} "
        "max_sequence_length text_encoder_out_layers caption_upsample_temperature",
        """Generate `num_images_per_prompt` images for each prompt. The arguments are those of diffusers' pipeline.

        `image`: PIL images that the prompt may refer to. `guidance_scale` is an input of the model. Prompts are not
        rewritten: `caption_upsample_temperature` must be None. Given latents are (B, C, height / 16, width / 16).
        Returns a `PipelineOutput`, a tuple without `return_dict`. Raises InputError for arguments that cannot be used.
        """,
        guidance_scale=4.0,
        text_encoder_out_layers=LAYERS,
    )

    def _generate(self, call: SimpleNamespace) -> Any:
        """Generate images. call: the arguments of `__call__`."""
        references = self._references(call)
        height, width, steps = self._check(call, guidance_scale=call.guidance_scale)
        self._check_attention_kwargs(call.attention_kwargs)
        if tuple(call.text_encoder_out_layers) not in (self.LAYERS, self.taps):
            raise InputError(f"text_encoder_out_layers are {self.taps} in {self.folder}: they are part of its graph.")
        length, images = call.max_sequence_length, call.num_images_per_prompt
        (embeddings,) = self._embedded(call.prompt_embeds, lambda: self.encode_prompt(call.prompt, length))
        texts = [embeddings, *self._negative(call, len(embeddings))]
        count, side = len(embeddings) * images, self.vae.scale_factor
        rows, columns, channels = height // side, width // side, self.transformer_config["in_channels"]
        sigmas = self._sigmas(call, steps)
        mu = flow_match.empirical_mu(rows * columns, steps)
        schedule = flow_match.make_schedule(self.scheduler_config, steps, rows * columns, sigmas, mu)
        sample, _ = self._start((count, channels, rows, columns), call, schedule, (height, width))
        reference_tokens, ids = self._encode_references(references, count)
        fixed = {"img_ids": np.concatenate([positions(0, rows, columns), *ids])}
        fixed["txt_ids"] = text_positions(embeddings.shape[1])
        if self.transformer_config.get("guidance_embeds"):
            fixed["guidance"] = np.full(count, call.guidance_scale, np.float32)
        job = Denoising(
            to_tokens(sample), schedule, [{"encoder_hidden_states": repeat_rows(each, images)} for each in texts],
            fixed, timestep_scale=1 / 1000, guidance_scale=call.guidance_scale if len(texts) > 1 else None,
            references=reference_tokens,
        )  # fmt: skip
        tokens = self._denoise(job, call)
        sample = tokens.transpose(0, 2, 1).reshape(count, channels, rows, columns)
        return self._result(self._latents(tokens, sample) if call.output_type == "latent" else sample, call)

    def _negative(self, call: SimpleNamespace, prompts: int) -> list[np.ndarray]:
        """Return the embeddings of the negative prompts of a call for `prompts` prompts; none without guidance."""
        return []

    def _latents(self, tokens: np.ndarray, sample: np.ndarray) -> np.ndarray:
        """Return the result of `output_type="latent"`: diffusers' tokens (B, S, C). sample: (B, C, h, w)."""
        return tokens

    @property
    def size_multiple(self) -> int:
        return self.vae.scale_factor

    # --- Reference images -------------------------------------------------------------------------------------------

    def _references(self, call: SimpleNamespace) -> list[np.ndarray]:
        """Return the pixels (1, 3, H, W) of the reference images; the first one sets the size of the image."""
        if call.image is None:
            return []
        self.models.require("vae_encoder")
        references = []
        for image in call.image if isinstance(call.image, (list, tuple)) else [call.image]:
            if not isinstance(image, Image.Image):
                raise InputError("image must be a PIL image, or a list of these.")
            sides = sorted(image.size)
            if sides[0] < 64 or sides[1] > 8 * sides[0]:
                raise InputError(f"image {image.size} is too small or too long: at least 64 pixels, at most 8 to 1.")
            if image.width * image.height > REFERENCE_PIXELS:
                scale = (REFERENCE_PIXELS / (image.width * image.height)) ** 0.5
                image = image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.LANCZOS)
            width, height = (side // self.vae.scale_factor * self.vae.scale_factor for side in image.size)
            left, top = (image.width - width) // 2, (image.height - height) // 2
            references.append(preprocess(image.crop((left, top, left + width, top + height)), height, width))
            call.height, call.width = call.height or height, call.width or width
        return references

    def _encode_references(
        self, references: Sequence[np.ndarray], count: int
    ) -> tuple[np.ndarray | None, list[np.ndarray]]:
        """Return the tokens (count, R, C) of reference images, None without any, and their positions."""
        if not references:
            return None, []
        encoded = [self.vae.to_latents(pixels, None) for pixels in references]
        ids = [positions(REFERENCE_DISTANCE * (i + 1), *each.shape[2:]) for i, each in enumerate(encoded)]
        return np.repeat(np.concatenate([to_tokens(each) for each in encoded], 1), count, 0), ids


class Flux2KleinPipeline(Flux2Pipeline):
    """Text to image with FLUX.2 klein pipeline folders. Make one with `from_pretrained`."""

    INDEX_CLASS = "Flux2KleinPipeline"
    TOKENIZER = QwenTokenizer
    LAYERS = (9, 18, 27)

    @property
    def is_distilled(self) -> bool:
        """Whether the model was distilled for few steps without guidance."""
        return bool(self.index.get("is_distilled"))

    __call__ = transformer_call(
        "image prompt height width {steps} guidance_scale {draw} {embeds} {result} attention_kwargs {step_end} "
        "max_sequence_length text_encoder_out_layers",
        """Generate `num_images_per_prompt` images for each prompt. The arguments are those of diffusers' pipeline.

        `image`: PIL images that the prompt may refer to. `guidance_scale` above 1 guides with an empty prompt, which
        doubles the time of a step; distilled models ignore it. Given latents are (B, C, height / 16, width / 16).
        Returns a `PipelineOutput`, a tuple without `return_dict`. Raises InputError for arguments that cannot be used.
        """,
        guidance_scale=4.0,
    )

    def _negative(self, call: SimpleNamespace, prompts: int) -> list[np.ndarray]:
        """Return the embeddings of the negative prompts of a call for `prompts` prompts; none without guidance."""
        if call.guidance_scale <= 1:
            return []
        if self.is_distilled:
            log.info("guidance_scale %s is ignored: the model is distilled.", call.guidance_scale)
            return []
        embeds, length = call.negative_prompt_embeds, call.max_sequence_length
        return list(
            self._embedded(embeds, lambda: self.encode_prompt([""] * prompts, length), (), "negative_prompt_embeds")
        )

    def _latents(self, tokens: np.ndarray, sample: np.ndarray) -> np.ndarray:
        """Return the VAE's latents (B, C / 4, 2h, 2w) without normalization, as diffusers' class does."""
        from sd_ort.weights.initializers import read_initializers  # imports onnx

        weights = read_initializers(check_component(self.folder, "vae_decoder"))
        names = ("bn.mean", "bn.deviation")
        if missing := [name for name in names if name not in weights]:
            raise InputError(f"{self.folder} does not have {missing[0]} of its VAE: optimize the pipeline again.")
        mean, deviation = (weights[name].values.astype(np.float32).reshape(1, -1, 1, 1) for name in names)
        return unpack(to_tokens(sample * deviation + mean), *sample.shape[2:])


def to_tokens(latents: np.ndarray) -> np.ndarray:
    """Return latents (B, C, h, w) as tokens (B, h * w, C)."""
    return latents.reshape(*latents.shape[:2], -1).transpose(0, 2, 1)


def positions(image: int, rows: int, columns: int) -> np.ndarray:
    """Return (image, row, column, 0) of each patch (rows * columns, 4), float32."""
    return np.pad(image_ids(rows, columns, image), ((0, 0), (0, 1)))


def text_positions(tokens: int) -> np.ndarray:
    """Return (0, 0, 0, token) of each token (tokens, 4), float32."""
    ids = np.zeros((tokens, 4), np.float32)
    ids[:, 3] = np.arange(tokens)
    return ids
