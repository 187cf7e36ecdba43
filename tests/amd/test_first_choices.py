"""First choices of tiles on AMD cards: results of the library on a simulated card, and the roofline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hip_library import hip_library

from scripts.amd import first_choices
from scripts.amd.expected import CARDS
from sd_ort.core.files import read_json

REPORT = read_json(first_choices.OUT)
TITLES = {card.target: title for title, card in CARDS.items()}


def check(card: dict[str, Any]) -> None:
    """Assert bounds of the roofline on a card's first choices."""
    multiprocessors = card["multiprocessors"]
    assert min(card["resident_blocks"].values()) >= 2  # else a second block would wait and hide no latency
    calls = card["convolutions"].values()
    for call in calls:
        assert call["splits"] == 1 or call["blocks"] * call["splits"] <= 2 * multiprocessors
        assert call["first_us"] <= 1.6 * call["best_us"]
    assert sum(call["first_us"] for call in calls) <= 1.05 * sum(call["best_us"] for call in calls)
    for call in card["attentions"].values():
        large = call["choice"] == "large_tiles"
        assert large == ((call["blocks"] if large else call["blocks"] // 2) >= 3 * multiprocessors)
        assert not large or call["busy"] >= 0.75


@pytest.mark.parametrize("target", ["gfx1151", "gfx1100", "gfx942"])  # 20, 48 and 304 multiprocessors
def test_first_choices_fill_the_card(target: str, tmp_path: Path) -> None:
    answer = first_choices.ask_on_simulated_card(hip_library(), target, tmp_path)
    card = first_choices.of_card(CARDS[TITLES[target]], answer)
    check(card)
    assert card == REPORT["cards"][TITLES[target]]  # the page is current


def test_the_page_is_that_of_the_choices() -> None:
    assert first_choices.OUT.with_suffix(".md").read_text() == first_choices.page(REPORT)
    assert {card["target"] for card in REPORT["cards"].values()} == {card.target for card in CARDS.values()} - {
        "gfx908"
    }
    for card in REPORT["cards"].values():
        check(card)


def test_splits_cost_sums_and_save_rounds() -> None:
    """20 blocks on 40 multiprocessors: two splits halve the operations' time, four only add sums."""
    (case,) = (case for case in first_choices.cases("nhwc_conv") if case.name.startswith("2x8x8x1280"))
    call = first_choices.Convolution(case)
    one, two, four = (call.microseconds(splits, first_choices.Card("gfx0", 10, 1e9), 40) for splits in (1, 2, 4))
    operations_of_block = 2 * call.elements * call.depth / 20
    assert (call.blocks, one) == (20, pytest.approx(operations_of_block / (10e6 / 40)))
    assert two == pytest.approx(one / 2)
    assert four == pytest.approx(two)
    sums = 2 * 4 * 2 * call.elements / 512e3
    assert call.microseconds(2, first_choices.Card("gfx0", 10, 512), 40) == pytest.approx(two + sums)
