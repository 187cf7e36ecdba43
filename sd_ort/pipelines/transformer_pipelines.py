"""Base of the pipelines of diffusion transformers: loading, checks of arguments, text encoders and sampling loop.

Latents, guidance and scheduler are NumPy arrays on the host; each component is one ONNX Runtime session. The same seed
gives the image of diffusers.
"""

from __future__ import annotations

import logging
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from sd_ort import demo
from sd_ort.checkpoints import flow_match
from sd_ort.checkpoints.conditioning import text_length, token_ids
from sd_ort.checkpoints.configs import as_scheduler_config, component_config, scheduler_config
from sd_ort.checkpoints.diffusion_transformers import FAMILIES, encoder_mismatch
from sd_ort.checkpoints.generation_defaults import demo_defaults
from sd_ort.checkpoints.prompt_tokenizers import T5Tokenizer
from sd_ort.checkpoints.tokenizer import ClipTokenizer
from sd_ort.core.errors import InputError, report_missing_package
from sd_ort.core.pipeline_folder import HOISTED, read_index
from sd_ort.core.progress import step_bar
from sd_ort.pipelines.arguments import DefaultInt, check_numbers, check_text, is_finite
from sd_ort.pipelines.cached_transformer import COMPONENT
from sd_ort.pipelines.common_methods import REJECTED_METHODS, PipelineMethods
from sd_ort.pipelines.diffusers_compat import loading_options
from sd_ort.pipelines.images import as_array, as_tensor, latents_of_shape, to_output_type
from sd_ort.pipelines.load_options import open_announced
from sd_ort.pipelines.lora_methods import LoraMixin
from sd_ort.pipelines.noise import draw_noise, noise_generators
from sd_ort.pipelines.output import PipelineOutput
from sd_ort.pipelines.request import OUTPUT_TYPES, Generator, Prompt
from sd_ort.pipelines.sampling_job import check_finite
from sd_ort.pipelines.transformer_cache import TransformerCacheMixin
from sd_ort.pipelines.transformer_denoising import Denoising
from sd_ort.pipelines.vae import Vae
from sd_ort.runtime.components import Components
from sd_ort.runtime.provider_choice import AUTO

log = logging.getLogger("sd_ort")

LONGEST_TEXT = 512  # T5 tokens, as in diffusers
STEP_LIMIT = 5000  # denoising steps
# Options of StableDiffusionPipeline.from_pretrained that change nothing here at these values.
UNUSED_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "device_loop": (None, False), "split_guidance": (None,),
    "split_image": (None,), "unet_on": (None,), "decode_on": (None,), "safety_checker": (None, True, False),
}  # fmt: skip
_NO_ADAPTER = "IP-Adapters of diffusion transformers are not supported: use diffusers"
# Arguments that are rejected unless they are None, with the reason.
UNSUPPORTED_ARGUMENTS: Mapping[str, str] = {
    "ip_adapter_image": _NO_ADAPTER, "ip_adapter_image_embeds": _NO_ADAPTER, "negative_ip_adapter_image": _NO_ADAPTER,
    "negative_ip_adapter_image_embeds": _NO_ADAPTER,
    "clip_skip": "the CLIP encoders of this folder return one hidden state: use diffusers",
    "control_image": "ControlNets of diffusion transformers are not supported: use diffusers",
    "masked_image_latents": "give mask_image, from which they are computed",
    "caption_upsample_temperature": "rewrite the prompt by another model first",
    "padding_mask_crop": "crop image and mask_image instead",
    "prompt_syntax": "weights of words (--weights) are for CLIP's embeddings alone",
}  # fmt: skip


class TransformerPipeline(TransformerCacheMixin, LoraMixin, PipelineMethods):
    """Components, text encoding and sampling loop of the pipelines of diffusion transformers."""

    CLASS = ""  # the model class of the transformer
    INDEX_CLASS = ""  # the pipeline class of the folder
    OTHER_INDEX_CLASSES: tuple[str, ...] = ()  # further classes, whose folders have the same models
    ROUNDS_SIZE = False  # down to a multiple, as diffusers' class does, which for others rejects the size
    ROUNDS_UP = False  # with ROUNDS_SIZE: up to a multiple
    LONGEST_TEXT = LONGEST_TEXT  # largest max_sequence_length
    TAKES_UNPACKED_LATENTS = False  # (B, C, h, w), as diffusers does for inpainting
    ENCODERS: tuple[str, ...] = ()  # text encoders that the pipeline cannot do without
    REQUIRED_COMPONENTS: tuple[str, ...] = ("transformer", "vae_decoder")
    _callback_tensor_inputs: tuple[str, ...] = ("latents", "prompt_embeds")
    LORA_COMPONENTS = ("transformer", "text_encoder", "text_encoder_2")
    DENOISER = ("transformer", "hidden_states")
    REJECTED_METHODS = REJECTED_METHODS | {"load_ip_adapter": _NO_ADAPTER, "unload_ip_adapter": _NO_ADAPTER}
    _scheduler: Any  # diffusers' object, or its config

    def __init__(
        self,
        folder: Path,
        models: Components,
        scheduler: Any = None,
        *,
        vae_tiling: bool = False,
        vae_slicing: bool = False,
    ) -> None:
        """The options as in `from_pretrained`."""
        self.folder, self.models = folder, models
        self.index = read_index(folder)
        self.transformer_config = component_config(folder, "transformer", required=True)
        self.unet_config = self.transformer_config  # of the denoiser, for LoRAs
        self.family = FAMILIES[self.CLASS]
        self.vae = Vae(
            models, component_config(folder, "vae_decoder", required=True), tiling=vae_tiling, slicing=vae_slicing
        )
        self.vae_scale_factor = self.vae.scale_factor
        self.scheduler = scheduler
        self._open_tokenizers()

    def _open_tokenizers(self) -> None:
        names = ("text_encoder", "text_encoder_2", "text_encoder_3")
        self.encoders = [name for name in names if (self.index.get(name) or [None])[0]]
        self.t5 = next((name for name in self.encoders if self.index[name][1] == "T5EncoderModel"), None)
        tokenizers = {name: self.folder / name.replace("text_encoder", "tokenizer") for name in self.encoders}
        self.clip_tokenizers = {name: ClipTokenizer(path) for name, path in tokenizers.items() if name != self.t5}
        self.t5_tokenizer = T5Tokenizer(tokenizers[self.t5]) if self.t5 else None
        for name in self.encoders:
            setattr(self, tokenizers[name].name, self.clip_tokenizers.get(name, self.t5_tokenizer))

    @classmethod
    def from_pretrained(
        cls,
        model: Path | str,
        provider: str = AUTO,
        scheduler: Any = None,
        *,
        low_memory: bool = False,
        graph: bool | None = None,
        vae_tiling: bool = False,
        vae_slicing: bool = False,
        config: str | None = None,
        **options: Any,
    ) -> Any:
        """Load a pipeline folder or a checkpoint on a provider, like `StableDiffusionPipeline.from_pretrained`.

        `scheduler`: None for the folder's own, or a schedule for few steps: diffusers' FlowMatchEulerDiscreteScheduler,
        its config as a mapping, or the path of a scheduler_config.json.
        `low_memory`: one component is in memory at a time. Text encoders are dropped before the first step, the
        transformer before the images are decoded. If its weights take more than three quarters of the device's free
        memory, or of the provider option memory_limit, a provider of sd-ort streams them from pinned host memory in
        each step. `graph`: capture the transformer's steps as GPU graphs; None
        where the provider can. Raises InputError for a folder of another pipeline, an incomplete one, and an option
        that is not supported.
        """
        if options.pop("controlnet", None):
            raise InputError(f"{cls.__name__} takes no controlnet: {UNSUPPORTED_ARGUMENTS['control_image']}.")
        for name, values in UNUSED_OPTIONS.items():
            if options.get(name) not in values:
                raise InputError(f"{cls.__name__} does not support {name}: leave it out.")
            options.pop(name, None)
        folder, provider = open_announced(model, provider, config, options)
        cls.check_folder(folder)
        session_options = loading_options(options, folder)
        models = Components(folder, provider, session_options, low_memory=low_memory, graph=graph)
        names = [*dict.fromkeys((*cls.ENCODERS, *(n for n in models if n.startswith("text_encoder"))))]
        parts = HOISTED["transformer"].values()
        needed = [*names, *(parts if any(n in models for n in parts if n != "transformer") else ())]
        needed = [*dict.fromkeys((*needed, *cls.REQUIRED_COMPONENTS))]
        models.require(*needed)
        pipeline = cls(folder, models, scheduler, vae_tiling=vae_tiling, vae_slicing=vae_slicing)
        if low_memory:
            from sd_ort.graphs.partition import partition_graph  # onnx_ir, which other pipelines do without

            models.opener.plan_stream("transformer", partition_graph)
        else:
            models.open(needed)
        return pipeline

    @classmethod
    def check_folder(cls, folder: Path) -> None:
        """Raise InputError for a folder of another pipeline, or with text encoders of other classes."""
        index = read_index(folder)
        if index.get("_class_name") not in (cls.INDEX_CLASS, *cls.OTHER_INDEX_CLASSES):
            raise InputError(f"{folder} holds a {index.get('_class_name')}, not a {cls.__name__}.")
        if mismatch := encoder_mismatch(index):
            raise InputError(f"{folder} {mismatch}: export the whole pipeline.")

    @classmethod
    def from_pipe(cls, pipeline: Any, **_: Any) -> Any:
        """Return a pipeline of this class over another one's folder, open sessions and LoRAs.

        Raises InputError if the folder is of another family, or lacks a component.
        """
        cls.check_folder(pipeline.folder)
        pipeline.models.require(*cls.REQUIRED_COMPONENTS)
        tiling = {"vae_tiling": pipeline.vae.use_tiling, "vae_slicing": pipeline.vae.use_slicing}
        other = cls(pipeline.folder, pipeline.models, pipeline._scheduler, **tiling)
        other.loras, other.lora_state = pipeline.loras, pipeline.lora_state
        return other

    @property
    def transformer(self) -> Any:
        return self._configured("transformer")

    @property
    def text_encoder_3(self) -> Any:
        return self._configured("text_encoder_3")

    @property
    def components(self) -> dict[str, Any]:
        """Components by diffusers' names. `from_pipe` makes another pipeline of them."""
        listed = {name: getattr(self, name, None) for name, value in self.index.items() if isinstance(value, list)}
        return {name: part for name, part in listed.items() if part is not None}

    @property
    def scheduler(self) -> Any:
        """diffusers' scheduler: the caller's object, or one that is created on first access."""
        if isinstance(self._scheduler, Mapping):
            with report_missing_package():
                from diffusers import FlowMatchEulerDiscreteScheduler

            self._scheduler = FlowMatchEulerDiscreteScheduler.from_config(self._scheduler)
        return self._scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        """Set the schedule, like `from_pretrained`. Raises InputError for another class or unknown settings."""
        own = scheduler_config(self.folder) if scheduler is None else as_scheduler_config(scheduler)
        config = {"_class_name": flow_match.CLASS, **own}
        flow_match.check_config(config)
        self._scheduler = config if scheduler is None or isinstance(scheduler, (str, Path, Mapping)) else scheduler

    @property
    def scheduler_config(self) -> Mapping[str, Any]:
        """Settings of the schedule: arguments of `flow_match.make_schedule`."""
        if isinstance(self._scheduler, Mapping):
            return self._scheduler
        return {**self._scheduler.config, flow_match.SET_SHIFT: self._scheduler.shift}

    @property
    def scheduler_name(self) -> str:
        return flow_match.CLASS

    @property
    def default_size(self) -> int:
        """Height and width in pixels if none are given, as in diffusers."""
        if demo_defaults(self.folder):
            return demo.HEIGHT
        return int(self.transformer_config.get("sample_size") or 128) * self.vae_scale_factor

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

    def _check(self, call: SimpleNamespace, **scales: float | None) -> tuple[int, int, int]:
        """Return height, width and steps with defaults. Raises InputError for arguments that cannot be used."""
        kind = type(self).__name__
        arguments = {**{name: getattr(call, name, None) for name in UNSUPPORTED_ARGUMENTS}, **call.unsupported}
        for name, value in arguments.items():
            if value is not None:
                reason = UNSUPPORTED_ARGUMENTS.get(name, "leave it out")
                raise InputError(f"{kind} does not support the argument {name}: {reason}.")
        call.num_images_per_prompt = 1 if call.num_images_per_prompt is None else call.num_images_per_prompt
        check_numbers(call.height, call.width, call.num_images_per_prompt, **scales)
        height, width = call.height or self.default_size, call.width or self.default_size
        multiple = self.size_multiple
        if height % multiple or width % multiple:
            if not self.ROUNDS_SIZE or (min(height, width) < multiple and not self.ROUNDS_UP):
                raise InputError(f"height {height} and width {width} must be multiples of {multiple}.")
            rounded = height - height % multiple, width - width % multiple
            if self.ROUNDS_UP:
                rounded = height + -height % multiple, width + -width % multiple
            log.warning("height %s and width %s are not multiples of %s: generating %s x %s.",
                        height, width, multiple, *rounded)  # fmt: skip
            height, width = rounded
        patches = self.family.max_patches(self.transformer_config)
        if patches is not None and max(height, width) > patches * multiple:
            raise InputError(f"{height} x {width} is too large for this model: at most {patches * multiple} a side.")
        if demo_defaults(self.folder):
            if isinstance(call.max_sequence_length, DefaultInt):
                call.max_sequence_length = demo.TEXT_LENGTH
            if isinstance(call.num_inference_steps, DefaultInt | None):
                call.num_inference_steps = demo.TRANSFORMER_STEPS
        steps = self.family.steps if call.num_inference_steps is None else call.num_inference_steps
        if not 1 <= steps <= STEP_LIMIT:
            raise InputError(f"{steps} steps are not between 1 and {STEP_LIMIT}.")
        if not 1 <= call.max_sequence_length <= self.LONGEST_TEXT:
            raise InputError(
                f"max_sequence_length must be between 1 and {self.LONGEST_TEXT}, got {call.max_sequence_length}."
            )
        call.output_type = "pil" if call.output_type is None else call.output_type
        if call.output_type not in OUTPUT_TYPES:
            raise InputError(f"output_type {call.output_type!r} is unknown: use one of {', '.join(OUTPUT_TYPES)}.")
        names = call.callback_on_step_end_tensor_inputs or ()
        if unknown := [name for name in names if name not in self._callback_tensor_inputs]:
            readable = ", ".join(self._callback_tensor_inputs)
            raise InputError(f"a callback of {kind} reads no {unknown[0]!r}: it reads {readable}.")
        self._check_attention_kwargs(getattr(call, "joint_attention_kwargs", None))
        self._interrupt, self._guidance_scale = False, call.guidance_scale
        return height, width, steps

    def _check_attention_kwargs(self, options: Any) -> None:
        """Apply the scale of LoRAs in `options`. Raises InputError for other options."""
        if unknown := [name for name in options or () if name != "scale"]:
            raise InputError(f"{unknown[0]!r} in the attention kwargs is not supported: only scale, of LoRAs.")
        scale = (options or {}).get("scale", 1.0)
        if not is_finite(scale):
            raise InputError(f"the scale of LoRAs must be a number, got {str(scale)[:80]!r}.")
        self.scale_loras(float(scale))

    @property
    def size_multiple(self) -> int:
        """Heights and widths in pixels are multiples of this."""
        return 2 * self.vae_scale_factor

    def _embedded(
        self, embeds: Any, encode: Any, others: Sequence[Any] = (), what: str = "prompt_embeds"
    ) -> tuple[np.ndarray, ...]:
        """Return the prompt embeddings of the call as arrays, or the result of `encode` without them.

        Raises InputError if only some of the embeddings are given.
        """
        arrays = [as_array(each) for each in (embeds, *others) if each is not None]
        if not arrays:
            return encode()
        if len(arrays) != 1 + len(others):
            raise InputError(f"{what} goes with the pooled embeddings of the same prompts: give both.")
        if {len(each) for each in arrays} != {len(arrays[0])} or arrays[0].ndim != 3:
            shapes = " and ".join(str(each.shape) for each in arrays)
            raise InputError(f"embeddings of shape {shapes} do not fit together.")
        return tuple(arrays)

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
    def _sigmas(call: SimpleNamespace, steps: int) -> Sequence[float]:
        """Return the sigmas of a call, by default `steps` of them from 1 down to 1 / steps."""
        return list(np.linspace(1.0, 1 / steps, steps)) if call.sigmas is None else call.sigmas

    @staticmethod
    def _float32(outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: array.astype(np.float32) for name, array in outputs.items()}

    def _noise(self, shape: tuple[int, ...], generator: Generator, count: int) -> np.ndarray:
        if isinstance(generator, Sequence) and len(generator) != count:
            raise InputError(f"{len(generator)} generators were given for {count} images.")
        return draw_noise(shape, noise_generators(generator))

    def _start(
        self, shape: tuple[int, ...], call: SimpleNamespace, schedule: flow_match.FlowMatchSchedule,
        size: tuple[int, int],
    ) -> tuple[np.ndarray, flow_match.InpaintBlend | None]:  # fmt: skip
        """Return the latents (B, C, h, w) before the first step, and what inpainting needs after each. size: in pixels.

        Pipelines that start from an image override it.
        """
        if call.latents is None:
            return self._noise(shape, call.generator, shape[0]), None
        return latents_of_shape(call.latents, shape), None

    def _start_packed(
        self, shape: tuple[int, int, int], call: SimpleNamespace, schedule: flow_match.FlowMatchSchedule,
        size: tuple[int, int],
    ) -> tuple[np.ndarray, flow_match.InpaintBlend | None]:  # fmt: skip
        """Return as `_start`, in patches of 2x2 (B, h * w, 4C). shape: (B, h, w)."""
        count, rows, columns = shape
        channels = self.transformer_config["in_channels"]
        if call.latents is not None and not self.TAKES_UNPACKED_LATENTS:
            return latents_of_shape(call.latents, (count, rows * columns, channels)), None
        sample, blend = self._start((count, channels // 4, 2 * rows, 2 * columns), call, schedule, size)
        return pack(sample), None if blend is None else blend.packed(pack)

    def _denoise(self, job: Denoising, call: SimpleNamespace) -> np.ndarray:
        """Run the steps of a call and return the latents after the last one."""
        steps = len(job.schedule.timesteps)
        self._num_timesteps = steps
        models: Mapping[str, Any] = self.models
        if self.block_cache is not None:
            self.block_cache.check(steps)
            cached = self._cached = self.block_cache.open(self.models)  # another thread may replace the attribute
            models = ChainMap({COMPONENT: cached}, self.models)
        predict, skip = job.steps(models), job.skip_layers
        skipping = [i for i in range(steps) if skip and steps * skip.start < i < steps * skip.stop]
        without = skip.steps(self.models, job.schedule.timesteps) if skip and skipping else None
        with step_bar(range(steps), call.progress and not self.progress_bar_config.get("disable")) as bar:
            for i in bar:
                if self._interrupt:
                    break
                predictions = predict(i, job.hidden_states())
                prediction = job.guided(predictions)
                if without is not None and i in skipping:
                    prediction = job.guided_without_blocks(i, prediction, predictions, without)
                check_finite(prediction, "transformer")
                job.step(i, prediction)
                if call.callback_on_step_end is not None and self._call_back(i, job, call):
                    predict = job.steps(models)
        return job.sample

    def _call_back(self, i: int, job: Denoising, call: SimpleNamespace) -> bool:
        """Call the callback after step i, and replace the tensors that it returns. Returns whether prompts changed."""

        def tensor(value: Any) -> Any:
            return [tensor(each) for each in value] if isinstance(value, list) else as_tensor(value.copy())

        values = job.callback_tensors()
        tensors = {name: tensor(values[name]) for name in call.callback_on_step_end_tensor_inputs}
        changed = call.callback_on_step_end(self, i, as_tensor(job.schedule.timesteps[i]), tensors) or {}
        return job.replace(changed)

    def _result(self, latents: np.ndarray, call: SimpleNamespace) -> Any:
        """Return what the caller asked for: `latents` as they are, or the images of latents (B, C, h, w)."""
        images = as_tensor(latents) if call.output_type == "latent" else self._decode_images(latents, call.output_type)
        return PipelineOutput(images) if call.return_dict else (images,)

    def _decode_images(self, latents: np.ndarray, output_type: str) -> Any:
        """Return the images of latents (B, C, h, w)."""
        pixels = self.vae.to_pixels(latents)
        check_finite(pixels, "vae_decoder")
        return to_output_type(pixels, output_type)


def prompt_list(prompt: Prompt | None, other: Prompt | None = None, count: int | None = None) -> list[str]:
    """Return prompts as a list; `other` replaces `prompt` if it is not empty. `count`: of prompts, for a single text.

    Raises InputError for a value that is no text, and for another number of prompts.
    """
    value = other or prompt
    if value is None:
        raise InputError("no prompt was given: give prompt, or prompt_embeds.")
    texts = [value] * (count or 1) if isinstance(value, str) else list(value)
    check_text(texts)
    if not texts or (count is not None and len(texts) != count):
        raise InputError(f"{len(texts)} prompts were given where {count or 'at least one'} are needed.")
    return texts


def repeat_rows(array: np.ndarray, images: int) -> np.ndarray:
    """Return rows, one for each prompt, repeated for each image."""
    return np.repeat(array, images, 0)


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


def image_ids(rows: int, columns: int, first: int = 0) -> np.ndarray:
    """Return (first, row, column) of each patch (rows * columns, 3), float32."""
    row, column = np.indices((rows, columns), np.float32).reshape(2, -1)
    return np.stack([np.full_like(row, first), row, column], -1)
