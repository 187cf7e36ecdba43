"""Prompt fidelity of the demo model: detects background, colors, shapes, sizes and positions in the pixels of an image.

The detection uses no neural network. The background is the color of the image's border. Pixels that differ from it form
connected components. The color of a component is the palette color nearest to its interior. Its shape is the one whose
ideal outline, stretched to the bounding box, overlaps it best (intersection over union).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np

from sd_ort.core.errors import InputError
from sd_ort.demo.scenes import COLORS, POSITIONS, RELATIONS, SHAPES, SIDE, Item, Scene, parse, unseen_prompts

__all__ = [
    "DetectedItem", "DetectedScene", "Fidelity", "detect_scene", "matches", "mismatch", "score", "unseen_prompts",
]  # fmt: skip

# RGB distance to the nearest palette color, above which a color is unknown. The closest pair of the palette (yellow,
# orange) is 92 apart.
COLOR_LIMIT = 55.0
FOREGROUND = 36.0  # RGB distance from the background above which a pixel belongs to an object or its edge
MIN_AREA = 48  # of an object, in pixels of a 128x128 image; smaller components are ignored
MIN_OVERLAP = 0.68  # rendered shapes overlap their own ideal by 0.71 (worst small star), mostly 0.88 to 1
# Lead of the best overlap over the next one. Ideal shapes overlap by at most 0.78 (circle, square).
MIN_LEAD = 0.06
MAX_STRETCH = 1.3  # maximum ratio of the aspect ratios of the box and the ideal shape
SMALL_BELOW = 20.0  # half the larger side of the bounding box, in pixels of a 128x128 image
POSITION_TOLERANCE = 14.0  # from the center of the region, on each axis, in pixels of a 128x128 image


@dataclass(frozen=True)
class DetectedItem:
    """One object in an image.

    shape, color: None if no known one fits. x, y, half_size: center of the bounding box and half its larger side, in
    pixels of a 128x128 image.
    """

    shape: str | None
    color: str | None
    x: float
    y: float
    half_size: float


@dataclass(frozen=True)
class DetectedScene:
    """The content of an image: background color (None if it is no palette color) and objects, largest first."""

    background: str | None
    items: tuple[DetectedItem, ...]


@dataclass(frozen=True)
class Fidelity:
    """Number of images that match their prompts, and (prompt, reason) of each that does not."""

    correct: int
    total: int
    failures: tuple[tuple[str, str], ...]

    @property
    def share(self) -> float:
        return self.correct / self.total


def _components(mask: np.ndarray) -> list[np.ndarray]:
    """Return the 4-connected components of a boolean (H, W) mask, each as a boolean (H, W) mask.

    Union-find merges each run of set pixels with the runs that it touches in the row above.
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
    components: dict[int, np.ndarray] = {}
    for index, (row, start, stop) in enumerate(runs):
        components.setdefault(root(index), np.zeros_like(mask))[row, start:stop] = True
    return list(components.values())


def _color_name(rgb: np.ndarray) -> str | None:
    distances = {name: float(np.linalg.norm(rgb - np.array(value))) for name, value in COLORS.items()}
    name = min(distances, key=distances.__getitem__)
    return name if distances[name] <= COLOR_LIMIT else None


def _shape_name(mask: np.ndarray) -> str | None:
    """Return the shape of a boolean mask that is cropped to its bounding box, or None if no shape fits."""
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


def _detect_item(pixels: np.ndarray, component: np.ndarray, background: np.ndarray, scale: float) -> DetectedItem:
    difference = pixels - background
    distance = np.linalg.norm(difference, axis=-1)
    # Edge pixels mix both colors; interior pixels differ most from the background.
    interior = component & (distance >= 0.75 * np.percentile(distance[component], 95))
    color = np.median(pixels[interior], axis=0)
    contrast = color - background
    covered = component & (difference @ contrast >= 0.5 * float(contrast @ contrast))
    rows, columns = np.flatnonzero(covered.any(axis=1)), np.flatnonzero(covered.any(axis=0))
    top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    return DetectedItem(
        shape=_shape_name(covered[top:bottom, left:right]),
        color=_color_name(color),
        x=float(left + right) / 2 / scale,
        y=float(top + bottom) / 2 / scale,
        half_size=float(max(right - left, bottom - top)) / 2 / scale,
    )


def detect_scene(image: Any) -> DetectedScene:
    """Return the scene in an RGB image: a PIL image or a uint8 array (H, W, 3), square, with a side of at least 64.

    Raises InputError for anything else.
    """
    pixels = np.asarray(image)
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8 or len({*pixels.shape[:2]}) != 1:
        raise InputError(f"Expected a square uint8 image (H, W, 3), got {pixels.dtype} {pixels.shape}")
    pixels = pixels.astype(np.float32)
    scale = pixels.shape[0] / SIDE
    frame = max(1, round(scale))
    inside = np.zeros(pixels.shape[:2], bool)
    inside[frame:-frame, frame:-frame] = True
    background = np.median(pixels[~inside], axis=0)
    foreground = np.linalg.norm(pixels - background, axis=-1) > FOREGROUND
    components = [c for c in _components(foreground) if c.sum() >= MIN_AREA * scale**2]
    components.sort(key=np.count_nonzero, reverse=True)
    items = tuple(_detect_item(pixels, c, background, scale) for c in components)
    return DetectedScene(_color_name(background), items)


def _item_mismatch(item: Item, detected: DetectedItem) -> str | None:
    if (detected.color, detected.shape) != (item.color, item.shape):
        color, shape = detected.color or "no known color", detected.shape or "no shape"
        return f"{item.color} {item.shape} generated as {color} {shape}"
    if item.size and item.size != ("small" if detected.half_size < SMALL_BELOW else "large"):
        return f"the {item.color} {item.shape} is not {item.size} (half size {detected.half_size:.0f} px)"
    return None


def _position_mismatch(scene: Scene, detected: Sequence[DetectedItem]) -> str | None:
    if scene.position is None:
        return None
    if len(detected) == 1:
        x, y = POSITIONS[scene.position][1]
        matched = abs(detected[0].x - x) <= POSITION_TOLERANCE and abs(detected[0].y - y) <= POSITION_TOLERANCE
    else:
        dx, dy = RELATIONS[scene.position]
        along = (detected[0].x - detected[1].x) * dx + (detected[0].y - detected[1].y) * dy
        across = abs((detected[0].x - detected[1].x) * dy) + abs((detected[0].y - detected[1].y) * dx)
        matched = along > across
    return None if matched else f"not {scene.position}: at " + ", ".join(f"({f.x:.0f}, {f.y:.0f})" for f in detected)


def mismatch(prompt: str, image: Any) -> str | None:
    """Return why the image does not match the prompt, or None. Raises InputError for prompts that `parse` cannot read.

    An image matches if the background, the number of objects, the color and shape of each object, and every size and
    position that the prompt states are correct.
    """
    scene, detected = parse(prompt), detect_scene(image)
    if detected.background != scene.background:
        return f"background {detected.background or 'of no known color'}"
    if len(detected.items) != len(scene.items):
        return f"{len(detected.items)} objects"
    reasons = []
    for order in permutations(detected.items):
        mismatches = [_item_mismatch(item, other) for item, other in zip(scene.items, order, strict=True)]
        reason = "; ".join(filter(None, mismatches)) or _position_mismatch(scene, order)
        if reason is None:
            return None
        reasons.append(reason)
    return min(reasons, key=len)


def matches(prompt: str, image: Any) -> bool:
    """Return whether the image matches the prompt (see `mismatch`)."""
    return mismatch(prompt, image) is None


def score(prompts: Iterable[str], images: Iterable[Any]) -> Fidelity:
    """Return the fidelity of one image per prompt. Raises InputError for no prompts, ValueError for unequal counts."""
    reasons = [(prompt, mismatch(prompt, image)) for prompt, image in zip(prompts, images, strict=True)]
    if not reasons:
        raise InputError("There are no prompts to score: pass at least one.")
    failures = tuple((prompt, reason) for prompt, reason in reasons if reason is not None)
    return Fidelity(len(reasons) - len(failures), len(reasons), failures)
