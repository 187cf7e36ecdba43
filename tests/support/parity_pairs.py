"""Pairs of calls: the same arguments for diffusers' pipeline and for sd-ort's, over the same weights and seed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import diffusers
import diffusers.callbacks as callbacks
import numpy as np
import torch
from diffusers.schedulers import AysSchedules
from image_metrics import psnr
from parity_models import Models
from PIL import Image

from sd_ort.core.errors import SdOrtError

MIN_PSNR = 60.0  # dB, of float32 images in 0..1
STEPS = 2

FAMILIES = {
    "StableDiffusionPipeline": ["sd", "lcm"],
    "StableDiffusionImg2ImgPipeline": ["sd"],
    "StableDiffusionInpaintPipeline": ["sd", "inpaint9"],
    "StableDiffusionXLPipeline": ["xl"],
    "StableDiffusionXLImg2ImgPipeline": ["xl", "refiner"],
    "StableDiffusionXLInpaintPipeline": ["xl"],
    "StableDiffusionControlNetPipeline": ["controlnet"],
    "StableDiffusionControlNetImg2ImgPipeline": ["controlnet"],
    "StableDiffusionControlNetInpaintPipeline": ["controlnet"],
    "StableDiffusionXLControlNetPipeline": ["xl_controlnet"],
    "StableDiffusionXLControlNetImg2ImgPipeline": ["xl_controlnet"],
    "StableDiffusionXLControlNetInpaintPipeline": ["xl_controlnet"],
    "LatentConsistencyModelPipeline": ["lcm"],
    "LatentConsistencyModelImg2ImgPipeline": ["lcm"],
}
# Samplers that draw noise, by the names that both take.
NOISY = {
    "EulerAncestralDiscreteScheduler": {},
    "DDPMScheduler": {},
    "LCMScheduler": {},
    "KDPM2AncestralDiscreteScheduler": {},
    "DPMSolverMultistepScheduler": {"algorithm_type": "sde-dpmsolver++"},
    "DPMSolverSinglestepScheduler": {"algorithm_type": "sde-dpmsolver++"},
    "TCDScheduler": {},
    "EDMEulerScheduler": {},
}


# diffusers' callbacks that end guidance; other classes of its own fail with them.
CUTOFF = {
    "StableDiffusionPipeline": callbacks.SDCFGCutoffCallback,
    "StableDiffusionImg2ImgPipeline": callbacks.SDCFGCutoffCallback,
    "StableDiffusionXLPipeline": callbacks.SDXLCFGCutoffCallback,
    "StableDiffusionXLImg2ImgPipeline": callbacks.SDXLCFGCutoffCallback,
    "StableDiffusionXLControlNetPipeline": callbacks.SDXLControlnetCFGCutoffCallback,
}
# Further schedulers and options, for text to image; without those that need scipy or torchsde.
SPACINGS: list[dict[str, Any]] = [{"timestep_spacing": each} for each in ("linspace", "leading", "trailing")]
SIGMAS: list[dict[str, Any]] = [
    {"use_karras_sigmas": True}, {"use_exponential_sigmas": True}
]  # fmt: skip
V: list[dict[str, Any]] = [{"prediction_type": "v_prediction"}]
ZERO: list[dict[str, Any]] = [{"rescale_betas_zero_snr": True, "timestep_spacing": "trailing", **V[0]}]
OLD = [{"algorithm_type": each, "final_sigmas_type": "sigma_min"} for each in ("dpmsolver", "sde-dpmsolver")]
SOLVERS: list[dict[str, Any]] = [{"solver_order": 3}, {"solver_type": "heun"}, *OLD[:1]]
SCHEDULERS: dict[str, list[dict[str, Any]]] = {
    "DDIMScheduler": [{}, *SPACINGS, *V, *ZERO],
    "DDPMScheduler": [{}, *SPACINGS, *V, *ZERO],
    "PNDMScheduler": [{}, *SPACINGS, *V],
    "EulerDiscreteScheduler": [{}, *SPACINGS, *SIGMAS, *V, *ZERO],
    "EulerAncestralDiscreteScheduler": [{}, *SPACINGS, *V, *ZERO],
    "HeunDiscreteScheduler": [{}, *SPACINGS, *SIGMAS, *V],
    "KDPM2DiscreteScheduler": [{}, *SPACINGS, *SIGMAS, *V],
    "KDPM2AncestralDiscreteScheduler": [{}, *SPACINGS, *SIGMAS, *V],
    "DEISMultistepScheduler": [{}, *SPACINGS, *SIGMAS, *V],
    "DPMSolverMultistepScheduler": [
        {}, *SPACINGS, *SIGMAS, *V, *SOLVERS, OLD[1], {"euler_at_final": True},
        {"use_lu_lambdas": True}, {"final_sigmas_type": "sigma_min"},
    ],
    "DPMSolverSinglestepScheduler": [{}, *SIGMAS, *V, *SOLVERS[:2]],
    "UniPCMultistepScheduler": [{}, *SPACINGS, *SIGMAS, *V, {"solver_order": 3}, {"solver_type": "bh1"}],
    "SASolverScheduler": [{}],
    "LCMScheduler": [{}, *V, *ZERO],
    "TCDScheduler": [{}, *V, *ZERO],
    "DDIMInverseScheduler": [{}, *V],
    "DPMSolverMultistepInverseScheduler": [{}, {"algorithm_type": "sde-dpmsolver++"}, OLD[1]],
    "IPNDMScheduler": [{}],
    "EDMDPMSolverMultistepScheduler": [{}],
    "EDMEulerScheduler": [{}],
}  # fmt: skip
AYS = {"sd": "StableDiffusionTimesteps", "xl": "StableDiffusionXLTimesteps"}


# Ends of the names of pairs that sd-ort refuses, and why: sizes that do not halve evenly at every level of the UNet.
REFUSED = {"factor2-size_70": "must be multiples of 4", "-size_72": "must be multiples of 16"}
# Ends of the names of pairs that diffusers answers with an error or NaN; what sd-ort does there is not compared.
FAILS_IN_DIFFUSERS = {
    "UniPCMultistep-solver_type=bh1": "NaN",
    "DPMSolverMultistepInverse-algorithm_type=sde-dpmsolver++": "NaN",
    "DPMSolverMultistepInverse-algorithm_type=sde-dpmsolver-final_sigmas_type=sigma_min": "NaN",
}


def picture(height: int = 64, width: int = 64, shift: int = 0) -> Image.Image:
    y, x = np.mgrid[:height, :width]
    return Image.fromarray(((np.stack([4 * x, 4 * y, 255 - 2 * (x + y)], -1) + shift) % 256).astype(np.uint8))


def mask(height: int = 64, width: int = 64) -> Image.Image:
    y, x = np.mgrid[:height, :width] / np.array([height, width])[:, None, None]
    return Image.fromarray((255 * ((x > 0.3) & (x < 0.7) & (y > 0.35) & (y < 0.6))).astype(np.uint8))


def seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tensor(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed))


@dataclass(frozen=True)
class Pair:
    """One call of class `kind` over `family`. `arguments`: a function of the diffusers pipeline that returns them: both
    calls need generators of their own. `scheduler`: class and options, None for the folder's own."""

    kind: str
    family: str
    name: str
    arguments: Callable[[Any], dict[str, Any]]
    scheduler: tuple[str, dict[str, Any]] | None = None

    def __str__(self) -> str:
        return f"{self.kind.removesuffix('Pipeline')}-{self.family}-{self.name}"


@dataclass
class Outcome:
    """`psnr`: in dB, infinite for equal images, None if a call failed. `reason`: of our refusal. `theirs`: the error of
    diffusers."""

    psnr: float | None = None
    reason: str | None = None
    theirs: str | None = None

    @property
    def verdict(self) -> str:
        if self.theirs is not None:
            return "fails in diffusers"
        if self.psnr is not None:
            return "equal" if self.psnr >= MIN_PSNR else "different"
        return "refused"


def images_of(parameters: Any, size: tuple[int, int] = (64, 64), batch: int = 0) -> dict[str, Any]:
    """Return the images that a class needs; `batch`: a list of so many."""
    needed: dict[str, Any] = {}
    for index, name in enumerate(("image", "control_image")):
        if name in parameters:
            needed[name] = (
                [picture(*size, shift=40 * (2 * i + index)) for i in range(batch)]
                if batch
                else picture(*size, 90 * index)
            )
    if "mask_image" in parameters:
        needed["mask_image"] = mask(*size)
    return needed


def _images(takes: Any, _: Any) -> dict[str, Any]:
    return images_of(takes)


def sd_embeddings(pipeline: Any) -> dict[str, Any]:
    positive, negative = pipeline.encode_prompt(
        ["two green squares"],
        device="cpu",
        num_images_per_prompt=1,
        do_classifier_free_guidance=True,
        negative_prompt=["blurry"],
    )
    return dict(zip(("prompt_embeds", "negative_prompt_embeds"), (positive, negative), strict=True))


def xl_embeddings(pipeline: Any) -> dict[str, Any]:
    names = "prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds"
    made = pipeline.encode_prompt("two green squares", device="cpu", negative_prompt="blurry")
    return dict(zip(names, made, strict=True))


def embeddings(pipeline: Any) -> dict[str, Any]:
    return xl_embeddings(pipeline) if "XL" in type(pipeline).__name__ else sd_embeddings(pipeline)


def positive_embeddings(pipeline: Any) -> dict[str, Any]:
    return {name: value for name, value in embeddings(pipeline).items() if not name.startswith("negative")}


def change_latents(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    return {"latents": tensors["latents"] * 0.9}


def change_prompt(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    return {"prompt_embeds": tensors["prompt_embeds"] * 0.5}


def end_loop(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    assert pipe.num_timesteps >= 2
    pipe._interrupt = step == 0
    return tensors


def cut_off(pipeline: Any) -> dict[str, Any]:
    return {"callback_on_step_end": CUTOFF[type(pipeline).__name__](cutoff_step_ratio=0.4)}


# For each argument of diffusers' classes: calls that give it, by a name. None: it is part of every call, or needs no
# call of its own. A function is called with diffusers' pipeline.
ARGUMENTS: dict[str, dict[str, Any] | None] = {
    "prompt": {"prompts": {"prompt": ["a", "b"]}},
    "prompt_2": {"prompt_2": {"prompt_2": "two green squares"}},
    "image": None,
    "mask_image": None,
    "control_image": None,
    "height": {"height": {"height": 80}},
    "width": {"width": {"width": 96, "height": 64}},
    "num_inference_steps": {"steps": {"num_inference_steps": 5}},
    "timesteps": {"timesteps": {"timesteps": [999, 759, 499, 259], "scheduler": "EulerDiscreteScheduler"}},
    "sigmas": {"sigmas": {"sigmas": [12.0, 4.0, 1.0, 0.3], "scheduler": "EulerDiscreteScheduler"}},
    "original_inference_steps": {"original_inference_steps": {"original_inference_steps": 20}},
    "guidance_scale": {"guidance_3": {"guidance_scale": 3.0}, "no_guidance": {"guidance_scale": 1.0},
                       "guidance_0": {"guidance_scale": 0.0}},
    "negative_prompt": {"negative_prompt": {"negative_prompt": "blurry"}, "negative_empty": {"negative_prompt": ""}},
    "negative_prompt_2": {"negative_prompt_2": {"negative_prompt": "blurry", "negative_prompt_2": "dark"}},
    "num_images_per_prompt": {
        "two_images": {"num_images_per_prompt": 2},
        "two_prompts_two_images": {"prompt": ["a", "b"], "num_images_per_prompt": 2},
    },
    "eta": {"eta": {"eta": 0.6, "scheduler": "DDIMScheduler"}, "eta_unread": {"eta": 0.6}},
    "generator": {
        "generators": {"prompt": ["a", "b"], "generator": [1, 2]},
        "generators_of_images": {"num_images_per_prompt": 2, "generator": [1, 2]},
    },
    "latents": {"latents": {"latents": tensor(1, 4, 8, 8)}},
    "prompt_embeds": {"embeddings": embeddings, "positive_embeddings": positive_embeddings},
    "negative_prompt_embeds": None,
    "pooled_prompt_embeds": None,
    "negative_pooled_prompt_embeds": None,
    "ip_adapter_image": None,  # tests/pipelines/test_ip_adapter.py, with an adapter
    "ip_adapter_image_embeds": None,
    "output_type": {"pil": {"output_type": "pil"}, "pt": {"output_type": "pt"}, "latent": {"output_type": "latent"}},
    "return_dict": {"tuple": {"return_dict": False}},
    "cross_attention_kwargs": {"lora_scale": {"cross_attention_kwargs": {"scale": 0.5}}},
    "guidance_rescale": {"guidance_rescale": {"guidance_rescale": 0.7}},
    "clip_skip": {"clip_skip_1": {"clip_skip": 1}},
    "callback_on_step_end": {
        "callback_latents": {"callback_on_step_end": change_latents},
        "callback_interrupt": {"callback_on_step_end": end_loop, "num_inference_steps": 4},
    },
    "callback_on_step_end_tensor_inputs": {
        "callback_prompt_embeds": {"callback_on_step_end": change_prompt,
                                   "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}
    },
    "kwargs": None,
    "strength": {"strength_0.5": {"strength": 0.5, "num_inference_steps": 4},
                 "strength_1": {"strength": 1.0}, "strength_0.9": {"strength": 0.9, "num_inference_steps": 4}},
    "masked_image_latents": {"masked_image_latents": {"masked_image_latents": tensor(1, 4, 8, 8)}},
    "padding_mask_crop": {"padding_mask_crop": {"padding_mask_crop": 4, "output_type": "pil"}},
    "denoising_start": {"denoising_start": {"denoising_start": 0.5, "num_inference_steps": 6}},
    "denoising_end": {"denoising_end": {"denoising_end": 0.5, "num_inference_steps": 6, "strength": 0.9},
                      "denoising_end_0": {"denoising_end": 0}, "denoising_end_1": {"denoising_end": 1.0}},
    "original_size": {"original_size": {"original_size": (128, 96)}},
    "crops_coords_top_left": {"crops": {"crops_coords_top_left": (8, 16)}},
    "target_size": {"target_size": {"target_size": (96, 96)}},
    "negative_original_size": {
        "negative_sizes": {"negative_original_size": (32, 32), "negative_target_size": (48, 48)},
        "negative_original_size": {"negative_original_size": (32, 32)},
    },
    "negative_crops_coords_top_left": {"negative_crops": {"negative_crops_coords_top_left": (8, 8)}},
    "negative_target_size": {"negative_target_size": {"negative_target_size": (32, 32)}},
    "aesthetic_score": {"aesthetic_score": {"aesthetic_score": 3.0}},
    "negative_aesthetic_score": {"negative_aesthetic_score": {"negative_aesthetic_score": 5.0}},
    "controlnet_conditioning_scale": {"control_scale": {"controlnet_conditioning_scale": 0.3}},
    "guess_mode": {"guess_mode": {"guess_mode": True},
                   "guess_mode_unguided": {"guess_mode": True, "guidance_scale": 1.0}},
    "control_guidance_start": {"control_start": {"control_guidance_start": 0.5, "num_inference_steps": 4}},
    "control_guidance_end": {"control_end": {"control_guidance_end": 0.5, "num_inference_steps": 4}},
}  # fmt: skip


def parameters(kind: str) -> Any:
    """Return the parameters of diffusers' `__call__` without self."""
    found = dict(inspect.signature(getattr(diffusers, kind).__call__).parameters)
    found.pop("self")
    return found


def pairs() -> Iterator[Pair]:
    """Yield every pair."""
    yield from scheduler_pairs()
    for side in (68, 70, 76, 77):
        kind = "StableDiffusionImg2ImgPipeline"
        yield quick(kind, "factor2", f"size_{side}", images_of(parameters(kind), (side, side)))
    for kind, family in (("StableDiffusionPipeline", "sd"), ("StableDiffusionXLPipeline", "xl")):
        yield quick(kind, family, "size_72", {"height": 72, "width": 72})
    for kind, families in FAMILIES.items():
        takes = parameters(kind)
        for family in families:
            yield Pair(kind, family, "defaults", partial(_images, takes))
            if images_of(takes):
                for name, size in (("size_100", (100, 100)), ("size_70_83", (70, 83)), ("size_48_96", (48, 96))):
                    yield quick(kind, family, name, images_of(takes, size))
                yield quick(kind, family, "images", {"prompt": ["a", "b"], **images_of(takes, batch=2)})
                several = {"prompt": ["a", "b"], "num_images_per_prompt": 2, **images_of(takes, batch=2)}
                yield quick(kind, family, "images_of_prompts", several)
            for scheduler, options in NOISY.items():
                if kind.startswith("Latent") and scheduler != "LCMScheduler":
                    continue  # diffusers' class calls set_timesteps with arguments that only this one takes
                yield quick(kind, family, scheduler.removesuffix("Scheduler"), {"num_inference_steps": 4},
                            (scheduler, options))  # fmt: skip
            if kind in CUTOFF:
                yield quick(kind, family, "callback_cutoff", cut_off, steps=4)
            for argument in takes:
                for name, given in (ARGUMENTS[argument] or {}).items():
                    yield quick(kind, family, name, given)


def scheduler_pairs() -> Iterator[Pair]:
    """Yield text to image with every scheduler and option, and with the timesteps of Align Your Steps."""
    for scheduler, variants in SCHEDULERS.items():
        for options in variants:
            variant = "-".join(f"{name}={value}" for name, value in options.items())
            name = f"{scheduler.removesuffix('Scheduler')}-{variant or 'default'}"
            yield quick("StableDiffusionPipeline", "sd", name, {"num_inference_steps": 5}, (scheduler, options))
    for family, timesteps in AYS.items():
        kind = "StableDiffusionXLPipeline" if family == "xl" else "StableDiffusionPipeline"
        for scheduler in ("EulerDiscreteScheduler", "DPMSolverMultistepScheduler"):
            given = {"timesteps": AysSchedules[timesteps]}
            yield quick(kind, family, f"AYS-{scheduler.removesuffix('Scheduler')}", given, (scheduler, {}))


def quick(kind: str, family: str, name: str, given: Any, scheduler: Any = None, steps: int = STEPS) -> Pair:
    """Return a pair of few steps. `given`: arguments, or a function of diffusers' pipeline that returns them."""
    takes = parameters(kind)
    if isinstance(given, dict) and "scheduler" in given:
        scheduler = None if kind.startswith("Latent") else (given["scheduler"], {})
        given = {name: value for name, value in given.items() if name != "scheduler"}

    def arguments(pipeline: Any) -> dict[str, Any]:
        made = {"num_inference_steps": steps, **images_of(takes), **(given(pipeline) if callable(given) else given)}
        if "Img2Img" in kind:
            made = {"strength": 0.6, **made, "num_inference_steps": max(4, made["num_inference_steps"])}
        if isinstance(made.get("generator"), list):
            made["generator"] = [seeded(seed) for seed in made["generator"]]
        return {k: v for k, v in made.items() if k in takes}

    return Pair(kind, family, name, arguments, scheduler)


def draw(pipeline: Any, arguments: dict[str, Any]) -> np.ndarray:
    """Return the images of a call as (B, H, W, 3) in 0..1, or latents (B, C, h, w)."""
    arguments = {"generator": seeded(), "output_type": "np", **arguments}
    if "prompt_embeds" not in arguments:
        arguments.setdefault("prompt", "a red circle on a blue background")
    images = pipeline(**arguments)[0]
    if isinstance(images, list):
        return np.stack([np.asarray(image, np.float32) / 255 for image in images])
    return np.asarray(images, np.float32)


def compare(models: Models, pair: Pair) -> Outcome:
    """Return how sd-ort's call compares with diffusers'."""
    theirs, ours = models.theirs(pair.family, pair.kind), models.ours(pair.family, pair.kind)
    scheduler = theirs.scheduler
    own = ours._scheduler
    outcome = Outcome()
    try:
        if pair.scheduler is not None:
            name, options = pair.scheduler
            cls = getattr(diffusers, name)
            if "clip_sample" in inspect.signature(cls).parameters:
                options = {**options, "clip_sample": False}
            theirs.scheduler = cls.from_config(scheduler.config, **options)
            ours.scheduler = cls.from_config(scheduler.config, **options) if options else name
        expected = images = None
        try:
            with torch.no_grad():
                expected = draw(theirs, pair.arguments(theirs))
        except Exception as error:
            outcome.theirs = f"{type(error).__name__}: {error}".splitlines()[0]
        if expected is not None and not np.isfinite(expected).all():
            expected, outcome.theirs = None, "NaN"
        try:
            images = draw(ours, pair.arguments(theirs))
        except SdOrtError as error:
            outcome.reason = str(error)
        if expected is not None and images is not None:
            same = expected.shape == images.shape
            scale = max(1.0, float(np.abs(expected).max()))
            outcome.psnr = float(psnr(images / scale, expected / scale)) if same else 0.0
    finally:
        theirs.scheduler, ours._scheduler = scheduler, own
    return outcome
