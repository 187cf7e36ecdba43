"""Text to image with Z-Image, with diffusers' arguments and defaults.

Prompts of a batch keep their own lengths. The transformer reads image and prompt padded to multiples of 32 tokens, and
attends to this padding. Prompts of one padded length are one call of it, so that none needs a mask of the attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.checkpoints import flow_match
from sd_ort.checkpoints.diffusion_transformers import TOKEN_MULTIPLE
from sd_ort.checkpoints.prompt_tokenizers import THINKING_CHAT, QwenTokenizer
from sd_ort.core.errors import InputError
from sd_ort.pipelines.arguments import is_finite
from sd_ort.pipelines.call_signature import transformer_call
from sd_ort.pipelines.images import as_array
from sd_ort.pipelines.request import Prompt
from sd_ort.pipelines.transformer_denoising import Denoising
from sd_ort.pipelines.transformer_pipelines import TransformerPipeline, image_ids, prompt_list
from sd_ort.pipelines.transformer_steps import GroupedSteps, StepGroup

if TYPE_CHECKING:
    from sd_ort.runtime.session import OrtModel

Embeddings = list[np.ndarray]  # of each image, (tokens, C)


@dataclass
class ZImageDenoising(Denoising):
    """The latents (B, C, h, w) of one call, and the embeddings of its prompts.

    Attributes:
        positive, negative: Embeddings of each image; negative ones are read with guidance.
        guided_steps: Whether each step has guidance (T,).
        normalization: Largest norm of a guided prediction, in norms of the prediction of the prompt; 0 without limit.
    """

    positive: Embeddings = field(default_factory=list)
    negative: Embeddings = field(default_factory=list)
    guided_steps: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    normalization: float = 0.0

    def steps(self, models: Mapping[str, OrtModel]) -> Any:
        """Return a function of a step and patches, which returns its prediction, then that of the negative prompts."""
        timesteps = (1000 - self.schedule.timesteps) / np.float32(1000)
        size = self.sample.shape[2] // 2, self.sample.shape[3] // 2
        sets = [self.positive, *([self.negative] if self.guided_steps.any() else [])]
        calls = [GroupedSteps(models, token_groups(embeddings, *size), timesteps) for embeddings in sets]

        def predict(i: int, hidden_states: np.ndarray) -> list[np.ndarray]:
            return [call(i, hidden_states) for call in calls[: 2 if self.guided_steps[i] else 1]]

        return predict

    def hidden_states(self) -> np.ndarray:
        return pad_tokens(patches(self.sample))

    def guided(self, predictions: list[np.ndarray]) -> np.ndarray:
        """Return the prediction of a step (B, C, h, w), whose sign is that of diffusers' scheduler."""
        positive, *negatives = (latents_of(each, self.sample.shape) for each in predictions)
        combined = positive
        if negatives:
            (negative,) = negatives
            assert self.guidance_scale is not None
            combined = positive + np.float32(self.guidance_scale) * (positive - negative)
            if self.normalization > 0:
                limits, norms = _norms(positive) * np.float32(self.normalization), _norms(combined)
                combined = np.where(norms > limits, combined * (limits / norms), combined)
        return -combined

    def callback_tensors(self) -> dict[str, Any]:
        return {"latents": self.sample, "prompt_embeds": self.positive}

    def replace(self, changed: Mapping[str, Any]) -> bool:
        if "latents" in changed:
            self.sample = as_array(changed["latents"])
        names = [name for name in ("prompt_embeds", "negative_prompt_embeds") if name in changed]
        if "prompt_embeds" in names:
            self.positive = [as_array(each) for each in changed["prompt_embeds"]]
        if "negative_prompt_embeds" in names:
            self.negative = [as_array(each) for each in changed["negative_prompt_embeds"]]
        return bool(names)


class ZImagePipeline(TransformerPipeline):
    """Text to image with Z-Image pipeline folders. Make one with `from_pretrained`."""

    CLASS, INDEX_CLASS = "ZImageTransformer2DModel", "ZImagePipeline"
    ENCODERS = ("text_encoder",)

    def _open_tokenizers(self) -> None:
        self.tokenizer = QwenTokenizer(self.folder / "tokenizer", THINKING_CHAT, reads_padding=False)

    @property
    def default_size(self) -> int:
        return 1024

    def encode_prompt(self, prompt: Prompt | None, max_sequence_length: int = 512) -> Embeddings:
        """Return the embeddings (tokens, C) of each prompt, float32. Longer chats than max_sequence_length are cut."""
        ids, mask = self.tokenizer.encode(prompt_list(prompt), max_sequence_length)
        # Tokens attend to earlier ones alone, so the padding behind the longest prompt changes nothing.
        length = min(_rounded(int(mask.sum(1).max())), max_sequence_length)
        outputs = self.models["text_encoder"](input_ids=ids[:, :length], attention_mask=mask[:, :length])
        states = self._float32(outputs)["hidden_states"]
        return [row[: int(count)] for row, count in zip(states, mask.sum(1), strict=True)]

    __call__ = transformer_call(
        "prompt height width {steps} guidance_scale cfg_normalization cfg_truncation negative_prompt {draw} "
        "{embeds} {result} joint_attention_kwargs {step_end} max_sequence_length",
        """Generate `num_images_per_prompt` images for each prompt. The arguments are those of diffusers' pipeline.

        `guidance_scale` is 0 without guidance, as for Z-Image-Turbo; any scale above 0 doubles the time of a step.
        `cfg_normalization`: largest norm of a guided prediction, in norms of the prediction of the prompt.
        `cfg_truncation`: share of the denoising after which guidance ends. Embeddings are one (tokens, C) a prompt.
        Returns a `PipelineOutput`, a tuple without `return_dict`. Raises InputError for arguments that cannot be used.
        """,
        guidance_scale=5.0,
    )

    def _generate(self, call: SimpleNamespace) -> Any:
        """Generate images. call: the arguments of `__call__`."""
        height, width, steps = self._check(call, guidance_scale=call.guidance_scale)
        for name in ("cfg_normalization", "cfg_truncation"):
            value = getattr(call, name)
            if value is not None and not isinstance(value, bool) and not is_finite(value):
                raise InputError(f"{name} must be a number, got {str(value)[:80]!r}.")
        length, images = call.max_sequence_length, call.num_images_per_prompt
        positive = self._checked(call.prompt_embeds, "prompt_embeds")
        positive = self.encode_prompt(call.prompt, length) if positive is None else positive
        prompts, negative = len(positive), list[np.ndarray]()
        if call.guidance_scale > 0:
            negative = self._negative(call, prompts)
        positive, negative = ([each for each in texts for _ in range(images)] for texts in (positive, negative))
        factor, channels = self.vae_scale_factor, self.transformer_config["in_channels"]
        shape = (prompts * images, channels, height // factor, width // factor)
        tokens = shape[2] * shape[3] // 4
        sigmas = self._sigmas(call, steps)
        schedule = flow_match.make_schedule(self.scheduler_config, steps, tokens, sigmas)
        sample, _ = self._start(shape, call, schedule, (height, width))
        guided = np.full(len(schedule.timesteps), call.guidance_scale > 0)
        if call.cfg_truncation is not None and call.cfg_truncation <= 1:
            guided &= (1000 - schedule.timesteps) / np.float32(1000) <= call.cfg_truncation
        job = ZImageDenoising(
            sample, schedule, [], guidance_scale=call.guidance_scale, positive=positive, negative=negative,
            guided_steps=guided, normalization=float(call.cfg_normalization or 0),
        )  # fmt: skip
        return self._result(self._denoise(job, call), call)

    def _negative(self, call: SimpleNamespace, prompts: int) -> Embeddings:
        """Return the embeddings of the negative prompts. Raises InputError if they do not fit the prompts."""
        negative = self._checked(call.negative_prompt_embeds, "negative_prompt_embeds")
        if negative is None:
            if call.prompt is None:
                raise InputError("negative_prompt_embeds goes with prompt_embeds: give both, or guidance_scale 0.")
            texts = prompt_list(call.negative_prompt or "", count=prompts)
            negative = self.encode_prompt(texts, call.max_sequence_length)
        if len(negative) != prompts:
            raise InputError(f"{len(negative)} negative_prompt_embeds were given for {prompts} prompts.")
        return negative

    def _checked(self, embeds: Sequence[Any] | None, name: str) -> Embeddings | None:
        """Return given embeddings as arrays, None without any. Raises InputError for other shapes."""
        if embeds is None:
            return None
        width, arrays = self.transformer_config["cap_feat_dim"], [as_array(each) for each in embeds]
        if not arrays or any(each.ndim != 2 or not len(each) or each.shape[1] != width for each in arrays):
            raise InputError(f"{name} must be a list with an array (tokens, {width}) for each prompt.")
        return arrays


def token_groups(embeddings: Embeddings, rows: int, columns: int) -> list[StepGroup]:
    """Return (images, inputs of the transformer for them) for each padded length of the embeddings (tokens, C).

    rows, columns: of patches.
    """
    groups: dict[int, list[int]] = {}
    for number, each in enumerate(embeddings):
        groups.setdefault(_rounded(len(each)), []).append(number)
    result = []
    for length, numbers in groups.items():
        states = np.zeros((len(numbers), length, embeddings[0].shape[1]), np.float32)
        mask = np.zeros(states.shape[:2], np.float32)
        for row, filled, number in zip(states, mask, numbers, strict=True):
            row[: len(embeddings[number])] = embeddings[number]
            filled[: len(embeddings[number])] = 1
        text_ids = np.zeros((length, 3), np.float32)
        text_ids[:, 0] = np.arange(1, length + 1)
        inputs = {"encoder_hidden_states": states, "encoder_hidden_states_mask": mask, "txt_ids": text_ids}
        result.append((numbers, inputs | {"img_ids": positions(length + 1, rows, columns)}))
    return result


def positions(first: int, rows: int, columns: int) -> np.ndarray:
    """Return (first, row, column) of each patch, then zeros for padding (S, 3), float32."""
    return pad_tokens(image_ids(rows, columns, first)[None])[0]


def patches(latents: np.ndarray) -> np.ndarray:
    """Return latents (B, C, 2h, 2w) as patches of 2x2 (B, h * w, 4C), channels last."""
    batch, channels, height, width = latents.shape
    split = latents.reshape(batch, channels, height // 2, 2, width // 2, 2).transpose(0, 2, 4, 3, 5, 1)
    return split.reshape(batch, height * width // 4, 4 * channels)


def latents_of(tokens: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Return the inverse of `patches`, without padding: latents of `shape` (B, C, 2h, 2w)."""
    batch, channels, height, width = shape
    joined = tokens[:, : height * width // 4].reshape(batch, height // 2, width // 2, 2, 2, channels)
    return joined.transpose(0, 5, 1, 3, 2, 4).reshape(shape)


def pad_tokens(tokens: np.ndarray) -> np.ndarray:
    """Return tokens (B, S, C) with zeros behind them, up to a multiple of `TOKEN_MULTIPLE`."""
    return np.pad(tokens, ((0, 0), (0, _rounded(tokens.shape[1]) - tokens.shape[1]), (0, 0)))


def _rounded(tokens: int) -> int:
    return -(-tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE


def _norms(prediction: np.ndarray) -> np.ndarray:
    """Return the norm of each image's prediction (B, 1, 1, 1)."""
    return np.sqrt(np.square(prediction).sum((1, 2, 3), keepdims=True))
