"""What the GPU targets do to a whole U-Net, its numbers by the operators' function bodies."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from fusion_passes import DOMAIN
from scripts.fixtures import graph_fixtures
from sd_ort.core.metrics import relative_l2_error
from sd_ort.optimize import calibration
from sd_ort.optimize.optimizer import lower_operators, optimize_component
from sd_ort.optimize.targets import TARGETS, Target
from sd_ort.optimize.unoptimized import UnoptimizedComponent

# Every pass, and every fused operator by its body: what a CPU can run.
BODIES = replace(TARGETS["gpu"], contrib_constraints={})


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_passes_come_after_those_that_they_build_on(target: Target) -> None:
    names = [each.name for each in target.lowering_passes]
    assert len(set(names)) == len(names)
    for index, each in enumerate(target.lowering_passes):
        assert not {before.name for before in each.runs_after} & set(names[index:])


def test_unet(tmp_path: Path) -> None:
    """All of a U-Net's products, its numbers unchanged."""
    folder = graph_fixtures.make_folder(tmp_path / "raw", "sd15-tiny-dynamo-20.unet")
    raw, optimized = folder / "unet/model.onnx", tmp_path / "made/unet/model.onnx"
    entry = optimize_component(raw, optimized, BODIES)
    assert entry["rewrite_counts"]["fold_bias"] == 78
    assert entry["rewrite_counts"]["linear_split_gelu"] == 16
    assert entry["rewrite_counts"]["linear_add"] == 142
    assert entry["rewrite_counts"]["layer_norm"] == 16
    assert entry["rewrite_counts"]["upsample_nearest"] == entry["rewrite_counts"]["subpixel_conv"] == 3
    nodes = Counter(node.op_type for node in onnx.load(optimized, load_external_data=False).graph.node)
    there = {"NhwcConv": 52, "LinearAdd": 142, "LinearSplitGelu": 16, "BiasAdd": 1}
    gone = {"BiasSplitGelu": 0, "MatMul": 0, "LayerNormalization": 0, "Resize": 0}
    assert {op: nodes[op] for op in there | gone} == there | gone
    random = np.random.default_rng(0)
    shapes = {info.name: info.type.tensor_type.shape.dim for info in onnx.load(raw).graph.input}
    sizes = {"batch": 1, "height": 16, "width": 8, "sequence": 5}
    feed = {
        name: random.normal(0, 1, [sizes.get(d.dim_param, d.dim_value) for d in dims]).astype(np.float32)
        for name, dims in shapes.items()
    }
    feed["timestep"] = np.full(feed["timestep"].shape, 500, np.float32)
    before, after = (
        ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feed)[0] for path in (raw, optimized)
    )
    assert relative_l2_error(after, before) < 1e-5


def test_what_a_kernel_writes_on_the_way_is_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that float16 cannot hold keeps a GEGLU layer in float32, though its bias makes it small again."""
    model = ir.from_onnx_text(f"""<ir_version: 10, opset_import: ["" : 21, "{DOMAIN}" : 1]>
        f (float[1,S,1] x) => (float[1,S,1] y) <float[1,2] w = {{80000, 1}}, float[2] b = {{-80000, 0}}> {{
        y = {DOMAIN}.LinearSplitGelu (x, w, b) }}""")
    feed = {"x": np.ones((1, 3, 1), np.float32)}
    monkeypatch.setattr(calibration, "load_recorded_inputs", lambda *_: [feed])
    assert calibration.measure(model, [feed], tmp_path) == {"y": 0, "y.inside": 80000}
    calibrated = calibration.calibrate(model, cast(UnoptimizedComponent, SimpleNamespace(name="unet")), tmp_path)
    assert calibrated.nodes == set(model.graph)
    assert [(site["op"], site["max_abs"]) for site in calibrated.sites] == [("LinearSplitGelu", 80000)]


@pytest.mark.parametrize(("query", "heads", "domain"), [
    ("N,S,320", 8, "com.microsoft"), ("N,S,512", 1, DOMAIN), ("N,S,2,3,512", 2, DOMAIN), ("N,S,K", 1, "com.microsoft"),
])  # fmt: skip
def test_wide_heads_are_ours_on_cuda(query: str, heads: int, domain: str) -> None:
    """The provider's kernel takes them, slowly; of a head of unknown size nothing is known against it."""
    attributes = f"num_heads = {heads}, scale = 0.1"
    text = f"""<ir_version: 10, opset_import: ["" : 21, "{DOMAIN}" : 1]>
        f (float[{query}] q, float[{query}] k) => (float[N,S,L] z) {{
        z = {DOMAIN}.MultiHeadAttention <{attributes}> (q, k, k) }}"""
    model = ir.from_onnx_text(text)
    lower_operators(model, TARGETS["cuda"])
    assert [node.domain for node in model.graph] == [domain]
