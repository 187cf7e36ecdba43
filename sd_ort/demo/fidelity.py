"""Did the model draw what the prompt says? Background, colors, shapes, sizes and places read back from the pixels.

No network takes part. The background is the color of the picture's frame; what differs from it falls into connected
components; each component's color is the palette color nearest to its interior, and its shape is the one whose ideal
outline, stretched to the component's bounding box, overlaps it best (intersection over union).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.demo.scenes import COLORS, PLACES, RELATIONS, SHAPES, SIDE, Item, Scene, parse, unseen_prompts

__all__ = ["Fidelity", "Found", "Reading", "matches", "mismatch", "read_scene", "score", "unseen_prompts"]

# The palette's closest pair (yellow, orange) is 92 apart in RGB: a color further than 55 from all of it is no color.
COLOR_LIMIT = 55.0
FOREGROUND = 36.0  # RGB distance from the background above which a pixel belongs to an object or its edge
MIN_AREA = 48  # pixels of a 128x128 picture; less is a speck, not an object
MIN_OVERLAP = 0.68  # rendered shapes overlap their own ideal by 0.71 (worst small star), mostly 0.88 to 1
MIN_LEAD = 0.06  # of the best overlap before the next; ideal shapes overlap each other by at most 0.78 (circle, square)
MAX_STRETCH = 1.3  # a box further from its shape's proportions than this is another shape
SMALL_BELOW = 20.0  # half the larger side of the bounding box, in pixels of a 128x128 picture
PLACE_TOLERANCE = 14.0  # from the middle of the place's region, either axis, in pixels of a 128x128 picture


@dataclass(frozen=True)
class Found:
    """One object in a picture. `shape` and `color` are None when no known one fits; x, y and half_size in pixels of a
    128x128 picture (center of the bounding box, half its larger side)."""

    shape: str | None
    color: str | None
    x: float
    y: float
    half_size: float


@dataclass(frozen=True)
class Reading:
    """What a picture shows: background color (None when it is no palette color) and objects, largest first."""

    background: str | None
    items: tuple[Found, ...]


@dataclass(frozen=True)
class Fidelity:
    """Share of pictures drawn right, with the prompt and the reason of each that was not."""

    right: int
    total: int
    failures: tuple[tuple[str, str], ...]

    @property
    def share(self) -> float:
        return self.right / self.total


def _components(mask: np.ndarray) -> list[np.ndarray]:
    """4-connected components of a boolean [H, W] mask, each as a boolean [H, W] mask.

    Runs of set pixels, row by row, joined by union-find with the runs they touch in the row above.
    """
    parent: list[int] = []
    runs: list[tuple[int, int, int]] = []

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    above: list[int] = []
    for row, line in enumerate(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8)):
        edges = np.flatnonzero(np.diff(line))
        current = []
        for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            index = len(runs)
            runs.append((row, start, stop))
            parent.append(index)
            current.append(index)
            for other in above:
                if runs[other][1] < stop and start < runs[other][2]:
                    parent[root(index)] = root(other)
        above = current
    found: dict[int, np.ndarray] = {}
    for index, (row, start, stop) in enumerate(runs):
        found.setdefault(root(index), np.zeros_like(mask))[row, start:stop] = True
    return list(found.values())


def _color_name(rgb: np.ndarray) -> str | None:
    distances = {name: float(np.linalg.norm(rgb - np.array(value))) for name, value in COLORS.items()}
    name = min(distances, key=distances.__getitem__)
    return name if distances[name] <= COLOR_LIMIT else None


def _shape_name(mask: np.ndarray) -> str | None:
    """Shape of a boolean mask cropped to its bounding box."""
    height, width = mask.shape
    rows = (np.arange(height, dtype=np.float32) + 0.5) / height
    columns = (np.arange(width, dtype=np.float32) + 0.5) / width
    overlaps: dict[str, float] = {}
    for name, (distance, (half_width, top, bottom)) in SHAPES.items():
        stretch = (width / height) / (2 * half_width / (bottom - top))
        if not 1 / MAX_STRETCH <= stretch <= MAX_STRETCH:
            continue
        y, x = np.meshgrid(top + rows * (bottom - top), (2 * columns - 1) * half_width, indexing="ij")
        ideal = distance(x, y) < 0
        overlaps[name] = float((ideal & mask).sum() / (ideal | mask).sum())
    first, second = sorted([*overlaps.values(), 0.0, 0.0], reverse=True)[:2]
    if first < MIN_OVERLAP or first - second < MIN_LEAD:
        return None
    return max(overlaps, key=overlaps.__getitem__)


def _read_item(picture: np.ndarray, component: np.ndarray, background: np.ndarray, scale: float) -> Found:
    difference = picture - background
    distance = np.linalg.norm(difference, axis=-1)
    # Edge pixels mix both colors; the interior is what differs most from the background.
    interior = component & (distance >= 0.75 * np.percentile(distance[component], 95))
    color = np.median(picture[interior], axis=0)
    contrast = color - background
    covered = component & (difference @ contrast >= 0.5 * float(contrast @ contrast))
    rows, columns = np.flatnonzero(covered.any(axis=1)), np.flatnonzero(covered.any(axis=0))
    top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    return Found(
        shape=_shape_name(covered[top:bottom, left:right]),
        color=_color_name(color),
        x=float(left + right) / 2 / scale,
        y=float(top + bottom) / 2 / scale,
        half_size=float(max(right - left, bottom - top)) / 2 / scale,
    )


def read_scene(image: Any) -> Reading:
    """What an RGB picture shows: a PIL image or a uint8 array [H, W, 3], square, of any size from 64 up.

    Raises InputError for anything else.
    """
    picture = np.asarray(image)
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8 or len({*picture.shape[:2]}) != 1:
        raise InputError(f"expected a square uint8 picture [H, W, 3], got {picture.dtype} {picture.shape}")
    picture = picture.astype(np.float32)
    scale = picture.shape[0] / SIDE
    frame = max(1, round(scale))
    inside = np.zeros(picture.shape[:2], bool)
    inside[frame:-frame, frame:-frame] = True
    background = np.median(picture[~inside], axis=0)
    foreground = np.linalg.norm(picture - background, axis=-1) > FOREGROUND
    components = [c for c in _components(foreground) if c.sum() >= MIN_AREA * scale**2]
    components.sort(key=np.count_nonzero, reverse=True)
    items = tuple(_read_item(picture, c, background, scale) for c in components)
    return Reading(_color_name(background), items)


def _item_mismatch(item: Item, found: Found) -> str | None:
    if (found.color, found.shape) != (item.color, item.shape):
        return f"{item.color} {item.shape} drawn as {found.color or 'no known color'} {found.shape or 'no shape'}"
    if item.size and item.size != ("small" if found.half_size < SMALL_BELOW else "large"):
        return f"the {item.color} {item.shape} is not {item.size} (half size {found.half_size:.0f} px)"
    return None


def _place_mismatch(scene: Scene, found: Sequence[Found]) -> str | None:
    if scene.place is None:
        return None
    if len(found) == 1:
        x, y = PLACES[scene.place][1]
        good = abs(found[0].x - x) <= PLACE_TOLERANCE and abs(found[0].y - y) <= PLACE_TOLERANCE
    else:
        dx, dy = RELATIONS[scene.place]
        along = (found[0].x - found[1].x) * dx + (found[0].y - found[1].y) * dy
        across = abs((found[0].x - found[1].x) * dy) + abs((found[0].y - found[1].y) * dx)
        good = along > across
    return None if good else f"not {scene.place}: at " + ", ".join(f"({f.x:.0f}, {f.y:.0f})" for f in found)


def mismatch(prompt: str, image: Any) -> str | None:
    """Why the picture is not what the prompt says, in words, or None when it is. Raises InputError for other prompts.

    Right means: the background, the number of objects, each object's color and shape, and every size and place that
    the prompt states.
    """
    scene, reading = parse(prompt), read_scene(image)
    if reading.background != scene.background:
        return f"background {reading.background or 'of no known color'}"
    if len(reading.items) != len(scene.items):
        return f"{len(reading.items)} objects"
    reasons = []
    for order in permutations(reading.items):
        wrong = [r for item, found in zip(scene.items, order, strict=True) if (r := _item_mismatch(item, found))]
        reason = "; ".join(wrong) or _place_mismatch(scene, order)
        if reason is None:
            return None
        reasons.append(reason)
    return min(reasons, key=len)


def matches(prompt: str, image: Any) -> bool:
    """Whether the picture shows what the prompt says (see `mismatch`)."""
    return mismatch(prompt, image) is None


def score(prompts: Iterable[str], images: Iterable[Any]) -> Fidelity:
    """Fidelity of one image for each prompt. Raises InputError for no prompts, ValueError for unequal numbers."""
    reasons = [(prompt, mismatch(prompt, image)) for prompt, image in zip(prompts, images, strict=True)]
    if not reasons:
        raise InputError("no prompts to score: give at least one.")
    failures = tuple((prompt, reason) for prompt, reason in reasons if reason is not None)
    return Fidelity(len(reasons) - len(failures), len(reasons), failures)
