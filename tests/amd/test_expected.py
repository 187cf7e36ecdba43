"""results/amd/expected.json: expected times, and the comparison of measured ones with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.amd import expected
from sd_ort.core.files import read_json, write_json

REPORT = read_json(expected.EXPECTED)
STEP = REPORT["calls"]["SD 1.5, a step with guidance at 512²"]
CARD = "Radeon RX 7900 XTX"


def test_the_page_is_that_of_the_numbers() -> None:
    assert expected.EXPECTED.with_suffix(".md").read_text() == expected.page(REPORT)
    assert {title: card["target"] for title, card in REPORT["cards"].items()} == {
        title: card.target for title, card in expected.CARDS.items()
    }


def test_a_roofline_is_the_larger_of_operations_and_bytes() -> None:
    card = expected.Card("gfx0", tflops=1, gbs=1)
    layers = [expected.Layer(operations=2e9, bytes=1e6), expected.Layer(operations=1e9, bytes=5e6)]
    assert expected.roofline_ms(layers, card) == pytest.approx(2 + 5)


def measured(folder: Path, ms: float) -> Path:
    """A folder as first_numbers writes it, with the U-Net alone."""
    rows = [
        {"stage": "export", "status": "ok", "batch": 1, "label": "raw ONNX", "step_ms": {"median": 9000.0}},
        {"stage": "optimize", "status": "ok", "batch": 1, "label": "fused fp16", "step_ms": {"median": ms}},
        {"stage": "optimize", "status": "failed", "batch": 1, "label": "fused fp16"},
    ]
    (folder / "sd15_unet").mkdir()
    write_json(folder / "sd15_unet/benchmark.json", {"engines": rows})
    return folder


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [
        (0.3, "less than the work takes, which points at a fault."),
        (1.9, "as expected."),
        (2.1, "more than twice that, which points at a fault."),
    ],
)
def test_a_measured_time_is_judged(tmp_path: Path, factor: float, verdict: str) -> None:
    ms = factor * STEP["expected_ms"][CARD]
    lines = expected.compare(measured(tmp_path, ms), "gfx1100").splitlines()
    assert lines == [
        f"SD 1.5, a step with guidance at 512², fused fp16: {ms:.1f} ms; expected of a {CARD} "
        f"{STEP['expected_ms'][CARD]:.1f} ms, at least {STEP['roofline_ms'][CARD]:.1f} ms: {verdict}",
        "SD 1.5, VAE decoder, 512²: not measured.",
    ]


def test_a_target_without_an_expected_time_is_named(tmp_path: Path) -> None:
    message = expected.compare(measured(tmp_path, 1.0), "gfx1102")
    assert (
        message
        == "No time is expected of gfx1102, only of gfx1030, gfx1100, gfx1151, gfx1201, gfx908, gfx90a, gfx942, gfx950."
    )


def test_first_numbers_takes_ten_minutes(tmp_path: Path) -> None:
    """The promise of scripts/amd/README.md, counted; a run is compared with it."""
    seconds = {title: sum(parts.values()) for title, parts in REPORT["first_numbers"].items()}
    assert seconds.keys() == expected.CARDS.keys()
    assert 300 < min(seconds.values()) <= max(seconds.values()) < 600
    assert REPORT["first_numbers"][CARD] == expected.first_numbers(REPORT["calls"], CARD)
    line = expected.compare(measured(tmp_path, 1.0), "gfx1100", 712.4).splitlines()[-1]
    assert line == f"first_numbers: 712 s; expected with eight cores and a {CARD} {seconds[CARD]:.0f} s."
