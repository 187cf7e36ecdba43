"""Models of diffusers' pipelines that run components of a pipeline folder: same calls and config, no parameters.

Each is a subclass of the model that it replaces, because pipelines check types, but has none of its layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import torch
from diffusers import AutoencoderKL, ConfigMixin, ControlNetModel, ModelMixin, UNet2DConditionModel
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTinyOutput
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution
from diffusers.models.controlnets.controlnet import ControlNetOutput
from diffusers.models.modeling_outputs import AutoencoderKLOutput, Transformer2DModelOutput
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPTextModelOutput

from sd_ort.checkpoints.signatures import default_latents, levels
from sd_ort.core.errors import InputError
from sd_ort.integrations.denoiser import DenoiserRunner
from sd_ort.integrations.models import TorchComponentSessions
from sd_ort.integrations.unet import UNetRunner
from sd_ort.pipelines import tiling

OFFLOAD = (
    "models of ONNX Runtime are not moved between GPU and CPU: sd-ort opens them on their device. To save memory, "
    "open the folder with accelerate(pipe, folder, low_memory=True)."
)


class Component(torch.nn.Module):
    """Base class. `component` is the name in model_index.json, `parts` are the components of its sessions."""

    component = ""
    parts: tuple[str, ...] = ()
    models: TorchComponentSessions

    def __init__(self, models: TorchComponentSessions, component: str | None = None) -> None:
        """Raises InputError if the folder of `models` does not have the component."""
        torch.nn.Module.__init__(self)  # without the layers of the replaced model
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
        """Open the component at `path`, FOLDER/component or FOLDER; other options of diffusers have no effect.

        Raises:
            InputError: if the folder does not have the component, or has another dtype.
            ProviderError: if the provider cannot be used.
        """
        path = Path(path)
        inside = not (path / "model_index.json").is_file()
        model = cls(TorchComponentSessions(path.parent if inside else path, provider), path.name if inside else None)
        dtype = diffusers.get("torch_dtype", diffusers.get("dtype"))
        if dtype in (torch.float16, torch.bfloat16) and model.dtype != dtype:
            raise InputError(f"{path} was optimized for {model.dtype}, not {dtype}: leave dtype out.")
        return model

    def save_pretrained(self, *_: Any, **__: Any) -> NoReturn:
        """Raises InputError: the folder is already saved."""
        raise InputError(f"copy the folder {self.models.folder} instead of saving a pipeline that runs on it.")

    @property
    def device(self) -> torch.device:
        """The device of the outputs."""
        return self.models.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the graph's inputs."""
        return self.models.dtype(self.parts[-1])

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return self; raises InputError for another device or dtype."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type not in (self.device.type, "meta"):
            raise InputError(
                f"{self.component} runs on the {self.models.provider} provider, with outputs on {self.device}, not "
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
        """Raises InputError: accelerate's hooks move parameters, so enable_model_cpu_offload would have no effect."""
        raise InputError(OFFLOAD)


def _reject_arguments(component: Component, **arguments: Any) -> None:
    """Raise InputError for arguments with a value, which the graph does not support."""
    for name, value in arguments.items():
        if value is not None and value != {}:
            raise InputError(
                f"{component.component} was exported without {name}: use the torch model for it (LoRAs: "
                "pipe.load_lora_weights and pipe.set_adapters after accelerate)."
            )


def _conditioning(unet: OrtUNet, context: torch.Tensor, more: Mapping[str, Any] | None, **named: Any) -> dict[str, Any]:
    """Return the conditioning inputs that have a value. Raises InputError for inputs that the graph does not have."""
    inputs = {"encoder_hidden_states": context, **(more or {}), **named}
    inputs = {name: value for name, value in inputs.items() if value is not None}
    supported = unet.runner.graphs.input_names()
    _reject_arguments(unet, **{name: value for name, value in inputs.items() if name not in supported})
    return inputs


class OrtUNet(Component, UNet2DConditionModel):
    """`UNet2DConditionModel` on the folder's `unet`, hoisted or not."""

    component, parts = "unet", ("unet",)

    def __init__(self, models: TorchComponentSessions, component: str | None = None) -> None:
        Component.__init__(self, models)
        self.runner = UNetRunner(models)

    @property
    def add_embedding(self) -> Any:
        """The input width of SDXL's added embedding, which pipelines read."""
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
        """See `UNet2DConditionModel.forward`. Raises InputError for unsupported arguments: masks, adapters."""
        _reject_arguments(
            self,
            attention_mask=attention_mask,
            cross_attention_kwargs=cross_attention_kwargs,
            down_intrablock_additional_residuals=down_intrablock_additional_residuals,
            encoder_attention_mask=encoder_attention_mask,
        )
        named = {"class_labels": class_labels, "timestep_cond": timestep_cond}
        conditioning = _conditioning(self, encoder_hidden_states, added_cond_kwargs, **named)
        residuals = down_block_additional_residuals or ()
        out = self.runner(sample, timestep, conditioning, residuals, mid_block_additional_residual)
        return UNet2DConditionOutput(sample=out) if return_dict else (out,)

    def set_attn_processor(self, processor: Any) -> None:
        """Raises InputError: attention is fused in the graph."""
        raise InputError("attention processors (IP-Adapter, ...) need the torch UNet: the graph's attention is fused.")

    def enable_freeu(self, *_: Any, **__: Any) -> None:
        """Raises InputError: the graph was exported without FreeU."""
        raise InputError("FreeU needs the torch UNet: the graph was exported without it.")


class OrtTransformer(Component, ModelMixin, ConfigMixin):
    """diffusers' transformer of Stable Diffusion 3, FLUX.1 or FLUX.2 on the folder's `transformer`."""

    config_name = "config.json"
    component, parts = "transformer", ("transformer",)
    encoder_hid_proj = None

    def __init__(self, models: TorchComponentSessions, component: str | None = None) -> None:
        Component.__init__(self, models)
        self.runner = DenoiserRunner(models, "transformer")

    @contextlib.contextmanager
    def cache_context(self, name: str) -> Iterator[None]:
        """Do nothing: the graph caches no block."""
        yield

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        pooled_projections: torch.Tensor | None = None,
        timestep: Any = None,
        img_ids: torch.Tensor | None = None,
        txt_ids: torch.Tensor | None = None,
        guidance: torch.Tensor | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
        **more: Any,
    ) -> Any:
        """See the model's own `forward`. Raises InputError for unsupported arguments: ControlNets, skipped layers."""
        _reject_arguments(self, joint_attention_kwargs=joint_attention_kwargs, **more)
        conditioning = {
            "encoder_hidden_states": encoder_hidden_states, "pooled_projections": pooled_projections,
            "guidance": guidance,
            **{name: ids[0] if ids is not None and ids.ndim == 3 else ids
               for name, ids in (("img_ids", img_ids), ("txt_ids", txt_ids))},
        }  # fmt: skip
        tensors = {name: tensor for name, tensor in conditioning.items() if tensor is not None}
        out = self.runner.predict({"hidden_states": hidden_states}, timestep, tensors)
        return Transformer2DModelOutput(sample=out) if return_dict else (out,)


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
        """See `ControlNetModel.forward`. Raises InputError for unsupported arguments."""
        _reject_arguments(self, attention_mask=attention_mask, cross_attention_kwargs=cross_attention_kwargs)
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
        if guess_mode:  # scales from 0.1 for the outermost to 1 for the innermost residual, as in diffusers
            scales = torch.logspace(-1, 0, len(residuals)) * conditioning_scale
            residuals = [r * float(s) for r, s in zip(residuals, scales, strict=True)]
        if return_dict:
            return ControlNetOutput(down_block_res_samples=residuals[:-1], mid_block_res_sample=residuals[-1])
        return residuals[:-1], residuals[-1]


class OrtVae(Component, AutoencoderKL):
    """`AutoencoderKL`, or `AutoencoderTiny`, on the folder's `vae_encoder` and `vae_decoder`."""

    component, parts = "vae", ("vae_encoder", "vae_decoder")

    def __init__(self, models: TorchComponentSessions, component: str | None = None) -> None:
        Component.__init__(self, models)
        self.use_slicing = self.use_tiling = False
        config = self._config()
        self.factor, self.image_channels = 2 ** (levels(config) - 1), config.get("in_channels", 3)
        self.tile_sample_min_size = default_latents(config)  # tile size in pixels; the next one in latents
        self.tile_latent_min_size = self.tile_sample_min_size // self.factor

    def _config(self) -> dict[str, Any]:
        # Optimizing the graph has found overflows in float16 and left these nodes in float32: no upcast is needed.
        return {**super()._config(), "force_upcast": False}

    def encode(self, x: torch.Tensor, return_dict: bool = True) -> Any:
        """Encode x (B, 3, H, W) in -1..1 like `AutoencoderKL.encode`: to a distribution, or a tiny VAE's latents."""
        encoded = self._run_sliced_or_tiled(lambda part: self._run("vae_encoder", sample=part), x)
        if self.models.models["vae_encoder"].outputs == ["latent_sample"]:
            return AutoencoderTinyOutput(latents=encoded) if return_dict else (encoded,)
        distribution = DiagonalGaussianDistribution(encoded)
        return AutoencoderKLOutput(latent_dist=distribution) if return_dict else (distribution,)

    def decode(self, z: torch.Tensor, return_dict: bool = True, generator: Any = None) -> Any:
        """Decode unscaled latents z (B, C, h, w) like `AutoencoderKL.decode`: images (B, 3, H, W) in -1..1."""
        image = self._run_sliced_or_tiled(lambda part: self._run("vae_decoder", latent_sample=part), z)
        return DecoderOutput(sample=image) if return_dict else (image,)

    def _run(self, part: str, **tensors: torch.Tensor) -> torch.Tensor:
        (x,) = tensors.values()
        (output,) = self.models.run(part, **tensors).values()
        return output.to(x.device, x.dtype)

    def _run_sliced_or_tiled(self, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Run on x at once, by image after `enable_slicing`, or in tiles after `enable_tiling`."""
        if self.use_slicing and len(x) > 1:
            return torch.cat([self._run_sliced_or_tiled(run, part) for part in x.split(1)])
        sides = [self.tile_sample_min_size, self.tile_latent_min_size]
        if x.shape[1] != self.image_channels:  # latents to pixels
            sides.reverse()
        if not self.use_tiling or max(x.shape[2:]) <= sides[0]:
            return run(x)

        def on_arrays(part: np.ndarray) -> np.ndarray:
            return run(torch.from_numpy(part)).numpy()

        return torch.from_numpy(tiling.run_in_tiles(on_arrays, x.float().cpu().numpy(), *sides)).to(x.device, x.dtype)


class OrtTextEncoder(Component, ModelMixin, ConfigMixin):
    """transformers' `CLIPTextModel` (or `...WithProjection`) on the folder's `text_encoder` or `text_encoder_2`."""

    config_name = "config.json"
    component, parts = "text_encoder", ("text_encoder",)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the outputs, which pipelines pass to the UNet."""
        return self.models.dtype("unet") if "unet" in self.models else torch.float32

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        **more: Any,
    ) -> Any:
        """Encode token ids (B, S) to the outputs that the pipelines of the folder's family use.

        SD: the last hidden state (B, S, C). SDXL: the penultimate one, as `hidden_states[-2]`, and the second encoder's
        `text_embeds` (B, D). Raises InputError for a mask, or another hidden state (clip_skip).
        """
        _reject_arguments(self, attention_mask=attention_mask, **{k: v for k, v in more.items() if k != "return_dict"})
        outputs = self.models.run(self.component, input_ids=input_ids)
        outputs = {name: value.to(self.dtype) for name, value in outputs.items()}
        if "hidden_states" not in outputs:
            hidden = _HiddenStates() if output_hidden_states else None
            last, pooled = outputs["last_hidden_state"], outputs.get("pooler_output")
            return BaseModelOutputWithPooling(last_hidden_state=last, pooler_output=pooled, hidden_states=hidden)
        hidden = _HiddenStates([outputs["hidden_states"]])
        if "text_embeds" in outputs:
            return CLIPTextModelOutput(text_embeds=outputs["text_embeds"], hidden_states=hidden)
        # SDXL uses only the hidden states of its first encoder; last_hidden_state is a placeholder.
        return BaseModelOutputWithPooling(last_hidden_state=outputs["hidden_states"], hidden_states=hidden)


class _HiddenStates(tuple):
    """Hidden states with the penultimate one, `[-2]`, alone. Other indices raise InputError."""

    def __getitem__(self, index: Any) -> Any:
        if index == -2 and len(self):
            return super().__getitem__(0)
        raise InputError("clip_skip needs hidden states that the graph does not output: leave clip_skip out.")
