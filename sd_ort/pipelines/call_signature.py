"""`__call__` of diffusers' pipeline classes, made of the names of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from inspect import Parameter, Signature
from typing import Any

from sd_ort.pipelines.arguments import GUIDANCE, STEPS
from sd_ort.pipelines.request import Request

# Arguments that stand side by side in several of diffusers' classes, in their order.
_GROUPS = {
    "schedule": "num_inference_steps timesteps sigmas",
    "noise": "num_images_per_prompt eta generator latents",
    "embeds": "prompt_embeds negative_prompt_embeds",
    "pooled": "pooled_prompt_embeds negative_pooled_prompt_embeds",
    "adapter": "ip_adapter_image ip_adapter_image_embeds",
    "output": "output_type return_dict cross_attention_kwargs",
    "control": "controlnet_conditioning_scale guess_mode control_guidance_start control_guidance_end",
    "sizes": "original_size crops_coords_top_left target_size",
    "negative_sizes": "negative_original_size negative_crops_coords_top_left negative_target_size",
    "aesthetic": "aesthetic_score negative_aesthetic_score",
    "callback": "clip_skip callback_on_step_end callback_on_step_end_tensor_inputs",
    "pag": "pag_scale pag_adaptive_scale",
}
_FIELDS = {field.name: field for field in fields(Request) if field.init}
_DEFAULTS = {name: field.default for name, field in _FIELDS.items()} | {
    "num_inference_steps": STEPS, "guidance_scale": GUIDANCE, "pag_scale": 3.0,
}  # fmt: skip


def diffusers_call(names: str, **defaults: Any) -> Callable[..., Any]:
    """Return a `__call__` with the arguments `names` in this order, and `prompt_syntax` and `progress` by keyword.

    A name in braces is a group of arguments. Types and defaults are those of the fields of `Request`; `defaults`: those
    of this class. The name `kwargs` stands for further arguments by keyword, which `_generate` checks.
    """
    listed = names.format_map(_GROUPS).split()

    def parameter(name: str, kind: Any) -> Parameter:
        default = (_DEFAULTS | defaults)[name]
        return Parameter(name, kind, default=default, annotation=_FIELDS[name].type)

    parameters = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)]
    parameters += [parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in listed if name != "kwargs"]
    parameters += [parameter(name, Parameter.KEYWORD_ONLY) for name in ("prompt_syntax", "progress")]
    if "kwargs" in listed:
        parameters.append(Parameter("kwargs", Parameter.VAR_KEYWORD, annotation="Any"))
    signature = Signature(parameters, return_annotation="Any")

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments["self"]._generate(bound.arguments)

    call.__name__, call.__doc__ = "__call__", "Generate images; see `pipelines.request.Request`."
    call.__dict__["__signature__"] = signature
    return call
