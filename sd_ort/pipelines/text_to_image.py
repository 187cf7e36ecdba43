"""Prompt -> image over ONNX components, with diffusers' argument names, schedulers and random numbers.

Here is what all pipelines share, and text to image; `pipeline.image_to_image` starts from a picture. Latents are drawn
and stepped by the scheduler in float32 torch on the CPU, whatever the precision of the graphs, so one seed means one
image on every provider and precision, and the image that diffusers draws from the same seed.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sd_ort.checkpoints import schedule_cache
from sd_ort.checkpoints.conditioning import text_encoders
from sd_ort.checkpoints.configs import component_config, scheduler_config
from sd_ort.checkpoints.generation_defaults import generation_defaults
from sd_ort.checkpoints.schedulers import make_scheduler, set_timesteps
from sd_ort.checkpoints.signatures import default_latents, latent_multiple
from sd_ort.checkpoints.unet_inputs import is_sdxl
from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import check_component, read_index
from sd_ort.core.progress import announce
from sd_ort.pipelines import controlnet_inputs, safety
from sd_ort.pipelines.controlnet_inputs import Control
from sd_ort.pipelines.device.guidance_split import open_loop
from sd_ort.pipelines.device_placement import Devices
from sd_ort.pipelines.diffusers_compat import DiffusersMethods, loading_options
from sd_ort.pipelines.images import as_array, finished, readable
from sd_ort.pipelines.ip_adapter import IpAdapterMethods
from sd_ort.pipelines.lora_methods import LoraMethods
from sd_ort.pipelines.noise import draw_noise, sources
from sd_ort.pipelines.output import PipelineOutput
from sd_ort.pipelines.request import PICTURES, Prompt, Request, check_size, request
from sd_ort.pipelines.sampling import Sampling
from sd_ort.pipelines.sampling_job import check_finite
from sd_ort.pipelines.text import Texts
from sd_ort.pipelines.textual_inversion import EmbeddingMethods
from sd_ort.pipelines.vae import Vae
from sd_ort.runtime.components import Components
from sd_ort.runtime.provider_choice import AUTO, provider_for

if TYPE_CHECKING:
    import torch

log = logging.getLogger("sd_ort")


class StableDiffusionPipeline(LoraMethods, EmbeddingMethods, IpAdapterMethods, DiffusersMethods, Sampling):
    """Text to image with SD 1.x, 2.x and SDXL pipeline folders. Make one with `from_pretrained`.

    One pipeline may be called in several threads: on a CPU they draw at once, on a GPU they take turns, since all
    sessions and captured graphs share one stream and its buffers.
    """

    # Classes in a model_index.json that can be run: diffusers' and Optimum's names.
    KINDS = re.compile(r"(StableDiffusion(XL)?(ControlNet)?|LatentConsistencyModel)(Img2Img|Inpaint)?Pipeline$")
    NEEDS: tuple[str, ...] = ("unet", "vae_decoder")
    SEPARATE = True  # whether the text encoders are components of their own
    INPAINT = False
    LEAVES: tuple[str, ...] = tuple(PICTURES)  # arguments that other pipelines take

    def __init__(
        self,
        folder: Path,
        models: Components,
        scheduler: Any,
        *,
        vae_tiling: bool = False,
        vae_slicing: bool = False,
        safety_checker: bool = True,
        device_loop: bool | None = None,
    ) -> None:
        """`scheduler`: diffusers', None for the folder's own. The other options as in `from_pretrained`."""
        self.folder = folder
        self.models = models
        self._scheduler = scheduler
        self._plans: dict[tuple[int, float], schedule_cache.Plan] = {}
        self._planned = scheduler is None  # the folder's own, whose schedules an earlier process may have kept
        self.safety_checker = safety_checker
        wanted = models.device != "cpu" or models.partner is not None
        self.device_loop = wanted if device_loop is None else device_loop
        self.loop = open_loop(models)
        self.index = read_index(folder)
        self.unet_config = component_config(folder, "unet", required=True)
        self.is_xl = is_sdxl(self.unet_config)
        config = component_config(folder, "vae_decoder", required=True)
        self.vae = Vae(models, config, tiling=vae_tiling, slicing=vae_slicing)
        self.vae_scale_factor = self.vae.scale_factor
        self.texts = Texts(folder, models, self.index, self.unet_config)
        if self.device_loop and self.SEPARATE:
            self.texts.fix_length()

    @classmethod
    def from_pretrained(
        cls,
        folder: Path | str,
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
        unet_on: Sequence[int] | None = None,
        decode_on: int | None = None,
        **options: Any,
    ) -> Any:
        """Load a pipeline folder on a provider ("cpu", "cuda", "rocm", "migraphx", or ours: "hip", "sdcuda"); "auto"
        is the best one that runs here, said on stderr.

        `scheduler`: None for the folder's own, a diffusers class name or short form ("EulerDiscreteScheduler",
        "euler"), or a scheduler object. `low_memory`: open a component when its turn comes and drop the one before.
        `vae_tiling`: encode and decode images larger than the model's own in overlapping tiles; `vae_slicing`: one
        image of a batch after the other. `safety_checker`: black out what the folder's safety checker flags, if it
        has one. `device_loop`: keep latents, guidance and scheduler on the device (see `pipeline.device_loop`); None
        for doing so on a GPU. `graph`: capture the UNet's runs as CUDA or HIP graphs; None for where the provider can,
        with a warning for what it cannot; False for never; True fails where it cannot. `controlnet`: a folder whose
        ControlNet is used instead of this folder's own, or several. `split_guidance`: two devices, such as (0, 1), of
        which one predicts the negative and one the positive half of classifier-free guidance (`guidance_split`).
        `unet_on`: the devices of a UNet that is too large for one: each holds a range of its layers.
        `decode_on`: the device of the VAE decoder, for `draw_each`. `options`: `runtime.session.create_session`'s
        (threads, allow_fallback, tuning, library, profile).

        Raises InputError for a folder, component, scheduler or option that cannot be used, ProviderError for a
        provider that is not installed or not really used.
        """
        folder = Path(folder)
        choice = provider_for(folder, provider)
        if choice.reason:
            announce(choice.line)
        provider = choice.provider
        devices = Devices(split_guidance, unet_on, decode_on)
        devices.check("unet" in cls.NEEDS, low_memory, device_loop)
        session_options = devices.options(provider, loading_options(options, folder))
        controlnet = [controlnet] if isinstance(controlnet, (str, Path)) else controlnet
        nets = {f"controlnet_{i + 1}" if i else "controlnet": Path(net) for i, net in enumerate(controlnet)}
        models = Components(folder, provider, low_memory=low_memory, graph=graph, others=nets, **session_options)
        index = read_index(folder)
        kind = str(index.get("_class_name", ""))
        if not cls.KINDS.search(kind):
            raise InputError(f"{folder} holds a {kind or 'pipeline without a class'}: give a Stable Diffusion folder.")
        needed = [*(text_encoders(index) if cls.SEPARATE else ()), *cls.NEEDS, *nets]
        models.require(*needed)
        devices.place(models)
        pipeline = cls(
            folder,
            models,
            None if scheduler is None else make_scheduler(folder, scheduler),
            vae_tiling=vae_tiling,
            vae_slicing=vae_slicing,
            safety_checker=bool(safety_checker),
            device_loop=device_loop,
        )
        pipeline._check_unet()
        if not (pipeline.device_loop and schedule_cache.known(pipeline._scheduler_config)):
            assert pipeline.scheduler  # diffusers says now whether it can drive this UNet
        if not low_memory:  # opened now, so that the first image takes no longer than the second
            models.open([*needed, *(n for n in models if n == "image_encoder" or n.startswith("unet_"))])
            if models.partner is not None:
                models.partner.open([name for name in models if name == "unet" or name.startswith("unet_")])
        return pipeline

    @cached_property
    def image_processor(self) -> Any:
        """diffusers', for pictures that are given."""
        from diffusers.image_processor import VaeImageProcessor

        return VaeImageProcessor(
            self.vae_scale_factor, vae_latent_channels=self.vae.latent_channels, do_convert_rgb=True
        )

    @cached_property
    def _scheduler_config(self) -> dict[str, Any]:
        return scheduler_config(self.folder)

    @property
    def scheduler(self) -> Any:
        """diffusers' scheduler: the folder's own, loaded when it is first asked for, or the one that was given."""
        if self._scheduler is None:
            self._scheduler = make_scheduler(self.folder)
        return self._scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        self._scheduler, self._planned = scheduler, False

    def weights_changed(self, closed: bool) -> None:
        """Release captured graphs and buffers if sessions were closed; else mark cached outputs as outdated."""
        if closed:
            self.loop = open_loop(self.models)
        else:
            self.loop.on_weights_updated()

    @property
    def default_size(self) -> int:
        """Height and width in pixels of the images the model was trained on."""
        return default_latents(self.unet_config) * self.vae_scale_factor

    @property
    def size_multiple(self) -> int:
        """Heights and widths in pixels that are multiples of this halve evenly at every level of the UNet; most graphs
        can draw no others."""
        return self.vae_scale_factor * latent_multiple(self.unet_config)

    @cached_property
    def _doubles(self) -> bool:
        """Whether only sizes that halve evenly can be drawn (`graphs.upsampling`)."""
        from sd_ort.graphs.load import load
        from sd_ort.graphs.upsampling import requires_even_sizes

        return requires_even_sizes(load(check_component(self.folder, "unet")))

    # --- Drawing ----------------------------------------------------------------------------------------------------

    def __call__(
        self,
        prompt: Prompt | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int | None = None,
        **arguments: Any,
    ) -> Any:
        """Draw `num_images_per_prompt` images for each prompt. `arguments`: all of `pipeline.request.Request`, which
        mean what they mean in diffusers; `image` is the `control_image`, as in its ControlNet pipelines.

        Returns a `PipelineOutput`, a tuple without `return_dict`. Raises InputError for what does not fit together.
        """
        asked = self._request(
            prompt=prompt, height=height, width=width, num_inference_steps=num_inference_steps, **arguments
        )
        asked.control_image = asked.image if asked.control_image is None else asked.control_image
        asked.image = None
        return self._answer(asked, (asked.height or self.default_size, asked.width or self.default_size))

    def draw_each(self, calls: Iterable[Mapping[str, Any]]) -> Iterator[PipelineOutput]:
        """What each call, the arguments of `__call__`, draws, in their order. With `decode_on`, the latents of the next
        call are drawn while those of the one before are decoded: two devices are busy at once."""
        if "vae_decoder" not in self.models.elsewhere:
            yield from (self(**{**call, "return_dict": True}) for call in calls)
            return
        with ThreadPoolExecutor(1, "decode") as decoder:
            decoding: Future[PipelineOutput] | None = None
            for call in calls:
                try:
                    latents = self(**{**call, "output_type": "latent", "return_dict": True}).images.numpy()
                except Exception:
                    if decoding is not None:
                        yield decoding.result()  # which is drawn already
                    raise
                before, wanted = decoding, Request(output_type=call.get("output_type", "pil"))
                decoding = decoder.submit(self._finish, latents, wanted)
                if before is not None:
                    yield before.result()
            if decoding is not None:
                yield decoding.result()

    def _draw(self, request: Request) -> PipelineOutput:
        """What the call asks for, once it was checked."""
        conditioning = self._condition(request)
        plan = request.plan
        if plan is None:
            timesteps: Any = self._end(self._schedule(request), request)
            sigma = float(request.scheduler.init_noise_sigma)
            self._keep_plan(request, timesteps)
        else:
            timesteps, sigma = plan.timesteps, plan.initial
        noise = self._noise(request, request.latents) * np.float32(sigma)
        return self._sample(noise, timesteps, conditioning, request, self._controls(request, len(timesteps)))

    def _request(self, **arguments: Any) -> Request:
        return request(self._defaults, self.LEAVES, arguments)

    @property
    def _defaults(self) -> Mapping[str, Any]:
        """What stands for None, as in diffusers' pipeline of this kind and family."""
        steps, guidance = generation_defaults(self.folder, inpaint=self.INPAINT)
        return {"num_inference_steps": steps, "guidance_scale": guidance}

    def _answer(self, request: Request, size: tuple[int, int]) -> Any:
        """Check the rest of a request, draw, and give back what was asked for."""
        request.size = size
        config = self._scheduler_config if self._scheduler is None else self._scheduler.config
        request.check(config.get("num_train_timesteps", 1000))
        check_size(size, self.vae_scale_factor, self.size_multiple, lambda: self._doubles)
        if self._plannable(request):
            request.plan = self._plan(request.num_inference_steps, request.eta)
        if request.plan is None:
            request.scheduler = copy.deepcopy(self.scheduler)
        request.generator = sources(request.generator, torch_too=request.plan is None)
        scale = float(request.guidance_scale or 0.0)
        if self.unet_config.get("time_cond_proj_dim"):
            request.embedded_guidance = scale
        elif scale > 1:
            request.guidance = scale
        request.pictures = self.told_pictures(request)
        request.progress = request.progress and not self.progress_bar_config.get("disable", False)
        self.scale_loras((request.cross_attention_kwargs or {}).get("scale", 1.0))
        output = self._draw(request)
        return output if request.return_dict else (output.images,) if self.is_xl else tuple(output)

    def _plannable(self, request: Request) -> bool:
        """Whether a kept plan of the folder's own scheduler says all that this request needs of it."""
        asked = request.given() & {"timesteps", "sigmas", "original_inference_steps", "denoising_start",
                                   "denoising_end", "callback_on_step_end", "image", "control_image"}  # fmt: skip
        return self._planned and self.device_loop and not asked

    def _plan(self, steps: int, eta: float) -> schedule_cache.Plan | None:
        if (steps, eta) not in self._plans:
            found = schedule_cache.find(self._scheduler_config, steps, eta)
            if found is None:
                return None
            self._plans[steps, eta] = found
        return self._plans[steps, eta]

    def _keep_plan(self, request: Request, timesteps: torch.Tensor) -> None:
        """Keep what this request needs of the scheduler for later processes, if they could do with it."""
        config = self._scheduler_config
        if not self._plannable(request) or schedule_cache.find(config, request.num_inference_steps, request.eta):
            return
        schedule = self._device_schedule(request, timesteps)
        if schedule is not None:
            plan = schedule_cache.Plan(timesteps.numpy(), float(request.scheduler.init_noise_sigma), schedule)
            schedule_cache.remember(config, request.num_inference_steps, request.eta, plan)

    def _check_unet(self) -> None:
        """Raise InputError for a UNet of another kind of pipeline."""
        channels = self.unet_config.get("in_channels", 4)
        if channels != self.vae.latent_channels:
            raise InputError(
                f"{self.folder} has a UNet of {channels} channels, for inpainting: give an image and a mask "
                "(--image, --mask), or use StableDiffusionInpaintPipeline."
            )

    # --- Steps ------------------------------------------------------------------------------------------------------

    def _schedule(self, request: Request) -> torch.Tensor:
        """The scheduler's timesteps, all of them; their number becomes the request's."""
        given = {name: getattr(request, name) for name in ("timesteps", "sigmas", "original_inference_steps")}
        request.num_inference_steps = set_timesteps(request.scheduler, request.num_inference_steps, **given)
        timesteps: torch.Tensor = request.scheduler.timesteps
        return timesteps

    def _end(self, timesteps: torch.Tensor, request: Request) -> torch.Tensor:
        """Those before `denoising_end`. Raises InputError when none is left."""
        if request.denoising_end is None or request.denoising_end == 1:
            return timesteps
        kept = timesteps[timesteps >= cutoff(request.scheduler, request.denoising_end)]
        if not len(kept):
            raise InputError(f"denoising_end {request.denoising_end} leaves no step to draw: raise it.")
        return timesteps[: len(kept)]

    def _controls(self, request: Request, steps: int) -> list[Control]:
        if request.control_image is not None:
            request.control_image = readable(request.control_image, "control image")
        return controlnet_inputs.controls(request, controlnet_inputs.names(self.models), steps, self.vae_scale_factor)

    def _latent_shape(self, request: Request) -> tuple[int, int, int, int]:
        (height, width), side = request.size, self.vae_scale_factor
        return request.batch, self.vae.latent_channels, height // side, width // side

    def _noise(self, request: Request, given: Any = None) -> np.ndarray:
        """Standard normal noise (B, C, h, w), float32; drawn as diffusers draws it, or the given one, checked."""
        shape = self._latent_shape(request)
        if given is None:
            return draw_noise(shape, request.generator)
        noise = as_array(given)
        if noise.shape != shape:
            raise InputError(f"latents of shape {noise.shape} were given where {shape} are needed.")
        return noise

    # --- Images -----------------------------------------------------------------------------------------------------

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents (B, C, h, w) as the scheduler leaves them -> images (B, 3, H, W), float32, about -1..1."""
        import torch

        return torch.from_numpy(self.vae.to_pixels(as_array(latents)))

    def _finish(self, latents: np.ndarray, request: Request) -> PipelineOutput:
        """Latents as the scheduler leaves them -> what the caller asked for."""
        if request.output_type == "latent":
            import torch

            return PipelineOutput(torch.from_numpy(latents))
        images, flags = self.vae.to_pixels(latents), None
        check_finite(images, "vae_decoder")
        if self.safety_checker and "safety_checker" in self.models:
            pixels = finished(images, "np")
            checked, flags = safety.check(self.models["safety_checker"], self.folder, pixels)
            images = checked.transpose(0, 3, 1, 2) * 2 - 1
            if any(flags):
                log.warning("the safety checker flagged %d of %d images: they are black.", sum(flags), len(flags))
        return PipelineOutput(finished(images, request.output_type), flags)


def cutoff(scheduler: Any, share: float) -> int:
    """The timestep at which `share` of the noise, as trained, is gone: a base model stops there, a refiner begins."""
    trained = scheduler.config.num_train_timesteps
    return round(trained - share * trained)
