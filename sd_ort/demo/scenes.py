"""Synthetic captioned scenes: one or two colored shapes on a plain background, 128x128 RGB.

A `Scene` contains exactly what its caption says. `random_geometry` adds random centers and radii, and `render` returns
the pixels. Coordinates are pixels of the 128x128 image, x to the right, y down.

Scenes are split by *combination* (the set of color-shape pairs plus the background): training uses no caption of an
unseen combination, whatever its sizes, positions and wording.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sd_ort.core.errors import InputError

SIDE = 128

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 40),
    "green": (30, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (250, 220, 40),
    "orange": (250, 130, 20),
    "purple": (140, 40, 170),
    "cyan": (50, 210, 230),
    "pink": (250, 160, 200),
    "white": (250, 250, 250),
    "black": (15, 15, 15),
}

# Radii in pixels. The gap between "small" and "large" lets `fidelity` tell the size from the pixels.
RADII: dict[str | None, tuple[float, float]] = {"small": (15, 18), "large": (23, 26), None: (15, 26)}
SIZES = ("small", "large")

# Positions of a single object: the words of the caption and the center of the region (x, y).
POSITIONS: dict[str, tuple[str, tuple[float, float]]] = {
    "left": ("at the left", (34, 64)),
    "right": ("at the right", (94, 64)),
    "top": ("at the top", (64, 34)),
    "bottom": ("at the bottom", (64, 94)),
    "center": ("in the center", (64, 64)),
}
POSITION_JITTER = 5.0

# Positions of the first of two objects relative to the second: unit direction (x, y).
RELATIONS: dict[str, tuple[int, int]] = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
PAIR_OFFSET = 32.0
PAIR_JITTER = 2.0

MARGIN = 5.0
UNSEEN_SHARE = 0.15


# --- Shapes -----------------------------------------------------------------------------------------------------------
# Signed distances (negative inside) in units of the radius. They use only operators, so that the same code renders with
# NumPy arrays here and with torch tensors on a GPU.


def _max(a: Any, b: Any) -> Any:
    return (a + b + abs(a - b)) * 0.5


def _min(a: Any, b: Any) -> Any:
    return (a + b - abs(a - b)) * 0.5


def _circle(x: Any, y: Any) -> Any:
    return (x * x + y * y) ** 0.5 - 1.0


def _square(x: Any, y: Any) -> Any:
    return _max(abs(x), abs(y)) - 1.0


def _triangle(x: Any, y: Any) -> Any:
    """Equilateral triangle, point up, side 2, with a centered bounding box."""
    half_height = math.sqrt(3) / 2
    return _max(y - half_height, (abs(x) * math.sqrt(3) - y - half_height) * 0.5)


def _diamond(x: Any, y: Any) -> Any:
    return (abs(x) + abs(y) - 1.0) * math.sqrt(0.5)


def _cross(x: Any, y: Any) -> Any:
    """Upright plus sign, arms a third of its width."""
    x, y = abs(x), abs(y)
    return _max(_max(x, y) - 1.0, _min(x, y) - 1 / 3)


def _ring(x: Any, y: Any) -> Any:
    return abs((x * x + y * y) ** 0.5 - 0.775) - 0.225


def _star(x: Any, y: Any) -> Any:
    """Pentagram, point up: inside at least four of its five edge lines (second largest distance)."""
    inner = math.cos(math.radians(72))  # distance of the lines from the center of a pentagram of circumradius 1
    largest = second = None
    for i in range(5):
        angle = math.radians(72 * i - 90)
        distance = x * math.cos(angle) + y * math.sin(angle) - inner
        if largest is None:
            largest = second = distance
        elif i == 1:
            largest, second = _max(largest, distance), _min(largest, distance)
        else:
            largest, second = _max(largest, distance), _max(second, _min(largest, distance))
    return second


# Shape name -> (signed distance, half width, top, bottom) of the unit shape. `fidelity` measures this box.
SHAPES: dict[str, tuple[Callable[[Any, Any], Any], tuple[float, float, float]]] = {
    "circle": (_circle, (1.0, -1.0, 1.0)),
    "square": (_square, (1.0, -1.0, 1.0)),
    "triangle": (_triangle, (1.0, -math.sqrt(3) / 2, math.sqrt(3) / 2)),
    "diamond": (_diamond, (1.0, -1.0, 1.0)),
    "cross": (_cross, (1.0, -1.0, 1.0)),
    "ring": (_ring, (1.0, -1.0, 1.0)),
    "star": (_star, (math.cos(math.radians(18)), -1.0, math.cos(math.radians(36)))),
}


def coverage(shape: str, x: Any, y: Any, radius: Any) -> Any:
    """Return the share of each pixel that the shape covers, 0 to 1, anti-aliased over one pixel.

    `x`, `y` are pixel centers relative to the shape's center and `radius` its radius, all in pixels (NumPy arrays or
    torch tensors that broadcast).
    """
    distance = SHAPES[shape][0](x / radius, y / radius) * radius
    return _min(_max(0.5 - distance, distance * 0.0), distance * 0.0 + 1.0)


# --- Scenes and captions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """One object of a scene. `size` is None if the caption does not state it."""

    shape: str
    color: str
    size: str | None = None


@dataclass(frozen=True)
class Scene:
    """The content of a caption: one or two items, a background color, and a position.

    `position` is a key of POSITIONS for one item, a key of RELATIONS for two (first item relative to the second), or
    None if the caption does not state it.
    """

    items: tuple[Item, ...]
    background: str
    position: str | None = None


def _noun(item: Item) -> str:
    words = " ".join(w for w in (item.size, item.color, item.shape) if w)
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def caption(scene: Scene) -> str:
    """Return the caption of a scene, e.g. "a red circle left of a small blue square on a white background"."""
    head = _noun(scene.items[0])
    if len(scene.items) == 2:
        head += f" {scene.position or 'and'} {_noun(scene.items[1])}"
    elif scene.position:
        head += f" {POSITIONS[scene.position][0]}"
    article = "an" if scene.background[0] in "aeiou" else "a"
    return f"{head} on {article} {scene.background} background"


def _parse_item(words: list[str], text: str) -> Item:
    size = words[1] if len(words) == 4 and words[1] in SIZES else None
    rest = words[2:] if size else words[1:]
    if not words or words[0] not in ("a", "an") or len(rest) != 2 or rest[0] not in COLORS or rest[1] not in SHAPES:
        raise InputError(f"Cannot read {text!r} as a scene: write e.g. 'a red circle on a blue background'.")
    return Item(shape=rest[1], color=rest[0], size=size)


def parse(text: str) -> Scene:
    """Return the scene of a caption. Raises InputError for a text that `caption` does not write."""
    head, _, tail = " ".join(text.lower().split()).rstrip(".").rpartition(" on ")
    ending = tail.split()
    if len(ending) != 3 or ending[0] not in ("a", "an") or ending[1] not in COLORS or ending[2] != "background":
        raise InputError(f"Cannot read {text!r} as a scene: end it with e.g. 'on a blue background'.")
    for relation in ("and", *RELATIONS):
        first, separator, second = head.partition(f" {relation} ")
        if separator:
            items = (_parse_item(first.split(), text), _parse_item(second.split(), text))
            return Scene(items, ending[1], relation if relation in RELATIONS else None)
    for position, (words, _center) in POSITIONS.items():
        if head.endswith(f" {words}"):
            return Scene((_parse_item(head.removesuffix(words).split(), text),), ending[1], position)
    return Scene((_parse_item(head.split(), text),), ending[1])


def vocabulary() -> list[str]:
    """Return all words of captions, sorted."""
    phrases = [*RELATIONS, *(words for words, _center in POSITIONS.values()), "a an and on background"]
    return sorted({w for phrase in (*COLORS, *SHAPES, *SIZES, *phrases) for w in phrase.split()})


def is_unseen(scene: Scene) -> bool:
    """Return whether training omits all scenes with these colored shapes and background (decided by hash)."""
    combination = sorted(f"{item.color} {item.shape}" for item in scene.items)
    digest = hashlib.sha256("|".join([*combination, scene.background]).encode()).digest()
    return int.from_bytes(digest[:4], "big") < UNSEEN_SHARE * 2**32


# --- Sampling ---------------------------------------------------------------------------------------------------------


def _sample_item(rng: random.Random, background: str, others: tuple[Item, ...]) -> Item:
    while True:
        color, shape = rng.choice(list(COLORS)), rng.choice(list(SHAPES))
        if color != background and not any((o.color, o.shape) == (color, shape) for o in others):
            return Item(shape, color, rng.choice((None, None, *SIZES)))


def sample(rng: random.Random, items: int, unseen: bool) -> Scene:
    """Return a random scene of one or two `items`, from the unseen combinations or from those for training."""
    while True:
        background = rng.choice(list(COLORS))
        chosen: tuple[Item, ...] = ()
        for _ in range(items):
            chosen = (*chosen, _sample_item(rng, background, chosen))
        positions = list(POSITIONS) if items == 1 else list(RELATIONS)
        scene = Scene(chosen, background, rng.choice([None, None, *positions]))
        if is_unseen(scene) == unseen:
            return scene


Geometry = list[tuple[float, float, float]]
"""Center x, center y and radius of each item, in pixels."""


def _jitter(rng: random.Random, center: tuple[float, float], amount: float) -> tuple[float, float]:
    return center[0] + rng.uniform(-amount, amount), center[1] + rng.uniform(-amount, amount)


def random_geometry(scene: Scene, rng: random.Random) -> Geometry:
    """Return random centers and radii that agree with the scene. Items touch neither each other nor the border."""
    radii = [rng.uniform(*RADII[item.size]) for item in scene.items]
    if len(radii) == 2:
        dx, dy = RELATIONS[scene.position or rng.choice(list(RELATIONS))]
        centers = [
            _jitter(rng, (SIDE / 2 + side * dx * PAIR_OFFSET, SIDE / 2 + side * dy * PAIR_OFFSET), PAIR_JITTER)
            for side in (1, -1)
        ]
    elif scene.position:
        centers = [_jitter(rng, POSITIONS[scene.position][1], POSITION_JITTER)]
    else:
        low, high = radii[0] + MARGIN, SIDE - radii[0] - MARGIN
        centers = [(rng.uniform(low, high), rng.uniform(low, high))]
    return [
        (min(max(x, r + 2), SIDE - r - 2), min(max(y, r + 2), SIDE - r - 2), r)
        for (x, y), r in zip(centers, radii, strict=True)
    ]


def render(scene: Scene, geometry: Geometry) -> np.ndarray:
    """Return the image of a scene, uint8 (128, 128, 3)."""
    centers = np.arange(SIDE, dtype=np.float32) + 0.5
    y, x = np.meshgrid(centers, centers, indexing="ij")
    image = np.empty((SIDE, SIDE, 3), np.float32)
    image[:] = COLORS[scene.background]
    for item, (cx, cy, radius) in zip(scene.items, geometry, strict=True):
        share = coverage(item.shape, x - cx, y - cy, radius)[..., None]
        image += share * (np.array(COLORS[item.color], np.float32) - image)
    return image.round().astype(np.uint8)


def unseen_prompts(count: int, seed: int = 0) -> list[str]:
    """Return `count` different random captions of unseen combinations, half with one object and half with two."""
    rng = random.Random(f"unseen {seed}")
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        prompts[caption(sample(rng, 1 + len(prompts) % 2, unseen=True))] = None
    return list(prompts)


def training_prompts(count: int) -> list[str]:
    """Return `count` different random captions of combinations that training has, half of them with two objects."""
    rng = random.Random("training 0")
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        prompts[caption(sample(rng, 1 + len(prompts) % 2, unseen=False))] = None
    return list(prompts)
