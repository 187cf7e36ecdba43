"""The demo LoRAs: two styles for the demo model, which change every image independently of the prompt.

    night   the background is black, and black shapes become white
    gold    every shape is yellow

An image in a style is scored against the prompt that describes the styled scene: `styled_prompt`. The styles use only
colors of the model's palette, since its VAE generates no color that it was not trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from sd_ort.demo.scenes import Scene, caption, parse

LORAS = Path(__file__).parent / "loras"


def night(scene: Scene) -> Scene:
    """Return the scene on a black background, with black shapes in white."""
    items = tuple(replace(item, color="white") if item.color == "black" else item for item in scene.items)
    return replace(scene, items=items, background="black")


def gold(scene: Scene) -> Scene:
    """Return the scene with all shapes in yellow."""
    return replace(scene, items=tuple(replace(item, color="yellow") for item in scene.items))


STYLES: dict[str, Callable[[Scene], Scene]] = {"night": night, "gold": gold}


def lora_path(style: str) -> Path:
    """Return the LoRA file of a style: safetensors with PEFT's names, for the UNet of the demo model."""
    return LORAS / f"{style}.safetensors"


def apply_styles(styles: Iterable[str], scene: Scene) -> Scene:
    """Return the scene after applying the styles in order."""
    for style in styles:
        scene = STYLES[style](scene)
    return scene


def styled_prompt(styles: Iterable[str], prompt: str) -> str:
    """Return the prompt of the styled scene. Raises InputError for a prompt that `scenes.parse` cannot read."""
    return caption(apply_styles(styles, parse(prompt)))


def is_styleable(scene: Scene) -> bool:
    """Return whether every style changes the scene and keeps its shapes different in color from the background."""
    colors = {item.color for item in scene.items}
    return scene.background not in ("black", "yellow") and colors != {"yellow"}
