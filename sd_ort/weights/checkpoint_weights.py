"""Tensors of the checkpoint that a pipeline folder was optimized from, for weights in fewer bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusion_passes import weight_recipes
from sd_ort.core.errors import InputError, SdOrtError
from sd_ort.core.pipeline_folder import read_manifest
from sd_ort.weights.recipes import Read


class CheckpointWeights:
    """Reads the tensors of a folder's checkpoint, which its manifest names; files are opened at the first read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._readers: dict[str, Read] = {}  # by component

    @property
    def name(self) -> str:
        """The checkpoint's name in the manifest."""
        return str(self._source.get("model", "its checkpoint"))

    @property
    def _source(self) -> Mapping[str, Any]:
        """The manifest's entry of the checkpoint."""
        return read_manifest(self.folder).get("source", {})

    def read(self, component: str, recipes: Mapping[str, weight_recipes.WeightRecipe]) -> Read:
        """Return a function that reads the tensors of a component's weights in fewer bits by name.

        Raises:
            InputError: if the checkpoint is not there, or has random weights.
        """
        if component not in self._readers:
            from sd_ort.checkpoints.open import open_checkpoint  # folders in 16 bits do without its imports
            from sd_ort.checkpoints.signatures import MODEL_OF

            quantized = filter(weight_recipes.is_quantized, recipes.values())
            names = {name for recipe in quantized for name in weight_recipes.sources(recipe)}
            try:
                if self._source.get("random_weights"):
                    raise InputError("its weights are random")
                checkpoint = open_checkpoint(self.name)
                self._readers[component] = checkpoint.read_tensors(MODEL_OF.get(component, component), names)
            except (SdOrtError, KeyError) as error:
                raise InputError(
                    f"{self.folder} has weights in fewer bits: to add a LoRA they are computed again from {self.name}, "
                    f"which cannot be read ({str(error).rstrip('.')}). Put it there, or optimize a checkpoint with the "
                    "LoRA fused (diffusers: fuse_lora, save_pretrained)."
                ) from error
        return self._readers[component]

    def close(self) -> None:
        """Close the checkpoint's files."""
        self._readers.clear()
