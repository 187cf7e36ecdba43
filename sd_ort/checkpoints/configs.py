"""Reads the config.json of models, and checks the types of all values that are used.

Limits are far above any model of the families; they bound the work and memory that a malicious file can cause.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from sd_ort.core.errors import InputError
from sd_ort.core.files import read_json, schema_mismatch
from sd_ort.core.pipeline_folder import COMPONENTS, model_name, read_index


class Config(dict[str, Any]):
    """A config whose entries are also attributes, as in diffusers. A missing key is an InputError."""

    path: Path | None = None

    def __missing__(self, key: str) -> Any:
        raise InputError(f"{self.path or 'the config'} lacks {key!r}: copy it from the original model.")

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"this config has no {name!r}")


def component_config(folder: Path, component: str, *, required: bool = False) -> dict[str, Any]:
    """Return the config.json of a component; without one, {} or, if `required`, the config inferred from its graph.

    Raises InputError for a damaged config, and a graph from which it cannot be inferred.
    """
    path = folder / component / "config.json"
    if path.is_file() or not required:
        return read_config(path) if path.is_file() else {}
    from sd_ort.checkpoints.config_inference import infer_configs

    inferred = infer_configs(folder)
    return _checked(path, inferred[component], CONFIG) if component in inferred else read_config(path)


def model_config(model: Path) -> dict[str, Any]:
    """Return the config.json next to the ONNX file of a component; {} for other files, and without one."""
    return component_config(model.parent.parent, model.parent.name) if model_name(model) in COMPONENTS else {}


def read_config(path: Path, missing_message: str | None = None, root: Path | None = None) -> dict[str, Any]:
    """Return a model's config, which lies in `root`, the pipeline folder around its folder by default.

    Raises InputError if it is damaged, leads elsewhere, or is missing, for the reason `missing_message`.
    """
    config = read_json(path, missing_message, root or path.parent.parent)
    if isinstance(adapter := config.get("ip_adapter"), dict) and "rows" in adapter:  # its name until 2026-11
        adapter.setdefault("hidden_state_length", adapter.pop("rows"))
    return _checked(path, config, CONFIG)


# Pipelines whose class in diffusers corrects the scheduler config of folders from 2022.
CORRECTED_PIPELINES = re.compile(r"StableDiffusion(Img2Img|Inpaint)?Pipeline$")


def scheduler_config(folder: Path) -> dict[str, Any]:
    """Return the config of a pipeline's scheduler as diffusers' class of that pipeline uses it.

    Stable Diffusion, except XL and ControlNet, sets `steps_offset` to 1, and inpainting skips PNDM's Runge-Kutta steps.
    Raises InputError if the config or the pipeline's index is missing or damaged.
    """
    path = folder / "scheduler" / "scheduler_config.json"
    config: dict[str, Any] = _checked(path, read_json(path, root=folder), SCHEDULER)
    pipeline = str(read_index(folder).get("_class_name", ""))
    if CORRECTED_PIPELINES.search(pipeline):
        config = {**config, "steps_offset": 1}
        if "Inpaint" in pipeline and config.get("_class_name") == "PNDMScheduler":
            config["skip_prk_steps"] = True
    return config


def _checked(path: Path, config: dict[str, Any], schema: dict[str, Any]) -> Config:
    if wrong := schema_mismatch(config, schema):
        raise InputError(f"{path} is damaged at {wrong!r}: copy it from the original model.")
    checked = Config(config)
    checked.path = path
    return checked


def _count(limit: int) -> Any:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= limit


def _counts(limit: int, max_length: int) -> Any:
    is_count = _count(limit)
    return lambda value: isinstance(value, list) and 1 <= len(value) <= max_length and all(map(is_count, value))


def _either(*checks: Any) -> Any:
    return lambda value: any(check(value) for check in checks)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30 and math.isfinite(value)


_WIDTH = _count(1 << 16)


def _ip_adapter(value: Any) -> bool:
    """Check the entry of `checkpoints.ip_adapter`; its other values are not read from the file."""
    if not isinstance(value, dict) or not _WIDTH(value.get("width")):
        return False
    layers = value.get("layers")
    block = r"((down|up)_blocks\.\d{1,2}|mid_block)\.attentions\.\d{1,2}\.transformer_blocks\.\d{1,3}"
    if not isinstance(layers, list) or not 1 <= len(layers) <= 1024:
        return False
    named = all(isinstance(name, str) and re.fullmatch(block, name) for name in layers)
    length = value.get("hidden_state_length")
    return named and (length is None or _WIDTH(length))


CONFIG = {
    "_class_name": str,
    "architectures": [str],
    "block_out_channels": _counts(1 << 16, 12),
    "layers_per_block": _either(_count(64), _counts(64, 12)),
    "sample_size": _either(_count(1 << 14), _counts(1 << 14, 2)),
    **dict.fromkeys(("in_channels", "out_channels", "latent_channels", "conditioning_channels"), _count(1 << 12)),
    "cross_attention_dim": _either(_WIDTH, _counts(1 << 16, 12)),
    **dict.fromkeys(("projection_class_embeddings_input_dim", "addition_time_embed_dim", "time_cond_proj_dim"), _WIDTH),
    **dict.fromkeys(("hidden_size", "projection_dim", "max_position_embeddings"), _WIDTH),
    **dict.fromkeys(("image_size", "num_channels"), _count(1 << 12)),
    "patch_size": _either(_count(1 << 12), _counts(1 << 12, 2)),
    **dict.fromkeys(("d_model", "joint_attention_dim", "pooled_projection_dim", "caption_projection_dim"), _WIDTH),
    **dict.fromkeys(("pos_embed_max_size", "num_layers", "num_single_layers"), _count(1 << 12)),
    "axes_dims_rope": _counts(1 << 12, 4),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"), _count(1 << 12)),
    "dual_attention_layers": [int],
    "guidance_embeds": bool,
    "vocab_size": _count(1 << 24),
    "scaling_factor": lambda value: _number(value) and value != 0,
    "shift_factor": _number,
    "latents_mean": [_number],
    "latents_std": [_number],
    "addition_embed_type": str,
    "class_embed_type": str,
    "ip_adapter": _ip_adapter,
}
SCHEDULER = {
    "_class_name": str,
    "num_train_timesteps": _count(100_000),
    "beta_schedule": str,
    "prediction_type": str,
    "timestep_spacing": str,
    **dict.fromkeys(("beta_start", "beta_end", "steps_offset", "solver_order", "original_inference_steps"), _number),
    "trained_betas": lambda value: isinstance(value, list) and len(value) <= 100_000 and all(map(_number, value)),
}
