"""Text to image with Krea 2, with diffusers' arguments and defaults.

diffusers pads prompts in the middle of their chat and masks the padding. Text has no positions, and the text encoder
counts tokens alone, so chats without padding have the same embeddings: prompts of one length are one call of the
transformer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from sd_ort.checkpoints import flow_match
from sd_ort.checkpoints.prompt_tokenizers import QwenTokenizer
from sd_ort.core.errors import InputError
from sd_ort.pipelines.call_signature import transformer_call
from sd_ort.pipelines.request import Prompt
from sd_ort.pipelines.transformer_pipelines import image_ids, prompt_list
from sd_ort.pipelines.transformer_qwen_image import (
    TEMPLATE,
    TEMPLATE_TOKENS,
    Embeddings,
    QwenDenoising,
    QwenImagePipeline,
)

log = logging.getLogger("sd_ort")

PREFIX, SUFFIX = TEMPLATE.split("{}")
SUFFIX_TOKENS = 5
LONGEST_PROMPT = 4096  # tokens
DISTILLED_MU = 1.15  # shift of the schedule of distilled models, at any size


@dataclass(frozen=True)
class Krea2Embeddings(Embeddings):
    """Hidden states (B, T, layers, C) of prompts, and which of the tokens are theirs (B, T), bool."""

    @staticmethod
    def position_ids(tokens: np.ndarray, sizes: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((len(tokens), 3), np.float32), image_ids(*sizes[0])


@dataclass
class Krea2Denoising(QwenDenoising):
    """The latents in patches (B, S, C) of one call, and its prompts."""

    def guided(self, predictions: list[np.ndarray]) -> np.ndarray:
        if len(predictions) == 1:
            return predictions[0]
        positive, negative = predictions
        assert self.guidance_scale is not None
        return positive + np.float32(self.guidance_scale) * (positive - negative)


class Krea2Pipeline(QwenImagePipeline):
    """Text to image with Krea 2 pipeline folders. Make one with `from_pretrained`."""

    CLASS, INDEX_CLASS, ROUNDS_UP = "Krea2Transformer2DModel", "Krea2Pipeline", True
    LONGEST_TEXT = LONGEST_PROMPT
    DENOISING = Krea2Denoising

    def _open_tokenizers(self) -> None:
        self.tokenizer = QwenTokenizer(self.folder / "tokenizer", PREFIX + "{}", reads_padding=False)

    def encode_prompt(
        self, prompt: Prompt | None, max_sequence_length: int = 512, count: int | None = None
    ) -> Krea2Embeddings:
        """Return the embeddings of prompts, float32, without the tokens before them.

        count: of prompts, for a single text. Prompts and the end of their chat have at most `max_sequence_length`
        tokens: the end of longer prompts is cut.
        """
        suffix = self.tokenizer.tokens(SUFFIX)
        length = max(max_sequence_length + TEMPLATE_TOKENS - SUFFIX_TOKENS, 1)
        ids, mask = self.tokenizer.encode(prompt_list(prompt, count=count), length)
        ids, mask = (np.pad(each, ((0, 0), (0, len(suffix)))) for each in (ids, mask))
        for row, filled in zip(ids, mask, strict=True):
            end = slice(int(filled.sum()), int(filled.sum()) + len(suffix))
            row[end], filled[end] = suffix, 1
        longest = int(mask.sum(1).max())
        outputs = self.models["text_encoder"](input_ids=ids[:, :longest], attention_mask=mask[:, :longest])
        states = self._float32(outputs)["hidden_states"][:, TEMPLATE_TOKENS:]
        return Krea2Embeddings(states, mask[:, TEMPLATE_TOKENS:longest] == 1)

    __call__ = transformer_call(
        "prompt negative_prompt height width {steps} guidance_scale {draw} {masked_embeds} {result} {step_end} "
        "attention_kwargs max_sequence_length",
        """Generate `num_images_per_prompt` images for each prompt. The arguments are those of diffusers' pipeline.

        `guidance_scale` above 0 guides, away from `negative_prompt` or an empty one, which doubles the time of a step;
        distilled models are for 8 steps and a scale of 0. Latents, given or returned, are packed (B, S, C). Returns a
        `PipelineOutput`, a tuple without `return_dict`. Raises InputError for arguments that cannot be used.
        """,
        height=1024,
        width=1024,
        num_inference_steps=28,
        guidance_scale=4.5,
    )

    def _scales(self, call: SimpleNamespace) -> dict[str, float | None]:
        return {"guidance_scale": call.guidance_scale}

    def _guidance(self, call: SimpleNamespace) -> float | None:
        if call.guidance_scale <= 0:
            return None
        if call.negative_prompt is None and call.negative_prompt_embeds is None:
            call.negative_prompt = ""
        return float(call.guidance_scale)

    def _schedule(self, call: SimpleNamespace, steps: int, tokens: int) -> flow_match.FlowMatchSchedule:
        mu = DISTILLED_MU if self.index.get("is_distilled") else None
        if mu is None:
            mu = flow_match.linear_mu({"max_image_seq_len": 6400, **self.scheduler_config}, tokens)
        return flow_match.make_schedule(self.scheduler_config, steps, tokens, self._sigmas(call, steps), mu)

    def _checked_embeddings(
        self, states: np.ndarray, mask: np.ndarray | None, prefix: str, count: int | None, length: int
    ) -> Krea2Embeddings:
        config = self.transformer_config
        widths = config["num_text_layers"], config["text_hidden_dim"]
        if states.ndim != 4 or states.shape[2:] != widths or count not in (None, len(states)):
            raise InputError(f"{prefix}prompt_embeds of shape {states.shape} are no ({count or 'B'}, T, {widths}).")
        if mask is None:
            raise InputError(f"{prefix}prompt_embeds goes with {prefix}prompt_embeds_mask: give both.")
        return Krea2Embeddings(states, mask)
