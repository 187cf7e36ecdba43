"""A folder's UNet as ComfyUI's MODEL: its own `BaseModel` and `ModelPatcher` around a module that calls our graph.

ComfyUI's sampling, conditioning, ControlNets, inpainting and hooks are what they were; only `diffusion_model` is ours.
It holds no parameters, but lists the names and shapes of those it stands for, so that LoRA loaders find them.
"""

from __future__ import annotations

from typing import Any

import comfy.model_base
import comfy.model_management
import comfy.supported_models
import comfy.utils
import torch

from sd_ort.core.errors import InputError
from sd_ort.family.conditions import is_sdxl, time_ids_split
from sd_ort.family.configs import scheduler_config
from sd_ort.hosts.comfyui.patcher import GraphPatcher
from sd_ort.hosts.comfyui.patches import follow_patches
from sd_ort.hosts.models import HostModels
from sd_ort.hosts.unet import HostUNet, refuse_patches, residuals_of

# diffusers' names of noise schedules and predictions -> ComfyUI's.
BETAS = {"scaled_linear": "linear", "linear": "sqrt_linear", "squaredcos_cap_v2": "cosine"}
PREDICTIONS = {"epsilon": "EPS", "v_prediction": "V_PREDICTION"}


def open_model(models: HostModels) -> GraphPatcher:
    """The folder's UNet as a MODEL. Raises InputError for a family that ComfyUI's nodes would not know."""
    config = models.config("unet")
    xl = is_sdxl(config)
    if config.get("in_channels") not in (4, 9) or config.get("time_cond_proj_dim") or config.get("class_embed_type"):
        raise InputError(f"{models.folder} is neither SD 1.x, 2.x nor SDXL, or their inpainting: use sd-ort generate.")
    if not xl:
        kind, base = ("SD20" if config["cross_attention_dim"] == 1024 else "SD15"), _Model
    elif time_ids_split(config)[1] == 6:
        kind, base = "SDXL", _RawSizes
    else:
        kind, base = "SDXLRefiner", _RawSizesRefiner
    device = torch.device("cpu") if models.device.type == "cpu" else comfy.model_management.get_torch_device()
    described = _described(kind, config, models)
    schedule = scheduler_config(models.folder)
    prediction = PREDICTIONS.get(schedule.get("prediction_type", "epsilon"))
    if prediction is None:
        raise InputError(
            f"{models.folder} predicts {schedule['prediction_type']}, which ComfyUI's samplers do not take."
        )
    model = base(described, model_type=getattr(comfy.model_base.ModelType, prediction))
    model.diffusion_model = DiffusionModel(models, comfy.utils.unet_to_diffusers(described.unet_config))
    if config["in_channels"] == 9:
        model.set_inpaint()
    patcher = GraphPatcher(model, load_device=device, offload_device=device, size=1)  # ONNX Runtime has the weights
    patcher.cached_patcher_init = (_again, (models.folder, models.provider))
    follow_patches(patcher, models, "unet", model.diffusion_model.names)
    return patcher


def _again(folder: Any, provider: str, disable_dynamic: bool = False) -> GraphPatcher:
    """A model of its own on the same folder: for deep clones."""
    return open_model(HostModels(folder, provider))


def _described(kind: str, config: dict[str, Any], models: HostModels) -> Any:
    """ComfyUI's description of the model: how its layers are called, its latents and its noise schedule."""
    described = getattr(comfy.supported_models, kind)(_comfy_config(config))
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
    """The blocks of a diffusers UNet, as ComfyUI's own UNet would be told them."""
    channels = config["block_out_channels"]
    levels = len(channels)
    per_level = (
        [config["layers_per_block"]] * levels
        if isinstance(config["layers_per_block"], int)
        else config["layers_per_block"]
    )
    given = config.get("transformer_layers_per_block", 1)
    depths = [given] * levels if isinstance(given, int) else list(given)
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


class PromptsOnDevice:
    """Prompts on the sampler's device.

    ComfyUI leaves them on the host, where it joins those of all rows anew at every step, with all of torch's threads,
    and copies them: 13 ms a step on an H200's host whose 32 cores others used too.
    """

    def extra_conds(self, **told: Any) -> dict[str, Any]:
        """What the model is told of one prompt, once a picture; `device`: the sampler's."""
        made: dict[str, Any] = super().extra_conds(**told)  # type: ignore[misc]
        for each in made.values():
            if isinstance(each.cond, torch.Tensor):
                each.cond = each.cond.to(told["device"])
        return made


class _Model(PromptsOnDevice, comfy.model_base.BaseModel):
    """SD 1.x and 2.x."""


class _Sizes(PromptsOnDevice):
    """SDXL's sizes as they are, behind the pooled text: our graph embeds them itself."""

    def embedder(self, number: torch.Tensor) -> torch.Tensor:
        """One number (1,) -> (1, 1)."""
        return number[:, None]


class _RawSizes(_Sizes, comfy.model_base.SDXL):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self._modules["embedder"]


class _RawSizesRefiner(_Sizes, comfy.model_base.SDXLRefiner):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self._modules["embedder"]


class DiffusionModel(torch.nn.Module):
    """What ComfyUI calls at every step; `names`: its name of a weight -> the name in our recipes."""

    def __init__(self, models: HostModels, to_comfy: dict[str, str]) -> None:
        """`to_comfy`: diffusers' name of a weight -> ComfyUI's."""
        super().__init__()
        self.models, self.called, self.dtype = models, HostUNet(models), models.dtype("unet")
        shapes = _shapes(models.config("unet"))
        self.names = {f"diffusion_model.{to_comfy[n]}": n for n in shapes if n in to_comfy}
        self.listed = {to_comfy[n]: torch.empty(s, device="meta") for n, s in shapes.items() if n in to_comfy}

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
        """Scaled latents x (B, C, h, w), timesteps (B,), context (B, S, C), y (B, pooled + sizes) -> (B, 4, h, w).

        Raises InputError for patches of layers (FreeU, IP-Adapter, ...) and T2I-Adapters: the graph is fused.
        """
        options = transformer_options or {}
        refuse_patches(options)
        told = {"encoder_hidden_states": context}
        if y is not None and "text_embeds" in self._told():
            pooled = time_ids_split(self.models.unet_config)[0]
            told |= {"text_embeds": y[:, :pooled], "time_ids": y[:, pooled:]}
        residuals, middle = residuals_of(x, control)
        uuids = options.get("uuids")
        key = (tuple(uuids), tuple(options.get("cond_or_uncond", ()))) if uuids else None
        return self.called(x, timesteps, told, residuals, middle, key)

    def _told(self) -> set[str]:
        parts = ("unet", "unet_prompt", "unet_time")
        return {name for part in parts if part in self.models for name in self.models.inputs(part)}

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Names and shapes (on torch's meta device) of the weights that the graph was made from."""
        destination = {} if destination is None else destination
        for name, tensor in self.listed.items():
            destination[prefix + name] = tensor
        return destination


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of a diffusers UNet's weights by name; nothing is allocated."""
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        model = UNet2DConditionModel.from_config(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
