"""Arguments of a pipeline call under diffusers' names, checked before anything is loaded or generated.

`Request` is the one list of arguments: the pipelines' `__call__` hand on what they got, by name. What diffusers takes
and we do not is in `UNSUPPORTED_ARGUMENTS`, each with its reason.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.pipelines.arguments import check_numbers, check_seeds, check_text, check_types, is_integer

if TYPE_CHECKING:
    import torch
    from PIL import Image

Prompt = str | Sequence[str]
Generator: TypeAlias = "torch.Generator | Sequence[torch.Generator | int] | int | None"
Size = tuple[int, int]  # height, width in pixels, or top and left
# A PIL image, an array (H, W, 3) or (B, H, W, 3), a tensor (B, 3, H, W), both 0..1, latents (B, 4, h, w), or a list.
Picture: TypeAlias = "Image.Image | np.ndarray | torch.Tensor | Sequence[Any]"

# Called as callback(pipeline, step index, timestep, tensors by name); may return those that it changes.
StepCallback: TypeAlias = "Callable[[Any, int, Any, dict[str, Any]], dict[str, Any] | None]"

OUTPUT_TYPES = ("pil", "np", "pt", "uint8", "latent")

# Names of diffusers' that no pipeline takes here, and why.
UNSUPPORTED_ARGUMENTS = {
    "kwargs": "it only carries diffusers' old callback and callback_steps: use callback_on_step_end",
    "callback": "it is diffusers' old one: use callback_on_step_end",
    "callback_steps": "it belongs to diffusers' old callback: use callback_on_step_end",
    "pag_applied_layers": "it is an option of from_pretrained of the PAG pipelines",
}
# Names that only some pipelines take, what they do, and the pipelines.
_IMAGE = "changes an image: use StableDiffusion"
IMAGE_ARGUMENTS = {
    **dict.fromkeys(("strength", "denoising_start"), f"{_IMAGE}Img2ImgPipeline"),
    **dict.fromkeys(("mask_image", "masked_image_latents", "padding_mask_crop"), f"{_IMAGE}InpaintPipeline"),
}
PAG_ARGUMENTS = dict.fromkeys(("pag_scale", "pag_adaptive_scale"), "perturbs attention: use StableDiffusionPAGPipeline")


@dataclass
class Request:
    """The arguments of one call, under diffusers' names and with its meanings; None is diffusers' default.

    `height`, `width`: pixels, multiples of the pipeline's `size_multiple`. `guidance_scale`: 1 or less turns guidance
    off. `pag_scale`, `pag_adaptive_scale`: scale of perturbed attention guidance, and its decrease per timestep.
    `generator`: a torch.Generator or an integer seed, a list of one per image, or None for torch's global one.
    `latents`: (B, C, height/8, width/8) standard normal noise of the caller. `prompt_embeds` and its negative
    (N, S, C), `pooled_prompt_embeds` and its negative (N, D): in place of N prompts, or of their negatives.
    `prompt_syntax`: "plain", or "weights" for (word:1.3), [word], BREAK and long prompts (`pipeline.weighting`).
    `cross_attention_kwargs`: {"scale": s} weighs all LoRAs by s. `original_size`, `target_size` (height, width) and
    `crops_coords_top_left`, each with a negative: SDXL's sizes. `denoising_end`, `denoising_start`: part of the
    schedule, 0..1, where a base model leaves off and a refiner begins. `control_image`: for the folder's ControlNet,
    one for all images or one a prompt; with several ControlNets a list of such. `ip_adapter_image`: for the folder's
    IP-Adapter, for all images: an image, [image], or several as [[a, b]]; a tensor is what its feature extractor
    gives. `ip_adapter_image_embeds`: what `prepare_ip_adapter_image_embeds` gives instead. `output_type`: "pil", "np"
    (float32, (B, H, W, 3), 0..1), "pt" ((B, 3, H, W), 0..1), "uint8" (an array, (B, H, W, 3)) or "latent" (before
    scaling by the VAE's factor).
    """

    prompt: Prompt | None = None
    prompt_2: Prompt | None = None
    negative_prompt: Prompt | None = None
    negative_prompt_2: Prompt | None = None
    prompt_embeds: torch.Tensor | None = None
    negative_prompt_embeds: torch.Tensor | None = None
    pooled_prompt_embeds: torch.Tensor | None = None
    negative_pooled_prompt_embeds: torch.Tensor | None = None
    prompt_syntax: str = "plain"
    clip_skip: int | None = None
    cross_attention_kwargs: Mapping[str, float] | None = None

    height: int | None = None
    width: int | None = None
    num_images_per_prompt: int = 1
    original_size: Size | None = None
    crops_coords_top_left: Size = (0, 0)
    target_size: Size | None = None
    negative_original_size: Size | None = None
    negative_crops_coords_top_left: Size = (0, 0)
    negative_target_size: Size | None = None
    aesthetic_score: float = 6.0
    negative_aesthetic_score: float = 2.5

    num_inference_steps: int = 50
    original_inference_steps: int | None = None
    timesteps: Sequence[int] | None = None
    sigmas: Sequence[float] | None = None
    strength: float | None = None
    denoising_start: float | None = None
    denoising_end: float | None = None
    guidance_scale: float | None = None
    guidance_rescale: float = 0.0
    pag_scale: float = 0.0
    pag_adaptive_scale: float = 0.0
    eta: float = 0.0

    image: Picture | None = None
    mask_image: Picture | None = None
    masked_image_latents: torch.Tensor | None = None
    padding_mask_crop: int | None = None
    control_image: Any = None
    controlnet_conditioning_scale: float | Sequence[float] | None = None
    guess_mode: bool = False
    control_guidance_start: float | Sequence[float] = 0.0
    control_guidance_end: float | Sequence[float] = 1.0
    ip_adapter_image: Any = None
    ip_adapter_image_embeds: Any = None

    generator: Generator = None
    latents: torch.Tensor | np.ndarray | None = None
    output_type: str = "pil"
    return_dict: bool = True
    callback_on_step_end: StepCallback | None = None
    callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",)
    progress: bool = True

    # Found by `check` and by the pipeline.
    size: Size = field(init=False, default=(0, 0))
    count: int = field(init=False, default=1)  # prompts
    guidance: float | None = field(init=False, default=None)  # None where nothing is guided
    embedded_guidance: float | None = field(init=False, default=None)  # what a distilled UNet (LCM) reads instead
    is_perturbed: bool = field(init=False, default=False)  # whether the UNet reads perturbed rows behind the others
    unet: str = field(init=False, default="unet")  # key of the UNet in `Components`
    unet_on_device: bool = field(init=False, default=True)  # whether the loop on the device takes that UNet
    shallow_steps: Any = field(init=False, default=None)  # `ShallowSteps`; None if every step is a full one
    timetable: Any = field(init=False, default=None)  # the scheduler's, see `pipelines.scheduler`
    adapter_images: dict[str, np.ndarray] = field(init=False, default_factory=dict)  # inputs of the IP-Adapter

    @property
    def batch(self) -> int:
        """Images of this call."""
        return self.count * self.num_images_per_prompt

    @property
    def callback_tensors(self) -> Sequence[str]:
        """Names of the tensors that callback_on_step_end reads; diffusers' own callbacks know theirs."""
        return getattr(self.callback_on_step_end, "tensor_inputs", self.callback_on_step_end_tensor_inputs)

    @property
    def rows_per_image(self) -> int:
        """Rows that the UNet reads per image: negative, positive and perturbed, as far as there are such."""
        return 1 + (self.guidance is not None) + self.is_perturbed

    def non_default_arguments(self) -> set[str]:
        """Return the names of the arguments that differ from their defaults."""
        arguments = ((f.name, getattr(self, f.name), f.default) for f in fields(self) if f.init)
        return {name for name, value, default in arguments if value is not default and not _same(value, default)}

    @property
    def prompts(self) -> list[str]:
        """The first text encoder's prompts; [] where embeddings take their place."""
        return _listed(self.prompt)

    def per_prompt(self, texts: Prompt | None, what: str = "negative prompts") -> list[str]:
        """One text a prompt, empty if there is none. Raises InputError for another number of them."""
        listed = [texts or ""] * self.count if texts is None or isinstance(texts, str) else list(texts)
        if len(listed) != self.count:
            raise InputError(f"{len(listed)} {what} for {self.count} prompts: give one, or one a prompt.")
        return listed

    def check(self, trained_steps: int) -> None:
        """Check the arguments that no model is needed for, at heights and widths of `size`; sets `count`.

        Raises InputError for what does not fit together.
        """
        self.check_text()
        height, width = self.size
        images = self.num_images_per_prompt
        scales = {"guidance_scale": self.guidance_scale, "eta": self.eta, "guidance_rescale": self.guidance_rescale}
        check_numbers(height, width, self.batch if images > 0 else 1, **scales)
        if self.num_inference_steps < 1 or images < 1:
            raise InputError("num_inference_steps and num_images_per_prompt must be 1 or more.")
        if self.num_inference_steps > trained_steps:
            raise InputError(
                f"{self.num_inference_steps} steps are more than the {trained_steps} this model was trained with."
            )
        if self.output_type not in OUTPUT_TYPES:
            raise InputError(f"output_type {self.output_type!r} is unknown: use one of {', '.join(OUTPUT_TYPES)}.")
        if unknown := set(self.cross_attention_kwargs or ()) - {"scale"}:
            raise InputError(f"cross_attention_kwargs: {unknown.pop()!r} is unknown; 'scale' weighs the LoRAs.")
        for name in ("denoising_start", "denoising_end"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise InputError(f"{name} {value} is no part of the schedule between 0 and 1.")
        if self.denoising_start is not None and self.denoising_start >= (self.denoising_end or 1.0):
            raise InputError("denoising_start must lie before denoising_end.")
        check_generators(self.generator, self.batch)

    def check_text(self) -> None:
        """Check prompts and prompt embeddings, and set `count`. Raises InputError."""
        if (self.prompt is None) == (self.prompt_embeds is None):
            raise InputError("no prompt was given: pass a string, a list of strings, or prompt_embeds, one of them.")
        if self.prompt is None:
            assert self.prompt_embeds is not None
            self.count = len(self.prompt_embeds)
        else:
            self.count = len(self.prompts)
        if not self.count:
            raise InputError("no prompt was given: pass a string or a list of strings.")
        if self.negative_prompt is not None and self.negative_prompt_embeds is not None:
            raise InputError("negative_prompt and negative_prompt_embeds say the same: give one of them.")
        if self.prompt_syntax not in ("plain", "weights"):
            raise InputError(f"prompt_syntax {self.prompt_syntax!r} is unknown: use plain or weights.")
        if self.clip_skip is not None and self.clip_skip < 0:
            raise InputError(f"clip_skip {self.clip_skip} skips no layers: give 0 or more.")
        for texts in (self.prompt, self.prompt_2, self.negative_prompt, self.negative_prompt_2):
            check_text([texts] if isinstance(texts, str) else texts or [])


def check_size(size: Size, multiple: int) -> None:
    """Raise InputError for a height and width in pixels that are no multiples of `multiple`."""
    if any(length % multiple or length < multiple for length in size):
        raise InputError(f"height {size[0]} and width {size[1]} must be multiples of {multiple}.")


def request(defaults: Mapping[str, Any], leaves: Sequence[str], arguments: Mapping[str, Any]) -> Request:
    """The request of a call; `defaults` take the place of None. `leaves`: names that this pipeline does not take.

    Raises InputError for a name that is rejected or unknown, with what to do.
    """
    parameters = {f.name: f for f in fields(Request) if f.init}
    for name, value in arguments.items():
        if name in UNSUPPORTED_ARGUMENTS and value is not None:
            raise InputError(f"{name} is not taken: {UNSUPPORTED_ARGUMENTS[name]}.")
        if name in leaves and value is not None:
            raise InputError(f"{name} {(IMAGE_ARGUMENTS | PAG_ARGUMENTS)[name]}.")
        if name not in parameters and name not in UNSUPPORTED_ARGUMENTS:
            near = difflib.get_close_matches(name, parameters, 1)
            raise InputError(f"{name} is no argument of a pipeline{f': {near[0]} is' if near else ''}.")
    values = {name: value for name, value in arguments.items() if name in parameters}
    for name, value in defaults.items():
        if values.get(name) is None:
            values[name] = value
    for name, value in values.items():  # in diffusers, None stands for the default
        if value is None and parameters[name].default not in (None, MISSING):
            values[name] = parameters[name].default
    request = Request(**values)
    check_types(request)
    return request


def _listed(texts: Prompt | None) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts or ())


def _same(value: Any, default: Any) -> bool:
    return isinstance(value, (str, int, float, bool, tuple)) and value == default


def check_generators(generator: Any, batch: int) -> None:
    """Raise InputError for a seed that torch does not take, and for a list of another length."""
    if isinstance(generator, Sequence) and len(generator) != batch:
        raise InputError(f"{len(generator)} generators for {batch} images: give one, or one per image.")
    for each in generator if isinstance(generator, Sequence) else [generator]:
        if is_integer(each):
            check_seeds(each, 1)
        elif each is not None and not hasattr(each, "get_state"):
            raise InputError(f"generator must be a torch.Generator, an integer seed, or a list of these, got {each!r}.")
