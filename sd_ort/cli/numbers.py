"""Types of numeric options: finite, and within limits that a machine can take."""

from __future__ import annotations

import math
from typing import Any

import click


class Number(click.FloatRange):
    """A finite number within a range."""

    name = "number"

    def _describe_range(self) -> str:
        return "" if self.min is None and self.max is None else super()._describe_range()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


THREADS = click.IntRange(1, 1024)
REPLICAS = click.IntRange(1, 64)
PIXELS = click.IntRange(1, 16_384)
GUIDANCE = Number(-1000, 1000)
