"""The ablation: steps are slices of the target's passes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from fusion_passes.graph_pass import Pass, PassOutcome
from scripts.fixtures import graph_fixtures
from sd_ort.benchmark import engine_selection
from sd_ort.benchmark.engine_builds import ABLATION, ablation_steps
from sd_ort.core.pipeline_folder import MODEL
from sd_ort.optimize.optimizer import optimize_component
from sd_ort.optimize.targets import TARGETS


def test_nothing_fused_switches_off_what_the_ablation_does_not_know() -> None:
    """Not by name: a fusion and a lowering made up here run in the whole target, and in no step before the last."""
    fusion, lowering = (Pass(name, lambda model: PassOutcome()) for name in ("made_up_fusion", "made_up_lowering"))
    target = TARGETS["cuda"]
    grown = replace(target, fusions=(fusion, *target.fusions), lowering_passes=(*target.lowering_passes, lowering))
    *steps, last = ablation_steps(grown).values()
    assert steps[0].fusions == ()
    assert not any(fusion in step.fusions or lowering in step.lowering_passes for step in steps)
    assert fusion in last.fusions


def test_ablation_adds_one_thing_a_row(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_selection, "library_path", lambda: Path("libsd_ort_ops.so"))
    rows, _ = engine_selection.ablation(raw, "cuda")
    labels = ["raw fp32", "raw fp16", *(step.label for step in ABLATION.values() if step.label != "nothing fused")]
    assert [row.label for row in rows] == [*labels, "ours: + op library", "+ hoisting", "+ graph capture"]
    assert [row.library for row in rows] == [False] * len(labels) + [True] * 3
    assert [row.graph for row in rows] == [False] * (len(labels) + 2) + [True]
    steps = list(ablation_steps(TARGETS["cuda"]).values())
    assert steps[-1].fusions == TARGETS["cuda"].fusions
    assert set(steps[-1].lowering_passes) < set(TARGETS["cuda"].lowering_passes)
    for before, after in pairwise(steps):
        assert set(before.fusions) <= set(after.fusions)
        assert {each.name for each in before.lowering_passes} - {"inline_fused_ops"} <= {
            each.name for each in after.lowering_passes
        }
    assert [any(each.name == "nhwc_layout" for each in step.lowering_passes) for step in steps] == [False] * 2 + [
        True
    ] * 6

    monkeypatch.setattr(engine_selection, "library_path", lambda: None)
    rows, notes = engine_selection.ablation(raw, "cpu")
    assert rows[-1].label == "+ hoisting"
    assert [row.build_spec for row in rows[:3]] == [(), ("raw", "float16"), ("ours", "cpu", "float32", "mha")]
    assert not any(row.graph for row in rows)
    assert all(any(f"no row for {what}" in note for note in notes) for what in ("graph capture", "the op library"))


def test_every_step_of_the_ablation_adds_its_operator(tmp_path: Path) -> None:
    name = "sd15-tiny-dynamo-20.unet"
    source = graph_fixtures.make_folder(tmp_path / "raw", name) / "unet" / MODEL
    steps = ablation_steps(TARGETS["cuda"])
    counts = {
        step: optimize_component(source, tmp_path / step / "unet" / MODEL, steps[step])["op_counts"]
        for step in ("none", "mha", "norm", "skip")
    }
    fused = ("MultiHeadAttention", "NhwcConv", "GroupNorm", "BiasSplitGelu", "BiasAdd", "SkipGroupNorm")
    operators = {step: tuple(count.get(op, 0) for op in fused) for step, count in counts.items()}
    assert operators == {
        "none": (0, 0, 0, 0, 0, 0),
        "mha": (32, 0, 0, 0, 0, 0),
        "norm": (32, 98, 61, 0, 0, 0),
        "skip": (32, 98, 61, 16, 16, 0),
    }
