"""Reads the config.json of models, and checks the types of all values that are used.

Limits are far above any model of the families; they bound the work and memory that a malicious file can cause.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from sd_ort.core.errors import InputError
from sd_ort.core.files import read_json
from sd_ort.core.pipeline_folder import COMPONENTS, model_name, read_index
from sd_ort.core.schema import bounded, list_of, record_type, schema_mismatch


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
    return _checked(path, inferred[component], CONFIG_TYPE) if component in inferred else read_config(path)


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
    return _checked(path, config, CONFIG_TYPE)


# Pipelines whose class in diffusers corrects the scheduler config of folders from 2022.
CORRECTED_PIPELINES = re.compile(r"StableDiffusion(Img2Img|Inpaint)?Pipeline$")


def scheduler_config(folder: Path) -> dict[str, Any]:
    """Return the config of a pipeline's scheduler as diffusers' class of that pipeline uses it.

    Stable Diffusion, except XL and ControlNet, sets `steps_offset` to 1, and inpainting skips PNDM's Runge-Kutta steps.
    Raises InputError if the config or the pipeline's index is missing or damaged.
    """
    path = folder / "scheduler" / "scheduler_config.json"
    config: dict[str, Any] = _checked(path, read_json(path, root=folder), SCHEDULER_TYPE)
    pipeline = str(read_index(folder).get("_class_name", ""))
    if CORRECTED_PIPELINES.search(pipeline):
        config = {**config, "steps_offset": 1}
        if "Inpaint" in pipeline and config.get("_class_name") == "PNDMScheduler":
            config["skip_prk_steps"] = True
    return config


def as_scheduler_config(scheduler: Any) -> dict[str, Any]:
    """Return the config of a diffusers scheduler object, of a mapping, or of a scheduler_config.json.

    Settings that it lacks have diffusers' defaults. Raises InputError for another object, a name, and a damaged file.
    """
    path = Path("the scheduler's config")
    if isinstance(scheduler, (str, Path)):
        path = Path(scheduler)
        if path.suffix != ".json":
            raise InputError(
                f"Scheduler {scheduler} cannot be set by name for this model: give a scheduler_config.json."
            )
        return _checked(path, read_json(path, f"{path} cannot be the scheduler"), SCHEDULER_TYPE)
    if isinstance(scheduler, Mapping):
        return _checked(path, dict(scheduler), SCHEDULER_TYPE)
    config, name = getattr(scheduler, "config", None), type(scheduler).__name__
    if not isinstance(config, Mapping):
        raise InputError(f"A {name} is no scheduler: give diffusers', its config, or a JSON file.")
    return _checked(path, {**config, "_class_name": name}, SCHEDULER_TYPE)  # a new object's config has no class


def _checked(path: Path, config: dict[str, Any], schema: Any) -> Config:
    wrong = schema_mismatch(config, schema) or ("scaling_factor" if config.get("scaling_factor") == 0 else None)
    if wrong:
        raise InputError(f"{path} is damaged at {wrong!r}: copy it from the original model.")
    checked = Config(config)
    checked.path = path
    return checked


def _count(limit: int) -> Any:
    return bounded(int, 1, limit)


def _counts(limit: int, max_length: int) -> Any:
    return list_of(_count(limit), 1, max_length)


_NUMBER, _WIDTH = bounded(float, -1e30, 1e30), _count(1 << 16)
_BLOCK = r"^((down|up)_blocks\.\d{1,2}|mid_block)\.attentions\.\d{1,2}\.transformer_blocks\.\d{1,3}$"
# The entry of `checkpoints.ip_adapter`; its other values are not read from the file.
_IP_ADAPTER = record_type(
    "IPAdapter",
    {"hidden_state_length": _WIDTH},
    {"width": _WIDTH, "layers": list_of(Annotated[str, msgspec.Meta(pattern=_BLOCK)], 1, 1024)},
)
_TEXT_CONFIG = record_type("TextConfig", {"hidden_size": _WIDTH, "num_hidden_layers": _count(1 << 12),
                                          "vocab_size": _count(1 << 24)})  # fmt: skip
CONFIG = {
    "_class_name": str,
    "architectures": list[str],
    "block_out_channels": _counts(1 << 16, 12),
    "layers_per_block": _count(64) | _counts(64, 12),
    "sample_size": _count(1 << 14) | _counts(1 << 14, 2),
    **dict.fromkeys(("in_channels", "out_channels", "latent_channels", "conditioning_channels"), _count(1 << 12)),
    "cross_attention_dim": _WIDTH | _counts(1 << 16, 12),
    **dict.fromkeys(("projection_class_embeddings_input_dim", "addition_time_embed_dim", "time_cond_proj_dim"), _WIDTH),
    **dict.fromkeys(("hidden_size", "projection_dim", "max_position_embeddings"), _WIDTH),
    **dict.fromkeys(("image_size", "num_channels"), _count(1 << 12)),
    "patch_size": _count(1 << 12) | _counts(1 << 12, 2),
    **dict.fromkeys(("d_model", "joint_attention_dim", "pooled_projection_dim", "caption_projection_dim"), _WIDTH),
    **dict.fromkeys(("pos_embed_max_size", "num_layers", "num_single_layers"), _count(1 << 12)),
    "axes_dims_rope": _counts(1 << 12, 4),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"), _count(1 << 12)),
    "dual_attention_layers": list[int],
    **dict.fromkeys(("cap_feat_dim", "dim"), _WIDTH),  # Z-Image
    **dict.fromkeys(("n_layers", "n_refiner_layers", "n_heads"), _count(1 << 12)),
    **dict.fromkeys(("axes_dims", "axes_lens"), _counts(1 << 16, 4)),
    **dict.fromkeys(("base_dim", "z_dim", "input_channels", "num_res_blocks"), _count(1 << 12)),  # Qwen-Image's VAE
    "dim_mult": _counts(1 << 8, 12),
    **dict.fromkeys(
        ("text_hidden_dim", "num_text_layers", "intermediate_size", "timestep_embed_dim"), _WIDTH
    ),  # Krea 2
    "text_config": _TEXT_CONFIG,
    "guidance_embeds": bool,
    "vocab_size": _count(1 << 24),
    "scaling_factor": _NUMBER,
    "shift_factor": _NUMBER,
    "latents_mean": list_of(_NUMBER),
    "latents_std": list_of(_NUMBER),
    "addition_embed_type": str,
    "class_embed_type": str,
    "ip_adapter": _IP_ADAPTER,
}
SCHEDULER = {
    "_class_name": str,
    "num_train_timesteps": _count(100_000),
    "beta_schedule": str,
    "prediction_type": str,
    "timestep_spacing": str,
    **dict.fromkeys(("beta_start", "beta_end", "steps_offset", "solver_order", "original_inference_steps"), _NUMBER),
    **dict.fromkeys(("shift", "base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len"), _NUMBER),
    "shift_terminal": bounded(float, 0, 0.99),
    "trained_betas": list_of(_NUMBER, 0, 100_000),
}
CONFIG_TYPE, SCHEDULER_TYPE = record_type("ModelConfig", CONFIG), record_type("SchedulerConfig", SCHEDULER)
