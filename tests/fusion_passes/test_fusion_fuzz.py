"""Random graphs of scripts/fixtures/random_graphs.py: fused or not, the numbers stay (fuzz_fusions.py: more)."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir
import pytest
from random_graphs import Graph, Mixed, difference

import fusion_passes
from fusion_passes.pass_ import totals

SEEDS = range(8)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", [Graph, Mixed])
def test_numbers_stay(kind: type[Graph], seed: int) -> None:
    assert difference(kind(seed)) is None


def test_the_graphs_have_what_fusions_look_for() -> None:
    found: Counter[str] = Counter()
    for seed in SEEDS:
        model = ir.from_proto((Graph, Mixed)[seed % 2](seed).build())
        found.update(totals(fusion_passes.canonicalize(model), fusion_passes.fuse(model)))
    for name in ("multi_head_attention", "group_norm", "bias_split_gelu", "bias_add", "skip_layer_normalization"):
        assert found[name] > 1, found
