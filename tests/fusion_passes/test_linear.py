"""Time is linear in the nodes of a graph: calls are counted, since seconds are noise on a busy machine."""

from __future__ import annotations

import cProfile
import pstats

import onnx_ir as ir
import pytest
from large_graphs import BLOCK, LINK, blocks

import fusion_passes
from fusion_passes.pass_ import run_all
from sd_ort.optimize.targets import CUDA


def calls(text: str, times: int) -> int:
    """Python calls that it takes to optimize a graph of so many blocks."""
    model = ir.from_proto(blocks(text, times))
    profile = cProfile.Profile()
    profile.enable()
    fusion_passes.canonicalize(model)
    fusion_passes.fuse(model)
    run_all(model, CUDA.passes)
    profile.disable()
    return int(pstats.Stats(profile).total_calls)


@pytest.mark.parametrize(("block", "times"), [(BLOCK, 8), (LINK, 100)], ids=["blocks", "chain"])
def test_work_grows_with_the_nodes_and_no_faster(block: str, times: int) -> None:
    assert calls(block, 4 * times) < 4.4 * calls(block, times)
