"""A folder's denoiser as ComfyUI's MODEL: ComfyUI's `BaseModel` and `ModelPatcher` with a `diffusion_model` of sd-ort.

Sampling, conditioning, ControlNets, inpainting and hooks are ComfyUI's. `diffusion_model` has no parameters, but its
state_dict has the names and shapes of the original ones, for LoRA loaders.
"""

from __future__ import annotations

from typing import Any

import comfy.model_base
import comfy.model_management
import comfy.supported_models
import comfy.utils
import torch

from sd_ort.checkpoints.configs import scheduler_config
from sd_ort.checkpoints.transformer_layouts import RowSlice
from sd_ort.checkpoints.unet_inputs import is_sdxl, time_ids_split
from sd_ort.core.errors import InputError
from sd_ort.integrations.comfyui.net import GraphNet, PromptsOnSamplerDevice, prompt_key
from sd_ort.integrations.comfyui.patcher import GraphPatcher
from sd_ort.integrations.comfyui.patches import apply_patches_on_load
from sd_ort.integrations.models import TorchComponentSessions
from sd_ort.integrations.unet import UNetRunner, parse_residuals, reject_patches

# diffusers' names of noise schedules and predictions -> ComfyUI's.
BETAS = {"scaled_linear": "linear", "linear": "sqrt_linear", "squaredcos_cap_v2": "cosine"}
PREDICTIONS = {"epsilon": "EPS", "v_prediction": "V_PREDICTION"}


def open_model(models: TorchComponentSessions) -> GraphPatcher:
    """Return the folder's UNet or diffusion transformer as a MODEL.

    Raises InputError if ComfyUI does not support the model family.
    """
    if "transformer" in models:
        from sd_ort.integrations.comfyui.transformer import transformer_model

        model = transformer_model(models)
    else:
        model = _unet_model(models)
    device = torch.device("cpu") if models.device.type == "cpu" else comfy.model_management.get_torch_device()
    patcher = GraphPatcher(model, load_device=device, offload_device=device, size=1)  # ONNX Runtime has the weights
    patcher.cached_patcher_init = (_reopen, (models.folder, models.provider))
    net: GraphNet = model.diffusion_model
    apply_patches_on_load(patcher, models, net.component, net.names)
    return patcher


def _reopen(folder: Any, provider: str, disable_dynamic: bool = False) -> GraphPatcher:
    """Open another model of the same folder, for deep clones."""
    return open_model(TorchComponentSessions(folder, provider))


def _unet_model(models: TorchComponentSessions) -> Any:
    """Return ComfyUI's model of a UNet. Raises InputError if ComfyUI does not support the model family."""
    config = models.config("unet")
    xl = is_sdxl(config)
    if config.get("in_channels") not in (4, 9) or config.get("time_cond_proj_dim") or config.get("class_embed_type"):
        raise InputError(f"{models.folder} is neither SD 1.x, 2.x nor SDXL, or their inpainting: use sd-ort generate.")
    if not xl:
        family, base = ("SD20" if config["cross_attention_dim"] == 1024 else "SD15"), _Model
    elif time_ids_split(config)[1] == 6:
        family, base = "SDXL", _SdxlModel
    else:
        family, base = "SDXLRefiner", _SdxlRefinerModel
    description = _comfy_description(family, config, models)
    schedule = scheduler_config(models.folder)
    prediction = PREDICTIONS.get(schedule.get("prediction_type", "epsilon"))
    if prediction is None:
        raise InputError(
            f"{models.folder} predicts {schedule['prediction_type']}, which ComfyUI's samplers do not support."
        )
    model = base(description, model_type=getattr(comfy.model_base.ModelType, prediction))
    renamed = comfy.utils.unet_to_diffusers(description.unet_config)
    # It lists class_embedding, rejected above, beside the add_embedding that has the same names in ComfyUI.
    to_comfy = {name: theirs for name, theirs in renamed.items() if not name.startswith("class_embedding.")}
    model.diffusion_model = DiffusionModel(models, to_comfy, _meta_weights(description.unet_config))
    if config["in_channels"] == 9:
        model.set_inpaint()
    return model


def _comfy_description(family: str, config: dict[str, Any], models: TorchComponentSessions) -> Any:
    """Return ComfyUI's description of the model: layer names, latent format and noise schedule."""
    described = getattr(comfy.supported_models, family)(_comfy_config(config))
    described.unet_config["disable_unet_model_creation"] = True
    described.unet_config["dtype"] = models.dtype("unet")
    described.manual_cast_dtype = None
    schedule = scheduler_config(models.folder)
    described.sampling_settings |= {
        "beta_schedule": BETAS.get(schedule.get("beta_schedule", "scaled_linear"), "linear"),
        "linear_start": schedule.get("beta_start", 0.00085),
        "linear_end": schedule.get("beta_end", 0.012),
        "timesteps": schedule.get("num_train_timesteps", 1000),
    }
    vae = models.config("vae_decoder") if "vae_decoder" in models else {}
    described.latent_format.scale_factor = vae.get("scaling_factor", described.latent_format.scale_factor)
    return described


def _comfy_config(config: dict[str, Any]) -> dict[str, Any]:
    """Convert a diffusers UNet config to that of ComfyUI's UNet."""
    channels = config["block_out_channels"]
    levels = len(channels)
    per_level = (
        [config["layers_per_block"]] * levels
        if isinstance(config["layers_per_block"], int)
        else config["layers_per_block"]
    )
    layers = config.get("transformer_layers_per_block", 1)
    depths = [layers] * levels if isinstance(layers, int) else list(layers)
    attends = ["CrossAttn" in name for name in config["down_block_types"]]
    depths = [depth if attend else 0 for depth, attend in zip(depths, attends, strict=True)]
    deepest = max((d for d in depths if isinstance(d, int)), default=0) or 1
    return {
        "in_channels": config["in_channels"],
        "out_channels": config["out_channels"],
        "model_channels": channels[0],
        "channel_mult": [channel // channels[0] for channel in channels],
        "num_res_blocks": list(per_level),
        "transformer_depth": [d for depth, count in zip(depths, per_level, strict=True) for d in [depth] * count],
        "transformer_depth_output": [
            d for depth, count in zip(depths, per_level, strict=True) for d in [depth] * (count + 1)
        ],
        "transformer_depth_middle": depths[-1] or deepest,
        "context_dim": config["cross_attention_dim"],
        "adm_in_channels": config.get("projection_class_embeddings_input_dim"),
        "use_linear_in_transformer": bool(config.get("use_linear_projection")),
    }  # fmt: skip


class _Model(PromptsOnSamplerDevice, comfy.model_base.BaseModel):
    """SD 1.x and 2.x."""


class _UnembeddedSizes(PromptsOnSamplerDevice):
    """Mixin that leaves SDXL's size conditioning as numbers, because sd-ort's graph embeds them."""

    def embedder(self, size: torch.Tensor) -> torch.Tensor:
        """Return a size (1,) as (1, 1) instead of its embedding."""
        return size[:, None]


class _SdxlModel(_UnembeddedSizes, comfy.model_base.SDXL):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self._modules["embedder"]


class _SdxlRefinerModel(_UnembeddedSizes, comfy.model_base.SDXLRefiner):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self._modules["embedder"]


class DiffusionModel(GraphNet):
    """ComfyUI's `diffusion_model` on a folder's UNet."""

    runner: UNetRunner

    def __init__(
        self, models: TorchComponentSessions, to_comfy: dict[str, str], weights: dict[str, torch.Tensor]
    ) -> None:
        """Open the UNet. `to_comfy`: diffusers' name of a weight -> ComfyUI's. `weights`: shapes by ComfyUI's names."""
        parts = {theirs: (RowSlice(name),) for name, theirs in to_comfy.items()}
        super().__init__(models, UNetRunner(models), parts, weights)

    def forward(
        self,
        x: torch.Tensor,
        timesteps: torch.Tensor,
        context: torch.Tensor,
        y: torch.Tensor | None = None,
        control: dict[str, list[Any]] | None = None,
        transformer_options: dict[str, Any] | None = None,
        **more: Any,
    ) -> torch.Tensor:
        """Predict (B, 4, h, w) from scaled latents x (B, C, h, w), timesteps (B,), context (B, S, C), y (B, D).

        y has the pooled text and SDXL's sizes. Raises InputError for patches of layers (FreeU, IP-Adapter, ...) and
        T2I-Adapters, because the graph is fused.
        """
        options = transformer_options or {}
        reject_patches(options)
        conditioning = {"encoder_hidden_states": context}
        if y is not None and "text_embeds" in self.runner.graphs.input_names():
            pooled = time_ids_split(self.models.unet_config)[0]
            conditioning |= {"text_embeds": y[:, :pooled], "time_ids": y[:, pooled:]}
        residuals, middle = parse_residuals(x, control)
        return self.runner(x, timesteps, conditioning, residuals, middle, prompt_key(options))


def _meta_weights(unet_config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights of ComfyUI's own UNet by name, on torch's meta device: shapes without data."""
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    config = {key: value for key, value in unet_config.items() if key != "disable_unet_model_creation"}
    config |= {
        "image_size": 32,
        "num_heads": -1,
        "num_head_channels": config["model_channels"],  # divides all channels; heads change no shape
        "use_spatial_transformer": True,
        "legacy": False,
        "num_classes": "sequential" if config["adm_in_channels"] else None,
    }
    with torch.device("meta"):
        unet = UNetModel(**config, device="meta")
    return dict(unet.state_dict())
