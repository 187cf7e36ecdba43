"""Blocks of a report's sections, table rows, and the colors of engines and operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

OURS, TORCH, OTHER, RAW = "#d9480f", "#4263eb", "#868e96", "#ced4da"
# Segments of a bar, from the longest on; others are gray.
KERNEL_COLORS = ("#4263eb", "#1098ad", "#d9480f", "#74b816", "#37b24d", "#f59f00", "#ae3ec9")


@dataclass(frozen=True)
class TableRow:
    """Cells of a table row, and why the engine failed, in place of the others."""

    cells: Sequence[object]
    failure: str = ""


@dataclass(frozen=True)
class Block:
    """A block of a section: title, note, plot, table, images (label, PNG in base64), in this order.

    link: file of a trace beside the page. is_aside: whether the note is in small print.
    """

    title: str = ""
    note: str = ""
    plot: Markup | None = None
    columns: Sequence[str] = ()
    rows: Sequence[TableRow] = ()
    images: Sequence[tuple[str, str]] = ()
    link: str = ""
    is_aside: bool = False
