"""Text to image with FLUX.1, with diffusers' arguments and defaults."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from sd_ort.checkpoints.flow_match import make_schedule
from sd_ort.pipelines.arguments import DefaultInt
from sd_ort.pipelines.call_signature import transformer_call
from sd_ort.pipelines.request import Prompt
from sd_ort.pipelines.transformer_denoising import Denoising
from sd_ort.pipelines.transformer_pipelines import (
    LONGEST_TEXT,
    TransformerPipeline,
    image_ids,
    prompt_list,
    repeat_rows,
    unpack,
)

FLUX_STEPS = DefaultInt(28)
TEXT_TOKENS = DefaultInt(LONGEST_TEXT)


class FluxPipeline(TransformerPipeline):
    """Text to image with FLUX.1 pipeline folders. Make one with `from_pretrained`."""

    CLASS, INDEX_CLASS, ROUNDS_SIZE = "FluxTransformer2DModel", "FluxPipeline", True
    ENCODERS = ("text_encoder", "text_encoder_2")

    def encode_prompt(
        self, prompt: Prompt | None, prompt_2: Prompt | None = None, max_sequence_length: int = 512,
        count: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Return the T5 embeddings (B, max_sequence_length, C) and CLIP's pooled ones (B, P), float32.

        prompt_2: for the T5 encoder, by default `prompt`. count: number of prompts.
        """
        first = prompt_list(prompt, count=count)
        second = prompt_list(prompt, prompt_2, len(first))
        return self._t5(second, max_sequence_length), self._clip("text_encoder", first)["pooler_output"]

    __call__ = transformer_call(
        "{flux_texts} height width {steps} guidance_scale {draw} {flux_embeds} {result} joint_attention_kwargs "
        "{step_end} max_sequence_length",
        """Generate `num_images_per_prompt` images for each prompt. The arguments are those of diffusers' pipeline.

        `guidance_scale` is an input of the dev model; schnell ignores it. `negative_prompt` has an effect only with a
        `true_cfg_scale` above 1, which doubles the time of a step. Latents, given or returned, are packed (B, S, C).
        Returns a `PipelineOutput`, a tuple without `return_dict`. Raises InputError for arguments that cannot be used.
        """,
        num_inference_steps=FLUX_STEPS,
        guidance_scale=3.5,
        max_sequence_length=TEXT_TOKENS,
    )

    def _generate(self, call: SimpleNamespace) -> Any:
        """Generate images. call: the arguments of `__call__`."""
        scales = {"guidance_scale": call.guidance_scale, "true_cfg_scale": call.true_cfg_scale}
        height, width, steps = self._check(call, **scales)
        length, images = call.max_sequence_length, call.num_images_per_prompt
        texts = [
            self._embedded(
                call.prompt_embeds,
                lambda: self.encode_prompt(call.prompt, call.prompt_2, length),
                [call.pooled_prompt_embeds],
            )
        ]
        count = len(texts[0][0])
        has_negative = call.negative_prompt is not None or call.negative_prompt_embeds is not None
        if guided := call.true_cfg_scale > 1 and has_negative:
            texts.append(
                self._embedded(
                    call.negative_prompt_embeds,
                    lambda: self.encode_prompt(call.negative_prompt, call.negative_prompt_2, length, count),
                    [call.negative_pooled_prompt_embeds],
                    "negative_prompt_embeds",
                )
            )
        prompts = [
            {"encoder_hidden_states": repeat_rows(t5, images), "pooled_projections": repeat_rows(clip, images)}
            for t5, clip in texts
        ]
        count, side = count * images, 2 * self.vae_scale_factor
        rows, columns = height // side, width // side
        schedule = make_schedule(self.scheduler_config, steps, rows * columns, self._sigmas(call, steps))
        schedule = schedule.for_strength(getattr(call, "strength", 1.0))
        sample, blend = self._start_packed((count, rows, columns), call, schedule, (height, width))
        tokens = prompts[0]["encoder_hidden_states"].shape[1]
        references, reference_ids = self._references(call, count)
        ids = image_ids(rows, columns)
        ids = ids if reference_ids is None else np.concatenate([ids, reference_ids])
        fixed = {"img_ids": ids, "txt_ids": np.zeros((tokens, 3), np.float32)}
        if self.transformer_config.get("guidance_embeds"):
            fixed["guidance"] = np.full(count, call.guidance_scale, np.float32)
        job = Denoising(
            sample, schedule, prompts, fixed, timestep_scale=1 / 1000,
            guidance_scale=call.true_cfg_scale if guided else None, blend=blend, references=references,
        )  # fmt: skip
        sample = self._denoise(job, call)
        return self._result(sample if call.output_type == "latent" else unpack(sample, rows, columns), call)

    def _references(self, call: SimpleNamespace, count: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return the tokens (count, R, C) of an image that the prompt is about, and their positions; None without one.

        FLUX.1 Kontext overrides it.
        """
        return None, None
