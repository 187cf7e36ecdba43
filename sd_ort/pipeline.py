"""Prompt -> image over ONNX components, with diffusers' argument names, schedulers and random numbers.

Latents are drawn and stepped by the scheduler in float32 torch on the CPU, whatever the precision of the graphs, so
one seed means one image on every provider and precision, and the image that diffusers draws from the same seed.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor
from tqdm.auto import tqdm

from sd_ort.errors import InputError
from sd_ort.folder import components
from sd_ort.models import latent_multiple, levels
from sd_ort.session import Model, load

log = logging.getLogger("sd_ort")

Prompt = str | Sequence[str]
Generator = torch.Generator | Sequence[torch.Generator] | int | None
# Called as callback(pipeline, step index, timestep, {"latents": Tensor}); may return {"latents": replacement}.
StepCallback = Callable[[Any, int, Any, dict[str, torch.Tensor]], dict[str, torch.Tensor] | None]


@dataclass
class PipelineOutput:
    """`images`: PIL images, or one array/tensor (B, H, W, 3) in 0..1 for "np", (B, C, h, w) latents for "latent"."""

    images: Any


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


class StableDiffusionPipeline:
    """Text to image with SD 1.x, 2.x and SDXL pipeline folders. Make one with `from_pretrained`."""

    def __init__(self, folder: Path, models: dict[str, Model], scheduler: Any) -> None:
        """`models`: text_encoder, [text_encoder_2], unet and vae_decoder of `folder`; `scheduler`: diffusers'."""
        self.folder = folder
        self.models = models
        self.scheduler = scheduler
        self.unet = models["unet"]
        self.vae_decoder = models["vae_decoder"]
        self.unet_config = read_json(folder / "unet" / "config.json")
        vae_config = read_json(folder / "vae_decoder" / "config.json")
        self.vae_config = vae_config
        self.vae_scale_factor = 2 ** (levels(vae_config) - 1)
        self.index = read_json(folder / "model_index.json")
        self.is_xl = "text_encoder_2" in models
        names = ("text_encoder", "text_encoder_2") if self.is_xl else ("text_encoder",)
        self.text_encoders = [(_tokenizer(folder, name.replace("text_encoder", "tokenizer")), name) for name in names]
        self.image_processor = VaeImageProcessor(vae_scale_factor=self.vae_scale_factor)

    @classmethod
    def from_pretrained(
        cls, folder: Path | str, provider: str = "cpu", scheduler: Any = None, **session_options: Any
    ) -> StableDiffusionPipeline:
        """Load a pipeline folder on a provider ("cpu", "cuda", "rocm", "migraphx").

        `scheduler`: None for the folder's own, a diffusers class name or short form ("EulerDiscreteScheduler",
        "euler"), or a scheduler object. `session_options`: those of `sd_ort.session.create_session`
        (threads, allow_fallback, tuning, library, portable, profile).

        Raises InputError for a folder, component or scheduler that cannot be used, ProviderError for a provider that
        is not installed or not really used.
        """
        folder = Path(folder)
        found = components(folder)
        needed = ["text_encoder", "unet", "vae_decoder"]
        kind = read_json(folder / "model_index.json").get("_class_name", "")
        if kind.endswith("StableDiffusionXLPipeline"):
            needed.insert(1, "text_encoder_2")
        elif not kind.endswith("StableDiffusionPipeline"):
            raise InputError(f"{folder} holds a {kind or 'pipeline without a class'}: only text-to-image is supported.")
        for name in needed:
            if name not in found:
                raise InputError(f"{folder} has no {name}: export the whole pipeline with `sd-ort export MODEL OUT`.")
        chosen = make_scheduler(folder, scheduler)
        return cls(folder, {name: load(folder, name, provider, **session_options) for name in needed}, chosen)

    @property
    def default_size(self) -> int:
        """Height and width in pixels of the images the model was trained on."""
        size = self.unet_config.get("sample_size") or 64
        return int(size if isinstance(size, int) else size[0]) * self.vae_scale_factor

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
    ) -> PipelineOutput:
        """Draw `num_images_per_prompt` images for each prompt; arguments mean what they mean in diffusers.

        `height`, `width`: pixels, multiples of what VAE and UNet divide them by (64 in SD 1.5). `guidance_scale`: 1 or
        less turns guidance off. `generator`: a torch.Generator, one an image, an integer seed, or None for torch's
        global one. `latents`: (B, C, height/8, width/8) standard normal noise instead of drawn noise. `output_type`:
        "pil", "np" (float32, (B, H, W, 3), 0..1), "pt" ((B, 3, H, W), 0..1) or "latent" (before scaling by the VAE's
        factor).

        Raises InputError for sizes, prompts or counts that do not fit together.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        height, width = height or self.default_size, width or self.default_size
        self._check(prompts, height, width, num_inference_steps, num_images_per_prompt, output_type)
        guided = guidance_scale > 1 and not self.unet_config.get("time_cond_proj_dim")
        batch = len(prompts) * num_images_per_prompt

        conditioning = self.encode(prompts, height, width).repeat(num_images_per_prompt)
        if guided:
            negative = self._negative(negative_prompt, len(prompts), height, width)
            conditioning = conditioning.after(negative.repeat(num_images_per_prompt))
        if isinstance(generator, int):
            generator = torch.Generator().manual_seed(generator)
        elif isinstance(generator, Sequence):
            generator = list(generator)
            if len(generator) != batch:
                raise InputError(f"{len(generator)} generators for {batch} images: give one, or one an image.")
        self.scheduler.set_timesteps(num_inference_steps)
        noise = self._latents((batch, height, width), latents, generator)
        latents = self._denoise(
            noise * self.scheduler.init_noise_sigma,
            conditioning,
            guidance_scale if guided else None,
            self._step_options(eta, generator),
            callback_on_step_end,
            progress,
        )
        if output_type == "latent":
            return PipelineOutput(latents)
        return PipelineOutput(self.image_processor.postprocess(self.decode(latents), output_type))

    def encode(self, prompts: Sequence[str], height: int, width: int) -> Conditioning:
        """Prompts (B strings) -> conditioning with float32 embeddings (B, S, C); warns of what a prompt loses.

        SDXL concatenates both encoders' penultimate layers on C and adds the second's pooled `text_embeds` (B, D)
        and `time_ids` (B, 6): original size, crop corner, target size, each (height, width).
        """
        hidden: list[torch.Tensor] = []
        added: dict[str, torch.Tensor] = {}
        for tokenizer, name in self.text_encoders:
            outputs = self.models[name](input_ids=_token_ids(tokenizer, prompts, self._text_length(name, tokenizer)))
            hidden.append(_float(outputs["hidden_states" if self.is_xl else "last_hidden_state"]))
            if "text_embeds" in outputs:
                added["text_embeds"] = _float(outputs["text_embeds"])
        if self.is_xl:
            added["time_ids"] = torch.tensor([[height, width, 0, 0, height, width]] * len(prompts), dtype=torch.float32)
        return Conditioning(torch.cat(hidden, -1), added)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents (B, C, h, w) as the scheduler leaves them -> images (B, 3, H, W), float32, about -1..1."""
        config = self.vae_config
        if config.get("latents_mean") and config.get("latents_std"):
            mean = torch.tensor(config["latents_mean"]).view(1, -1, 1, 1)
            std = torch.tensor(config["latents_std"]).view(1, -1, 1, 1)
            latents = latents * std / config["scaling_factor"] + mean
        else:
            latents = latents / config.get("scaling_factor", 0.18215)
        latents = latents + (config.get("shift_factor") or 0.0)
        return _float(self.vae_decoder(latent_sample=latents.numpy())["sample"])

    def _check(self, prompts: list[str], height: int, width: int, steps: int, images: int, output_type: str) -> None:
        # Off these sizes the skip connections of the exported UNet do not line up.
        factor = self.vae_scale_factor * latent_multiple(self.unet_config)
        if not prompts:
            raise InputError("no prompt was given: pass a string or a list of strings.")
        if height % factor or width % factor or height < factor or width < factor:
            raise InputError(f"height {height} and width {width} must be multiples of {factor}.")
        if steps < 1 or images < 1:
            raise InputError("num_inference_steps and num_images_per_prompt must be 1 or more.")
        if steps > (most := self.scheduler.config.num_train_timesteps):
            raise InputError(f"{steps} steps are more than the {most} this model was trained with.")
        if output_type not in ("pil", "np", "pt", "latent"):
            raise InputError(f"output_type {output_type!r} is unknown: use pil, np, pt or latent.")

    def _negative(self, negative: Prompt | None, count: int, height: int, width: int) -> Conditioning:
        if negative is None:
            negatives = [""] * count
        else:
            negatives = [negative] * count if isinstance(negative, str) else list(negative)
        if len(negatives) != count:
            raise InputError(f"{len(negatives)} negative prompts for {count} prompts: give one, or one a prompt.")
        conditioning = self.encode(negatives, height, width)
        if self.is_xl and negative is None and self.index.get("force_zeros_for_empty_prompt", True):
            conditioning.embeddings = torch.zeros_like(conditioning.embeddings)
            conditioning.added["text_embeds"] = torch.zeros_like(conditioning.added["text_embeds"])
        return conditioning

    def _text_length(self, name: str, tokenizer: Any) -> int:
        """Tokens a text encoder takes, usually 77."""
        limit = read_json(self.folder / name / "config.json").get("max_position_embeddings", 77)
        return min(int(tokenizer.model_max_length), int(limit))

    def _latents(self, size: tuple[int, int, int], given: Any, generator: Any) -> torch.Tensor:
        """Standard normal noise (B, C, h, w), float32; drawn as diffusers draws it, or the given one, checked."""
        batch, height, width = size
        shape = (
            batch,
            int(self.unet_config.get("in_channels", 4)),
            height // self.vae_scale_factor,
            width // self.vae_scale_factor,
        )
        if given is None:
            return randn_tensor(shape, generator=generator, device=torch.device("cpu"), dtype=torch.float32)
        noise = torch.as_tensor(given, dtype=torch.float32)
        if tuple(noise.shape) != shape:
            raise InputError(f"latents of shape {tuple(noise.shape)} were given where {shape} are needed.")
        return noise

    def _step_options(self, eta: float, generator: Any) -> dict[str, Any]:
        """What this scheduler's step takes of `eta` (DDIM) and `generator` (ancestral and SDE schedulers)."""
        takes = inspect.signature(self.scheduler.step).parameters
        return {name: value for name, value in {"eta": eta, "generator": generator}.items() if name in takes}

    @torch.no_grad()
    def _denoise(
        self,
        latents: torch.Tensor,
        conditioning: Conditioning,
        guidance: float | None,
        step_options: dict[str, Any],
        callback: StepCallback | None,
        progress: bool,
    ) -> torch.Tensor:
        """The sampling loop. With guidance the UNet sees 2B rows: negative, then positive."""
        told = {"encoder_hidden_states": conditioning.embeddings, **conditioning.added}
        fixed = {name: _cast(value, self.unet, name) for name, value in told.items()}
        for index, timestep in enumerate(tqdm(self.scheduler.timesteps, disable=not progress, unit="step")):
            sample = latents if guidance is None else torch.cat([latents, latents])
            sample = self.scheduler.scale_model_input(sample, timestep)
            noise = self._predict(sample, timestep, fixed)
            if guidance is not None:
                negative, positive = noise.chunk(2)
                noise = negative + guidance * (positive - negative)
            latents = self.scheduler.step(noise, timestep, latents, **step_options).prev_sample
            if callback is not None:
                latents = (callback(self, index, timestep, {"latents": latents}) or {}).get("latents", latents)
        return latents

    def _predict(self, sample: torch.Tensor, timestep: torch.Tensor, fixed: dict[str, np.ndarray]) -> torch.Tensor:
        """One UNet call: sample (B, C, h, w), a scalar timestep -> predicted noise (B, C, h, w), float32."""
        time = np.full((1,) * len(self.unet.inputs["timestep"].shape), timestep.item())
        return _float(self.unet(sample=sample.numpy(), timestep=time, **fixed)["out_sample"])


def make_scheduler(folder: Path, scheduler: Any = None) -> Any:
    """The folder's scheduler, or one of another class with the folder's configuration; an object is taken as it is.

    Raises InputError for a name that is no diffusers scheduler, or one that cannot drive a Stable Diffusion UNet.
    """
    if scheduler is not None and not isinstance(scheduler, str):
        return scheduler
    config = read_json(folder / "scheduler" / "scheduler_config.json")
    cls = scheduler_class(scheduler or config["_class_name"])
    try:
        chosen = cls.from_config(config)
    except ImportError as error:
        raise InputError(" ".join(str(error).split())) from error  # names the package and how to install it
    if not hasattr(chosen, "init_noise_sigma") or not hasattr(chosen, "scale_model_input"):
        raise InputError(f"{cls.__name__} cannot drive a Stable Diffusion UNet: try euler, ddim or dpmsolver.")
    return chosen


def scheduler_class(name: str) -> Any:
    """A diffusers scheduler by class name or short form: "euler", "ddim", "dpmsolver", "euler_ancestral", "unipc"…

    Short forms leave out "Scheduler", then "Discrete" and "Multistep"; case and punctuation do not matter.
    Raises InputError listing the names when there is none.
    """
    import diffusers

    classes = [n for n in dir(diffusers) if n.endswith("Scheduler")]
    key = _key(name)
    for shorten in (_key, lambda n: _key(n).replace("discrete", "").replace("multistep", "")):
        found = [n for n in classes if shorten(n) == key]
        if found:
            return getattr(diffusers, found[0])
    raise InputError(f"{name!r} is no diffusers scheduler: use euler, ddim, dpmsolver, unipc or a class name.")


def _key(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum()).removesuffix("scheduler")


def read_json(path: Path) -> dict[str, Any]:
    """A configuration file of a pipeline folder. Raises InputError when it is missing or broken."""
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is missing or broken: export the pipeline again.") from error
    return config


def _tokenizer(folder: Path, name: str) -> Any:
    from transformers import CLIPTokenizer

    try:
        return CLIPTokenizer.from_pretrained(folder / name, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / name} holds no CLIP tokenizer: export the pipeline again.") from error


def _token_ids(tokenizer: Any, prompts: Sequence[str], length: int) -> np.ndarray:
    """Token ids (B, length), int64, padded; says on the log what a longer prompt loses."""
    for prompt, ids in zip(prompts, tokenizer(list(prompts), verbose=False).input_ids, strict=True):
        if len(ids) > length:  # the last kept token is the end mark
            lost = tokenizer.decode(ids[length - 1 : -1])
            log.warning("the prompt %r… is cut after %d tokens; not drawn: %r", prompt[:40], length - 2, lost)
    tokens = tokenizer(list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="np")
    return np.asarray(tokens.input_ids, np.int64)


def _float(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).float()


def _cast(value: torch.Tensor, model: Model, name: str) -> np.ndarray:
    """Once a prompt instead of once a step: the array in the dtype the graph declares for this input."""
    return value.numpy().astype(model.dtype(name)) if name in model.inputs else value.numpy()
