"""The demo LoRAs: two styles for the demo model, each a change of what is drawn whatever the prompt says.

    night   the background is black, and what would be black on it is white
    gold    every shape is yellow

A picture in a style is read like any other, as the prompt that says outright what the style makes of it: `prompt_in`.
The palette is the model's own, for its VAE draws no color that it was not trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from sd_ort.demo.scenes import Scene, caption, parse, unseen_prompts

LORAS = Path(__file__).parent / "loras"


def night(scene: Scene) -> Scene:
    """The scene on black."""
    items = tuple(replace(item, color="white") if item.color == "black" else item for item in scene.items)
    return replace(scene, items=items, background="black")


def gold(scene: Scene) -> Scene:
    """The scene in yellow."""
    return replace(scene, items=tuple(replace(item, color="yellow") for item in scene.items))


STYLES: dict[str, Callable[[Scene], Scene]] = {"night": night, "gold": gold}


def lora(style: str) -> Path:
    """The LoRA of a style: a .safetensors file in PEFT's names, for the demo model's UNet."""
    return LORAS / f"{style}.safetensors"


def scene_in(styles: Iterable[str], scene: Scene) -> Scene:
    """What a scene becomes in these styles, one after the other."""
    for style in styles:
        scene = STYLES[style](scene)
    return scene


def prompt_in(styles: Iterable[str], prompt: str) -> str:
    """The prompt that says what `prompt` becomes. Raises InputError for a prompt that `scenes.parse` cannot read."""
    return caption(scene_in(styles, parse(prompt)))


def shows(scene: Scene) -> bool:
    """Whether the scene has a picture in every style and in none: no style paints its shapes in its background's color,
    and none leaves it as it is."""
    colors = {item.color for item in scene.items}
    return scene.background not in ("black", "yellow") and colors != {"yellow"}


def prompts_to_style(count: int) -> list[str]:
    """`count` different captions of unseen combinations that every style changes."""
    found = (prompt for prompt in unseen_prompts(2 * count + 20, seed=1) if shows(parse(prompt)))
    return [prompt for prompt, _ in zip(found, range(count), strict=False)]
