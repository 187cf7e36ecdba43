"""Models of a few thousand weights of every family: one export and one diffusers pipeline each, for a whole run."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sd_ort.checkpoints.presets import PRESETS, Preset

LATENTS = 8  # a side of the images that the models were "trained" on
PRESET_OF = {
    "sd": "sd15-tiny",
    "factor2": "sd15-tiny",  # a VAE with two pixels per latent
    "inpaint9": "sd15-inpaint-tiny",
    "lcm": "sd15-tiny",
    "controlnet": "sd15-controlnet-tiny",
    "xl": "sdxl-tiny",
    "refiner": "sdxl-refiner-tiny",
    "xl_controlnet": "sdxl-tiny",
}


def narrow(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return a model's config of single layers, U-Nets of two resolutions; the VAE keeps its factor of 8."""
    if name.startswith("text_encoder"):
        return config | {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64, "projection_dim": 32}
    small = config | {"layers_per_block": 1, "norm_num_groups": 8, "sample_size": LATENTS}
    if name == "vae":
        return small | {"block_out_channels": [8, 8, 16, 16], "sample_size": 8 * LATENTS}
    encoders = config["cross_attention_dim"] // 64
    small |= {"block_out_channels": [16, 32], "cross_attention_dim": 32 * encoders, "attention_head_dim": [2, 4]}
    small |= {"down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"], "transformer_layers_per_block": 1}
    small |= {"up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"]}
    if "addition_time_embed_dim" in config:
        ids = (config["projection_class_embeddings_input_dim"] - 64) // 32
        small |= {"addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 32 + 8 * ids}
    if name == "controlnet":
        small["conditioning_embedding_out_channels"] = [8, 8, 8, 8]
        small.pop("up_block_types")
    return small


def preset(family: str) -> Preset:
    """Return the preset of a family."""
    base = PRESETS[PRESET_OF[family]]
    models = {name: narrow(name, config) for name, config in base.models.items()}
    pipeline, scheduler = base.pipeline, base.scheduler
    if family == "factor2":
        blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
        models["vae"] |= {"block_out_channels": [8, 16], **blocks}
    if family == "lcm":
        pipeline, scheduler = "LatentConsistencyModelPipeline", base.scheduler | {"_class_name": "LCMScheduler"}
        models["unet"]["time_cond_proj_dim"] = 16
    if family == "xl_controlnet":
        pipeline = "StableDiffusionXLControlNetPipeline"
        models["controlnet"] = {
            **models["unet"],
            "_class_name": "ControlNetModel",
            "conditioning_channels": 3,
            "conditioning_embedding_out_channels": [8, 8, 8, 8],
        }
        for absent in ("out_channels", "sample_size", "up_block_types"):
            models["controlnet"].pop(absent)
    return Preset(pipeline, models, scheduler, base.options)


class Models:
    """Exports and diffusers pipelines of all families, opened once, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources = cache(self._source)
        self.theirs = cache(self._theirs)
        self.ours = cache(self._ours)
        self._open: dict[str, Any] = {}

    def export(self, family: str) -> Path:
        """Return the pipeline folder of a family; components that another family has too are exported once."""
        from sd_ort.export.exporter import export

        out = self.folder / family
        if not out.is_dir():
            PRESETS[f"parity-{family}"] = preset(family)
            export(None, out, preset=f"parity-{family}", random_weights=True, exporter="torchscript")
        return out

    def _source(self, family: str) -> Any:
        from sd_ort.benchmark.engines.pytorch import torch_pipeline

        PRESETS[f"parity-{family}"] = preset(family)
        pipeline = torch_pipeline(f"parity-{family}", random_weights=True)
        encoder = pipeline.components.get("text_encoder")
        if encoder is not None and not hasattr(encoder, "text_model"):
            # diffusers 0.42.1 looks here for what clip_skip needs, and transformers 5 has it elsewhere.
            vars(encoder)["text_model"] = SimpleNamespace(final_layer_norm=encoder.final_layer_norm)
        return pipeline

    def _theirs(self, family: str, kind: str) -> Any:
        """Return diffusers' pipeline of class `kind` over a family's models."""
        import diffusers

        pipeline = getattr(diffusers, kind).from_pipe(self.sources(family))
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def _ours(self, family: str, kind: str) -> Any:
        """Return sd-ort's pipeline of class `kind`; those of one family share their sessions."""
        import sd_ort

        first = self._open.get(family)
        cls = getattr(sd_ort, kind)
        if first is None:
            first = self._open[family] = cls.from_pretrained(self.export(family), "cpu", threads=1)
        pipeline = cls.from_pipe(first)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline
