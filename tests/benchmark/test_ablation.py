"""The ablation: steps are slices of the target's passes."""

from __future__ import annotations

from dataclasses import replace

from fusion_passes.pass_ import Outcome, Pass
from sd_ort.benchmark.ablation import ablation_steps
from sd_ort.optimize.targets import TARGETS


def test_nothing_fused_switches_off_what_the_ablation_does_not_know() -> None:
    """Not by name: a fusion and a lowering made up here run in the whole target, and in no step before the last."""
    fusion, lowering = (Pass(name, lambda model: Outcome()) for name in ("made_up_fusion", "made_up_lowering"))
    target = TARGETS["cuda"]
    grown = replace(target, fusions=(fusion, *target.fusions), passes=(*target.passes, lowering))
    *steps, last = ablation_steps(grown).values()
    assert steps[0].fusions == ()
    assert not any(fusion in step.fusions or lowering in step.passes for step in steps)
    assert fusion in last.fusions
