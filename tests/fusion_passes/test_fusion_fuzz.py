"""Random graphs of scripts/fixtures/random_graphs.py have equal outputs before and after fusion."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir
import pytest

from fusion_passes.canonicalize import canonicalize
from fusion_passes.fuse import fuse
from fusion_passes.graph_pass import totals
from scripts.fixtures.random_graphs import Graph, Mixed, difference

SEEDS = range(8)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", [Graph, Mixed])
def test_outputs_are_equal(kind: type[Graph], seed: int) -> None:
    assert difference(kind(seed)) is None


def test_the_graphs_match_the_fusions() -> None:
    counts: Counter[str] = Counter()
    for seed in SEEDS:
        model = ir.from_proto((Graph, Mixed)[seed % 2](seed).build())
        counts.update(totals(canonicalize(model), fuse(model)))
    for name in ("multi_head_attention", "group_norm", "bias_split_gelu", "bias_add", "skip_layer_normalization"):
        assert counts[name] > 1, counts
