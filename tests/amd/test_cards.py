"""results/amd/cards.md: the table of AMD's cards."""

from __future__ import annotations

from pathlib import Path

from custom_ops.amd_targets import TARGETS
from scripts.amd import cards


def test_the_table_is_current() -> None:
    """What scripts/amd/cards.py writes now."""
    assert (Path(cards.ROOT) / "results/amd/cards.md").read_text() == cards.page()


def test_every_exact_target_has_cards() -> None:
    exact = {target for target in TARGETS if not target.endswith("-generic")}
    assert exact - cards.CARDS.keys() == {"gfx1153"}
    assert cards.CARDS.keys() <= exact
