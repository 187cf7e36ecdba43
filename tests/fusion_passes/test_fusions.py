"""Every pass over its cases: number of rewrites, node counts, reject reasons, outputs before and after."""

from __future__ import annotations

import json
import zlib
from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import fusion_passes
from fusion_passes.canonicalize import CANONICAL, canonicalize
from fusion_passes.fuse import FUSIONS as COMMON_FUSIONS
from fusion_passes.fuse import TRANSFORMER_FUSIONS, fuse
from fusion_passes.graph_pass import Pass, PassCase, PassOutcome, run_all
from fusion_passes.operators import function_bodies
from sd_ort.inspect.rejection_reasons import near_misses
from sd_ort.optimize.targets import TARGETS

FUSIONS = (*COMMON_FUSIONS, *TRANSFORMER_FUSIONS)
LOWERINGS = tuple(
    {
        each.name: each for target in TARGETS.values() for each in (*target.lowering_passes, *target.bfloat16_passes)
    }.values()
)
PASSES = (*CANONICAL, *FUSIONS, *LOWERINGS)
ALL = [(each, case) for each in PASSES for case in each.cases]
IDS = [f"{each.name}: {case.name}" for each, case in ALL]


def build(case: PassCase) -> onnx.ModelProto:
    """Return the case's graph with a random weight (non-zero, distinct) for every declared value without a producer."""
    model = onnx.parser.parse_model(case.graph)
    graph = model.graph
    defined = {name for node in graph.node for name in node.output} | {t.name for t in graph.initializer}
    for info in list(graph.value_info):
        if info.name in defined:
            continue
        shape = [d.dim_value for d in info.type.tensor_type.shape.dim]
        random = np.random.default_rng(zlib.crc32(info.name.encode()))
        graph.initializer.append(
            onnx.numpy_helper.from_array(random.normal(0.5, 1, shape).astype(np.float32), info.name)
        )
        graph.value_info.remove(info)
    return model


def feeds(model: onnx.ModelProto, case: PassCase) -> dict[str, np.ndarray]:
    """Return random inputs at the case's sizes."""
    random = np.random.default_rng(0)
    values = {}
    for info in model.graph.input:
        shape = [case.sizes[d.dim_param] if d.dim_param else d.dim_value for d in info.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        values[info.name] = (
            random.random(shape) < 0.7 if dtype == np.bool_ else random.normal(0, 1, shape).astype(dtype)
        )
    return values


def run(model: ir.Model, values: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return the outputs. Fused nodes run as function bodies, which are attached."""
    function_bodies.attach(model, [node for node in model.graph if node.domain == fusion_passes.DOMAIN])
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, values)


def graph_of(model: ir.Model) -> str:
    """Return the model as text, to detect any change by a pass."""
    return str(ir.to_proto(model))


def run_pass(each: Pass, model: ir.Model) -> tuple[PassOutcome, str, str]:
    """Return (outcome of the pass, the graph before it, the graph after it)."""
    if each in CANONICAL:
        outcome = canonicalize(model).get(each.name, PassOutcome())
        before = graph_of(model)
        each.run(model)
        return outcome, before, graph_of(model)
    canonicalize(model)
    if each in FUSIONS:
        index = FUSIONS.index(each)
        run_all(model, FUSIONS[:index])
        before = graph_of(model)
        outcome, after = each.run(model), graph_of(model)
        run_all(model, FUSIONS[index + 1 :])
        return outcome, before, after
    fuse(model)
    run_all(model, each.runs_after)
    before = graph_of(model)
    return each.run(model), before, graph_of(model)


@pytest.mark.parametrize(("each", "case"), ALL, ids=IDS)
def test_case(each: Pass, case: PassCase) -> None:
    source = build(case)
    values = feeds(source, case)
    model = ir.from_proto(source)
    outcome, before, after = run_pass(each, model)
    assert outcome.counts.total() == case.rewrites, outcome
    nodes = Counter(node.op_type for node in model.graph)
    assert {op: nodes[op] for op in case.ops} == case.ops
    if case.rejection is not None:
        assert any(case.rejection in reason for reason in outcome.reason_counts()), outcome.reason_counts()
        rejected = next(refusal for refusal in outcome.rejections if case.rejection in refusal.reason)
        shown = near_misses(rejected.node, {each.name: outcome}, each.name)
        assert case.rejection in "; ".join(entry["reason"] for entry in shown if not entry["distance"])
        assert json.loads(json.dumps(shown)) == shown
    if not case.rewrites:
        assert after == before
    for actual, expected in zip(run(model, values), run(ir.from_proto(source), values), strict=True):
        # bfloat16 has 8 bits: numbers are rounded by up to 1/512, products by twice that, and some errors cancel.
        atol = np.abs(expected).max() / 256 if each.rounds_to_bfloat16 else 1e-5
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("each", PASSES, ids=lambda each: each.name)
def test_every_pass_has_cases_without_rewrites(each: Pass) -> None:
    assert any(case.rewrites for case in each.cases)
    assert any(not case.rewrites for case in each.cases)


def test_names_are_unique() -> None:
    assert len({each.name for each in PASSES}) == len(PASSES)
