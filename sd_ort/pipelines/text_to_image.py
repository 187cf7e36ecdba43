"""Prompt -> image over ONNX components, with diffusers' argument names, schedulers and random numbers.

Shared code of all pipelines, and text to image; `pipelines.image_to_image` starts from images. Latents are sampled
and stepped in float32 whatever the precision of the graphs, so one seed means one image on every provider and
precision, and the image that diffusers generates from the same seed.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import sd_ort
from sd_ort.checkpoints.conditioning import text_encoders
from sd_ort.checkpoints.configs import component_config
from sd_ort.checkpoints.generation_defaults import demo_defaults
from sd_ort.checkpoints.signatures import controlnet_scale, default_latents, latent_multiple
from sd_ort.checkpoints.unet_inputs import is_sdxl
from sd_ort.core.aliases import accept_old_names
from sd_ort.core.errors import InputError, report_missing_package
from sd_ort.core.pipeline_folder import read_index
from sd_ort.pipelines import controlnet_inputs, safety
from sd_ort.pipelines.arguments import GUIDANCE, GUIDED_TENSORS, STEPS, DefaultNumber
from sd_ort.pipelines.controlnet_inputs import ControlNetInput
from sd_ort.pipelines.device_placement import DevicePlacement
from sd_ort.pipelines.diffusers_compat import DiffusersCompatMixin, loading_options
from sd_ort.pipelines.images import as_array, as_tensor, latents_of_shape, pil_images, size_of, to_output_type
from sd_ort.pipelines.ip_adapter import IPAdapterMixin
from sd_ort.pipelines.load_options import DEFAULT_OPTIONS, LoadOptions, open_announced
from sd_ort.pipelines.lora_methods import LoraMixin
from sd_ort.pipelines.noise import TorchNormalGenerator, draw_noise, noise_generators, start_noise
from sd_ort.pipelines.output import PipelineOutput
from sd_ort.pipelines.request import (
    IMAGE_ARGUMENTS,
    PAG_ARGUMENTS,
    Generator,
    Picture,
    Prompt,
    Request,
    StepCallback,
    check_generators,
    check_size,
    request,
)
from sd_ort.pipelines.sampling import SamplingMixin
from sd_ort.pipelines.sampling_job import check_finite
from sd_ort.pipelines.scheduler import PipelineScheduler
from sd_ort.pipelines.text import PromptEncoder
from sd_ort.pipelines.textual_inversion_methods import TextualInversionMixin
from sd_ort.pipelines.vae import Vae
from sd_ort.runtime.components import Components
from sd_ort.runtime.provider_choice import AUTO

if TYPE_CHECKING:
    import torch
    from torch import Tensor

log = logging.getLogger("sd_ort")


class StableDiffusionPipeline(LoraMixin, TextualInversionMixin, IPAdapterMixin, DiffusersCompatMixin, SamplingMixin):
    """Text to image with SD 1.x, 2.x and SDXL pipeline folders. Make one with `from_pretrained`.

    One pipeline may be called in several threads: on a CPU they draw at once, on a GPU they take turns, since all
    sessions and captured graphs share one stream and its buffers.
    """

    # Classes in a model_index.json that can be run: diffusers' and Optimum's names.
    KINDS = re.compile(r"(StableDiffusion(XL)?(ControlNet)?(PAG)?|LatentConsistencyModel)(Img2Img|Inpaint)?Pipeline$")
    REQUIRED_COMPONENTS: tuple[str, ...] = ("unet", "vae_decoder")
    HAS_SEPARATE_COMPONENTS = True  # whether the text encoders are components of their own
    PAG = ""  # "PAG" in the classes that take pag_scale
    DEFAULT_SIZE_UNLESS_BOTH = True  # whether height or width alone is ignored
    CAN_INTERRUPT = True  # whether a callback that sets `_interrupt` ends the loop
    CONTROLNET_READS_CHANGES = True  # whether ControlNets read what a callback changes
    CHANGES_LAST_LATENTS = True  # whether the latents that a callback returns after the last step are decoded
    TASK = ""  # in the names of diffusers' classes
    _callback_tensor_inputs: tuple[str, ...] = GUIDED_TENSORS
    STRENGTH_IN_SCHEDULER = False  # whether the scheduler, and not a part of its steps, follows `strength`
    REJECTED_ARGUMENTS: tuple[str, ...] = tuple(IMAGE_ARGUMENTS)  # arguments that other pipelines take

    def __init__(
        self, folder: Path, models: Components, scheduler: Any, options: LoadOptions = DEFAULT_OPTIONS
    ) -> None:
        """`scheduler` as in `from_pretrained`, or another pipeline's."""
        self.folder = folder
        self.models = models
        self._scheduler = (
            scheduler if isinstance(scheduler, PipelineScheduler) else PipelineScheduler(folder, scheduler)
        )
        self.safety_checker = bool(options.safety_checker)
        self._started_noise: list[TorchNormalGenerator] = []  # of the next calls of `draw_each`
        default = models.device != "cpu" or bool(models.placement.peers)
        self.device_loop = default if options.device_loop is None else options.device_loop
        self.index = read_index(folder)
        self.unet_config = component_config(folder, "unet", required=True)
        self.is_sdxl = is_sdxl(self.unet_config)
        config = component_config(folder, "vae_decoder", required=True)
        self.vae = Vae(models, config, tiling=options.vae_tiling, slicing=options.vae_slicing)
        self.vae_scale_factor = self.vae.scale_factor
        self.texts = PromptEncoder(folder, models, self.index, self.unet_config)
        if self.device_loop and self.HAS_SEPARATE_COMPONENTS:
            self.texts.fix_length()

    @classmethod
    @accept_old_names(folder="model")
    def from_pretrained(
        cls,
        model: Path | str,
        provider: str = AUTO,
        scheduler: Any = None,
        *,
        low_memory: bool = False,
        vae_tiling: bool = False,
        vae_slicing: bool = False,
        safety_checker: bool | None = True,
        device_loop: bool | None = None,
        graph: bool | None = None,
        controlnet: Path | str | Sequence[Path | str] = (),
        split_guidance: Sequence[int] | None = None,
        split_image: Sequence[int] | None = None,
        unet_on: Sequence[int] | None = None,
        decode_on: int | None = None,
        config: str | None = None,
        **options: Any,
    ) -> Any:
        """Load a model on a provider ("cpu", "cuda", "rocm", "migraphx", or ours: "hip", "sdcuda"); "auto" is the best
        one that runs here, said on stderr.

        `model`: a pipeline folder of sd-ort, or a checkpoint: a diffusers folder, a file, a hub id, or "demo". A
        checkpoint is optimized in `torch_dtype` (default float16, float32 on a CPU), once: it stays in the cache
        (`sd-ort cache`). `config`: of a checkpoint in one file, a folder or hub id of its family.

        `scheduler`: None for the folder's own, a diffusers class name or short form ("EulerDiscreteScheduler",
        "euler"), or a scheduler object. `low_memory`: open a component when its turn comes and drop the one before.
        `vae_tiling`: encode and decode images larger than the model's own in overlapping tiles; `vae_slicing`: one
        image of a batch after the other. On a GPU both begin by themselves, with a warning, where less memory is free
        than the VAE takes. `safety_checker`: black out what the folder's safety checker flags, if it
        has one. `device_loop`: keep latents, guidance and scheduler on the device (see `pipeline.device_loop`); None
        for doing so on a GPU. `graph`: capture the UNet's runs as CUDA or HIP graphs; None for where the provider can,
        with a warning for what it cannot; False for never; True fails where it cannot. `controlnet`: a folder whose
        ControlNet is used instead of this folder's own, or several. `split_guidance`: two devices, such as (0, 1), of
        which one predicts the negative and one the positive half of classifier-free guidance (`guidance_split`).
        `split_image`: two or more devices, each of which computes rows of one image in most steps, of one half of
        guidance if there is guidance; the image is close to that of one device (`device.patches`).
        `unet_on`: the devices of a UNet that is too large for one: each holds a range of its layers.
        `decode_on`: the device of the VAE decoder, for `draw_each`. `options`: of
        `runtime.session.SessionOptions` (threads, allow_fallback, tuning, library, profile).

        Raises InputError for a folder, component, scheduler or option that cannot be used, ProviderError for a
        provider that is not installed or not really used.
        """
        devices = DevicePlacement(split_guidance, split_image, unet_on, decode_on)
        load = LoadOptions(
            low_memory, vae_tiling, vae_slicing, safety_checker, device_loop, graph, controlnet, devices, options
        )
        load.check(provider)
        folder, provider = open_announced(model, provider, config, options)
        return cls._load(folder, provider, scheduler, load)

    @classmethod
    def _load(cls, folder: Path, provider: str, scheduler: Any, options: LoadOptions) -> Any:
        """Open a pipeline folder on a provider. Raises as `from_pretrained`."""
        devices, low_memory = options.devices, options.low_memory
        devices.check("unet" in cls.REQUIRED_COMPONENTS, low_memory, options.device_loop)
        session_options = devices.options(provider, loading_options(options.session, folder))
        nets = options.controlnets
        models = Components(folder, provider, session_options, low_memory=low_memory, graph=options.graph, others=nets)
        cls.check_folder(folder)
        index = read_index(folder)
        needed = [*(text_encoders(index) if cls.HAS_SEPARATE_COMPONENTS else ()), *cls.REQUIRED_COMPONENTS, *nets]
        models.require(*needed)
        devices.place(models)
        family: Any = cls._class_for(index, models, is_sdxl(component_config(folder, "unet")))
        pipeline = family(folder, models, PipelineScheduler(folder, scheduler), options)
        pipeline._check_unet()
        if not low_memory:  # opened now, so that the first image takes no longer than the second
            parts = [name for name in models if name.startswith("unet_")]
            if models.placement.splits_image:  # the loop opens another UNet on each device
                needed.remove("unet")
            models.open([*needed, *(name for name in models if name == "image_encoder"), *parts])
            for peer in models.placement.peers:
                peer.open(parts if models.placement.splits_image else [*parts, "unet"])
        return pipeline

    @classmethod
    def check_folder(cls, folder: Path) -> None:
        """Raise InputError for a folder of another kind of pipeline."""
        kind = str(read_index(folder).get("_class_name", ""))
        if not cls.KINDS.search(kind):
            raise InputError(f"{folder} holds a {kind or 'pipeline without a class'}: give a Stable Diffusion folder.")

    @classmethod
    def _class_for(cls, index: Mapping[str, Any], models: Components, is_sdxl: bool) -> type:
        """Return the public class of the same task for a folder's family; other classes unchanged.

        model_index.json decides about latent consistency models for the classes AutoPipeline.
        """
        if getattr(sd_ort, cls.__name__, None) is not cls:
            return cls
        is_auto = cls.__name__.startswith("AutoPipeline")
        consistency = str(index.get("_class_name", "")) if is_auto else cls.__name__
        if consistency.startswith("LatentConsistencyModel") and cls.TASK != "Inpaint":
            name = f"LatentConsistencyModel{cls.TASK}Pipeline"
        else:
            name = (
                f"StableDiffusion{'XL' * is_sdxl}{'ControlNet' * ('controlnet' in models)}{cls.PAG}{cls.TASK}Pipeline"
            )
        family: type | None = getattr(sd_ort, name, None)
        if family is None:
            raise InputError(f"There is no {name}, in diffusers neither: use the class without PAG.")
        return family

    @cached_property
    def image_processor(self) -> Any:
        """diffusers' image processor, for input images."""
        from diffusers.image_processor import VaeImageProcessor

        return VaeImageProcessor(
            self.vae_scale_factor, vae_latent_channels=self.vae.latent_channels, do_convert_rgb=True
        )

    @property
    def scheduler(self) -> Any:
        """diffusers' scheduler: the caller's object, or one that is created on first access."""
        return self._scheduler.diffusers

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        self._scheduler = PipelineScheduler(self.folder, scheduler)

    @property
    def scheduler_name(self) -> str:
        """Class name of the scheduler, without importing diffusers."""
        return self._scheduler.name

    def on_weights_updated(self, closed: bool) -> None:
        """Release captured graphs and buffers if sessions were closed; else mark cached outputs as outdated."""
        if closed:
            vars(self).pop("loop", None)
        elif "loop" in vars(self):
            self.loop.on_weights_updated()

    @property
    def default_size(self) -> int:
        """Height and width in pixels of the images the model was trained on."""
        return default_latents(self.unet_config) * self.vae_scale_factor

    @property
    def size_multiple(self) -> int:
        """Heights and widths in pixels that are multiples of this halve evenly at every level of the UNet."""
        return self.vae_scale_factor * latent_multiple(self.unet_config)

    # --- Drawing ----------------------------------------------------------------------------------------------------

    def __call__(
        self, prompt: Prompt | None = None, height: int | None = None, width: int | None = None,
        num_inference_steps: int = STEPS, timesteps: Sequence[int] | None = None, sigmas: Sequence[float] | None = None,
        guidance_scale: float = GUIDANCE, negative_prompt: Prompt | None = None, num_images_per_prompt: int | None = 1,
        eta: float = 0.0, generator: Generator = None, latents: Tensor | None = None,
        prompt_embeds: Tensor | None = None, negative_prompt_embeds: Tensor | None = None,
        ip_adapter_image: Picture | None = None, ip_adapter_image_embeds: Sequence[Tensor] | None = None,
        output_type: str | None = "pil", return_dict: bool = True,
        cross_attention_kwargs: Mapping[str, Any] | None = None, guidance_rescale: float = 0.0,
        clip_skip: int | None = None, callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",), *, prompt_syntax: str = "plain",
        progress: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Generate `num_images_per_prompt` images for each prompt.

        The arguments, their order and defaults are those of diffusers' class of this name; `pipelines.request.Request`
        says what they mean, and which others `kwargs` takes. `control_image`: `image` of the ControlNet pipelines.
        Returns a `PipelineOutput`, or a tuple without `return_dict`. Raises InputError for what does not fit together.
        """
        return self._generate(locals())

    @report_missing_package()
    def _generate(self, call: Mapping[str, Any]) -> Any:
        """Check the arguments of `__call__` by name, generate the images, and return the result of `__call__`."""
        named = {n: v for n, v in call.items() if n not in ("self", "kwargs") and not isinstance(v, DefaultNumber)}
        arguments = named | call.get("kwargs", {})
        rejected = (*self.REJECTED_ARGUMENTS, *(() if self.PAG else PAG_ARGUMENTS))
        checked = request(self._defaults, rejected, arguments)
        self._read_images(checked)
        return self._answer(checked, self._size(checked))

    def _read_images(self, request: Request) -> None:
        """Check the images of a call. Raises InputError if one is missing or unreadable."""
        request.control_image = request.image if request.control_image is None else request.control_image
        request.image = None
        if request.control_image is not None:
            count = max(1, len(controlnet_inputs.names(self.models)))
            request.control_image = controlnet_inputs.by_controlnet(request.control_image, count)

    def _size(self, request: Request) -> tuple[int, int]:
        """Return height and width in pixels: those of the call, else of the control image, else the model's."""
        if request.control_image is not None:
            several = "controlnet_2" in self.models
            return self._size_of(request, request.control_image[0] if several else request.control_image)
        if self.DEFAULT_SIZE_UNLESS_BOTH and (request.height is None) != (request.width is None):
            log.warning("height or width alone is ignored, as in diffusers: give both.")
            return self.default_size, self.default_size
        return request.height or self.default_size, request.width or self.default_size

    def _size_of(self, request: Request, image: Any) -> tuple[int, int]:
        """Return height and width in pixels: those of the call, else of a `readable` image, down to whole latents."""
        factor, own = self.vae_scale_factor, size_of(image, self.vae.latent_channels, self.vae_scale_factor)
        height, width = (side // factor * factor for side in own)
        size = request.height or height, request.width or width
        if 0 in size:
            raise InputError(f"the image has {own[1]} x {own[0]} pixels, less than one latent of {factor} x {factor}.")
        return size

    def draw_each(self, calls: Iterable[Mapping[str, Any]]) -> Iterator[PipelineOutput]:
        """Yield the output of each call, in order; a call is a mapping of the arguments of `__call__`.

        With the loop on the device or `decode_on`, a thread works while a call is on the device: it draws the first
        noise of the next call, and makes the images of the one before, which are yielded then.
        """
        if "vae_decoder" not in self.models.placement.placed and not self.device_loop:
            yield from (self(**{**call, "return_dict": True}) for call in calls)
            return
        upcoming = iter(calls)
        call, before = next(upcoming, None), None
        with ThreadPoolExecutor(1, "host") as host:
            while call is not None:
                following = next(upcoming, None)
                if following is not None:
                    self._started_noise += self._start_noise(following, host)
                try:
                    output = self._generate_unfinished(call, host)
                except (Exception, KeyboardInterrupt):
                    self._started_noise.clear()
                    if before is not None:
                        yield before.result()  # finished already
                    raise
                if before is not None:
                    yield before.result()
                call, before = following, output
            if before is not None:
                yield before.result()

    def _start_noise(self, call: Mapping[str, Any], host: Executor) -> list[TorchNormalGenerator]:
        """Return generators for the seeds of a call; `host` draws their noise."""
        sides = (call.get(name) or self.default_size for name in ("height", "width"))
        shape = 1, self.vae.latent_channels, *(side // self.vae_scale_factor for side in sides)
        return start_noise(call.get("generator"), shape, host)

    def _generate_unfinished(self, call: Mapping[str, Any], host: Executor) -> Future[PipelineOutput]:
        """Generate on the device; `host` decodes with `decode_on`, and makes PIL images of pixels."""
        output_type = call.get("output_type") or "pil"
        if "vae_decoder" in self.models.placement.placed:
            latents = as_array(self(**{**call, "output_type": "latent", "return_dict": True}).images)
            return host.submit(self._finish, latents, Request(output_type=output_type))
        # With a crop, the pipeline itself lays its PIL images over another.
        is_converted_by_host = output_type == "pil" and call.get("padding_mask_crop") is None
        output = self(**{**call, "output_type": "uint8" if is_converted_by_host else output_type, "return_dict": True})
        if not is_converted_by_host:
            return host.submit(lambda: output)
        return host.submit(lambda: replace(output, images=pil_images(output.images)))

    def _run_request(self, request: Request) -> PipelineOutput:
        """Return the output of a checked request."""
        conditioning = self._condition(request)
        schedule = request.timetable.schedule(0, self._end(request))
        noise = self._noise(request, request.latents) * np.float32(schedule.init_noise_sigma)
        return self._sample(noise, schedule, conditioning, request)

    @property
    def _defaults(self) -> Mapping[str, Any]:
        """Default values of `__call__`, which replace None; those of the demo model if the folder holds it."""
        parameters = inspect.signature(type(self).__call__).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default not in (None, inspect.Parameter.empty)}
        if own := demo_defaults(self.folder):
            defaults |= {"num_inference_steps": own.steps, "guidance_scale": own.guidance}
        return defaults

    def _answer(self, request: Request, size: tuple[int, int]) -> Any:
        """Check the rest of a request, generate, and return images, latents or a tuple as the request says."""
        request.size = size
        request.check(self._scheduler.trained)
        check_size(size, self.vae_scale_factor if self.HAS_SEPARATE_COMPONENTS else self.size_multiple)
        if unknown := set(request.callback_tensors) - set(self._callback_tensor_inputs):
            names = ", ".join(self._callback_tensor_inputs)
            raise InputError(f"callback_on_step_end reads no {unknown.pop()} in this pipeline: it reads {names}.")
        request.timetable = self._scheduler.timetable(request, self.STRENGTH_IN_SCHEDULER)
        request.num_inference_steps = request.timetable.steps
        request.generator = noise_generators(request.generator, self._started_noise)
        scale = float(request.guidance_scale or 0.0)
        if self.unet_config.get("time_cond_proj_dim"):
            request.embedded_guidance = scale
        elif scale > 1:
            request.guidance = scale
        self._guidance_scale, self._guidance_rescale, self._clip_skip = (
            scale,
            request.guidance_rescale,
            request.clip_skip,
        )
        self._cross_attention_kwargs, self._interrupt = request.cross_attention_kwargs, False
        request.is_perturbed = bool(request.pag_scale > 0 and self.pag_applied_layers)
        self._pag_scale, self._pag_adaptive_scale = request.pag_scale, request.pag_adaptive_scale
        self._prepare_unet(request)
        self._denoising_end, self._denoising_start = request.denoising_end, request.denoising_start
        request.adapter_images = self.encode_ip_adapter_images(request)
        request.progress = request.progress and not self.progress_bar_config.get("disable", False)
        self.scale_loras((request.cross_attention_kwargs or {}).get("scale", 1.0))
        output = self._run_request(request)
        return output if request.return_dict else (output.images,) if self.is_sdxl else tuple(output)

    def _check_unet(self) -> None:
        """Raise InputError for a UNet of another kind of pipeline."""
        channels = self.unet_config.get("in_channels", 4)
        if channels != self.vae.latent_channels:
            raise InputError(
                f"{self.folder} has a UNet of {channels} channels, for inpainting: give an image and a mask "
                "(--image, --mask), or use StableDiffusionInpaintPipeline."
            )

    # --- Steps ------------------------------------------------------------------------------------------------------

    def _end(self, request: Request) -> int:
        """Return the number of steps before `denoising_end`. Raises InputError for 0 steps."""
        timesteps = request.timetable.timesteps
        if not request.denoising_end or request.denoising_end == 1:  # so does diffusers
            return len(timesteps)
        count = int((timesteps >= cutoff_timestep(request.timetable, request.denoising_end)).sum())
        if not count:
            raise InputError(f"denoising_end {request.denoising_end} leaves no step to draw: raise it.")
        return count

    def _controls(self, request: Request, steps: int) -> list[ControlNetInput]:
        names = controlnet_inputs.names(self.models)
        for name in names if request.control_image is not None else ():
            scale = controlnet_scale(component_config(*self.models.files.location(name)))
            if scale != self.vae_scale_factor:
                raise InputError(
                    f"The {name} halves its image {scale.bit_length() - 1} times and the VAE "
                    f"{self.vae_scale_factor.bit_length() - 1} times: use a ControlNet of this model's family."
                )
        return controlnet_inputs.controls(request, names, steps)

    def _latent_shape(self, request: Request) -> tuple[int, int, int, int]:
        (height, width), side = request.size, self.vae_scale_factor
        return request.batch, self.vae.latent_channels, height // side, width // side

    def _noise(self, request: Request, latents: Any = None) -> np.ndarray:
        """Return standard normal noise (B, C, h, w), float32: the request's checked latents, or diffusers' noise."""
        shape = self._latent_shape(request)
        return draw_noise(shape, request.generator) if latents is None else latents_of_shape(latents, shape)

    def prepare_latents(
        self, batch_size: int, num_channels_latents: int, height: int, width: int, dtype: torch.dtype, device: Any,
        generator: Generator, latents: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Return noise, or `latents`, (B, C, h, w) in the scale of the first timestep that `scheduler` has."""
        shape = batch_size, num_channels_latents, height // self.vae_scale_factor, width // self.vae_scale_factor
        return self._prepare_noise(shape, dtype, device, generator, latents) * self.scheduler.init_noise_sigma

    @staticmethod
    def _prepare_noise(
        shape: Sequence[int], dtype: torch.dtype, device: Any, generator: Generator, latents: Tensor | None
    ) -> Tensor:
        """Return `latents` or noise of `shape`. Raises InputError for a list of generators of another length."""
        import torch

        check_generators(generator, shape[0])
        noise = torch.from_numpy(draw_noise(shape, noise_generators(generator))) if latents is None else latents
        return noise.to(device, dtype)

    # --- Images -----------------------------------------------------------------------------------------------------

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the images (B, 3, H, W), float32 in about -1..1, of final latents (B, C, h, w)."""
        import torch

        return torch.from_numpy(self.vae.to_pixels(as_array(latents)))

    def _finish(self, latents: np.ndarray, request: Request) -> PipelineOutput:
        """Return the output of final latents: decoded, checked for safety and converted to the requested type."""
        if request.output_type == "latent":
            return PipelineOutput(as_tensor(latents))
        images, flags = self.vae.to_pixels(latents), None
        check_finite(images, "vae_decoder")
        if self.safety_checker and "safety_checker" in self.models:
            pixels = to_output_type(images, "np")
            checked, flags = safety.check(self.models["safety_checker"], self.folder, pixels)
            images = checked.transpose(0, 3, 1, 2) * 2 - 1
            if any(flags):
                log.warning("the safety checker flagged %d of %d images: they are black.", sum(flags), len(flags))
        return PipelineOutput(to_output_type(images, request.output_type), flags)


def cutoff_timestep(timetable: Any, share: float) -> int:
    """Return the timestep at which `share` of the noise of training is removed: a base model ends there."""
    return round(timetable.trained - share * timetable.trained)
