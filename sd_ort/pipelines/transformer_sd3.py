"""Text to image with Stable Diffusion 3 and 3.5, with diffusers' arguments and defaults."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from sd_ort.checkpoints.flow_match import make_schedule
from sd_ort.core.errors import InputError
from sd_ort.pipelines.arguments import is_finite, is_integer
from sd_ort.pipelines.call_signature import transformer_call
from sd_ort.pipelines.request import Prompt
from sd_ort.pipelines.transformer_denoising import Denoising, SkipLayerGuidance
from sd_ort.pipelines.transformer_pipelines import TransformerPipeline, prompt_list, repeat_rows


class StableDiffusion3Pipeline(TransformerPipeline):
    """Text to image with Stable Diffusion 3 and 3.5 pipeline folders. Make one with `from_pretrained`."""

    CLASS, INDEX_CLASS = "SD3Transformer2DModel", "StableDiffusion3Pipeline"
    ENCODERS = ("text_encoder", "text_encoder_2")
    _callback_tensor_inputs: tuple[str, ...] = ("latents", "prompt_embeds", "pooled_prompt_embeds")

    def encode_prompt(
        self, prompt: Prompt | None, prompt_2: Prompt | None = None, prompt_3: Prompt | None = None,
        max_sequence_length: int = 256, count: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Return the prompt embeddings (B, 77 + max_sequence_length, C) and the pooled ones (B, P), float32.

        prompt_2, prompt_3: for the second CLIP and the T5 encoder, by default `prompt`. count: number of prompts.
        """
        first = prompt_list(prompt, count=count)
        texts = (first, prompt_list(prompt, prompt_2, len(first)), prompt_list(prompt, prompt_3, len(first)))
        clips = [self._clip(name, part) for name, part in zip(self.ENCODERS, texts, strict=False)]
        t5 = self._t5(texts[2], max_sequence_length)
        clip = np.concatenate([outputs["hidden_states"] for outputs in clips], -1)
        if clip.shape[2] > t5.shape[2]:
            raise InputError(f"{self.folder} has CLIP encoders that are wider than the transformer's context.")
        clip = np.pad(clip, ((0, 0), (0, 0), (0, t5.shape[2] - clip.shape[2])))
        return np.concatenate([clip, t5], 1), np.concatenate([outputs["text_embeds"] for outputs in clips], -1)

    __call__ = transformer_call(
        "{prompts} height width {steps} guidance_scale {negatives} {draw} {embeds} {pooled} {adapter} {result} "
        "joint_attention_kwargs {callback} max_sequence_length skip_guidance_layers skip_layer_guidance_scale "
        "skip_layer_guidance_stop skip_layer_guidance_start mu",
        """Generate `num_images_per_prompt` images for each prompt. The arguments are those of diffusers' pipeline.

        A `guidance_scale` of 1 or less disables guidance, also that by `skip_guidance_layers`, for which the
        transformer is open twice. Returns a `PipelineOutput`, a tuple without `return_dict`. Raises InputError for
        arguments that cannot be used.
        """,
        num_inference_steps=28,
        guidance_scale=7.0,
        max_sequence_length=256,
    )

    def _generate(self, call: SimpleNamespace) -> Any:
        """Generate images. call: the arguments of `__call__`."""
        height, width, steps = self._check(call, guidance_scale=call.guidance_scale)
        guided, length = call.guidance_scale > 1, call.max_sequence_length
        embeddings, pooled = self._embedded(
            call.prompt_embeds,
            lambda: self.encode_prompt(call.prompt, call.prompt_2, call.prompt_3, length),
            [call.pooled_prompt_embeds],
        )
        count, images = len(embeddings), call.num_images_per_prompt
        embeddings, pooled = repeat_rows(embeddings, images), repeat_rows(pooled, images)
        tensors, skip = {}, None
        if guided:
            texts = (call.negative_prompt or "", call.negative_prompt_2, call.negative_prompt_3)
            negatives = self._embedded(
                call.negative_prompt_embeds,
                lambda: self.encode_prompt(*texts, length, count),
                [call.negative_pooled_prompt_embeds],
                "negative_prompt_embeds",
            )
            negative, negative_pooled = (repeat_rows(each, images) for each in negatives)
            if negative.shape != embeddings.shape:
                raise InputError(f"negative embeddings of shape {negative.shape} go with {embeddings.shape}.")
            skip = self._skip_layers(call, {"encoder_hidden_states": embeddings, "pooled_projections": pooled})
            tensors = {"negative_prompt_embeds": negative, "negative_pooled_prompt_embeds": negative_pooled}
            embeddings = np.concatenate([negative, embeddings])
            pooled = np.concatenate([negative_pooled, pooled])
        factor = self.vae_scale_factor
        shape = (count * images, self.transformer_config["in_channels"], height // factor, width // factor)
        tokens = shape[2] * shape[3] // self.transformer_config["patch_size"] ** 2
        schedule = make_schedule(self.scheduler_config, steps, tokens, call.sigmas, call.mu)
        schedule = schedule.for_strength(getattr(call, "strength", 1.0))
        sample, blend = self._start(shape, call, schedule, (height, width))
        job = Denoising(
            sample, schedule, [{"encoder_hidden_states": embeddings, "pooled_projections": pooled}],
            guidance_scale=call.guidance_scale if guided else None, one_call=guided, blend=blend, tensors=tensors,
            skip_layers=skip,
        )  # fmt: skip
        return self._result(self._denoise(job, call), call)

    def _skip_layers(self, call: SimpleNamespace, inputs: dict[str, np.ndarray]) -> SkipLayerGuidance | None:
        """Return the skip-layer guidance of a call; None without it. Raises InputError for blocks that are not there.

        inputs: of the transformer, for the prompt.
        """
        blocks = getattr(call, "skip_guidance_layers", None)  # which image to image has not
        if not blocks:
            return None
        count = self.transformer_config["num_layers"]
        if not all(is_integer(block) and 0 <= block < count for block in blocks):
            raise InputError(f"skip_guidance_layers must be numbers of blocks from 0 to {count - 1}, got {blocks}.")
        shares = call.skip_layer_guidance_start, call.skip_layer_guidance_stop
        if not all(is_finite(value) for value in (call.skip_layer_guidance_scale, *shares)):
            raise InputError("skip_layer_guidance_scale, skip_layer_guidance_start and _stop must be numbers.")
        return SkipLayerGuidance(tuple(sorted({*blocks})), call.skip_layer_guidance_scale, *shares, inputs)
