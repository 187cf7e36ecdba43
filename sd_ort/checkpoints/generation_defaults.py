"""Default number of steps and guidance scale of a pipeline folder, for the shell, the server and Python alike."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from sd_ort import demo
from sd_ort.checkpoints.configs import component_config
from sd_ort.checkpoints.diffusion_transformers import FAMILIES
from sd_ort.checkpoints.unet_inputs import is_sdxl
from sd_ort.core.pipeline_folder import read_index


class GenerationDefaults(NamedTuple):
    """Denoising steps and guidance scale."""

    steps: int
    guidance: float


def demo_defaults(folder: Path) -> GenerationDefaults | None:
    """Return the defaults of models of the demo family, which a large scale overdraws; None for other folders."""
    is_demo = component_config(folder, "text_encoder").get("vocab_size") == demo.VOCABULARY
    return GenerationDefaults(demo.STEPS, demo.GUIDANCE) if is_demo else None


def generation_defaults(folder: Path, *, inpaint: bool = False) -> GenerationDefaults:
    """Return the defaults of diffusers' pipeline of the folder's class and family, or `demo_defaults`.

    `inpaint`: of the pipeline for inpainting.
    """
    if family := FAMILIES.get(str(component_config(folder, "transformer").get("_class_name"))):
        steps = demo.TRANSFORMER_STEPS if demo_defaults(folder) else family.steps
        return GenerationDefaults(steps, family.guidance)
    if own := demo_defaults(folder):
        return own
    kind = str(read_index(folder).get("_class_name", ""))
    unet = component_config(folder, "unet")
    if unet.get("time_cond_proj_dim"):  # a distilled UNet, which reads the scale
        return GenerationDefaults(4 if kind.startswith("LatentConsistencyModel") else 50, 8.5)
    return GenerationDefaults(50, 5.0 if is_sdxl(unet) and not inpaint else 7.5)
