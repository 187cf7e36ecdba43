"""Every fusion over its cases: how often it fires, which nodes are left, the numbers before and after, the reasons."""

from __future__ import annotations

import zlib
from collections import Counter
from types import ModuleType

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import fusion_passes
from fusion_passes import DOMAIN
from fusion_passes.lower import winograd_conv
from fusion_passes.operators import bodies
from fusion_passes.pass_ import Case
from fusion_passes.rule import apply, refusals

LOWERINGS: tuple[ModuleType, ...] = (winograd_conv,)  # a target's own
MODULES: tuple[ModuleType, ...] = (*fusion_passes.CANONICAL, *fusion_passes.FUSIONS, *LOWERINGS)
ALL = [(module, case) for module in MODULES for case in module.CASES]
IDS = [f"{module.__name__.rpartition('.')[2]}: {case.name}" for module, case in ALL]


def build(case: Case) -> onnx.ModelProto:
    """The case's graph, with a random weight (non-zero, distinct) for every declared value that no node makes."""
    model = onnx.parser.parse_model(case.graph)
    graph = model.graph
    made = {name for node in graph.node for name in node.output} | {t.name for t in graph.initializer}
    for info in list(graph.value_info):
        if info.name in made:
            continue
        shape = [d.dim_value for d in info.type.tensor_type.shape.dim]
        random = np.random.default_rng(zlib.crc32(info.name.encode()))
        graph.initializer.append(
            onnx.numpy_helper.from_array(random.normal(0.5, 1, shape).astype(np.float32), info.name)
        )
        graph.value_info.remove(info)
    return model


def feeds(model: onnx.ModelProto, case: Case) -> dict[str, np.ndarray]:
    """Random inputs at the case's sizes."""
    random = np.random.default_rng(0)
    values = {}
    for info in model.graph.input:
        shape = [case.sizes[d.dim_param] if d.dim_param else d.dim_value for d in info.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        values[info.name] = (
            random.random(shape) < 0.7 if dtype == np.bool_ else random.normal(0, 1, shape).astype(dtype)
        )
    return values


def run(model: onnx.ModelProto, values: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, values)


@pytest.mark.parametrize(("module", "case"), ALL, ids=IDS)
def test_case(module: ModuleType, case: Case) -> None:
    source = build(case)
    values = feeds(source, case)
    expected = run(source, values)

    model = ir.from_proto(source)
    counts = fusion_passes.canonicalize(model)
    if module in fusion_passes.FUSIONS:
        counts += fusion_passes.fuse(model)
    name = module.__name__.rpartition(".")[2]
    if module in LOWERINGS:
        counts[name] = apply(model, module.RULES)
    assert counts[name] == case.fires, dict(counts)
    nodes = Counter(node.op_type for node in model.graph)
    assert {op: nodes[op] for op in case.ops} == case.ops

    if case.refused is not None:
        reasons = [reason for _, _, reason in refusals(model, module.RULES)]
        assert any(case.refused in reason for reason in reasons), reasons
    bodies.attach(model, [node for node in model.graph if node.domain == DOMAIN])
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    for got, want in zip(run(proto, values), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_every_fusion_has_cases_that_must_not_fuse(module: ModuleType) -> None:
    assert any(case.fires for case in module.CASES)
    assert any(not case.fires for case in module.CASES)
