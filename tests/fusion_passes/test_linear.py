"""Optimization time is linear in the number of nodes, measured in Python calls: seconds are noise on a busy machine."""

from __future__ import annotations

import cProfile
import pstats

import onnx_ir as ir
import pytest

from fusion_passes.canonicalize import canonicalize
from fusion_passes.fuse import fuse
from fusion_passes.graph_pass import run_all
from sd_ort.optimize.targets import CUDA
from tests.support.large_graphs import BLOCK, LINK, blocks


def calls(text: str, times: int) -> int:
    """Return the number of Python calls for optimizing a graph of `times` blocks."""
    model = ir.from_proto(blocks(text, times))
    profile = cProfile.Profile()
    profile.enable()
    canonicalize(model)
    fuse(model)
    run_all(model, CUDA.lowering_passes)
    profile.disable()
    return int(pstats.Stats(profile).total_calls)


@pytest.mark.parametrize(("block", "times"), [(BLOCK, 8), (LINK, 100)], ids=["blocks", "chain"])
def test_calls_grow_linearly_with_the_nodes(block: str, times: int) -> None:
    assert calls(block, 4 * times) < 4.4 * calls(block, times)
