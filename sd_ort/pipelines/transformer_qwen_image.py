"""Text to image with Qwen-Image, with diffusers' arguments and defaults.

Tokens that a prompt's mask leaves out are dropped instead of masked: prompts with the same tokens left are one call of
the transformer, so that none needs a mask of the attention.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.checkpoints import flow_match
from sd_ort.checkpoints.prompt_tokenizers import QwenTokenizer
from sd_ort.core.errors import InputError
from sd_ort.pipelines.call_signature import transformer_call
from sd_ort.pipelines.images import as_array
from sd_ort.pipelines.request import Prompt
from sd_ort.pipelines.transformer_denoising import Denoising
from sd_ort.pipelines.transformer_pipelines import (
    TransformerPipeline,
    image_ids,
    prompt_list,
    repeat_rows,
    unpack,
)
from sd_ort.pipelines.transformer_steps import GroupedSteps, StepGroup

if TYPE_CHECKING:
    from sd_ort.runtime.session import OrtModel

log = logging.getLogger("sd_ort")

# The chat that the model was trained with; its first tokens are dropped from the embeddings, as in diffusers.
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
TEMPLATE_TOKENS = 34
LONGEST_PROMPT = 1024  # tokens


@dataclass(frozen=True)
class Embeddings:
    """Hidden states (B, T, C) of prompts, and which of the tokens are theirs (B, T), bool."""

    states: np.ndarray
    mask: np.ndarray

    def repeated(self, images: int) -> Embeddings:
        return replace(self, states=repeat_rows(self.states, images), mask=repeat_rows(self.mask, images))

    def groups(self, *sizes: tuple[int, int]) -> list[StepGroup]:
        """Return the transformer's calls. sizes: rows and columns of patches of the image and of its references."""
        numbers: dict[bytes, list[int]] = {}
        ids = [self.position_ids(np.flatnonzero(row), sizes) for row in self.mask]
        for number, (text_ids, _) in enumerate(ids):
            numbers.setdefault(text_ids.tobytes(), []).append(number)
        groups = []
        for group in numbers.values():
            states = np.stack([self.states[number][self.mask[number]] for number in group])
            text_ids, image_ids = ids[group[0]]
            groups.append((group, {"encoder_hidden_states": states, "txt_ids": text_ids, "img_ids": image_ids}))
        return groups

    @staticmethod
    def position_ids(tokens: np.ndarray, sizes: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of prompt tokens (indices in the embeddings) and of the patches of all images."""
        text = (max(side // 2 for size in sizes for side in size) + tokens).astype(np.float32)
        images = [positions(*size, image) for image, size in enumerate(sizes)]
        return np.repeat(text[:, None], 3, 1), np.concatenate(images)


@dataclass
class QwenDenoising(Denoising):
    """The latents in patches (B, S, C) of one call, and its prompts.

    Attributes:
        sizes: Rows and columns of patches, of the image and of its references.
        embeddings: Of the prompts, then with guidance of the negative prompts.
    """

    sizes: tuple[tuple[int, int], ...] = ()
    embeddings: tuple[Embeddings, ...] = ()

    def steps(self, models: Mapping[str, OrtModel]) -> Any:
        """Return a function of a step and patches, which returns its prediction, then that of the negative prompts."""
        timesteps = self.schedule.timesteps / np.float32(1000)
        calls = [GroupedSteps(models, each.groups(*self.sizes), timesteps) for each in self.embeddings]
        return lambda i, hidden_states: [call(i, hidden_states) for call in calls]

    def guided(self, predictions: list[np.ndarray]) -> np.ndarray:
        """Return the prediction of a step; with guidance, each patch has the norm of the prompt's prediction."""
        predictions = self.of_sample(predictions)
        if len(predictions) == 1:
            return predictions[0]
        positive, negative = predictions
        assert self.guidance_scale is not None
        combined = negative + np.float32(self.guidance_scale) * (positive - negative)
        norms = [np.sqrt(np.square(each).sum(-1, keepdims=True)) for each in (positive, combined)]
        return combined * (norms[0] / norms[1])

    def callback_tensors(self) -> dict[str, Any]:
        return {"latents": self.sample, "prompt_embeds": self.embeddings[0].states}

    def replace(self, changed: Mapping[str, Any]) -> bool:
        if "latents" in changed:
            self.sample = as_array(changed["latents"])
        if "prompt_embeds" not in changed:
            return False
        states = as_array(changed["prompt_embeds"])
        self.embeddings = (replace(self.embeddings[0], states=states), *self.embeddings[1:])
        return True


class QwenImagePipeline(TransformerPipeline):
    """Text to image with Qwen-Image pipeline folders. Make one with `from_pretrained`."""

    CLASS, INDEX_CLASS, ROUNDS_SIZE = "QwenImageTransformer2DModel", "QwenImagePipeline", True
    ENCODERS = ("text_encoder",)
    LONGEST_TEXT = LONGEST_PROMPT
    DENOISING = QwenDenoising

    def _open_tokenizers(self) -> None:
        self.tokenizer = QwenTokenizer(self.folder / "tokenizer", TEMPLATE, reads_padding=False)

    @property
    def default_size(self) -> int:
        return 128 * self.vae_scale_factor

    def encode_prompt(
        self, prompt: Prompt | None, max_sequence_length: int = 1024, count: int | None = None
    ) -> Embeddings:
        """Return the embeddings of prompts, float32, without the tokens of the template.

        count: of prompts, for a single text. The end of longer prompts is cut.
        """
        ids, mask = self.tokenizer.encode(prompt_list(prompt, count=count), LONGEST_PROMPT + TEMPLATE_TOKENS)
        # Tokens attend to earlier ones alone, so the padding behind the longest prompt changes nothing.
        length = int(mask.sum(1).max())
        outputs = self.models["text_encoder"](input_ids=ids[:, :length], attention_mask=mask[:, :length])
        prompt_tokens = slice(TEMPLATE_TOKENS, min(length, TEMPLATE_TOKENS + max_sequence_length))
        return Embeddings(self._float32(outputs)["hidden_states"][:, prompt_tokens], mask[:, prompt_tokens] == 1)

    __call__ = transformer_call(
        "prompt negative_prompt true_cfg_scale height width {steps} guidance_scale {draw} {masked_embeds} "
        "{result} attention_kwargs {step_end} max_sequence_length",
        """Generate `num_images_per_prompt` images for each prompt. The arguments are those of diffusers' pipeline.

        `true_cfg_scale` above 1 guides if there is a `negative_prompt`, also " ", which doubles the time of a step.
        The model ignores `guidance_scale`. Several images of prompts with different lengths keep the masks of their
        prompts, which diffusers 0.42.1 mixes up. Latents, given or returned, are packed (B, S, C). Returns a
        `PipelineOutput`, a tuple without `return_dict`. Raises InputError for arguments that cannot be used.
        """,
        true_cfg_scale=4.0,
    )

    def _generate(self, call: SimpleNamespace) -> Any:
        """Generate images. call: the arguments of `__call__`."""
        height, width, steps = self._check(call, **self._scales(call))
        self._check_attention_kwargs(call.attention_kwargs)
        images = call.num_images_per_prompt
        embeddings = [self._prompts(call, "", None).repeated(images)]
        count = len(embeddings[0].states)
        if (scale := self._guidance(call)) is not None:
            embeddings.append(self._prompts(call, "negative_", count // images).repeated(images))
        side = 2 * self.vae_scale_factor
        rows, columns = height // side, width // side
        schedule = self._schedule(call, steps, rows * columns).for_strength(getattr(call, "strength", 1.0))
        sample, blend = self._start_packed((count, rows, columns), call, schedule, (height, width))
        references, reference_sizes = self._references(call, count)
        job = self.DENOISING(
            sample, schedule, [], guidance_scale=scale, blend=blend, references=references,
            sizes=((rows, columns), *reference_sizes), embeddings=tuple(embeddings),
        )  # fmt: skip
        sample = self._denoise(job, call)
        return self._result(sample if call.output_type == "latent" else unpack(sample, rows, columns), call)

    def _scales(self, call: SimpleNamespace) -> dict[str, float | None]:
        return {"true_cfg_scale": call.true_cfg_scale, "guidance_scale": call.guidance_scale}

    def _guidance(self, call: SimpleNamespace) -> float | None:
        """Return the scale of guidance, None without guidance."""
        has_negative = call.negative_prompt is not None or call.negative_prompt_embeds is not None
        if call.true_cfg_scale > 1 and has_negative:
            return float(call.true_cfg_scale)
        if call.true_cfg_scale > 1 or has_negative:
            reason = "its scale is not above 1" if has_negative else 'there is no negative_prompt, which may be " "'
            log.info("true_cfg_scale %s does not guide: %s.", call.true_cfg_scale, reason)
        return None

    def _schedule(self, call: SimpleNamespace, steps: int, tokens: int) -> flow_match.FlowMatchSchedule:
        return flow_match.make_schedule(self.scheduler_config, steps, tokens, self._sigmas(call, steps))

    def _prompts(self, call: SimpleNamespace, prefix: str, count: int | None) -> Embeddings:
        """Return the prompt embeddings of a call and their mask, for `count` prompts.

        prefix: "" for the prompts, "negative_" for the negative prompts.
        Raises InputError for embeddings and masks that do not fit.
        """
        prompt, embeds = getattr(call, f"{prefix}prompt"), getattr(call, f"{prefix}prompt_embeds")
        if embeds is None:
            return self._encode(call, prompt, count)
        if prompt is not None:
            raise InputError(f"{prefix}prompt and {prefix}prompt_embeds were both given: give one of them.")
        states, mask = as_array(embeds), getattr(call, f"{prefix}prompt_embeds_mask")
        bool_mask = None if mask is None else as_array(mask) != 0
        embeddings = self._checked_embeddings(states, bool_mask, prefix, count, call.max_sequence_length)
        if (bool_mask is not None and bool_mask.shape != states.shape[:2]) or not embeddings.mask.any(1).all():
            raise InputError(f"{prefix}prompt_embeds_mask must be {states.shape[:2]}, with a token in each row.")
        return embeddings

    def _encode(self, call: SimpleNamespace, prompt: Prompt | None, count: int | None) -> Embeddings:
        """Return the embeddings of prompts or negative prompts of a call."""
        return self.encode_prompt(prompt, call.max_sequence_length, count)

    def _references(self, call: SimpleNamespace, count: int) -> tuple[np.ndarray | None, tuple[tuple[int, int], ...]]:
        """Return the tokens (count, R, C) of images that the prompt is about, and their rows and columns of patches.

        Pipelines that edit images override it.
        """
        return None, ()

    def _checked_embeddings(
        self, states: np.ndarray, mask: np.ndarray | None, prefix: str, count: int | None, length: int
    ) -> Embeddings:
        """Return embeddings of the caller and their mask, cut to `length` tokens.

        Raises InputError for other shapes.
        """
        width = self.transformer_config["joint_attention_dim"]
        if states.ndim != 3 or states.shape[2] != width or count not in (None, len(states)):
            raise InputError(f"{prefix}prompt_embeds of shape {states.shape} are no ({count or 'B'}, T, {width}).")
        bool_mask = np.ones(states.shape[:2], bool) if mask is None else mask
        return Embeddings(states[:, :length], bool_mask[:, :length])


def positions(rows: int, columns: int, image: int = 0) -> np.ndarray:
    """Return (image, row, column) of each patch (rows * columns, 3), float32; the middle of the image is at 0."""
    middle = (0, rows - rows // 2, columns - columns // 2)
    return image_ids(rows, columns, image) - np.array(middle, np.float32)
