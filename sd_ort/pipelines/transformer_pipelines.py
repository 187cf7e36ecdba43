"""Text to image with diffusion transformers: Stable Diffusion 3 and FLUX.1, with diffusers' arguments and defaults.

Latents, guidance and scheduler are NumPy arrays on the host; each component is one ONNX Runtime session. The same seed
gives the image of diffusers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sd_ort.checkpoints import flow_match
from sd_ort.checkpoints.conditioning import text_length, token_ids
from sd_ort.checkpoints.configs import component_config, scheduler_config
from sd_ort.checkpoints.diffusion_transformers import FAMILIES
from sd_ort.checkpoints.t5_tokenizer import T5Tokenizer
from sd_ort.checkpoints.tokenizer import ClipTokenizer
from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import read_index
from sd_ort.core.progress import announce, print_line, step_bar
from sd_ort.model_cache import open_model
from sd_ort.pipelines.arguments import check_numbers, check_text
from sd_ort.pipelines.diffusers_compat import loading_options
from sd_ort.pipelines.images import as_array, finished
from sd_ort.pipelines.noise import draw_noise, sources
from sd_ort.pipelines.output import PipelineOutput
from sd_ort.pipelines.request import OUTPUT_TYPES, Generator, Prompt
from sd_ort.pipelines.sampling_job import check_finite
from sd_ort.pipelines.vae import Vae
from sd_ort.runtime.components import Components
from sd_ort.runtime.provider_choice import AUTO

LONGEST_TEXT = 512  # T5 tokens, as in diffusers
STEP_LIMIT = 5000  # denoising steps
# Options of StableDiffusionPipeline.from_pretrained that change nothing here at these values.
UNUSED_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "scheduler": (None,), "device_loop": (None, False), "graph": (None, False), "controlnet": (None, (), []),
    "split_guidance": (None,), "unet_on": (None,), "decode_on": (None,), "safety_checker": (None, True, False),
}  # fmt: skip


class TransformerPipeline:
    """Components, text encoding and sampling loop of the pipelines of this module."""

    CLASS = ""  # the model class of the transformer
    INDEX_CLASS = ""  # the pipeline class of the folder
    ENCODERS: tuple[str, ...] = ()  # text encoders that the pipeline cannot do without
    REQUIRED_COMPONENTS: tuple[str, ...] = ("transformer", "vae_decoder")

    def __init__(
        self, folder: Path, models: Components, *, vae_tiling: bool = False, vae_slicing: bool = False
    ) -> None:
        """The options as in `from_pretrained`."""
        self.folder, self.models = folder, models
        self.index = read_index(folder)
        self.transformer_config = component_config(folder, "transformer", required=True)
        self.family = FAMILIES[self.CLASS]
        self.vae = Vae(
            models, component_config(folder, "vae_decoder", required=True), tiling=vae_tiling, slicing=vae_slicing
        )
        self.vae_scale_factor = self.vae.scale_factor
        self.scheduler_config = scheduler_config(folder)
        flow_match.check_config(self.scheduler_config)
        self.encoders = [name for name in ("text_encoder", "text_encoder_2", "text_encoder_3") if self._has(name)]
        self.t5 = next((name for name in self.encoders if self.index[name][1] == "T5EncoderModel"), None)
        tokenizers = {name: folder / name.replace("text_encoder", "tokenizer") for name in self.encoders}
        self.clip_tokenizers = {name: ClipTokenizer(path) for name, path in tokenizers.items() if name != self.t5}
        self.t5_tokenizer = T5Tokenizer(tokenizers[self.t5]) if self.t5 else None

    def _has(self, component: str) -> bool:
        return bool((self.index.get(component) or [None])[0])

    @classmethod
    def from_pretrained(
        cls,
        model: Path | str,
        provider: str = AUTO,
        *,
        low_memory: bool = False,
        vae_tiling: bool = False,
        vae_slicing: bool = False,
        config: str | None = None,
        **options: Any,
    ) -> Any:
        """Load a pipeline folder or a checkpoint on a provider, as `StableDiffusionPipeline.from_pretrained` does.

        Raises InputError for a folder of another pipeline, an incomplete one, and an option that is not supported.
        """
        for name, values in UNUSED_OPTIONS.items():
            if options.get(name) not in values:
                raise InputError(f"{cls.__name__} does not support {name}: leave it out.")
            options.pop(name, None)
        dtype = options.get("torch_dtype") or options.get("dtype")
        folder, choice = open_model(model, provider, dtype=dtype, config=config, on_progress=print_line)
        if choice.reason:
            announce(choice.line)
        index = read_index(folder)
        if index.get("_class_name") != cls.INDEX_CLASS:
            raise InputError(f"{folder} holds a {index.get('_class_name')}, not a {cls.__name__}.")
        session_options = loading_options(options, folder)
        models = Components(folder, choice.provider, session_options, low_memory=low_memory, graph=False)
        names = [*dict.fromkeys((*cls.ENCODERS, *(n for n in models if n.startswith("text_encoder"))))]
        needed = [*names, *cls.REQUIRED_COMPONENTS]
        models.require(*needed)
        pipeline = cls(folder, models, vae_tiling=vae_tiling, vae_slicing=vae_slicing)
        if not low_memory:
            models.open(needed)
        return pipeline

    @property
    def scheduler_name(self) -> str:
        return flow_match.CLASS

    @property
    def default_size(self) -> int:
        """Height and width in pixels if none are given, as in diffusers."""
        return int(self.transformer_config.get("sample_size") or 128) * self.vae_scale_factor

    def load_lora_weights(self, *_: Any, **__: Any) -> None:
        """Raises InputError: LoRAs of diffusion transformers are not supported."""
        raise InputError(f"{type(self).__name__} does not support LoRAs.")

    def load_textual_inversion(self, *_: Any, **__: Any) -> None:
        """Raises InputError: textual inversion is not supported."""
        raise InputError(f"{type(self).__name__} does not support textual inversion.")

    def set_ip_adapter_scale(self, *_: Any) -> None:
        """Raises InputError: IP-Adapters of diffusion transformers are not supported."""
        raise InputError(f"{type(self).__name__} does not support IP-Adapters.")

    def draw_each(self, calls: Iterable[Mapping[str, Any]]) -> Iterator[PipelineOutput]:
        """Yield the output of each call; each has arguments of `__call__`."""
        call: Any = self
        for arguments in calls:
            yield call(**{**arguments, "return_dict": True})

    # --- Steps ------------------------------------------------------------------------------------------------------

    def _check(
        self, height: int | None, width: int | None, steps: int | None, images: int, output_type: str,
        text_limit: int, unsupported: Mapping[str, Any], **scales: float | None,
    ) -> tuple[int, int, int]:  # fmt: skip
        """Return height, width and steps with defaults. Raises InputError for arguments that cannot be used."""
        if name := next((name for name, value in unsupported.items() if value is not None), None):
            raise InputError(f"{type(self).__name__} does not support the argument {name}.")
        check_numbers(height, width, images, **scales)
        height, width = height or self.default_size, width or self.default_size
        multiple = 2 * self.vae_scale_factor
        if height % multiple or width % multiple:
            raise InputError(f"height {height} and width {width} must be multiples of {multiple}.")
        patches = self.family.max_patches(self.transformer_config)
        if patches is not None and max(height, width) > patches * multiple:
            raise InputError(f"{height} x {width} is too large for this model: at most {patches * multiple} a side.")
        steps = self.family.steps if steps is None else steps
        if not 1 <= steps <= STEP_LIMIT:
            raise InputError(f"{steps} steps are not between 1 and {STEP_LIMIT}.")
        if not 1 <= text_limit <= LONGEST_TEXT:
            raise InputError(f"max_sequence_length must be between 1 and {LONGEST_TEXT}, got {text_limit}.")
        if output_type not in OUTPUT_TYPES:
            raise InputError(f"output_type {output_type!r} is unknown: use one of {', '.join(OUTPUT_TYPES)}.")
        return height, width, steps

    def _clip(self, name: str, prompts: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the outputs of a CLIP text encoder."""
        tokenizer = self.clip_tokenizers[name]
        ids = token_ids(tokenizer, prompts, text_length(self.folder, name, tokenizer))
        return self._float32(self.models[name](input_ids=ids))

    def _t5(self, prompts: Sequence[str], length: int) -> np.ndarray:
        """Return the hidden states (B, length, C) of the T5 text encoder; zeros if the pipeline has none."""
        if self.t5 is None or self.t5_tokenizer is None:
            return np.zeros((len(prompts), length, self.transformer_config["joint_attention_dim"]), np.float32)
        ids = self.t5_tokenizer.token_ids(prompts, length)
        return self._float32(self.models[self.t5](input_ids=ids))["last_hidden_state"]

    @staticmethod
    def _float32(outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: array.astype(np.float32) for name, array in outputs.items()}

    def _noise(self, shape: tuple[int, ...], generator: Generator, count: int) -> np.ndarray:
        if isinstance(generator, Sequence) and len(generator) != count:
            raise InputError(f"{len(generator)} generators were given for {count} images.")
        return draw_noise(shape, sources(generator))

    def _start(
        self, shape: tuple[int, ...], generator: Generator, latents: Any, schedule: flow_match.FlowMatchSchedule,
        size: tuple[int, int], **images: Any,
    ) -> tuple[np.ndarray, flow_match.InpaintBlend | None]:  # fmt: skip
        """Return the latents (B, C, h, w) before the first step, and what inpainting needs after each. size: in pixels.

        images: none here; those of the pipelines that start from an image.
        """
        sample = self._noise(shape, generator, shape[0]) if latents is None else as_array(latents)
        if sample.shape != shape:
            raise InputError(f"latents of shape {sample.shape} were given where {shape} are needed.")
        return sample, None

    def _predict(self, **inputs: Any) -> np.ndarray:
        prediction = self.models["transformer"](**inputs)["out_hidden_states"].astype(np.float32)
        check_finite(prediction, "transformer")
        return prediction

    def _output(self, latents: np.ndarray, output_type: str, return_dict: bool) -> Any:
        """Return what the caller asked for. latents: (B, C, h, w)."""
        pixels = self.vae.to_pixels(latents)
        check_finite(pixels, "vae_decoder")
        images = finished(pixels, output_type)
        return PipelineOutput(images) if return_dict else (images,)


def _latents_as_output(latents: np.ndarray, return_dict: bool) -> Any:
    import torch

    tensor = torch.from_numpy(latents)
    return PipelineOutput(tensor) if return_dict else (tensor,)


def named(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a method from its `locals()`."""
    return {name: value for name, value in arguments.items() if name not in ("self", "__class__")}


def prompt_list(prompt: Prompt, other: Prompt | None = None, count: int | None = None) -> list[str]:
    """Return prompts as a list; `other` replaces `prompt` if it is not empty. `count`: of prompts, for a single text.

    Raises InputError for a value that is no text, and for another number of prompts.
    """
    value = other or prompt
    texts = [value] * (count or 1) if isinstance(value, str) else list(value)
    check_text(texts)
    if not texts or (count is not None and len(texts) != count):
        raise InputError(f"{len(texts)} prompts were given where {count or 'at least one'} are needed.")
    return texts


class StableDiffusion3Pipeline(TransformerPipeline):
    """Text to image with Stable Diffusion 3 and 3.5 pipeline folders. Make one with `from_pretrained`."""

    CLASS, INDEX_CLASS = "SD3Transformer2DModel", "StableDiffusion3Pipeline"
    ENCODERS = ("text_encoder", "text_encoder_2")

    def encode_prompt(
        self, prompt: Prompt, prompt_2: Prompt | None = None, prompt_3: Prompt | None = None,
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

    def __call__(
        self,
        prompt: Prompt,
        prompt_2: Prompt | None = None,
        prompt_3: Prompt | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int | None = None,
        sigmas: Sequence[float] | None = None,
        guidance_scale: float = 7.0,
        negative_prompt: Prompt | None = None,
        negative_prompt_2: Prompt | None = None,
        negative_prompt_3: Prompt | None = None,
        num_images_per_prompt: int = 1,
        generator: Generator = None,
        latents: Any = None,
        output_type: str = "pil",
        return_dict: bool = True,
        max_sequence_length: int = 256,
        mu: float | None = None,
        progress: bool = False,
        **unsupported: Any,
    ) -> Any:
        """Generate `num_images_per_prompt` images for each prompt. The arguments are those of diffusers' pipeline.

        A `guidance_scale` of 1 or less disables guidance. Returns a `PipelineOutput`, a tuple without `return_dict`.
        Raises InputError for arguments that cannot be used.
        """
        return self._generate(**named(locals()))

    def _generate(
        self, prompt: Prompt, prompt_2: Prompt | None, prompt_3: Prompt | None, height: int | None, width: int | None,
        num_inference_steps: int | None, sigmas: Sequence[float] | None, guidance_scale: float,
        negative_prompt: Prompt | None, negative_prompt_2: Prompt | None, negative_prompt_3: Prompt | None,
        num_images_per_prompt: int, generator: Generator, latents: Any, output_type: str, return_dict: bool,
        max_sequence_length: int, mu: float | None, progress: bool, unsupported: Mapping[str, Any],
        strength: float = 1.0, **images: Any,
    ) -> Any:  # fmt: skip
        """The arguments as in `__call__` and, of a pipeline that starts from an image, its images and `strength`."""
        height, width, steps = self._check(
            height, width, num_inference_steps, num_images_per_prompt, output_type, max_sequence_length, unsupported,
            guidance_scale=guidance_scale,
        )  # fmt: skip
        guided = guidance_scale > 1
        embeddings, pooled = self.encode_prompt(prompt, prompt_2, prompt_3, max_sequence_length)
        prompts = len(embeddings)
        if guided:
            negatives = (negative_prompt or "", negative_prompt_2, negative_prompt_3)
            negative, negative_pooled = self.encode_prompt(*negatives, max_sequence_length, prompts)
            embeddings = np.stack([negative, embeddings])
            pooled = np.stack([negative_pooled, pooled])
        else:
            embeddings, pooled = embeddings[None], pooled[None]
        # (halves, B, ...) -> negative rows first, each prompt repeated
        embeddings, pooled = (
            np.repeat(array, num_images_per_prompt, 1).reshape(-1, *array.shape[2:]) for array in (embeddings, pooled)
        )
        count, factor = prompts * num_images_per_prompt, self.vae_scale_factor
        shape = (count, self.transformer_config["in_channels"], height // factor, width // factor)
        tokens = shape[2] * shape[3] // self.transformer_config["patch_size"] ** 2
        schedule = flow_match.make_schedule(self.scheduler_config, steps, tokens, sigmas, mu).last_part(strength)
        sample, blend = self._start(shape, generator, latents, schedule, (height, width), strength=strength, **images)
        with step_bar(range(len(schedule.timesteps)), progress) as bar:
            for i in bar:
                prediction = self._predict(
                    hidden_states=np.concatenate([sample, sample]) if guided else sample,
                    encoder_hidden_states=embeddings,
                    pooled_projections=pooled,
                    timestep=schedule.timesteps[i : i + 1],
                )
                if guided:
                    negative, positive = np.split(prediction, 2)
                    prediction = negative + np.float32(guidance_scale) * (positive - negative)
                sample = schedule.step(i, prediction, sample)
                sample = sample if blend is None else blend.apply(schedule, i, sample)
        if output_type == "latent":
            return _latents_as_output(sample, return_dict)
        return self._output(sample, output_type, return_dict)


class FluxPipeline(TransformerPipeline):
    """Text to image with FLUX.1 pipeline folders. Make one with `from_pretrained`."""

    CLASS, INDEX_CLASS = "FluxTransformer2DModel", "FluxPipeline"
    ENCODERS = ("text_encoder", "text_encoder_2")
    TAKES_UNPACKED_LATENTS = False  # (B, C, h, w), as diffusers does for inpainting

    def encode_prompt(
        self, prompt: Prompt, prompt_2: Prompt | None = None, max_sequence_length: int = 512, count: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the T5 embeddings (B, max_sequence_length, C) and CLIP's pooled ones (B, P), float32.

        prompt_2: for the T5 encoder, by default `prompt`. count: number of prompts.
        """
        first = prompt_list(prompt, count=count)
        second = prompt_list(prompt, prompt_2, len(first))
        return self._t5(second, max_sequence_length), self._clip("text_encoder", first)["pooler_output"]

    def __call__(
        self,
        prompt: Prompt,
        prompt_2: Prompt | None = None,
        negative_prompt: Prompt | None = None,
        negative_prompt_2: Prompt | None = None,
        true_cfg_scale: float = 1.0,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int | None = None,
        sigmas: Sequence[float] | None = None,
        guidance_scale: float = 3.5,
        num_images_per_prompt: int = 1,
        generator: Generator = None,
        latents: Any = None,
        output_type: str = "pil",
        return_dict: bool = True,
        max_sequence_length: int = 512,
        progress: bool = False,
        **unsupported: Any,
    ) -> Any:
        """Generate `num_images_per_prompt` images for each prompt. The arguments are those of diffusers' pipeline.

        `guidance_scale` is an input of the dev model; schnell ignores it. `negative_prompt` has an effect only with a
        `true_cfg_scale` above 1, which doubles the time of a step. Latents, given or returned, are packed (B, S, C).
        Returns a `PipelineOutput`, a tuple without `return_dict`. Raises InputError for arguments that cannot be used.
        """
        return self._generate(**named(locals()))

    def _generate(
        self, prompt: Prompt, prompt_2: Prompt | None, negative_prompt: Prompt | None,
        negative_prompt_2: Prompt | None, true_cfg_scale: float, height: int | None, width: int | None,
        num_inference_steps: int | None, sigmas: Sequence[float] | None, guidance_scale: float,
        num_images_per_prompt: int, generator: Generator, latents: Any, output_type: str, return_dict: bool,
        max_sequence_length: int, progress: bool, unsupported: Mapping[str, Any], strength: float = 1.0, **images: Any,
    ) -> Any:  # fmt: skip
        """The arguments as in `__call__` and, of a pipeline that starts from an image, its images and `strength`."""
        height, width, steps = self._check(
            height, width, num_inference_steps, num_images_per_prompt, output_type, max_sequence_length, unsupported,
            guidance_scale=guidance_scale, true_cfg_scale=true_cfg_scale,
        )  # fmt: skip
        texts = [self.encode_prompt(prompt, prompt_2, max_sequence_length)]
        prompts = len(texts[0][0])
        if true_cfg_scale > 1 and negative_prompt is not None:
            texts.append(self.encode_prompt(negative_prompt, negative_prompt_2, max_sequence_length, prompts))
        texts = [
            (np.repeat(t5, num_images_per_prompt, 0), np.repeat(clip, num_images_per_prompt, 0)) for t5, clip in texts
        ]
        count, side = prompts * num_images_per_prompt, 2 * self.vae_scale_factor
        rows, columns, channels = height // side, width // side, self.transformer_config["in_channels"]
        if sigmas is None:
            sigmas = list(np.linspace(1.0, 1 / steps, steps))
        schedule = flow_match.make_schedule(self.scheduler_config, steps, rows * columns, sigmas).last_part(strength)
        shape = (count, channels // 4, 2 * rows, 2 * columns)
        if latents is None or self.TAKES_UNPACKED_LATENTS:
            sample, blend = self._start(
                shape, generator, latents, schedule, (height, width), strength=strength, **images
            )
            sample, blend = pack(sample), None if blend is None else blend.packed(pack)
        else:
            sample, blend = as_array(latents), None
            if sample.shape != (count, rows * columns, channels):
                needed = (count, rows * columns, channels)
                raise InputError(f"latents of shape {sample.shape} were given where {needed} are needed.")
        fixed = {"img_ids": image_ids(rows, columns), "txt_ids": np.zeros((max_sequence_length, 3), np.float32)}
        if self.transformer_config.get("guidance_embeds"):
            fixed["guidance"] = np.full(count, guidance_scale, np.float32)
        with step_bar(range(len(schedule.timesteps)), progress) as bar:
            for i in bar:
                timestep = schedule.timesteps[i : i + 1] / np.float32(1000)
                predictions = [
                    self._predict(
                        hidden_states=sample,
                        encoder_hidden_states=t5,
                        pooled_projections=clip,
                        timestep=timestep,
                        **fixed,
                    )
                    for t5, clip in texts
                ]
                prediction = predictions[0]
                if len(predictions) == 2:
                    prediction = predictions[1] + np.float32(true_cfg_scale) * (predictions[0] - predictions[1])
                sample = schedule.step(i, prediction, sample)
                sample = sample if blend is None else blend.apply(schedule, i, sample)
        if output_type == "latent":
            return _latents_as_output(sample, return_dict)
        return self._output(unpack(sample, rows, columns), output_type, return_dict)


def pack(latents: np.ndarray) -> np.ndarray:
    """Return latents (B, C, 2h, 2w) as patches of 2x2 (B, h * w, 4C)."""
    batch, channels, height, width = latents.shape
    patches = latents.reshape(batch, channels, height // 2, 2, width // 2, 2).transpose(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, height * width // 4, 4 * channels)


def unpack(patches: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Return the inverse of `pack`: latents (B, C, 2 * rows, 2 * columns)."""
    batch, _, channels = patches.shape
    latents = patches.reshape(batch, rows, columns, channels // 4, 2, 2).transpose(0, 3, 1, 4, 2, 5)
    return latents.reshape(batch, channels // 4, 2 * rows, 2 * columns)


def image_ids(rows: int, columns: int) -> np.ndarray:
    """Return (0, row, column) of each patch (rows * columns, 3), float32."""
    grid = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), -1).reshape(-1, 2)
    return np.pad(grid, ((0, 0), (1, 0))).astype(np.float32)
