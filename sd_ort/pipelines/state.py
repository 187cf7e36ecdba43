"""Attributes of a pipeline that its mixins read, declared once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_ort.runtime.components import Components

if TYPE_CHECKING:
    from sd_ort.pipelines.text import PromptEncoder
    from sd_ort.pipelines.vae import Vae


class PipelineState:
    """Attributes that every pipeline sets when it is created.

    `index`: the folder's model_index.json. `models`: the sessions by component name.
    """

    folder: Path
    index: Mapping[str, Any]
    models: Components
    texts: PromptEncoder
    vae: Vae
    unet_config: dict[str, Any]
    is_sdxl: bool
    safety_checker: bool
    device_loop: bool
    pag_applied_layers: Sequence[str] = ()
    HAS_SEPARATE_COMPONENTS: bool

    @property
    def size_multiple(self) -> int:
        """Divisor of heights and widths, in pixels, that halve evenly at every level of the UNet."""
        raise NotImplementedError
