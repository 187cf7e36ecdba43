"""Prompt -> image over ONNX components, with diffusers' argument names, schedulers and random numbers.

Here is what all pipelines share, and text to image; `pipeline.image_to_image` starts from a picture. Latents are drawn
and stepped by the scheduler in float32 torch on the CPU, whatever the precision of the graphs, so one seed means one
image on every provider and precision, and the image that diffusers draws from the same seed.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image

from sd_ort.core.errors import InputError
from sd_ort.core.folder import read_index
from sd_ort.core.progress import step_bar
from sd_ort.family.conditioning import (
    guidance_embedding,
    latent_scale,
    open_tokenizer,
    text_encoders,
    text_length,
    token_ids,
)
from sd_ort.family.configs import component_config
from sd_ort.family.schedule import LinearSchedule, linear_schedule
from sd_ort.family.schedulers import make_scheduler, set_timesteps
from sd_ort.family.signatures import default_latents, latent_multiple, levels, time_ids_split
from sd_ort.pipeline import safety, tiling
from sd_ort.pipeline.arguments import check_numbers, check_seeds, check_text
from sd_ort.pipeline.denoiser import Control, Denoiser
from sd_ort.pipeline.device_loop import DeviceLoop, Drawing, Kept, check_finite
from sd_ort.pipeline.lora import LoraMethods
from sd_ort.runtime.components import Components
from sd_ort.runtime.providers import warn_once
from sd_ort.runtime.session import Model

log = logging.getLogger("sd_ort")
Prompt = str | Sequence[str]
Generator = torch.Generator | Sequence[torch.Generator | int] | int | None

# Called as callback(pipeline, step index, timestep, {"latents": Tensor}); may return {"latents": replacement}.
StepCallback = Callable[[Any, int, Any, dict[str, torch.Tensor]], dict[str, torch.Tensor] | None]


@dataclass
class PipelineOutput:
    """`images`: PIL images, or one array/tensor (B, H, W, 3) in 0..1 for "np", (B, C, h, w) latents for "latent".

    `nsfw_content_detected`: a flag an image, None without a safety checker.
    """

    images: Any
    nsfw_content_detected: list[bool] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Unpacks as diffusers' tuple does: images, flags."""
        return iter((self.images, self.nsfw_content_detected))

    def __getitem__(self, key: int | str) -> Any:
        """`output[0]` and `output["images"]`, as of diffusers' output."""
        return getattr(self, key) if isinstance(key, str) else tuple(self)[key]


@dataclass
class Conditioning:
    """What the UNet is told about the prompts: embeddings (B, S, C) and, for SDXL, further inputs by name (B, ...)."""

    embeddings: torch.Tensor
    added: dict[str, torch.Tensor] = field(default_factory=dict)

    def repeat(self, count: int) -> Conditioning:
        """Each prompt's row `count` times in a row, for several images a prompt."""
        return Conditioning(
            self.embeddings.repeat_interleave(count, 0),
            {name: value.repeat_interleave(count, 0) for name, value in self.added.items()},
        )

    def after(self, first: Conditioning) -> Conditioning:
        """`first`'s rows, then these: the order of classifier-free guidance (negative, positive)."""
        return Conditioning(
            torch.cat([first.embeddings, self.embeddings]),
            {name: torch.cat([first.added[name], value]) for name, value in self.added.items()},
        )


@dataclass
class Request:
    """The arguments that all pipelines take, checked: `batch` images of `height` x `width` pixels.

    `guidance` is None where nothing is guided, `told_guidance` the scale that a distilled UNet (LCM) is told instead.
    `scheduler` is this call's own: schedulers keep state, and a pipeline may draw in several threads.
    """

    prompts: list[str]
    negative: Prompt | None
    images_per_prompt: int
    height: int
    width: int
    steps: int
    guidance: float | None
    eta: float
    generator: torch.Generator | list[torch.Generator] | None
    output_type: str
    callback: StepCallback | None
    progress: bool
    scheduler: Any
    told_guidance: float | None = None

    @property
    def batch(self) -> int:
        return len(self.prompts) * self.images_per_prompt


class StableDiffusionPipeline(LoraMethods):
    """Text to image with SD 1.x, 2.x and SDXL pipeline folders. Make one with `from_pretrained`.

    One pipeline may be called in several threads: on a CPU they draw at once, on a GPU they take turns, since all
    sessions and captured graphs share one stream and its buffers.
    """

    # Classes in a model_index.json that can be run: diffusers' and Optimum's names.
    KINDS = re.compile(r"(StableDiffusion(XL)?(ControlNet)?|LatentConsistencyModel)(Img2Img|Inpaint)?Pipeline$")
    NEEDS: tuple[str, ...] = ("unet", "vae_decoder")
    SEPARATE = True  # whether the text encoders are components of their own

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
        """`scheduler`: diffusers'. The other options as in `from_pretrained`."""
        self.folder = folder
        self.models = models
        self.scheduler = scheduler
        self.vae_tiling, self.vae_slicing, self.safety_checker = vae_tiling, vae_slicing, safety_checker
        self.device_loop = models.device != "cpu" if device_loop is None else device_loop
        self.device = DeviceLoop(models)
        self.unet_config = component_config(folder, "unet", required=True)
        self.vae_config = component_config(folder, "vae_decoder", required=True)
        self.vae_scale_factor = 2 ** (levels(self.vae_config) - 1)
        self.index = read_index(folder)
        self.is_xl = self.unet_config.get("addition_embed_type") == "text_time"
        names = text_encoders(self.index)
        self.text_encoders = [
            (open_tokenizer(folder, name.replace("text_encoder", "tokenizer")), name) for name in names
        ]
        self.image_processor = VaeImageProcessor(vae_scale_factor=self.vae_scale_factor, do_convert_rgb=True)

    @classmethod
    def from_pretrained(
        cls,
        folder: Path | str,
        provider: str = "cpu",
        scheduler: Any = None,
        *,
        low_memory: bool = False,
        vae_tiling: bool = False,
        vae_slicing: bool = False,
        safety_checker: bool = True,
        device_loop: bool | None = None,
        graph: bool | None = None,
        **session_options: Any,
    ) -> Any:
        """Load a pipeline folder on a provider ("cpu", "cuda", "rocm", "migraphx", or ours: "hip", "sdcuda").

        `scheduler`: None for the folder's own, a diffusers class name or short form ("EulerDiscreteScheduler",
        "euler"), or a scheduler object. `low_memory`: open a component when its turn comes and drop the one before.
        `vae_tiling`: encode and decode images larger than the model's own in overlapping tiles; `vae_slicing`: one
        image of a batch after the other. `safety_checker`: black out what the folder's safety checker flags, if it
        has one. `device_loop`: keep latents, guidance and scheduler on the device (see `pipeline.device_loop`); None
        for doing so on a GPU. `graph`: capture the UNet's runs as CUDA or HIP graphs; None for where the provider can,
        with a warning for what it cannot; False for never; True fails where it cannot. `session_options`: those of
        `runtime.session.create_session` (threads, allow_fallback, tuning, library, profile).

        Raises InputError for a folder, component or scheduler that cannot be used, ProviderError for a provider that
        is not installed or not really used.
        """
        folder = Path(folder)
        models = Components(folder, provider, low_memory=low_memory, graph=graph, **session_options)
        index = read_index(folder)
        kind = str(index.get("_class_name", ""))
        if not cls.KINDS.search(kind):
            raise InputError(f"{folder} holds a {kind or 'pipeline without a class'}: give a Stable Diffusion folder.")
        needed = [*(text_encoders(index) if cls.SEPARATE else ()), *cls.NEEDS]
        models.require(*needed)
        chosen = make_scheduler(folder, scheduler)
        pipeline = cls(
            folder,
            models,
            chosen,
            vae_tiling=vae_tiling,
            vae_slicing=vae_slicing,
            safety_checker=safety_checker,
            device_loop=device_loop,
        )
        pipeline._check_unet()
        for name in needed if not low_memory else ():
            models[name]  # opened now, so that the first image takes no longer than the second
        return pipeline

    def reopen(self) -> None:
        """Let go of captured graphs and buffers of sessions that were closed."""
        self.device = DeviceLoop(self.models)

    @property
    def unet(self) -> Model:
        """The UNet's session, in a hoisted folder that of its every-step graph."""
        return self.models["unet"]

    @unet.setter
    def unet(self, model: Model) -> None:
        self.models["unet"] = model

    @property
    def vae_decoder(self) -> Model:
        return self.models["vae_decoder"]

    @vae_decoder.setter
    def vae_decoder(self, model: Model) -> None:
        self.models["vae_decoder"] = model

    @property
    def default_size(self) -> int:
        """Height and width in pixels of the images the model was trained on."""
        return default_latents(self.unet_config) * self.vae_scale_factor

    @property
    def size_multiple(self) -> int:
        """Heights and widths in pixels must be multiples of this, or the UNet's skip connections do not line up."""
        return self.vae_scale_factor * latent_multiple(self.unet_config)

    @property
    def latent_channels(self) -> int:
        return int(self.vae_config.get("latent_channels", 4))

    def __call__(
        self,
        prompt: Prompt,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 50,
        guidance_scale: float = 7.5,
        negative_prompt: Prompt | None = None,
        num_images_per_prompt: int = 1,
        eta: float = 0.0,
        generator: Generator = None,
        latents: torch.Tensor | np.ndarray | None = None,
        output_type: str = "pil",
        callback_on_step_end: StepCallback | None = None,
        progress: bool = True,
        control_image: Any = None,
        controlnet_conditioning_scale: float = 1.0,
    ) -> PipelineOutput:
        """Draw `num_images_per_prompt` images for each prompt; arguments mean what they mean in diffusers.

        `height`, `width`: pixels, multiples of `size_multiple` (64 in SD 1.5). `guidance_scale`: 1 or less turns
        guidance off. `generator`: a torch.Generator or an integer seed, a list of one per image, or None for torch's
        global one.
        `latents`: (B, C, height/8, width/8) standard normal noise instead of drawn noise. `output_type`: "pil", "np"
        (float32, (B, H, W, 3), 0..1), "pt" ((B, 3, H, W), 0..1) or "latent" (before scaling by the VAE's factor).
        `control_image`: PIL image(s) for the folder's ControlNet, one for all images or one a prompt.

        Raises InputError for sizes, prompts, images or counts that do not fit together.
        """
        request = self._request(
            prompt, negative_prompt, num_images_per_prompt, height or self.default_size, width or self.default_size,
            num_inference_steps, guidance_scale, eta, generator, output_type, callback_on_step_end, progress,
        )  # fmt: skip
        return self._draw(request, latents, control_image, controlnet_conditioning_scale)

    def _draw(self, request: Request, latents: Any, control_image: Any, control_scale: float) -> PipelineOutput:
        """Text to image; what is not in `request` as `__call__` got it."""
        conditioning = self._condition(request)
        set_timesteps(request.scheduler, request.steps)
        timesteps = request.scheduler.timesteps
        control = self._control(request, control_image, control_scale, len(timesteps))
        noise = self._noise(request, latents) * request.scheduler.init_noise_sigma
        return self._sample(noise, timesteps, conditioning, request, control)

    # --- Text -------------------------------------------------------------------------------------------------------

    def encode(self, prompts: Sequence[str], height: int, width: int, *, negative: bool = False) -> Conditioning:
        """Prompts (B strings) -> conditioning with float32 embeddings (B, S, C); warns of what a prompt loses.

        SDXL concatenates both encoders' penultimate layers on C and adds the second's pooled `text_embeds` (B, D)
        and `time_ids` (B, 6): original size, crop corner, target size, each (height, width). The refiner has one
        encoder, and (B, 5): an aesthetic score, low for a `negative` prompt, instead of the target size.
        """
        hidden: list[torch.Tensor] = []
        added: dict[str, torch.Tensor] = {}
        for tokenizer, name in self.text_encoders:
            tokens = token_ids(tokenizer, prompts, text_length(self.folder, name, tokenizer))
            outputs = self.models[name](input_ids=tokens)
            hidden.append(_float(outputs["hidden_states" if self.is_xl else "last_hidden_state"]))
            check_finite(hidden[-1].numpy(), name)
            if "text_embeds" in outputs:
                added["text_embeds"] = _float(outputs["text_embeds"])
        if self.is_xl:
            score = 2.5 if negative else 6.0
            last: list[float] = [height, width] if time_ids_split(self.unet_config)[1] == 6 else [score]
            ids: list[float] = [height, width, 0, 0, *last]
            added["time_ids"] = torch.tensor([ids] * len(prompts), dtype=torch.float32)
        return Conditioning(torch.cat(hidden, -1), added)

    def _condition(self, request: Request) -> Conditioning:
        """Conditioning of all rows: with guidance 2B, negative first."""
        size = request.height, request.width
        positive = self.encode(request.prompts, *size).repeat(request.images_per_prompt)
        if request.told_guidance is not None:
            told = guidance_embedding(request.told_guidance, self.unet_config["time_cond_proj_dim"])
            positive.added["timestep_cond"] = told.repeat(request.batch, 1)
        if request.guidance is None:
            return positive
        negative = self._negative(request.negative, len(request.prompts), *size)
        return positive.after(negative.repeat(request.images_per_prompt))

    def _negatives(self, negative: Prompt | None, count: int) -> list[str]:
        """One negative prompt a prompt, empty if there is none."""
        negatives = [negative or ""] * count if negative is None or isinstance(negative, str) else list(negative)
        if len(negatives) != count:
            raise InputError(f"{len(negatives)} negative prompts for {count} prompts: give one, or one a prompt.")
        return negatives

    def _zero_negative(self, negative: Prompt | None) -> bool:
        """Whether the unconditional rows are zeros, as SDXL was trained, and not those of an empty prompt."""
        return self.is_xl and negative is None and bool(self.index.get("force_zeros_for_empty_prompt", True))

    def _negative(self, negative: Prompt | None, count: int, height: int, width: int) -> Conditioning:
        conditioning = self.encode(self._negatives(negative, count), height, width, negative=True)
        if self._zero_negative(negative):
            conditioning.embeddings = torch.zeros_like(conditioning.embeddings)
            conditioning.added["text_embeds"] = torch.zeros_like(conditioning.added["text_embeds"])
        return conditioning

    # --- Images -----------------------------------------------------------------------------------------------------

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents (B, C, h, w) as the scheduler leaves them -> images (B, 3, H, W), float32, about -1..1."""
        mean, factor = latent_scale(self.vae_config)
        scaled = latents * factor + mean

        def run(part: np.ndarray) -> np.ndarray:
            return self.vae_decoder(latent_sample=part)["sample"]

        return _float(self._tiles(run, scaled.numpy(), self.tile // self.vae_scale_factor, self.tile))

    @property
    def tile(self) -> int:
        """Side of a VAE tile in pixels: the size of the images the VAE was trained on."""
        return int(self.vae_config.get("sample_size") or 512)

    def _tiles(self, run: tiling.Run, x: np.ndarray, tile: int, tile_out: int) -> np.ndarray:
        """`run` on all of x (B, C, H, W), or as `vae_tiling` and `vae_slicing` say."""

        def one(part: np.ndarray) -> np.ndarray:
            return tiling.tiled(run, part, tile, tile_out) if self.vae_tiling else run(part)

        return tiling.sliced(one, x) if self.vae_slicing else one(x)

    def _finish(self, latents: torch.Tensor, request: Request) -> PipelineOutput:
        """Latents as the scheduler leaves them -> what the caller asked for."""
        if request.output_type == "latent":
            return PipelineOutput(latents)
        images, flags = self.decode(latents), None
        check_finite(images.numpy(), "vae_decoder")
        if self.safety_checker and "safety_checker" in self.models:
            pixels = (images / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()
            checked, flags = safety.check(self.models["safety_checker"], self.folder, pixels)
            images = torch.from_numpy(checked).permute(0, 3, 1, 2) * 2 - 1
            if any(flags):
                log.warning("the safety checker flagged %d of %d images: they are black.", sum(flags), len(flags))
        return PipelineOutput(self.image_processor.postprocess(images, request.output_type), flags)

    # --- Arguments --------------------------------------------------------------------------------------------------

    def _request(
        self,
        prompt: Prompt,
        negative: Prompt | None,
        images: int,
        height: int,
        width: int,
        steps: int,
        guidance: float,
        eta: float,
        generator: Generator,
        output_type: str,
        callback: StepCallback | None,
        progress: bool,
    ) -> Request:
        """The arguments, checked; raises InputError for what does not fit together."""
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        if not prompts:
            raise InputError("no prompt was given: pass a string or a list of strings.")
        factor = self.size_multiple
        check_text(prompts)
        check_text([negative] if isinstance(negative, str) else negative or [])
        check_numbers(height, width, len(prompts) * images if images > 0 else 1, guidance_scale=guidance, eta=eta)
        if height % factor or width % factor or height < factor or width < factor:
            raise InputError(f"height {height} and width {width} must be multiples of {factor}.")
        if steps < 1 or images < 1:
            raise InputError("num_inference_steps and num_images_per_prompt must be 1 or more.")
        if steps > (most := self.scheduler.config.num_train_timesteps):
            raise InputError(f"{steps} steps are more than the {most} this model was trained with.")
        if output_type not in ("pil", "np", "pt", "latent"):
            raise InputError(f"output_type {output_type!r} is unknown: use pil, np, pt or latent.")
        batch = len(prompts) * images
        drawn_from = _generators(generator, batch)
        told = guidance if self.unet_config.get("time_cond_proj_dim") else None
        scale = guidance if guidance > 1 and told is None else None
        return Request(
            prompts, negative, images, height, width, steps, scale, eta, drawn_from, output_type, callback, progress,
            copy.deepcopy(self.scheduler), told,
        )  # fmt: skip

    def _check_unet(self) -> None:
        """Raise InputError for a UNet of another kind of pipeline."""
        channels = self.unet_config.get("in_channels", 4)
        if channels != self.latent_channels:
            raise InputError(
                f"{self.folder} has a UNet of {channels} channels, for inpainting: give an image and a mask "
                "(--image, --mask), or use StableDiffusionInpaintPipeline."
            )

    def _control(self, request: Request, image: Any, scale: float, steps: int) -> Control | None:
        """The ControlNet's image for all rows, or None without one."""
        if image is None:
            return None
        processor = VaeImageProcessor(self.vae_scale_factor, do_convert_rgb=True, do_normalize=False)
        shown = processor.preprocess(image, height=request.height, width=request.width).float()
        shown = self._for_batch(shown, request, "control images")
        rows = shown if request.guidance is None else torch.cat([shown, shown])
        return Control(rows, [scale] * steps)

    def _for_batch(self, x: torch.Tensor, request: Request, what: str) -> torch.Tensor:
        """One row for all images, or one a prompt, or one an image -> one an image."""
        if len(x) == request.batch:
            return x
        if len(x) not in (1, len(request.prompts)):
            raise InputError(f"{len(x)} {what} for {len(request.prompts)} prompts: give one, or one a prompt.")
        return x.repeat_interleave(request.batch // len(x), 0)

    def _latent_shape(self, request: Request) -> tuple[int, int, int, int]:
        side = self.vae_scale_factor
        return request.batch, self.latent_channels, request.height // side, request.width // side

    def _noise(self, request: Request, given: Any = None) -> torch.Tensor:
        """Standard normal noise (B, C, h, w), float32; drawn as diffusers draws it, or the given one, checked."""
        shape = self._latent_shape(request)
        if given is None:
            return randn_tensor(shape, generator=request.generator, device=torch.device("cpu"), dtype=torch.float32)
        noise = torch.as_tensor(given, dtype=torch.float32)
        if tuple(noise.shape) != shape:
            raise InputError(f"latents of shape {tuple(noise.shape)} were given where {shape} are needed.")
        return noise

    # --- Sampling ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _sample(
        self,
        latents: torch.Tensor,
        timesteps: torch.Tensor,
        conditioning: Conditioning,
        request: Request,
        control: Control | None = None,
        *,
        channels: torch.Tensor | None = None,
        kept: Kept | None = None,
    ) -> PipelineOutput:
        """From the first latents to what the caller asked for, on the device or on the host.

        `channels` (B, C', h, w) go behind the latents' channels, unscaled: the mask and the masked picture of an
        inpainting UNet. `kept`: what every step leaves of a picture.
        """
        told = {"encoder_hidden_states": conditioning.embeddings, **conditioning.added}
        schedule = None if control is not None else self._device_schedule(request, timesteps)
        if schedule is None:
            denoiser = Denoiser(self.models, told, timesteps, control)
            drawn = self._denoise(latents, timesteps, denoiser, request, channels, kept)
            check_finite(drawn.numpy(), "unet")
            return self._finish(drawn, request)
        if "controlnet" in self.models:
            raise InputError("this UNet was exported for a ControlNet: give a control_image (--control-image).")
        checked = self.safety_checker and "safety_checker" in self.models
        whole = request.output_type == "pil" and not (checked or self.vae_tiling or self.vae_slicing)
        mean, factor = latent_scale(self.vae_config)
        draws = [self._noise(request).numpy() for _ in range(schedule.draws)]
        made = self.device.run(
            Drawing(
                latents.numpy(),
                {name: value.numpy() for name, value in told.items()},
                schedule,
                guidance=request.guidance,
                draws=np.stack(draws) if draws else None,
                channels=None if channels is None else channels.numpy(),
                kept=kept,
                decode=(factor.numpy(), mean.numpy()) if whole and not self.models.low_memory else None,
                progress=request.progress,
            )
        )
        if made.dtype == np.uint8:
            return PipelineOutput([Image.fromarray(picture) for picture in made])
        return self._finish(torch.from_numpy(made), request)

    def _denoise(
        self,
        latents: torch.Tensor,
        timesteps: torch.Tensor,
        denoiser: Denoiser,
        request: Request,
        channels: torch.Tensor | None,
        kept: Kept | None,
    ) -> torch.Tensor:
        """The sampling loop on the host. With guidance the UNet sees 2B rows: negative, then positive."""
        scheduler, options = request.scheduler, self._step_options(request)
        with step_bar(timesteps, request.progress) as bar:
            for index, timestep in enumerate(bar):
                sample = scheduler.scale_model_input(latents, timestep)
                if channels is not None:
                    sample = torch.cat([sample, channels], 1)
                if request.guidance is None:
                    noise = denoiser(index, sample)
                else:
                    negative, positive = denoiser(index, torch.cat([sample, sample])).chunk(2)
                    noise = negative + request.guidance * (positive - negative)
                latents = scheduler.step(noise, timestep, latents, **options).prev_sample
                if kept is not None:
                    latents = torch.from_numpy(kept.after_step(latents.numpy(), index))
                if request.callback is not None:
                    changed = request.callback(self, index, timestep, {"latents": latents}) or {}
                    latents = changed.get("latents", latents)
        return latents

    def _device_schedule(self, request: Request, timesteps: torch.Tensor) -> LinearSchedule | None:
        """What the loop on the device needs of the scheduler; None where the loop has to run on the host."""
        if not self.device_loop or request.callback is not None:
            return None
        try:
            return linear_schedule(request.scheduler, timesteps, eta=request.eta, draws=True)
        except InputError as error:
            warn_once(f"latents go through the host at every step: {error}")
            return None

    def _step_options(self, request: Request) -> dict[str, Any]:
        """What this scheduler's step takes of `eta` (DDIM) and `generator` (ancestral and SDE schedulers)."""
        takes = inspect.signature(request.scheduler.step).parameters
        options = {"eta": request.eta, "generator": request.generator}
        return {name: value for name, value in options.items() if name in takes}


def _float(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).float()


def _generators(given: Generator, batch: int) -> torch.Generator | list[torch.Generator] | None:
    """What diffusers draws noise with: seeds become generators. Raises InputError for a list of another length."""
    if given is None or isinstance(given, torch.Generator):
        return given
    if isinstance(given, int):
        return _seeded(given)
    if len(given) != batch:
        raise InputError(f"{len(given)} generators for {batch} images: give one, or one per image.")
    return [_seeded(each) if isinstance(each, int) else each for each in given]


def _seeded(seed: int) -> torch.Generator:
    check_seeds(seed, 1)
    return torch.Generator().manual_seed(seed)
