"""Methods and attributes of diffusers' pipelines other than `__call__`: components, devices, settings, saving."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_ort.core.errors import InputError
from sd_ort.core.pipeline_folder import read_manifest
from sd_ort.pipelines.common_methods import REJECTED_METHODS, PipelineMethods
from sd_ort.pipelines.images import as_tensor
from sd_ort.pipelines.load_options import LoadOptions
from sd_ort.pipelines.request import Prompt, Request
from sd_ort.runtime.session import OrtModel, SessionOptions

if TYPE_CHECKING:
    import torch


# Options of diffusers' from_pretrained that say nothing about a folder of ours, and those that it cannot follow.
IGNORED_OPTIONS = (
    "use_safetensors",
    "local_files_only",
    "requires_safety_checker",
    "low_cpu_mem_usage",
    "add_watermarker",
)
REJECTED_OPTIONS = {
    "device_map": "a pipeline has one provider: from_pretrained(folder, provider=...)",
    "custom_pipeline": "community pipelines run in torch: use diffusers",
    "unet": "a component comes from the folder: export the pipeline with it",
    "vae": "a component comes from the folder: `sd-ort export --vae FILE`",
    "text_encoder": "a component comes from the folder: export the pipeline with it",
}


def loading_options(options: Mapping[str, Any], folder: Path) -> SessionOptions:
    """Return the options of a session among those of `from_pretrained`.

    Raises InputError for one that is unknown, and for a type or variant that the folder does not have.
    """
    accepted = {"threads", "allow_fallback", "tuning", "provider_options", "library", "profile"}
    session_options: dict[str, Any] = {}
    for name, value in options.items():
        if name in accepted:
            session_options |= {} if value is None else {name: value}
        elif name in ("torch_dtype", "dtype"):
            _check_dtype(value, folder)
        elif name == "variant":
            _check_dtype({"fp16": "float16", "bf16": "bfloat16"}.get(value, value), folder)
        elif name in REJECTED_OPTIONS and value is not None:
            raise InputError(f"from_pretrained takes no {name}: {REJECTED_OPTIONS[name]}.")
        elif name not in IGNORED_OPTIONS and name not in REJECTED_OPTIONS:
            raise InputError(f"from_pretrained takes no {name}; of a session it takes {', '.join(sorted(accepted))}.")
    return SessionOptions(**session_options)


def _check_dtype(requested: Any, folder: Path) -> None:
    """Raise InputError unless the folder was made in this type; None and "auto" are any."""
    if requested is None or str(requested) == "auto":
        return
    name = str(requested).removeprefix("torch.")
    options = read_manifest(folder).get("options", {})
    folder_dtype = options.get("dtype", "float32")
    # Target cpu stores half precision and reads float32.
    if name != folder_dtype and (name, options.get("target")) != ("float32", "cpu"):
        option = "" if name == "float32" else f" --{name}"
        raise InputError(
            f"{folder} computes in {folder_dtype}, not {name}: its type is chosen by `sd-ort optimize RAW OUT{option}`."
        )


class DiffusersCompatMixin(PipelineMethods):
    """diffusers' properties and methods of U-Net pipelines beside generating images."""

    REJECTED_METHODS = REJECTED_METHODS | {
        "load_ip_adapter": "it is part of the UNet's graph: `sd-ort export MODEL OUT --ip-adapter FILE`",
        "unload_ip_adapter": "it is part of the UNet's graph: set_ip_adapter_scale(0) draws as without it",
        "disable_freeu": "it changes the UNet's graph, which is fixed when it is exported",
        "enable_freeu": "it changes the UNet's graph, which is fixed when it is exported",
    }
    scheduler: Any
    # Of the last call, under diffusers' names.
    _guidance_rescale = 0.0
    _pag_scale = 0.0
    _pag_adaptive_scale = 0.0
    _clip_skip: int | None = None
    _cross_attention_kwargs: Mapping[str, Any] | None = None
    _denoising_start: float | None = None
    _denoising_end: float | None = None

    # --- Components -------------------------------------------------------------------------------------------------

    @property
    def unet(self) -> OrtModel:
        """The UNet's session, in a hoisted folder that of its every-step graph; its `config` is diffusers'."""
        return self._configured("unet")

    @unet.setter
    def unet(self, model: OrtModel) -> None:
        if not isinstance(model, OrtModel):
            raise InputError("unet is a session of the folder's graph: there is nothing for torch.compile to do.")
        self.models["unet"] = model

    @property
    def vae_decoder(self) -> OrtModel:
        return self.models["vae_decoder"]

    @vae_decoder.setter
    def vae_decoder(self, model: OrtModel) -> None:
        self.models["vae_decoder"] = model

    @property
    def controlnet(self) -> OrtModel | None:
        return self._configured("controlnet")

    @property
    def tokenizer(self) -> Any:
        return self._tokenizers().get("text_encoder")

    @property
    def tokenizer_2(self) -> Any:
        return self._tokenizers().get("text_encoder_2")

    def _tokenizers(self) -> dict[str, Any]:
        return {name: tokenizer for tokenizer, name in self.texts.encoders}

    @property
    def components(self) -> dict[str, Any]:
        """Components by diffusers' names. `from_pipe` makes another pipeline of them."""
        names = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "unet", "controlnet")
        attributes = {name: getattr(self, name) for name in names}
        parts = {name: part for name, part in attributes.items() if part is not None}
        return {"vae": self.vae, **parts, "scheduler": self.scheduler}

    # --- The last call ----------------------------------------------------------------------------------------------

    @property
    def guidance_rescale(self) -> float:
        return self._guidance_rescale

    @property
    def clip_skip(self) -> int | None:
        return self._clip_skip

    @property
    def cross_attention_kwargs(self) -> Mapping[str, Any] | None:
        return self._cross_attention_kwargs

    @property
    def denoising_start(self) -> float | None:
        return self._denoising_start

    @property
    def denoising_end(self) -> float | None:
        return self._denoising_end

    @property
    def do_classifier_free_guidance(self) -> bool:
        return self._guidance_scale > 1 and not self.unet_config.get("time_cond_proj_dim")

    # --- Text -------------------------------------------------------------------------------------------------------

    def encode_prompt(
        self,
        prompt: Prompt | None = None,
        device: Any = None,
        num_images_per_prompt: int = 1,
        do_classifier_free_guidance: bool = True,
        negative_prompt: Prompt | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return embeddings (N * images, S, C) of prompts and negative prompts, and SDXL's pooled ones (N * images, D).

        They are arrays where torch is not installed.

        `__call__` takes them as prompt_embeds and so on. more: other arguments of diffusers' `encode_prompt`.
        """
        more.pop("lora_scale", None)
        request = Request(prompt=prompt, negative_prompt=negative_prompt, **more)
        request.num_images_per_prompt = num_images_per_prompt
        request.size = (1, 1)
        request.check_text()
        request.guidance = 1.0 if do_classifier_free_guidance else None
        conditioning = self.texts.condition(request)
        rows = (
            [conditioning.embeddings, conditioning.added["text_embeds"]] if self.is_sdxl else [conditioning.embeddings]
        )
        halves = [as_tensor(each) for each in rows]
        tensors: list[Any] = []
        for half in halves:
            positive = half[-request.batch :]
            tensors += [positive, half[: request.batch] if do_classifier_free_guidance else None]
        return tuple(tensors)

    # --- Other pipelines --------------------------------------------------------------------------------------------

    @classmethod
    def from_pipe(cls, pipeline: Any, **options: Any) -> Any:
        """A pipeline of this kind over another's folder and open sessions. `options`: scheduler, safety_checker.

        Raises InputError when the folder lacks what this kind needs.
        """
        kind: Any = cls
        pipeline.models.require(*kind.REQUIRED_COMPONENTS)
        kind = kind._class_for(pipeline.index, pipeline.models, pipeline.is_sdxl)
        load = LoadOptions(
            vae_tiling=pipeline.vae.use_tiling,
            vae_slicing=pipeline.vae.use_slicing,
            safety_checker=options.get("safety_checker", pipeline.safety_checker),
            device_loop=pipeline.device_loop,
        )
        pipe = kind(pipeline.folder, pipeline.models, options.get("scheduler") or pipeline._scheduler, load)
        pipe._check_unet()
        pipe.texts, pipe.ip_adapter_scales = pipeline.texts, pipeline.ip_adapter_scales
        pipe.loras, pipe.lora_state = pipeline.loras, pipeline.lora_state
        return pipe
