"""Text to image with diffusion transformers: Stable Diffusion 3 and FLUX.1, with diffusers' arguments and defaults.

Latents, guidance and scheduler are NumPy arrays on the host; each component is one ONNX Runtime session. The same seed
gives the image of diffusers.
"""

from __future__ import annotations

import logging
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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
from sd_ort.core.progress import announce, print_line, step_bar
from sd_ort.model_cache import open_model
from sd_ort.pipelines.arguments import DefaultInt, check_numbers, check_text, is_finite, is_integer
from sd_ort.pipelines.cached_transformer import COMPONENT
from sd_ort.pipelines.call_signature import transformer_call
from sd_ort.pipelines.common_methods import REJECTED_METHODS, PipelineMethods
from sd_ort.pipelines.diffusers_compat import loading_options
from sd_ort.pipelines.images import as_array, as_tensor, latents_of_shape, to_output_type
from sd_ort.pipelines.lora_methods import LoraMixin
from sd_ort.pipelines.noise import draw_noise, noise_generators
from sd_ort.pipelines.output import PipelineOutput
from sd_ort.pipelines.request import OUTPUT_TYPES, Generator, Prompt
from sd_ort.pipelines.sampling_job import check_finite
from sd_ort.pipelines.transformer_cache import TransformerCacheMixin
from sd_ort.pipelines.transformer_steps import TransformerSteps
from sd_ort.pipelines.vae import Vae
from sd_ort.runtime.components import Components
from sd_ort.runtime.provider_choice import AUTO
from sd_ort.runtime.session import OrtModel

log = logging.getLogger("sd_ort")

LONGEST_TEXT = 512  # T5 tokens, as in diffusers
TEXT_TOKENS = DefaultInt(LONGEST_TEXT)
FLUX_STEPS = DefaultInt(28)
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
}  # fmt: skip


# Tensors of a prompt by diffusers' names -> inputs of the transformer.
PROMPT_TENSORS = {"prompt_embeds": "encoder_hidden_states", "pooled_prompt_embeds": "pooled_projections"}


@dataclass(frozen=True)
class SkipLayerGuidance:
    """Guidance away from the prediction of a transformer without some of its blocks, in a range of the steps.

    Attributes:
        blocks: Indices of the blocks.
        scale: Factor of the difference to the prediction for the prompt.
        start, stop: Shares of the steps between which it is used.
        inputs: Inputs of the transformer that depend on the prompt, without the negative prompt.
    """

    blocks: tuple[int, ...]
    scale: float
    start: float
    stop: float
    inputs: dict[str, np.ndarray]

    def steps(self, models: Components, timesteps: np.ndarray) -> TransformerSteps:
        """Return the calls of the transformer without the blocks, which has a session of its own."""
        parts = HOISTED["transformer"]
        part = parts["time" if parts["time"] in models else "step"]
        label = f"without blocks {', '.join(map(str, self.blocks))}"
        edited = models.variant(part, label, partial(_skip_blocks, models.folder, self.blocks))
        return TransformerSteps(ChainMap({part: edited}, models), [self.inputs], timesteps)


def _skip_blocks(folder: Path, blocks: Sequence[int], path: Path) -> bytes:
    from sd_ort.graphs.load import load, serialize_over_data
    from sd_ort.graphs.skip_blocks import skip_blocks
    from sd_ort.weights.recipes import read_recipes

    model = load(path)
    skip_blocks(model, read_recipes(folder).get("transformer", {}), blocks)
    return serialize_over_data(model, path.parent)


@dataclass
class Denoising:
    """The latents of one call before its first step, and all that its steps read.

    Attributes:
        sample: Latents as the transformer reads them.
        schedule: Timesteps and sigmas.
        prompts: Inputs of the transformer that depend on the prompt; then, with guidance in calls of their own, those
            of the negative prompt.
        fixed: The other inputs of the transformer that are the same in each step.
        timestep_scale: Factor of the schedule's timesteps in the transformer's input.
        guidance_scale: Scale of classifier-free guidance; None without guidance.
        one_call: Whether rows of the negative prompt precede those of the prompt in one call.
        blend: Restores the region outside of a mask; None without one.
        references: Tokens (B, R, C) of reference images, which follow the latents; None without any.
        tensors: Other tensors that a callback may read, by name.
        skip_layers: Skip-layer guidance; None without it.
    """

    sample: np.ndarray
    schedule: flow_match.FlowMatchSchedule
    prompts: list[dict[str, np.ndarray]]
    fixed: dict[str, np.ndarray] = field(default_factory=dict)
    timestep_scale: float = 1.0
    guidance_scale: float | None = None
    one_call: bool = False
    blend: flow_match.InpaintBlend | None = None
    references: np.ndarray | None = None
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    skip_layers: SkipLayerGuidance | None = None

    def steps(self, models: Mapping[str, OrtModel]) -> TransformerSteps:
        """Return the transformer's calls for the prompts as these are now."""
        timesteps = self.schedule.timesteps * np.float32(self.timestep_scale)
        return TransformerSteps(models, [{**prompt, **self.fixed} for prompt in self.prompts], timesteps)

    def hidden_states(self) -> np.ndarray:
        """Return the latents as a call of the transformer reads them."""
        sample = self.sample if self.references is None else np.concatenate([self.sample, self.references], 1)
        return np.concatenate([sample, sample]) if self.one_call else sample

    def of_sample(self, predictions: list[np.ndarray]) -> list[np.ndarray]:
        """Return predictions without the tokens of reference images."""
        return predictions if self.references is None else [each[:, : self.sample.shape[1]] for each in predictions]

    def guided(self, predictions: list[np.ndarray]) -> np.ndarray:
        """Return the prediction of a step from the outputs of its calls."""
        predictions = self.of_sample(predictions)
        if self.guidance_scale is None:
            return predictions[0]
        negative, positive = np.split(predictions[0], 2) if self.one_call else predictions[::-1]
        return negative + np.float32(self.guidance_scale) * (positive - negative)

    def guided_without_blocks(
        self, i: int, prediction: np.ndarray, predictions: list[np.ndarray], without: TransformerSteps
    ) -> np.ndarray:
        """Return the prediction of step i with skip-layer guidance. `predictions`: of the full transformer."""
        assert self.skip_layers is not None
        (skipped,) = without(i, self.sample)
        return prediction + np.float32(self.skip_layers.scale) * (np.split(predictions[0], 2)[1] - skipped)

    def callback_tensors(self) -> dict[str, Any]:
        """Return what a callback may read, by diffusers' names: arrays, or lists of these."""
        prompt = self.prompts[0]
        values = {name: prompt[key] for name, key in PROMPT_TENSORS.items() if key in prompt}
        return {**values, **self.tensors, "latents": self.sample}

    def replace(self, changed: Mapping[str, Any]) -> bool:
        """Take the tensors that a callback returned; return whether prompt embeddings are among them."""
        if "latents" in changed:
            self.sample = as_array(changed["latents"])
        replaced = {key: as_array(changed[name]) for name, key in PROMPT_TENSORS.items() if name in changed}
        self.prompts[0] |= {key: array for key, array in replaced.items() if key in self.prompts[0]}
        return bool(replaced)

    def step(self, i: int, prediction: np.ndarray) -> None:
        """Replace the latents by those after step i."""
        self.sample = self.schedule.step(i, prediction, self.sample)
        if self.blend is not None:
            self.sample = self.blend.apply(self.schedule, i, self.sample)


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
        dtype = options.get("torch_dtype") or options.get("dtype")
        folder, choice = open_model(model, provider, dtype=dtype, config=config, on_progress=print_line)
        if choice.reason:
            announce(choice.line)
        cls.check_folder(folder)
        session_options = loading_options(options, folder)
        models = Components(folder, choice.provider, session_options, low_memory=low_memory, graph=graph)
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
    def from_single_file(cls, file: Path | str, provider: str = AUTO, **options: Any) -> Any:
        """Load a checkpoint in one file, as `from_pretrained` does. Raises InputError if there is no such file."""
        if not isinstance(file, (str, Path)) or not Path(file).is_file():
            raise InputError(f"{file}: no such file.")
        return cls.from_pretrained(file, provider, **options)

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
    def text_encoder(self) -> Any:
        return self._configured("text_encoder")

    @property
    def text_encoder_2(self) -> Any:
        return self._configured("text_encoder_2")

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
        if unknown := [name for name, value in call.unsupported.items() if value is not None]:
            raise InputError(f"{kind} does not support the argument {unknown[0]}.")
        for name, reason in UNSUPPORTED_ARGUMENTS.items():
            if getattr(call, name, None) is not None:
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
        schedule = flow_match.make_schedule(self.scheduler_config, steps, tokens, call.sigmas, call.mu)
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
        sigmas = list(np.linspace(1.0, 1 / steps, steps)) if call.sigmas is None else call.sigmas
        schedule = flow_match.make_schedule(self.scheduler_config, steps, rows * columns, sigmas)
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
