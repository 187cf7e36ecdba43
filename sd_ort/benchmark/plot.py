"""Plots as inline SVG: horizontal bars with their spread, stacked bars, and lines. The text has the page's color."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

LABELS, BARS, NUMBERS, ROW, FONT = 270, 430, 240, 24, 13  # px
WIDTH = LABELS + BARS + NUMBERS


@dataclass(frozen=True)
class Bar:
    """One bar: length `value`, spread from `low` to `high` (None: no spread), and the text behind it."""

    label: str
    value: float
    text: str
    color: str
    low: float | None = None
    high: float | None = None


def bars(rows: Sequence[Bar]) -> Markup:
    """Return horizontal bars from zero; the longest, including its spread, has the width of the plot."""
    scale = BARS / (max((max(row.value, row.high or 0) for row in rows), default=0) or 1)
    parts: list[Markup] = []
    for i, row in enumerate(rows):
        top, middle = i * ROW + 3, i * ROW + ROW / 2
        end = length = scale * row.value
        parts += [
            _text(LABELS - 8, middle + 4, row.label, "end"),
            Markup('<rect x="{}" y="{}" width="{:.1f}" height="{}" rx="2" fill="{}"/>').format(
                LABELS, top, length, ROW - 6, row.color
            ),
        ]
        if row.low is not None and row.high is not None and row.high > row.low:
            end = scale * row.high
            path = Markup('<path d="M{:.1f} {}H{:.1f}" stroke="currentColor"/>')
            parts.append(path.format(LABELS + scale * row.low, middle, LABELS + end))
        parts.append(_text(LABELS + max(length, end) + 6, middle + 4, row.text))
    return _svg(max(1, len(rows)) * ROW, parts)


@dataclass(frozen=True)
class Segment:
    """One part of a stacked bar: its name in the legend, and its length. A gap has no name."""

    name: str
    value: float
    color: str


def stacked_bars(rows: Sequence[tuple[str, tuple[Segment, ...]]]) -> Markup:
    """Return horizontal bars of segments in ms, each row with its label and sum, and a legend below."""
    scale = BARS / (max((sum(part.value for part in segments) for _, segments in rows), default=0) or 1)
    parts: list[Markup] = []
    for i, (label, segments) in enumerate(rows):
        end = float(LABELS)
        parts.append(_text(LABELS - 8, i * ROW + ROW / 2 + 4, label, "end"))
        for segment in segments:
            if segment.name:
                parts.append(_rectangle(end, i * ROW + 3, scale * segment.value, segment.color, segment))
            end += scale * segment.value
        total = sum(segment.value for segment in segments)
        parts.append(_text(end + 6, i * ROW + ROW / 2 + 4, f"{total:.3g} ms"))
    legend = {segment.name: segment.color for _, segments in rows for segment in segments if segment.name}
    columns = 4
    for i, (name, color) in enumerate(legend.items()):
        x, y = LABELS + i % columns * 150, (len(rows) + i // columns) * ROW + 3
        parts += [_rectangle(x, y, ROW - 6, color), _text(x + ROW, y + 13, name)]
    return _svg((len(rows) + -(-len(legend) // columns)) * ROW, parts)


def _rectangle(x: float, y: float, width: float, color: str, segment: Segment | None = None) -> Markup:
    title = Markup("<title>{}: {:.3g}</title>").format(segment.name, segment.value) if segment else ""
    return Markup('<rect x="{:.1f}" y="{}" width="{:.1f}" height="{}" fill="{}">{}</rect>').format(
        x, y, width, ROW - 6, color, title
    )


@dataclass(frozen=True)
class Line:
    """One line through the points (x, y), in order of x."""

    label: str
    points: tuple[tuple[float, float], ...]
    color: str


def lines(rows: Sequence[Line], x_title: str, y_title: str, height: int = 260) -> Markup:
    """Return lines over a logarithmic x axis with a tick at every x, and y from zero; labels are at the right end."""
    ticks = sorted({x for row in rows for x, _ in row.points})
    top = max((y for row in rows for _, y in row.points), default=0) or 1
    step = _round_step(top / 4)
    left, right, bottom = 60, WIDTH - 260, height - 40
    span = math.log(ticks[-1] / ticks[0]) or 1

    def position(x: float, y: float) -> tuple[float, float]:
        return left + (right - left) * math.log(x / ticks[0]) / span, bottom - (bottom - 12) * y / top

    parts: list[Markup] = []
    for i in range(int(top / step) + 1):
        y = position(ticks[0], i * step)[1]
        parts.append(Markup('<path d="M{} {:.1f}H{}" stroke="currentColor" opacity=".15"/>').format(left, y, right))
        parts.append(_text(left - 6, y + 4, f"{i * step:g}", "end"))
    parts += [_text(position(x, 0)[0], bottom + 18, f"{x:g}", "middle") for x in ticks]
    parts += [_text((left + right) / 2, height - 4, x_title, "middle"), _text(left - 44, 10, y_title)]
    label_y = 12.0  # labels must not overlap: each is at least 15 px below the one before
    for row in sorted(rows, key=lambda row: -row.points[-1][1]):
        points = [position(x, y) for x, y in row.points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(Markup('<path d="M{}" fill="none" stroke="{}" stroke-width="2"/>').format(path, row.color))
        circle = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="3" fill="{}"/>')
        parts += [circle.format(x, y, row.color) for x, y in points]
        x, y = points[-1]
        label_y = max(label_y, y + 4)
        parts.append(_text(right + 34, label_y, row.label))
        leader = f"M{x + 5:.1f} {y:.1f}L{right + 30} {label_y - 4:.1f}"
        parts.append(Markup('<path d="{}" stroke="{}" opacity=".5"/>').format(leader, row.color))
        label_y += 15
    return _svg(int(max(height, label_y)), parts)


def _round_step(value: float) -> float:
    """Return the next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= value)


def _text(x: float, y: float, text: str, anchor: str = "start") -> Markup:
    return Markup('<text x="{:.0f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, text)


def _svg(height: int, parts: Sequence[Markup]) -> Markup:
    head = Markup(
        '<svg viewBox="0 0 {0} {1}" width="{0}" height="{1}" xmlns="http://www.w3.org/2000/svg" '
        'font-size="{2}" fill="currentColor" font-family="inherit">'
    )
    return head.format(WIDTH, height, FONT) + Markup("").join(parts) + Markup("</svg>")
