"""Two plots as inline SVG: horizontal bars with their spread, and lines. Text colors follow the page's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LABELS, BARS, NUMBERS, ROW, FONT = 230, 430, 190, 24, 13  # px
WIDTH = LABELS + BARS + NUMBERS


@dataclass(frozen=True)
class Bar:
    """One bar: its length, its spread from `low` to `high` (None for none), color, and what stands behind it."""

    label: str
    value: float
    text: str
    color: str
    low: float | None = None
    high: float | None = None


def bars(rows: Sequence[Bar]) -> str:
    """Horizontal bars from zero, one a row, the longest (spread included) as wide as the plot."""
    longest = max((max(row.value, row.high or 0) for row in rows), default=0) or 1
    parts = []
    for i, row in enumerate(rows):
        top, middle = i * ROW + 3, i * ROW + ROW / 2
        length = BARS * row.value / longest
        parts.append(f'<text x="{LABELS - 8}" y="{middle + 4}" text-anchor="end">{escape(row.label)}</text>')
        parts.append(
            f'<rect x="{LABELS}" y="{top}" width="{length:.1f}" height="{ROW - 6}" rx="2" fill="{row.color}"/>'
        )
        end = length
        if row.low is not None and row.high is not None and row.high > row.low:
            low, end = BARS * row.low / longest, BARS * row.high / longest
            parts.append(f'<path d="M{LABELS + low:.1f} {middle}H{LABELS + end:.1f}" stroke="currentColor"/>')
        parts.append(f'<text x="{LABELS + max(length, end) + 6:.1f}" y="{middle + 4}">{escape(row.text)}</text>')
    return _svg(WIDTH, max(1, len(rows)) * ROW, parts)


@dataclass(frozen=True)
class Line:
    """One line: its points (x, y) in order of x, and its color."""

    label: str
    points: tuple[tuple[float, float], ...]
    color: str


def lines(rows: Sequence[Line], x_title: str, y_title: str, height: int = 260) -> str:
    """Lines over a logarithmic x axis with a tick at every x there is, and y from zero; labels at the right end."""
    ticks = sorted({x for row in rows for x, _ in row.points})
    top = max((y for row in rows for _, y in row.points), default=0) or 1
    step = _round_step(top / 4)
    left, right, bottom = 60, WIDTH - 260, height - 40
    span = math.log(ticks[-1] / ticks[0]) or 1

    def at(x: float, y: float) -> tuple[float, float]:
        return left + (right - left) * math.log(x / ticks[0]) / span, bottom - (bottom - 12) * y / top

    parts = []
    for i in range(int(top / step) + 1):
        y = at(ticks[0], i * step)[1]
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="currentColor" opacity=".15"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{i * step:g}</text>')
    for x in ticks:
        parts.append(f'<text x="{at(x, 0)[0]:.1f}" y="{bottom + 18}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text x="{(left + right) / 2}" y="{height - 4}" text-anchor="middle">{escape(x_title)}</text>')
    parts.append(f'<text x="{left - 44}" y="10">{escape(y_title)}</text>')
    free = 12.0  # labels at the right, from top to bottom, never on one another
    for row in sorted(rows, key=lambda row: -row.points[-1][1]):
        points = [at(x, y) for x, y in row.points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{row.color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{row.color}"/>' for x, y in points]
        x, y = points[-1]
        free = max(free, y + 4)
        parts.append(f'<text x="{right + 34}" y="{free:.1f}">{escape(row.label)}</text>')
        parts.append(f'<path d="M{x + 5:.1f} {y:.1f}L{right + 30} {free - 4:.1f}" stroke="{row.color}" opacity=".5"/>')
        free += 15
    return _svg(WIDTH, int(max(height, free)), parts)


def _round_step(value: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= value)


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" xmlns="http://www.w3.org/2000/svg"'
    return f'{head} font-size="{FONT}" fill="currentColor" font-family="inherit">' + "".join(parts) + "</svg>"
