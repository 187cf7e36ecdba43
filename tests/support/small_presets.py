"""Presets that export in seconds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from scripts.fixtures.parity_models import TRANSFORMERS
from sd_ort.checkpoints.presets import PRESETS, Preset, mini_model

MINI = ("--preset", "sd15-mini", "--random-weights")


def mini(preset: Preset) -> Preset:
    """Return a copy of a preset with one layer of each kind, as in `sd15-mini`."""

    def cut(name: str, config: dict[str, Any]) -> dict[str, Any]:
        if name.startswith("text_encoder") and {"d_model", "head_dim"} & config.keys():
            return config
        if name == "transformer":
            return config | TRANSFORMERS.get(config["_class_name"], {"num_layers": 1})
        return mini_model(name, config)

    return Preset(preset.pipeline, {n: cut(n, c) for n, c in preset.models.items()}, preset.scheduler, preset.options)


def small(preset: Preset) -> Preset:
    """Return a copy of a preset with one layer per block and attention at one resolution.

    It has all resolutions, so image sizes are those of the preset. Its session opens in a third of the time.
    """

    def cut(name: str, config: dict[str, Any]) -> dict[str, Any]:
        if name.startswith("text_encoder"):
            return config | {"num_hidden_layers": 3}
        few = config | {"layers_per_block": 1}
        if name != "vae":
            few["down_block_types"] = ["CrossAttnDownBlock2D", *["DownBlock2D"] * 3]
        if name == "unet":
            few["up_block_types"] = [*["UpBlock2D"] * 3, "CrossAttnUpBlock2D"]
        return few

    return Preset(preset.pipeline, {n: cut(n, c) for n, c in preset.models.items()}, preset.scheduler, preset.options)


def smalls() -> dict[str, Preset]:
    """Return the presets `sd15-small`, `sd15-inpaint-small` and `sd15-controlnet-small`."""
    names = ("sd15", "sd15-inpaint", "sd15-controlnet")
    return {f"{name}-small": small(PRESETS[f"{name}-tiny"]) for name in names}


def minis() -> dict[str, Preset]:
    """Return a `-mini` preset for each `-tiny` preset."""
    tiny = {name: preset for name, preset in PRESETS.items() if name.endswith("-tiny")}
    return {name.replace("-tiny", "-mini"): mini(preset) for name, preset in tiny.items()}


def export_with(small_export: Path, out: Path, preset: str, components: list[str]) -> Path:
    """Export `components` of a preset and copy the text encoder and VAE of `small_export`; return `out`."""
    from sd_ort.export.exporter import export

    export(None, out, preset=preset, random_weights=True, exporter="torchscript", components=components)
    for name in ("text_encoder", "vae_encoder", "vae_decoder"):
        shutil.copytree(small_export / name, out / name)
    return out
