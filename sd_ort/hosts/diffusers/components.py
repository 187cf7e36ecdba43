"""The models of diffusers' pipelines as components of a pipeline folder: same calls, same config, no parameters.

Each is a subclass of the model it stands for, for pipelines ask what they were given, but holds none of its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import torch
from diffusers import AutoencoderKL, ConfigMixin, ControlNetModel, ModelMixin, UNet2DConditionModel
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTinyOutput
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution
from diffusers.models.controlnets.controlnet import ControlNetOutput
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPTextModelOutput

from sd_ort.core.errors import InputError
from sd_ort.family.signatures import default_latents, levels
from sd_ort.hosts.models import HostModels
from sd_ort.hosts.unet import HostUNet
from sd_ort.pipeline import tiling

OFFLOAD = (
    "models of ONNX Runtime are not moved between GPU and CPU: sd-ort opens them where they run. For little memory, "
    "open the folder with accelerate(pipe, folder, low_memory=True)."
)


class Component(torch.nn.Module):
    """What all of them share. `component` is the name of its folder, `parts` are those of its sessions."""

    component = ""
    parts: tuple[str, ...] = ()
    models: HostModels

    def __init__(self, models: HostModels, component: str | None = None) -> None:
        """Raises InputError when the folder of `models` lacks the component."""
        torch.nn.Module.__init__(self)  # none of the layers of the model it stands for
        if component is not None:
            self.component, self.parts = component, (component,)
        models.models.require(*self.parts)
        self.models = models
        self.register_to_config(**self._config())  # type: ignore[operator]
        self.eval()

    def _config(self) -> dict[str, Any]:
        config = self.models.config(self.parts[-1])
        return {name: value for name, value in config.items() if name != "_class_name"}

    @classmethod
    def from_pretrained(cls, path: str | Path, provider: str | None = None, **diffusers: Any) -> Any:
        """Open the component at FOLDER/component, or in FOLDER; diffusers' other options mean nothing here.

        Raises InputError for a folder that lacks it, ProviderError for a provider that cannot be used.
        """
        path = Path(path)
        inside = not (path / "model_index.json").is_file()
        made = cls(HostModels(path.parent if inside else path, provider), path.name if inside else None)
        asked = diffusers.get("torch_dtype", diffusers.get("dtype"))
        if asked in (torch.float16, torch.bfloat16) and made.dtype != asked:
            raise InputError(f"{path} was optimized for {made.dtype}, not {asked}: leave dtype out.")
        return made

    def save_pretrained(self, *_: Any, **__: Any) -> NoReturn:
        """Raises InputError: the folder is what is saved."""
        raise InputError(f"copy the folder {self.models.folder} instead of saving a pipeline that runs on it.")

    @property
    def device(self) -> torch.device:
        """Where its outputs lie."""
        return self.models.device

    @property
    def dtype(self) -> torch.dtype:
        """What its graph computes with: that of its inputs."""
        return self.models.dtype(self.parts[-1])

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Itself, if that is where and what it is; raises InputError for another device or dtype."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type not in (self.device.type, "meta"):
            raise InputError(
                f"{self.component} runs on the {self.models.provider} provider and gives tensors on {self.device}, not "
                f"{device}: give accelerate a provider, such as provider='cuda'. And {OFFLOAD}"
            )
        if dtype is not None and dtype.is_floating_point and dtype != self.dtype:
            raise InputError(
                f"{self.component} was optimized for {self.dtype}: for {dtype} optimize its folder again "
                f"({'with' if dtype == torch.float16 else 'without'} --float16)."
            )
        return self

    @property
    def _hf_hook(self) -> NoReturn:
        raise AttributeError("no hook")

    @_hf_hook.setter
    def _hf_hook(self, hook: Any) -> None:
        """accelerate's hooks move parameters: refused, for enable_model_cpu_offload would do nothing."""
        raise InputError(OFFLOAD)


def _refuse(component: Component, **arguments: Any) -> None:
    """Raise InputError for what is asked of a model that its graph cannot do."""
    for name, value in arguments.items():
        if value is not None and value != {}:
            raise InputError(
                f"{component.component} was exported without {name}: use the torch model for it (LoRAs: "
                "pipe.load_lora_weights and pipe.set_adapters after accelerate)."
            )


def _told(component: Component, context: torch.Tensor, more: Mapping[str, Any] | None, **named: Any) -> dict[str, Any]:
    """The inputs beside sample and timestep, and none that the graph does not take."""
    given = {"encoder_hidden_states": context, **(more or {}), **named}
    given = {name: value for name, value in given.items() if value is not None}
    models = component.models
    taken = {name for part in ("unet", "unet_prompt", "unet_time") if part in models for name in models.inputs(part)}
    for name in given:
        if name not in taken:
            _refuse(component, **{name: given[name]})
    return given


class OrtUNet(Component, UNet2DConditionModel):
    """`UNet2DConditionModel` on the folder's `unet`, hoisted or not."""

    component, parts = "unet", ("unet",)

    def __init__(self, models: HostModels, component: str | None = None) -> None:
        Component.__init__(self, models)
        self.called = HostUNet(models)

    @property
    def add_embedding(self) -> Any:
        """What pipelines read of it: how wide the embedding is that SDXL's sizes and pooled text make."""
        width = self.models.unet_config.get("projection_class_embeddings_input_dim")
        return SimpleNamespace(linear_1=SimpleNamespace(in_features=width))

    encoder_hid_proj = None

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor | float,
        encoder_hidden_states: torch.Tensor,
        class_labels: torch.Tensor | None = None,
        timestep_cond: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        added_cond_kwargs: dict[str, torch.Tensor] | None = None,
        down_block_additional_residuals: tuple[torch.Tensor, ...] | None = None,
        mid_block_additional_residual: torch.Tensor | None = None,
        down_intrablock_additional_residuals: tuple[torch.Tensor, ...] | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> Any:
        """As `UNet2DConditionModel.forward`. Raises InputError for what the graph cannot do: masks, adapters."""
        _refuse(
            self,
            attention_mask=attention_mask,
            cross_attention_kwargs=cross_attention_kwargs,
            down_intrablock_additional_residuals=down_intrablock_additional_residuals,
            encoder_attention_mask=encoder_attention_mask,
        )
        named = {"class_labels": class_labels, "timestep_cond": timestep_cond}
        told = _told(self, encoder_hidden_states, added_cond_kwargs, **named)
        residuals = down_block_additional_residuals or ()
        out = self.called(sample, timestep, told, residuals, mid_block_additional_residual)
        return UNet2DConditionOutput(sample=out) if return_dict else (out,)

    def set_attn_processor(self, processor: Any) -> None:
        """Raises InputError: attention is fused in the graph."""
        raise InputError("attention processors (IP-Adapter, ...) need the torch UNet: the graph's attention is fused.")

    def enable_freeu(self, *_: Any, **__: Any) -> None:
        """Raises InputError: the graph was exported without."""
        raise InputError("FreeU needs the torch UNet: the graph was exported without it.")


class OrtControlNet(Component, ControlNetModel):
    """`ControlNetModel` on the folder's `controlnet`."""

    component, parts = "controlnet", ("controlnet",)

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor | float,
        encoder_hidden_states: torch.Tensor,
        controlnet_cond: torch.Tensor,
        conditioning_scale: float = 1.0,
        class_labels: torch.Tensor | None = None,
        timestep_cond: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        added_cond_kwargs: dict[str, torch.Tensor] | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        guess_mode: bool = False,
        return_dict: bool = True,
    ) -> Any:
        """As `ControlNetModel.forward`. Raises InputError for what the graph cannot do."""
        _refuse(self, attention_mask=attention_mask, cross_attention_kwargs=cross_attention_kwargs)
        named = {"class_labels": class_labels, "timestep_cond": timestep_cond}
        names = self.models.inputs("controlnet")
        rank = len(self.models.models["controlnet"].inputs["timestep"].shape)
        feed = {
            "sample": sample,
            "timestep": torch.as_tensor(timestep, dtype=torch.float32).reshape(-1)[:1].reshape((1,) * rank),
            "encoder_hidden_states": encoder_hidden_states,
            "controlnet_cond": controlnet_cond,
            "conditioning_scale": torch.full((1,), 1.0 if guess_mode else float(conditioning_scale)),
            **(added_cond_kwargs or {}),
            **{name: value for name, value in named.items() if value is not None},
        }
        outputs = self.models.run("controlnet", **{name: feed[name] for name in names if name in feed})
        residuals = [value.to(sample.device, sample.dtype) for value in outputs.values()]
        if guess_mode:  # from a tenth for the outermost to all for the innermost, as diffusers has it
            scales = torch.logspace(-1, 0, len(residuals)) * conditioning_scale
            residuals = [r * float(s) for r, s in zip(residuals, scales, strict=True)]
        if return_dict:
            return ControlNetOutput(down_block_res_samples=residuals[:-1], mid_block_res_sample=residuals[-1])
        return residuals[:-1], residuals[-1]


class OrtVae(Component, AutoencoderKL):
    """`AutoencoderKL`, or `AutoencoderTiny`, on the folder's `vae_encoder` and `vae_decoder`."""

    component, parts = "vae", ("vae_encoder", "vae_decoder")

    def __init__(self, models: HostModels, component: str | None = None) -> None:
        Component.__init__(self, models)
        self.use_slicing = self.use_tiling = False
        config = self._config()
        self.factor, self.image_channels = 2 ** (levels(config) - 1), config.get("in_channels", 3)
        self.tile_sample_min_size = default_latents(config)  # sides of tiles, in pixels and in latents
        self.tile_latent_min_size = self.tile_sample_min_size // self.factor

    def _config(self) -> dict[str, Any]:
        # What overflows float16 was found, and kept in float32, when the graph was optimized: nothing is left to cast.
        return {**super()._config(), "force_upcast": False}

    def encode(self, x: torch.Tensor, return_dict: bool = True) -> Any:
        """As `AutoencoderKL.encode`: x (B, 3, H, W) in -1..1 -> a distribution of latents, or a tiny VAE's latents."""
        made = self._whole(lambda part: self._run("vae_encoder", sample=part), x)
        if self.models.models["vae_encoder"].outputs == ["latent_sample"]:
            return AutoencoderTinyOutput(latents=made) if return_dict else (made,)
        drawn = DiagonalGaussianDistribution(made)
        return AutoencoderKLOutput(latent_dist=drawn) if return_dict else (drawn,)

    def decode(self, z: torch.Tensor, return_dict: bool = True, generator: Any = None) -> Any:
        """As `AutoencoderKL.decode`: z (B, C, h, w), already unscaled -> images (B, 3, H, W) in -1..1."""
        image = self._whole(lambda part: self._run("vae_decoder", latent_sample=part), z)
        return DecoderOutput(sample=image) if return_dict else (image,)

    def _run(self, part: str, **tensors: torch.Tensor) -> torch.Tensor:
        (given,) = tensors.values()
        (made,) = self.models.run(part, **tensors).values()
        return made.to(given.device, given.dtype)

    def _whole(self, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """x in one go, image by image, or in tiles, as `enable_slicing` and `enable_tiling` say."""
        if self.use_slicing and len(x) > 1:
            return torch.cat([self._whole(run, part) for part in x.split(1)])
        sides = [self.tile_sample_min_size, self.tile_latent_min_size]
        if x.shape[1] != self.image_channels:  # latents to pixels
            sides.reverse()
        if not self.use_tiling or max(x.shape[2:]) <= sides[0]:
            return run(x)

        def on_arrays(part: np.ndarray) -> np.ndarray:
            return run(torch.from_numpy(part)).numpy()

        return torch.from_numpy(tiling.tiled(on_arrays, x.float().cpu().numpy(), *sides)).to(x.device, x.dtype)


class OrtTextEncoder(Component, ModelMixin, ConfigMixin):
    """transformers' `CLIPTextModel` (or `...WithProjection`) on the folder's `text_encoder` or `text_encoder_2`."""

    config_name = "config.json"
    component, parts = "text_encoder", ("text_encoder",)

    @property
    def dtype(self) -> torch.dtype:
        """That of its output, which pipelines give the UNet."""
        return self.models.dtype("unet") if "unet" in self.models else torch.float32

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        **more: Any,
    ) -> Any:
        """Ids (B, S) -> what the pipelines of the folder's family read: SD the last hidden state (B, S, C), SDXL the
        last but one, as `hidden_states[-2]`, and the second encoder's `text_embeds` (B, D).

        Raises InputError for a mask, or another hidden state (clip_skip).
        """
        _refuse(self, attention_mask=attention_mask, **{k: v for k, v in more.items() if k != "return_dict"})
        made = self.models.run(self.component, input_ids=input_ids)
        made = {name: value.to(self.dtype) for name, value in made.items()}
        if "hidden_states" not in made:
            hidden = _HiddenStates() if output_hidden_states else None
            last, pooled = made["last_hidden_state"], made.get("pooler_output")
            return BaseModelOutputWithPooling(last_hidden_state=last, pooler_output=pooled, hidden_states=hidden)
        hidden = _HiddenStates([made["hidden_states"]])
        if "text_embeds" in made:
            return CLIPTextModelOutput(text_embeds=made["text_embeds"], hidden_states=hidden)
        # SDXL reads nothing else of its first encoder; this keeps its place in the output.
        return BaseModelOutputWithPooling(last_hidden_state=made["hidden_states"], hidden_states=hidden)


class _HiddenStates(tuple):
    """The last hidden state but one, or none; `[-2]` gives it, and what a graph does not give is refused."""

    def __getitem__(self, place: Any) -> Any:
        if place == -2 and len(self):
            return super().__getitem__(0)
        raise InputError("clip_skip needs hidden states that the graph does not give: leave clip_skip out.")
