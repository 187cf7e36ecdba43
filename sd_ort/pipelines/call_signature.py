"""Build signatures of `__call__` as in diffusers' pipelines from argument names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from inspect import Parameter, Signature
from types import SimpleNamespace
from typing import Any

from sd_ort.core.errors import report_missing_package
from sd_ort.pipelines.arguments import GUIDANCE, STEPS, check_type
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
    # of diffusion transformers
    "prompts": "prompt prompt_2 prompt_3",
    "negatives": "negative_prompt negative_prompt_2 negative_prompt_3",
    "flux_texts": "prompt prompt_2 negative_prompt negative_prompt_2 true_cfg_scale",
    "flux_embeds": "prompt_embeds pooled_prompt_embeds {adapter} negative_ip_adapter_image "
    "negative_ip_adapter_image_embeds negative_prompt_embeds negative_pooled_prompt_embeds",
    "masked_embeds": "prompt_embeds prompt_embeds_mask negative_prompt_embeds negative_prompt_embeds_mask",
    "steps": "num_inference_steps sigmas",
    "draw": "num_images_per_prompt generator latents",
    "mask": "image mask_image masked_image_latents height width padding_mask_crop",
    "result": "output_type return_dict",
    "step_end": "callback_on_step_end callback_on_step_end_tensor_inputs",
}
_FIELDS = {field.name: field for field in fields(Request) if field.init}
_DEFAULTS = {name: field.default for name, field in _FIELDS.items()} | {
    "num_inference_steps": STEPS, "guidance_scale": GUIDANCE, "pag_scale": 3.0,
}  # fmt: skip


# Arguments of diffusion transformers alone: type and default.
_TRANSFORMER_ARGUMENTS: dict[str, tuple[str, Any]] = {
    "prompt_3": ("Prompt | None", None),
    "negative_prompt_3": ("Prompt | None", None),
    "negative_ip_adapter_image": ("Picture | None", None),
    "negative_ip_adapter_image_embeds": ("Sequence[Tensor] | None", None),
    "prompt_embeds_mask": ("Tensor | None", None),
    "negative_prompt_embeds_mask": ("Tensor | None", None),
    "true_cfg_scale": ("float", 1.0),
    "joint_attention_kwargs": ("Mapping[str, Any] | None", None),
    "attention_kwargs": ("Mapping[str, Any] | None", None),
    "max_sequence_length": ("int", 512),
    "mu": ("float | None", None),
    "skip_guidance_layers": ("Sequence[int] | None", None),
    "skip_layer_guidance_scale": ("float", 2.8),
    "skip_layer_guidance_stop": ("float", 0.2),
    "skip_layer_guidance_start": ("float", 0.01),
    "max_area": ("int", 1024**2),
    "_auto_resize": ("bool", True),
    "text_encoder_out_layers": ("Sequence[int]", (9, 18, 27)),
    "caption_upsample_temperature": ("float | None", None),
    "cfg_normalization": ("bool", False),
    "cfg_truncation": ("float", 1.0),
}
# Arguments whose type is checked first, before a transformer's pipeline computes with them.
_TYPED = {"prompt", "negative_prompt", "num_inference_steps", "height", "width", "num_images_per_prompt"}


def _listed(names: str) -> list[str]:
    """Return the names of arguments, with those of a group in place of its name in braces."""
    while "{" in names:
        names = names.format_map(_GROUPS)
    return names.split()


def _call(signature: Signature, generate: Callable[[dict[str, Any]], Any], doc: str) -> Callable[..., Any]:
    """Return a `__call__` that hands all its arguments by name, `self` among them, to `generate`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return generate(bound.arguments)

    call.__name__, call.__doc__ = "__call__", doc
    call.__dict__["__signature__"] = signature
    return call


def diffusers_call(
    names: str, doc: str = "Generate images; see `pipelines.request.Request`.", **defaults: Any
) -> Callable[..., Any]:
    """Return a `__call__` with the arguments `names` in this order, and `prompt_syntax` and `progress` by keyword.

    A name in braces is a group of arguments. Types and defaults are those of the fields of `Request`; `defaults`: those
    of this class. The name `kwargs` stands for further arguments by keyword, which `_generate` checks.
    """
    listed = _listed(names)

    def parameter(name: str, kind: Any) -> Parameter:
        default = (_DEFAULTS | defaults)[name]
        return Parameter(name, kind, default=default, annotation=_FIELDS[name].type)

    parameters = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)]
    parameters += [parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in listed if name != "kwargs"]
    parameters += [parameter(name, Parameter.KEYWORD_ONLY) for name in ("prompt_syntax", "progress")]
    if "kwargs" in listed:
        parameters.append(Parameter("kwargs", Parameter.VAR_KEYWORD, annotation="Any"))
    signature = Signature(parameters, return_annotation="Any")
    return _call(signature, lambda values: values["self"]._generate(values), doc)


def transformer_call(names: str, doc: str, **defaults: Any) -> Callable[..., Any]:
    """Return a `__call__` of a diffusion transformer's pipeline, with the arguments `names` and then `progress`.

    Names, groups and `defaults` as in `diffusers_call`. Further arguments by keyword are `unsupported`, which the
    pipeline checks. `_generate` is given all of them as attributes of one object.
    """
    types = {name: field.type for name, field in _FIELDS.items()}
    values = {name: field.default for name, field in _FIELDS.items()} | {"progress": False} | defaults
    for name, (annotation, default) in _TRANSFORMER_ARGUMENTS.items():
        types[name] = annotation
        values.setdefault(name, default)
    parameters = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)]
    parameters += [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=values[name], annotation=types[name])
        for name in [*_listed(names), "progress"]
    ]
    parameters.append(Parameter("unsupported", Parameter.VAR_KEYWORD, annotation="Any"))

    @report_missing_package()
    def generate(arguments: dict[str, Any]) -> Any:
        for name in _TYPED & arguments.keys():
            if arguments[name] is not None:
                check_type(name, str(types[name]), arguments[name])
        return arguments.pop("self")._generate(SimpleNamespace(**arguments))

    return _call(Signature(parameters, return_annotation="Any"), generate, doc)
