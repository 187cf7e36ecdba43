"""Time is linear in the nodes of a graph: calls are counted, since seconds are noise on a busy machine."""

from __future__ import annotations

import cProfile
import pstats

import onnx
import onnx_ir as ir
import pytest

import fusion_passes
from fusion_passes.pass_ import run_all
from sd_ort.optimize.targets import CUDA

BLOCK = """
    c{i} = Conv <pads = [1, 1, 1, 1]> (x{i}, k, b)
    r{i} = Reshape (c{i}, split)  n{i} = InstanceNormalization (r{i}, ones, zeros)
    s{i} = Shape (c{i})  g{i} = Reshape (n{i}, s{i})  m{i} = Mul (g{i}, w)  a{i} = Add (m{i}, v)
    d{i} = Sigmoid (a{i})  e{i} = Mul (a{i}, d{i})  x{j} = Add (e{i}, x{i})
"""
LINK = "x{j} = Tanh (x{i})"


def calls(text: str, times: int) -> int:
    """Python calls that it takes to optimize a graph of so many blocks."""
    lines = "\n".join(text.format(i=i, j=i + 1) for i in range(times))
    model = ir.from_proto(
        onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 20]>
        g (float[B,8,H,W] x0) => (float[B,8,H,W] x{times})
        <float[8,8,3,3] k = {{{", ".join(["0.1"] * 576)}}}, float[8] b = {{1, 2, 3, 4, 5, 6, 7, 8}},
         int64[3] split = {{0, 2, -1}}, float[2] ones = {{1, 1}}, float[2] zeros = {{0, 0}},
         float[8,1,1] w = {{1, 2, 3, 4, 5, 6, 7, 8}}, float[8,1,1] v = {{8, 7, 6, 5, 4, 3, 2, 1}}> {{ {lines} }}""")
    )
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
