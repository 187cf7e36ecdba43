"""diffusers integration: `accelerate(pipe)`, or a folder whose model_index.json names these classes."""

from __future__ import annotations

from diffusers import ModelMixin

from sd_ort.integrations.diffusers.accelerate import accelerate
from sd_ort.integrations.diffusers.components import OrtControlNet, OrtTextEncoder, OrtTransformer, OrtUNet, OrtVae
from sd_ort.integrations.diffusers_classes import install, uninstall

# diffusers expects ModelMixin in the module that model_index.json names, to select the loading method of its classes.
__all__ = [
    "ModelMixin", "OrtControlNet", "OrtTextEncoder", "OrtTransformer", "OrtUNet", "OrtVae", "accelerate", "install",
    "uninstall",
]  # fmt: skip
